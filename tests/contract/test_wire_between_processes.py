"""The bytes between processes, pinned: a change here is a new PAYLOAD_VERSION or breaks a rolling restart."""

import json

import msgspec
import pytest

from shared.codec import decode_event, encode_event, request_from_payload, request_to_payload
from shared.domain import (
    Accepted,
    ChatMessage,
    ChatPrompt,
    ChosenLogprob,
    Chunk,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Priority,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
)
from shared.errors import ErrorCode, RequestError
from shared.log import Entry, EntryId, entry_from_message

EVENTS = [
    (Accepted(7), '{"type":"accepted","prompt_tokens":7}'),
    (Chunk(0, "Hé", (1, 2)), '{"type":"chunk","choice":0,"text":"Hé","tokens":[1,2]}'),
    (
        Chunk(1, "a", (3,), (ChosenLogprob(TokenLogprob("a", (97,), -0.5), (TokenLogprob("b", (98,), -2.0),)),)),
        '{"type":"chunk","choice":1,"text":"a","tokens":[3],"logprobs":[{"token":{"text":"a","bytes_":[97],'
        '"logprob":-0.5},"top":[{"text":"b","bytes_":[98],"logprob":-2.0}]}]}',
    ),
    (Finished(0, FinishReason.LENGTH), '{"type":"finished","choice":0,"reason":"length"}'),
    (Finished(1, FinishReason.STOP), '{"type":"finished","choice":1,"reason":"stop"}'),
    (
        Done(Usage(prompt=7, completion=2, cached=5)),
        '{"type":"done","usage":{"prompt":7,"completion":2,"cached":5}}',
    ),
    (
        Failed("context_length_exceeded", "Too long.", "messages"),
        '{"type":"failed","code":"context_length_exceeded","message":"Too long.","param":"messages"}',
    ),
]

REQUEST = GenerationRequest(
    id="0" * 32,
    model="m",
    prompts=(ChatPrompt((ChatMessage(role="user", content="hi"),)), TextPrompt("t"), TokenPrompt((1, 2))),
    sampling=SamplingParams(seed=1, logit_bias=((5, -1.0),)),
    n=2,
    max_tokens=3,
    stop=("a",),
    logprobs=0,
    priority=Priority.BACKGROUND,
)

PAYLOAD = """
{"v": 1, "request": {"id": "00000000000000000000000000000000", "model": "m",
"prompts": [{"kind": "chat", "messages": [{"role": "user", "content": "hi", "name": null}]},
{"kind": "text", "text": "t"}, {"kind": "tokens", "tokens": [1, 2]}],
"sampling": {"seed": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
"frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": [[5, -1.0]]},
"n": 2, "max_tokens": 3, "stop": ["a"], "logprobs": 0, "priority": "background"}}
""".replace("\n", " ").strip()


@pytest.mark.parametrize(("event", "line"), EVENTS, ids=[type(event).__name__ for event, _ in EVENTS])
def test_events_are_these_very_bytes(event: Event, line: str) -> None:
    assert encode_event(event).decode() == line
    assert decode_event(line.encode()) == event


@pytest.mark.parametrize(("event", "line"), EVENTS, ids=[type(event).__name__ for event, _ in EVENTS])
def test_a_published_message_is_the_entry_s_id_and_its_event(event: Event, line: str) -> None:
    assert entry_from_message(f"12-345 {line}".encode()) == Entry(EntryId(12, 345), event)


def test_a_queued_request_is_this_very_json() -> None:
    assert json.dumps(request_to_payload(REQUEST)) == PAYLOAD
    assert request_from_payload(PAYLOAD.encode()) == REQUEST


def test_a_queued_request_s_trace_goes_along_and_is_no_other_payload() -> None:
    traced = msgspec.structs.replace(REQUEST, trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    payload = PAYLOAD.removesuffix("}}") + ', "trace": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}}'

    assert json.dumps(request_to_payload(traced)) == payload
    assert request_from_payload(payload.encode()) == traced


def test_a_worker_that_knows_less_of_a_request_reads_what_it_knows() -> None:
    newer = json.loads(PAYLOAD)
    newer["request"]["unheard_of"] = 1

    assert request_from_payload(json.dumps(newer).encode()) == REQUEST


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        ({"v": 2, "request": {}}, ErrorCode.PAYLOAD_VERSION),
        ({"v": 0}, ErrorCode.PAYLOAD_VERSION),
        ({"v": 1, "request": {"id": 1}}, ErrorCode.INVALID_REQUEST),
        ({"v": 1}, ErrorCode.INVALID_REQUEST),
        ({}, ErrorCode.INVALID_REQUEST),
        (None, ErrorCode.INVALID_REQUEST),
        ("text", ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_payload_of_another_version_or_no_payload_is_a_clear_error(payload: object, code: ErrorCode) -> None:
    with pytest.raises(RequestError) as caught:
        request_from_payload(json.dumps(payload).encode())

    assert caught.value.code is code


def test_an_infinite_logprob_crosses_as_a_number() -> None:
    chunk = Chunk(0, "a", (1,), (ChosenLogprob(TokenLogprob("a", (97,), float("-inf")), ()),))

    assert decode_event(encode_event(chunk)) == chunk
    assert chunk.logprobs[0].token.logprob == -9999.0


@pytest.mark.parametrize("line", [b"", b"{}", b'{"type":"other"}', b'{"type":"chunk"}', b"\xff"])
def test_a_log_entry_that_cannot_be_read_loses_the_request(line: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_event(line)

    assert caught.value.code is ErrorCode.REQUEST_LOST
