"""The scheduler, checked against slots that are plain lists of tokens."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.scheduler.plan import SlotStart, SlotWork
from workers.scheduler.scheduler import (
    MOST_PREFILL_CHUNKS,
    MOST_STEPS_AGAIN,
    WORTH_WAITING_FOR,
    ScheduledStep,
    Scheduler,
    Sequence,
)

STEP_LIMIT = 2000


@dataclass
class Stage:
    """A scheduler over slots that really hold their tokens, and the sequences in play.

    Each step is checked as it is carried out: a start keeps only what is really there, work begins
    where its slot ends, no slot serves two, and running answers all move on. A suspect has a step to
    itself and starts from nothing.
    """

    slots: int = 4
    prefill_chunk: int = 8
    step_tokens: int = 32
    reuse: bool = True
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            slots=self.slots, prefill_chunk=self.prefill_chunk, step_tokens=self.step_tokens, reuse=self.reuse
        )
        self.contents: list[list[int] | None] = [[] for _ in range(self.slots)]
        self.computed: Counter[Sequence] = Counter()
        self.failed: set[Sequence] = set()

    def join(self, prompt: list[int]) -> Sequence:
        sequence = Sequence(list(prompt), len(prompt))
        self.live.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.scheduler.remove(sequence)

    def plan(self) -> ScheduledStep:
        decoding = [one for one in self.live if one.slot is not None and not one.is_prefilling]
        scheduled = self.scheduler.schedule()
        self._check_shares(scheduled, decoding)
        return scheduled

    def run(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Carry the step out; the sequences whose next token can be drawn."""
        for start in scheduled.step.starts:
            self._start(start)
        ready = []
        for work, sequence in zip(scheduled.step.work, scheduled.sequences, strict=True):
            self._compute(work, sequence)
            if work.wants_logits:
                ready.append(sequence)
        self.scheduler.complete(scheduled)
        for sequence in scheduled.sequences:
            assert sequence.slot is not None
            assert self.contents[sequence.slot] == sequence.tokens[: sequence.computed]
        return ready

    def step(self) -> list[Sequence]:
        return self.run(self.plan())

    def fail(self, scheduled: ScheduledStep, starts_done: int) -> list[Sequence]:
        """The step breaks off after so many starts; whom that ends."""
        for start in scheduled.step.starts[:starts_done]:
            self._start(start)
        for start in scheduled.step.starts[starts_done : starts_done + 1]:
            self.contents[start.slot] = None
        if starts_done >= len(scheduled.step.starts):
            for work in scheduled.step.work:
                self.contents[work.slot] = None
        at_fault = self.scheduler.fail(scheduled)
        for sequence in at_fault:
            self.leave(sequence)
        for sequence in self.suspects:
            self.failed.add(sequence)
            assert sequence.slot is None
            assert sequence.computed == 0
        return at_fault

    @property
    def suspects(self) -> list[Sequence]:
        return [sequence for sequence in self.live if sequence.is_suspect]

    def _check_suspect(self, scheduled: ScheduledStep) -> None:
        (sequence,), (work,) = scheduled.sequences, scheduled.step.work
        assert sequence.is_suspect
        assert len(work.tokens) <= max(self.step_tokens, self.slots)
        starts = [SlotStart(work.slot, 0, work.slot)] if work.start == 0 else []
        assert scheduled.step.starts == starts

    def _check_shares(self, scheduled: ScheduledStep, decoding: list[Sequence]) -> None:
        step = scheduled.step
        slots = [work.slot for work in step.work]
        assert len(slots) == len(set(slots))
        occupied = [one.slot for one in self.live if one.slot is not None]
        assert len(occupied) == len(set(occupied)) == self.scheduler.running
        assert len(self.live) == self.scheduler.running + self.scheduler.waiting
        for work, sequence in zip(step.work, scheduled.sequences, strict=True):
            assert sequence in self.live
            assert sequence.slot == work.slot
        if self.suspects:
            self._check_suspect(scheduled)
            return
        shares = {one: len(work.tokens) for one, work in zip(scheduled.sequences, step.work, strict=True)}
        assert all(shares.get(one) == 1 for one in decoding)
        assert sum(shares.values()) <= max(self.step_tokens, self.slots)
        if decoding:
            prefill = sum(share for share in shares.values() if share > 1)
            prefilling = sum(one.slot is not None for one in self.live) - len(decoding)
            assert prefill <= self.prefill_chunk * min(max(1, prefilling / len(decoding)), MOST_PREFILL_CHUNKS)
        assert step.work or not self.live

    def _start(self, start: SlotStart) -> None:
        source = self.contents[start.source] if start.keep else []
        assert source is not None
        assert len(source) >= start.keep
        assert self.reuse or start.keep == 0
        self.contents[start.slot] = source[: start.keep]

    def _compute(self, work: SlotWork, sequence: Sequence) -> None:
        held = self.contents[work.slot]
        assert held is not None
        assert len(held) == work.start == sequence.computed
        assert len(work.tokens) >= 1
        held.extend(work.tokens)
        assert held == sequence.tokens[: len(held)]
        assert work.wants_logits == (len(held) == len(sequence.tokens))
        self.computed[sequence] += len(work.tokens)


