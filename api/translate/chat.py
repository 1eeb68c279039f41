"""Chat completions: the request to the domain, the answer's events to the wire."""

from collections.abc import Sequence

import msgspec

from api.schemas import chat as wire
from api.schemas.answer import FINISH_REASONS, AnswerShape, CompletionUsage, completion_usage
from api.translate.answer import WholeChoice
from api.translate.requests import priority, sampling
from shared.domain import (
    ChatMessage,
    ChatPrompt,
    ChosenLogprob,
    Chunk,
    FinishReason,
    GenerationRequest,
    Usage,
)

ENDPOINT = "chat"
ID_PREFIX = "chatcmpl-"


def generation_request(body: wire.ChatCompletionRequest, request_id: str) -> GenerationRequest:
    """What is asked of a worker."""
    messages = tuple(
        ChatMessage(role=message.role, content=message.content, name=message.name) for message in body.messages
    )
    return GenerationRequest(
        id=request_id,
        model=body.model,
        prompts=(ChatPrompt(messages),),
        sampling=sampling(body),
        n=body.n,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=tuple(body.stop),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        priority=priority(body),
    )


class ChatAnswer:
    """A chat completion on its way out."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape

    def opening(self) -> list[wire.ChatCompletionChunk]:
        """The role, once for each choice."""
        delta = wire.Delta(role="assistant", content="", refusal=None)
        return [self._chunk(wire.ChunkChoice(index=index, delta=delta)) for index in range(self._shape.choices)]

    def chunk(self, chunk: Chunk) -> list[wire.ChatCompletionChunk]:
        """The new text; nothing while it is held back and no logprobs are asked for."""
        if not chunk.text and not chunk.logprobs:
            return []
        choice = wire.ChunkChoice(
            index=chunk.choice, delta=wire.Delta(content=chunk.text), logprobs=_logprobs(chunk.logprobs)
        )
        return [self._chunk(choice)]

    def finish(self, choice: int, reason: FinishReason) -> list[wire.ChatCompletionChunk]:
        """An empty delta with the finish reason."""
        return [self._chunk(wire.ChunkChoice(index=choice, delta=wire.Delta(), finish_reason=FINISH_REASONS[reason]))]

    def closing(self, usage: Usage) -> list[wire.ChatCompletionChunk]:
        """The usage, if asked for."""
        return [self._chunk(usage=completion_usage(usage))] if self._shape.include_usage else []

    def whole(self, choices: list[WholeChoice], usage: Usage) -> wire.ChatCompletion:
        """The answer in one piece."""
        return wire.ChatCompletion(
            id=ID_PREFIX + self._shape.id,
            created=self._shape.created,
            model=self._shape.model,
            service_tier=self._shape.service_tier,
            choices=[
                wire.ChatChoice(
                    index=index,
                    message=wire.AnswerMessage(content=choice.text),
                    logprobs=_logprobs(choice.logprobs),
                    finish_reason=FINISH_REASONS[choice.finish_reason],
                )
                for index, choice in enumerate(choices)
            ],
            usage=completion_usage(usage),
        )

    def _chunk(self, *choices: wire.ChunkChoice, usage: CompletionUsage | None = None) -> wire.ChatCompletionChunk:
        return wire.ChatCompletionChunk(
            id=ID_PREFIX + self._shape.id,
            created=self._shape.created,
            model=self._shape.model,
            service_tier=self._shape.service_tier,
            choices=choices,
            usage=usage if self._shape.include_usage else msgspec.UNSET,
        )


def _logprobs(logprobs: Sequence[ChosenLogprob]) -> wire.ChatLogprobs | None:
    """One item for each token; None where none were asked for."""
    if not logprobs:
        return None
    return wire.ChatLogprobs(
        [
            wire.TokenLogprob(
                item.token.text,
                item.token.logprob,
                item.token.bytes_,
                [wire.TopLogprob(top.text, top.logprob, top.bytes_) for top in item.top],
            )
            for item in logprobs
        ]
    )
