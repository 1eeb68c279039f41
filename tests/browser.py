"""A headless Chromium that can reach nothing but this machine."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PATIENCE_MS = 20_000
LIMIT_S = 120

CONSOLE = re.compile(r"CONSOLE[^\]]*\] (.*)")


def chromium() -> str:
    """Where it is. Skips without it, and fails in CI."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        reason = "chromium is missing (on Debian and Ubuntu: apt install chromium)"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return found


def rendered(url: str, folder: Path) -> tuple[str, list[str]]:
    """A page as it is once its scripts have run, and what the browser said on its console."""
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder / 'chromium'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--enable-logging=stderr",
        f"--virtual-time-budget={PATIENCE_MS}",
        "--dump-dom",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout, CONSOLE.findall(done.stderr)
