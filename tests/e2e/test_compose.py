"""`docker-compose up` with a real Docker engine: `make e2e`."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from containers import Stack, crash, docker, eventually, inspect, logs, state
from models import packaged_gguf
from open_streams import OpenStream, body, undisturbed
from openai import OpenAI
from servers import ROOT
from streaming import events

pytestmark = pytest.mark.docker

MODEL = "smollm2"
DRAIN_TIMEOUT_S = 5
LONG = 600
"""Tokens of the fake engine that take some twelve seconds: longer than a stopping front end waits."""

RESUMABLE = {"server_stopping", "front_end_lost", "front_end_unavailable"}
"""Errors after which a client may go on elsewhere."""


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two front ends, a worker of the packaged model, and one of the fake engine."""
    stack = Stack(
        "tokenmill-e2e",
        "tests/e2e/fake.yml",
        TOKENMILL_DRAIN_TIMEOUT=str(DRAIN_TIMEOUT_S),
        TOKENMILL_LEASE="3",
        TOKENMILL_THREADS="1",
    )
    try:
        stack.compose("up", "--detach", "--scale", "api=2")
        stack.healthy("lb")
        stack.healthy("worker-gguf")
        stack.healthy("worker-fake")
        yield stack
    finally:
        stack.down()


@pytest.fixture
def openai(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def say(openai: OpenAI, number: int, tokens: int = 40) -> Any:
    """A whole answer of the real model, of exactly so many tokens."""
    return openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me about the number {number}."}],
        max_tokens=tokens,
        temperature=0,
        logit_bias={"2": -100},
    )


@contextmanager
def crowd(openai: OpenAI, size: int) -> Iterator[None]:
    """So many clients at once, each with one question after the other; every answer is whole."""
    has_ended = threading.Event()

    def ask(number: int) -> list[Any]:
        answers = [say(openai, number)]
        while not has_ended.is_set():
            answers.append(say(openai, number))
        return answers

    with ThreadPoolExecutor(size) as pool:
        clients = [pool.submit(ask, number) for number in range(size)]
        try:
            yield
        finally:
            has_ended.set()
    for client in clients:
        for whole in client.result():
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage.completion_tokens == 40


def workers_at_work(stack: Stack, model: str) -> int:
    """How many workers of the model run something now."""
    return sum(1 for worker in stack.status()["workers"] if worker["model"]["name"] == model and worker["running"])


# -- serving --


def test_the_official_client_streams(openai: OpenAI) -> None:
    assert {model.id for model in openai.models.list()} == {MODEL, "fake"}
    stream = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write one sentence about rivers."}],
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.strip()
    assert chunks[-1].usage is not None
    # Not held back on the way: one event a chunk, and not one for all of it.
    assert sum(1 for chunk in chunks if chunk.choices) > 3


def test_a_prompt_goes_through_whole(stack: Stack) -> None:
    long = {**body(4), "prompt": "x" * 1_000_000}
    answer = httpx.post(f"{stack.url}/v1/completions", json=long, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "waiting"])
def test_a_client_that_leaves_frees_its_slot(stack: Stack, stream: bool) -> None:
    def is_running() -> bool:
        return workers_at_work(stack, "fake") > 0

    connection = httpx.Client(timeout=60)

    def ask() -> None:
        with suppress(httpx.HTTPError, RuntimeError):
            connection.post(f"{stack.url}/v1/completions", json=body(5000, stream=stream))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(is_running, "the request to run", 20)
    close_sockets(connection)
    thread.join(20)
    eventually(lambda: not is_running(), "the slot to be free", 20)


def close_sockets(client: httpx.Client) -> None:
    """End the connections of a client, whatever it waits for."""
    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
        stream = connection._connection._network_stream.get_extra_info("socket")
        stream.shutdown(2)


def test_metrics_are_not_those_of_some_front_end(stack: Stack) -> None:
    assert httpx.get(f"{stack.url}/metrics").status_code == 404
    front_end, *_ = stack.containers("api")
    assert docker("exec", front_end, "http-ok", "8000", "/metrics").returncode == 0


# -- scaling --


def test_workers_come_and_go_under_load_and_nothing_is_lost(stack: Stack, openai: OpenAI) -> None:
    with crowd(openai, 24):
        stack.scale("worker-gguf", 3)
        eventually(lambda: workers_at_work(stack, MODEL) == 3, "the load to be shared", 40)
        stack.scale("worker-gguf", 1)
    assert [worker["model"]["name"] for worker in stack.status()["workers"]].count(MODEL) == 1


# -- faults --


def test_a_worker_is_killed_in_mid_stream_and_the_stream_goes_on(stack: Stack) -> None:
    stream = OpenStream(stack, LONG).has_begun()
    (worker,) = stack.containers("worker-fake")
    crash(worker)
    assert stream.end(60).text == undisturbed(LONG)
    assert stack.healthy("worker-fake") == [worker]


def test_redis_is_restarted_under_open_streams(stack: Stack) -> None:
    streams = [OpenStream(stack, LONG).has_begun() for _ in range(4)]
    assert refused_by(stack) == set()
    docker("restart", *stack.containers("redis"))
    assert {stream.end(60).text for stream in streams} == {undisturbed(LONG)}
    eventually(stack.answers, "readiness", 30)


