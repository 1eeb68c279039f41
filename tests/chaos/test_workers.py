"""Workers that are killed, stopped, hang or are poisoned: what they ran goes on as if nothing had been."""

import itertools
import signal
import threading
from typing import Any

import pytest
from asking import failure_of, logprobs_of, reasons_of, text_of, tokens_of, usage_of
from servers import wait_until
from worker_processes import ENDLESS, SLOW, Office, Start, WorkerProcess

from shared.domain import Accepted, Event, SamplingParams, TextPrompt, TokenPrompt
from shared.errors import ErrorCode
from workers.backends.fake import CRASH

LEASE = ("--lease", "1")
PACED = "fake=fake:pace=0.02&end_every=0&context=4096"
SEEDED = SamplingParams(seed=7, temperature=1.3, top_p=0.95)
PENALISED = SamplingParams(seed=7, temperature=0.7, presence_penalty=0.5, frequency_penalty=1.1, repetition_penalty=1.2)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 120},
    "seeded": {"max_tokens": 120, "sampling": SEEDED},
    "penalised": {"max_tokens": 120, "sampling": PENALISED},
    "choices": {"max_tokens": 60, "sampling": SEEDED, "n": 3},
    "prompts": {"max_tokens": 60, "prompts": (TextPrompt("one"), TextPrompt("two"))},
    "logprobs": {"max_tokens": 120, "sampling": SEEDED, "logprobs": 2},
}


def told(events: list[Event]) -> Any:
    """Everything that a client is told, however it was cut into entries."""
    choices = sorted(reasons_of(events))
    usage = usage_of(events)
    return (
        [(text_of(events, choice), tokens_of(events, choice)) for choice in choices],
        reasons_of(events),
        logprobs_of(events),
        (usage.prompt, usage.completion),
    )


