"""Of what breaks inside clients see that something broke, and nothing of what it was."""

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from raw_http import answer_on

from api.app import create_app
from api.connections import Connections
from api.exchange import Observer
from api.gunicorn_worker import Worker
from api.metrics import ApiMetrics
from api.respond import stream
from api.services import Services
from shared.log import START
from shared.settings import ApiSettings

TELLING = "redis://user:sesame@10.0.0.5:6379 /srv/app/secret.py"
INTERNALS = ("sesame", "redis", "/srv", ".py", "Traceback", "RuntimeError", "File", "line")


def break_down(*_: Any, **__: Any) -> Any:
    raise RuntimeError(TELLING)


@pytest.fixture
def services() -> Any:
    """Collaborators that break whatever they are asked."""
    broken = SimpleNamespace(workers=break_down, require=break_down, submitted=break_down)
    parts: dict[str, Any] = dict.fromkeys(("client", "reader", "relay", "drain", "rates", "scrape"), broken)
    observer = Observer(ApiMetrics(CollectorRegistry()))
    return Services(settings=ApiSettings(), queue=broken, fleet=broken, observer=observer, **parts)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("POST", "/v1/completions", {"model": "m", "prompt": "x"}),
        ("GET", "/v1/streams/019a0000000070008000000000000000", None),
    ],
)
def test_an_error_of_ours_tells_nothing_of_the_inside(
    services: Any, caplog: pytest.LogCaptureFixture, method: str, path: str, body: Any
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = create_app(services).test_client().open(path, method=method, json=body)

    assert answer.status_code == 500
    assert answer.get_json()["error"]["code"] == "internal_error"
    told = answer.get_data(as_text=True) + str(answer.headers)
    assert [word for word in INTERNALS if word in told] == []
    assert TELLING in caplog.text, "the log tells"


def test_a_stream_that_breaks_tells_nothing_of_the_inside() -> None:
    class Breaking:
        request_id = "r"

        def __next__(self) -> Any:
            return break_down()

        def close(self) -> None:
            pass

    following: Any = Breaking()
    exchange: Any = SimpleNamespace(passes_on=lambda _: None, breaks=lambda: None)
    answer: Any = SimpleNamespace()

    told = b"".join(stream(following, answer, exchange, held=[], after=START, keep_alive_s=60)).decode()

    assert '"code":"internal_error"' in told
    assert [word for word in INTERNALS if word in told] == []


def test_what_breaks_outside_of_the_app_tells_neither_client_nor_log_what_was_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    request = SimpleNamespace(method="GET", uri="/v1/models?api_key=sesame")

    with ours, theirs, caplog.at_level(logging.DEBUG):
        theirs.shutdown(socket.SHUT_WR)
        with Connections(ApiSettings()).opened(ours) as connection:
            Worker.handle_error(object.__new__(Worker), request, connection, ("127.0.0.1", 1), RuntimeError("no"))
        answer = answer_on(theirs)

    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert [word for word in INTERNALS if word in answer.body.decode()] == []
    assert "RuntimeError: no" in caplog.text
    assert "sesame" not in caplog.text
