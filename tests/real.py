"""What the tests on real models share: how the models are served, and what the server says of itself."""

import json
import subprocess
import sys
from typing import Any

from launched import Up

GGUF, TORCH = "gguf", "torch"
CONTEXT = 512
SLOTS = 8


def status(up: Up) -> Any:
    """What `tokenmill status --json` says."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.cli", "status", "--json"],
        env=up.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return json.loads(result.stdout)
