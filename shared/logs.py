"""How processes log: to stderr, a message a line, as text or as JSON.

Where a message is about a request, `extra` has its `request_id`, which JSON shows as a field; and so with every
other field of `extra`. No message holds a prompt or an answer.
"""

import logging
import sys

TEXT = "%(asctime)s %(levelname)s %(name)s [%(process)d] %(message)s"

JSON_FIELDS = {"levelname": "level", "name": "logger", "process": "pid", "message": "message"}
"""What each JSON message has beside its `time`: Python's name and ours."""

MOST_OF_AN_ERROR = 300


class OneLineFormatter(logging.Formatter):
    """Text in which no message has a second line: some quote what others have written. A traceback has its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message with its time and origin."""
        text = super().formatMessage(record)
        return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def configure(*, level: str, format: str) -> None:
    """Set the root logger up for this process and those that it forks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_formatter() if format == "json" else OneLineFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def one_line(error: BaseException) -> str:
    """What an error says, to be part of a message."""
    return " ".join(str(error).split())[:MOST_OF_AN_ERROR] or type(error).__name__


def about(request_id: str) -> dict[str, str]:
    """The `extra` of a message about a request."""
    return {"request_id": request_id}


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.msgspec import MsgspecFormatter

    return MsgspecFormatter(list(JSON_FIELDS), rename_fields=JSON_FIELDS, timestamp="time")
