"""What /metrics, /health and /ready of a front end or a worker say."""

import httpx
from prometheus_client.parser import text_string_to_metric_families
from servers import wait_until


class Scrape:
    """One scrape, read as Prometheus reads it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that have these labels; 0 if there are none."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str) -> set[str]:
        """Every value of any label of this name."""
        return {value for sample in self._samples if sample.name == name for value in sample.labels.values()}


def scrape(url: str) -> Scrape:
    """Ask a front end or worker that listens at this URL."""
    answer = httpx.get(f"{url}/metrics", timeout=20)
    assert answer.status_code == 200
    return Scrape(answer.text)


def wait_for_value(url: str, expected: float, name: str, **labels: str) -> Scrape:
    """Scrape until a value is as expected."""
    last = Scrape("")

    def is_there() -> bool:
        nonlocal last
        last = scrape(url)
        return last.value(name, **labels) == expected

    try:
        wait_until(is_there, what=f"{name}{labels} = {expected}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {last.value(name, **labels)}") from None
    return last


def status_of(url: str) -> int:
    """The HTTP status of a URL; 0 while nobody listens."""
    try:
        return httpx.get(url, timeout=20).status_code
    except httpx.HTTPError:
        return 0


def becomes(url: str, status: int, *, limit_s: float = 20) -> None:
    """Wait until a URL has this status."""
    wait_until(lambda: status_of(url) == status, limit_s=limit_s, what=f"status {status} of {url}")
