"""What every backend does, and nothing that all of them share.

A backend owns a fixed number of *slots*. A slot holds the state of one sequence: the tokens it has
computed, from position 0 on. The engine tells each slot what to compute next and gets the logits
back; scheduling, sampling, stop strings and publishing are the engine's and the same for all.

Threading: `load` and every method that touches slots is called by one thread at a time, the
engine's. `tokenizer` is used by the intake thread at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.fleet import StateKind
from workers.detokenise import Detokeniser
from workers.scheduler.plan import SlotWork

__all__ = ["Backend", "Description", "Logits", "SlotWork", "StepError", "Tokenizer"]

Logits = npt.NDArray[np.float32]
"""One row per output: shape [outputs, vocabulary], unnormalised."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a loaded model is.

    `context` is the most tokens that one slot can hold, `slots` how many sequences run at once (it
    can be fewer than asked for: a model that cannot be batched has one). With `exact_prefill`, tokens
    that are computed together give what they give one by one, so that no near tie falls the other way.
    """

    context: int
    slots: int
    vocabulary: int
    device: str
    state_kind: StateKind
    exact_prefill: bool = True


class Tokenizer(Protocol):
    """Text to tokens and back, for one model. Safe to use beside a running step."""

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template, if it has one."""

    @property
    def special_texts(self) -> dict[str, str]:
        """Names that templates know (`bos_token`, `eos_token`) to their text."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The text of every token that text from users must never become."""

    @property
    def bos_token(self) -> int | None:
        """The token that every prompt must begin with, once; None if this model wants none."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of `text`, without any added at its ends.

        With `special`, the text of a special token becomes that token; without, it is spelled out.
        """

    def is_end(self, token: int) -> bool:
        """Whether this token ends an answer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for on its own; may be part of a character."""

    def detokeniser(self, prompt: Sequence[int]) -> Detokeniser:
        """A fresh detokeniser for an answer that follows `prompt`."""


class Backend(Protocol):
    """A loaded model with its slots."""

    @property
    def description(self) -> Description:
        """What was loaded."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def start(self, slot: int, *, keep: int, source: int) -> None:
        """Make `slot` hold the first `keep` tokens of what slot `source` holds, and nothing else.

        `keep` 0 empties the slot. `source` may be `slot` itself. Only with TRIMMABLE state is
        `keep` ever above 0.
        """

    def step(self, work: Sequence[SlotWork]) -> Logits:
        """Compute all of `work` together.

        Returns one row of logits for each item that wants them, in the order of `work`. The array
        is valid until the next call and may be edited in place.

        Raises:
            StepError: the model failed; the slots of `work` must be started again from nothing, and
                then work as before. Any other error means that the process can compute nothing more.
        """

    def close(self) -> None:
        """Free the model."""


class StepError(Exception):
    """A step failed for the slots that took part in it."""
