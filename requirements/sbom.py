"""Writes the bill of materials: `python requirements/sbom.py PYTHON OUT.json` (or `make sbom`).

It describes in CycloneDX what runs: of the packages in the environment of PYTHON those that the lock files of the
server, of PyTorch and of OpenTelemetry name, and what PyTorch's build brings; not the tools of development. Debian's
packages in the images are not in it.
"""

import json
import re
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("serve", "torch", "torch-build", "otlp")


def canonical(name: str) -> str:
    """The name of a package as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def running(bom: dict[str, Any], pinned: set[str], needed: set[str]) -> dict[str, Any]:
    """The bill with the pinned packages, and whatever PyTorch's build requires, alone.

    Raises:
        SystemExit: A needed package is not installed, so that the bill would not be whole.
    """
    names = {component["bom-ref"]: canonical(component["name"]) for component in bom["components"]}
    requires = {entry["ref"]: entry.get("dependsOn", []) for entry in bom["dependencies"]}
    kept = {ref for ref, name in names.items() if name in pinned}
    missing = needed - set(names.values())
    if missing:
        raise SystemExit(f"sbom: not installed: {', '.join(sorted(missing))}; run `make setup` first")
    todo = deque(ref for ref in kept if names[ref] == "torch")
    while todo:
        for ref in requires.get(todo.popleft(), []):
            if ref in names and ref not in kept:
                kept.add(ref)
                todo.append(ref)
    root = bom["metadata"]["component"]["bom-ref"]
    bom["components"] = [component for component in bom["components"] if component["bom-ref"] in kept]
    bom["dependencies"] = [
        {"ref": ref, "dependsOn": [one for one in on if one in kept]}
        for ref, on in requires.items()
        if ref in kept or ref == root
    ]
    return bom


def main(python: str, out: str) -> None:
    """Write the bill for an environment."""
    lines = [
        line
        for part in PARTS
        for line in (ROOT / "requirements" / f"{part}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    # What is needed under a condition may not be needed here.
    pinned = {line.partition("==")[0] for line in lines}
    needed = {line.partition("==")[0] for line in lines if " ; " not in line.partition(" --hash")[0]}
    maker = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject=pyproject.toml", "--mc-type=application"]
    made = subprocess.run(
        [*maker, "--mc-type", "application", "--output-reproducible", python],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    bom = running(json.loads(made.stdout), pinned, needed)
    Path(out).write_text(json.dumps(bom, indent=2) + "\n")
    print(f"{out}: {len(bom['components'])} packages")


if __name__ == "__main__":
    main(*sys.argv[1:])
