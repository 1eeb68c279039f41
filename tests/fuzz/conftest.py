"""The profile of `make fuzz`."""

from fuzzing import register

register()
