"""The scheduler: which sequences run, in which slots, and how many tokens each gets per step.

Sequences join and leave at every step. A running answer gets its one token in every step; prompts
are computed in chunks beside them, so that a long prompt never holds up the others. A new sequence
starts from whatever slot already holds the beginning of its prompt.

After a step that failed, each of its sequences is a suspect: it is computed again from nothing, by
itself, and rejoins the others once that has worked. One that fails by itself is at fault.
"""

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from workers.scheduler.plan import SlotStart, SlotWork, Step
from workers.scheduler.slots import Slot, common_prefix

WORTH_WAITING_FOR = 16
"""A prompt waits for another that is being computed if that saves it at least so many tokens."""

MOST_STEPS_AGAIN = 256
"""Up to so many tokens of an answer are worth a step each, to be exactly what they were."""

MOST_PREFILL_CHUNKS = 4
"""How often the usual share of prompt tokens a step takes, however many prompts wait."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in the making.

    `tokens` is the prompt followed by what was drawn, and grows; the first `computed` of them are
    in the slot. `cached` of the prompt's were there when it first started, whatever was lost since.
    A suspect was in a step that failed and has not shown yet that it was not the reason.
    """

    tokens: list[int]
    prompt_length: int
    slot: int | None = None
    computed: int = 0
    cached: int = 0
    is_suspect: bool = False

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be computed."""
        return len(self.tokens) - self.computed > 1


@dataclass(slots=True)
class ScheduledStep:
    """A step with the sequence behind each item of its work."""

    step: Step = field(default_factory=Step)
    sequences: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Pure state: no model, no clock, no threads.

    `prefill_chunk` is the most prompt tokens in a step that also carries running answers, and up to
    `MOST_PREFILL_CHUNKS` of it where more prompts wait than answers run; `step_tokens` the most
    tokens of any step. `reuse` allows a slot to keep a prefix of what it holds; without it every
    prompt starts from nothing. Without `exact_prefill` the tokens of an answer that are computed again
    are computed as they were the first time, one by one, unless they are more than `MOST_STEPS_AGAIN`.
    """

    def __init__(
        self, *, slots: int, prefill_chunk: int, step_tokens: int, reuse: bool, exact_prefill: bool = True
    ) -> None:
        self._slots = [Slot(index) for index in range(slots)]
        self._free = set(range(slots))
        self._prefill_chunk = prefill_chunk
        self._step_tokens = max(step_tokens, slots)
        self._reuse = reuse
        self._exact_prefill = exact_prefill
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._clock = 0
        # A step of several failed, and so far none of them has turned out to be at fault and no other step has worked.
        self._is_unexplained = False

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that have none yet."""
        return len(self._waiting)

    @property
    def computed(self) -> int:
        """Tokens of running sequences that are in their slots. May be asked by any thread."""
        return sum(sequence.computed for sequence in list(self._running))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot, behind those that wait already."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running; its slot is free at once and keeps its state."""
        if sequence.is_suspect:
            self._is_unexplained = False
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence, sequence.slot)

    def schedule(self) -> ScheduledStep:
        """The next step; empty when there is nothing to do.

        The caller carries it out and reports back with `complete` or `fail`.
        """
        scheduled = ScheduledStep()
        suspect = next((one for one in (*self._running, *self._waiting) if one.is_suspect), None)
        if suspect is not None:
            self._plan_alone(scheduled, suspect)
            return scheduled
        self._admit(scheduled.step)
        decoding = [sequence for sequence in self._running if not sequence.is_prefilling]
        for sequence in decoding:
            self._plan(scheduled, sequence, 1)
        prefilling = [sequence for sequence in self._running if sequence.is_prefilling]
        budget = self._prefill_budget(len(decoding), len(prefilling))
        for sequence in prefilling:
            if budget > 0:
                count = min(budget, len(sequence.tokens) - sequence.computed)
                self._plan(scheduled, sequence, count)
                budget -= count
        return scheduled

    def complete(self, scheduled: ScheduledStep) -> None:
        """The step was computed: its tokens are in their slots."""
        for work, sequence in zip(scheduled.step.work, scheduled.sequences, strict=True):
            sequence.computed = self._slots[work.slot].held = work.start + len(work.tokens)
            if not sequence.is_suspect:
                self._is_unexplained = False
            elif sequence.computed == len(sequence.tokens):
                sequence.is_suspect = False

    def fail(self, scheduled: ScheduledStep) -> list[Sequence]:
        """The step failed: nothing can be said of its slots any more.

        Returns the sequences at fault, for the caller to remove: the only one of the step, or none as
        long as it may be any of several, which wait again as suspects. If each of them then works by
        itself and still not together, too much runs at once, and the latest is given up.
        """
        touched = {work.slot for work in scheduled.step.work} | {start.slot for start in scheduled.step.starts}
        for slot in touched:
            self._slots[slot].held = 0
        suspects = [sequence for sequence in self._running if sequence.slot in touched]
        at_fault = [suspects.pop()] if len(suspects) == 1 or self._is_unexplained else []
        for sequence in suspects:
            assert sequence.slot is not None
            self._vacate(sequence, sequence.slot)
            sequence.computed = 0
            sequence.is_suspect = True
        self._waiting.extendleft(reversed(suspects))
        self._is_unexplained = bool(suspects)
        return at_fault

    def _vacate(self, sequence: Sequence, slot: int) -> None:
        self._running.remove(sequence)
        self._free.add(slot)
        sequence.slot = None

    def _prefill_budget(self, decoding: int, prefilling: int) -> int:
        """How many prompt tokens a step takes along.

        `prefill_chunk` while answers run, and in proportion more where more prompts wait than answers run, since
        then it is mostly the prompts that lose by small steps. With no answer running nobody is held up.
        """
        room = self._step_tokens - decoding
        if not decoding:
            return room
        crowd = min(max(1.0, prefilling / decoding), MOST_PREFILL_CHUNKS)
        return min(room, int(self._prefill_chunk * crowd))

    def _plan(self, scheduled: ScheduledStep, sequence: Sequence, count: int) -> None:
        assert sequence.slot is not None
        end = sequence.computed + min(count, self._in_one_piece(sequence))
        tokens = sequence.tokens[sequence.computed : end]
        work = SlotWork(sequence.slot, sequence.computed, tokens, wants_logits=end == len(sequence.tokens))
        scheduled.step.work.append(work)
        scheduled.sequences.append(sequence)

    def _in_one_piece(self, sequence: Sequence) -> int:
        """How many of a sequence's next tokens may be computed at once."""
        left = len(sequence.tokens) - sequence.computed
        drawn = len(sequence.tokens) - sequence.prompt_length
        if self._exact_prefill or drawn > MOST_STEPS_AGAIN:
            return left
        return max(1, min(left, sequence.prompt_length - sequence.computed))

    def _plan_alone(self, scheduled: ScheduledStep, suspect: Sequence) -> None:
        """A step of nothing but a suspect's tokens. There is a free slot: all suspects had one and left it."""
        if suspect.slot is None:
            self._waiting.remove(suspect)
            self._start(scheduled.step, suspect, None, 0)
        self._plan(scheduled, suspect, min(self._step_tokens, len(suspect.tokens) - suspect.computed))

    def _admit(self, step: Step) -> None:
        """Give free slots to waiting sequences, first come first served.

        A sequence whose prompt begins like one that is being computed right now is passed over
        until that part is there to be copied.
        """
        passed_over = []
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            source, keep = self._best_source(sequence)
            if self._reuse and self._soon_shared(sequence) >= keep + WORTH_WAITING_FOR:
                passed_over.append(sequence)
                continue
            self._start(step, sequence, source, keep)
        self._waiting.extendleft(reversed(passed_over))

    def _start(self, step: Step, sequence: Sequence, source: Slot | None, keep: int) -> None:
        target = self._target(source, keep)
        step.starts.append(SlotStart(target.index, keep, source.index if source else target.index))
        self._free.remove(target.index)
        self._clock += 1
        target.tokens, target.held, target.last_used = sequence.tokens, keep, self._clock
        sequence.slot, sequence.computed = target.index, keep
        if not sequence.is_suspect:
            sequence.cached = keep
        self._running.append(sequence)

    def _best_source(self, sequence: Sequence) -> tuple[Slot | None, int]:
        """The slot that holds most of the sequence's beginning, and how much of it.

        The last token is always computed again: its logits are what the answer starts from.
        """
        if not self._reuse:
            return None, 0
        best, keep = None, 0
        for slot in self._slots:
            shared = min(slot.shares(sequence.tokens), len(sequence.tokens) - 1)
            if shared > keep:
                best, keep = slot, shared
        return best, keep

    def _target(self, source: Slot | None, keep: int) -> Slot:
        """The free slot to use: the source itself if little else is lost with it, else the stalest."""
        if source is not None and source.index in self._free and keep * 2 >= source.held:
            return source
        return min((self._slots[index] for index in self._free), key=lambda slot: (slot.last_used, slot.index))

    def _soon_shared(self, sequence: Sequence) -> int:
        """How much of the sequence's beginning will be there once the running prompts are computed."""
        limit = len(sequence.tokens) - 1
        shared = 0
        for other in self._running:
            if other.is_prefilling:
                prefix = _shared_tokens(other.tokens, sequence.tokens)
                shared = max(shared, min(prefix, limit, len(other.tokens) - 1))
        return shared


def _shared_tokens(left: Tokens[int], right: Tokens[int]) -> int:
    return common_prefix(left, len(left), right, len(right))
