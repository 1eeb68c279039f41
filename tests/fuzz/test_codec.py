"""Whatever crosses Redis comes out as it went in, and whatever else is there is an error of the request."""

import json
from typing import Any

import pytest
from fuzzing import failure, tries
from hypothesis import given
from hypothesis import strategies as st
from made_up import JSON_BYTES, changed

from shared import domain
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

TEXT = st.text(max_size=40)
TOKENS = st.lists(st.integers(0, domain.MOST_TOKENS), max_size=8).map(tuple)
COUNTS = st.integers(0, 2**53)
CHOICES = st.integers(0, domain.MOST_CHOICES_IN_ALL - 1)
LOGPROBS = st.builds(
    TokenLogprob, TEXT, st.lists(st.integers(0, 255), max_size=4).map(tuple), st.floats(allow_nan=False, max_value=0)
)
CHOSEN = st.builds(ChosenLogprob, LOGPROBS, st.lists(LOGPROBS, max_size=3).map(tuple))

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Accepted, COUNTS),
    st.builds(Chunk, CHOICES, TEXT, TOKENS, st.lists(CHOSEN, max_size=3).map(tuple)),
    st.builds(Finished, CHOICES, st.sampled_from(FinishReason)),
    st.builds(Done, st.builds(Usage, prompt=COUNTS, completion=COUNTS, cached=COUNTS)),
    st.builds(Failed, TEXT, TEXT, st.none() | TEXT),
)

MESSAGES = st.builds(ChatMessage, role=TEXT, content=TEXT, name=st.none() | TEXT)
PROMPTS = st.one_of(
    st.builds(ChatPrompt, st.lists(MESSAGES, max_size=4).map(tuple)),
    st.builds(TextPrompt, TEXT),
    st.builds(TokenPrompt, TOKENS),
)
PENALTIES = st.floats(-2, 2)
SAMPLING = st.builds(
    SamplingParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, domain.MOST_TOKENS),
    min_p=st.floats(0, 1),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    repetition_penalty=st.floats(domain.LEAST_REPETITION_PENALTY, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, domain.MOST_TOKENS), st.floats(-100, 100)), max_size=4).map(tuple),
)
REQUESTS = st.builds(
    GenerationRequest,
    id=TEXT,
    model=TEXT,
    prompts=st.lists(PROMPTS, min_size=1, max_size=4).map(tuple),
    sampling=SAMPLING,
    n=st.integers(1, domain.MOST_CHOICES),
    max_tokens=st.none() | st.integers(1, domain.MOST_TOKENS),
    stop=st.lists(st.text(min_size=1, max_size=10), max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, domain.MOST_LOGPROBS),
    priority=st.sampled_from(Priority),
)


def queued(request: GenerationRequest) -> bytes:
    """What is in an RQ job."""
    return json.dumps(request_to_payload(request)).encode()


@tries(300)
@given(EVENTS)
def test_an_event_comes_out_as_it_went_in(event: Event) -> None:
    assert decode_event(encode_event(event)) == event


@tries(100)
@given(EVENTS, st.integers(0, 10**9 - 1), st.integers(0, 10**18 - 1))
def test_so_does_a_published_message(event: Event, attempt: int, seq: int) -> None:
    entry = Entry(EntryId(attempt, seq), event)

    assert entry_from_message(f"{entry.id} ".encode() + encode_event(event)) == entry


@tries(300)
@given(REQUESTS)
def test_a_request_comes_out_as_it_went_in(request: GenerationRequest) -> None:
    assert request_from_payload(queued(request)) == request


@tries(300)
@given(st.binary(max_size=200) | JSON_BYTES | EVENTS.map(encode_event).flatmap(changed))
def test_what_is_no_event_loses_the_request_and_breaks_nothing(raw: bytes) -> None:
    for read in (decode_event, entry_from_message):
        error = failure(read, raw)
        assert error is None or error.code is ErrorCode.REQUEST_LOST


@tries(300)
@given(st.binary(max_size=200) | JSON_BYTES | REQUESTS.map(queued).flatmap(changed))
def test_what_is_no_request_is_an_error_that_says_so(raw: bytes) -> None:
    error = failure(request_from_payload, raw)

    assert error is None or error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.PAYLOAD_VERSION)


@pytest.mark.parametrize("read", [decode_event, entry_from_message, request_from_payload])
@pytest.mark.parametrize(
    "nested", [b"[" * 1_000_000, b'{"request":' * 100_000, b'{"type":"chunk","choice":' + b"[" * 10**6]
)
def test_however_deep_it_is_nested(read: Any, nested: bytes) -> None:
    with pytest.raises(RequestError):
        read(nested)
