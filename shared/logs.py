"""How processes log: to stderr, a message a line, as text or as JSON.

Where a message is about a request, `extra` has its `request_id`, which JSON shows as a field; and so with every
other field of `extra`. No message holds a prompt or an answer.
"""

import logging
import sys

TEXT = "%(asctime)s %(levelname)s %(name)s [%(process)d] %(message)s"

JSON_FIELDS = {"levelname": "level", "name": "logger", "process": "pid", "message": "message"}
"""What each JSON message has beside its `time`: Python's name and ours."""


def configure(*, level: str, format: str) -> None:
    """Set the root logger up for this process and those that it forks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_formatter() if format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def about(request_id: str) -> dict[str, str]:
    """The `extra` of a message about a request."""
    return {"request_id": request_id}


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.msgspec import MsgspecFormatter

    return MsgspecFormatter(list(JSON_FIELDS), rename_fields=JSON_FIELDS, timestamp="time")
