"""`tokenmill up` serves, keeps serving, and leaves nothing behind; all on the fake engine."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from launched import END_LIMIT_S, Up, is_alive
from servers import Valkey, wait_until

FAKE = ("--model", "tiny=fake:")
BACK_LIMIT_S = 20.0

StartUp = Callable[..., Up]


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """Starts `tokenmill up` with a free port and the given arguments."""
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield start
    for up in started:
        up.clean()


def status(up: Up, *arguments: str) -> dict[str, Any]:
    """What `tokenmill status --json` says to the user who runs this `up`."""
    command = [sys.executable, "-P", "-m", "deploy.cli", "status", "--json", *arguments]
    done = subprocess.run(command, env=up.environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ask(up: Up) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=BACK_LIMIT_S)


def only_line(up: Up) -> str:
    """The only line that `up` printed, after it ended."""
    lines = up.output().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# -- what is found before anything is started --


def test_a_taken_port_is_one_line(start_up: StartUp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        up = start_up(*FAKE, "--port", str(port))
        assert up.end() == 1
    assert (
        only_line(up) == f"tokenmill: error: port {port} on 127.0.0.1 is taken; choose another with"
        " --port (TOKENMILL_PORT)"
    )


def test_an_address_of_another_machine_is_one_line(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--host", "192.0.2.1")
    assert up.end() == 1
    assert only_line(up).startswith("tokenmill: error: cannot listen on 192.0.2.1")


def test_a_missing_model_file_is_one_line(start_up: StartUp) -> None:
    up = start_up("--model", "lost=/nowhere/lost.gguf")
    assert up.end() == 1
    assert only_line(up).startswith("tokenmill: error: model /nowhere/lost.gguf")


def test_a_folder_without_a_model_is_one_line(start_up: StartUp, tmp_path: Path) -> None:
    up = start_up("--model", f"empty={tmp_path}")
    assert up.end() == 1
    assert only_line(up) == f"tokenmill: error: model {tmp_path}: the folder {tmp_path} has no config.json"


def test_an_engine_that_cannot_run_the_model_is_one_line(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--backend", "transformers")
    assert up.end() == 2
    assert only_line(up).startswith("tokenmill: error: --backend (TOKENMILL_BACKEND): transformers cannot run fake:")


@pytest.mark.gguf
def test_a_gpu_that_is_not_there_is_one_line(start_up: StartUp) -> None:
    # No machine has both kinds.
    absent = "cuda" if sys.platform == "darwin" else "mps"
    up = start_up("--device", absent)
    assert up.end() == 1
    assert (
        only_line(up) == f"tokenmill: error: --device (TOKENMILL_DEVICE): llama_cpp finds no {absent} on this machine"
    )


def test_an_unreachable_redis_is_one_line(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--redis", "redis://127.0.0.1:1/0")
    assert up.end() == 1
    assert only_line(up).startswith("tokenmill: error: cannot reach Redis at redis://127.0.0.1:1/0")


def test_a_bad_flag_is_one_line(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--slots", "many")
    assert up.end() == 2
    assert only_line(up).startswith("tokenmill: error: --slots (TOKENMILL_SLOTS)")


def test_a_model_that_cannot_be_loaded_stops_everything(start_up: StartUp, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but not more of it")
    up = start_up("--model", f"broken={broken}")
    up.wait_for("starting worker broken")
    up.family()
    assert up.end() == 1
    errors = [line for line in up.output().splitlines() if line.startswith("tokenmill: error: ")]
    assert len(errors) == 2, up.output()
    assert str(broken) in errors[0]
    assert errors[1] == "tokenmill: error: worker broken exited with status 1 before it was ready"
    assert not up.survivors()


# -- serving --


def test_up_serves_and_says_where(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--model", "other=fake:").ready()
    lines = up.output().splitlines()
    assert f"ready {up.url}  (models: tiny, other)" in lines
    assert any(line.startswith(f"curl -N {up.url}/v1/chat/completions ") for line in lines)
    assert ask(up).status_code == 200


def test_the_printed_curl_line_streams_an_answer(start_up: StartUp) -> None:
    up = start_up("--model", "tiny=fake:").ready()
    up.wait_for("\ncurl -N ")
    command = next(line for line in up.output().splitlines() if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_processes_can_be_told_apart(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    commands = [" ".join(process.cmdline()).strip() for process in up.family()]
    assert "tokenmill worker tiny" in commands
    assert any(command.startswith("tokenmill api") for command in commands)
    assert any("valkey-server" in command for command in commands)


def test_a_redis_of_ones_own_is_used_and_left_running(start_up: StartUp, own_valkey: Valkey) -> None:
    up = start_up(*FAKE, "--redis", own_valkey.url).ready()
    assert not any("valkey-server" in " ".join(process.cmdline()) for process in up.family())
    assert ask(up).status_code == 200
    up.signal(signal.SIGTERM)
    assert up.end() == 0
    assert status(up, "--redis", own_valkey.url)["models"][0]["name"] == "tiny"


# -- status --


def test_status_shows_workers_and_models(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--workers", "2", "--slots", "3").ready()
    found = status(up)
    assert found["url"] == up.url
    assert found["redis"].startswith("unix://")
    assert [(w["model"]["name"], w["state"], w["running"], w["slots"]) for w in found["workers"]] == [
        ("tiny", "ready", 0, 3)
    ] * 2
    assert {w["pid"] for w in found["workers"]} <= {process.pid for process in up.family()}
    assert found["models"] == [
        {
            "name": "tiny",
            "workers": 2,
            "slots": 6,
            "running": 0,
            "waiting": 0,
            "waiting_interactive": 0,
            "waiting_background": 0,
            "tokens_per_s": 0.0,
        }
    ]
    assert all(0 <= w["renewed_ago_s"] < w["lease_s"] == 8.0 for w in found["workers"])


def test_status_shows_what_waits_by_priority_and_how_fast_it_goes(start_up: StartUp) -> None:
    up = start_up("--model", "tiny=fake:pace=0.01&end_every=0", "--slots", "1", "--lease", "2").ready()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000}
    asked: list[dict[str, Any]] = [body, body, body, {**body, "service_tier": "flex"}]

    with contextlib.ExitStack() as clients:
        for fields in asked:
            stream = httpx.stream("POST", f"{up.url}/v1/completions", json={**fields, "stream": True}, timeout=30)
            clients.enter_context(stream)
        found = wait_until(
            lambda: (now := status(up)["models"][0])["running"] and now["tokens_per_s"] and now,
            limit_s=BACK_LIMIT_S,
            what="a worker that tells its speed",
        )
        (worker,) = status(up)["workers"]

    assert (found["waiting"], found["waiting_interactive"], found["waiting_background"]) == (3, 2, 1)
    assert worker["first_token_p50_s"] > 0
    assert worker["token_gap_p50_s"] > 0


def test_a_worker_that_stops_renewing_its_lease_is_silent_until_it_is_dead(start_up: StartUp) -> None:
    up = start_up(*FAKE, "--lease", "4").ready()
    worker = up.child("tokenmill worker")
    assert [w["is_silent"] for w in status(up)["workers"]] == [False]

    worker.suspend()
    try:
        silent = wait_until(
            lambda: [w for w in status(up)["workers"] if w["is_silent"]], limit_s=BACK_LIMIT_S, what="silence"
        )
        wait_until(lambda: not status(up)["workers"], limit_s=BACK_LIMIT_S, what="the end of the lease")
    finally:
        worker.resume()

    assert silent[0]["pid"] == worker.pid
    assert 2 < silent[0]["renewed_ago_s"] <= 4


def watched(up: Up, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "deploy.cli", "status", "--watch", "0.2", *arguments]
    return subprocess.Popen(command, env=up.environment, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watching_into_a_pipe_prints_one_status_after_the_other_until_a_signal(
    start_up: StartUp, number: signal.Signals
) -> None:
    up = start_up(*FAKE).ready()
    with watched(up, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        seen = 0
        while seen < 3:
            seen += watching.stdout.readline().startswith(f"serving  {up.url}")
        watching.send_signal(number)
        rest, errors = watching.communicate(timeout=10)

    assert watching.returncode == 0
    assert errors == ""
    assert "\x1b" not in rest


def test_watching_as_json_is_one_object_a_line_and_survives_the_end_of_redis(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    with watched(up, "--json", stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        up.signal(signal.SIGTERM)
        assert up.end() == 0
        while not (last := json.loads(watching.stdout.readline()))["error"]:
            pass
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 0

    assert [worker["model"]["name"] for worker in first["workers"]] == ["tiny"]
    assert last["error"].startswith("cannot read from Redis at unix://")
    assert last["workers"] == []


def test_watching_whose_reader_leaves_ends_without_a_word(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    with watched(up, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.readline()
        watching.stdout.close()
        assert watching.stderr.read() == ""
        watching.wait(10)


def test_watching_on_a_narrow_terminal_draws_in_place_and_gives_the_terminal_back(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
    command = [sys.executable, "-P", "-m", "deploy.cli", "status", "--watch", "0.2"]
    environment = {**up.environment, "TERM": "xterm"}
    watching = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"0/8") < 4:
            seen += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux tells that nobody has the other end any more
            while more := os.read(ours, 4096):
                seen += more
        assert watching.wait(10) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)

    screen = seen.decode()
    assert screen.startswith("\x1b[?1049h")
    assert screen.endswith("\x1b[?25h\x1b[?1049l")
    lines = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.replace("\x1b[H", "\n")).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 50


def test_status_prints_a_table(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    command = [sys.executable, "-P", "-m", "deploy.cli", "status"]
    done = subprocess.run(command, env=up.environment, capture_output=True, text=True, check=True)
    worker = up.child("tokenmill worker")
    assert f"{worker.pid}@{socket.gethostname()}" in done.stdout
    assert "0/8" in done.stdout
    assert f"serving  {up.url}" in done.stdout


def test_rq_info_understands_the_redis_of_status(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    url = status(up)["redis"]
    rq = Path(sys.executable).with_name("rq")
    done = subprocess.run([str(rq), "info", "--url", url], capture_output=True, text=True, check=True)
    assert "1 workers" in done.stdout


def test_status_without_a_launcher_is_one_line(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    up.signal(signal.SIGTERM)
    assert up.end() == 0
    command = [sys.executable, "-P", "-m", "deploy.cli", "status"]
    done = subprocess.run(command, env=up.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tokenmill: error: no `tokenmill up` of yours runs here")
    assert done.stderr.count("\n") == 1


# -- what dies is started again --


@pytest.mark.parametrize("title", ["tokenmill worker tiny", "valkey-server", "tokenmill api"])
def test_what_is_killed_comes_back(start_up: StartUp, title: str) -> None:
    up = start_up(*FAKE, "--lease", "2").ready()
    before = up.child(title)
    before.kill()
    up.wait_for("is back")
    assert "was killed by SIGKILL; starting it again in 0.5 s" in up.output()
    assert up.child(title).pid != before.pid
    wait_until(lambda: ask(up).status_code == 200, limit_s=BACK_LIMIT_S, what="an answer after the restart")
    assert up.output().count("\nready ") == 1
    assert up.popen.poll() is None


def test_the_embedded_redis_comes_back_with_its_data(start_up: StartUp) -> None:
    import redis

    up = start_up(*FAKE).ready()
    url = status(up)["redis"]
    with redis.Redis.from_url(url) as client:
        client.set("kept", "yes", ex=600)
        client.waitaof(1, 0, 5000)
        up.child("valkey-server").kill()
        up.wait_for("Redis is back")
        assert client.get("kept") == b"yes"


# -- the end --


def assert_nothing_is_left(up: Up, folder: Path) -> None:
    survivors = up.survivors()
    assert not survivors, survivors
    assert not list((folder / "tokenmill").glob("*.json"))
    directory = up.output().partition("(embedded, in ")[2].partition(")")[0]
    assert directory
    assert not Path(directory).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(start_up: StartUp, tmp_path: Path, number: signal.Signals) -> None:
    up = start_up(*FAKE).ready()
    assert len(up.family()) >= 4
    up.signal(number)
    assert up.end() == 0
    assert up.output().endswith("\nstopped\n")
    assert_nothing_is_left(up, tmp_path)


def test_a_signal_during_the_start_ends_everything(start_up: StartUp, tmp_path: Path) -> None:
    up = start_up(*FAKE)
    up.wait_for("starting worker tiny")
    up.family()
    up.signal(signal.SIGTERM)
    assert up.end() == 0
    assert_nothing_is_left(up, tmp_path)


@pytest.mark.parametrize("title", ["tokenmill worker tiny", "valkey-server", "tokenmill api"])
def test_nothing_is_left_when_a_child_was_killed_just_before(start_up: StartUp, tmp_path: Path, title: str) -> None:
    up = start_up(*FAKE, "--drain-timeout", "1").ready()
    up.child(title).kill()
    up.signal(signal.SIGTERM)
    assert up.end() == 0
    assert_nothing_is_left(up, tmp_path)


def test_a_second_ctrl_c_does_not_wait_for_running_requests(start_up: StartUp, tmp_path: Path) -> None:
    up = start_up("--model", "tiny=fake:", "--drain-timeout", "300").ready()
    worker = up.child("tokenmill worker")
    worker.suspend()  # it cannot even begin to drain
    up.signal(signal.SIGINT)
    up.wait_for("stopping;")
    up.signal(signal.SIGINT)
    assert up.end() == 0
    assert_nothing_is_left(up, tmp_path)


def test_a_worker_that_does_not_stop_is_killed_after_its_time(start_up: StartUp, tmp_path: Path) -> None:
    up = start_up(*FAKE, "--drain-timeout", "0").ready()
    up.child("tokenmill worker").suspend()
    up.signal(signal.SIGTERM)
    assert up.end() == 0
    assert_nothing_is_left(up, tmp_path)


def test_it_serves_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "deploy.cli", "up", *FAKE, "--port", "0"]
    environment = Up.environment_for(tmp_path)
    popen = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert popen.stdout is not None
        assert popen.stdout.readline().startswith("starting Redis")
        popen.stdout.close()
        wait_until(lambda: len(psutil.Process(popen.pid).children()) == 3, what="all children")
        children = psutil.Process(popen.pid).children(recursive=True)
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(END_LIMIT_S) == 0
        assert not [child for child in children if is_alive(child)]
    finally:
        popen.kill()
        popen.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_nothing_outlives_a_launcher_that_is_killed(start_up: StartUp) -> None:
    up = start_up(*FAKE).ready()
    left_behind = Path(up.output().partition("(embedded, in ")[2].partition(")")[0])
    up.signal(signal.SIGKILL)
    up.end()
    wait_until(lambda: not up.survivors(), limit_s=5.0, what="the end of all processes")
    assert left_behind.exists()
    # The next launcher cleans up.
    again = start_up(*FAKE).ready()
    assert not left_behind.exists()
    assert [is_alive(process) for process in again.family()]
