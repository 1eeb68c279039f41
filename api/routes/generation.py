"""POST /v1/chat/completions and /v1/completions."""

import time

import msgspec
from flask import Blueprint, Response, g, request
from werkzeug.exceptions import RequestEntityTooLarge

from api import respond, sse
from api.disconnect import ClientConnection
from api.relay import ClientGone
from api.routes.json import json_response
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
from shared.log import START

SHAPE_ATTRIBUTE = "answer"
"""Under which name an answer's shape is kept beside its request."""

NO_ONE_WAITS = 499
MAX_BODY_BYTES = 10 * 1024 * 1024


def answer_of(shape: AnswerShape) -> Answer:
    """The answer in the shape of its endpoint."""
    if shape.endpoint == translate_chat.ENDPOINT:
        return translate_chat.ChatAnswer(shape)
    return translate_completions.TextAnswer(shape)


def generation_routes(services: Services) -> Blueprint:
    """The endpoints that put requests on the queue."""
    routes = Blueprint("generation", __name__)

    @routes.post("/v1/chat/completions")
    def create_chat_completion() -> Response:
        body = parse(_body(), chat.ChatCompletionRequest, no_op=chat.NO_OP)
        return _answer(services, translate_chat.ENDPOINT, body, translate_chat.generation_request(body, g.id))

    @routes.post("/v1/completions")
    def create_completion() -> Response:
        body = parse(_body(), completions.CompletionRequest, no_op=completions.NO_OP)
        return _answer(
            services, translate_completions.ENDPOINT, body, translate_completions.generation_request(body, g.id)
        )

    return routes


def _body() -> bytes:
    raw = request.get_data()
    if len(raw) > MAX_BODY_BYTES:
        raise RequestEntityTooLarge
    return raw


def _answer(services: Services, endpoint: str, body: GenerationFields, generation: GenerationRequest) -> Response:
    check_tokens(generation, services.fleet.require(generation.model))
    shape = AnswerShape(
        endpoint=endpoint,
        id=generation.id,
        model=generation.model,
        created=int(time.time()),
        choices=generation.choices,
        include_usage=body.include_usage,
        service_tier="flex" if generation.priority is Priority.BACKGROUND else "default",
    )
    settings = services.settings
    following = services.relay.submit(
        generation,
        ClientConnection(request.environ),
        limit=settings.queue_limit,
        timeout_s=settings.request_timeout,
        attributes={SHAPE_ATTRIBUTE: msgspec.json.encode(shape).decode()},
    )
    try:
        if not body.stream:
            choices, usage = respond.whole(following, choices=shape.choices)
            following.close()
            return json_response(answer_of(shape).whole(choices, usage))
        held = respond.first_entries(following, wait_s=settings.accept_wait)
    except ClientGone:
        return Response(status=NO_ONE_WAITS)
    except BaseException:
        following.close()
        raise
    events = respond.stream(following, answer_of(shape), held=held, after=START, keep_alive_s=settings.keep_alive)
    response = Response(events, headers=sse.headers(generation.id))
    # A stream that never begins has no `finally`.
    response.call_on_close(following.close)
    return response
