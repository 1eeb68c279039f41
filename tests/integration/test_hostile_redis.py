"""Whoever can write to Redis can deny service and answer in a worker's place; no process runs anything for them.

Workers and front ends live on, and the next honest request is served.
"""

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis
from asking import failure_of, request, usage_of
from open_streams import OpenStream, answers, undisturbed
from rq import Queue
from rq.command import PUBSUB_CHANNEL_TEMPLATE, send_stop_job_command
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry
from rq.serializers import JSONSerializer
from servers import FrontEnd, Valkey, wait_until
from traps import Traps, call, overwrite
from worker_processes import ENDLESS, Office, Start

from shared import keys
from shared.domain import Priority, TextPrompt
from shared.errors import ErrorCode
from shared.jobs import MOST_DATA_BYTES, DataJob, rq_queue

INTERACTIVE = keys.queue_name("fake", Priority.INTERACTIVE)
MODEL = "fake=fake:pace=0.02&end_every=0&context=100000"

StartFrontEnd = Callable[..., FrontEnd]


def payload_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"v": 1, "request": msgspec.to_builtins(request(name)) | changes}


@pytest.mark.parametrize("function", ["pickle", "trap.fire"])
def test_rq_s_own_worker_falls_into_the_traps(
    valkey: Valkey, client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    traps = Traps(tmp_path).set(tmp_path, monkeypatch)
    queue = Queue("stock", connection=client, serializer=JSONSerializer)
    job = queue.enqueue(function)
    if function == "pickle":
        overwrite(client, job.id, data=traps.pickled)
    serializer = ["--serializer", "json"] if function != "pickle" else []
    command = [Path(sys.executable).with_name("rq"), "worker", "stock", "--burst", "--url", valkey.url, *serializer]
    subprocess.run([*command, "--worker-class", "rq.SimpleWorker"], capture_output=True, check=False, timeout=60)
    traps.remove()

    assert traps.sprung()


# -- jobs --


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (lambda traps: {"data": traps.pickled}, ErrorCode.INVALID_REQUEST),
        (lambda traps: {"data": zlib.compress(traps.pickled)}, ErrorCode.INVALID_REQUEST),
        (lambda traps: {"data": call("os.system", traps.command)}, ErrorCode.INVALID_REQUEST),
        (lambda traps: {"data": call(traps.fire, payload_of("hostile", n=10**9))}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": call("x", payload_of("hostile", prompts=[]))}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": call("x", payload_of("hostile", logprobs=-1))}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": call("x", payload_of("hostile", sampling={"seed": 2**70}))}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": b'["x",null,[NaN],{}]'}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": b'["x",null,["\\ud800"],{}]'}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": b"[" * 100_000}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": zlib.compress(bytes(2 * MOST_DATA_BYTES), 1)}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": call("x", {**payload_of("hostile"), "v": 99})}, ErrorCode.PAYLOAD_VERSION),
        (lambda _: {"data": call("x", {"v": 1, "request": {}})}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": call("x", payload_of("another"))}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": call("x")}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"data": b"[]"}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"created_at": "yesterday"}, ErrorCode.INVALID_REQUEST),
        (lambda _: {"status": b"\xff", "origin": b"\xff", "description": b"\xff"}, ErrorCode.INVALID_REQUEST),
    ],
    ids=[
        "pickle", "compressed pickle", "os.system", "a billion choices", "no prompt", "logprobs", "seed", "NaN",
        "half a character", "nested", "unpacks to too much", "version", "no request", "another's", "nothing", "shape",
        "date", "no text",
    ],
)  # fmt: skip
def test_a_job_that_is_no_request_ends_and_the_worker_lives_on(
    start: Start, office: Office, traps: Traps, fields: Callable[[Traps], dict[str, Any]], code: ErrorCode
) -> None:
    office.submit("hostile")
    overwrite(office.client, "hostile", **fields(traps))
    worker = start("--slots", "1")
    office.ready(worker)

    events = office.result("hostile")
    office.submit("next")

    assert failure_of(events).code == code.value
    assert usage_of(office.result("next")).completion == 8
    office.wait_for_status(JobStatus.FAILED, ["hostile"])
    assert FailedJobRegistry(INTERACTIVE, connection=office.client).get_job_ids(cleanup=False) == ["hostile"]
    assert CanceledJobRegistry(INTERACTIVE, connection=office.client).get_job_ids(cleanup=False) == []
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    assert worker.is_running
    assert worker.output == ""


