"""Attention over many sequences of different lengths in one forward, with a cache row per token.

A step's tokens are flattened to one row [1, tokens]; which of them belong to which slot is known
only here. transformers hands its attention call to `attention`, which writes the new keys and
values into the slots' rows of `SlotCache` and attends sequence by sequence.

What a step needs travels in a `RaggedBatch` through the forward's keyword arguments, so models in
different threads share nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

NAME = "tokenmill"
"""What the attention is called in `set_attn_implementation`. No mask function goes by this name, so
transformers builds no mask."""

BATCH_ARGUMENT = "tokenmill_batch"

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments with which some models change the scores in ways that are not computed here."""


class UnsupportedAttentionError(Exception):
    """The model asks for a kind of attention that is not computed here."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of `slot`, the first at position `start`; in the step's row they begin at `offset`."""

    slot: int
    start: int
    count: int
    offset: int

    @property
    def end(self) -> int:
        """How many tokens the slot holds after the step."""
        return self.start + self.count


class SlotCache:
    """Keys and values of all slots: per layer one row for each slot and position.

    A layer's two tensors are [slots * context, key heads, head size], made when the layer first
    runs, since only then its shapes are certain. Pages of main memory become resident as they are
    written, so on the CPU long contexts cost memory only once they are used.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.context = context
        self._rows = slots * context
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def layers(self) -> int:
        """How many layers have written so far."""
        return len(self._layers)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of a layer; `key` and `value` [1, key heads, tokens, head size] give their shape."""
        found = self._layers.get(index)
        if found is None:
            found = (
                key.new_empty(self._rows, key.shape[1], key.shape[3]),
                value.new_empty(self._rows, value.shape[1], value.shape[3]),
            )
            self._layers[index] = found
        return found

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` rows of slot `target` those of slot `source`."""
        first, to = source * self.context, target * self.context
        for tensors in self._layers.values():
            for rows in tensors:
                rows[to : to + length].copy_(rows[first : first + length])


class RaggedBatch:
    """One step's tokens, by slot, and how they attend.

    With `gather`, the single tokens of all slots attend in one call over padded copies of their
    rows (for accelerators, where a call costs more than a copy); without, each slot attends to a
    view of its own rows (for the CPU). Both give the same up to rounding.
    """

    def __init__(self, cache: SlotCache, spans: Sequence[Span], device: torch.device, *, gather: bool) -> None:
        self._cache = cache
        context = cache.context
        rows = [span.slot * context + position for span in spans for position in range(span.start, span.end)]
        self._rows = torch.tensor(rows, device=device)
        gathered = [span for span in spans if span.count == 1] if gather else []
        self._gathered = _Gathered(gathered, device) if gathered else None
        self._single = [span for span in spans if span.count == 1 and not gather]
        self._chunks = [span for span in spans if span.count > 1]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values and attend.

        `query` is [1, heads, tokens, head size], `key` and `value` [1, key heads, tokens, head size];
        a token sees itself and what its slot holds before it, at most `window` tokens in all.
        Returns [1, tokens, heads, head size of the values].
        """
        keys, values = self._cache.layer(layer, key, value)
        keys.index_copy_(0, self._rows, key[0].transpose(0, 1))
        values.index_copy_(0, self._rows, value[0].transpose(0, 1))
        heads, tokens = query.shape[1:3]
        rows = query[0].transpose(0, 1)
        out = query.new_empty(tokens, heads, values.shape[2])
        for span in self._single:
            out[span.offset] = self._attend_one(rows[span.offset], span, keys, values, scale, window)
        for span in self._chunks:
            out[span.offset : span.offset + span.count] = self._attend_chunk(
                query[:, :, span.offset : span.offset + span.count], span, keys, values, scale, window
            )
        if self._gathered is not None:
            offsets = self._gathered.offsets
            out[offsets] = self._gathered.attend(
                rows[offsets], *self._by_slot(keys, values, self._gathered.longest), scale, window
            )
        return out.unsqueeze(0)

    def _by_slot(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        context = self._cache.context
        return (
            keys.view(-1, context, *keys.shape[1:])[:, :length],
            values.view(-1, context, *values.shape[1:])[:, :length],
        )

    def _held(self, rows: torch.Tensor, first: int, span: Span) -> torch.Tensor:
        """A view of a slot's rows from position `first` on: [1, key heads, length, head size]."""
        base = span.slot * self._cache.context
        return rows[base + first : base + span.end].transpose(0, 1).unsqueeze(0)

    def _attend_one(
        self,
        query: torch.Tensor,
        span: Span,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """One token's [heads, head size]: the heads that share a key head are the rows of one product."""
        first = max(0, span.end - window) if window else 0
        held = self._held(keys, first, span)
        grouped = query.reshape(1, held.shape[1], -1, query.shape[1])
        attended = functional.scaled_dot_product_attention(grouped, held, self._held(values, first, span), scale=scale)
        return attended.reshape(query.shape[0], -1)

    def _attend_chunk(
        self,
        query: torch.Tensor,
        span: Span,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """A chunk's [tokens, heads, head size]."""
        held = self._held(keys, 0, span)
        whole = span.start == 0 and (window is None or span.end <= window)
        attended = functional.scaled_dot_product_attention(
            query,
            held,
            self._held(values, 0, span),
            attn_mask=None if whole else self._mask(span, window, query),
            is_causal=whole,
            scale=scale,
            enable_gqa=query.shape[1] != held.shape[1],
        )
        return attended[0].transpose(0, 1)

    def _mask(self, span: Span, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Which positions each of a chunk's tokens may see: [tokens, length], 0 or -inf; one for all layers."""
        mask = self._masks.get((span.offset, window))
        if mask is None:
            own = torch.arange(span.start, span.end, device=query.device).unsqueeze(1)
            other = torch.arange(span.end, device=query.device)
            hidden = other > own
            if window is not None:
                hidden |= other <= own - window
            mask = query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self._masks[span.offset, window] = mask
        return mask


class _Gathered:
    """Single tokens of several slots that attend in one call."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.longest = max(span.end for span in spans)
        self.offsets = torch.tensor([span.offset for span in spans], device=device)
        self._slots = torch.tensor([span.slot for span in spans], device=device)
        self._ends = torch.tensor([span.end for span in spans], device=device).unsqueeze(1)
        self._visible: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """[tokens, heads, head size] for `query` of that shape; keys and values [slots, longest, key heads, size].

        Rows past a slot's end hold what was there before, be it NaN, so they are blanked: neither a
        mask nor a weight of 0 stops a NaN.
        """
        visible = self._mask(window)
        hidden = ~visible[:, :, None, None]
        held = keys.index_select(0, self._slots).masked_fill_(hidden, 0).transpose(1, 2)
        held_values = values.index_select(0, self._slots).masked_fill_(hidden, 0).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            query.reshape(query.shape[0], held.shape[1], -1, query.shape[2]),
            held,
            held_values,
            attn_mask=visible[:, None, None, :],
            scale=scale,
        )
        return attended.reshape(query.shape[0], query.shape[1], -1)

    def _mask(self, window: int | None) -> torch.Tensor:
        visible = self._visible.get(window)
        if visible is None:
            positions = torch.arange(self.longest, device=self._ends.device)
            visible = positions < self._ends
            if window is not None:
                visible = visible & (positions >= self._ends - window)
            self._visible[window] = visible
        return visible


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls once a layer.

    Raises:
        UnsupportedAttentionError: the model wants more than causal attention with a sliding window.
    """
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention uses {name}")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError("its attention is not plainly causal")
    batch: RaggedBatch | None = arguments.get(BATCH_ARGUMENT)
    if batch is None:
        raise UnsupportedAttentionError("it does not pass a forward's arguments on to its attention")
    return batch.attend(int(module.layer_idx), query, key, value, scaling, sliding_window), None


AttentionInterface.register(NAME, attention)
