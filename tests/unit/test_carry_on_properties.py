"""Carrying on: wherever attempts were cut off, the log says in the end what one attempt would have said."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from asking import NEVER, OneProcess, logprobs_of, reasons_of, request, text_of, tokens_of, usage_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.domain import (
    Accepted,
    Chunk,
    Event,
    GenerationRequest,
    SamplingParams,
    TextPrompt,
    is_terminal,
)
from workers.attempt import Attempt
from workers.backends.fake import FIRST_WORD, PIECES, VOCABULARY, FakeBackend, FakeTokenizer, parse_options
from workers.chunks import ChunkBatcher
from workers.detokenise import Detokeniser, WindowDetokeniser
from workers.prepare import carry_on, prepare

SPLIT = [
    b" ",
    b" a",
    b"b",
    b"",
    "é".encode(),
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xe4\xb8",
    b"\x96 ",
    b"ab a",
]
"""Pieces that end inside characters, complete them, or never become any."""


class SplittingTokenizer(FakeTokenizer):
    """Words that are parts of characters; the text comes from the bytes."""

    def token_bytes(self, token: int) -> bytes:
        return SPLIT[token % len(SPLIT)] if token in PIECES else super().token_bytes(token)


class WindowTokenizer(SplittingTokenizer):
    """The same, but decodes only whole sequences, and loses a space at their start."""

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:
        return WindowDetokeniser(self.decode, prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace").removeprefix(" ")


@pytest.fixture(scope="module", params=[FakeTokenizer, SplittingTokenizer, WindowTokenizer])
def process(request: pytest.FixtureRequest) -> Iterator[OneProcess]:
    backend = FakeBackend(parse_options("end_every=20&context=48"), slots=4)
    backend.tokenizer = request.param()
    with OneProcess(backend, prefill_chunk=8) as process:
        yield process


def told(events: Sequence[Event]) -> Any:
    """Everything that a client is told, however it was cut into entries."""
    usage = usage_of(events)
    return [told_of(events, choice) for choice in sorted(reasons_of(events))], (usage.prompt, usage.completion)


def told_of(events: Sequence[Event], choice: int) -> Any:
    chunks = [event for event in events if isinstance(event, Chunk) and event.choice == choice]
    return text_of(events, choice), tokens_of(events, choice), logprobs_of(chunks), reasons_of(events).get(choice)


class Story:
    """A request, and attempts at it that write to one log until they are cut off."""

    names = map("request {}".format, itertools.count())

    def __init__(self, process: OneProcess, asked: GenerationRequest, draw: Any) -> None:
        self._process = process
        self._asked = asked
        self._draw = draw
        self.log: list[Event] = []

    def attempt(self, *, is_cut: bool) -> None:
        """One more attempt, which leaves its first entries, or all of them."""
        entries = self._entries()
        if is_cut:
            del entries[self._draw(st.integers(0, len(entries) - 1), label="entries before the cut") :]
        self.log += entries

    def _entries(self) -> list[Event]:
        attempt = Attempt(self._process_request(), 1, NEVER, 0, [])
        prepare(attempt, self._process.encoder, self._process.backend)
        events = carry_on(attempt, self.log)
        if not attempt.is_finished:
            self._process.engine.submit(attempt)
            events += self._process.result(attempt.request.id)
        batcher = ChunkBatcher(max_tokens=100, max_delay_s=1.0)
        entries: list[Event] = []
        every = self._draw(st.integers(1, 6), label="events in a batch")
        for index, event in enumerate(events):
            batcher.add([event], float(index))
            if index % every == 0:
                entries += batcher.take()
        return entries + batcher.take()

    def _process_request(self) -> GenerationRequest:
        fields = {name: getattr(self._asked, name) for name in self._asked.__struct_fields__}
        return GenerationRequest(**(fields | {"id": next(self.names)}))


BIAS = st.tuples(st.integers(FIRST_WORD, VOCABULARY - 1), st.sampled_from([-5.0, 3.0]))
SAMPLING = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.just(()) | st.tuples(BIAS),
)
PROMPTS = st.lists(st.sampled_from(["hello", "é 世界", " "]).map(TextPrompt), min_size=1, max_size=2).map(tuple)
REQUESTS = st.fixed_dictionaries(
    {
        "prompts": PROMPTS,
        "sampling": SAMPLING,
        "n": st.integers(1, 2),
        "max_tokens": st.none() | st.integers(1, 24),
        "logprobs": st.sampled_from([None, 0, 2]),
    }
)


def stops_in(text: str, draw: Any) -> tuple[str, ...]:
    """Stop strings of which some come and some nearly do."""
    stops = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop = text[start : start + draw(st.integers(1, 9))] + draw(st.sampled_from(["", "", "no"]))
        stops += [stop] if stop else []
    return tuple(stops)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS, st.integers(1, 3), st.data())
def test_the_log_of_attempts_that_were_cut_off_is_the_log_of_one(
    process: OneProcess, fields: dict[str, Any], cuts: int, data: st.DataObject
) -> None:
    free = Story(process, request(**fields), data.draw)
    free.attempt(is_cut=False)
    asked = request(**fields, stop=stops_in(text_of(free.log), data.draw))
    whole = Story(process, asked, data.draw)
    whole.attempt(is_cut=False)

    story = Story(process, asked, data.draw)
    for _ in range(cuts):
        story.attempt(is_cut=True)
        for choice in range(asked.choices):
            assert text_of(whole.log, choice).startswith(text_of(story.log, choice))
    story.attempt(is_cut=False)

    assert told(story.log) == told(whole.log)
    assert [event for event in story.log if isinstance(event, Accepted)] == story.log[:1]
    assert [event for event in story.log if is_terminal(event)] == story.log[-1:]


TOKENS = st.lists(st.integers(FIRST_WORD, FIRST_WORD + len(SPLIT) - 1), max_size=20)


@pytest.mark.parametrize("tokenizer", [SplittingTokenizer(), WindowTokenizer()])
@given(TOKENS, TOKENS)
def test_a_detokeniser_that_is_told_what_was_let_out_goes_on_with_the_rest(
    tokenizer: FakeTokenizer, before: list[int], after: list[int]
) -> None:
    prompt = [ord("a"), ord(" ")]
    through, replayed = tokenizer.detokeniser(prompt), tokenizer.detokeniser(prompt)
    pieces = [through.push(token) for token in before + after]

    again = [replayed.push(token) for token in before]

    assert again + [replayed.push(token) for token in after] == pieces
