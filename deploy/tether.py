"""Runs a command that ends when its parent does: `python -m deploy.tether PARENT_PID COMMAND…`.

A launcher that is killed with SIGKILL can end nobody. On Linux the kernel does it for us: the parent-death
signal is set here, in the child, and outlives the exec. Elsewhere the command just runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the call above; then no signal comes any more.
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
