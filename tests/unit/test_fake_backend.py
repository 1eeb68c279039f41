"""The fake backend keeps the backends' contract."""

from typing import Any

import numpy as np
import pytest

from shared.errors import ModelLoadError
from shared.fleet import StateKind
from workers.backends.fake import END, POISON, VOCABULARY, FakeBackend, FakeOptions, parse_options
from workers.backends.protocol import SlotWork, StepError


def backend(options: str = "", *, slots: int = 3, **parts: Any) -> FakeBackend:
    return FakeBackend(parse_options(options), slots=slots, **parts)


def last_row(fake: FakeBackend, slot: int, start: int, tokens: list[int]) -> np.ndarray[Any, Any]:
    return fake.step([SlotWork(slot, start, tokens, True)])[0].copy()


def test_options_have_defaults_and_are_read_from_the_spec() -> None:
    assert parse_options("") == FakeOptions()
    assert parse_options("pace=0.01&context=77&end_every=0&recurrent=1&prefill=0.5") == FakeOptions(
        pace=0.01, context=77, end_every=0, recurrent=1, prefill=0.5
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [("speed=1", "no option 'speed'"), ("pace=fast", "cannot be 'fast'"), ("context=-1", "below 0"), ("pace", "''")],
)
def test_a_bad_option_is_named(text: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        parse_options(text)


def test_whole_and_chunked_prompts_give_the_same_logits() -> None:
    fake = backend()
    whole = last_row(fake, 0, 0, [1, 2, 3, 4, 5])
    fake.step([SlotWork(1, 0, [1, 2], False)])

    assert np.array_equal(last_row(fake, 1, 2, [3, 4, 5]), whole)


def test_a_copied_prefix_gives_the_same_logits() -> None:
    fake = backend()
    last_row(fake, 0, 0, [1, 2, 3, 4])
    fake.start(1, keep=2, source=0)
    copied = last_row(fake, 1, 2, [9])
    fake.start(0, keep=2, source=0)
    cut_back = last_row(fake, 0, 2, [9])

    assert np.array_equal(copied, cut_back)
    assert np.array_equal(copied, last_row(fake, 2, 0, [1, 2, 9]))


def test_rows_come_in_the_order_of_the_work_that_wants_them() -> None:
    fake = backend()
    alone = [last_row(fake, slot, 0, [slot + 1]) for slot in range(3)]
    for slot in range(3):
        fake.start(slot, keep=0, source=slot)

    logits = fake.step([SlotWork(2, 0, [3], True), SlotWork(0, 0, [1], False), SlotWork(1, 0, [2], True)])

    assert np.array_equal(logits, np.stack([alone[2], alone[1]]))
    assert logits.shape == (2, VOCABULARY)


def test_a_step_that_wants_nothing_returns_no_rows() -> None:
    assert backend().step([SlotWork(0, 0, [1], False)]).shape == (0, VOCABULARY)


def test_work_that_does_not_begin_where_its_slot_ends_fails() -> None:
    with pytest.raises(StepError, match="holds 0 tokens, not 3"):
        backend().step([SlotWork(0, 3, [1], True)])


def test_poison_makes_a_step_fail() -> None:
    with pytest.raises(StepError, match="poison"):
        backend().step([SlotWork(0, 0, [1, POISON], True)])


def test_a_step_takes_its_pace_and_its_prefill() -> None:
    slept: list[float] = []
    fake = backend("pace=0.5&prefill=0.25", sleep=slept.append)

    fake.step([SlotWork(0, 0, [1, 2, 3], True), SlotWork(1, 0, [1], True)])

    assert slept == [1.25]


def test_the_end_comes_about_as_often_as_asked() -> None:
    fake = backend("end_every=8")
    ends = sum(int(last_row(fake, 0, step, [step % 7]).argmax()) == END for step in range(4000))

    assert 350 < ends < 650


def test_an_endless_answer_has_no_end() -> None:
    fake = backend("end_every=0")

    assert all(last_row(fake, 0, step, [step % 7])[END] == -np.inf for step in range(200))


def test_its_state_is_of_the_kind_that_was_asked_for() -> None:
    assert backend().description.state_kind is StateKind.TRIMMABLE
    assert backend("recurrent=1").description.state_kind is StateKind.RECURRENT


def test_its_tokenizer_spells_special_tokens_out_unless_told_otherwise() -> None:
    tokenizer = backend().tokenizer

    assert tokenizer.encode("a<|end|>", special=True) == [97, END]
    assert tokenizer.encode("a<|end|>", special=False) == list(b"a<|end|>")
    assert tokenizer.is_end(END)
    assert not tokenizer.is_end(97)
