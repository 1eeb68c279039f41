"""The wire of POST /v1/completions."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from api.schemas.answer import CompletionUsage, Finish
from api.schemas.parsing import invalid
from api.schemas.sampling import MAX_TOKENS, GenerationFields, few_logprobs, limits_of

MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""

NO_OP: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",)}
"""Fields that are known and not honoured, with the values that ask for nothing."""


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


def _prompts(value: Any, info: ValidationInfo) -> Any:
    """`prompt`: a string, strings, token ids, or arrays of token ids; becomes a list of prompts.

    What is too much is counted before it is looked at.
    """
    limits = limits_of(info)
    prompts = value if isinstance(value, list) and not (value and _is_token(value[0])) else [value]
    if not prompts:
        raise invalid("the array is empty.")
    if len(prompts) > limits.max_choices:
        raise invalid(f"at most {limits.max_choices} prompts, but got {len(prompts)}.")
    length = sum(len(prompt) for prompt in prompts if isinstance(prompt, str | list))
    if length > limits.max_prompt:
        raise invalid(f"at most {limits.max_prompt} characters or tokens, but got {length}.")
    for prompt in prompts:
        is_tokens = isinstance(prompt, list) and prompt and all(_is_token(token) for token in prompt)
        if not is_tokens and not isinstance(prompt, str):
            raise invalid("expected a string, an array of strings, or non-empty arrays of token ids.")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise invalid("texts and arrays of token ids cannot be mixed.")
    return prompts


Text = Annotated[str, Field(json_schema_extra={"maxLength": ["max_prompt"]})]
Tokens = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]],
    Field(min_length=1, json_schema_extra={"maxItems": ["max_prompt"]}),
]
SEVERAL: dict[str, Any] = {"maxItems": ["max_choices"]}
Prompts = (
    Text
    | Tokens
    | Annotated[list[Text], Field(min_length=1, json_schema_extra=SEVERAL)]
    | Annotated[list[Tokens], Field(min_length=1, json_schema_extra=SEVERAL)]
)


class CompletionRequest(GenerationFields):
    """A request, valid in itself; only the model can say more."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts, json_schema_input_type=Prompts)]
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, ge=1, le=MAX_TOKENS)
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), AfterValidator(few_logprobs)] = Field(
        None, json_schema_extra={"maximum": ["max_top_logprobs", MAX_LOGPROBS]}
    )
    best_of: int | None = Field(None, description="Nothing but what `n` is.")

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise invalid("a value other than 'n' is not supported yet by this server.", param="best_of")
        most = limits_of(info).max_choices
        if len(self.prompt) * self.n > most:
            raise invalid(f"prompts times 'n' is {len(self.prompt) * self.n}; at most {most} choices.", param="n")
        return self


class TextLogprobs(msgspec.Struct, frozen=True):
    """Parallel arrays, one item for each token; offsets are in characters from the answer's start."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of one. In a stream `usage` is left out unless it was asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET
