"""The transformers backend on a real model: what it computes is what the model itself computes."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from models import SMALL, open_model, save_small, smollm2_folder
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from shared.fleet import StateKind
from workers.backends.protocol import Backend, SlotWork, StepError
from workers.backends.transformers_batched import BatchedBackend

pytestmark = pytest.mark.torch

QUESTIONS = (
    "Why is the sky blue?",
    "Name three animals that live in the sea and say one thing about each.",
    "Hi",
    "Write a short poem about rain.",
)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    backend = open_model(smollm2_folder())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def plain() -> Any:
    """The model itself, without anything of ours."""
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()


@pytest.fixture
def empty(backend: Backend) -> Backend:
    for slot in range(backend.description.slots):
        backend.start(slot, keep=0, source=slot)
    return backend


def prompt(backend: Backend, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return backend.tokenizer.encode(text, special=True)


def prefill(backend: Backend, slot: int, tokens: Sequence[int], *, start: int = 0, chunk: int = 10_000) -> Any:
    """The logits after the last of the tokens."""
    for first in range(0, len(tokens), chunk):
        piece = tokens[first : first + chunk]
        last = first + chunk >= len(tokens)
        logits = backend.step([SlotWork(slot, start + first, piece, last)])
    return logits[0].copy()


def decode(backend: Backend, slots: dict[int, tuple[int, int]], count: int) -> dict[int, list[int]]:
    """Greedy tokens of `slots` (slot to length and first token), all together; the first ones included."""
    lengths = {slot: length for slot, (length, _) in slots.items()}
    answers = {slot: [token] for slot, (_, token) in slots.items()}
    for _ in range(count - 1):
        logits = backend.step([SlotWork(slot, lengths[slot], answers[slot][-1:], True) for slot in slots])
        for slot, row in zip(slots, logits, strict=True):
            lengths[slot] += 1
            answers[slot].append(int(row.argmax()))
    return answers


def answer(backend: Backend, slot: int, tokens: Sequence[int], count: int) -> list[int]:
    first = int(prefill(backend, slot, tokens).argmax())
    return decode(backend, {slot: (len(tokens), first)}, count)[slot]


def generated(model: Any, tokens: list[int], count: int) -> list[int]:
    """transformers' own greedy answer, going on past end tokens."""
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
    )
    found: list[int] = output[0, len(tokens) :].tolist()
    return found


def close(ours: Any, other: Any) -> bool:
    return bool(np.allclose(ours, other, rtol=1e-3, atol=2e-3))


def test_the_description_says_what_was_loaded(backend: Backend) -> None:
    found = backend.description
    assert (found.slots, found.context, found.vocabulary, found.device) == (4, 512, 49_152, "cpu")
    assert found.state_kind is StateKind.TRIMMABLE
    assert backend.tokenizer.is_end(2)


def test_answers_decoded_together_are_those_of_plain_generate(empty: Backend, plain: Any) -> None:
    prompts = [prompt(empty, question) for question in QUESTIONS]
    logits = empty.step([SlotWork(slot, 0, tokens, True) for slot, tokens in enumerate(prompts)])
    assert logits.dtype == np.float32
    assert logits.shape == (4, 49_152)
    slots = {slot: (len(tokens), int(logits[slot].argmax())) for slot, tokens in enumerate(prompts)}
    answers = decode(empty, slots, 16)
    assert answers == {slot: generated(plain, tokens, 16) for slot, tokens in enumerate(prompts)}


def test_logits_are_those_of_a_plain_forward(empty: Backend, plain: Any) -> None:
    tokens = prompt(empty, QUESTIONS[1])
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens])).logits[0, -1].numpy()
    assert close(prefill(empty, 0, tokens), expected)


@pytest.mark.parametrize("chunk", [1, 7])
def test_a_prompt_in_chunks_is_the_whole_prompt(empty: Backend, chunk: int) -> None:
    tokens = prompt(empty, QUESTIONS[1])
    assert close(prefill(empty, 0, tokens, chunk=chunk), prefill(empty, 1, tokens))


def test_a_sequence_is_not_disturbed_by_others_that_join_and_leave(empty: Backend) -> None:
    first, other = prompt(empty, QUESTIONS[0]), prompt(empty, QUESTIONS[3])
    alone = answer(empty, 0, first, 12)
    empty.start(0, keep=0, source=0)

    tokens = [int(prefill(empty, 0, first).argmax())]
    for turn in range(11):
        work = [SlotWork(0, len(first) + turn, tokens[-1:], True)]
        if turn == 3:
            work.insert(0, SlotWork(2, 0, other[:5], False))
        if turn == 4:
            work.append(SlotWork(2, 5, other[5:], True))
        if turn == 6:
            empty.start(2, keep=0, source=2)
            work.insert(0, SlotWork(2, 0, first, False))
        logits = empty.step(work)
        tokens.append(int(logits[0].argmax()))
    assert tokens == alone


