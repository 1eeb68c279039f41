"""What clients get, pinned: each event's chunks with every field that OpenAI's schema requires."""

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api import sse
from api.errors import HTTP_ERRORS, request_error, request_error_body
from api.schemas.answer import FINISH_REASONS, AnswerShape
from api.translate.answer import Answer, WholeChoice
from api.translate.chat import ChatAnswer
from api.translate.completions import TextAnswer
from shared.domain import ChosenLogprob, Chunk, Failed, FinishReason, TokenLogprob, Usage
from shared.errors import ErrorCode

USAGE = Usage(prompt=7, completion=2, cached=5)
LOGPROBS = (ChosenLogprob(TokenLogprob("a", (97,), -0.5), (TokenLogprob("b", (98,), -2.0),)),)

HEAD = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 1, "model": "m", "service_tier": "default"}
TEXT_HEAD = {"id": "cmpl-r", "object": "text_completion", "created": 1, "model": "m"}
WIRE_USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 5, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
CHAT_LOGPROBS = {
    "content": [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
        }
    ],
    "refusal": None,
}
TEXT_LOGPROBS = {
    "tokens": ["a"],
    "token_logprobs": [-0.5],
    "top_logprobs": [{"b": -2.0, "a": -0.5}],
    "text_offset": [0],
}


def shape(**changes: Any) -> AnswerShape:
    fields = {"endpoint": "", "id": "r", "model": "m", "created": 1, "choices": 1, "include_usage": False}
    return AnswerShape(**{**fields, "service_tier": "default", **changes})


def on_the_wire(payloads: list[Any]) -> list[Any]:
    lines = sse.events(payloads, id="1-1").decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def script(answer: Answer) -> list[Any]:
    """All chunks of an answer with one choice."""
    payloads = answer.opening() + answer.chunk(Chunk(0, "a", (1,))) + answer.chunk(Chunk(0, "", (2,)))
    payloads += answer.chunk(Chunk(0, "", (3,), LOGPROBS)) + answer.finish(0, FinishReason.LENGTH)
    return on_the_wire(payloads + answer.closing(USAGE))


def chat_choice(delta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **changes}


def text_choice(text: str, **changes: Any) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": None, **changes}


CHAT_CHOICES = [
    chat_choice({"role": "assistant", "content": "", "refusal": None}),
    chat_choice({"content": "a"}),
    chat_choice({"content": ""}, logprobs=CHAT_LOGPROBS),
    chat_choice({}, finish_reason="length"),
]
TEXT_CHOICES = [
    text_choice("a"),
    text_choice("", logprobs=TEXT_LOGPROBS),
    text_choice("", finish_reason="length"),
]


def test_chat_chunks_have_these_fields_and_no_usage_unless_asked() -> None:
    chunks = script(ChatAnswer(shape()))

    assert chunks == [{**HEAD, "choices": [choice]} for choice in CHAT_CHOICES]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_with_usage_every_chat_chunk_has_the_field_and_the_last_one_has_it_filled() -> None:
    chunks = script(ChatAnswer(shape(include_usage=True)))

    expected = [{**HEAD, "choices": [choice], "usage": None} for choice in CHAT_CHOICES]
    assert chunks == [*expected, {**HEAD, "choices": [], "usage": WIRE_USAGE}]


def test_text_chunks_have_these_fields() -> None:
    assert script(TextAnswer(shape())) == [{**TEXT_HEAD, "choices": [choice]} for choice in TEXT_CHOICES]
    assert script(TextAnswer(shape(include_usage=True)))[-1] == {**TEXT_HEAD, "choices": [], "usage": WIRE_USAGE}


def test_a_chat_stream_opens_every_choice() -> None:
    opened = on_the_wire(ChatAnswer(shape(choices=3)).opening())

    assert [chunk["choices"][0]["index"] for chunk in opened] == [0, 1, 2]


def test_whole_answers_have_these_fields() -> None:
    choice = WholeChoice()
    choice.add(Chunk(0, "a", (1,), LOGPROBS))

    (chat,) = on_the_wire([ChatAnswer(shape()).whole([choice, WholeChoice()], USAGE)])
    (text,) = on_the_wire([TextAnswer(shape()).whole([choice], USAGE)])

    assert chat == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a", "refusal": None},
                "logprobs": CHAT_LOGPROBS,
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            },
        ],
        "usage": WIRE_USAGE,
    }
    assert text == {
        **TEXT_HEAD,
        "choices": [text_choice("a", logprobs=TEXT_LOGPROBS, finish_reason="stop")],
        "usage": WIRE_USAGE,
    }
    ChatCompletion.model_validate(chat, strict=True)
    Completion.model_validate(text, strict=True)


def test_every_finish_reason_and_every_error_code_has_its_place_on_the_wire() -> None:
    assert FINISH_REASONS.keys() == set(FinishReason)
    assert HTTP_ERRORS.keys() == set(ErrorCode)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_retryable_status_says_when(code: ErrorCode) -> None:
    http = HTTP_ERRORS[code]

    assert (http.retry_after_s is not None) == (http.status in (429, 503, 504))


def test_a_code_of_a_newer_worker_is_an_engine_error() -> None:
    body = request_error_body(request_error(Failed("quite_new", "Something new.")))

    assert on_the_wire([body]) == [
        {"error": {"message": "Something new.", "type": "server_error", "param": None, "code": "engine_error"}}
    ]
