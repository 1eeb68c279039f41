"""The clients: plain sockets on one event loop, since they share the cores with what they test."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple

from bench.soak.asks import Ask
from bench.soak.transcript import Complaint, Fault, Transcript, differences, whole_answer

ANSWER_LIMIT_S = 60.0
LEAVE_SHARE = 0.15
RESUME_SHARE = 0.10


class Manner(StrEnum):
    """What a client does with its stream."""

    STAY = "stay"
    LEAVE = "leave"
    RESUME = "resume"


class Sent(NamedTuple):
    """A request by the server's own id; `must_end_done` unless its client left for good."""

    request_id: str
    must_end_done: bool


@dataclass(slots=True)
class Tally:
    """What all clients together did and saw. `sent` is emptied by whoever looks the requests up."""

    manners: Counter[Manner] = field(default_factory=Counter)
    tokens: int = 0
    complaints: list[Complaint] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """How many have had their answer, or as much of it as they wanted."""
        return self.manners.total()


class _Unfit(Exception):
    """The answer is no 200."""


@dataclass(slots=True)
class _Answer:
    """The head of an HTTP answer, and its connection."""

    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def body(self) -> bytes:
        """All of a body with a length."""
        return await self.reader.readexactly(int(self.headers["content-length"]))

    async def blocks(self) -> AsyncIterator[str]:
        """The blocks of a stream of events, as they come."""
        held = b""
        while size := int(await self.reader.readline(), 16):
            held += (await self.reader.readexactly(size + 2))[:-2]
            *blocks, held = held.split(b"\n\n")
            for block in blocks:
                yield block.decode()


@asynccontextmanager
async def _exchange(port: int, head: str, body: bytes = b"") -> AsyncIterator[_Answer]:
    """Send a request over a connection of its own; leaving the block closes it, read or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode() + body)
        status = await reader.readline()
        headers: dict[str, str] = {}
        while (line := (await reader.readline()).decode().strip()) != "":
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        answer = _Answer(headers, reader)
        if b" 200 " not in status:
            raise _Unfit(f"{status.decode().strip()}: {(await reader.read(500)).decode(errors='replace')}")
        yield answer
    finally:
        writer.close()


async def run_clients(
    ports: Sequence[int], pool: Sequence[Ask], tally: Tally, *, requests: int, clients: int, random: Random
) -> None:
    """Send so many requests, each client its next one when its last is answered or left."""
    left = iter(range(requests))
    streams = [ask for ask in pool if ask.is_stream]

    async def client() -> None:
        for number in left:
            manner = random.choices(list(Manner), (1 - LEAVE_SHARE - RESUME_SHARE, LEAVE_SHARE, RESUME_SHARE))[0]
            ask = random.choice(pool if manner is Manner.STAY else streams)
            here, there = random.sample(ports, 2)
            visit = _Visit(
                ask, tally, here=here, there=there, key=f"{number}-{random.random()}", most=random.randint(1, 3)
            )
            await visit.make(manner)

    await asyncio.gather(*(client() for _ in range(clients)))


@dataclass(slots=True)
class _Visit:
    """One request: to the front end `here`, left after `most` events with an id, resumed at the one `there`."""

    ask: Ask
    tally: Tally
    here: int
    there: int
    key: str
    most: int
    request_id: str = ""

    async def make(self, manner: Manner) -> None:
        """Send it in this manner, judge what comes and count it."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                manner = await (self._stream(manner) if self.ask.is_stream else self._whole())
        except TimeoutError:
            self._complain(f"no answer within {ANSWER_LIMIT_S:.0f} s")
        except (_Unfit, OSError, EOFError, ValueError) as error:
            self._complain(f"{type(error).__name__} {error}")
        self.tally.manners[manner] += 1

    def _complain(self, what: str) -> None:
        self.tally.complaints.append(
            Complaint(Fault.LOST, f"{self.request_id or 'unnamed'}: {what}, {self.ask.body!r}")
        )
        if self.request_id:
            self.tally.sent.append(Sent(self.request_id, True))

    def _post(self, *, keyed: bool) -> str:
        fields = f"POST {self.ask.path} HTTP/1.1\r\nContent-Type: application/json\r\n"
        fields += f"Content-Length: {len(self.ask.body)}"
        return f"{fields}\r\nIdempotency-Key: {self.key}" if keyed else fields

    async def _whole(self) -> Manner:
        """An answer in one piece."""
        async with _exchange(self.here, self._post(keyed=False), self.ask.body) as answer:
            body = await answer.body()
        told = whole_answer(body)
        self.request_id = json.loads(body)["id"].partition("-")[2]
        self._count(told.completion_tokens, differences(told, self.ask.expected), must_end_done=True)
        return Manner.STAY

    async def _stream(self, manner: Manner) -> Manner:
        """A stream. Returns in which manner it was read in truth: it may have ended before it was left."""
        transcript = Transcript()
        keyed = manner is Manner.RESUME
        async with _exchange(self.here, self._post(keyed=keyed), self.ask.body) as answer:
            url = answer.headers["x-resume-url"]
            self.request_id = url.rpartition("/")[2]
            has_left = await _read(answer, transcript, most=None if manner is Manner.STAY else self.most)
        if has_left and manner is Manner.RESUME:
            head = f"GET {url} HTTP/1.1\r\nLast-Event-ID: {transcript.ids[-1]}"
            async with _exchange(self.there, head) as answer:
                await _read(answer, transcript, most=None)
        is_whole = not (has_left and manner is Manner.LEAVE)
        complaints = transcript.judged(self.ask.expected, whole=is_whole)
        tokens = transcript.told().completion_tokens
        self._count(tokens, complaints, must_end_done=is_whole)
        return manner if has_left else Manner.STAY

    def _count(self, tokens: int, complaints: list[Complaint], *, must_end_done: bool) -> None:
        self.tally.sent.append(Sent(self.request_id, must_end_done))
        self.tally.tokens += tokens
        self.tally.complaints += [
            Complaint(complaint.fault, f"{self.request_id}: {complaint.what}") for complaint in complaints
        ]


async def _read(answer: _Answer, transcript: Transcript, *, most: int | None) -> bool:
    """Read to the end or up to so many events with an id; whether it was left before its end."""
    read = 0
    async for block in answer.blocks():
        read += transcript.add(block)
        if read == most and not transcript.is_done:
            return True
    return False
