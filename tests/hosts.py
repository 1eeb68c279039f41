"""Two hosts on one machine: network namespaces, joined by a third that is the switch between them."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")

NEAR_ADDRESS = "192.0.2.1"
FAR_ADDRESS = "192.0.2.2"
"""From the block for documentation; nothing outside the namespaces sees them."""

_libc = ctypes.CDLL(None, use_errno=True)


def ip(line: str) -> None:
    """Run `ip` with these arguments."""
    done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {line}: {done.stderr}"


def require_namespaces() -> None:
    """Skip a test that needs hosts where none can be made. As root with `ip`, and in CI, that is a failure."""
    reason = ""
    if os.geteuid() != 0:
        reason = "network namespaces are made by root only"
    elif shutil.which("ip") is None:
        reason = "the command `ip` is missing (on Debian and Ubuntu: apt install iproute2)"
    if reason:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)


class Network:
    """Two hosts, `near` and `far`, whose link can be cut.

    The switch's ports stay up unless told otherwise, so that neither host is told of a cut: packets are gone.
    """

    def __init__(self) -> None:
        self.near, self.far, self._switch = (f"tokenmill-{os.getpid()}-{name}" for name in ("near", "far", "switch"))

    def __enter__(self) -> "Network":
        try:
            for name in (self._switch, self.near, self.far):
                ip(f"netns add {name}")
                ip(f"-n {name} link set lo up")
            ip(f"-n {self._switch} link add bridge type bridge")
            ip(f"-n {self._switch} link set bridge up")
            for name, address, port in ((self.near, NEAR_ADDRESS, "near"), (self.far, FAR_ADDRESS, "far")):
                ip(f"-n {self._switch} link add {port} type veth peer name eth0 netns {name}")
                ip(f"-n {self._switch} link set {port} master bridge up")
                ip(f"-n {name} address add {address}/24 dev eth0")
                ip(f"-n {name} link set eth0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.near, self.far, self._switch):
            if (NAMESPACES / name).exists():
                ip(f"netns del {name}")

    def cut(self, how: str) -> None:
        """Let nothing through between the hosts: packets are `dropped`, or the far host's link is `down`."""
        ip(f"-n {self._switch} link set far {'nomaster' if how == 'dropped' else 'down'}")

    def heal(self) -> None:
        """Let everything through again."""
        ip(f"-n {self._switch} link set far master bridge up")

    @contextmanager
    def on(self, host: str) -> Iterator[None]:
        """What this thread does, and whatever it starts, happens on that host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(NAMESPACES / host)
            yield
        finally:
            _setns(before)
            os.close(before)


def _enter(path: Path) -> None:
    namespace = os.open(path, os.O_RDONLY)
    try:
        _setns(namespace)
    finally:
        os.close(namespace)


def _setns(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
