"""`make` on a fresh machine: what it needs, and what it installs."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"[a-z0-9-]+==[0-9][\w.]*(; .+)?")


def pins(name: str) -> dict[str, str]:
    """The versions in one lock file, by package."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#") and not PINNED.fullmatch(line)] == []
    return dict(line.partition(";")[0].split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(("lock", "extra"), [("serve", "gguf"), ("torch", "torch"), ("dev", "dev")])
def test_the_locks_hold_what_the_project_requires(lock: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = pins("serve") | pins(lock)
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"][extra]):
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_locks_agree() -> None:
    torch, dev = pins("torch"), pins("dev")
    assert {name: torch[name] for name in torch.keys() & dev.keys()} == {
        name: dev[name] for name in torch.keys() & dev.keys()
    }


def test_a_server_needs_no_pytorch() -> None:
    assert "torch" not in pins("serve")
    assert "transformers" not in pins("serve")


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ntest "$1" = --version && echo Python 3.9.2\n')
    old.chmod(0o755)
    for path in ("Makefile", "pyproject.toml", "requirements"):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, tmp_path / path)
    done = subprocess.run(["make", "serve", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"Python 3.11 or newer is needed; {old} is Python 3.9.2." in done.stderr
    assert not (tmp_path / ".venv").exists()
