"""One choice: tokens in, whole characters out, nothing of a stop string, and every token accounted for."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain import Chunk, FinishReason, SamplingParams
from workers.answer import Answer
from workers.detokenise import ByteDetokeniser, Detokeniser
from workers.sampling import Sampler
from workers.scheduler.scheduler import Sequence as Slotted
from workers.stopping import StopMatcher


class ScriptTokenizer:
    """Token `i` is the i-th piece of the script; one more token ends the answer."""

    chat_template = None
    bos_token = None
    special_texts: ClassVar[dict[str, str]] = {}
    special_tokens: Sequence[str] = ()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.end = len(pieces)

    def encode(self, text: str, *, special: bool) -> list[int]:
        raise NotImplementedError

    def is_end(self, token: int) -> bool:
        return token == self.end

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.end else self.pieces[token]

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:  # noqa: ARG002
        return ByteDetokeniser(self.token_bytes)


def play(
    pieces: Sequence[bytes], *, stops: Sequence[str] = (), max_tokens: int = 1000, logprobs: int | None = None
) -> tuple[Answer, list[Chunk]]:
    """An answer that draws the pieces one after the other, then the end, and its chunks."""
    tokenizer = ScriptTokenizer(pieces)
    answer = Answer(
        choice=0,
        sequence=Slotted([], 0),
        sampler=Sampler(SamplingParams(seed=0, temperature=0.0), choice=0, prompt=[], vocabulary=len(pieces) + 1),
        detokeniser=tokenizer.detokeniser([]),
        stops=StopMatcher(stops),
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        logprobs=logprobs,
        vocabulary=len(pieces) + 1,
    )
    chunks = []
    for token in range(len(pieces) + 1):
        logits = np.zeros(len(pieces) + 1, np.float32)
        logits[token] = 5.0
        chunk = answer.draw(logits)
        if chunk is not None:
            chunks.append(chunk)
        if answer.finish is not None:
            break
    return answer, chunks


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


PIECES = st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"c", b" ", "é".encode(), b"\xc3", b"\xa9"]), max_size=12)
STOPS = st.lists(st.sampled_from(["ab", "b", "bab", "c a", "é", "aé", "cc"]), max_size=2)


@given(PIECES, STOPS, st.integers(1, 12))
def test_chunks_join_to_the_text_before_the_first_stop_string(
    pieces: list[bytes], stops: list[str], max_tokens: int
) -> None:
    answer, chunks = play(pieces, stops=stops, max_tokens=max_tokens, logprobs=1)

    decoder = ByteDetokeniser(pieces.__getitem__)
    whole = "".join(decoder.push(token) for token in range(min(len(pieces), max_tokens)))
    matcher = StopMatcher(stops)
    expected = matcher.push(whole) + matcher.flush()
    assert text_of(chunks) == expected
    assert answer.sent_tokens == len(tokens_of(chunks))
    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    assert len(entries) == answer.sent_tokens
    assert "".join(entry.token.text for entry in entries) == expected
    is_cut = matcher.stopped or len(pieces) < max_tokens
    assert answer.finish is (FinishReason.STOP if is_cut else FinishReason.LENGTH)
    if not matcher.stopped:
        assert tokens_of(chunks) == list(range(min(len(pieces), max_tokens)))


@given(PIECES, STOPS)
def test_the_tokens_sent_are_the_first_ones_and_stand_for_the_text_sent(pieces: list[bytes], stops: list[str]) -> None:
    _, chunks = play(pieces, stops=stops)

    sent = ""
    tokens: list[int] = []
    for chunk in chunks[:-1]:
        sent += chunk.text
        tokens += chunk.tokens
        decoder = ByteDetokeniser(pieces.__getitem__)
        assert tokens == list(range(len(tokens)))
        assert sent == "".join(map(decoder.push, tokens))


def test_an_emoji_over_four_tokens_comes_out_whole() -> None:
    pieces = [b"x", *(bytes([byte]) for byte in "🙂".encode()), b"y"]

    _, chunks = play(pieces, logprobs=0)

    assert [chunk.text for chunk in chunks if chunk.text] == ["x", "🙂", "y"]
    entries = [entry.token for chunk in chunks for entry in chunk.logprobs]
    assert b"".join(bytes(entry.bytes_) for entry in entries) == "x🙂y".encode()


def test_a_token_in_which_a_stop_string_begins_leaves_with_the_text_before_it() -> None:
    answer, chunks = play([b"one", b" two.E", b"ND"], stops=[".END"], logprobs=0)

    assert text_of(chunks) == "one two"
    assert tokens_of(chunks) == [0, 1]
    assert answer.finish is FinishReason.STOP
    last = chunks[-1].logprobs[-1].token
    assert (last.text, bytes(last.bytes_)) == (" two", b" two")


def test_text_that_could_begin_a_stop_string_waits_and_leaves_when_it_does_not() -> None:
    _, chunks = play([b"a", b"ST", b"A", b"RT"], stops=["STOP"])

    assert [(chunk.text, chunk.tokens) for chunk in chunks] == [("a", (0,)), ("STA", (1, 2)), ("RT", (3,))]


@pytest.mark.parametrize("end", ["limit", "model"])
def test_held_back_text_leaves_when_the_answer_ends_otherwise(end: str) -> None:
    answer, chunks = play([b"a", b"ST"], stops=["STOP"], max_tokens=2 if end == "limit" else 9)

    assert text_of(chunks) == "aST"
    assert tokens_of(chunks) == [0, 1]
    assert answer.finish is (FinishReason.LENGTH if end == "limit" else FinishReason.STOP)


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop() -> None:
    answer, chunks = play([b"a", b"ST", b"OP"], stops=["STOP"], max_tokens=3)

    assert text_of(chunks) == "a"
    assert answer.finish is FinishReason.STOP


def test_the_end_token_is_no_part_of_the_answer() -> None:
    answer, chunks = play([b"a"], logprobs=0)

    assert tokens_of(chunks) == [0]
    assert answer.sequence.tokens == [0]
    assert answer.finish is FinishReason.STOP


def test_an_answer_that_ends_at_once_is_empty() -> None:
    answer, chunks = play([])

    assert chunks == []
    assert answer.sent_tokens == 0
    assert answer.finish is FinishReason.STOP
