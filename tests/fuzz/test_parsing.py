"""Whatever a body holds, it is a request or refused by name, and just as the description of the API says."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from described import Description
from fuzzing import failure, tries
from hypothesis import given
from hypothesis import strategies as st
from made_up import JSON_BYTES, altered, changed

from api.openapi.document import document
from api.schemas import chat, completions
from api.schemas.examples import CHATS, COMPLETIONS
from api.schemas.parsing import parse
from api.translate import chat as translate_chat
from api.translate import completions as translate_completions
from shared.codec import request_from_payload, request_to_payload
from shared.domain import GenerationRequest
from shared.errors import ErrorCode, RequestError
from shared.settings import ApiSettings

LIMITS = ApiSettings(max_messages=4, max_prompt=200, max_n=4, max_choices=6, max_stop_length=20, max_logit_bias=3)
DESCRIPTION = Description(document(LIMITS))

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
EXAMPLES: dict[str, list[Any]] = {CHAT_PATH: list(CHATS.values()), TEXT_PATH: list(COMPLETIONS.values())}
NAMES = {
    path: sorted(DESCRIPTION.document["components"]["schemas"][name]["properties"])
    for path, name in ((CHAT_PATH, "ChatCompletionRequest"), (TEXT_PATH, "CompletionRequest"))
}
MORE_NAMES = ["content", "role", "name", "text", "type", "include_usage", "other"]

BETWEEN_FIELDS = {
    CHAT_PATH: {"messages", "n", "max_tokens", "top_logprobs", "stream_options"},
    TEXT_PATH: {"prompt", "n", "best_of", "stream_options"},
}
"""Fields that can be wrong because of another: their texts together, `n` times prompts, an option of what is not."""


def take(path: str, raw: bytes) -> None:
    """Make of a body what a front end with these limits makes of it, and read that as a worker does."""
    request = _request(path, raw)
    assert request_from_payload(json.dumps(request_to_payload(request)).encode()) == request


def _request(path: str, raw: bytes) -> GenerationRequest:
    if path == CHAT_PATH:
        body = parse(raw, chat.ChatCompletionRequest, no_op=chat.NO_OP, limits=LIMITS)
        return translate_chat.generation_request(body, "id")
    text = parse(raw, completions.CompletionRequest, no_op=completions.NO_OP, limits=LIMITS)
    return translate_completions.generation_request(text, "id")


def refusal_of(path: str, raw: bytes) -> RequestError | None:
    """Why a body is not taken, which is told in one of two ways and in few words."""
    error = failure(take, path, raw)
    if error is not None:
        assert error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED_PARAMETER)
        assert len(error.message.encode()) < 1000
    return error


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Bodies that are nearly those of the examples."""
    names = st.sampled_from(NAMES[path] + MORE_NAMES) | st.text(max_size=5)
    return st.sampled_from(EXAMPLES[path]).flatmap(lambda body: altered(body, names))


PATHS = pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])


@PATHS
@tries(500)
@given(data=st.data())
def test_a_body_is_taken_if_it_is_as_described_and_refused_if_not(path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))

    differs = DESCRIPTION.request_errors("POST", path, body)
    refusal = refusal_of(path, json.dumps(body).encode())

    if differs:
        assert refusal, differs
    elif refusal:
        assert refusal.param in BETWEEN_FIELDS[path], refusal.message


@PATHS
@tries(300)
@given(data=st.data())
def test_bytes_that_are_no_body_are_refused_and_break_nothing(path: str, data: st.DataObject) -> None:
    examples = st.sampled_from(EXAMPLES[path]).map(lambda body: json.dumps(body).encode())

    refusal_of(path, data.draw(st.binary(max_size=200) | JSON_BYTES | examples.flatmap(changed)))


@PATHS
@tries(100)
@given(data=st.data(), name=st.text(max_size=200), value=st.text(max_size=2000))
def test_what_an_error_repeats_is_short(path: str, data: st.DataObject, name: str, value: str) -> None:
    body: Mapping[str, Any] = data.draw(st.sampled_from(EXAMPLES[path]))

    refusal_of(path, json.dumps({**body, name: value}).encode())
    refusal_of(path, json.dumps({**body, "service_tier": value}).encode())
    refusal_of(path, json.dumps({**body, "logit_bias": {value: 1}}).encode())
