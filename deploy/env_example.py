"""Writes `.env.example` from the settings classes: `python -m deploy.env_example PATH`."""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from deploy.options import LAUNCHER_ONLY, as_written
from shared.settings import ApiSettings, WorkerSettings, variable

HEAD = """\
# Settings for docker-compose: copy this file to .env and take away the # of what is to differ from its default.
# Made from shared/settings.py by `make docs`; docs/configuration.md says more, docs/docker.md how it is used.
"""

COMPOSE = {
    "TOKENMILL_BIND": ("127.0.0.1", "address of this host on which clients are heard; 0.0.0.0 for all"),
    "TOKENMILL_PORT": ("8000", "port of this host on which clients are heard"),
    "MODELS": (
        "models",
        "folder of this host, or volume, that workers see as /models; user 10001 must read it",
    ),
    "TORCH_MODEL": ("", "what TOKENMILL_MODEL is for deploy/compose/torch.yml"),
    "SECOND_MODEL": ("", "what TOKENMILL_MODEL is for deploy/compose/models.yml"),
    "TOKENMILL_REDIS": ("", "URL of a Redis of your own; empty: the one of docker-compose.yml"),
    "REDIS_MAXMEMORY": ("1gb", "memory for queued requests and answers"),
    "REDIS_API_PASSWORD": ("", "password of the front ends; empty: one is made at the first start"),
    "REDIS_WORKER_PASSWORD": ("", "password of the workers; likewise"),
    "REDIS_OPERATOR_PASSWORD": ("", "password of the user who may do everything; likewise"),
    "TAG": ("latest", "tag of the images"),
    "BASE_IMAGE": ("debian:bookworm-slim", "what the images are built on"),
    "TORCH_INDEX": (
        "https://download.pytorch.org/whl/cpu",
        "where the image of worker-torch finds PyTorch beside pip's own index",
    ),
    "GPU_COUNT": ("1", "GPUs of each worker in the overlays with CUDA"),
    "CUDA_RUNTIME_IMAGE": ("nvidia/cuda:12.8.1-runtime-ubuntu24.04", "what llama.cpp runs on there"),
    "CUDA_DEVEL_IMAGE": ("nvidia/cuda:12.8.1-devel-ubuntu24.04", "what llama.cpp is compiled on there"),
}
"""What only the Compose files read: default and meaning."""

FIXED = ("host", "metrics_port", "metrics_host", *LAUNCHER_ONLY)
"""What the images or Compose decide."""


def document() -> str:
    """The whole file."""
    api = {item.name: item for item in fields(ApiSettings) if variable(item.name) not in COMPOSE}
    worker = {item.name: item for item in fields(WorkerSettings) if variable(item.name) not in COMPOSE}
    known = api | worker
    texts = {name: (item.default, item.metadata["help"]) for name, item in known.items()}
    texts |= {name: (default, text) for name, (default, _, text) in LAUNCHER_ONLY.items()}

    def lines(names: Iterable[str]) -> str:
        return "".join(line(variable(name), *texts[name]) for name in names if name not in FIXED)

    parts = [
        HEAD,
        "# --- Docker ---\n\n" + "".join(line(name, *text) for name, text in COMPOSE.items()),
        "# --- front ends and workers ---\n\n" + lines(name for name in api if name in worker),
        "# --- front ends ---\n\n" + lines(name for name in api if name not in worker),
        "# --- workers ---\n\n" + lines(name for name in worker if name not in api),
        "# --- not read by containers, in which these are fixed ---\n\n"
        + "".join(line(variable(name), *texts[name]) for name in FIXED),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def line(name: str, default: object, text: str) -> str:
    """One setting, commented out, under its meaning."""
    return f"# {text}\n#{name}={as_written(default)}\n\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
