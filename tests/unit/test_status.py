"""How the status is drawn, and how it is shown again and again."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from deploy.status import ModelStatus, Status, StatusView, WorkerStatus, as_json
from deploy.watch import statuses
from shared.errors import StoreAwayError
from shared.fleet import ModelInfo, StateKind, WorkerState

MODEL = ModelInfo(
    name="tiny", backend="fake", device="cpu", context=64, vocabulary=300, state_kind=StateKind.TRIMMABLE, created=1
)
WORKER = WorkerStatus(
    name="tiny-host-17-ab12",
    model=MODEL,
    state=WorkerState.READY,
    pid=17,
    host="host",
    slots=8,
    running=3,
    lease_s=8.0,
    tokens_per_s=123.45,
    first_token_p50_s=0.0824,
    token_gap_p50_s=1.26,
    renewed_ago_s=0.5,
    is_silent=False,
)
STATUS = Status(
    url="http://127.0.0.1:8000",
    redis="redis://127.0.0.1/0",
    workers=[WORKER],
    models=[
        ModelStatus(
            name="tiny",
            workers=1,
            slots=8,
            running=3,
            waiting=12,
            waiting_interactive=11,
            waiting_background=1,
            tokens_per_s=123.45,
        )
    ],
)


def drawn(status: Status, *, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(StatusView(status))
    text: Any = console.file
    return str(text.getvalue())


def with_worker(**changes: Any) -> Status:
    return msgspec.structs.replace(STATUS, workers=[msgspec.structs.replace(WORKER, **changes)])


def test_a_wide_table_shows_everything() -> None:
    model, worker = (line.split() for line in drawn(STATUS).splitlines() if line.startswith("tiny"))

    assert model == ["tiny", "1", "3/8", "11", "1", "123.5"]
    assert worker == (
        [
            "tiny-host-17-ab12",
            "tiny",
            "fake",
            "cpu",
            "ready",
            "3/8",
            "123.5",
            "82",
            "ms",
            "1.3",
            "s",
            "0.5",
            "s",
            "ago",
            "17@host",
        ]
    )


def test_what_was_not_measured_is_a_dash() -> None:
    text = drawn(with_worker(tokens_per_s=0.0, first_token_p50_s=0.0, token_gap_p50_s=0.0, renewed_ago_s=None))

    assert text.splitlines()[-1].split()[6:] == ["-", "-", "-", "-", "17@host"]


def test_a_worker_that_does_not_renew_its_lease_is_silent_whatever_it_said() -> None:
    assert "silent" in drawn(with_worker(is_silent=True)).splitlines()[-1].split()
    assert "ready" not in drawn(with_worker(is_silent=True))


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20, 5])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    lines = drawn(STATUS, width=width).splitlines()

    assert max(map(len, lines)) <= width
    assert any(line.startswith("tiny"[:width]) for line in lines)


def test_a_narrow_table_keeps_what_matters_most() -> None:
    line = drawn(STATUS, width=60).splitlines()[-1]

    assert line.split() == ["tiny-host-17-ab12", "ready", "3/8", "123.5", "82", "ms"]


def test_an_error_is_shown_in_place_of_the_tables() -> None:
    text = drawn(Status(url="", redis="redis://127.0.0.1/0", error="cannot read from Redis"))

    assert text == "redis    redis://127.0.0.1/0\n\ncannot read from Redis\n"


def test_json_has_what_each_worker_said_and_how_long_ago() -> None:
    (worker,) = msgspec.json.decode(as_json(STATUS))["workers"]

    assert (worker["name"], worker["model"]["name"], worker["renewed_ago_s"], worker["is_silent"]) == (
        "tiny-host-17-ab12",
        "tiny",
        0.5,
        False,
    )


def test_watching_goes_on_while_redis_is_away() -> None:
    replies: list[Any] = [STATUS, StoreAwayError("gone"), STATUS]

    def read() -> Status:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    found = statuses(read, 0.0)

    assert [next(found).error for _ in range(3)] == ["", "gone", ""]


def test_watching_does_not_begin_without_redis() -> None:
    def read() -> Status:
        raise StoreAwayError("gone")

    with pytest.raises(StoreAwayError):
        next(statuses(read, 0.0))