class Resuming:
    """A client that takes a stream up again wherever it broke off."""

    def __init__(self, stack: Stack, tokens: int) -> None:
        self.text = ""
        self.times_resumed = 0
        self._last_id = self._resume_url = ""
        self._stack = stack
        self._tokens = tokens

    def read(self) -> str:
        """The whole text."""
        while not self._read_on():
            self.times_resumed += 1
        return self.text

    def _read_on(self) -> bool:
        """Read to the end, if it comes to that; True if it was the right one."""
        raw = ""
        try:
            with self._ask() as answer:
                if answer.status_code != 200:
                    error = json.loads(answer.read())["error"]["code"]
                    assert error in RESUMABLE, error
                    return False
                self._resume_url = answer.headers.get("X-Resume-Url", self._resume_url)
                for piece in answer.iter_text():
                    raw += piece
        except httpx.TransportError:
            pass
        # What is behind the last blank line is half an event.
        for event_id, data in events(raw[: raw.rfind("\n\n") + 2]):
            if data == "[DONE]":
                return True
            found = json.loads(data)
            if "error" in found:
                assert found["error"]["code"] in RESUMABLE, found
                return False
            self.text += "".join(choice["text"] for choice in found["choices"])
            self._last_id = event_id or self._last_id
        return False

    def _ask(self) -> Any:
        if self._resume_url:
            headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
            return httpx.stream("GET", self._stack.url + self._resume_url, headers=headers, timeout=60)
        return httpx.stream(
            "POST", f"{self._stack.url}/v1/completions", json=body(self._tokens, stream=True), timeout=60
        )


def test_front_ends_are_replaced_one_by_one_under_load(stack: Stack) -> None:
    before = set(stack.containers("api"))
    replaced = threading.Event()

    def whole_or_an_error_that_says_so() -> int:
        """Ask until the front ends are replaced; how many answers were whole."""
        whole = 0
        while not replaced.is_set():
            answer = httpx.post(f"{stack.url}/v1/completions", json=body(25), timeout=60)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == undisturbed(25)
                whole += 1
            else:
                assert answer.json()["error"]["code"] in RESUMABLE, answer.text
        return whole

    def resuming_again_and_again() -> int:
        """Long streams until the front ends are replaced; how often one had to be taken up again."""
        times = 0
        while not replaced.is_set():
            client = Resuming(stack, LONG)
            assert client.read() == undisturbed(LONG)
            times += client.times_resumed
        return times

    with ThreadPoolExecutor(6) as pool:
        whole = [pool.submit(whole_or_an_error_that_says_so) for _ in range(2)]
        resuming = [pool.submit(resuming_again_and_again) for _ in range(4)]
        try:
            stack.run("deploy/compose/replace.sh", "api")
        finally:
            replaced.set()
    assert all(answers.result() > 0 for answers in whole)
    assert sum(times.result() for times in resuming) > 0
    after = set(stack.healthy("api", 2))
    assert not before & after


def test_what_was_sent_to_a_front_end_that_dies_is_sent_to_no_other(stack: Stack) -> None:
    def requests() -> int:
        return len(stack.redis("--scan", "--pattern", "tokenmill:request:*").split())

    before = requests()
    waiting = OpenStream(stack, 5000, stream=False)
    eventually(lambda: workers_at_work(stack, "fake"), "the request to run", 20)
    for front_end in stack.containers("api"):
        crash(front_end)
    eventually(lambda: waiting.has_ended, "an answer", 30)
    assert waiting.status == 502
    assert json.loads(waiting.raw)["error"]["code"] == "front_end_lost"
    assert requests() == before + 1
    stack.healthy("api", 2)
    eventually(stack.answers, "readiness", 30)


# -- what an operator does wrong --


@contextmanager
def worker_that_cannot_serve(stack: Stack, **settings: str) -> Iterator[tuple[str, int]]:
    """The worker of the real model with settings of its own and its exit status; in the end it is as it was."""
    try:
        stack.compose("up", "--detach", "--no-deps", "worker-gguf", **settings)
        (worker,) = stack.containers("worker-gguf", all=True)
        # It is started again and again, and while it runs its status is 0.
        yield worker, eventually(lambda: state(worker)["ExitCode"], "the worker to end", 30)
    finally:
        stack.compose("up", "--detach", "--no-deps", "worker-gguf")
        stack.healthy("worker-gguf")


def lines(container: str) -> set[str]:
    return set(logs(container).splitlines())


def is_unwell(container: str) -> bool:
    """Whether the engine shows it as such; for an instant after each start it does not know yet."""
    return bool(state(container)["Health"]["Status"] == "unhealthy")


def test_a_bad_setting_is_one_line_and_harms_nobody_else(stack: Stack) -> None:
    with worker_that_cannot_serve(stack, TOKENMILL_SLOTS="0") as (worker, status):
        assert status == 2
        assert lines(worker) == {"tokenmill: error: --slots (TOKENMILL_SLOTS): 0 is below 1"}
        eventually(lambda: is_unwell(worker), "the worker to be shown as unwell", 30)
        assert OpenStream(stack, 20).end(20).text == undisturbed(20)


