"""The domain: a generation request, its parameters, and the events that answer it.

Everything here is frozen and crosses process boundaries through `shared.codec`.
Token counts are in tokens, times in seconds. Ranges are checked where something is decoded: what a front end lets
through is narrower, but whoever can write to Redis can queue a request as well.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_TOKENS = 2**31 - 1
MOST_CHOICES = 128
MOST_CHOICES_IN_ALL = MOST_CHOICES * MOST_CHOICES
MOST_MESSAGES = 1_000_000
MOST_STOPS = 64
MOST_LOGPROBS = 20
LEAST_REPETITION_PENALTY = 0.01
"""Logits are divided by it, and have to stay numbers."""

Choice = Annotated[int, Meta(ge=0, lt=MOST_CHOICES_IN_ALL)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Token = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Priority(StrEnum):
    """Which of a model's two queues a request waits in; interactive is always served first."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn; the same rules on every backend.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off.
    `seed` is never missing: the front end draws one where the client gave none, so that a
    second attempt at the same request draws the same tokens.
    """

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=2)] = 1.0
    logit_bias: tuple[tuple[Token, Bias], ...] = ()


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation; `content` is plain text."""

    role: str
    content: str
    name: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", tag_field="kind"):
    """A conversation, turned into a prompt by the model's chat template in the worker."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MOST_MESSAGES)]


class TextPrompt(msgspec.Struct, frozen=True, tag="text", tag_field="kind"):
    """A raw prompt, tokenised as it is."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens", tag_field="kind"):
    """A prompt that is tokens already."""

    tokens: tuple[Token, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end asks of a worker.

    Each prompt gets `n` choices; choice `i` of prompt `p` has the index `p * n + i`.
    `max_tokens` None means: up to the model's context. `logprobs` None means none; a number asks
    for that many alternatives beside each token (0: only the token's own). `trace` is the W3C `traceparent` that the
    spans of its attempts continue; without one it is not written at all, so that it is no change to the payload.
    """

    id: str
    model: str
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MOST_CHOICES_IN_ALL)]
    sampling: SamplingParams
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = None
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=MOST_STOPS)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    priority: Priority = Priority.INTERACTIVE
    trace: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.choices > MOST_CHOICES_IN_ALL:
            raise ValueError(f"Expected at most {MOST_CHOICES_IN_ALL} choices")

    @property
    def choices(self) -> int:
        """How many choices the whole request yields."""
        return len(self.prompts) * self.n


LEAST_LOGPROB = -9999.0
"""Stands for everything below it, minus infinity too, which JSON does not have; as OpenAI's API does."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's text and bytes with its natural-log probability under the unmodified model."""

    text: str
    bytes_: tuple[int, ...]
    logprob: float

    def __post_init__(self) -> None:
        if self.logprob < LEAST_LOGPROB:
            msgspec.structs.force_setattr(self, "logprob", LEAST_LOGPROB)


class ChosenLogprob(msgspec.Struct, frozen=True):
    """The token that was drawn, beside the most likely alternatives, likeliest first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens used by a whole request. `cached` counts prompt tokens that were not computed again."""

    prompt: Count = 0
    completion: Count = 0
    cached: Count = 0


class Accepted(msgspec.Struct, frozen=True, tag="accepted", tag_field="type"):
    """A worker took the request and its prompts fit; comes first."""

    prompt_tokens: Count


class Chunk(msgspec.Struct, frozen=True, tag="chunk", tag_field="type", omit_defaults=True):
    """Some tokens of one choice.

    `text` holds only whole characters that can no longer become part of a stop string, so it can
    be empty while `tokens` is not. `logprobs`, if asked for, has one entry per token.
    """

    choice: Choice
    text: str
    tokens: tuple[Token, ...]
    logprobs: tuple[ChosenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="type"):
    """One choice ended; exactly once per choice of a request that is done."""

    choice: Choice
    reason: FinishReason


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="type"):
    """Every choice ended. Terminal."""

    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="type"):
    """The request ended without its full answer. Terminal. `code` is an `ErrorCode` value."""

    code: str
    message: str
    param: str | None = None


Event = Accepted | Chunk | Finished | Done | Failed


def is_terminal(event: Event) -> bool:
    """Whether nothing can follow this event."""
    return isinstance(event, Done | Failed)
