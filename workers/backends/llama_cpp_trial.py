"""Loads a GGUF file and computes one token: `python -m workers.backends.llama_cpp_trial PATH THREADS MEMORY`.

A broken file, or one that is made to harm, can end the process that loads it, or fill its memory: llama.cpp trusts
what a file says of itself in more places than it checks. So the worker has it tried first, in this process, which has
no more memory than the machine can spare (MEMORY, in bytes). The exit status says whether it went well, a line why not.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil

from shared.errors import ModelLoadError
from shared.logs import one_line

CONTEXT = 256
CPU_LIMIT_S = 1800
"""Of all threads together; the largest models read and compute for minutes."""

LIBRARIES_BYTES = 2 * 1024**3
"""Address space for Python and the libraries, beside the model."""


def try_out(path: Path, *, threads: int) -> None:
    """Have a process of its own try the file.

    Raises:
        ModelLoadError: it could not; in one line.
    """
    spare = psutil.virtual_memory().available + path.stat().st_size + LIBRARIES_BYTES
    command = [sys.executable, "-P", "-m", "workers.backends.llama_cpp_trial", str(path), str(threads), str(spare)]
    # Not for whatever a file may be able to do: passwords and tokens of the environment, graphics memory.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENMILL_", "REDIS_", "HF_"))}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=kept | {"CUDA_VISIBLE_DEVICES": "", "GGML_NO_BACKTRACE": "1"},
        check=False,
    )
    said = done.stdout.decode(errors="replace").split("\n")[0]
    if done.returncode < 0:
        complaint = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        why = f" at {os.path.basename(complaint[0])}" if complaint else ""
        how = signal.Signals(-done.returncode).name
        raise ModelLoadError(f"model {path}: llama.cpp was ended by {how} when it tried the file{why[:200]}")
    if done.returncode:
        raise ModelLoadError(
            said or f"model {path}: llama.cpp ended with status {done.returncode} when it tried the file"
        )


def main() -> None:
    """Try, and exit."""
    path, threads, memory = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: CPU_LIMIT_S, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        # macOS has no limit of address space.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    try:
        _compute_a_token(path, threads)
    except ModelLoadError as error:
        _refuse(str(error))
    except Exception as error:
        _refuse(f"model {path}: it cannot be used: {type(error).__name__}: {one_line(error)}")


def _refuse(reason: str) -> None:
    print(" ".join(reason.split()))
    sys.exit(1)


def _compute_a_token(path: Path, threads: int) -> None:
    from workers.backends.llama_cpp import load
    from workers.scheduler.plan import SlotWork

    backend = load(path, slots=1, context=CONTEXT, device="cpu", threads=threads)
    backend.start(0, keep=0, source=0)
    logits = backend.step([SlotWork(0, 0, [backend.tokenizer.bos_token or 0], wants_logits=True)])
    if np.isnan(logits).any():
        raise ModelLoadError(f"model {path}: what it computes are no numbers, so its weights are damaged")


if __name__ == "__main__":
    main()
