"""Request ids: ordered by time, so that of an id that Redis does not know it can be said whether it ever was one."""

import re
import secrets
import time

EARLIEST_MS = 1_735_689_600_000
"""The start of 2025 in Unix time: before there was a server to make an id."""

CLOCK_SKEW_MS = 3_600_000
"""How far ahead of ours another host's clock may be."""

REQUEST_ID_PATTERN = "[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_TIME_DIGITS = 12


def new_request_id() -> str:
    """A UUID of version 7 (RFC 9562, section 5.7) in 32 hex digits: 48 bits of Unix time in ms, the rest random."""
    milliseconds = time.time_ns() // 1_000_000
    bits = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    return f"{bits:032x}"


def may_have_been_made(request_id: str) -> bool:
    """Whether `new_request_id` can have returned this until now."""
    if not _REQUEST_ID.fullmatch(request_id):
        return False
    return EARLIEST_MS <= int(request_id[:_TIME_DIGITS], 16) <= time.time_ns() // 1_000_000 + CLOCK_SKEW_MS
