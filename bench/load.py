"""The load: streaming chat clients that cost little CPU, since they share the cores.

Closed loop: each client sends its next request when its last answer has ended. Times are seconds.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PEOPLE = ("miller", "sailor", "piano tuner", "young baker", "retired clerk", "gardener", "night guard", "painter")
PLACES = (
    "harbour",
    "mountain hut",
    "empty theatre",
    "lighthouse",
    "railway station",
    "old library",
    "market",
    "bridge",
)
THINGS = ("lost key", "silver clock", "paper boat", "sealed letter", "broken lamp", "stolen map", "red coat", "violin")


@dataclass(slots=True)
class Answer:
    """One answer as its client saw it. `first` and `end` count from the sending of the request."""

    first: float
    end: float
    tokens: int
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a run of clients saw together."""

    clients: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p95: float
    gap_p50: float
    gap_p99: float
    tokens: int
    events: int
    wall_s: float


def prompt(client: int, request: int) -> str:
    """Prompts that part after a few words, whichever client and request of a run they are for.

    What a server can reuse is the chat template and those words, as with real users; not a topic that an
    earlier round happened to have.
    """
    number = client * 97 + request * 31
    person, place, thing = PEOPLE[number % 8], PLACES[number // 8 % 8], THINGS[number // 64 % 8]
    return f"Write a long story about number {number}: a {person} finds a {thing} at the {place}, with many details."


async def ask(url: str, model: str, text: str, max_tokens: int) -> Answer:
    """Send one streaming chat request over a connection of its own and read all of the answer.

    Tokens are counted by the server's usage where it gives one, else by content events.
    """
    target = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": 0,
        }
    ).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {(await reader.read(2000))!r}")
    first = last = None
    events = 0
    usage = 0
    gaps: list[float] = []
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"error event: {event}")
        if event.get("usage"):
            usage = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("delta", {}).get("content"):
            events += 1
            if last is None:
                first = now
            else:
                gaps.append(now - last)
            last = now
    ended = time.perf_counter()
    writer.close()
    if first is None:
        raise RuntimeError("an answer without content")
    return Answer(first - started, ended - started, usage or events, gaps)


async def _client(url: str, model: str, client: int, requests: int, max_tokens: int, offset: int) -> list[Answer]:
    return [await ask(url, model, prompt(client, offset + index), max_tokens) for index in range(requests)]


def measure(url: str, model: str, *, clients: int, requests: int, max_tokens: int, offset: int) -> LoadResult:
    """Run `clients` clients with `requests` requests each and sum up what they saw.

    `offset` keeps the prompts of one run apart from those of another on the same server.
    """

    async def everyone() -> list[list[Answer]]:
        runs = (_client(url, model, index, requests, max_tokens, offset) for index in range(clients))
        return await asyncio.gather(*runs)

    started = time.perf_counter()
    answers = [answer for run in asyncio.run(everyone()) for answer in run]
    wall = time.perf_counter() - started
    firsts = [answer.first for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps] or [0.0]
    tokens = sum(answer.tokens for answer in answers)
    return LoadResult(
        clients=clients,
        tokens_per_s=tokens / wall,
        ttft_p50=quantile(firsts, 0.5),
        ttft_p95=quantile(firsts, 0.95),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        tokens=tokens,
        events=sum(len(answer.gaps) + 1 for answer in answers),
        wall_s=wall,
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The `q` quantile, interpolated."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=1000, method="inclusive")[min(998, max(0, round(q * 1000) - 1))]
