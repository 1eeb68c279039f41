"""The parameters that both generation endpoints share."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from api.schemas.parsing import invalid

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_TOKENS = 2**31 - 1
SEED_BITS = 64


def _stops(value: Any) -> Any:
    """`stop`: one string or up to four, none of them empty."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("expected a string or an array of strings.")
    if not 1 <= len(stops) <= MAX_STOPS:
        raise invalid(f"expected 1 to {MAX_STOPS} stop strings, but got {len(stops)}.")
    if "" in stops:
        raise invalid("a stop string cannot be empty.")
    return stops


def _biases(value: Any) -> Any:
    """`logit_bias`: token ids, which JSON can only have as strings, to numbers."""
    if not isinstance(value, dict):
        raise invalid("expected an object that maps token ids to numbers.")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"{key[:40]!r} is not a token id.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid(f"the bias of token {key} must be a number from -100 to 100.")
        biases[int(key)] = float(bias)
    return biases


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(BaseModel):
    """What a request for generation may say, whatever its prompt looks like."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MAX_TOKENS)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    seed: int | None = Field(None, ge=-(2 ** (SEED_BITS - 1)), le=2 ** (SEED_BITS - 1) - 1)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
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
