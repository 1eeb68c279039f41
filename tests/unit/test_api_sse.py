"""The bytes of Server-Sent Events."""

import json

import pytest

from api import sse


def test_only_the_last_event_of_an_entry_carries_its_id() -> None:
    assert sse.events([{"a": 1}, {"b": 2}], id="1-2") == b'data: {"a":1}\n\nid: 1-2\ndata: {"b":2}\n\n'
    assert sse.events([{"a": 1}], id="1-2", done=True) == b'data: {"a":1}\n\nid: 1-2\ndata: [DONE]\n\n'


def test_an_entry_without_events_writes_nothing() -> None:
    assert sse.events([], id="1-1") == b""


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\u0085", "\r\n\n", "\x0b\x0c\x1c\x1e", "é€😀\u2027\u202a"])
def test_no_text_breaks_its_line_and_all_of_it_comes_back(text: str) -> None:
    event = sse.events([{"text": text}], id="1-1").decode()

    # The strictest reading: every line boundary that Python, and so httpx, knows.
    assert len(event.splitlines()) == 3
    assert json.loads(event.splitlines()[1].removeprefix("data: ")) == {"text": text}


def test_a_keep_alive_ends_no_event() -> None:
    assert sse.KEEP_ALIVE.startswith(b":")
    assert sse.KEEP_ALIVE.count(b"\n") == 1
