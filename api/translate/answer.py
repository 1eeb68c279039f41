"""Answers, whatever their endpoint: gathering a whole one, and what an endpoint must be able to put on the wire."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.domain import ChosenLogprob, Chunk, FinishReason, Usage


@dataclass
class WholeChoice:
    """One choice, gathered from its chunks."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[ChosenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP

    def add(self, chunk: Chunk) -> None:
        """Take what a chunk brings."""
        self.texts.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.texts)


class Answer(Protocol):
    """One request's answer in an endpoint's wire shape. The methods for chunks are called in the log's order."""

    def opening(self) -> list[Any]:
        """The chunks that tell that the answer begins."""

    def chunk(self, chunk: Chunk) -> list[Any]:
        """The chunks that carry some tokens."""

    def finish(self, choice: int, reason: FinishReason) -> list[Any]:
        """The chunks that end one choice."""

    def closing(self, usage: Usage) -> list[Any]:
        """The chunks that end the answer, before the end mark."""

    def whole(self, choices: list[WholeChoice], usage: Usage) -> Any:
        """The answer in one piece."""
