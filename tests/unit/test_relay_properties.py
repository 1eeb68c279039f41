"""Whatever happens between a log and its readers: each has a prefix of the log, in the end all of it, and one end."""

import json
from collections.abc import Iterator
from typing import Any

import redis
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry
from streaming import events

from api import respond, sse
from api.disconnect import ClientConnection
from api.drain import Drain
from api.exchange import Observer
from api.metrics import ApiMetrics
from api.relay import SILENCE_S, Following, Relay
from api.schemas.answer import AnswerShape
from api.subscriber import Mailbox
from api.translate.chat import ENDPOINT, ChatAnswer
from shared.codec import encode_event
from shared.domain import Accepted, Chunk, Done, Event, Failed, GenerationRequest, SamplingParams, Usage, is_terminal
from shared.log import START, Entry, EntryId, LogReader, parse_entry_id
from shared.queue import Submitted

REQUEST = GenerationRequest(id="r", model="m", prompts=(), sampling=SamplingParams(seed=1))
SHAPE = AnswerShape(
    endpoint=ENDPOINT, id="r", model="m", created=1, choices=1, include_usage=False, service_tier="default"
)
NEVER_S = 1e9
DONE = Done(Usage())
FAILED = Failed("engine_error", "The engine failed.")


class Clock:
    """Time that passes only where someone waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Box(Mailbox):
    """A mailbox whose reader waits in the clock's time."""

    def __init__(self, clock: Clock, limit: int) -> None:
        super().__init__(lambda _: None, limit=limit)
        self._clock = clock

    def take(self, timeout_s: float) -> Any:
        delivery = super().take(0.0)
        if not delivery.messages and not delivery.gap:
            self._clock.now += timeout_s
        return delivery


