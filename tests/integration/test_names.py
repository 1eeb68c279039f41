"""The name of a model in a request is looked up among the names that are served, and is nothing else."""

import os
from collections.abc import Callable
from urllib.parse import quote

import httpx
from asking import failure_of
from servers import FrontEnd
from traps import Traps
from worker_processes import Office, Start

from shared.errors import ErrorCode


def test_a_name_that_could_be_a_place_is_the_name_of_no_model(
    start: Start, office: Office, start_front_end: Callable[..., FrontEnd], traps: Traps
) -> None:
    worker = start()
    office.ready(worker)
    front_end = start_front_end()
    bait, beside = str(traps.bait), os.path.relpath(traps.bait)
    names = [bait, beside, f"./{beside}", f"file:{bait}", f"file://{bait}", f"fake={bait}", f"package:{bait}"]
    names += [f"{traps.url}bait.gguf", f"hf:{traps.url}:bait.gguf", f"fake/../{bait}", f"fake\0{bait}", f"fake\n{bait}"]
    names += [
        quote(bait, safe=""),
        f"${{HOME}}{bait}",
        f"~{bait}",
        f"$(cat {bait})",
        "fake:",
        "hf:org/repo",
        "*",
        "FAKE",
    ]
    names += ["", " fake", "fake ", "fake.interactive", "fаke"]

    for name in names:
        asked = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{front_end.url}/v1/chat/completions", json=asked, timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, ErrorCode.MODEL_NOT_FOUND.value), name
        answer = httpx.post(f"{front_end.url}/v1/completions", json={"model": name, "prompt": "hi"}, timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, ErrorCode.MODEL_NOT_FOUND.value), name
        answer = httpx.get(f"{front_end.url}/v1/models/{quote(name, safe='')}", timeout=20)
        assert answer.status_code in (404, 308) or not name, name

    assert worker.output == ""
    assert front_end.stop() == ""


def test_a_worker_takes_no_request_for_a_model_that_is_not_its_own(start: Start, office: Office, traps: Traps) -> None:
    office.ready(start())
    other = Office(office.client, model=str(traps.bait))
    other.submit("stray")
    office.client.lmove(f"rq:queue:{traps.bait}.interactive", "rq:queue:fake.interactive")

    assert failure_of(other.result("stray")).code == ErrorCode.INVALID_REQUEST.value
