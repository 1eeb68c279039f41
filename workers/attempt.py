"""One attempt of one worker at one request, as the engine, the publisher and the intake share it."""

from dataclasses import dataclass

from shared.domain import GenerationRequest, Usage
from workers.answer import Answer


@dataclass(eq=False, slots=True)
class Attempt:
    """`number` counts attempts at the request over all workers; it fences older ones off.

    `deadline` is on this process's monotonic clock, in seconds. The answers belong to the engine's
    thread once the attempt is submitted; `is_cancelled` is the engine's, under its lock. Beside an
    attempt that `is_alone` nothing else may run.
    """

    request: GenerationRequest
    number: int
    deadline: float
    prompt_tokens: int
    answers: list[Answer]
    is_alone: bool = False
    is_cancelled: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(answer.finish is not None for answer in self.answers)

    @property
    def usage(self) -> Usage:
        """What the request has used so far. A prompt that several choices share counts once."""
        first_of_each_prompt = self.answers[:: self.request.n]
        cached = sum(min(answer.sequence.cached, answer.sequence.prompt_length) for answer in first_of_each_prompt)
        completion = sum(answer.sent_tokens for answer in self.answers)
        return Usage(prompt=self.prompt_tokens, completion=completion, cached=cached)
