"""Continuous batching for models with plain causal attention: one flattened forward a step."""

from collections.abc import Sequence
from typing import Any

import torch

from shared.fleet import StateKind
from workers.backends.protocol import Description, Logits, SlotWork, StepError, Tokenizer
from workers.backends.transformers_attention import BATCH_ARGUMENT, NAME, RaggedBatch, SlotCache, Span


class BatchedBackend:
    """Many slots; prompts' chunks and single tokens of all of them run through the model together.

    What a slot computes is the same up to rounding whoever runs beside it: a matrix product adds up
    in another order when it has other numbers of rows, so two nearly equal logits can swap places.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, *, slots: int, context: int, vocabulary: int, gather: bool
    ) -> None:
        """Takes `model` over and sets its attention. `gather` chooses the way to attend (see RaggedBatch)."""
        model.set_attn_implementation(NAME)
        self._model = model
        self._tokenizer = tokenizer
        self._device: torch.device = model.device
        self._gather = gather
        self._cache = SlotCache(slots, context)
        self._lengths = [0] * slots
        self._description = Description(
            context=context,
            slots=slots,
            vocabulary=vocabulary,
            device=self._device.type,
            state_kind=StateKind.TRIMMABLE,
        )

    @property
    def description(self) -> Description:
        """What was loaded."""
        return self._description

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def cached_layers(self) -> int:
        """How many layers keep their state here, once a step has run."""
        return self._cache.layers

    def start(self, slot: int, *, keep: int, source: int) -> None:
        """Make `slot` hold the first `keep` tokens of what slot `source` holds, and nothing else.

        Raises:
            ValueError: `source` holds fewer tokens.
        """
        if keep > self._lengths[source]:
            raise ValueError(f"slot {source} holds {self._lengths[source]} tokens, not {keep}")
        if keep and source != slot:
            with torch.inference_mode():
                self._cache.copy(source, slot, keep)
        self._lengths[slot] = keep

    def step(self, work: Sequence[SlotWork]) -> Logits:
        """Compute all of `work` together: float32 [items that want logits, vocabulary].

        Raises:
            StepError: the model failed, or `work` does not go on where its slots are.
            torch.AcceleratorError: the device is lost to this process.
        """
        try:
            with torch.inference_mode():
                return self._forward(work)
        except torch.AcceleratorError:
            # After such an error the device fails at everything this process asks of it.
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            for item in work:
                self._lengths[item.slot] = 0
            raise StepError(str(error)) from error

    def _forward(self, work: Sequence[SlotWork]) -> Logits:
        spans = self._spans(work)
        wanted = [span.offset + span.count - 1 for span, item in zip(spans, work, strict=True) if item.wants_logits]
        tokens = [token for item in work for token in item.tokens]
        positions = [position for span in spans for position in range(span.start, span.end)]
        batch = RaggedBatch(self._cache, spans, self._device, gather=self._gather)
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            # Of no row at all some models cannot make logits, so of one that is dropped below.
            logits_to_keep=torch.tensor(wanted or [0], device=self._device),
            **{BATCH_ARGUMENT: batch},
        ).logits
        for span in spans:
            self._lengths[span.slot] = span.end
        rows: Logits = logits[0, : len(wanted)].float().cpu().numpy()
        return rows

    def _spans(self, work: Sequence[SlotWork]) -> list[Span]:
        spans: list[Span] = []
        offset = 0
        for item in work:
            span = Span(item.slot, item.start, len(item.tokens), offset)
            if span.start != self._lengths[span.slot]:
                raise ValueError(f"slot {span.slot} holds {self._lengths[span.slot]} tokens, not {span.start}")
            if span.count == 0 or span.end > self._description.context:
                raise ValueError(f"slot {span.slot} cannot take {span.count} tokens at {span.start}")
            spans.append(span)
            offset += span.count
        return spans

    def close(self) -> None:
        """Free the model and the slots."""
        del self._model, self._cache
