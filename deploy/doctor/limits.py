"""What this process may use of the machine: a container's limits go before what the machine has."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

SYSTEM = Path("/")


def available_bytes(root: Path = SYSTEM) -> tuple[int, str]:
    """Memory that can still be used, and what limits it."""
    available, limiter = int(psutil.virtual_memory().available), "this machine"
    for folder, limit_name, usage_name, cache_name in _memory_groups(root):
        limit = _number(folder / limit_name)
        usage = _number(folder / usage_name)
        if limit is None or usage is None:
            continue
        left = max(0, limit - usage + _statistic(folder / "memory.stat", cache_name))
        if left < available:
            available, limiter = left, f"the limit of {limit / 2**20:.0f} MiB of its control group"
    return available, limiter


def usable_cores(root: Path = SYSTEM) -> int:
    """Cores that this process may run on at once, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(root, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    for folder in _groups(root, "cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us:
            cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores)


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Each control group above this process, with the names of its files: limit, usage, what can be dropped."""
    for folder in _groups(root, ""):
        yield folder, "memory.max", "memory.current", "inactive_file"
    for folder in _groups(root, "memory"):
        yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it; `controller` is empty for version 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controller
        folder = top / path.strip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(top))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none: no file, `max` for no limit, -1 for no quota."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    """A value of a file with a name and a number on each line."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
