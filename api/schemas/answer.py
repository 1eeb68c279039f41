"""What answers of both generation endpoints have in common: usage, finish reasons, when and by which model."""

from typing import Annotated, Literal

import msgspec

from shared.domain import MOST_CHOICES_IN_ALL, FinishReason, Usage

Finish = Literal["stop", "length"]
Tier = Literal["default", "flex"]

FINISH_REASONS: dict[FinishReason, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""The one table from the domain's finish reasons to OpenAI's."""


class AnswerShape(msgspec.Struct, frozen=True, kw_only=True):
    """All that it takes to put a request's events on the wire; kept beside the request for resuming."""

    endpoint: str
    id: str
    model: str
    created: int
    choices: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES_IN_ALL)]
    include_usage: bool
    service_tier: Tier


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def completion_usage(usage: Usage) -> CompletionUsage:
    """The usage of a whole request."""
    return CompletionUsage(
        usage.prompt,
        usage.completion,
        usage.prompt + usage.completion,
        PromptTokensDetails(usage.cached),
        CompletionTokensDetails(),
    )
