"""GET /v1/streams/<id>: the rest of a request's stream, from any process, while it runs and after."""

import re

import msgspec
from flask import Blueprint, Response, request
from werkzeug.exceptions import Gone, NotFound

from api import respond, sse
from api.disconnect import ClientConnection
from api.routes.generation import SHAPE_ATTRIBUTE, answer_of
from api.schemas.answer import AnswerShape
from api.services import Services
from shared.errors import ErrorCode, RequestError
from shared.log import START, EntryId, LogReader, parse_entry_id
from shared.store import store_errors

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


def stream_routes(services: Services) -> Blueprint:
    """The endpoint that resumes."""
    routes = Blueprint("streams", __name__)

    @routes.get("/v1/streams/<request_id>")
    def resume_stream(request_id: str) -> Response:
        if not _REQUEST_ID.fullmatch(request_id):
            raise NotFound(f"There is no stream '{request_id}'.")
        submitted = services.queue.submitted(request_id)
        if submitted is None or SHAPE_ATTRIBUTE not in submitted.attributes:
            raise Gone(f"The stream '{request_id}' has expired.")
        shape = msgspec.json.decode(submitted.attributes[SHAPE_ATTRIBUTE], type=AnswerShape)
        after = _position(services.reader, request_id)
        following = services.relay.resume(
            request_id, ClientConnection(request.environ), remaining_s=submitted.remaining_s
        )
        events = respond.stream(
            following, answer_of(shape), held=[], after=after, keep_alive_s=services.settings.keep_alive
        )
        response = Response(events, headers=sse.headers(request_id))
        # A stream that never begins has no `finally`.
        response.call_on_close(following.close)
        return response

    return routes


def _position(reader: LogReader, request_id: str) -> EntryId:
    """The last entry that the client has: what an EventSource says of itself goes before the URL."""
    param = "Last-Event-ID" if "Last-Event-ID" in request.headers else "after"
    text = request.headers.get("Last-Event-ID") or request.args.get("after")
    if not text:
        return START
    position = parse_entry_id(text)
    if position == START:
        return START
    with store_errors():
        if position is not None and reader.has(request_id, position):
            return position
    raise RequestError(ErrorCode.INVALID_REQUEST, f"'{text[:40]}' is no event of this stream.", param=param)
