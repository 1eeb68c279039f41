"""What both endpoints' requests have in common on the way to the domain."""

import secrets

from api.schemas.sampling import GenerationFields
from shared.domain import GenerationRequest, Priority, SamplingParams, TokenPrompt
from shared.errors import ErrorCode, RequestError
from shared.fleet import ModelInfo

DRAWN_SEED_BITS = 63


def sampling(body: GenerationFields) -> SamplingParams:
    """The sampling parameters; a seed is drawn where none was given."""
    return SamplingParams(
        seed=secrets.randbits(DRAWN_SEED_BITS) if body.seed is None else body.seed,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
    )


def priority(body: GenerationFields) -> Priority:
    """Flex requests wait until nothing interactive does."""
    return Priority.BACKGROUND if body.service_tier == "flex" else Priority.INTERACTIVE


def check_tokens(request: GenerationRequest, model: ModelInfo) -> None:
    """Raise `invalid_request` for a token id that is not in the model's vocabulary."""
    for token, _ in request.sampling.logit_bias:
        _check_token(token, model, param="logit_bias")
    for prompt in request.prompts:
        if isinstance(prompt, TokenPrompt):
            _check_token(max(prompt.tokens), model, param="prompt")


def _check_token(token: int, model: ModelInfo, *, param: str) -> None:
    if token >= model.vocabulary:
        message = f"Invalid '{param}': {token} is not a token of the model, which has {model.vocabulary}."
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param=param)
