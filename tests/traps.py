"""What an attacker with a hand in Redis would like to have run, and a look at whether any of it was.

`Traps.set` lays them for every process that the test starts: a module that shows when it is imported, a Python that
shows when something is unpickled, looked up by a pickle, run as a program or fetched over HTTP, and a web server.
"""

import pickle
import socketserver
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.jobs import DataJob

ALARM = """
import os, pickle, sys

def alarm(what):
    with open({alarms!r}, "a") as alarms:
        alarms.write(what + "\\n")

def unpickle(*_, **__):
    alarm("unpickled")
    raise RuntimeError("unpickled")

pickle.load = pickle.loads = pickle.Unpickler = unpickle
WATCHED = {{"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "urllib.Request"}}

def listen(event, arguments):
    text = str(arguments)
    if event in ("open", "os.listdir", "os.scandir"):
        if {bait!r} in text:
            alarm(f"{{event}} {{text}}")
    elif event in WATCHED and "workers.template_process" not in text:
        alarm(f"{{event}} {{text}}")

sys.addaudithook(listen)
"""

TRAP = "from sitecustomize import alarm\nalarm('imported')\ndef fire(*_, **__):\n    alarm('called')\n"


class Touch:
    """Pickled, it is a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (subprocess.check_call, (["touch", str(self.path)],))


def pickled(thing: object) -> bytes:
    """What a pickle file with this in it holds."""
    return pickle.dumps(thing)


class _Web(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.server.visits += 1  # type: ignore[attr-defined]


class Traps:
    """`fire` names a function to be imported and called, `command` is for a shell, `pickled` to be unpickled.

    `bait` is a file that nobody has a reason to open, and `url` an address that nobody has a reason to visit.
    """

    fire = "trap.fire"

    def __init__(self, folder: Path) -> None:
        self._alarms = folder / "alarms"
        self._touched = folder / "touched"
        self.command = f"touch {self._touched}"
        self.pickled = pickled(Touch(self._touched))
        self.bait = folder / "bait.gguf"
        self.bait.write_bytes(b"GGUF")
        self._web = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Web)
        self._web.visits = 0  # type: ignore[attr-defined]
        threading.Thread(target=self._web.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._web.server_address[1]}/"

    def set(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> "Traps":
        """Have the processes that are started from now on fall into them."""
        (folder / "sitecustomize.py").write_text(ALARM.format(alarms=str(self._alarms), bait=self.bait.name))
        (folder / "trap.py").write_text(TRAP)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return self

    def remove(self) -> None:
        self._web.shutdown()
        self._web.server_close()

    @property
    def beside(self) -> dict[str, Any]:
        """Fields of RQ's job that would have something called, unpickled or fetched."""
        callbacks = ("success_callback_name", "failure_callback_name", "stopped_callback_name")
        hooks = [{"url": self.url, "job_status": status} for status in ("finished", "failed")]
        return {
            **dict.fromkeys(callbacks, self.fire),
            **dict.fromkeys(("meta", "result", "exc_info"), self.pickled),
            "webhooks": msgspec.json.encode(hooks),
            "dependency_ids": '["other"]',
            "rate_limit_key": "key",
            "rate_limit_concurrency": 1,
            "group_id": "group",
            "repeats_left": 3,
            "repeat_intervals": "[0]",
            "retries_left": 3,
            "retry_intervals": "[0]",
            "result_ttl": -1,
            "timeout": "never",
        }

    def sprung(self) -> list[str]:
        """What happened; nothing, if all is well."""
        found = self._alarms.read_text().splitlines() if self._alarms.exists() else []
        found += ["touched"] * self._touched.exists()
        return found + ["fetched"] * self._web.visits  # type: ignore[attr-defined]


def call(function: str, *arguments: Any) -> bytes:
    """The data of an RQ job that calls this."""
    return msgspec.json.encode([function, None, arguments, {}])


def overwrite(client: Any, name: str, **fields: Any) -> None:
    """Change fields of a queued job, as anybody who can write to Redis can."""
    client.hset(DataJob.key_for(name), mapping=fields)
