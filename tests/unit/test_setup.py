"""`make` on a fresh machine: what it needs, and what it installs."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from requirements import sbom

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"[a-z0-9-]+==[0-9][\w.]*( ; [^#]+?)?( --hash=sha256:[0-9a-f]{64})+")
PARTS = ("build", "serve", "torch", "otlp", "dev", "supply")


def pins(name: str) -> dict[str, str]:
    """The versions in one lock file, by package. Every line of it has hashes."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#") and not PINNED.fullmatch(line)] == []
    return dict(line.partition(" ")[0].split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(
    ("lock", "extra"),
    [("serve", "gguf"), ("torch", "torch"), ("otlp", "otlp"), ("dev", "dev"), ("build", "build"), ("supply", "supply")],
)
def test_the_locks_hold_what_the_project_requires(lock: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = pins("serve") | pins(lock) | {"torch": pytorch()}
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"][extra]):
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def pytorch() -> str:
    """The version of the one package without hashes, since its builds differ from machine to machine."""
    (line,) = (ROOT / "requirements" / "torch-build.txt").read_text(encoding="utf-8").splitlines()[1:]
    return re.fullmatch(r"torch==([\d.]+)", line)[1]  # type: ignore[index]


def test_the_locks_agree() -> None:
    versions: dict[str, set[str]] = {}
    for part in PARTS:
        for name, version in pins(part).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_a_server_needs_no_pytorch() -> None:
    assert "torch" not in pins("serve")
    assert "transformers" not in pins("serve")


def test_nothing_is_installed_whose_hash_is_another(tmp_path: Path) -> None:
    other = re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}", lock_line("itsdangerous"))
    (tmp_path / "requirements.txt").write_text(other, encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--dry-run", "--ignore-installed", "-r", tmp_path / "requirements.txt"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr


def lock_line(name: str) -> str:
    """The line of a package in the lock of the server."""
    lines = (ROOT / "requirements" / "serve.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def test_whatever_is_installed_by_make_and_images_is_checked() -> None:
    """Each command that installs from a list asks for hashes; PyTorch's build is the exception."""
    installs = [
        line
        for file in [ROOT / "Makefile", *(ROOT / "deploy" / "docker").glob("*.Dockerfile")]
        for line in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if re.search(r"pip['\")]?.* (install|wheel) .*-r |\$\(INSTALL\)|\$\(PIP\).*-r ", line)
    ]
    assert len(installs) > 10
    unchecked = [line for line in installs if "--require-hashes" not in line and "$(INSTALL)" not in line]
    assert [line for line in unchecked if "torch-build.txt" not in line] == []


def test_the_bill_of_materials_has_what_runs_and_nothing_else() -> None:
    def component(name: str) -> dict[str, str]:
        return {"bom-ref": f"{name}==1", "name": name, "version": "1"}

    bom = {
        "metadata": {"component": {"bom-ref": "root"}},
        "components": [component(name) for name in ("Flask", "torch", "nvidia-cublas", "pytest", "greenlet")],
        "dependencies": [
            {"ref": "root", "dependsOn": ["Flask==1", "pytest==1"]},
            {"ref": "torch==1", "dependsOn": ["nvidia-cublas==1"]},
            {"ref": "pytest==1"},
        ],
    }
    kept = sbom.running(bom, {"flask", "torch", "greenlet"}, {"flask", "torch"})
    assert [one["name"] for one in kept["components"]] == ["Flask", "torch", "nvidia-cublas", "greenlet"]
    assert kept["dependencies"] == [
        {"ref": "root", "dependsOn": ["Flask==1"]},
        {"ref": "torch==1", "dependsOn": ["nvidia-cublas==1"]},
    ]
    with pytest.raises(SystemExit, match="not installed: rq"):
        sbom.running(bom, {"flask"}, {"flask", "rq"})


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
