"""What one step is to do: slots to start and tokens to compute. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SlotStart:
    """Make `slot` hold the first `keep` tokens of what slot `source` holds, before the step."""

    slot: int
    keep: int
    source: int


@dataclass(frozen=True, slots=True)
class SlotWork:
    """Tokens for a slot to compute in this step.

    `start` is the position of the first one: the slot holds exactly `start` tokens. With
    `wants_logits` the step's result has a row for the last of the tokens.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool


@dataclass(slots=True)
class Step:
    """Starts in the order in which they must happen, then work that is computed together."""

    starts: list[SlotStart] = field(default_factory=list)
    work: list[SlotWork] = field(default_factory=list)
