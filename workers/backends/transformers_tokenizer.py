"""A Hugging Face tokenizer behind `workers.backends.protocol.Tokenizer`."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from workers.detokenise import ByteDetokeniser, Detokeniser, WindowDetokeniser


class TransformersTokenizer:
    """A fast tokenizer of transformers, of which it keeps copies that nobody else changes.

    Thread-safe: nothing here changes once it is made. That is why there are two copies for
    encoding; transformers' own `split_special_tokens` switches one shared tokenizer to and fro.
    """

    def __init__(self, tokenizer: Any, end_tokens: Collection[int]) -> None:
        """`tokenizer` is a fast tokenizer (`is_fast`); `end_tokens` are those that end an answer."""
        serialised: str = tokenizer.backend_tokenizer.to_str()
        self._spelling = _copy(serialised, spell_special=True)
        self._knowing = _copy(serialised, spell_special=False)
        self._chat_template = _default_template(tokenizer.chat_template)
        self._special_texts = {
            name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        }
        added = tokenizer.added_tokens_decoder
        self._added: dict[int, str] = {token: entry.content for token, entry in added.items()}
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._special_tokens = tuple(entry.content for entry in added.values() if entry.special)
        self._bos_token = _leading_token(tokenizer)
        self._end_tokens = frozenset(end_tokens)
        self._alphabet = _byte_alphabet() if "ByteLevel" in _parts(json.loads(serialised)["decoder"]) else None

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template, if it has one; of several, the default one."""
        return self._chat_template

    @property
    def special_texts(self) -> dict[str, str]:
        """Names that templates know (`bos_token`, `eos_token`) to their text."""
        return self._special_texts

    @property
    def special_tokens(self) -> Sequence[str]:
        """The text of every token that text from users must never become."""
        return self._special_tokens

    @property
    def bos_token(self) -> int | None:
        """What the tokenizer itself puts in front of a text, if anything."""
        return self._bos_token

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of `text`, none added; with `special`, the text of a special token becomes that token."""
        encoder = self._knowing if special else self._spelling
        return list(encoder.encode(text, add_special_tokens=False).ids)

    def is_end(self, token: int) -> bool:
        """Whether this token ends an answer."""
        return token in self._end_tokens

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for a special token or one that does not exist."""
        if token in self._special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        piece: str | None = self._knowing.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        text: str = self._knowing.decode([token])
        # At the start of a text SentencePiece drops the space that a piece begins with.
        spaced = piece.startswith("▁") and not text.startswith(" ")
        return f"{' ' if spaced else ''}{text}".encode()

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:
        """A fresh detokeniser for an answer that follows `prompt`; special tokens have no text."""
        if self._alphabet is not None:
            return ByteDetokeniser(self.token_bytes)
        return WindowDetokeniser(self._knowing.decode, prompt)


def _copy(serialised: str, *, spell_special: bool) -> RustTokenizer:
    copy = RustTokenizer.from_str(serialised)
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = spell_special
    return copy


def _default_template(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


def _leading_token(tokenizer: Any) -> int | None:
    """The token that comes in front when special tokens are added, found by trying."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    leads = len(full) > len(bare) and full[: len(bare)] != bare
    return int(full[0]) if leads else None


def _parts(decoder: dict[str, Any] | None) -> list[str]:
    """The types of a decoder and of those it is made of."""
    if decoder is None:
        return []
    return [decoder["type"], *(name for part in decoder.get("decoders", ()) for name in _parts(part))]


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write the 256 bytes with, as GPT-2 chose
    them: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
