"""Proves, when a model is loaded, that a way of running it gives what the model itself gives."""

from typing import Any

import torch

from workers.backends.protocol import Backend, SlotWork, StepError
from workers.backends.transformers_attention import UnsupportedAttentionError
from workers.backends.transformers_batched import BatchedBackend

KNOWN_LAYERS = {"full_attention", "sliding_attention"}

LENGTHS = (7, 5)
"""Of the sequences that are tried; a prompt in chunks and single tokens need no more."""

TOLERANCE = {torch.float32: 0.002, torch.bfloat16: 0.15}
"""Most that logits may differ: root mean square, in standard deviations of the logits. Another order
of summation alone gives about 1e-5 in float32 and 0.01 in bfloat16; a token that sees what it
must not, or misses what it should see, gives 0.1 to 1 and more."""


class NotBatchableError(Exception):
    """Why a model cannot run batched; the text completes 'it runs one sequence at a time: …'."""


def batchable_context(config: Any, context: int) -> int:
    """`context`, for a model whose config does not speak against batching.

    Raises:
        NotBatchableError: it does.
    """
    text = config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise NotBatchableError(f"it has layers of type {', '.join(sorted(unknown))}")
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original is not None and context > original:
        # It has two sets of frequencies and takes one of them for everything in a forward.
        raise NotBatchableError(f"beyond {original} tokens its rotary embedding depends on who runs beside it")
    return context


class Probe:
    """What the model itself says to two short sequences, and the comparison with it."""

    def __init__(self, model: Any) -> None:
        """Runs the model the plain way, so do this before anything in it is replaced."""
        self._model = model
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._sequences = [[(17 * n + 7919 * m + 11) % vocabulary for n in range(LENGTHS[m])] for m in range(2)]
        with torch.inference_mode():
            self._plain = [
                model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float().cpu()
                for tokens in self._sequences
            ]
        self.vocabulary = int(self._plain[0].shape[-1])

    def check_batched(self, backend: BatchedBackend) -> None:
        """Run both sequences side by side, in chunks and single tokens, and compare.

        Raises:
            NotBatchableError: a step failed or came to other logits.
            torch.OutOfMemoryError: the slots do not fit.
        """
        slots = range(min(2, backend.description.slots))
        try:
            self._check(backend, [{0: 3, 1: 1}, {0: 1, 1: 3}, {0: 3, 1: 1}], slots)
        except StepError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise error.__cause__ from error
            raise NotBatchableError(str(error)) from error
        except (UnsupportedAttentionError, TypeError, AttributeError) as error:
            raise NotBatchableError(str(error)) from error
        layers = self._model.config.get_text_config().num_hidden_layers
        if backend.cached_layers != layers:
            raise NotBatchableError(f"{layers - backend.cached_layers} of its {layers} layers keep their own state")

    def check_sequential(self, backend: Backend) -> None:
        """Run one sequence as a prompt and single tokens, and compare.

        Raises:
            RuntimeError: it came to other logits.
            StepError: a step failed.
        """
        try:
            self._check(backend, [{0: 5}, {0: 1}, {0: 1}], range(1))
        except (NotBatchableError, StepError) as error:
            raise RuntimeError(str(error)) from error

    def restore_attention(self) -> None:
        """Give the model back an attention of its own."""
        try:
            self._model.set_attn_implementation("sdpa")
        except ValueError:
            self._model.set_attn_implementation("eager")

    def _check(self, backend: Backend, steps: list[dict[int, int]], slots: range) -> None:
        """Each step says how many tokens of which sequence to compute; ends with empty slots."""
        done = dict.fromkeys(slots, 0)
        for counts in steps:
            work = [
                SlotWork(slot, done[slot], self._sequences[slot][done[slot] : done[slot] + counts[slot]], True)
                for slot in slots
            ]
            logits = backend.step(work)
            for slot, row in zip(slots, logits, strict=True):
                done[slot] += counts[slot]
                self._compare(torch.from_numpy(row), self._plain[slot][done[slot] - 1])
        for slot in slots:
            backend.start(slot, keep=0, source=slot)

    def _compare(self, ours: torch.Tensor, plain: torch.Tensor) -> None:
        difference = float((ours - plain).square().mean().sqrt() / plain.std())
        if not difference <= TOLERANCE[self._model.dtype]:
            raise NotBatchableError(f"its logits came out different by {difference:.2g} standard deviations")