def test_models_that_cannot_be_read_are_one_line_and_harm_nobody_else(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir(mode=0o700)
    shutil.copy(packaged_gguf(), folder / "model.gguf")
    settings = {"MODELS": str(folder), "TOKENMILL_MODEL": f"{MODEL}=/models/model.gguf"}
    with worker_that_cannot_serve(stack, **settings) as (worker, status):
        assert status == 1
        (line,) = lines(worker)
        assert line.startswith("tokenmill: error: model /models/model.gguf: ")
        assert "ermission denied" in line
        eventually(lambda: is_unwell(worker), "the worker to be shown as unwell", 30)
        assert OpenStream(stack, 20).end(20).text == undisturbed(20)

    folder.chmod(0o755)
    (folder / "model.gguf").chmod(0o644)
    stack.compose("up", "--detach", "--no-deps", "worker-gguf", **settings)
    stack.healthy("worker-gguf")


@pytest.mark.parametrize(
    ("service", "setting", "line"),
    [
        ("api", "TOKENMILL_QUEUE_LIMIT=0", "tokenmill: error: --queue-limit (TOKENMILL_QUEUE_LIMIT): 0 is below 1"),
        (
            "redis",
            "REDIS_API_PASSWORD=a b",
            "redis: error: REDIS_API_PASSWORD may only have letters, digits and . _ ~ -",
        ),
    ],
    ids=["api", "redis"],
)
def test_a_bad_setting_of_another_service_is_one_line_too(stack: Stack, service: str, setting: str, line: str) -> None:
    done = stack.compose("run", "--rm", "--no-deps", "-T", "-e", setting, service, check=False)
    said = [each for each in (done.stdout + done.stderr).splitlines() if "error" in each]
    assert done.returncode == 2
    assert said == [line]


# -- images, Redis and files --


@pytest.mark.parametrize("service", ["lb", "api", "worker-gguf", "redis"])
def test_a_container_is_nobody_and_can_change_nothing(stack: Stack, service: str) -> None:
    container, *_ = stack.healthy(service, 2 if service == "api" else 1)
    found = inspect(container)
    assert found["Config"]["User"] == "10001:10001"
    assert found["HostConfig"]["ReadonlyRootfs"]
    tools = "gcc cc c++ make cmake pip pip3 git curl"
    assert docker("exec", container, "sh", "-c", f"command -v {tools}", check=False).stdout == ""


def test_a_front_end_has_no_engine(stack: Stack) -> None:
    front_end, *_ = stack.containers("api")
    looked = "import importlib.util as u; print([n for n in ('llama_cpp', 'torch', 'numpy') if u.find_spec(n)])"
    assert docker("exec", front_end, "python3", "-c", looked).stdout.strip() == "[]"


def refused_by(stack: Stack) -> set[str]:
    """What Redis has refused to somebody who was let in, since it started."""
    log = [line.strip() for line in stack.redis("ACL", "LOG", "1000").splitlines()]
    return {log[index + 1] for index, line in enumerate(log) if line == "object"}


def test_redis_has_refused_nothing_that_was_needed(stack: Stack) -> None:
    assert refused_by(stack) == set()


def test_redis_lets_in_only_who_has_a_password_and_only_for_what_is_needed(stack: Stack) -> None:
    (redis,) = stack.containers("redis")
    assert not inspect(redis)["NetworkSettings"]["Ports"].get("6379/tcp")
    nobody = docker("exec", redis, "redis-cli", "INFO").stdout
    assert nobody.startswith("NOAUTH")
    passwords = set()
    for service, user in (("api", "api"), ("worker-gguf", "worker")):
        container, *_ = stack.containers(service)
        password = docker("exec", container, "cat", "/run/tokenmill/password").stdout
        passwords.add(password)
        for command in ("FLUSHALL", "CONFIG GET dir", "KEYS *", "ACL LIST", "GET other", "MONITOR"):
            refused = docker("exec", redis, "redis-cli", "--user", user, "--pass", password, *command.split()).stdout
            assert refused.startswith("NOPERM"), (user, command, refused)
    assert len(passwords) == 2


OVERLAYS = ["torch", "torch torch-cuda", "gguf-cuda", "models"]


@pytest.mark.parametrize("names", OVERLAYS)
def test_compose_accepts_every_overlay(names: str) -> None:
    files = [f"deploy/compose/{name}.yml" for name in names.split()]
    models = {"TORCH_MODEL": "large=/models/large", "SECOND_MODEL": "second=/models/second.gguf"}
    found = yaml.safe_load(Stack("config", *files, **models).compose("config").stdout)
    worker = {"torch": "worker-torch", "models": "worker-second", "gguf-cuda": "worker-gguf"}[names.split()[0]]
    service = found["services"][worker]
    assert service["stop_grace_period"] == "1m30s"
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    assert bool(devices) == ("cuda" in names)
    assert {file.stem for file in (ROOT / "deploy" / "compose").glob("*.yml")} == set(" ".join(OVERLAYS).split())
