"""The wire of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from api.schemas.answer import CompletionUsage
from api.schemas.parsing import invalid, unsupported
from api.schemas.sampling import MAX_TOKENS, GenerationFields, few_logprobs, limits_of
from shared.settings import MOST_TOP_LOGPROBS

NO_OP: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
}
"""Fields that are known and not honoured, with the values that ask for nothing."""


def _text(content: Any) -> Any:
    """`content`: a string, or text parts, which become lines."""
    if not isinstance(content, list):
        return content
    if not content:
        raise invalid("the array of parts is empty.")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid("each part must be an object with a 'type'.")
        if part["type"] != "text":
            raise unsupported(f"a part of the type '{part['type'][:40]}'")
        if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
            raise invalid("a text part must have a string 'text' and nothing else.")
    return "\n".join(part["text"] for part in content)


def _few(messages: Any, info: ValidationInfo) -> Any:
    """`messages`: counted before any of them is looked at."""
    limits = limits_of(info)
    if isinstance(messages, list):
        contents = (message.get("content") if isinstance(message, dict) else None for message in messages)
        count = sum(max(1, len(content)) if isinstance(content, list) else 1 for content in contents)
        if count > limits.max_messages:
            raise invalid(f"at most {limits.max_messages} messages, parts counted, but got {count}.")
    return messages


class Message(BaseModel):
    """One message; clients may send back what an answer held, nulls and empty arrays included."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        message = {name: value for name, value in message.items() if value is not None or name == "content"}
        for name in ("tool_calls", "annotations"):
            if message.get(name) == []:
                del message[name]
        if message.get("role") == "assistant" and message.get("content") is None and "tool_calls" not in message:
            message["content"] = ""
        return message


class ChatCompletionRequest(GenerationFields):
    """A request, valid in itself; only the model can say more."""

    messages: Annotated[list[Message], Field(min_length=1), BeforeValidator(_few)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS), AfterValidator(few_logprobs)] = None

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "ChatCompletionRequest":
        limits = limits_of(info)
        characters = sum(len(message.content) + len(message.name or "") for message in self.messages)
        if characters > limits.max_prompt:
            raise invalid(f"at most {limits.max_prompt} characters, but got {characters}.", param="messages")
        if self.n > limits.max_choices:
            raise invalid(f"at most {limits.max_choices} choices, but got {self.n}.", param="n")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("it is only allowed when 'logprobs' is true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("it contradicts 'max_completion_tokens'.", param="max_tokens")
        return self


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is left out of a stream unless it was asked for, then it is null in all but the last."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str
    choices: tuple[ChunkChoice, ...]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    service_tier: str
    choices: list[Choice]
    usage: CompletionUsage
