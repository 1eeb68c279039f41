"""`tokenmill up` as a real process, for tests."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
from servers import wait_until

START_LIMIT_S = 60.0
END_LIMIT_S = 30.0


class Up:
    """One `tokenmill up` in a folder of its own, and every process that was ever seen below it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self.output_path = folder / "output"
        self.environment = self.environment_for(folder)
        with self.output_path.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "deploy.cli", "up", "--port", "0", *arguments],
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family: set[psutil.Process] = set()

    @staticmethod
    def environment_for(folder: Path) -> dict[str, str]:
        """An environment without settings, whose launchers only `tokenmill status` with the same one sees."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
        return kept | {"XDG_RUNTIME_DIR": str(folder)}

    def output(self) -> str:
        """Everything that was printed so far."""
        return self.output_path.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until a line contains the text; fail at once if `up` ends without it."""
        wait_until(
            lambda: text in self.output() or self.popen.poll() is not None, limit_s=START_LIMIT_S, what=repr(text)
        )
        assert text in self.output(), self.output()

    def ready(self) -> "Up":
        """Wait until it serves."""
        self.wait_for("\nready http://")
        self.family()
        return self

    @property
    def url(self) -> str:
        """Where it serves, as it says itself."""
        return next(line for line in self.output().splitlines() if line.startswith("ready ")).split()[1]

    def family(self) -> set[psutil.Process]:
        """The processes below `up` that live now; each is remembered."""
        try:
            now = set(psutil.Process(self.popen.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            now = set()
        self._family |= now
        return now

    def child(self, title: str) -> psutil.Process:
        """The child of `up` that `ps` shows with this in its command."""
        for process in psutil.Process(self.popen.pid).children():
            if title in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no child of `up` is called {title!r}")

    def signal(self, number: int) -> None:
        """Send a signal to `up` alone."""
        self.popen.send_signal(number)

    def end(self) -> int:
        """Wait for the end of `up`; its exit status."""
        return self.popen.wait(END_LIMIT_S)

    def survivors(self) -> list[psutil.Process]:
        """The remembered processes that still run."""
        return [process for process in self._family if is_alive(process)]

    def clean(self) -> None:
        """End whatever the test left running; in order if that is still possible."""
        self.family()
        self.popen.terminate()
        try:
            self.popen.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for process in self.survivors():
            process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs: neither gone nor waiting to be buried."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
