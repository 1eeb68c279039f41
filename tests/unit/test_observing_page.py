"""The page on metrics, logs and traces says what the code does."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from servers import ROOT

from api.metrics import ApiMetrics, FleetCollector
from shared.domain import FinishReason
from shared.errors import ErrorCode
from shared.fleet import Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.queue import RequestQueue
from workers.metrics import WorkerMetrics

PAGE = (ROOT / "docs" / "observing.md").read_text()
ROW = re.compile(r"^\| `(tokenmill_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.MULTILINE)


def rows_of(heading: str) -> list[tuple[str, ...]]:
    """The table under a heading of the page."""
    return ROW.findall(PAGE.split(f"### {heading}\n")[1].split("\n#")[0])


def rows(metrics: Iterable[Metric]) -> list[tuple[str, ...]]:
    """What the table should say of these metrics, each of which has a sample."""
    found = []
    for metric in metrics:
        labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        found.append((name, metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation))
    return found


def test_the_table_of_a_worker_s_metrics_is_what_it_counts() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics("m", registry)
    metrics.succeeded(FinishReason.STOP)
    metrics.failed("code")

    assert rows_of("Worker") == rows(registry.collect())


def test_the_table_of_a_front_end_s_metrics_is_what_it_counts() -> None:
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry)
    metrics.responded("/", 200)
    for tell in (metrics.first_token, metrics.done):
        tell("m", 1.0)
    for tell_code in (metrics.rejected, metrics.failed):
        tell_code("m", ErrorCode.QUEUE_FULL)
    for tell_model in (metrics.cancelled, metrics.resumed, metrics.opened, metrics.closed):
        tell_model("m")

    assert rows_of("Front end") == rows(registry.collect())


def test_the_table_of_the_fleet_s_metrics_is_what_is_read(client: Any) -> None:
    model = ModelInfo(
        name="m", backend="b", device="cpu", context=1, vocabulary=1, state_kind=StateKind.TRIMMABLE, created=1
    )
    info = WorkerInfo(name="w", model=model, state=WorkerState.READY, pid=1, host="h", slots=1, running=0)
    Fleet(client).renew(info, lease_s=10)
    assert RequestQueue(client).depth("m") == 0

    assert rows_of("Fleet") == rows(FleetCollector(client).collect())


@pytest.mark.parametrize("name", ["request_id", "outcome", "first_token_s", "queue_s", "traceparent", "first token"])
def test_the_page_names_what_logs_and_traces_hold(name: str) -> None:
    assert f"`{name}`" in PAGE