def test_what_a_job_carries_beside_its_request_is_not_looked_at(start: Start, office: Office, traps: Traps) -> None:
    office.submit("good", "bad")
    huge = b"x" * 30_000_000
    overwrite(office.client, "good", **traps.beside, description=huge)
    office.client.hset(DataJob.key_for("good"), b"\xff\xfe", b"\xff")
    overwrite(office.client, "bad", **traps.beside, data=call(traps.fire, "x"))
    stock = Queue(INTERACTIVE, connection=office.client)
    for name in ("good", "bad"):
        office.client.sadd(f"rq:job:{name}:dependents", "dependent", b"\xff", "nobody")
        office.client.xadd(f"rq:results:{name}", {"type": 1, "return_value": traps.pickled})
    overwrite(office.client, "dependent", **traps.beside, data=traps.pickled, origin=INTERACTIVE, status="deferred")
    worker = start()
    office.ready(worker)

    assert usage_of(office.result("good")).completion == 8
    assert failure_of(office.result("bad")).code == ErrorCode.INVALID_REQUEST.value
    office.wait_for_status(JobStatus.FINISHED, ["good"])
    office.wait_for_status(JobStatus.FAILED, ["bad"])
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    assert stock.get_job_ids() == []
    assert office.client.ttl(DataJob.key_for("good")) > 0
    assert worker.output == ""


def test_what_is_no_job_of_ours_at_all_does_not_stop_the_worker(start: Start, office: Office, traps: Traps) -> None:
    stock = Queue(INTERACTIVE, connection=office.client)
    alien = stock.enqueue("os.system", traps.command)
    for entry in (b"not an id", b"\xff\xfe", b"nobody", b"of:two:parts", b"", b"x" * 1_000_000):
        office.client.rpush(stock.key, entry)
    office.client.set(DataJob.key_for("no-hash"), traps.pickled)
    office.client.rpush(stock.key, "no-hash")
    worker = start()
    office.ready(worker)

    office.submit("next")

    assert usage_of(office.result("next")).completion == 8
    wait_until(lambda: alien.get_status() is JobStatus.CANCELED, what="the end of the alien job")
    wait_until(lambda: not office.left_in_rq(), limit_s=30, what="RQ to hold nothing of it")
    assert worker.is_running
    assert "Traceback" not in worker.output


# -- RQ's own records --


def test_what_rq_s_registers_name_is_neither_read_nor_run(
    start: Start, office: Office, start_front_end: StartFrontEnd, traps: Traps
) -> None:
    client = office.client
    # What RQ's own tidying would take for the job of a worker that died, and call the failure callback of.
    overwrite(client, "abandoned", **traps.beside, data=traps.pickled, origin=INTERACTIVE, status="started")
    members: Any = {"abandoned:run": 1, "abandoned": 1, b"\xff\xfe": 1, "of:three:parts": 1, "": 1, "nobody:run": 1}
    registers = ("wip", "finished", "failed", "canceled", "deferred", "scheduled", "ready")
    for register in registers:
        client.zadd(f"rq:{register}:{INTERACTIVE}", members)
    client.sadd("rq:workers", b"\xff", "rq:worker:nobody", "nonsense")
    client.sadd(f"rq:workers:{INTERACTIVE}", b"\xff", "nonsense")
    client.sadd("rq:queues", b"\xff", "rq:queue:", f"rq:queue:{INTERACTIVE}")
    for register, kept in (("rl-keys", "rl:"), ("groups", "group:")):
        client.sadd(f"rq:{register}", b"\xff", "one")
        client.set(f"rq:{kept}one", traps.pickled)
    worker = start(model=MODEL)
    office.ready(worker)
    front_end = start_front_end()

    assert answers(front_end)
    wait_until(lambda: client.zcard(f"rq:wip:{INTERACTIVE}") == 0, limit_s=30, what="an empty register")
    assert answers(front_end)
    assert worker.is_running
    assert "Traceback" not in worker.output


