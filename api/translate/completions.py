"""Text completions: the request to the domain, the answer's events to the wire."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from api.schemas import completions as wire
from api.schemas.answer import FINISH_REASONS, AnswerShape, CompletionUsage, completion_usage
from api.translate.answer import WholeChoice
from api.translate.requests import priority, sampling
from shared.domain import ChosenLogprob, Chunk, FinishReason, GenerationRequest, TextPrompt, TokenPrompt, Usage

ENDPOINT = "completions"
ID_PREFIX = "cmpl-"


def generation_request(body: wire.CompletionRequest, request_id: str) -> GenerationRequest:
    """What is asked of a worker."""
    prompts = tuple(
        TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt)) for prompt in body.prompt
    )
    return GenerationRequest(
        id=request_id,
        model=body.model,
        prompts=prompts,
        sampling=sampling(body),
        n=body.n,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop),
        logprobs=body.logprobs,
        priority=priority(body),
    )


class TextAnswer:
    """A text completion on its way out."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._offsets: Counter[int] = Counter()

    def opening(self) -> list[wire.Completion]:
        """Nothing: text has no role."""
        return []

    def chunk(self, chunk: Chunk) -> list[wire.Completion]:
        """The new text; nothing while it is held back and no logprobs are asked for."""
        if not chunk.text and not chunk.logprobs:
            return []
        choice = wire.TextChoice(
            text=chunk.text, index=chunk.choice, logprobs=_logprobs(chunk.logprobs, self._offsets[chunk.choice])
        )
        self._offsets[chunk.choice] += sum(len(item.token.text) for item in chunk.logprobs)
        return [self._completion(choice)]

    def finish(self, choice: int, reason: FinishReason) -> list[wire.Completion]:
        """An empty text with the finish reason."""
        return [self._completion(wire.TextChoice(text="", index=choice, finish_reason=FINISH_REASONS[reason]))]

    def closing(self, usage: Usage) -> list[wire.Completion]:
        """The usage, if asked for."""
        return [self._completion(usage=completion_usage(usage))] if self._shape.include_usage else []

    def whole(self, choices: list[WholeChoice], usage: Usage) -> wire.Completion:
        """The answer in one piece."""
        return wire.Completion(
            id=ID_PREFIX + self._shape.id,
            created=self._shape.created,
            model=self._shape.model,
            choices=tuple(
                wire.TextChoice(
                    text=choice.text,
                    index=index,
                    logprobs=_logprobs(choice.logprobs, 0),
                    finish_reason=FINISH_REASONS[choice.finish_reason],
                )
                for index, choice in enumerate(choices)
            ),
            usage=completion_usage(usage),
        )

    def _completion(self, *choices: wire.TextChoice, usage: CompletionUsage | None = None) -> wire.Completion:
        return wire.Completion(
            id=ID_PREFIX + self._shape.id,
            created=self._shape.created,
            model=self._shape.model,
            choices=choices,
            usage=usage if self._shape.include_usage else msgspec.UNSET,
        )


def _logprobs(logprobs: Sequence[ChosenLogprob], offset: int) -> wire.TextLogprobs | None:
    """Parallel arrays, one item for each token; None where none were asked for."""
    if not logprobs:
        return None
    offsets = []
    for item in logprobs:
        offsets.append(offset)
        offset += len(item.token.text)
    return wire.TextLogprobs(
        tokens=[item.token.text for item in logprobs],
        token_logprobs=[item.token.logprob for item in logprobs],
        # The drawn token is always among them, as OpenAI has it.
        top_logprobs=[{top.text: top.logprob for top in (*item.top, item.token)} for item in logprobs],
        text_offset=offsets,
    )
