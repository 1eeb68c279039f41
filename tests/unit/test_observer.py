"""What a worker's observer makes of the facts that it is told."""

import logging
from collections.abc import Iterator

import pytest
from asking import NEVER, OneProcess, request
from prometheus_client import CollectorRegistry, generate_latest
from scraping import Scrape

from shared.domain import Chunk, Failed, FinishReason
from shared.queue import Claim
from workers.metrics import WorkerMetrics
from workers.observer import Observer
from workers.publisher import Outcome

CANARY = "a word that nobody may see"


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """An observer, an attempt that it is told of, and what it has counted."""

    def __init__(self, process: OneProcess, *, number: int = 1, n: int = 1) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.observer = Observer(WorkerMetrics("fake", self.registry), monotonic=self.clock)
        self.attempt = process.prepare(request("r", prompt=CANARY, n=n), deadline=NEVER)
        self.attempt.number = number

    def claim(self, *, waited_s: float = 2.0, age_s: float = 3.0) -> None:
        self.observer.claimed(
            self.attempt, Claim("claimed", self.attempt.number, 60.0, False, age_s=age_s, waited_s=waited_s)
        )
        self.observer.prepared(self.attempt)

    def step(self, seconds: float, *, draws: bool = True, choice: int = 0, tokens: int = 1) -> None:
        """One step of the engine."""
        began_at = self.clock.now
        self.clock.now += seconds
        self.observer.stepped(began_at, self.clock.now)
        self.observer.worked_on(self.attempt)
        if draws:
            chunk = Chunk(choice, "x" * tokens, tuple(range(tokens))) if tokens else None
            self.observer.drew(self.attempt, self.attempt.answers[choice], chunk)

    def seen(self) -> Scrape:
        return Scrape(generate_latest(self.registry).decode())


@pytest.fixture
def process() -> Iterator[OneProcess]:
    with OneProcess() as process:
        yield process


@pytest.fixture
def watched(process: OneProcess) -> Watched:
    return Watched(process)


def test_the_times_of_a_request_are_those_of_the_steps(watched: Watched) -> None:
    watched.claim(waited_s=2.0, age_s=3.0)
    watched.clock.now += 5.0
    watched.step(0.5, draws=False)
    watched.step(0.5)
    watched.step(0.25)
    watched.observer.ended(watched.attempt, Outcome.DONE, None)

    seen = watched.seen()

    assert seen.value("tokenmill_request_queue_time_seconds_sum") == 2.0
    assert seen.value("tokenmill_request_prefill_time_seconds_sum") == 1.0
    assert seen.value("tokenmill_inter_token_latency_seconds_sum") == 0.25
    assert seen.value("tokenmill_inter_token_latency_seconds_count") == 1
    assert seen.value("tokenmill_engine_step_seconds_sum") == 1.25
    assert seen.value("tokenmill_engine_step_seconds_count") == 3
    assert watched.observer.pulse.read().first_token_p50_s == 3.0 + 5.0 + 1.0


def test_each_choice_has_gaps_of_its_own(process: OneProcess) -> None:
    watched = Watched(process, n=2)
    watched.claim()
    watched.step(1.0, choice=0)
    watched.step(1.0, choice=1)
    watched.step(1.0, choice=0)

    seen = watched.seen()

    assert seen.value("tokenmill_inter_token_latency_seconds_sum") == 2.0
    assert seen.value("tokenmill_inter_token_latency_seconds_count") == 1
    assert seen.value("tokenmill_request_prefill_time_seconds_count") == 1


def test_tokens_that_are_held_back_count_when_they_leave(watched: Watched) -> None:
    watched.claim()
    watched.step(1.0, tokens=0)
    assert watched.seen().value("tokenmill_generation_tokens_total") == 0
    watched.step(1.0, tokens=2)

    seen = watched.seen()

    assert seen.value("tokenmill_generation_tokens_total") == 2
    assert seen.value("tokenmill_inter_token_latency_seconds_count") == 1


def test_a_request_that_is_carried_on_is_no_new_prompt_and_has_had_its_first_token(process: OneProcess) -> None:
    watched = Watched(process, number=2)
    watched.attempt.answers[0].sent_tokens = 3
    watched.claim()
    watched.step(1.0)

    seen = watched.seen()

    assert seen.value("tokenmill_requests_carried_on_total") == 1
    assert seen.value("tokenmill_prompt_tokens_total") == 0
    assert watched.observer.pulse.read().first_token_p50_s == 0.0


@pytest.mark.parametrize(
    ("finishes", "reason"),
    [
        ([FinishReason.STOP, FinishReason.STOP], "stop"),
        ([FinishReason.STOP, FinishReason.LENGTH], "length"),
    ],
)
def test_one_choice_that_was_cut_off_makes_a_request_one_that_was(
    process: OneProcess, finishes: list[FinishReason], reason: str
) -> None:
    watched = Watched(process, n=2)
    for answer, finish in zip(watched.attempt.answers, finishes, strict=True):
        answer.finish = finish
    watched.claim()
    watched.observer.ended(watched.attempt, Outcome.DONE, None)

    seen = watched.seen()

    assert seen.value("tokenmill_request_success_total", finished_reason=reason) == 1
    assert seen.value("tokenmill_request_success_total") == 1


def test_a_request_that_is_handed_over_or_taken_away_neither_succeeded_nor_failed(process: OneProcess) -> None:
    handed_over, taken = Watched(process), Watched(process)
    for watched in (handed_over, taken):
        watched.claim()
    handed_over.observer.handed_over(handed_over.attempt)
    for watched in (handed_over, taken):
        watched.observer.ended(watched.attempt, Outcome.FENCED, None)
        assert watched.seen().value("tokenmill_request_success_total") == 0
        assert watched.seen().value("tokenmill_request_failure_total") == 0

    assert handed_over.seen().value("tokenmill_requests_handed_over_total") == 1
    assert taken.seen().value("tokenmill_requests_handed_over_total") == 0


def test_what_comes_after_the_end_counts_for_nothing(watched: Watched) -> None:
    watched.claim()
    watched.observer.ended(watched.attempt, Outcome.FENCED, None)
    before = watched.seen().value("tokenmill_generation_tokens_total")

    watched.step(1.0)
    watched.observer.ended(watched.attempt, Outcome.DONE, None)

    assert watched.seen().value("tokenmill_generation_tokens_total") == before
    assert watched.seen().value("tokenmill_request_success_total") == 0


@pytest.mark.parametrize(
    ("number", "outcome", "failure", "level"),
    [
        (1, Outcome.DONE, None, logging.DEBUG),
        (2, Outcome.DONE, None, logging.INFO),
        (1, Outcome.FENCED, None, logging.INFO),
        (1, Outcome.FAILED, Failed("engine_error", "The model failed."), logging.INFO),
    ],
)
def test_an_attempt_that_ends_is_one_line_and_is_news_if_it_went_as_it_should_not(
    process: OneProcess,
    caplog: pytest.LogCaptureFixture,
    number: int,
    outcome: Outcome,
    failure: Failed | None,
    level: int,
) -> None:
    caplog.set_level(logging.DEBUG, "tokenmill.worker")
    watched = Watched(process, number=number)
    watched.claim()
    watched.step(1.0)
    watched.observer.ended(watched.attempt, outcome, failure)

    (record,) = caplog.records

    assert record.levelno == level
    facts = vars(record)
    assert facts["request_id"] == "r"
    assert facts["attempt"] == number
    assert facts["outcome"] == outcome.value
    assert facts["tokens"] == 1
    assert facts["code"] == (failure.code if failure else None)
    assert CANARY not in str(facts)