class World:
    """One request in Redis, as the relay sees it: a log, a state, a channel, and a way to lose each of them."""

    def __init__(self, *, page: int, mailbox_limit: int = 4) -> None:
        self.clock = Clock()
        self.entries: list[Entry] = []
        self.unreadable: set[EntryId] = set()
        self.state = "running"
        self.is_away = False
        self.boxes: list[Box] = []
        self._mailbox_limit = mailbox_limit
        reader = LogReader(self)  # type: ignore[arg-type]
        reader.PAGE = page  # type: ignore[misc]
        world: Any = self
        self.relay = Relay(
            queue=world, reader=reader, subscriber=world, drain=Drain(0.0), silence_s=SILENCE_S, monotonic=self.clock
        )

    # --- what the relay calls of the subscriber, the queue and Redis ---

    def subscribe(self, _: str) -> Box:
        self.boxes.append(Box(self.clock, self._mailbox_limit))
        return self.boxes[-1]

    def submit(self, request: GenerationRequest, **_: Any) -> str:
        return request.id

    def xrange(self, _: str, *, min: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        self._answer()
        start = parse_entry_id(min)
        assert start is not None
        rows = [entry for entry in self.entries if entry.id >= start][:count]
        return [
            (str(entry.id).encode(), {b"e": b"{" if entry.id in self.unreadable else encode_event(entry.event)})
            for entry in rows
        ]

    def hget(self, _: str, field: str) -> bytes:
        self._answer()
        assert field == "state"
        return self.state.encode()

    def _answer(self) -> None:
        if self.is_away:
            raise redis.ConnectionError

    # --- what tests do ---

    def write(self, entry: Entry, *, heard: bool = True) -> None:
        self.entries.append(entry)
        if is_terminal(entry.event):
            self.state = "done" if isinstance(entry.event, Done) else "failed"
        if heard:
            self.publish(entry)

    def publish(self, entry: Entry) -> None:
        for box in self.boxes:
            box.put(f"{entry.id} ".encode() + encode_event(entry.event))


class Reader:
    """A client that keeps what it was sent, and comes back for the rest when its connection ends."""

    def __init__(self, world: World, following: Following) -> None:
        self._world = world
        self.pieces: list[bytes] = []
        self.error: str | None = None
        self.has_ended = False
        self._stream = self._read(following, START)

    def _read(self, following: Following, after: EntryId) -> Iterator[bytes]:
        # With no time between comments each step of the relay is one piece.
        exchange = Observer(ApiMetrics(CollectorRegistry())).arrived(request_id="r", method="POST", endpoint=None)
        return respond.stream(
            following, ChatAnswer(SHAPE), exchange, held=[], after=after, keep_alive_s=0.0, monotonic=self._world.clock
        )

    def step(self) -> None:
        piece = next(self._stream, None)
        if piece is None:
            self.has_ended = True
        elif piece != sse.KEEP_ALIVE:
            for block in piece.split(b"\n\n")[:-1]:
                ((entry_id, data),) = events(block.decode())
                if entry_id is None:
                    assert self.error is None
                    self.error = json.loads(data)["error"]["code"]
                else:
                    self.pieces.append(block)

    def come_back(self, keeping: int) -> None:
        """Connect again, with no more than the first events, as one that lost the others would."""
        self._stream.close()  # type: ignore[attr-defined]
        del self.pieces[keeping:]
        after = parse_entry_id(self.has[-1][0]) if self.pieces else START
        assert after is not None
        following = self._world.relay.resume("r", Submitted("running", NEVER_S, {}), ClientConnection({}))
        self._stream, self.has_ended = self._read(following, after), False

    @property
    def has(self) -> list[tuple[str, str]]:
        return [events(piece.decode())[0] for piece in self.pieces]  # type: ignore[misc]


def on_the_wire(entry: Entry) -> tuple[str, str]:
    """An entry's id, and that which tells it from all others."""
    match entry.event:
        case Chunk(_, text):
            return str(entry.id), text
        case Accepted():
            return str(entry.id), "assistant"
        case Done():
            return str(entry.id), "[DONE]"
        case _:
            return str(entry.id), "engine_error"


def is_prefix(has: list[tuple[str, str]], entries: list[Entry]) -> bool:
    expected = [on_the_wire(entry) for entry in entries]
    return len(has) <= len(expected) and all(
        entry_id == wanted_id and wanted in data
        for (entry_id, data), (wanted_id, wanted) in zip(has, expected, strict=False)
    )


places = st.integers(0, 40)


class Relaying(RuleBasedStateMachine):
    """A request that attempts write, and clients that read it over a channel that may lose everything."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt, self.seq, self.said = 1, 0, 0

    @initialize(page=st.integers(1, 6), limit=st.integers(1, 6), clients=st.integers(1, 3))
    def begin(self, page: int, limit: int, clients: int) -> None:
        self.world = World(page=page, mailbox_limit=limit)
        first = self.world.relay.submit(REQUEST, ClientConnection({}), limit=1, timeout_s=NEVER_S, attributes={})
        self.readers = [Reader(self.world, first)]
        for _ in range(clients - 1):
            resumed = self.world.relay.resume("r", Submitted("running", NEVER_S, {}), ClientConnection({}))
            self.readers.append(Reader(self.world, resumed))

    def is_running(self) -> bool:
        return self.world.state == "running"

    def write(self, event: Event, *, heard: bool) -> None:
        self.seq += 1
        self.world.write(Entry(EntryId(self.attempt, self.seq), event), heard=heard)

    @precondition(is_running)
    @rule(heard=st.lists(st.booleans(), min_size=1, max_size=8))
    def say(self, heard: list[bool]) -> None:
        for each in heard:
            self.said += 1
            self.write(Accepted(1) if not self.world.entries else Chunk(0, f"<{self.said}>", (1,)), heard=each)

    @precondition(is_running)
    @rule(tried=st.integers(1, 3))
    def be_overtaken(self, tried: int) -> None:
        self.attempt, self.seq = self.attempt + tried, 0

    @precondition(is_running)
    @rule(heard=st.booleans(), event=st.sampled_from([DONE, FAILED]), from_outside=st.booleans())
    def end(self, heard: bool, event: Event, from_outside: bool) -> None:
        if from_outside:
            self.be_overtaken(1)
        self.write(event, heard=heard)

    @rule(place=places)
    def repeat_a_message(self, place: int) -> None:
        if self.world.entries:
            self.world.publish(self.world.entries[place % len(self.world.entries)])

    @rule()
    def lose_the_subscription(self) -> None:
        for box in self.world.boxes:
            box.mark_gap()

    @rule()
    def let_redis_come_and_go(self) -> None:
        self.world.is_away = not self.world.is_away

    @rule(reader=places, steps=st.integers(1, 8))
    def read(self, reader: int, steps: int) -> None:
        chosen = self.readers[reader % len(self.readers)]
        for _ in range(steps):
            if not chosen.has_ended:
                chosen.step()

    @rule(reader=places, keeping=places)
    def come_back(self, reader: int, keeping: int) -> None:
        self.readers[reader % len(self.readers)].come_back(keeping)

    @invariant()
    def every_reader_has_a_prefix_and_no_error(self) -> None:
        for reader in self.readers:
            assert is_prefix(reader.has, self.world.entries)
            assert reader.error is None
            if reader.has_ended:
                assert len(reader.has) == len(self.world.entries)
                assert not self.is_running()

    def teardown(self) -> None:
        if not hasattr(self, "readers"):
            return
        self.world.is_away = False
        if self.is_running():
            self.write(DONE, heard=False)
        for reader in self.readers:
            run_to_the_end(reader)
            assert len(reader.has) == len(self.world.entries)
        self.every_reader_has_a_prefix_and_no_error()
        assert len({b"".join(reader.pieces) for reader in self.readers}) == 1


def run_to_the_end(reader: Reader) -> None:
    for _ in range(2000):
        if reader.has_ended:
            return
        reader.step()
    raise AssertionError("the stream does not end")


Relaying.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRelaying = Relaying.TestCase


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """The whole log of a request that is done: some attempts, each with some entries."""
    entries = []
    attempt = 0
    for length in draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)):
        attempt += draw(st.integers(1, 2))
        entries += [Entry(EntryId(attempt, seq), Chunk(0, f"<{attempt}.{seq}>", (1,))) for seq in range(1, length + 1)]
    return [*entries, Entry(EntryId(attempt, entries[-1].id.seq + 1), DONE)]


def trim(world: World, place: int) -> None:
    del world.entries[:place]


def lose_the_end(world: World, place: int) -> None:
    del world.entries[place:]


def lose_one(world: World, place: int) -> None:
    del world.entries[place]


def make_unreadable(world: World, place: int) -> None:
    world.unreadable.add(world.entries[place].id)


def leaves_no_trace(entries: list[Entry], place: int, damage: Any) -> bool:
    """Whether what is lost are the last entries before an attempt's first, which then looks as if nothing was."""
    after_it = place if damage is trim else place + 1
    return damage in (trim, lose_one) and 0 < after_it < len(entries) and entries[after_it].id.seq == 1


@settings(max_examples=300, deadline=None)
@given(
    entries=logs(),
    page=st.integers(1, 6),
    steps=st.integers(0, 12),
    place=places,
    damage=st.sampled_from([trim, lose_the_end, lose_one, make_unreadable]),
)
def test_a_damaged_log_gives_a_prefix_and_then_all_of_it_or_one_error(
    entries: list[Entry], page: int, steps: int, place: int, damage: Any
) -> None:
    place %= len(entries)
    assume(not leaves_no_trace(entries, place, damage))
    world = World(page=page)
    for entry in entries:
        world.write(entry, heard=False)
    following = world.relay.resume("r", Submitted("done", NEVER_S, {}), ClientConnection({}))
    reader = Reader(world, following)
    for _ in range(steps):
        if not reader.has_ended:
            reader.step()
    damage(world, place)

    run_to_the_end(reader)

    assert is_prefix(reader.has, entries)
    if reader.error:
        assert reader.error == "request_lost"
        assert "[DONE]" not in dict(reader.has).values()
    else:
        assert len(reader.has) == len(entries)
