"""How far tests go that make up their input: bounded and repeatable in `make test`, long and new in `make fuzz`."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from shared.errors import RequestError

FUZZ = "fuzz"
"""The profile that `make fuzz` chooses. What it draws is new each time, and what once failed is tried first."""

LONGER = 30
"""How many times as much `make fuzz` tries."""

_UNHURRIED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def register() -> None:
    """Make the profile known; it has to be before pytest looks at its options."""
    settings.register_profile(FUZZ, print_blob=True, deadline=None)


def is_long() -> bool:
    """Whether this is `make fuzz`."""
    return settings.get_current_profile_name() == FUZZ


def tries(examples: int, *, shared_fixtures: bool = False) -> settings:
    """Settings for a test that tries so many inputs, always the same, or under `make fuzz` many more."""
    checks = [*_UNHURRIED, HealthCheck.function_scoped_fixture] if shared_fixtures else _UNHURRIED
    if is_long():
        return settings(max_examples=examples * LONGER, suppress_health_check=checks)
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=checks)


def failure(call: Callable[..., Any], *arguments: Any) -> RequestError | None:
    """The error with which a call ends, if it is of a kind that it may end with."""
    try:
        call(*arguments)
    except RequestError as error:
        return error
    return None
