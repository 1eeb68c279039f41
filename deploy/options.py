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


class Unusable(str):
    """Why the value of an option cannot be used."""


class Lenient(click.ParamType):  # type: ignore[type-arg]  # a parameter that it has from click 8.5 on
    """An option's type that gives an `Unusable` for a bad value, for which the type itself ends the command."""

    def __init__(self, strict: "click.ParamType[Any]") -> None:
        self._strict = strict
        self.name = strict.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return self._strict.get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._strict.convert(value, param, ctx)
        except click.BadParameter as error:
            return Unusable(error.message.rstrip("."))


class LenientFlag(click.types.BoolParamType):
    """The same for a setting that is on or off."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            return Unusable(error.message.rstrip("."))


def settings_options(
    *classes: type, leave_out: tuple[str, ...] = (), is_lenient: bool = False
) -> Callable[[Command], Command]:
    """A decorator that gives a click command one option for each setting of the classes.

    With `is_lenient` a value of the wrong type is given to the command as an `Unusable`.
    """

    def decorate(command: Command) -> Command:
        for item in reversed(settings_fields(*classes)):
            if item.name not in leave_out:
                changes = {"type": _lenient(_option_type(item))} if is_lenient else {}
                command = settings_option(item, **changes)(command)
        return command

    return decorate


def settings_option(item: "Field[Any]", **changes: Any) -> Callable[[Command], Command]:
    """The click option of one setting. The ranges are checked where the settings are made."""
    arguments: dict[str, Any] = {
        "type": _option_type(item),
        "default": item.default,
        "envvar": variable(item.name),
        "show_default": item.default != "",
        "show_envvar": True,
        "help": item.metadata["help"],
        "is_flag": isinstance(item.default, bool),
    }
    return click.option(flag(item.name), item.name, **(arguments | changes))


def _lenient(strict: "click.ParamType[Any]") -> "click.ParamType[Any]":
    return LenientFlag() if isinstance(strict, click.types.BoolParamType) else Lenient(strict)


def _option_type(item: "Field[Any]") -> "click.ParamType[Any]":
    if item.default is MISSING:
        raise TypeError(f"the setting {item.name} has no default")
    if item.metadata["choices"]:
        return click.Choice(item.metadata["choices"])
    return click.types.convert_type(type(item.default))


def unknown_variables(environment: "os._Environ[str] | dict[str, str]") -> Iterator[str]:
    """The names of `TOKENMILL_…` variables that no setting reads."""
    known = {variable(item.name) for item in settings_fields(ApiSettings, WorkerSettings)}
    known |= {variable(name) for name in LAUNCHER_ONLY}
    return (name for name in sorted(environment) if name.startswith(ENV_PREFIX) and name not in known)


def as_written(value: object) -> str:
    """A default as somebody would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_environment(values: dict[str, Any]) -> dict[str, str]:
    """The variables that carry these settings to a child process.

    Not flags: everybody on the machine can read a command line, and the Redis URL may hold a password.
    """
    return {variable(name): str(value) for name, value in values.items()}
