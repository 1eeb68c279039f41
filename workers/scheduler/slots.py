"""Slots: what each holds, and which of them serves a new prompt best."""

from collections.abc import Sequence
from dataclasses import dataclass, field

COMPARE_RUN = 64


def common_prefix(left: Sequence[int], left_length: int, right: Sequence[int], right_length: int) -> int:
    """How many leading tokens two sequences share, looking at their first so many tokens only."""
    limit = min(left_length, right_length)
    shared = 0
    # Whole runs are compared in C; only the run that differs is walked.
    while shared < limit:
        end = min(shared + COMPARE_RUN, limit)
        if left[shared:end] != right[shared:end]:
            while left[shared] == right[shared]:
                shared += 1
            return shared
        shared = end
    return limit


@dataclass(slots=True)
class Slot:
    """A slot and the tokens whose state it holds.

    `tokens` may be longer than what is computed: only the first `held` of them are in the slot.
    After its sequence has left, a slot keeps its state until it is started for another.
    """

    index: int
    tokens: Sequence[int] = field(default_factory=list)
    held: int = 0
    last_used: int = 0

    def shares(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` this slot holds."""
        return common_prefix(self.tokens, self.held, tokens, len(tokens))
