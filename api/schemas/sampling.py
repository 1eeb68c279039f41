"""The parameters that both generation endpoints share."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from api.schemas.parsing import invalid
from shared.domain import LEAST_REPETITION_PENALTY
from shared.settings import MOST_CHOICES, Limits

MAX_TOKENS = 2**31 - 1
SEED_BITS = 64


MAX_MODEL_NAME = 256

TOKEN_ID = r"^[0-9]{1,10}$"


def limits_of(info: ValidationInfo) -> Limits:
    """What `parse` was told."""
    limits = info.context
    assert isinstance(limits, Limits)
    return limits


def _stops(value: Any, info: ValidationInfo) -> Any:
    """`stop`: one string or several, none of them empty."""
    limits = limits_of(info)
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("expected a string or an array of strings.")
    if not stops:
        raise invalid("the array is empty.")
    if len(stops) > limits.max_stop:
        raise invalid(f"at most {limits.max_stop} stop strings, but got {len(stops)}.")
    if "" in stops:
        raise invalid("a stop string cannot be empty.")
    if (longest := max(map(len, stops))) > limits.max_stop_length:
        raise invalid(f"a stop string may have {limits.max_stop_length} characters, but one has {longest}.")
    return stops


def _biases(value: Any, info: ValidationInfo) -> Any:
    """`logit_bias`: token ids, which JSON can only have as strings, to numbers."""
    limits = limits_of(info)
    if not isinstance(value, dict):
        raise invalid("expected an object that maps token ids to numbers.")
    if len(value) > limits.max_logit_bias:
        raise invalid(f"at most {limits.max_logit_bias} tokens, but got {len(value)}.")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"{key[:40]!r} is not a token id.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid(f"the bias of token {key} must be a number from -100 to 100.")
        biases[int(key)] = float(bias)
    return biases


def few_logprobs(value: int | None, info: ValidationInfo) -> int | None:
    """How many tokens are told beside each token, whatever an endpoint calls it."""
    limits = limits_of(info)
    if value is not None and value > limits.max_top_logprobs:
        raise invalid(f"at most {limits.max_top_logprobs}, but got {value}.")
    return value


def _choices(value: int, info: ValidationInfo) -> int:
    """`n`; what it makes with the prompts of a list, the request checks."""
    limits = limits_of(info)
    if value > limits.max_n:
        raise invalid(f"at most {limits.max_n} choices, but got {value}.")
    return value


Stop = Annotated[str, Field(min_length=1, json_schema_extra={"maxLength": ["max_stop_length"]})]
Stops = Stop | Annotated[list[Stop], Field(min_length=1, json_schema_extra={"maxItems": ["max_stop"]})]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=TOKEN_ID)], Bias],
    Field(json_schema_extra={"maxProperties": ["max_logit_bias"], "additionalProperties": False}),
]
"""What validators here take, as JSON has it. Bounds are names of limits: see `api.schemas.description`."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(BaseModel):
    """What a request for generation may say, whatever its prompt looks like."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    model: str = Field(max_length=MAX_MODEL_NAME)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MAX_TOKENS)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=LEAST_REPETITION_PENALTY, le=2)
    seed: int | None = Field(None, ge=-(2 ** (SEED_BITS - 1)), le=2 ** (SEED_BITS - 1) - 1)
    stop: Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=Stops)] = Field(
        default_factory=list, description="Texts at which the answer ends; they are no part of it."
    )
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases, json_schema_input_type=Biases)] = Field(
        default_factory=dict, description="What is added to the logits of tokens of the model's vocabulary."
    )
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), AfterValidator(_choices)] = Field(
        1, description="Choices of each prompt.", json_schema_extra={"maximum": ["max_n", "max_choices"]}
    )
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex"] = "auto"

    # Kept for the client's own books; they change nothing about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that tells the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise invalid("it is only allowed when 'stream' is true.", param="stream_options")
        return self
