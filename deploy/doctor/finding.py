"""What a check found, and how checks are run so that none hides another."""

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad it is. Only a problem keeps something from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `advice` says what to do; empty where there is nothing to do."""

    check: str
    level: Level
    message: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(check: str, message: str) -> Finding:
    """A finding of something that is as it should be."""
    return Finding(check, Level.OK, message)


def warning(check: str, message: str, advice: str) -> Finding:
    """A finding of something that works and may cost something one day."""
    return Finding(check, Level.WARNING, message, advice)


def problem(check: str, message: str, advice: str) -> Finding:
    """A finding of something that does not work."""
    return Finding(check, Level.PROBLEM, message, advice)


def examine(check: str, look: Check) -> list[Finding]:
    """Everything that a check finds. One that breaks has a problem of its own, beside what it found before."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except Exception as error:
        # Whatever it is: the other checks are worth as much without this one.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        findings.append(problem(check, f"could not be looked at: {reason}", "see whether the message tells why"))
    return findings


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
