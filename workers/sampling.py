"""Drawing the next token: the same rules, and the same randomness, for every backend.

The order is: penalties and bias on the logits, temperature, top-k, top-p, min-p, then one draw. The
random numbers of a draw depend on the seed, the choice and the position alone, never on what else
runs or has run: an answer that is carried on by another worker draws what it would have drawn.

The draw adds Gumbel noise to log-weights and takes the greatest, rather than inverting a cumulative
sum. Both are exact, but logits differ in their last bits with the shape of the batch, and a sum over
the whole vocabulary shifts every boundary a little where a maximum moves only at a near tie.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.domain import SamplingParams

Row = npt.NDArray[np.float32]
"""One row of logits or weights: shape [vocabulary]."""

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
BLOCK = 256


def uniforms(seed: int, choice: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in (0, 1) that look random and are a function of the arguments.

    SplitMix64's output function over counters (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014); the top 53 bits make a number.
    """
    stream = _mix((seed & _MASK) ^ _mix(choice * _GOLDEN_GAMMA & _MASK))
    start = _mix((stream + (position + 1) * _GOLDEN_GAMMA) & _MASK)
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND_FACTOR)
    z ^= z >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = ((z >> np.uint64(11)) + 0.5) / (1 << 53)
    return numbers


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _FIRST_FACTOR & _MASK
    z = (z ^ (z >> 27)) * _SECOND_FACTOR & _MASK
    return z ^ (z >> 31)


class Sampler:
    """Draws the tokens of one choice.

    `prompt` and what `drawn` was told of are what the penalties look at.
    """

    def __init__(self, params: SamplingParams, *, choice: int, prompt: Sequence[int], vocabulary: int) -> None:
        self._params = params
        self._choice = choice
        self._position = 0
        self._counts: dict[int, int] = {}
        self._bias = [(token, bias) for token, bias in params.logit_bias if token < vocabulary]
        self._repeatable = set(prompt) if params.repetition_penalty != 1.0 else set()

    def draw(self, logits: Row) -> int:
        """The next token. `logits` is used as scratch space and holds nothing useful afterwards."""
        params = self._params
        self._penalise(logits)
        if params.temperature == 0.0:
            token = int(logits.argmax())
        else:
            weights = filtered_weights(logits, params)
            numbers = uniforms(params.seed, self._choice, self._position, numbers_needed(len(weights)))
            token = draw(weights, numbers)
        self.drawn(token)
        return token

    def drawn(self, token: int) -> None:
        """Take note of a token of the answer, drawn here or by an earlier attempt."""
        self._position += 1
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._params.repetition_penalty != 1.0:
            self._repeatable.add(token)

    def _penalise(self, logits: Row) -> None:
        params = self._params
        if self._repeatable:
            seen = np.fromiter(self._repeatable, dtype=np.int64, count=len(self._repeatable))
            values = logits[seen]
            penalty = np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            size = len(self._counts)
            seen = np.fromiter(self._counts, dtype=np.int64, count=size)
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=size)
            logits[seen] -= params.presence_penalty + params.frequency_penalty * counts
        for token, bias in self._bias:
            logits[token] += bias


def filtered_weights(logits: Row, params: SamplingParams) -> Row:
    """Unnormalised probabilities after temperature, top-k, top-p and min-p; in place.

    The likeliest token has the weight 1 and is never filtered out.
    """
    logits -= logits.max()
    if params.temperature != 1.0:
        # A tiny temperature may overflow to -inf, which is what it means.
        with np.errstate(over="ignore"):
            logits /= np.float32(params.temperature) if params.temperature > 1e-6 else np.float32(1e-6)
    if 0 < params.top_k < len(logits):
        threshold = np.partition(logits, -params.top_k)[-params.top_k]
        logits[logits < threshold] = -np.inf
    weights: Row = np.exp(logits, out=logits)
    if params.top_p < 1.0:
        _keep_nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    return weights


def _keep_nucleus(weights: Row, top_p: float) -> None:
    """Zero all but the likeliest tokens that together reach `top_p`.

    Tokens so light that all of them together stay below 1 - top_p need not be sorted: they cannot
    be in the nucleus.
    """
    total = float(weights.sum(dtype=np.float64))
    floor = (1.0 - top_p) * total / len(weights)
    candidates = np.flatnonzero(weights >= floor)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = np.cumsum(weights[order], dtype=np.float64)
    kept = order[: int(np.searchsorted(reached, top_p * total)) + 1]
    kept_weights = weights[kept]
    weights[:] = 0.0
    weights[kept] = kept_weights


def numbers_needed(vocabulary: int) -> int:
    """How many random numbers `draw` uses up: one per block, and one per token of a block."""
    return -(-vocabulary // BLOCK) + BLOCK


def draw(weights: Row, numbers: npt.NDArray[np.float64]) -> int:
    """A token, with a probability in proportion to its weight (at least one is above zero).

    Gumbel's trick twice: the greatest of log-weight + noise is drawn in proportion to weight, first
    among blocks of tokens and then among the tokens of that block. So a row is read once, and only
    a few hundred of its numbers are ever random.
    """
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    block = _greatest(blocks, numbers[BLOCK:])
    return block * BLOCK + _greatest(weights[block * BLOCK : (block + 1) * BLOCK], numbers[:BLOCK])


def _greatest(weights: npt.NDArray[np.floating[Any]], numbers: npt.NDArray[np.float64]) -> int:
    """Where log-weight + Gumbel noise is greatest: log(w) - log(-log(u)), compared without its outer log."""
    return int(np.argmax(weights / -np.log(numbers[: len(weights)])))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one step under the unmodified model."""

    chosen: float
    top: list[tuple[int, float]]


class LogprobRow:
    """Log-probabilities of a row of logits, taken before the sampler edits it."""

    def __init__(self, logits: Row, top: int) -> None:
        peak = float(logits.max())
        self._log_total = peak + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
        self._logits = logits.copy()
        self._top = top

    def of(self, token: int) -> TokenLogprobs:
        """The drawn token's log-probability and the likeliest alternatives, likeliest first."""
        return TokenLogprobs(self._value(token), [(other, self._value(other)) for other in self._likeliest()])

    def _likeliest(self) -> Iterable[int]:
        if self._top == 0:
            return []
        count = min(self._top, len(self._logits))
        best = np.argpartition(self._logits, -count)[-count:]
        order = np.lexsort((best, -self._logits[best]))
        return [int(token) for token in best[order]]

    def _value(self, token: int) -> float:
        return min(0.0, float(self._logits[token]) - self._log_total)
