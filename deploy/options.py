"""Command-line options made from the settings classes: flag, variable, type, default and help text."""

import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

import click

from shared.settings import ENV_PREFIX, ApiSettings, WorkerSettings, flag, variable

Command = Callable[..., Any]

LAUNCHER_ONLY = {"workers": (1, 1, "worker processes of each model")}
"""Settings of `up` that are no field of a settings class: default, lowest value, help."""


def settings_fields(*classes: type) -> list["Field[Any]"]:
    """The fields of the classes, each name once, in order."""
    by_name: dict[str, Field[Any]] = {}
    for cls in classes:
        for item in fields(cls):
            by_name.setdefault(item.name, item)
    return list(by_name.values())


def settings_options(*classes: type, leave_out: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """A decorator that gives a click command one option for each setting of the classes."""

    def decorate(command: Command) -> Command:
        for item in reversed(settings_fields(*classes)):
            if item.name not in leave_out:
                command = settings_option(item)(command)
        return command

    return decorate


def settings_option(item: "Field[Any]", **changes: Any) -> Callable[[Command], Command]:
    """The click option of one setting. The ranges are checked where the settings are made."""
    arguments: dict[str, Any] = {
        "type": click.Choice(item.metadata["choices"]) if item.metadata["choices"] else _click_type(item),
        "default": item.default,
        "envvar": variable(item.name),
        "show_default": item.default != "",
        "show_envvar": True,
        "help": item.metadata["help"],
    }
    return click.option(flag(item.name), item.name, **(arguments | changes))


def _click_type(item: "Field[Any]") -> Any:
    if item.default is MISSING:
        raise TypeError(f"the setting {item.name} has no default")
    return type(item.default)


def unknown_variables(environment: "os._Environ[str] | dict[str, str]") -> Iterator[str]:
    """The names of `TOKENMILL_…` variables that no setting reads."""
    known = {variable(item.name) for item in settings_fields(ApiSettings, WorkerSettings)}
    known |= {variable(name) for name in LAUNCHER_ONLY}
    return (name for name in sorted(environment) if name.startswith(ENV_PREFIX) and name not in known)


def as_environment(values: dict[str, Any]) -> dict[str, str]:
    """The variables that carry these settings to a child process.

    Not flags: everybody on the machine can read a command line, and the Redis URL may hold a password.
    """
    return {variable(name): str(value) for name, value in values.items()}
