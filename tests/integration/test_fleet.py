"""Who lives, what is served, and what a front end sees of it."""

from typing import Any

import msgspec
import pytest
import redis
from servers import wait_until

from shared import keys
from shared.errors import ErrorCode, RequestError
from shared.fleet import Fleet, FleetView, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.store import connect

pytestmark = pytest.mark.usefixtures("no_key_without_ttl")

MODEL = ModelInfo(
    name="fake", backend="fake", device="cpu", context=64, vocabulary=300, state_kind=StateKind.TRIMMABLE, created=1
)


def worker(name: str, model: str = "fake", **changes: Any) -> WorkerInfo:
    info = WorkerInfo(
        name=name,
        model=msgspec.structs.replace(MODEL, name=model),
        state=WorkerState.READY,
        pid=1,
        host="here",
        slots=4,
        running=0,
    )
    return msgspec.structs.replace(info, **changes)


@pytest.fixture
def fleet(client: "redis.Redis") -> Fleet:
    return Fleet(client)


def code_of(view: FleetView, model: str) -> ErrorCode:
    with pytest.raises(RequestError) as caught:
        view.require(model)
    assert caught.value.param == "model"
    return caught.value.code


def test_live_workers_are_listed_by_name(fleet: Fleet) -> None:
    assert fleet.workers() == []
    fleet.renew(worker("b", running=3), lease_s=60)
    fleet.renew(worker("a", "other"), lease_s=60)

    assert fleet.workers() == [worker("a", "other"), worker("b", running=3)]


def test_a_worker_whose_lease_ran_out_is_not_alive(fleet: Fleet) -> None:
    fleet.renew(worker("a"), lease_s=0.05)
    fleet.renew(worker("b"), lease_s=60)

    wait_until(lambda: [info.name for info in fleet.workers()] == ["b"], what="the end of the lease")


def test_a_lease_is_as_long_as_it_says(client: "redis.Redis", fleet: Fleet) -> None:
    fleet.renew(worker("a"), lease_s=7.5)
    assert 7000 < client.pttl(keys.worker("a")) <= 7500
    fleet.renew(worker("a"), lease_s=60)
    assert client.pttl(keys.worker("a")) > 50_000


def test_a_worker_that_leaves_is_gone_at_once(fleet: Fleet) -> None:
    fleet.renew(worker("a"), lease_s=60)
    fleet.leave("a")

    assert fleet.workers() == []


def test_a_renewal_keeps_the_worker_s_claims_alive(client: "redis.Redis", fleet: Fleet) -> None:
    client.sadd(keys.running("a"), "r")
    client.expire(keys.running("a"), 5)

    fleet.renew(worker("a"), lease_s=60)

    assert client.ttl(keys.running("a")) > keys.RUNNING_TTL_S - 10


def test_a_view_finds_a_new_model_at_once(fleet: Fleet) -> None:
    view = FleetView(fleet, max_age_s=1000)
    assert code_of(view, "fake") is ErrorCode.MODEL_NOT_FOUND

    fleet.renew(worker("a"), lease_s=60)

    assert view.require("fake") == MODEL


def test_a_view_looks_again_only_after_its_time(fleet: Fleet) -> None:
    now = [0.0]
    view = FleetView(fleet, max_age_s=1.0, monotonic=lambda: now[0])
    assert view.models() == {}
    fleet.renew(worker("a"), lease_s=60)

    now[0] = 0.9
    assert view.models() == {}
    now[0] = 1.1
    assert view.models() == {"fake": MODEL}


def test_a_model_without_a_live_worker_is_unavailable_and_an_unknown_one_not_found(fleet: Fleet) -> None:
    fleet.renew(worker("a"), lease_s=60)
    fleet.leave("a")
    view = FleetView(fleet)

    assert code_of(view, "fake") is ErrorCode.MODEL_UNAVAILABLE
    assert code_of(view, "other") is ErrorCode.MODEL_NOT_FOUND


def test_a_draining_worker_lives_and_serves_nothing_new(fleet: Fleet) -> None:
    fleet.renew(worker("a", state=WorkerState.DRAINING), lease_s=60)
    view = FleetView(fleet)

    assert len(view.workers()) == 1
    assert view.models() == {}
    assert code_of(view, "fake") is ErrorCode.MODEL_UNAVAILABLE


def test_an_unreachable_store_is_said_to_be_that() -> None:
    view = FleetView(Fleet(connect("redis://127.0.0.1:1/0")))

    with pytest.raises(RequestError) as caught:
        view.require("fake")
    assert caught.value.code is ErrorCode.STORE_UNAVAILABLE
