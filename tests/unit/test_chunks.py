"""The chunk batcher: nothing lost, nothing reordered, nothing late."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from shared.domain import Accepted, ChosenLogprob, Chunk, Done, Event, Finished, FinishReason, TokenLogprob, Usage
from workers.chunks import ChunkBatcher

MAX_TOKENS, MAX_DELAY_S = 4, 0.5


def chunk(choice: int, text: str, *tokens: int) -> Chunk:
    logprobs = tuple(ChosenLogprob(TokenLogprob("", (), -float(token)), ()) for token in tokens)
    return Chunk(choice, text, tokens, logprobs)


CHUNKS = st.builds(
    lambda choice, text, tokens: chunk(choice, text, *tokens),
    st.integers(0, 2),
    st.text("xyz", max_size=3),
    st.lists(st.integers(0, 99), min_size=1, max_size=3),
)
OTHERS = st.sampled_from([Accepted(1), Finished(0, FinishReason.STOP), Finished(1, FinishReason.LENGTH), Done(Usage())])
EVENTS = st.lists(st.one_of(CHUNKS, CHUNKS, CHUNKS, OTHERS), max_size=20)


def batcher() -> ChunkBatcher:
    return ChunkBatcher(max_tokens=MAX_TOKENS, max_delay_s=MAX_DELAY_S)


def told(events: list[Event]) -> list[object]:
    """What a reader knows when each event that is not a chunk arrives, and at the end."""
    known: dict[int, list[object]] = defaultdict(lambda: ["", (), ()])
    story: list[object] = []
    for event in events:
        if isinstance(event, Chunk):
            text, tokens, logprobs = known[event.choice]
            known[event.choice] = [text + event.text, tokens + event.tokens, logprobs + event.logprobs]  # type: ignore[operator]
        else:
            story.append((dict(known), event))
            known = defaultdict(lambda: ["", (), ()], {choice: list(value) for choice, value in known.items()})
    return [*story, dict(known)]


@given(EVENTS, st.data())
def test_whatever_the_batches_a_reader_is_told_the_same(events: list[Event], data: st.DataObject) -> None:
    batches = batcher()
    taken: list[Event] = []
    for event in events:
        batches.add([event], 0.0)
        if data.draw(st.booleans()):
            taken += batches.take()
    taken += batches.take()

    assert told(taken) == told(events)


@given(st.lists(st.tuples(st.floats(0, 0.3), st.one_of(CHUNKS, OTHERS)), min_size=1, max_size=20))
def test_nothing_waits_longer_than_the_delay_and_nothing_is_due_without_reason(
    timed: list[tuple[float, Event]],
) -> None:
    batches = batcher()
    now = 0.0
    oldest: float | None = None
    added_at: float | None = None
    pace = 0.0
    tokens = 0
    started: set[int] = set()
    for pause, event in timed:
        now += pause
        due_at = batches.due_at()
        if due_at is not None and due_at <= now:
            batches.take()
            oldest, tokens = None, 0
        batches.add([event], now)
        pace = now - added_at if added_at is not None and now > added_at else pace
        added_at = now
        oldest = now if oldest is None else oldest
        is_urgent = not isinstance(event, Chunk)
        if isinstance(event, Chunk):
            tokens += len(event.tokens)
            is_urgent = event.choice not in started or tokens >= MAX_TOKENS
            is_urgent = is_urgent or now + pace > oldest + MAX_DELAY_S
            if event.text:
                started.add(event.choice)
        due_at = batches.due_at()
        assert due_at is not None
        assert due_at <= oldest + MAX_DELAY_S
        assert is_urgent == (due_at <= now) or due_at <= oldest + MAX_DELAY_S <= now
        if due_at <= now:
            batches.take()
            oldest, tokens = None, 0


def test_a_choice_s_first_token_is_due_at_once() -> None:
    batches = batcher()

    batches.add([chunk(0, "a", 1)], 7.0)
    assert batches.due_at() == 7.0
    batches.take()
    batches.add([chunk(0, "b", 2)], 7.1)
    assert batches.due_at() == 7.1 + MAX_DELAY_S
    batches.add([chunk(1, "c", 3)], 7.2)
    assert batches.due_at() == 7.2


def test_tokens_without_text_do_not_use_up_the_first_chunk_s_haste() -> None:
    batches = batcher()
    batches.add([chunk(0, "", 1)], 1.0)
    batches.take()

    batches.add([chunk(0, "é", 2)], 2.0)

    assert batches.due_at() == 2.0


def test_enough_tokens_are_due_at_once() -> None:
    batches = batcher()
    batches.add([chunk(0, "a", 1)], 0.0)
    batches.take()

    for token in range(MAX_TOKENS - 1):
        batches.add([chunk(0, "b", token)], 0.1)
    assert batches.due_at() == 0.1 + MAX_DELAY_S
    batches.add([chunk(0, "b", 9)], 0.2)
    assert batches.due_at() == 0.2


def test_tokens_that_could_not_wait_for_the_next_one_are_due_at_once() -> None:
    batches = batcher()
    batches.add([chunk(0, "a", 1)], 0.0)
    batches.take()

    batches.add([chunk(0, "b", 2)], 0.3)
    assert batches.due_at() == 0.3 + MAX_DELAY_S
    batches.add([chunk(0, "c", 3)], 0.6)
    assert batches.due_at() == 0.6


def test_tokens_slower_than_the_delay_do_not_wait() -> None:
    batches = batcher()
    batches.add([chunk(0, "a", 1)], 0.0)
    batches.take()

    batches.add([chunk(0, "b", 2)], 2 * MAX_DELAY_S)

    assert batches.due_at() == 2 * MAX_DELAY_S


def test_the_choices_of_one_batch_are_one_chunk_each() -> None:
    batches = batcher()
    batches.add([chunk(0, "a", 1), chunk(1, "x", 2), chunk(0, "b", 3), chunk(1, "y", 4)], 0.0)

    assert batches.take() == [chunk(0, "ab", 1, 3), chunk(1, "xy", 2, 4)]


def test_nothing_is_due_when_nothing_waits() -> None:
    batches = batcher()
    assert batches.due_at() is None
    batches.add([Accepted(3)], 0.0)
    assert batches.take() == [Accepted(3)]
    assert batches.due_at() is None
    assert batches.take() == []
