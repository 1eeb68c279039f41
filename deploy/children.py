"""A child process of the launcher, with everything that it starts itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil


class Child:
    """One command in a session of its own, so that a terminal's Ctrl-C reaches only the launcher.

    The child leads a process group. When it is found dead it has not been waited for yet, so that the
    group's number cannot belong to anybody else, and what it left behind is killed by that number.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.tether", str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group."""
        return self._popen.pid

    def is_dead(self) -> bool:
        """Whether the child has ended. The rest of its group is killed when this is first seen."""
        if self._popen.returncode is not None:
            return True
        if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
            return False
        self.kill()
        self._popen.wait()
        return True

    def end(self) -> str:
        """How a dead child ended, in words."""
        code = self._popen.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def terminate(self) -> None:
        """Ask the child, and nobody else of its group, to stop."""
        if self._popen.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group at once. The caller still has to see that it is dead."""
        if self._popen.returncode is None:
            # macOS answers EPERM for a group in which only the dead leader is left.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
