"""Tokens to text, piece by piece, never half a character.

A token can end inside a multi-byte character. The pieces that come out, joined, are the text of
all tokens; incomplete bytes are held back until the rest arrives.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokeniser(Protocol):
    """The text of one answer, in the making.

    Bytes that are still incomplete when the answer ends never come out.
    """

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""


class ByteDetokeniser:
    """For models whose tokens are bytes: decodes UTF-8 incrementally.

    Bytes that can never become a character come out as U+FFFD, as Python's decoder does it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))


class WindowDetokeniser:
    """For tokenizers that only decode whole sequences: decodes a sliding window twice.

    Some tokenizers render a token differently at the start of a text (a leading space is lost), so
    a few tokens before the answer are decoded along and cut off again.
    """

    LOOKBACK = 5

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-self.LOOKBACK :])
        self._prefix = 0
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        known = self._decode(self._tokens[self._prefix : self._read])
        text = self._decode(self._tokens[self._prefix :])
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        del self._tokens[: self._prefix]
        self._prefix, self._read = self._read - self._prefix, len(self._tokens)
        return text[len(known) :]