def test_only_wanted_rows_come_back_in_the_order_of_the_work(empty: Backend) -> None:
    work = [
        SlotWork(3, 0, [10, 20, 30], True),
        SlotWork(0, 0, [40], False),
        SlotWork(1, 0, [50, 60], True),
    ]
    logits = empty.step(work).copy()
    assert logits.shape == (2, 49_152)
    empty.start(2, keep=0, source=2)
    assert close(logits[0], prefill(empty, 2, [10, 20, 30]))
    empty.start(2, keep=0, source=2)
    assert close(logits[1], prefill(empty, 2, [50, 60]))
    assert empty.step([SlotWork(0, 1, [41], False)]).shape == (0, 49_152)


def test_logits_may_be_edited_in_place(empty: Backend) -> None:
    logits = empty.step([SlotWork(0, 0, [5, 6], True)])
    logits[0, :] = -np.inf
    logits[0, 7] = 1.0
    assert logits[0].argmax() == 7


def test_a_prefix_copied_from_another_slot_gives_the_answer_of_a_cold_start(empty: Backend) -> None:
    system = empty.tokenizer.encode("<|im_start|>system\nYou answer in one word.<|im_end|>\n", special=True)
    one, two = (system + prompt(empty, question) for question in QUESTIONS[:2])
    answer(empty, 0, one, 6)
    cold = answer(empty, 1, two, 10)

    empty.start(2, keep=len(system), source=0)
    first = int(prefill(empty, 2, two[len(system) :], start=len(system)).argmax())
    assert decode(empty, {2: (len(two), first)}, 10)[2] == cold
    # The source goes on as if nothing had been taken from it.
    assert empty.step([SlotWork(0, len(one) + 5, [9], True)]).shape == (1, 49_152)


def test_a_slot_cut_back_goes_on_as_if_the_rest_had_never_been(empty: Backend) -> None:
    tokens = prompt(empty, QUESTIONS[3])
    first = answer(empty, 0, tokens, 10)
    empty.start(0, keep=len(tokens) - 4, source=0)
    again = int(prefill(empty, 0, tokens[-4:], start=len(tokens) - 4).argmax())
    assert decode(empty, {0: (len(tokens), again)}, 10)[0] == first


def test_more_than_a_slot_holds_cannot_be_kept(empty: Backend) -> None:
    prefill(empty, 0, [1, 2, 3])
    with pytest.raises(ValueError, match="holds 3 tokens"):
        empty.start(1, keep=4, source=0)


@pytest.mark.parametrize(
    "work",
    [
        SlotWork(0, 0, [1, 10_000_000], True),
        SlotWork(0, 3, [1], True),
        SlotWork(0, 0, list(range(513)), True),
        SlotWork(0, 0, [], True),
    ],
    ids=["no such token", "not where the slot is", "past the context", "nothing"],
)
def test_a_bad_step_fails_and_the_next_one_works(empty: Backend, work: SlotWork) -> None:
    tokens = prompt(empty, QUESTIONS[2])
    prefill(empty, 1, tokens[:4])
    with pytest.raises(StepError):
        empty.step([work])
    empty.start(0, keep=0, source=0)
    assert close(prefill(empty, 0, tokens), prefill(empty, 1, tokens[4:], start=4))


