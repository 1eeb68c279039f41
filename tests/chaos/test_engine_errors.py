"""A request that makes the model fail, among others in one worker: it alone ends, and nobody else notices."""

from asking import failure_of, reasons_of, text_of, tokens_of, usage_of
from servers import wait_until
from worker_processes import Office, Start

from shared.domain import Failed, SamplingParams, TextPrompt
from shared.errors import ErrorCode

PACED = "fake=fake:pace=0.01&end_every=0&context=4096"
SEEDED = SamplingParams(seed=7, temperature=1.3, top_p=0.95)


def test_a_request_at_which_the_model_fails_ends_and_its_neighbours_do_not_notice(start: Start, office: Office) -> None:
    worker = start("--slots", "4", model=PACED)
    office.ready(worker)
    office.submit("whole", max_tokens=100, sampling=SEEDED)
    whole = office.result("whole")
    neighbours = [f"neighbour-{number}" for number in range(3)]
    for name in neighbours:
        office.submit(name, max_tokens=100, sampling=SEEDED)
        office.wait_for_text(name)

    office.submit("poison", "another", prompts=(TextPrompt("a <|poison|>"),), n=2)

    for name in ("poison", "another"):
        events = office.result(name)
        assert failure_of(events).code == ErrorCode.ENGINE_ERROR.value
        assert sum(isinstance(event, Failed) for event in events) == 1
    for name in neighbours:
        events = office.result(name)
        assert (text_of(events), tokens_of(events)) == (text_of(whole), tokens_of(whole))
        assert reasons_of(events) == reasons_of(whole)
        assert usage_of(events).completion == 100
        assert {entry.id.attempt for entry in office.entries(name)} == {1}
    assert worker.is_running
    wait_until(office.is_clean, what="RQ to hold nothing of it")
