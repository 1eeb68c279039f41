"""A real Prometheus that scrapes what a test has started, with the configuration that this project ships."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from servers import ROOT, free_port, wait_until

PROMETHEUS = ROOT / "deploy" / "prometheus"
INTERVAL = "500ms"
WINDOW = "10s"
"""What stands for Grafana's `$__rate_interval`."""


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is. Skips without it, and fails in CI."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is missing (on Debian and Ubuntu: apt install prometheus)"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return found


class Prometheus:
    """Scrapes these addresses instead of those in prometheus.yml, and more often."""

    def __init__(self, folder: Path, targets: dict[str, list[str]]) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
        settings["rule_files"] = [str(PROMETHEUS / path) for path in settings["rule_files"]]
        for job in settings["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        self._config = folder / "prometheus.yml"
        self._config.write_text(yaml.safe_dump(settings))

    def __enter__(self) -> "Prometheus":
        output = (self._folder / "output").open("wb")
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={self._config}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            cwd=self._folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.close()
        wait_until(self._is_ready, limit_s=30, what="Prometheus")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "output").read_text()
        try:
            return httpx.get(f"http://{self._address}/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def query(self, expression: str) -> list[Any]:
        """The samples that an expression has now; fails if it is none."""
        answer = httpx.get(f"http://{self._address}/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        assert answer["data"]["resultType"] == "vector", expression
        return list(answer["data"]["result"])

    def value(self, expression: str) -> float | None:
        """The only sample of an expression, or None while there is none."""
        samples = self.query(expression)
        assert len(samples) < 2, samples
        return float(samples[0]["value"][1]) if samples else None
