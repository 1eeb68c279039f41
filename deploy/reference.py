"""Writes `docs/configuration.md` from the settings classes: `python -m deploy.reference PATH`."""

import sys
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path
from typing import Any

from deploy.options import LAUNCHER_ONLY, as_written, settings_fields
from shared.settings import ApiSettings, Limits, WorkerSettings, flag, variable

HEAD = """\
# Configuration

This page is made from `shared/settings.py` by `make docs`; a test holds the two together.

Each setting is a flag and an environment variable; the flag wins. `tokenmill up` takes all of them and hands each to the processes that it concerns. A value that cannot be used ends the command with one line that names the flag and the variable, and exit status 2. A variable that begins with `TOKENMILL_` and is none of these is reported and ignored.
"""  # noqa: E501

LIMITS_INTRO = """\
`tokenmill api`. The most that a client may send or ask for in one request: [http.md](http.md#limits) says what becomes of more."""  # noqa: E501

MODEL_NOTE = """\
`tokenmill up` takes `--model` several times; the variable may hold several after spaces. `NAME=` may be left out: the model is then named after its file, folder or repository.
"""  # noqa: E501


def document() -> str:
    """The whole page."""
    limits = {item.name: item for item in settings_fields(Limits)}
    api = {item.name: item for item in settings_fields(ApiSettings) if item.name not in limits}
    worker = {item.name: item for item in settings_fields(WorkerSettings)}
    parts = [
        HEAD,
        section("Both", "`tokenmill api` and `tokenmill worker`.", [api[name] for name in api if name in worker]),
        section("Front end", "`tokenmill api`.", [api[name] for name in api if name not in worker]),
        section("Limits", LIMITS_INTRO, limits.values()),
        section("Workers", "`tokenmill worker`.", [worker[name] for name in worker if name not in api]),
        MODEL_NOTE,
        "## Launcher\n\n`tokenmill up` alone.\n",
        table(
            row(name, default, f"at least {lowest}", help_text)
            for name, (default, lowest, help_text) in LAUNCHER_ONLY.items()
        ),
    ]
    return "\n".join(parts)


def section(title: str, intro: str, items: Iterable["Field[Any]"]) -> str:
    """One heading with its table."""
    rows = (row(item.name, item.default, allowed(item), item.metadata["help"]) for item in items)
    return f"## {title}\n\n{intro}\n\n{table(rows)}"


def table(rows: Iterable[str]) -> str:
    """A Markdown table of settings."""
    return "| flag | variable | default | allowed | what it is |\n| --- | --- | --- | --- | --- |\n" + "".join(rows)


def row(name: str, default: object, range_text: str, help_text: str) -> str:
    """One setting as a line of a table."""
    shown = f"`{as_written(default)}`" if default != "" else "empty"
    return f"| `{flag(name)}` | `{variable(name)}` | {shown} | {range_text} | {help_text} |\n"


def allowed(item: "Field[Any]") -> str:
    """Which values the setting takes."""
    if item.metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in item.metadata["choices"])
    low, high = item.metadata["at_least"], item.metadata["at_most"]
    if isinstance(item.default, bool):
        return "`true`, `false`"
    if low is None:
        return "text"
    return f"{low} to {high}" if high is not None else f"at least {low}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