def test_a_step_that_runs_out_of_memory_half_way_leaves_the_next_ones_right(
    empty: Backend, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(empty, BatchedBackend)
    tokens = prompt(empty, QUESTIONS[0])
    prefill(empty, 0, tokens)
    other = int(prefill(empty, 1, tokens).argmax())

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(empty._model.model.layers[7].mlp, "forward", out_of_memory)
        with pytest.raises(StepError):
            empty.step([SlotWork(0, len(tokens), [1], True), SlotWork(2, 0, tokens, True)])

    assert decode(empty, {1: (len(tokens), other)}, 8)[1] == generated(plain, tokens, 8)
    for slot in (0, 2):
        empty.start(slot, keep=0, source=slot)
        first = int(prefill(empty, slot, tokens, chunk=9).argmax())
        assert decode(empty, {slot: (len(tokens), first)}, 8)[slot] == generated(plain, tokens, 8)


def test_a_lost_device_is_no_fault_of_a_step_s_requests(empty: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(empty, BatchedBackend)

    def lose(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(empty._model.model, "forward", lose)
    with pytest.raises(torch.AcceleratorError):
        empty.step([SlotWork(0, 0, [1], True)])


def test_gathered_and_viewed_attention_decode_the_same(backend: Backend, plain: Any) -> None:
    folder_model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()
    gathering = BatchedBackend(folder_model, backend.tokenizer, slots=4, context=512, vocabulary=49_152, gather=True)
    for question in QUESTIONS[:2]:
        tokens = prompt(backend, question)
        for slot in (3, 1):
            gathering.start(slot, keep=0, source=slot)
        # Two sequences of different lengths side by side.
        first = int(prefill(gathering, 3, tokens).argmax())
        other = int(prefill(gathering, 1, tokens[:9]).argmax())
        answers = decode(gathering, {3: (len(tokens), first), 1: (9, other)}, 8)
        assert answers[3] == generated(plain, tokens, 8)
        assert answers[1] == generated(plain, tokens[:9], 8)


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 49_152, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    config = MambaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return save_small(MambaForCausalLM(config), tmp_path_factory.mktemp("mamba"))


def test_a_recurrent_model_runs_one_at_a_time_and_says_so(mamba: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tokenmill.worker"):
        backend = open_model(mamba)
    assert backend.description.slots == 1
    assert backend.description.state_kind is StateKind.RECURRENT
    (record,) = [record for record in caplog.records if record.name == "tokenmill.worker"]
    assert "one sequence at a time: it has layers of type linear_attention" in record.getMessage()


def test_a_recurrent_models_answer_is_that_of_plain_generate(mamba: Path) -> None:
    backend = open_model(mamba)
    model = AutoModelForCausalLM.from_pretrained(mamba).eval()
    for question in QUESTIONS[:2]:
        tokens = prompt(backend, question)
        backend.start(0, keep=0, source=0)
        first = int(prefill(backend, 0, tokens, chunk=5).argmax())
        assert decode(backend, {0: (len(tokens), first)}, 10)[0] == generated(model, tokens, 10)


def test_recurrent_state_is_never_kept_and_a_bad_step_leaves_it_usable(mamba: Path) -> None:
    backend = open_model(mamba)
    expected = prefill(backend, 0, [5, 6, 7])
    with pytest.raises(ValueError, match="cut back"):
        backend.start(0, keep=2, source=0)
    with pytest.raises(StepError):
        backend.step([SlotWork(0, 3, [10_000_000], True)])
    backend.start(0, keep=0, source=0)
    assert close(prefill(backend, 0, [5, 6, 7]), expected)
    with pytest.raises(StepError):
        backend.step([SlotWork(0, 3, [1], True), SlotWork(1, 0, [1], True)])


def test_a_model_with_a_sliding_window_runs_batched(tmp_path: Path) -> None:
    folder = save_small(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)), tmp_path)
    backend = open_model(folder)
    assert (backend.description.slots, backend.description.state_kind) == (4, StateKind.TRIMMABLE)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for slot, question in enumerate(QUESTIONS[:2]):
        tokens = prompt(backend, question)
        first = int(prefill(backend, slot, tokens, chunk=9).argmax())
        assert decode(backend, {slot: (len(tokens), first)}, 12)[slot] == generated(model, tokens, 12)


def test_attention_that_is_not_plain_runs_one_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_small(Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=6)), tmp_path)
    with caplog.at_level(logging.WARNING, logger="tokenmill.worker"):
        backend = open_model(folder)
    assert backend.description.slots == 1
    assert "softcap" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = prompt(backend, QUESTIONS[0])
    assert answer(backend, 0, tokens, 8) == generated(model, tokens, 8)


def unbatched(model: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Why the model runs one sequence at a time, having seen that it does and answers as it should."""
    backend = open_model(save_small(model, folder))
    assert (backend.description.slots, backend.description.state_kind) == (1, StateKind.RECURRENT)
    tokens = prompt(backend, QUESTIONS[0])
    assert answer(backend, 0, tokens, 6) == generated(model.eval(), tokens, 6)
    return caplog.text


def test_a_model_that_comes_out_different_runs_one_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Its positions are in the attention scores, of which it asks nobody else.
    config = BloomConfig(vocab_size=49_152, hidden_size=32, n_layer=2, n_head=4, eos_token_id=2, pad_token_id=2)
    assert "logits came out different" in unbatched(BloomForCausalLM(config), tmp_path, caplog)


def test_a_model_that_keeps_arguments_to_itself_runs_one_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = StableLmForCausalLM(StableLmConfig(**SMALL))
    assert "does not pass" in unbatched(model, tmp_path, caplog)


def test_a_rotary_embedding_that_depends_on_the_longest_runs_batched_only_below_its_switch(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
        "factor": 2.0,
    }
    folder = save_small(LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope)), tmp_path)
    assert open_model(folder, context=64).description.slots == 4
    assert open_model(folder, context=0).description.slots == 1


def test_bfloat16_runs_batched(tmp_path: Path) -> None:
    folder = save_small(LlamaForCausalLM(LlamaConfig(**SMALL)), tmp_path)
    backend = open_model(folder, dtype="bfloat16")
    assert backend.description.slots == 4
    assert prefill(backend, 0, [1, 2, 3]).dtype == np.float32
