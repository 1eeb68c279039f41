"""POST /v1/chat/completions and /v1/completions."""

import hashlib
import re
import time
from collections.abc import Mapping

import msgspec
from flask import Blueprint, Response, g, request
from werkzeug.exceptions import RequestEntityTooLarge

from api import respond, sse
from api.access.gate import admit, key, owner
from api.disconnect import ClientConnection
from api.errors import request_error
from api.relay import CANCELLED, ClientGone, Following
from api.routes.json import error_response, json_response
from api.schemas import chat, completions
from api.schemas.answer import AnswerShape
from api.schemas.parsing import parse
from api.schemas.sampling import GenerationFields
from api.services import Services
from api.translate import chat as translate_chat
from api.translate import completions as translate_completions
from api.translate.answer import Answer
from api.translate.requests import check_tokens
from shared.domain import GenerationRequest, Priority
from shared.errors import ErrorCode, RequestError
from shared.log import START
from shared.queue import IDEMPOTENCY_HEADER, Idempotency, Owner
from shared.settings import Limits

SHAPE_ATTRIBUTE = "answer"
"""Under which name an answer's shape is kept beside its request."""

OWNER_ATTRIBUTE = "owner"
"""The same for the name of the key that it was made with."""

IDEMPOTENCY_KEY_PATTERN = r"[\x21-\x2b\x2d-\x7e](?:[\x20-\x2b\x2d-\x7e]{0,253}[\x21-\x2b\x2d-\x7e])?"
"""What arrives of a header has no space at its ends.

No comma: a header that is sent twice is the two values with a comma between them, here or at a proxy before us.
"""

_IDEMPOTENCY_KEY = re.compile(IDEMPOTENCY_KEY_PATTERN)


def shape_of(attributes: Mapping[str, str]) -> AnswerShape:
    """The shape that was kept beside a request.

    Raises:
        RequestError: `request_lost` when there is none that can be read.
    """
    try:
        return msgspec.json.decode(attributes[SHAPE_ATTRIBUTE], type=AnswerShape)
    except (KeyError, msgspec.DecodeError, RecursionError) as error:
        raise RequestError(ErrorCode.REQUEST_LOST, "What is kept beside the request cannot be read.") from error


def answer_of(shape: AnswerShape) -> Answer:
    """The answer in the shape of its endpoint."""
    if shape.endpoint == translate_chat.ENDPOINT:
        return translate_chat.ChatAnswer(shape)
    return translate_completions.TextAnswer(shape)


def generation_routes(services: Services) -> Blueprint:
    """The endpoints that put requests on the queue."""
    routes = Blueprint("generation", __name__)
    limits: Limits = services.settings

    @routes.post("/v1/chat/completions")
    def create_chat_completion() -> Response:
        body = parse(_body(limits), chat.ChatCompletionRequest, no_op=chat.NO_OP, limits=limits)
        return _answer(services, translate_chat.ENDPOINT, body, translate_chat.generation_request(body, g.id))

    @routes.post("/v1/completions")
    def create_completion() -> Response:
        body = parse(_body(limits), completions.CompletionRequest, no_op=completions.NO_OP, limits=limits)
        return _answer(
            services, translate_completions.ENDPOINT, body, translate_completions.generation_request(body, g.id)
        )

    return routes


def _body(limits: Limits) -> bytes:
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.strip().lower() != "identity":
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"The request's Content-Encoding {coding[:40]!r} is not known here; send it as it is.",
        )
    raw = request.get_data()
    if len(raw) > limits.max_body:
        raise RequestEntityTooLarge
    return raw


def _answer(services: Services, endpoint: str, body: GenerationFields, generation: GenerationRequest) -> Response:
    shape = AnswerShape(
        endpoint=endpoint,
        id=generation.id,
        model=generation.model,
        created=int(time.time()),
        choices=generation.choices,
        include_usage=body.include_usage,
        service_tier="flex" if generation.priority is Priority.BACKGROUND else "default",
    )
    admit(services.rates)
    following = _follow(services, generation, shape)
    shape = shape_of(following.attributes)
    g.exchange.follows(following, model=shape.model)
    holder = key()
    if holder is not None:
        g.exchange.when_closed(lambda tokens: services.rates.took(holder, tokens))
    settings = services.settings
    try:
        if not body.stream:
            choices, usage = respond.whole(following, g.exchange, choices=shape.choices)
            following.close()
            return json_response(answer_of(shape).whole(choices, usage))
        held = respond.first_entries(following, wait_s=settings.accept_wait)
    except ClientGone:
        return error_response(request_error(CANCELLED))
    except BaseException:
        following.close()
        raise
    g.exchange.streams()
    events = respond.stream(
        following, answer_of(shape), g.exchange, held=held, after=START, keep_alive_s=settings.keep_alive
    )
    response = Response(events, headers=sse.headers(following.request_id))
    # A stream that never begins has no `finally`.
    response.call_on_close(following.close)
    return response


def _follow(services: Services, generation: GenerationRequest, shape: AnswerShape) -> Following:
    """Queue the request, or join the one that its idempotency key stands for."""
    idempotency = _idempotency()
    client = ClientConnection(request.environ)
    try:
        model = services.fleet.require(generation.model)
        g.exchange.names_model(model.name)
        check_tokens(generation, model)
    except RequestError as error:
        if error.code is ErrorCode.MODEL_UNAVAILABLE:
            g.exchange.names_model(generation.model)
        # What was asked before does not need a worker that is there now.
        earlier = services.queue.earlier(generation, idempotency, owner()) if idempotency else None
        if earlier is None:
            raise
        return services.relay.join(earlier, client)
    if g.exchange.trace:
        generation = msgspec.structs.replace(generation, trace=g.exchange.trace)
    return services.relay.submit(
        generation,
        client,
        limit=services.settings.queue_limit,
        timeout_s=services.settings.request_timeout,
        attributes={SHAPE_ATTRIBUTE: msgspec.json.encode(shape).decode(), OWNER_ATTRIBUTE: _name(owner())},
        idempotency=idempotency,
        owner=owner(),
    )


def belongs_to_asker(attributes: Mapping[str, str]) -> bool:
    """Whether a request was made with the key that this one carries, or where no keys are needed, without one."""
    return attributes.get(OWNER_ATTRIBUTE, "") == _name(owner())


def _name(asker: Owner | None) -> str:
    return asker.name if asker else ""


def _idempotency() -> Idempotency | None:
    """The client's key, if it sent one, for the body and path of this request."""
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is None:
        return None
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        message = f"Invalid '{IDEMPOTENCY_HEADER}': expected one, of 1 to 255 printable ASCII characters but no comma."
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param=IDEMPOTENCY_HEADER)
    asked = request.path.encode() + b"\n" + request.get_data()
    return Idempotency(key, hashlib.sha256(asked).hexdigest())