PROMPTS = st.builds(
    lambda family, shared, tail: [family] * shared + [tail],
    st.integers(0, 1),
    st.integers(0, 3 * WORTH_WAITING_FOR),
    st.integers(0, 4),
)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 40),
    st.booleans(),
    st.lists(PROMPTS, min_size=1, max_size=12),
    st.integers(0, 2**32),
)
def test_every_token_is_computed_once_in_order_whoever_joins_and_leaves(
    slots: int, prefill_chunk: int, step_tokens: int, reuse: bool, prompts: list[list[int]], seed: int
) -> None:
    stage = Stage(slots=slots, prefill_chunk=prefill_chunk, step_tokens=step_tokens, reuse=reuse)
    chance = random.Random(seed)
    coming = list(prompts)
    wanted: dict[Sequence, int] = {}
    finished = 0
    left = 0
    for _ in range(STEP_LIMIT):
        while coming and chance.random() < 0.5:
            wanted[stage.join(coming.pop())] = chance.randint(1, 6)
        if stage.live and chance.random() < 0.1:
            stage.leave(chance.choice(stage.live))
            left += 1
        if chance.random() < 0.05:
            scheduled = stage.plan()
            left += len(stage.fail(scheduled, chance.randint(0, len(scheduled.step.starts))))
            continue
        for sequence in stage.step():
            wanted[sequence] -= 1
            if wanted[sequence] > 0:
                sequence.tokens.append(chance.randint(0, 4))
                continue
            if sequence not in stage.failed:
                assert stage.computed[sequence] + sequence.cached == len(sequence.tokens)
            assert sequence.cached < sequence.prompt_length
            stage.leave(sequence)
            finished += 1
        if not coming and not stage.live:
            break
    assert finished + left == len(prompts)


