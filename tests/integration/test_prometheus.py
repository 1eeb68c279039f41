"""deploy/prometheus and deploy/grafana, held against a real Prometheus that scrapes real front ends and a worker."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from manifests import KUBERNETES
from open_streams import OpenStream, body
from prometheus import PROMETHEUS, WINDOW, Prometheus, program
from scraping import scrape
from servers import ROOT, FrontEnd, free_port, wait_until
from worker_processes import Office, Start

StartFrontEnd = Callable[..., FrontEnd]

DASHBOARD: Any = json.loads((ROOT / "deploy" / "grafana" / "tokenmill.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES: Any = {
    name: yaml.safe_load((PROMETHEUS / "rules" / f"{name}.yml").read_text())["groups"][0]["rules"]
    for name in ("recording", "alerts")
}
NAME = re.compile(r"\btokenmill_\w+")
SLOTS = 2


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> None:
    done = subprocess.run([program("promtool"), *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- what promtool checks --


def test_the_configuration_is_one() -> None:
    promtool("check", "config", "prometheus.yml")


def test_the_configuration_for_kubernetes_is_one(tmp_path: Path) -> None:
    settings = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    for job in settings["scrape_configs"]:
        # Debian's promtool is built without this kind of discovery.
        (discovery,) = job.pop("kubernetes_sd_configs")
        assert discovery == {"role": "pod", "namespaces": {"names": ["tokenmill"]}}
    settings["rule_files"] = [str(PROMETHEUS / path) for path in settings["rule_files"]]
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(settings))
    promtool("check", "config", "kubernetes.yml", cwd=tmp_path)


def test_in_kubernetes_the_ports_with_metrics_are_found_and_no_others() -> None:
    settings = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    pods = [
        pod["spec"]["template"]
        for path in ("base/api.yaml", "worker/worker.yaml", "redis/redis.yaml")
        for pod in yaml.safe_load_all((KUBERNETES / path).read_text())
        if "template" in pod["spec"]
    ]
    found = {}
    for job in settings["scrape_configs"]:
        keep = job["relabel_configs"][0]
        assert keep["action"] == "keep"
        assert keep["source_labels"] == [
            "__meta_kubernetes_pod_label_app_kubernetes_io_name",
            "__meta_kubernetes_pod_container_port_name",
        ]
        found[job["job_name"]] = [
            port["containerPort"]
            for pod in pods
            for port in pod["spec"]["containers"][0]["ports"]
            if re.fullmatch(keep["regex"], f"{pod['metadata']['labels']['app.kubernetes.io/name']};{port['name']}")
        ]
    assert found == {"tokenmill-api": [8000], "tokenmill-worker": [9100]}


@pytest.mark.parametrize("name", ["recording", "alerts"])
def test_the_rules_say_what_they_should_of_made_up_series(name: str) -> None:
    promtool("test", "rules", f"tests/{name}.yml")


def test_each_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts.yml").read_text())["tests"]
    firing = [each["alertname"] for test in tests for each in test.get("alert_rule_test", []) if each["exp_alerts"]]
    assert sorted(firing) == sorted(rule["alert"] for rule in RULES["alerts"])


# -- against the real thing --


class Mill:
    """Two front ends, one of which is short of patience, and a worker, all of them scraped."""

    def __init__(self, patient: FrontEnd, hasty: FrontEnd, worker_url: str, prometheus: Prometheus) -> None:
        self.patient, self.hasty, self.worker_url, self.prometheus = patient, hasty, worker_url, prometheus

    def provoke(self) -> None:
        """Whatever is counted happens once."""
        url = f"{self.patient.url}/v1/completions"
        whole = httpx.post(url, json=body(8, stream=True), timeout=20)
        httpx.post(url, json=body(4), timeout=20)
        httpx.get(self.patient.url + whole.headers["X-Resume-Url"], timeout=20)
        httpx.post(url, json=body(4) | {"prompt": "x" * 5000}, timeout=20)
        httpx.post(url, json=body(4) | {"model": "nobody"}, timeout=20)
        with httpx.stream("POST", url, json=body(4000, stream=True), timeout=20) as left:
            next(left.iter_lines())
        httpx.post(f"{self.hasty.url}/v1/completions", json=body(4000, stream=True), timeout=20)


@pytest.fixture
def mill(start_front_end: StartFrontEnd, start: Start, office: Office, tmp_path: Path) -> Iterator[Mill]:
    port = free_port()
    worker = start(
        "--slots", str(SLOTS), "--metrics-port", str(port), model="fake=fake:pace=0.005&end_every=0&context=4096"
    )
    patient, hasty = start_front_end(), start_front_end(request_timeout=1.0)
    office.ready(worker)
    targets = {
        "tokenmill-api": [f"127.0.0.1:{front_end.port}" for front_end in (patient, hasty)],
        "tokenmill-worker": [f"127.0.0.1:{port}"],
    }
    with Prometheus(tmp_path, targets) as prometheus:
        yield Mill(patient, hasty, f"http://127.0.0.1:{port}", prometheus)


def as_prometheus(expression: str) -> str:
    """A query of the dashboard with its variables filled in."""
    filled = expression.replace("$__rate_interval", WINDOW).replace("$model", ".*")
    assert "$" not in filled
    return filled


def test_every_query_has_an_answer(mill: Mill) -> None:
    shown = {
        (panel["title"], target["legendFormat"]): as_prometheus(target["expr"])
        for panel in PANELS
        for target in panel["targets"]
    }
    recorded = {(rule["record"], ""): rule["record"] for rule in RULES["recording"]}

    unanswered = shown | recorded

    def are_answered() -> bool:
        mill.provoke()
        for name, query in list(unanswered.items()):
            if mill.prometheus.query(query):
                del unanswered[name]
        return not unanswered

    try:
        wait_until(are_answered, limit_s=60, what="data for every query")
    except AssertionError as error:
        raise AssertionError(f"{error}: none for {list(unanswered)}") from None
    for rule in RULES["alerts"]:
        mill.prometheus.query(rule["expr"])
    mill.prometheus.query(DASHBOARD["annotations"]["list"][0]["expr"])

    queries = [*shown.values(), *(rule["expr"] for rules in RULES.values() for rule in rules), scaling_query("fake")]
    used = {name for query in queries for name in NAME.findall(re.sub(r"model:\w+", "", query))}
    scrapes = [scrape(url) for url in (mill.patient.url, mill.hasty.url, mill.worker_url)]
    known = {sample.name for each in scrapes for family in each.families.values() for sample in family.samples}
    assert used - known == set()
    # No metric is without a panel.
    counted = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known if not name.endswith("_created")}
    on_panels = {re.sub(r"_bucket$", "", name) for query in shown.values() for name in NAME.findall(query)}
    assert {name for name in counted if name.startswith("tokenmill_")} - on_panels == set()


def scaling_query(model: str) -> str:
    """The query by which KEDA scales a model, as components/autoscaling fills it in."""
    scaled = yaml.safe_load((KUBERNETES / "components" / "autoscaling" / "scaledobject.yaml").read_text())
    query: str = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query.count('"MODEL"') == 2
    return query.replace("MODEL", model)


def test_workers_are_scaled_by_the_requests_that_wait_and_run(mill: Mill, office: Office) -> None:
    query = scaling_query("fake")
    wait_until(lambda: mill.prometheus.value(query) == 0, what="no load")

    streams = [OpenStream(mill.patient, 1500) for _ in range(SLOTS + 3)]
    wait_until(lambda: office.queue.depth("fake") == 3, what="a queue")

    wait_until(lambda: mill.prometheus.value(query) == SLOTS + 3, limit_s=20, what="the load")
    assert not any(stream.has_ended for stream in streams)
    assert mill.prometheus.value(scaling_query("nobody")) is None


# -- the dashboard as Grafana reads it --


def test_the_dashboard_s_panels_have_names_units_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model"}
