"""Clients that read slowly: they cost the front end little, the others nothing, and get all of it in the end."""

import json
from collections.abc import Callable

import httpx
import psutil
from scripted_worker import ScriptedWorker, Turn
from servers import FrontEnd, wait_until
from streaming import CHAT, STREAM, events, post

CHUNKS = 4000
CHUNK = "x" * 10_000
MOST_GROWTH_BYTES = 24 * 1024 * 1024
"""Well below the 40 MB that the stream has."""


def long_or_short(turn: Turn) -> None:
    """Forty megabytes for a request without a limit, a word for any other."""
    turn.accept()
    for _ in range(CHUNKS if turn.request.max_tokens is None else 1):
        turn.say(CHUNK)
    turn.finish()
    turn.done()


def memory(front_end: FrontEnd) -> int:
    """Bytes that all processes of a front end hold."""
    parent = psutil.Process(front_end.pid)
    return sum(int(process.memory_info().rss) for process in (parent, *parent.children()))


def test_a_client_that_does_not_read_is_no_burden_and_gets_all_of_it_later(
    start_front_end: Callable[..., FrontEnd], start_worker: Callable[..., ScriptedWorker]
) -> None:
    worker = start_worker(long_or_short)
    front_end = start_front_end()
    httpx.post(f"{front_end.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1}).raise_for_status()
    before = memory(front_end)

    with post(front_end, STREAM, Connection="close") as connection:
        wait_until(lambda: len(worker.turns) == 2 and worker.turns[1].written >= CHUNKS, limit_s=60, what="all of it")
        other = httpx.post(f"{front_end.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1}, timeout=5)
        growth = memory(front_end) - before
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))

    assert other.json()["choices"][0]["message"]["content"] == CHUNK
    assert growth < MOST_GROWTH_BYTES
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    found = [data for _, data in events(dechunked(body).decode())]
    assert found[-1] == "[DONE]"
    text = "".join(
        choice["delta"].get("content") or "" for data in found[:-1] for choice in json.loads(data)["choices"]
    )
    assert len(text) == CHUNKS * len(CHUNK)


def dechunked(body: bytes) -> bytes:
    """The content of a body that came in HTTP chunks."""
    content: list[bytes] = []
    at = 0
    while (size := int(body[at : (end := body.index(b"\r\n", at))], 16)) > 0:
        content.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(content)
