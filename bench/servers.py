"""The servers that are measured: how each is started on one model and what it costs while it runs."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench import peers

ROOT = Path(__file__).resolve().parent.parent
READY_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What every server of a run gets: `context` is tokens per slot."""

    slots: int
    threads: int
    context: int = 2048


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be started: `command` takes a port and a shape."""

    name: str
    model: str
    command: Callable[[int, Shape], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/health"


@dataclass(slots=True)
class Cost:
    """What the processes of a server used: CPU seconds by process, and their peak memory together."""

    cpu_s: dict[str, float]
    peak_bytes: int


def tokenmill(name: str, model: str, *arguments: str, checkout: Path = ROOT) -> Server:
    """Ours, with every process as `tokenmill up` starts it, from this checkout or another."""
    served, _, _ = model.partition("=")

    def command(port: int, shape: Shape) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "deploy.cli", "up", "--model", model, "--port", str(port)),
            *("--slots", str(shape.slots), "--threads", str(shape.threads), "--ctx", str(shape.context)),
            *("--log-level", "warning", *arguments),
        ]

    return Server(name, served, command, {"PYTHONPATH": str(checkout)}, ready_path="/ready")


def llama_server(gguf: Path) -> Server | None:
    """llama.cpp's own server, if it is installed."""
    binary = peers.llama_server()
    if binary is None:
        return None

    def command(port: int, shape: Shape) -> list[str]:
        return [
            *(str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--no-webui"),
            *("-t", str(shape.threads), "-np", str(shape.slots), "-c", str(shape.context * shape.slots)),
        ]

    return Server("llama-server", "smollm2", command, {"LD_LIBRARY_PATH": str(binary.parent)})


def llama_cpp_server(gguf: Path) -> Server | None:
    """llama-cpp-python's server, if it is installed; it runs one request at a time."""
    python = peers.python_of("llama_cpp.server")
    if not python.exists():
        return None

    def command(port: int, shape: Shape) -> list[str]:
        return [
            *(str(python), "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "smollm2"),
            *("--host", "127.0.0.1", "--port", str(port), "--n_ctx", str(shape.context)),
            *("--n_threads", str(shape.threads), "--verbose", "false"),
            *("--interrupt_requests", "false"),
        ]

    return Server("llama_cpp.server", "smollm2", command, ready_path="/v1/models")


def transformers_serve(folder: Path, *, batching: bool) -> Server | None:
    """transformers' server, if it is installed, with or without its continuous batching."""
    binary = peers.python_of("transformers").parent / "transformers"
    if not binary.exists():
        return None

    def command(port: int, _: Shape) -> list[str]:
        extra = ["--continuous-batching"] if batching else []
        return [
            *(str(binary), "serve", "--host", "127.0.0.1", "--port", str(port)),
            *("--device", "cpu", "--dtype", "float32", *extra),
        ]

    name = "transformers serve, continuous batching" if batching else "transformers serve"
    return Server(name, str(folder), command, {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})


@contextmanager
def running(server: Server, shape: Shape) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server, wait until it answers, and end all of its processes afterwards."""
    port = _free_port()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            server.command(port, shape),
            cwd=ROOT,
            env={**os.environ, **server.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _answers(url + server.ready_path, process):
                output.seek(0)
                raise RuntimeError(f"{server.name} did not start: {output.read()[-2000:].decode(errors='replace')}")
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def metered(root: psutil.Process) -> Iterator[Cost]:
    """Measure what a process and all below it use while this is open.

    Nothing is sampled meanwhile: that would take time from what is measured, and more from whoever has
    more processes. The kernel keeps each process's peak.
    """
    cost = Cost({}, 0)
    before = {process.pid: _cpu_s(process) for process in _tree(root)}
    try:
        yield cost
    finally:
        for process in _tree(root):
            name = _title(process)
            cost.cpu_s[name] = cost.cpu_s.get(name, 0.0) + _cpu_s(process) - before.get(process.pid, 0.0)
            cost.peak_bytes += _peak_bytes(process.pid)


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _peak_bytes(pid: int) -> int:
    """The most memory that a process ever had resident; pages that processes share count in each."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


def _title(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline()).split()
    except psutil.Error:
        return "ended"
    line = " ".join(words)
    for title in ("tokenmill api", "tokenmill worker", "tokenmill up"):
        if title in line:
            return title.removeprefix("tokenmill ")
    return "redis" if "valkey" in line or "redis" in line else "server"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return True
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    return False