def attempts(office: Office, name: str) -> list[int]:
    """The attempts that have written to a request's log, in order."""
    return [attempt for attempt, _ in itertools.groupby(entry.id.attempt for entry in office.entries(name))]


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_worker_s_request_goes_on_where_it_stopped(start: Start, office: Office, way: str) -> None:
    doomed = start(*LEASE, model=PACED)
    office.ready(doomed)
    office.submit("whole", **WAYS[way])
    whole = office.result("whole")
    office.submit("cut", **WAYS[way])
    wait_until(lambda: len(tokens_of(office.events("cut"))) > 10, what="some text")

    doomed.kill()
    office.ready(start(*LEASE, model=PACED))
    cut = office.result("cut", limit_s=20)

    assert attempts(office, "cut") == [1, 2]
    assert told(cut) == told(whole)
    assert sum(isinstance(event, Accepted) for event in cut) == 1
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_a_stop_string_across_the_cut_is_found(start: Start, office: Office) -> None:
    worker = start(*LEASE, model=PACED)
    office.ready(worker)
    office.submit("free", max_tokens=200)
    text = text_of(office.result("free"))
    # As long a stop string as fits behind the moment of death, so that much is held back when it comes.
    stop = text[len(text) * 2 // 3 : len(text) * 2 // 3 + 40]
    before = text[: text.index(stop)]
    office.submit("cut", max_tokens=400, stop=(stop, before[-30:] + "never"))
    wait_until(lambda: len(tokens_of(office.events("cut"))) > 10, what="some text")

    worker.kill()
    office.ready(start(*LEASE, model=PACED))
    cut = office.result("cut", limit_s=20)

    assert attempts(office, "cut") == [1, 2]
    assert text_of(cut) == before


def test_a_request_whose_worker_dies_before_the_first_token_is_only_late(start: Start, office: Office) -> None:
    doomed = start(*LEASE, model="fake=fake:prefill=5")
    office.ready(doomed)
    office.submit("late")
    wait_until(lambda: office.events("late") == [Accepted(5)], what="the prompt to be accepted")

    doomed.kill()
    office.ready(start(*LEASE))
    events = office.result("late", limit_s=20)

    assert usage_of(events).completion == 8
    assert events.count(Accepted(5)) == 1


def test_a_worker_that_was_stopped_past_its_lease_lets_go_and_serves_on(start: Start, office: Office) -> None:
    stopped = start(*LEASE, model=PACED)
    office.ready(stopped)
    office.submit("whole", max_tokens=150)
    whole = office.result("whole")
    office.submit("cut", max_tokens=150)
    wait_until(lambda: len(tokens_of(office.events("cut"))) > 10, what="some text")

    stopped.popen.send_signal(signal.SIGSTOP)
    other = start(*LEASE, model=PACED)
    office.ready(other)
    wait_until(lambda: attempts(office, "cut") == [1, 2], limit_s=20, what="the second attempt")
    stopped.popen.send_signal(signal.SIGCONT)
    cut = office.result("cut", limit_s=20)

    assert told(cut) == told(whole)
    assert attempts(office, "cut") == [1, 2]
    other.terminate()
    assert other.end() == 0
    office.ready(stopped)
    office.submit("next")
    assert usage_of(office.result("next")).completion == 8
    assert stopped.is_running


def test_a_worker_whose_engine_hangs_hands_over_and_exits(start: Start, office: Office) -> None:
    hanging = start(*LEASE, "--hang-timeout", "2", model=f"{PACED}&hang_after=40")
    office.ready(hanging)
    office.submit("cut", max_tokens=120)
    wait_until(lambda: len(tokens_of(office.events("cut"))) > 10, what="some text")
    office.ready(start(*LEASE, model=PACED))
    office.submit("whole", max_tokens=120)

    cut = office.result("cut", limit_s=20)

    assert told(cut) == told(office.result("whole"))
    assert attempts(office, "cut") == [1, 2]
    assert hanging.end() != 0
    assert "no progress" in hanging.output


def test_a_poisonous_request_ends_after_three_deaths_and_its_neighbours_finish(start: Start, office: Office) -> None:
    workers = [start(*LEASE, model=SLOW), start(*LEASE, model=SLOW)]
    office.ready(*workers)
    neighbours = [f"neighbour-{number}" for number in range(5)]
    office.submit(*neighbours, max_tokens=60)
    for name in neighbours:
        office.wait_for_text(name)
    office.submit("poison", prompts=(TokenPrompt((1, 2, CRASH)),))
    deaths = 0

    def has_ended() -> bool:
        nonlocal deaths
        for index, worker in enumerate(workers):
            if not worker.is_running:
                deaths += 1
                workers[index] = start(*LEASE, model=SLOW)
        return office.has_ended("poison")

    wait_until(has_ended, limit_s=60, what="the end of the poisonous request")

    assert failure_of(office.result("poison")).code == ErrorCode.POISONOUS.value
    assert deaths == 3
    results = [office.result(name, limit_s=60) for name in neighbours]
    assert [usage_of(events).completion for events in results] == [60] * len(neighbours)
    assert len({text_of(events) for events in results}) == 1


def test_a_rolling_restart_under_load_fails_nothing(start: Start, office: Office) -> None:
    arguments = (*LEASE, "--drain-timeout", "0.2", "--slots", "4")
    workers = [start(*arguments, model=PACED), start(*arguments, model=PACED)]
    office.ready(*workers)
    office.submit("whole", max_tokens=60)
    whole = told(office.result("whole"))
    names: list[str] = []
    over = threading.Event()

    def load() -> None:
        for number in itertools.count():
            office.submit(f"job-{number}", max_tokens=60)
            names.append(f"job-{number}")
            if over.wait(0.25):
                return

    loading = threading.Thread(target=load)
    loading.start()
    for _ in range(2):
        for index, worker in enumerate(workers):
            workers[index] = replaced(start, office, worker, arguments)
    over.set()
    loading.join()

    assert len(names) > 8
    assert all(told(office.result(name, limit_s=30)) == whole for name in names)
    assert any(len(attempts(office, name)) > 1 for name in names)
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def replaced(start: Start, office: Office, worker: WorkerProcess, arguments: tuple[str, ...]) -> WorkerProcess:
    """A new worker instead of one that is asked to stop, as a rolling restart does it."""
    successor = start(*arguments, model=PACED)
    office.ready(successor)
    worker.terminate()
    assert worker.end() == 0
    return successor


def test_a_request_that_nobody_listens_to_is_ended_after_its_abandon_time(start: Start, office: Office) -> None:
    office.ready(start("--abandon", "1", model=ENDLESS))
    office.submit("abandoned", max_tokens=None)
    listener = office.client.pubsub()
    listener.subscribe("tokenmill:events:heard")
    wait_until(lambda: listener.get_message(timeout=1), what="the subscription")
    office.submit("heard", max_tokens=300)

    assert failure_of(office.result("abandoned", limit_s=10)).code == ErrorCode.CANCELLED.value
    assert usage_of(office.result("heard")).completion == 300
    listener.close()