@pytest.mark.parametrize("put", ["a string", "a list"])
def test_what_lies_under_a_shared_key_and_does_not_belong_there_is_removed(
    start: Start, office: Office, start_front_end: StartFrontEnd, traps: Traps, put: str
) -> None:
    client = office.client
    worker = start(model=MODEL)
    office.ready(worker)
    front_end = start_front_end()
    assert answers(front_end)
    (name,) = [info.name for info in office.workers()]
    queue = rq_queue(client, "fake", Priority.INTERACTIVE)
    shared = [keys.WORKERS, keys.REAPER_LOCK, keys.worker(name), keys.running(name), keys.model("fake")]
    shared += [keys.waiting("fake"), keys.unclaimed(INTERACTIVE), keys.unfinished(INTERACTIVE)]
    shared += ["rq:queues", queue.key, queue.intermediate_queue_key, "rq:workers", f"rq:workers:{INTERACTIVE}"]
    shared += [f"rq:{register}:{INTERACTIVE}" for register in ("wip", "finished", "failed", "canceled")]
    shared += [f"rq:worker:{name}", f"rq:clean_registries:{INTERACTIVE}", "rq:rl-keys", "rq:groups"]
    for key in shared:
        client.delete(key)
        if put == "a string":
            client.set(key, traps.pickled)
        else:
            client.rpush(key, traps.pickled)

    wait_until(lambda: answers(front_end), limit_s=40, pause_s=0.2, what="an answer")
    wait_until(lambda: client.type(keys.WORKERS) == b"set", what="the register of workers")
    assert [info.name for info in office.workers()] == [name]
    wait_until(lambda: not office.left_in_rq(), limit_s=30, what="RQ to hold nothing of it")
    assert worker.is_running
    assert "Traceback" not in worker.output + front_end.stop()


# -- requests, their logs and the fleet --


def damage_state(client: Any, name: str) -> None:
    client.hset(keys.request(name), mapping={"state": b"\xff", "deadline": "soon", "log_ttl": "-1"})


def damage_attempt(client: Any, name: str) -> None:
    client.hset(keys.request(name), mapping={"attempt": "many", "seq": "nan", "worker": b"\xff"})


def overwrite_request(client: Any, name: str) -> None:
    client.set(keys.request(name), "x", ex=60)


def overwrite_log(client: Any, name: str) -> None:
    client.set(keys.log(name), "x", ex=60)


def jump_in_log(client: Any, name: str) -> None:
    client.xadd(keys.log(name), {"e": b"\x80\x04garbage"}, id="999-1")


@pytest.mark.parametrize(
    "damage", [damage_state, damage_attempt, overwrite_request, overwrite_log, jump_in_log], ids=lambda it: it.__name__
)
def test_a_request_that_somebody_damages_ends_and_the_next_is_served(
    start: Start, office: Office, start_front_end: StartFrontEnd, damage: Callable[[Any, str], None]
) -> None:
    worker = start(model=MODEL)
    office.ready(worker)
    front_end = start_front_end(request_timeout=8.0)
    stream = OpenStream(front_end, 5000).has_begun()
    (attempted,) = (key.decode() for key in office.client.scan_iter(f"{keys.REQUEST_PREFIX}*"))
    name = attempted.removeprefix(keys.REQUEST_PREFIX)

    damage(office.client, name)

    assert answers(front_end)
    assert stream.end(30).failure
    wait_until(lambda: all(info.running == 0 for info in office.workers()), what="free slots")
    assert answers(front_end)
    assert worker.is_running
    assert "Traceback" not in worker.output + front_end.stop()


@pytest.mark.parametrize(
    "shape", [b"\x80\x04.", b"[" * 100_000, b"{}", b'{"choices": 1000000000}'], ids=["pickle", "nested", "none", "many"]
)
def test_a_stream_whose_shape_somebody_has_changed_cannot_be_resumed(
    start: Start, office: Office, start_front_end: StartFrontEnd, shape: bytes
) -> None:
    office.ready(start())
    front_end = start_front_end()
    assert answers(front_end)
    (key,) = office.client.scan_iter(f"{keys.REQUEST_PREFIX}*")
    office.client.hset(key, "attribute:answer", shape)

    name = key.decode().removeprefix(keys.REQUEST_PREFIX)
    answer = httpx.get(f"{front_end.url}/v1/streams/{name}", timeout=20)

    assert answer.json()["error"]["code"] in (ErrorCode.REQUEST_LOST.value, ErrorCode.STREAM_EXPIRED.value)
    assert answers(front_end)
    assert front_end.stop() == ""


@pytest.mark.parametrize("damage", [damage_state, damage_attempt, overwrite_request], ids=lambda it: it.__name__)
def test_a_waiting_request_that_somebody_damages_is_dropped(
    start: Start, office: Office, damage: Callable[[Any, str], None]
) -> None:
    office.submit("damaged")
    damage(office.client, "damaged")
    worker = start("--slots", "1")
    office.ready(worker)

    office.submit("next")

    assert usage_of(office.result("next")).completion == 8
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    assert worker.is_running
    assert "Traceback" not in worker.output
    office.client.delete(keys.request("damaged"))


