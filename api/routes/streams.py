"""GET /v1/streams/<id>: the rest of a request's stream, from any process, while it runs and after."""

from flask import Blueprint, Response, g, request

from api import respond, sse
from api.disconnect import ClientConnection
from api.errors import request_error
from api.relay import CANCELLED, ClientGone
from api.request_ids import may_have_been_made
from api.routes.generation import SHAPE_ATTRIBUTE, answer_of, belongs_to_asker, shape_of
from api.routes.json import error_response
from api.services import Services
from shared.errors import ErrorCode, RequestError
from shared.log import START, EntryId, LogReader, parse_entry_id
from shared.queue import Submitted
from shared.store import store_errors


def stream_routes(services: Services) -> Blueprint:
    """The endpoint that resumes."""
    routes = Blueprint("streams", __name__)

    @routes.get("/v1/streams/<request_id>")
    def resume_stream(request_id: str) -> Response:
        submitted = _submitted(services, request_id)
        after = _position(services.reader, request_id, submitted.state)
        shape = shape_of(submitted.attributes)
        following = services.relay.resume(request_id, submitted, ClientConnection(request.environ))
        g.exchange.follows(following, model=shape.model)
        try:
            # The log is read at once, so what is wrong with its beginning is still a real HTTP error.
            held = next(following)
        except ClientGone:
            return error_response(request_error(CANCELLED))
        except RequestError as error:
            if error.code is ErrorCode.REQUEST_LOST:
                raise _damaged(error.message) from error
            raise
        g.exchange.streams(is_resumed=True)
        events = respond.stream(
            following,
            answer_of(shape),
            g.exchange,
            held=held,
            after=after,
            keep_alive_s=services.settings.keep_alive,
        )
        response = Response(events, headers=sse.headers(request_id))
        # A stream that never begins has no `finally`.
        response.call_on_close(following.close)
        return response

    return routes


def _submitted(services: Services, request_id: str) -> Submitted:
    """What is known of a request that has a stream."""
    if not may_have_been_made(request_id):
        raise RequestError(ErrorCode.STREAM_NOT_FOUND, f"There is no stream '{request_id[:40]}'.", param="id")
    submitted = services.queue.submitted(request_id)
    is_theirs = submitted is not None and belongs_to_asker(submitted.attributes)
    # Another's looks like none.
    if submitted is None or not is_theirs or SHAPE_ATTRIBUTE not in submitted.attributes:
        raise RequestError(ErrorCode.STREAM_EXPIRED, f"The stream '{request_id}' has expired.", param="id")
    return submitted


def _position(reader: LogReader, request_id: str, state: str) -> EntryId:
    """The last entry that the client has, if exactly what follows it can be given.

    What an EventSource says of itself goes before the URL.
    """
    param = "Last-Event-ID" if request.headers.get("Last-Event-ID") else "after"
    text = request.headers.get("Last-Event-ID") or request.args.get("after") or str(START)
    position = parse_entry_id(text)
    if position is None or (position != START and 0 in position):
        raise _unknown(text, param)
    with store_errors():
        first, here, last = reader.around(request_id, position)
    has_ended = state not in ("queued", "running")
    if (first and first.seq != 1) or (not first and has_ended):
        needed_by = None if position == START else param
        raise RequestError(ErrorCode.STREAM_EXPIRED, "The beginning of the stream is gone.", param=needed_by)
    if position in (START, here):
        return position
    if here is None or last is None:
        raise _damaged(f"It does not reach to '{position}'.", param)
    if here.seq != 1:
        raise _damaged(f"Its event '{position}' is missing.", param)
    # An attempt that ended before this event, or never wrote one, is followed by another's first.
    raise _unknown(text, param)


def _unknown(text: str, param: str) -> RequestError:
    return RequestError(ErrorCode.EVENT_NOT_FOUND, f"'{text[:40]}' is no event of this stream.", param=param)


def _damaged(reason: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorCode.STREAM_DAMAGED, f"The stream cannot be given in full. {reason}", param=param)