POISON = 99


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 40),
    st.booleans(),
    st.lists(st.tuples(PROMPTS, st.booleans()), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
def test_only_a_sequence_that_makes_steps_fail_is_at_fault(
    slots: int, prefill_chunk: int, step_tokens: int, reuse: bool, prompts: list[tuple[list[int], bool]], seed: int
) -> None:
    stage = Stage(slots=slots, prefill_chunk=prefill_chunk, step_tokens=step_tokens, reuse=reuse)
    chance = random.Random(seed)
    coming = list(prompts)
    wanted: dict[Sequence, int] = {}
    for _ in range(STEP_LIMIT):
        while coming and chance.random() < 0.5:
            prompt, is_poisoned = coming.pop()
            if is_poisoned:
                prompt.insert(chance.randint(0, len(prompt)), POISON)
            wanted[stage.join(prompt)] = chance.randint(1, 6)
        scheduled = stage.plan()
        if any(POISON in work.tokens for work in scheduled.step.work):
            at_fault = stage.fail(scheduled, len(scheduled.step.starts))
            assert all(POISON in sequence.tokens for sequence in at_fault)
            continue
        for sequence in stage.run(scheduled):
            wanted[sequence] -= 1
            sequence.tokens.append(chance.randint(0, 4))
            if wanted[sequence] == 0:
                stage.leave(sequence)
        if not coming and not stage.live:
            break

    assert not stage.live
    assert all((left == 0) != (POISON in sequence.tokens) for sequence, left in wanted.items())


def test_the_first_token_s_logits_come_from_the_last_prompt_token() -> None:
    stage = Stage()
    sequence = stage.join([1, 2, 3])

    assert stage.step() == [sequence]
    assert stage.contents[0] == [1, 2, 3]


def test_running_answers_move_on_beside_a_long_prompt() -> None:
    stage = Stage(prefill_chunk=8)
    running = stage.join([1, 2])
    stage.step()
    long = stage.join([3] * 50)

    steps = 0
    while long.is_prefilling:
        running.tokens.append(0)
        assert running in stage.step()
        steps += 1

    assert steps == 7


def test_a_prompt_alone_may_use_the_whole_step() -> None:
    stage = Stage(prefill_chunk=8, step_tokens=32)
    sequence = stage.join([3] * 32)

    assert stage.step() == [sequence]


def test_where_more_prompts_wait_than_answers_run_a_step_takes_more_of_them() -> None:
    stage = Stage(slots=8, prefill_chunk=8, step_tokens=128)
    first = stage.join([1])
    stage.step()
    first.tokens.append(2)
    for number in range(3):
        stage.join([10 + number] * 40)

    shares = {one: len(work.tokens) for one, work in _shares(stage.plan())}

    assert shares.pop(first) == 1
    assert sum(shares.values()) == 3 * 8


def test_a_crowd_of_prompts_does_not_stall_a_running_answer() -> None:
    stage = Stage(slots=8, prefill_chunk=8, step_tokens=512)
    first = stage.join([1])
    stage.step()
    first.tokens.append(2)
    for number in range(7):
        stage.join([10 + number] * 40)

    shares = {one: len(work.tokens) for one, work in _shares(stage.plan())}

    assert shares.pop(first) == 1
    assert sum(shares.values()) == MOST_PREFILL_CHUNKS * 8


def _shares(scheduled: ScheduledStep) -> list[tuple[Sequence, SlotWork]]:
    return list(zip(scheduled.sequences, scheduled.step.work, strict=True))


def test_a_second_turn_reuses_the_first_in_place() -> None:
    stage = Stage()
    first = stage.join([1] * 20)
    stage.step()
    stage.leave(first)

    second = stage.join([1] * 20 + [2, 3])
    stage.step()

    assert second.cached == 20


def test_the_last_prompt_token_is_always_computed_again() -> None:
    stage = Stage()
    first = stage.join([1] * 20)
    stage.step()
    stage.leave(first)

    again = stage.join([1] * 20)

    assert stage.step() == [again]
    assert again.cached == 19


def test_a_prefix_is_copied_from_a_slot_that_is_in_use() -> None:
    stage = Stage()
    first = stage.join([1] * 20 + [2])
    stage.step()
    first.tokens.append(0)

    second = stage.join([1] * 20 + [3])
    stage.step()

    assert second.cached == 20
    assert first.slot != second.slot


@pytest.mark.parametrize("count", [2, 4, 9])
def test_prompts_with_one_prefix_that_come_together_compute_it_once(count: int) -> None:
    stage = Stage(prefill_chunk=16, step_tokens=16)
    prefix = [1] * (2 * WORTH_WAITING_FOR)
    sequences = [stage.join([*prefix, 2, index + 3]) for index in range(count)]

    done: list[Sequence] = []
    for _ in range(100):
        for sequence in stage.step():
            stage.leave(sequence)
            done.append(sequence)

    assert len(done) == count
    assert [sequence.cached >= len(prefix) for sequence in sequences] == [False] + [True] * (count - 1)


def test_identical_prompts_that_come_together_all_run() -> None:
    stage = Stage(slots=4)
    sequences = [stage.join([1] * 40) for _ in range(4)]

    ready: set[Sequence] = set()
    for _ in range(10):
        for sequence in stage.step():
            ready.add(sequence)
            sequence.tokens.append(0)

    assert ready == set(sequences)


def test_a_prompt_waits_no_longer_when_the_one_it_waits_for_leaves() -> None:
    stage = Stage(step_tokens=16, prefill_chunk=16)
    first = stage.join([1] * 40 + [2])
    second = stage.join([1] * 40 + [3])
    stage.step()
    assert second.slot is None

    stage.leave(first)
    stage.step()

    assert second.slot is not None
    assert second.cached == 16


def test_a_waiting_prompt_does_not_hold_up_those_behind_it() -> None:
    stage = Stage(step_tokens=16, prefill_chunk=16)
    stage.join([1] * 40 + [2])
    waits = stage.join([1] * 40 + [3])
    other = stage.join([5] * 10)

    stage.step()

    assert waits.slot is None
    assert other.slot is not None


def test_an_answer_that_is_carried_on_is_computed_as_it_was_the_first_time() -> None:
    scheduler = Scheduler(slots=2, prefill_chunk=8, step_tokens=32, reuse=True, exact_prefill=False)
    sequence = Sequence([1, 2, 3, 10, 11, 12], prompt_length=3)
    scheduler.add(sequence)

    shapes = []
    while sequence.computed < len(sequence.tokens):
        scheduled = scheduler.schedule()
        shapes += [(list(work.tokens), work.wants_logits) for work in scheduled.step.work]
        scheduler.complete(scheduled)

    assert shapes == [([1, 2, 3], False), ([10], False), ([11], False), ([12], True)]


def test_an_answer_too_long_for_that_is_computed_at_once() -> None:
    scheduler = Scheduler(slots=2, prefill_chunk=8, step_tokens=1024, reuse=True, exact_prefill=False)
    sequence = Sequence([1] + [10] * (MOST_STEPS_AGAIN + 1), prompt_length=1)
    scheduler.add(sequence)

    (work,) = scheduler.schedule().step.work

    assert len(work.tokens) == MOST_STEPS_AGAIN + 2


def test_without_reuse_every_prompt_starts_from_nothing() -> None:
    stage = Stage(reuse=False)
    first = stage.join([1] * 20)
    stage.step()
    stage.leave(first)

    again = stage.join([1] * 20)
    stage.step()

    assert again.cached == 0


def test_after_a_failed_step_nothing_of_its_slots_is_reused() -> None:
    stage = Stage(slots=1)
    first = stage.join([1] * 20)
    stage.step()
    first.tokens.append(1)
    assert stage.fail(stage.plan(), starts_done=0) == [first]

    again = stage.join([1] * 20)
    stage.step()

    assert again.cached == 0


def test_a_sequence_whose_start_was_in_a_failed_step_is_a_suspect_too() -> None:
    stage = Stage(slots=2, prefill_chunk=4, step_tokens=4)
    first = stage.join([1] * 10)
    second = stage.join([2] * 10)

    assert stage.fail(stage.plan(), starts_done=0) == []
    assert stage.suspects == [first, second]
    while second.is_prefilling:
        stage.step()

    assert stage.live == [first, second]
    assert not stage.suspects


def test_suspects_run_by_themselves_in_turn_and_then_all_together() -> None:
    stage = Stage(step_tokens=8)
    running = [stage.join([number] * 3) for number in range(2)]
    for sequence in stage.step():
        sequence.tokens.append(9)
    bystander = stage.join([5] * 30)
    assert bystander not in stage.fail(stage.plan(), starts_done=1)

    order = []
    while stage.suspects:
        scheduled = stage.plan()
        order += scheduled.sequences
        for sequence in stage.run(scheduled):
            sequence.tokens.append(9)

    assert order == [*running, *[bystander] * 4]
    assert set(stage.plan().sequences) == {*running, bystander}


def test_what_has_no_part_in_a_failed_step_keeps_its_state_and_stands_by_while_there_are_suspects() -> None:
    stage = Stage(prefill_chunk=8)
    running = stage.join([1])
    stage.step()
    running.tokens.append(9)
    long, bystander = stage.join([2] * 40), stage.join([3] * 8)
    stage.step()
    running.tokens.append(9)
    slot = bystander.slot
    stage.fail(stage.plan(), starts_done=0)

    assert stage.suspects == [running, long]
    while stage.suspects:
        for sequence in stage.step():
            sequence.tokens.append(9)

    assert bystander.slot == slot is not None
    assert bystander in stage.plan().sequences


def test_a_sequence_counts_as_cached_what_it_first_started_with() -> None:
    stage = Stage()
    first = stage.join([1] * 20)
    stage.step()
    stage.leave(first)
    second, other = stage.join([1] * 20 + [2, 3]), stage.join([4])
    stage.step()
    second.tokens.append(9)
    other.tokens.append(9)
    stage.fail(stage.plan(), starts_done=0)

    while stage.suspects:
        stage.step()

    assert second.cached == 20
    assert stage.computed[second] == 2 + 23


def test_when_each_works_alone_and_all_together_never_the_latest_are_given_up_until_it_does() -> None:
    stage = Stage()
    sequences = [stage.join([number] * 3) for number in range(4)]
    given_up = []
    for _ in range(STEP_LIMIT):
        scheduled = stage.plan()
        if len(scheduled.sequences) > 2:
            given_up += stage.fail(scheduled, starts_done=len(scheduled.step.starts))
            continue
        for sequence in stage.run(scheduled):
            sequence.tokens.append(9)

    assert given_up == [sequences[3], sequences[2]]
    assert stage.live == sequences[:2]


def test_a_failure_long_after_an_unexplained_one_gives_nobody_up() -> None:
    stage = Stage()
    running = [stage.join([number] * 3) for number in range(2)]
    stage.fail(stage.plan(), starts_done=2)
    for _ in range(3):
        for sequence in stage.step():
            sequence.tokens.append(9)

    assert stage.fail(stage.plan(), starts_done=0) == []
    assert stage.suspects == running
