"""Tokens to text: whatever the tokens' edges, whole characters and all of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.detokenise import REPLACEMENT, ByteDetokeniser, WindowDetokeniser

TEXT = st.text("aé世🙂 👩‍🚀\n", max_size=12)
SIZES = st.lists(st.integers(1, 5), max_size=30)


def byte_tokens(text: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The bytes in pieces of these sizes; the rest one by one."""
    tokens, start = [], 0
    for size in [*sizes, *[1] * len(text)]:
        if start < len(text):
            tokens.append(text[start : start + size])
            start += size
    return tokens


@given(TEXT, SIZES)
def test_bytes_split_anywhere_come_out_as_whole_characters(text: str, sizes: list[int]) -> None:
    tokens = byte_tokens(text.encode(), sizes)
    detokeniser = ByteDetokeniser(tokens.__getitem__)

    pieces = [detokeniser.push(token) for token in range(len(tokens))]

    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.binary(max_size=20), SIZES)
def test_bytes_that_are_no_text_come_out_as_python_decodes_them(raw: bytes, sizes: list[int]) -> None:
    tokens = byte_tokens(raw + b".", sizes)
    detokeniser = ByteDetokeniser(tokens.__getitem__)

    out = "".join(detokeniser.push(token) for token in range(len(tokens)))

    assert out == (raw + b".").decode("utf-8", "replace")


class SpaceEatingTokenizer:
    """Decodes whole sequences only, and loses a space at their start, as SentencePiece does."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace").removeprefix(" ")


@given(TEXT, SIZES, st.sampled_from(["", "a", "one two", " lead"]))
def test_a_sliding_window_gives_the_text_of_all_tokens(text: str, sizes: list[int], prompt_text: str) -> None:
    pieces = [bytes([byte]) for byte in prompt_text.encode()] + byte_tokens(text.encode(), sizes)
    tokenizer = SpaceEatingTokenizer(pieces)
    prompt = list(range(len(prompt_text)))
    answer = list(range(len(prompt), len(pieces)))
    detokeniser = WindowDetokeniser(tokenizer.decode, prompt)

    out = [detokeniser.push(token) for token in answer]

    whole = tokenizer.decode(prompt + answer)
    assert tokenizer.decode(prompt) + "".join(out) == whole
    assert not any(REPLACEMENT in piece for piece in out)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_half_a_character_at_the_end_never_comes_out(cut: int) -> None:
    tokens = [b"a", "🙂".encode()[:cut]]
    by_bytes = ByteDetokeniser(tokens.__getitem__)
    by_window = WindowDetokeniser(SpaceEatingTokenizer(tokens).decode, [])

    assert [by_bytes.push(token) for token in range(2)] == ["a", ""]
    assert [by_window.push(token) for token in range(2)] == ["a", ""]
