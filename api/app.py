"""The Flask app: wires routes, error answers and request ids to collaborators that it is given."""

import logging
import re
from http import HTTPStatus

from flask import Flask, Response, g, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from api.access.gate import Gate, tell_rates
from api.access.keys import KeyRing
from api.connections import SenderTooSlowError
from api.cors import Cors
from api.errors import refusal_body, unknown_method_body, unknown_url_body
from api.exchange import Observer
from api.request_ids import new_request_id
from api.routes.docs import docs_routes
from api.routes.generation import generation_routes
from api.routes.health import health_routes
from api.routes.json import error_response, json_response
from api.routes.metrics import metrics_routes
from api.routes.models import model_routes
from api.routes.streams import stream_routes
from api.schemas.error import error_body
from api.security import secure
from api.services import Services
from shared.errors import ErrorCode, RequestError
from shared.logs import about
from shared.tracing import TRACEPARENT

_SANE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

logger = logging.getLogger("tokenmill.api")


def create_app(services: Services) -> Flask:
    """The WSGI application over these collaborators.

    Raises:
        SettingsError: the API keys cannot be used.
    """
    app = Flask("tokenmill", static_folder=None)
    # Of a body without a length Flask reads so much and says nothing: one byte more shows it.
    app.config["MAX_CONTENT_LENGTH"] = services.settings.max_body + 1
    cors = Cors(services.settings.cors_origins)
    gate = Gate(KeyRing(services.settings), metrics_are_open=services.settings.metrics_access == "open")
    app.before_request(lambda: _begin(services.observer))
    app.before_request(cors.preflight)
    app.before_request(gate.enter)
    # The last is the first to be called.
    for mark in (secure, cors.mark, tell_rates, _finish):
        app.after_request(mark)
    app.register_error_handler(RequestError, _request_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(ParseException, _unreadable_body)
    app.register_error_handler(Exception, _unexpected_error)
    for routes in (generation_routes, stream_routes, model_routes, health_routes, metrics_routes, docs_routes):
        app.register_blueprint(routes(services))
    return app


def _begin(observer: Observer) -> None:
    """A fresh id for the request itself; the client's own only names the exchange."""
    g.id = new_request_id()
    endpoint = request.url_rule.rule if request.url_rule else None
    traceparent = request.headers.get(TRACEPARENT, "")
    g.exchange = observer.arrived(request_id=g.id, method=request.method, endpoint=endpoint, traceparent=traceparent)
    given = request.headers.get("x-request-id", "")
    g.request_id = given if _SANE_REQUEST_ID.fullmatch(given) else g.id


def _finish(response: Response) -> Response:
    response.headers["x-request-id"] = g.request_id
    exchange = g.exchange
    # Once the last byte is written, which for a stream is long after this.
    response.call_on_close(lambda: exchange.closed(response.status_code))
    return response


def _request_error(error: RequestError) -> Response:
    g.exchange.fails(error)
    return error_response(error)


def _http_error(error: HTTPException) -> Response:
    """What Flask itself refuses: unknown URLs, methods, bodies that are too large."""
    status = HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR)
    if isinstance(error, NotFound):
        return json_response(unknown_url_body(request.method, request.path), status)
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        body = unknown_method_body(request.method, request.path, allowed)
        return json_response(body, status, {"Allow": allowed})
    return json_response(refusal_body(status), status)


def _unreadable_body(error: ParseException) -> Response:
    """A body that comes too slowly, or whose chunks are none: gunicorn finds out only when the body is read."""
    if isinstance(error, SenderTooSlowError):
        return json_response(refusal_body(HTTPStatus.REQUEST_TIMEOUT), HTTPStatus.REQUEST_TIMEOUT)
    return _request_error(RequestError(ErrorCode.INVALID_REQUEST, "The request's body cannot be read."))


def _unexpected_error(_: Exception) -> Response:
    g.exchange.breaks()
    logger.exception("request %s failed", g.id, extra=about(g.id))
    return json_response(
        error_body("The server had an error while processing your request.", "server_error", code="internal_error"), 500
    )
