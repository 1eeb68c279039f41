"""The wire of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from api.schemas.answer import CompletionUsage, Finish, Tier
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


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Field(min_length=1, json_schema_extra={"maxItems": ["max_messages"]})]


def _describe_message(schema: dict[str, Any]) -> None:
    """What `Message._without_nulls` lets through, as a JSON schema."""
    empty = {"type": ["array", "null"], "maxItems": 0}
    schema["properties"] |= {"tool_calls": empty, "annotations": empty}
    content = schema["properties"]["content"]
    content["anyOf"].append({"type": "null"})
    schema["required"].remove("content")
    schema["additionalProperties"] = {"type": "null"}
    has_content = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    schema["anyOf"] = [{"properties": {"role": {"const": "assistant"}}}, has_content]


class Message(BaseModel):
    """One message; clients may send back what an answer held, nulls and empty arrays included.

    A part that is not text is refused, and so are tool calls.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", hide_input_in_errors=True, json_schema_extra=_describe_message
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text, json_schema_input_type=str | Parts)]
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


Messages = Annotated[list[Message], Field(min_length=1, json_schema_extra={"maxItems": ["max_messages"]})]


class ChatCompletionRequest(GenerationFields):
    """A request, valid in itself; only the model can say more."""

    messages: Annotated[list[Message], Field(min_length=1), BeforeValidator(_few, json_schema_input_type=Messages)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS), AfterValidator(few_logprobs)] = Field(
        None, description="Only with `logprobs`.", json_schema_extra={"maximum": ["max_top_logprobs"]}
    )

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


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is left out of a stream unless it was asked for, then it is null in all but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: Tier
    choices: tuple[ChunkChoice, ...]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    service_tier: Tier
    choices: list[ChatChoice]
    usage: CompletionUsage
