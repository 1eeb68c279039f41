"""Request bodies: what is accepted, what it becomes, and how a refusal names the field."""

import json
from typing import Any

import pytest

from api.schemas import chat, completions
from api.schemas.parsing import parse
from api.translate import chat as translate_chat
from api.translate import completions as translate_completions
from api.translate.requests import check_tokens
from shared.domain import GenerationRequest, Priority, TextPrompt, TokenPrompt
from shared.errors import ErrorCode, RequestError
from shared.fleet import ModelInfo, StateKind
from shared.settings import Limits

USER = {"role": "user", "content": "hi"}
CHAT = {"model": "m", "messages": [USER]}
TEXT = {"model": "m", "prompt": "x"}
ID = "0" * 32
MODEL = ModelInfo(
    name="m", backend="b", device="cpu", context=10, vocabulary=100, state_kind=StateKind.TRIMMABLE, created=0
)


def parse_chat(raw: Any) -> GenerationRequest:
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return translate_chat.generation_request(
        parse(raw, chat.ChatCompletionRequest, no_op=chat.NO_OP, limits=Limits()), ID
    )


def parse_text(raw: Any) -> GenerationRequest:
    body = parse(json.dumps(raw).encode(), completions.CompletionRequest, no_op=completions.NO_OP, limits=Limits())
    return translate_completions.generation_request(body, ID)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0.01}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": "1"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": []}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "1"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "true"}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"model": 1}, "model"),
        ({"user": 1}, "user"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": "x", "color": 1}]}, "messages[1].color"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_wrong_chat_parameter_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({**CHAT, **changes})

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"store": 0},
        {"prediction": {"type": "content", "content": "x"}},
        {"reasoning_effort": "high"},
    ],
    ids=str,
)
def test_what_the_server_cannot_honour_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({**CHAT, **changes})

    (name,) = changes
    assert caught.value.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert caught.value.param == name
    assert caught.value.message == f"'{name}' is not supported yet by this server."


def test_an_image_part_is_refused_by_its_place() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]

    with pytest.raises(RequestError) as caught:
        parse_chat({**CHAT, "messages": [{"role": "user", "content": parts}]})

    assert caught.value.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({key: value for key, value in CHAT.items() if key != name})

    assert caught.value.param == name
    assert caught.value.message == f"Missing required parameter: '{name}'."


def test_null_means_the_default_for_every_optional_field() -> None:
    optional = chat.ChatCompletionRequest.model_fields.keys() | chat.NO_OP.keys()

    request = parse_chat({**dict.fromkeys(optional), **CHAT, "seed": 1})

    assert request == parse_chat({**CHAT, "seed": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"functions": [], "function_call": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"], "store": False},
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)
def test_values_that_ask_for_nothing_change_nothing(changes: dict[str, Any]) -> None:
    assert parse_chat({**CHAT, "seed": 1, **changes}) == parse_chat({**CHAT, "seed": 1})


def test_every_parameter_reaches_the_domain() -> None:
    request = parse_chat(
        {
            **CHAT,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.5,
            "seed": -3,
            "logit_bias": {"5": -100, "6": 1.5},
            "stop": "END",
            "n": 2,
            "max_completion_tokens": 9,
            "logprobs": True,
            "service_tier": "flex",
        }
    )

    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 4, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.seed, sampling.logit_bias) == (-3, ((5, -100.0), (6, 1.5)))
    assert (request.stop, request.n, request.max_tokens, request.logprobs) == (("END",), 2, 9, 0)
    assert request.priority is Priority.BACKGROUND


def test_messages_that_clients_send_back_are_understood() -> None:
    answer = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    request = parse_chat(
        {**CHAT, "messages": [answer, {"role": "assistant", "content": None}, {"role": "user", "content": parts}]}
    )

    assert [message.content for message in request.prompts[0].messages] == ["yes", "", "one\ntwo"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud800b"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\udc00", "messages": []}',
        b'{"\\ud800": 1}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"n": 1' + b"0" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_a_body_that_is_no_sound_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(raw)

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    caught.value.message.encode()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_wrong_completion_parameter_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_text({**TEXT, **changes})

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt((1,)), TokenPrompt((2, 3)))),
    ],
)
def test_every_form_of_prompt_becomes_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    request = parse_text({"model": "m", "prompt": prompt, "best_of": 1, "echo": False})

    assert request.prompts == prompts
    assert request.max_tokens == 16


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (parse_chat({**CHAT, "logit_bias": {"100": 1}}), "logit_bias"),
        (parse_text({"model": "m", "prompt": [1, 100, 2]}), "prompt"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_by_name(request_: GenerationRequest, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_tokens(request_, MODEL)

    assert caught.value.param == param
