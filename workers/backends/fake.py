"""A real engine without a model: deterministic tokens at a set pace.

Tests, chaos and relay benchmarks run on it through the same processes, queue and relay as any other
backend. Its next-token distribution is a function of the tokens so far, so greedy and seeded answers
repeat; its state can be cut back, or not if asked, so both kinds can be tried.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

import numpy as np

from shared.errors import ModelLoadError
from shared.fleet import StateKind
from workers.backends.protocol import Description, Logits, SlotWork, StepError
from workers.detokenise import ByteDetokeniser, Detokeniser

END, START, POISON = 256, 257, 258
CRASH = 0xFF
"""Ends the process that computes it, as a bug in native code would. A byte of no UTF-8: only token prompts hold it."""
SPECIAL = {END: "<|end|>", START: "<|start|>", POISON: "<|poison|>"}
SPECIAL_PATTERN = re.compile(f"({'|'.join(map(re.escape, SPECIAL.values()))})")
FIRST_WORD = 259
_TEXT = """
the mill turns and every grain of text that came in goes out as flour while water from one river
drives all wheels at once so no sack waits longer than its turn é 世界 🙂 naïve
"""
WORDS = tuple(_TEXT.split())
PIECES = {FIRST_WORD + index: f" {word}".encode() for index, word in enumerate(WORDS)}
VOCABULARY = FIRST_WORD + len(WORDS)
HASH_PRIME = 1_000_003
TABLE_ROWS = 509


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """`fake:` options, given as `fake:pace=0.01&context=4096`.

    `pace` is seconds per step, `prefill` seconds per prompt token, `end_every` the mean length of an
    answer that nothing else ends (0: endless). With `recurrent` its state cannot be cut back. After
    `hang_after` steps (0: never) it returns from none any more.
    """

    pace: float = 0.0
    prefill: float = 0.0
    end_every: int = 64
    context: int = 4096
    recurrent: int = 0
    hang_after: int = 0


def parse_options(text: str) -> FakeOptions:
    """The options in a `fake:` spec.

    Raises:
        ModelLoadError: an option is unknown or not a number that it can be.
    """
    values: dict[str, float | int] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        kind = FakeOptions.__dataclass_fields__.get(name)
        if kind is None:
            raise ModelLoadError(f"fake: has no option {name!r}; it has {', '.join(FakeOptions.__dataclass_fields__)}")
        try:
            values[name] = float(value) if kind.type is float else int(value)
        except ValueError:
            raise ModelLoadError(f"fake: option {name} cannot be {value!r}") from None
        if values[name] < 0:
            raise ModelLoadError(f"fake: option {name} cannot be below 0")
    return FakeOptions(**values)  # type: ignore[arg-type]


class FakeTokenizer:
    """One token per byte of a prompt; answers are words."""

    chat_template = (
        "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
    )
    bos_token = None

    @property
    def special_texts(self) -> dict[str, str]:
        return {"bos_token": SPECIAL[START], "eos_token": SPECIAL[END]}

    @property
    def special_tokens(self) -> Sequence[str]:
        # What makes a step fail is left out, so that tests can put it into a message.
        return [SPECIAL[END], SPECIAL[START]]

    def encode(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return list(text.encode())
        tokens: list[int] = []
        for piece in filter(None, SPECIAL_PATTERN.split(text)):
            found = next((token for token, name in SPECIAL.items() if name == piece), None)
            tokens += [found] if found is not None else list(piece.encode())
        return tokens

    def is_end(self, token: int) -> bool:
        return token == END

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return PIECES.get(token, b"")

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:
        return ByteDetokeniser(self.token_bytes)


@dataclass(slots=True)
class _Slot:
    """A rolling hash after each token: the whole state of a sequence."""

    hashes: list[int] = field(default_factory=lambda: [0])


class FakeBackend:
    """Deterministic logits over a small vocabulary."""

    def __init__(self, options: FakeOptions, *, slots: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._options = options
        self._sleep = sleep
        self._steps = 0
        self._slots = [_Slot() for _ in range(slots)]
        self._table = np.random.default_rng(0).normal(0.0, 2.0, (TABLE_ROWS, VOCABULARY)).astype(np.float32)
        self._table[:, :FIRST_WORD] = -np.inf
        self.tokenizer = FakeTokenizer()
        self.description = Description(
            context=options.context,
            slots=slots,
            vocabulary=VOCABULARY,
            device="cpu",
            state_kind=StateKind.RECURRENT if options.recurrent else StateKind.TRIMMABLE,
        )

    def start(self, slot: int, *, keep: int, source: int) -> None:
        self._slots[slot].hashes = self._slots[source].hashes[: keep + 1]

    def step(self, work: Sequence[SlotWork]) -> Logits:
        options = self._options
        prefilled = sum(len(item.tokens) for item in work if len(item.tokens) > 1)
        pause = options.pace + options.prefill * prefilled
        if pause > 0:
            self._sleep(pause)
        self._steps += 1
        while options.hang_after and self._steps >= options.hang_after:
            self._sleep(60.0)
        for item in work:
            if CRASH in item.tokens:
                os.kill(os.getpid(), signal.SIGKILL)
            if POISON in item.tokens:
                raise StepError(f"slot {item.slot} was fed {SPECIAL[POISON]}")
            self._advance(item)
        rows = [self._row(self._slots[item.slot].hashes[-1]) for item in work if item.wants_logits]
        return np.stack(rows) if rows else np.empty((0, VOCABULARY), np.float32)

    def close(self) -> None:
        pass

    def _advance(self, item: SlotWork) -> None:
        hashes = self._slots[item.slot].hashes
        if len(hashes) != item.start + 1:
            raise StepError(f"slot {item.slot} holds {len(hashes) - 1} tokens, not {item.start}")
        state = hashes[-1]
        for token in item.tokens:
            state = (state * HASH_PRIME + token + 1) & 0xFFFFFFFF
            hashes.append(state)

    def _row(self, state: int) -> Logits:
        row: Logits = self._table[state % TABLE_ROWS].copy()
        end_every = self._options.end_every
        # Odd and even states must not differ in anything else, so the end looks at higher bits.
        row[END] = 100.0 if end_every and (state >> 9) % end_every == 0 else -np.inf
        return row
