"""One sequence at a time, for models whose state transformers keeps itself (recurrent, hybrid)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shared.fleet import StateKind
from workers.backends.protocol import Description, Logits, SlotWork, StepError, Tokenizer


class SequentialBackend:
    """A single slot over the model's own cache, which is only ever extended or thrown away.

    A prompt runs in one forward, when its last tokens ask for logits: recurrent layers start from
    a whole prompt or go on by one token, and nothing between the two can be relied on.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, *, context: int, vocabulary: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._device: torch.device = model.device
        self._state: Any = None
        self._waiting: list[int] = []
        self._length = 0
        self._description = Description(
            context=context,
            slots=1,
            vocabulary=vocabulary,
            device=self._device.type,
            state_kind=StateKind.RECURRENT,
        )

    @property
    def description(self) -> Description:
        """What was loaded."""
        return self._description

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def start(self, slot: int, *, keep: int, source: int) -> None:
        """Empty the slot.

        Raises:
            ValueError: `keep` is not 0; the state cannot be cut back.
        """
        if keep:
            raise ValueError("the state of this model cannot be cut back")
        self._state, self._waiting, self._length = None, [], 0

    def step(self, work: Sequence[SlotWork]) -> Logits:
        """Compute the one item of `work`: float32 [1 if it wants logits else 0, vocabulary].

        Raises:
            StepError: the model failed, or `work` does not go on where the slot is.
            torch.AcceleratorError: the device is lost to this process.
        """
        try:
            (item,) = work
            with torch.inference_mode():
                return self._take(item)
        except torch.AcceleratorError:
            # After such an error the device fails at everything this process asks of it.
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            self.start(0, keep=0, source=0)
            raise StepError(str(error)) from error

    def _take(self, item: SlotWork) -> Logits:
        if item.slot != 0 or item.start != self._length or not item.tokens:
            raise ValueError(f"slot {item.slot} cannot take {len(item.tokens)} tokens at {item.start}")
        if item.start + len(item.tokens) > self._description.context:
            raise ValueError(f"more than {self._description.context} tokens")
        self._length += len(item.tokens)
        self._waiting += item.tokens
        if not item.wants_logits:
            return np.empty((0, self._description.vocabulary), dtype=np.float32)
        waiting, self._waiting = self._waiting, []
        pieces = [waiting] if self._state is None else [[token] for token in waiting]
        for piece in pieces:
            logits = self._forward(piece)
        rows: Logits = logits[0, -1:].float().cpu().numpy()
        return rows

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        output = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            cache=self._state,
            use_cache=True,
            logits_to_keep=1,
        )
        self._state = getattr(output, "cache", None)
        if self._state is None:
            raise ValueError("the model returns no cache to go on from")
        logits: torch.Tensor = output.logits
        return logits

    def close(self) -> None:
        """Free the model and its state."""
        del self._model
        self._state = None
