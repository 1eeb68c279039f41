"""Ragged attention against a plain computation, one sequence at a time, in both ways to attend."""

from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

from workers.backends.transformers_attention import RaggedBatch, SlotCache, Span, UnsupportedAttentionError, attention
from workers.backends.transformers_linear import PackedLinear, can_pack, pack

pytestmark = pytest.mark.torch

SLOTS, CONTEXT, HEADS, KEY_HEADS, SIZE = 4, 24, 6, 2, 8

STEPS: list[list[tuple[int, int]]] = [
    [(2, 5), (0, 1)],
    [(0, 1), (2, 4), (3, 7)],
    [(3, 1), (0, 1), (2, 1)],
    [(2, 6), (3, 1)],
]
"""Per step: slot and number of tokens, in the order of the row."""


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention written out: [heads, tokens, size] and key heads alike to [tokens, heads, size]."""
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=0) for each in (key, value))
    scores = query @ key.transpose(1, 2) / SIZE**0.5
    own, other = torch.arange(query.shape[1])[:, None], torch.arange(key.shape[1])
    hidden = other > own if window is None else (other > own) | (other <= own - window)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1)


def numbers(heads: int, tokens: int) -> torch.Tensor:
    return torch.randn(heads, tokens, SIZE, generator=torch.Generator().manual_seed(heads * 100 + tokens))


def attend(cache: SlotCache, *, gather: bool, window: int | None) -> dict[int, torch.Tensor]:
    """Runs STEPS; what came out for each slot, in the order of its positions."""
    query, key, value = numbers(HEADS, CONTEXT), numbers(KEY_HEADS, CONTEXT), numbers(KEY_HEADS, CONTEXT) * 3
    done = dict.fromkeys(range(SLOTS), 0)
    out: dict[int, list[torch.Tensor]] = {slot: [] for slot in done}
    for step in STEPS:
        spans: list[Span] = []
        for slot, count in step:
            spans.append(Span(slot, done[slot], count, sum(span.count for span in spans)))
            done[slot] += count
        # A slot's numbers are those of the shared ones, shifted, so that slots differ.
        picks = [(position + span.slot) % CONTEXT for span in spans for position in range(span.start, span.end)]
        batch = RaggedBatch(cache, spans, torch.device("cpu"), gather=gather)
        row = batch.attend(0, query[None, :, picks], key[None, :, picks], value[None, :, picks], None, window)
        for span in spans:
            out[span.slot].append(row[0, span.offset : span.offset + span.count])
    return {slot: torch.cat(parts) for slot, parts in out.items() if parts}


def expected(slot: int, length: int, window: int | None) -> torch.Tensor:
    picks = [(position + slot) % CONTEXT for position in range(length)]
    query, key, value = numbers(HEADS, CONTEXT), numbers(KEY_HEADS, CONTEXT), numbers(KEY_HEADS, CONTEXT) * 3
    return plain(query[:, picks], key[:, picks], value[:, picks], window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("gather", [False, True])
def test_each_slot_gets_what_it_would_get_alone(gather: bool, window: int | None) -> None:
    found = attend(SlotCache(SLOTS, CONTEXT), gather=gather, window=window)
    assert {slot: len(rows) for slot, rows in found.items()} == {0: 3, 2: 16, 3: 9}
    for slot, rows in found.items():
        torch.testing.assert_close(rows, expected(slot, len(rows), window))


@pytest.mark.parametrize("gather", [False, True])
def test_what_a_slot_held_before_never_reaches_the_next_sequence(gather: bool) -> None:
    cache = SlotCache(SLOTS, CONTEXT)
    like = torch.zeros(1, KEY_HEADS, 1, SIZE)
    for rows in cache.layer(0, like, like):
        rows.fill_(float("nan"))
    for slot, rows in attend(cache, gather=gather, window=None).items():
        torch.testing.assert_close(rows, expected(slot, len(rows), None))


def test_copied_rows_are_those_of_the_source() -> None:
    cache = SlotCache(SLOTS, CONTEXT)
    attend(cache, gather=False, window=None)
    cache.copy(2, 1, 10)
    like = torch.zeros(1, KEY_HEADS, 1, SIZE)
    for rows in cache.layer(0, like, like):
        by_slot = rows.view(SLOTS, CONTEXT, KEY_HEADS, SIZE)
        assert torch.equal(by_slot[1, :10], by_slot[2, :10])


@pytest.mark.parametrize("argument", ["softcap", "s_aux"])
def test_attention_that_is_not_computed_here_is_refused(argument: str) -> None:
    rows = torch.zeros(1, 1, 1, SIZE)
    with pytest.raises(UnsupportedAttentionError, match=argument):
        attention(nn.Identity(), rows, rows, rows, None, **{argument: 30.0})


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96, bias=bias), nn.SiLU(), nn.Linear(96, 16, bias=bias))
    inputs = torch.randn(1, rows, 48)
    with torch.inference_mode():
        dense = model(inputs)
        assert can_pack(model)
        pack(model)
        assert [type(layer) for layer in model] == [PackedLinear, nn.SiLU, PackedLinear]
        torch.testing.assert_close(model(inputs), dense)


def test_the_weight_of_a_packed_layer_can_still_be_read() -> None:
    dense = nn.Linear(48, 96)
    assert torch.equal(PackedLinear(dense).weight, dense.weight)


def shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def test_keys_and_values_may_have_different_sizes() -> None:
    cache = SlotCache(1, 4)
    key, value = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 5)
    out = RaggedBatch(cache, [Span(0, 0, 2, 0)], torch.device("cpu"), gather=False).attend(
        0, torch.randn(1, 2, 2, 8), key, value, None, None
    )
    assert shapes([out, *cache.layer(0, key, value)]) == [(1, 2, 2, 5), (4, 1, 8), (4, 1, 5)]