@pytest.mark.parametrize(
    "entry",
    [
        b"\x80\x04garbage",
        b"[" * 100_000,
        b'{"type":"chunk","choice":0,"text":"x","tokens":[1000000]}',
        b'{"type":"chunk","choice":100000,"text":"x","tokens":[1]}',
        b'{"type":"done","usage":{"prompt":-1}}',
    ],
    ids=["garbage", "nested", "token", "choice", "usage"],
)
def test_a_log_that_somebody_has_written_is_not_carried_on(start: Start, office: Office, entry: bytes) -> None:
    office.submit("damaged", prompts=(TextPrompt("hello"),))
    # As if a worker had died: the next attempt reads what the first has written.
    office.client.hset(keys.request("damaged"), mapping={"attempt": 1})
    office.client.xadd(keys.log("damaged"), {"e": entry}, id="1-1")
    office.client.expire(keys.log("damaged"), 60)
    worker = start("--slots", "1")
    office.ready(worker)

    office.submit("next")

    assert usage_of(office.result("next")).completion == 8
    wait_until(lambda: office.client.hget(keys.request("damaged"), "state") in (b"failed", b"done"), what="its end")
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    assert worker.is_running
    assert "Traceback" not in worker.output


def test_workers_that_nobody_can_read_are_none(
    start: Start, office: Office, start_front_end: StartFrontEnd, traps: Traps
) -> None:
    worker = start(model=MODEL)
    office.ready(worker)
    front_end = start_front_end()
    names: list[Any] = [b"\xff", "no-hash", "pickle", "nested", "shape", "../../etc/passwd", ""]
    office.client.sadd(keys.WORKERS, *names)
    office.client.set(keys.worker("no-hash"), traps.pickled, ex=60)
    for name, info in {"pickle": traps.pickled, "nested": b"[" * 100_000, "shape": b'{"name":7}'}.items():
        office.client.hset(keys.worker(name), "info", info)
        office.client.expire(keys.worker(name), 60)

    assert answers(front_end)
    wait_until(lambda: not office.client.sismember(keys.WORKERS, "../../etc/passwd"), what="the next reaping")
    assert answers(front_end)
    assert [info.pid for info in office.workers()] == [worker.pid]
    assert worker.is_running
    assert "Traceback" not in worker.output + front_end.stop()


# -- channels --


def test_noise_on_the_command_channel_does_not_deafen_the_worker(start: Start, office: Office, traps: Traps) -> None:
    worker = start(model=ENDLESS)
    office.ready(worker)
    office.submit("endless", max_tokens=None)
    office.wait_for_text("endless")
    orders: list[Any] = [{"command": command} for command in ("stop-job", "tokenmill-cancel", "kill-horse", 7, None)]
    orders += [{"command": "stop-job", "job_id": name} for name in ("\ud800", "../x", "nobody", 7, None, [], "\n")]
    orders += [{"command": "stop-execution", "execution_id": "x"}, {"command": traps.fire}, {}, [], 7, None]
    noise = [json.dumps(order).encode() for order in orders]
    for message in (*noise, b"{", b"\xff", b"", traps.pickled, b"[" * 100_000):
        office.client.publish(PUBSUB_CHANNEL_TEMPLATE % office.workers()[0].name, message)

    wait_until(lambda: office.status("endless") is JobStatus.STARTED, what="RQ's record")
    send_stop_job_command(office.client, "endless", serializer=JSONSerializer)

    assert failure_of(office.result("endless")).code == ErrorCode.CANCELLED.value
    assert "Traceback" not in worker.output


def test_noise_on_the_channel_of_a_request_changes_nothing(
    start: Start, office: Office, start_front_end: StartFrontEnd, traps: Traps
) -> None:
    office.ready(start(model=MODEL))
    front_end = start_front_end()
    stream = OpenStream(front_end, 40).has_begun()
    (channel,) = (raw.decode() for raw in office.client.pubsub_channels(keys.events("*")))
    for noise in (b"", b"x", b"1-2", b"1-2 {", b"x-y {}", b"99999999999999999999-1 {}", traps.pickled, b"\xff" * 999):
        office.client.publish(channel, noise)

    assert stream.end(30).text == undisturbed(40)
    assert front_end.stop() == ""
