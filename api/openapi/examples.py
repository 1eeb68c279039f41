"""Answers as examples, made by what makes the real ones."""

from typing import Any

import msgspec

from api import sse
from api.errors import request_error_body
from api.schemas.answer import AnswerShape
from api.schemas.examples import MODEL
from api.schemas.health import Health, Readiness
from api.schemas.models import ModelList, models
from api.translate import chat, completions
from api.translate.answer import Answer, WholeChoice
from api.translate.chat import ChatAnswer
from api.translate.completions import TextAnswer
from shared.domain import ChosenLogprob, Chunk, FinishReason, TokenLogprob, Usage
from shared.errors import ErrorCode, RequestError
from shared.fleet import ModelInfo, StateKind, WorkerInfo, WorkerState

REQUEST_ID = "0199a2c54f1e7b3a9d5c61e8f0427b96"
CREATED = 1_760_000_000
USAGE = Usage(prompt=34, completion=2, cached=29)
WORDS = ("Bon", "jour")

ERRORS: dict[ErrorCode, tuple[str, str | None]] = {
    ErrorCode.INVALID_REQUEST: (
        "Invalid type for 'temperature': expected a number, but got a string instead.",
        "temperature",
    ),
    ErrorCode.UNSUPPORTED_PARAMETER: ("'tools' is not supported yet by this server.", "tools"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ("The model's context has 4096 tokens, and the prompt has 5000.", "messages"),
    ErrorCode.MODEL_NOT_FOUND: ("The model 'gpt' does not exist.", "model"),
    ErrorCode.MODEL_UNAVAILABLE: ("The model 'smollm2' has no worker at the moment.", "model"),
    ErrorCode.QUEUE_FULL: ("Too many requests for the model 'smollm2' are waiting.", None),
    ErrorCode.DEADLINE_EXCEEDED: ("The request was not answered in time.", None),
    ErrorCode.CANCELLED: ("The request was cancelled.", None),
    ErrorCode.WORKER_LOST: ("The worker that ran the request was lost.", None),
    ErrorCode.REQUEST_LOST: ("The request was lost. It can be sent again.", None),
    ErrorCode.STORE_UNAVAILABLE: ("The server's queue cannot be reached at the moment.", None),
    ErrorCode.SERVER_STOPPING: (
        "This server is stopping. The stream can be resumed at its resume URL.",
        None,
    ),
    ErrorCode.ENGINE_ERROR: ("The model failed to compute this request.", None),
    ErrorCode.POISONOUS: ("Three workers died while they ran this request.", None),
    ErrorCode.PAYLOAD_VERSION: ("The request was queued by a front end of another release.", None),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: (
        "The Idempotency-Key was used before for a request with another body or path.",
        "Idempotency-Key",
    ),
    ErrorCode.STREAM_NOT_FOUND: ("There is no stream 'abc'.", "id"),
    ErrorCode.STREAM_EXPIRED: (f"The stream '{REQUEST_ID}' has expired.", "id"),
    ErrorCode.STREAM_DAMAGED: ("The stream cannot be given in full. Its event '1-7' is missing.", "Last-Event-ID"),
    ErrorCode.EVENT_NOT_FOUND: ("'2-1' is no event of this stream.", "Last-Event-ID"),
    ErrorCode.MISSING_API_KEY: ("You did not give an API key.", None),
    ErrorCode.INVALID_API_KEY: ("The API key is not known here.", None),
    ErrorCode.RATE_LIMIT_EXCEEDED: ("This key may use 60 requests a minute, and has. Retry in 7 s.", None),
}


def error(code: ErrorCode) -> Any:
    """An error with this code."""
    message, param = ERRORS[code]
    return plain(request_error_body(RequestError(code, message, param=param)))


def plain(answer: Any) -> Any:
    """An answer as JSON has it."""
    return msgspec.json.decode(msgspec.json.encode(answer))


def chat_whole() -> Any:
    """A whole chat completion."""
    return plain(_chat().whole([_whole_choice()], USAGE))


def chat_with_logprobs() -> Any:
    """One that tells how likely its tokens were."""
    return plain(_chat().whole([_whole_choice(logprobs=True)], USAGE))


def text_whole() -> Any:
    """A whole completion."""
    return plain(_text().whole([_whole_choice()], USAGE))


def text_with_logprobs() -> Any:
    """One that tells how likely its tokens were."""
    return plain(_text().whole([_whole_choice(logprobs=True)], USAGE))


def chat_stream() -> str:
    """A streamed chat completion with its usage."""
    return _stream(_chat())


def text_stream() -> str:
    """A streamed completion with its usage."""
    return _stream(_text())


def broken_stream() -> str:
    """What is left of a stream when it ends in an error."""
    failure = RequestError(ErrorCode.WORKER_LOST, ERRORS[ErrorCode.WORKER_LOST][0])
    return sse.event_without_id(request_error_body(failure)).decode()


def model_list() -> Any:
    """All models."""
    return plain(ModelList(data=models([_WORKER])))


def model() -> Any:
    """One model."""
    return model_list()["data"][0]


def health() -> Any:
    """The process lives."""
    return plain(Health())


def ready() -> Any:
    """Requests would be answered."""
    return plain(Readiness(True, [MODEL], []))


def not_ready() -> Any:
    """They would not."""
    return plain(Readiness(False, [], ["no worker serves a model"]))


_WORKER = WorkerInfo(
    name="worker",
    model=ModelInfo(
        name=MODEL,
        backend="llama_cpp",
        device="cpu",
        context=4096,
        vocabulary=49152,
        state_kind=StateKind.TRIMMABLE,
        created=CREATED,
    ),
    state=WorkerState.READY,
    pid=1,
    host="worker",
    slots=8,
    running=0,
)


def _shape(endpoint: str) -> AnswerShape:
    return AnswerShape(
        endpoint=endpoint,
        id=REQUEST_ID,
        model=MODEL,
        created=CREATED,
        choices=1,
        include_usage=True,
        service_tier="default",
    )


def _chat() -> Answer:
    return ChatAnswer(_shape(chat.ENDPOINT))


def _text() -> Answer:
    return TextAnswer(_shape(completions.ENDPOINT))


def _chunks(*, logprobs: bool = False) -> list[Chunk]:
    chunks = []
    for token, text in enumerate(WORDS):
        drawn = ChosenLogprob(TokenLogprob(text, tuple(text.encode()), -0.25), (TokenLogprob("Hi", (72, 105), -2.5),))
        chunks.append(Chunk(0, text, (token,), (drawn,) if logprobs else ()))
    return chunks


def _whole_choice(*, logprobs: bool = False) -> WholeChoice:
    choice = WholeChoice()
    for chunk in _chunks(logprobs=logprobs):
        choice.add(chunk)
    return choice


def _stream(answer: Answer) -> str:
    payloads = [answer.opening(), *map(answer.chunk, _chunks()), answer.finish(0, FinishReason.STOP)]
    told = [sse.events(made, id=f"1-{number}") for number, made in enumerate(payloads, 1)]
    told.append(sse.events(answer.closing(USAGE), id=f"1-{len(payloads) + 1}", done=True))
    return b"".join(told).decode()
