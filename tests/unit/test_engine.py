"""The engine on the fake backend, in one process: what goes in ends, once, with everything that was drawn."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from asking import (
    GREEDY,
    OneProcess,
    failure_of,
    logprobs_of,
    reasons_of,
    request,
    text_of,
    tokens_of,
    usage_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import wait_until

from shared.domain import Chunk, Done, Failed, Finished, FinishReason, SamplingParams, TextPrompt
from shared.errors import ErrorCode, RequestError
from workers.backends.fake import SPECIAL_PATTERN, FakeBackend, parse_options
from workers.backends.protocol import Logits, SlotWork, StepError

PREFIX = "a prefix that is long enough to be waited for: "


class Gate:
    """Lets a paced fake backend make one step at a time."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._is_wide_open = False

    def sleep(self, _: float) -> None:
        if not self._is_wide_open:
            self._arrived.release()
            self._open.acquire()

    def wait_for_step(self) -> None:
        """Wait until the engine stands inside a step."""
        assert self._arrived.acquire(timeout=10)

    def let_one_pass(self) -> None:
        self._open.release()

    def open_wide(self) -> None:
        self._is_wide_open = True
        self._open.release(1000)


def gated(gate: Gate, options: str = "pace=1", *, slots: int = 4) -> FakeBackend:
    return FakeBackend(parse_options(options), slots=slots, sleep=gate.sleep)


def seeded(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "temperature": 1.0} | changes))


def test_an_answer_is_chunks_a_finish_and_one_done() -> None:
    with OneProcess(options="end_every=0") as process:
        events = process.ask(request(max_tokens=5))

    assert [type(event) for event in events] == [Chunk] * 5 + [Finished, Done]
    assert reasons_of(events) == {0: FinishReason.LENGTH}
    assert len(tokens_of(events)) == 5
    assert usage_of(events).completion == 5
    assert usage_of(events).prompt == len("hello")


def test_an_answer_that_the_model_ends_stops() -> None:
    with OneProcess(options="end_every=4") as process:
        events = process.ask(request(max_tokens=None, sampling=seeded(3)))

    assert reasons_of(events) == {0: FinishReason.STOP}
    assert usage_of(events).completion == len(tokens_of(events))
    assert not SPECIAL_PATTERN.search(text_of(events))


def test_the_same_request_gets_the_same_answer_whatever_runs_beside_it() -> None:
    asked = request("alone", sampling=seeded(7), max_tokens=20)
    with OneProcess(options="end_every=0") as process:
        alone = process.ask(asked)
    with OneProcess(options="end_every=0", slots=3, prefill_chunk=3) as process:
        for index in range(6):
            process.submit(request(f"other {index}", f"hello {index} " * 9, sampling=seeded(index), max_tokens=30))
        beside = process.ask(asked)

    assert tokens_of(beside) == tokens_of(alone)
    assert text_of(beside) == text_of(alone)


def test_choices_of_a_seeded_request_differ_from_each_other() -> None:
    with OneProcess(options="end_every=0") as process:
        events = process.ask(request(n=3, sampling=seeded(7), max_tokens=20))

    assert len({text_of(events, choice) for choice in range(3)}) == 3


@pytest.mark.parametrize("options", ["end_every=0", "end_every=0&recurrent=1"])
def test_more_choices_than_slots_all_end(options: str) -> None:
    with OneProcess(options=options, slots=2) as process:
        events = process.ask(request(prompts=(TextPrompt(PREFIX), TextPrompt("b")), n=5, sampling=seeded(1)))

        assert reasons_of(events) == dict.fromkeys(range(10), FinishReason.LENGTH)
        assert usage_of(events).completion == 80
        assert usage_of(events).prompt == len(PREFIX) + 1
        assert process.is_idle()


def test_each_prompt_of_a_list_is_answered_as_if_it_were_alone() -> None:
    prompts = (TextPrompt("one"), TextPrompt("two"), TextPrompt(PREFIX))
    with OneProcess(options="end_every=0", slots=2) as process:
        together = process.ask(request("list", prompts=prompts))
        apart = [process.ask(request(prompt.text, prompt.text)) for prompt in prompts]

    assert [text_of(together, choice) for choice in range(3)] == [text_of(events) for events in apart]


def test_prompts_that_share_a_long_beginning_and_come_in_one_step_all_end() -> None:
    with OneProcess(options="end_every=0", slots=8, prefill_chunk=4, step_tokens=8) as process:
        names = [f"request {index}" for index in range(20)]
        for name in names:
            process.submit(request(name, PREFIX + name))
        results = {name: process.result(name) for name in names}
        fresh = {name: process.ask(request(f"again {name}", PREFIX + name)) for name in names}

    assert {name: text_of(events) for name, events in results.items()} == {
        name: text_of(events) for name, events in fresh.items()
    }
    assert sum(usage_of(events).cached > 0 for events in results.values()) == len(names) - 1


def test_a_second_turn_counts_what_it_did_not_compute_again() -> None:
    with OneProcess(options="end_every=0") as process:
        process.ask(request("first", PREFIX))
        second = usage_of(process.ask(request("second", PREFIX + "more")))

    assert second.cached == len(PREFIX)
    assert second.prompt == len(PREFIX) + 4


def test_recurrent_state_is_never_reused() -> None:
    with OneProcess(options="end_every=0&recurrent=1") as process:
        first = process.ask(request("first", PREFIX))
        second = process.ask(request("second", PREFIX))

    assert usage_of(second).cached == 0
    assert text_of(second) == text_of(first)


def test_a_stop_string_over_several_tokens_leaves_no_trace() -> None:
    with OneProcess(options="end_every=0") as process:
        whole = process.ask(request("whole", max_tokens=12, logprobs=2))
        words = text_of(whole).split(" ")
        stop = f"{words[3][-1:]} {words[4]} {words[5][:1]}"
        cut = process.ask(request("cut", max_tokens=12, stop=(stop,), logprobs=2))

    expected = text_of(whole)[: text_of(whole).index(stop)]
    assert text_of(cut) == expected
    assert reasons_of(cut) == {0: FinishReason.STOP}
    assert usage_of(cut).completion == len(tokens_of(cut)) == len(logprobs_of(cut))
    assert "".join(entry.token.text for entry in logprobs_of(cut)) == expected


def test_the_limit_inside_a_possible_stop_string_lets_out_what_was_held_back() -> None:
    with OneProcess(options="end_every=0") as process:
        whole = text_of(process.ask(request("whole", max_tokens=4)))
        cut = process.ask(request("cut", max_tokens=3, stop=(whole.rsplit(" ", 2)[1] + " and no more",)))

    assert text_of(cut) == whole.rsplit(" ", 1)[0]
    assert reasons_of(cut) == {0: FinishReason.LENGTH}
    assert usage_of(cut).completion == len(tokens_of(cut)) == 3


def test_logprobs_come_one_a_token_and_join_to_the_text() -> None:
    with OneProcess(options="end_every=0") as process:
        events = process.ask(request(logprobs=3))

    entries = logprobs_of(events)
    assert len(entries) == len(tokens_of(events))
    assert "".join(entry.token.text for entry in entries) == text_of(events)
    assert all(len(entry.top) == 3 and entry.top[0].logprob == entry.token.logprob for entry in entries)


def test_a_prompt_that_leaves_no_room_is_refused_and_one_token_of_room_is_enough() -> None:
    with OneProcess(options="end_every=0&context=10") as process:
        with pytest.raises(RequestError) as caught:
            process.prepare(request(prompt="x" * 10))
        events = process.ask(request(prompt="x" * 9, max_tokens=None))

    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert usage_of(events).completion == 1
    assert reasons_of(events) == {0: FinishReason.LENGTH}


def test_a_cancelled_attempt_frees_its_slots_and_says_nothing_more() -> None:
    with OneProcess(options="end_every=0", slots=1) as process:
        endless = process.submit(request("endless", n=3, max_tokens=None))
        wait_until(lambda: process.has_begun("endless"), what="the first token")
        process.engine.cancel(endless)
        process.ask(request("next"))

        assert not process.has_ended("endless")
        assert process.is_idle()


def test_an_attempt_cancelled_before_it_is_submitted_never_runs() -> None:
    with OneProcess(options="end_every=0") as process:
        attempt = process.prepare(request("endless", max_tokens=None))
        process.engine.cancel(attempt)
        process.engine.submit(attempt)
        process.ask(request("next"))

        assert not process.has_begun("endless")
        assert process.is_idle()


def test_an_attempt_cancelled_before_the_engine_has_seen_it_never_runs() -> None:
    gate = Gate()
    with OneProcess(gated(gate)) as process:
        process.submit(request("running", max_tokens=1))
        gate.wait_for_step()
        attempt = process.submit(request("late"))
        process.engine.cancel(attempt)
        gate.open_wide()
        process.result("running")

        assert process.is_idle()
        assert not process.has_begun("late")


def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    with OneProcess() as process:
        attempt = process.submit(request("first"))
        process.result("first")
        process.engine.cancel(attempt)
        process.engine.cancel(attempt)

        assert process.ask(request("second"))
        assert process.is_idle()


def test_a_request_past_its_deadline_fails_and_the_others_go_on() -> None:
    now = [0.0]
    gate = Gate()
    with OneProcess(gated(gate, "pace=1&end_every=0", slots=1), slots=1, monotonic=lambda: now[0]) as process:
        process.submit(request("running", max_tokens=None), deadline=5.0)
        process.submit(request("waiting"), deadline=5.0)
        process.submit(request("patient"), deadline=50.0)
        gate.wait_for_step()
        now[0] = 5.0
        gate.open_wide()
        failures = [failure_of(process.result(name)) for name in ("running", "waiting")]

        assert {failure.code for failure in failures} == {ErrorCode.DEADLINE_EXCEEDED.value}
        assert usage_of(process.result("patient")).completion == 8
        assert process.is_idle()


def test_a_step_that_fails_ends_the_request_at_fault_and_the_engine_goes_on() -> None:
    with OneProcess(options="end_every=0", slots=2) as process:
        poisoned = failure_of(process.ask(request("poison", "bad <|poison|> here", n=3)))
        good = process.ask(request("good", "bad "))
        fresh = process.ask(request("fresh", "bad "))

        assert poisoned.code == ErrorCode.ENGINE_ERROR.value
        assert text_of(good) == text_of(fresh)
        assert process.is_idle()


PENALISED: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 1.1, "repetition_penalty": 1.2}


@pytest.mark.parametrize("sampling", [GREEDY, seeded(7), seeded(7, **PENALISED)], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("state", ["", "&recurrent=1"], ids=["trimmable", "recurrent"])
def test_neighbours_of_a_poisonous_request_finish_as_if_it_had_not_been(sampling: SamplingParams, state: str) -> None:
    """Neighbours that are old, young, in the middle of their prompt and waiting; two poisonous requests among them."""
    options: dict[str, Any] = {"slots": 4, "prefill_chunk": 8}
    neighbours = [
        request("old", PREFIX, sampling=sampling, max_tokens=60, logprobs=1),
        request("young", PREFIX + "y", sampling=sampling, max_tokens=20, n=2, stop=("é",)),
        request("waiting", "w" * 60, sampling=sampling, max_tokens=20),
    ]
    with OneProcess(options=f"end_every=0{state}", **options) as process:
        undisturbed = {asked.id: process.ask(asked) for asked in neighbours}
    gate = Gate()
    with OneProcess(gated(gate, f"pace=1&end_every=0{state}"), **options) as process:
        process.submit(neighbours[0])
        for _ in range(20):
            gate.wait_for_step()
            gate.let_one_pass()
        gate.wait_for_step()
        process.submit(request("poison", "p" * 12 + "<|poison|>", n=3, sampling=sampling))
        process.submit(neighbours[1])
        process.submit(neighbours[2])
        process.submit(request("late poison", "p" * 40 + "<|poison|>", sampling=sampling))
        gate.open_wide()
        results = {asked.id: process.result(asked.id) for asked in neighbours}
        poisoned = [process.result(name) for name in ("poison", "late poison")]

        assert process.is_idle()
    for name, events in results.items():
        for choice in reasons_of(events):
            assert text_of(events, choice) == text_of(undisturbed[name], choice)
            assert tokens_of(events, choice) == tokens_of(undisturbed[name], choice)
        assert logprobs_of(events) == logprobs_of(undisturbed[name])
        assert reasons_of(events) == reasons_of(undisturbed[name])
        assert usage_of(events).completion == usage_of(undisturbed[name]).completion
    for events in poisoned:
        assert failure_of(events).code == ErrorCode.ENGINE_ERROR.value
        assert len(events) == 1


class BrokenBackend(FakeBackend):
    """Fails at everything from the moment that it is broken."""

    is_broken = False

    def step(self, work: Sequence[SlotWork]) -> Logits:
        if self.is_broken:
            raise StepError("out of memory")
        return super().step(work)


def test_when_every_step_fails_every_request_ends() -> None:
    backend = BrokenBackend(parse_options("pace=0.001&end_every=0&context=1000000"), slots=3)
    with OneProcess(backend, slots=3) as process:
        names = [f"request {number}" for number in range(5)]
        for name in names:
            process.submit(request(name, max_tokens=None))
        wait_until(lambda: process.has_begun(names[2]), what="several at work")
        backend.is_broken = True
        codes = {failure_of(process.result(name)).code for name in names}
        backend.is_broken = False

        assert codes == {ErrorCode.ENGINE_ERROR.value}
        assert process.is_idle()
        assert usage_of(process.ask(request("after"))).completion == 8


def test_a_suspect_that_is_cancelled_or_overdue_leaves_the_others_to_finish() -> None:
    now = [0.0]
    gate = Gate()
    with OneProcess(gated(gate, "pace=1&end_every=0"), monotonic=lambda: now[0]) as process:
        process.submit(request("overdue", max_tokens=None), deadline=5.0)
        gate.wait_for_step()
        cancelled = process.submit(request("cancelled", max_tokens=None))
        process.submit(request("poison", "<|poison|>"))
        process.submit(request("good", max_tokens=20))
        gate.let_one_pass()
        gate.wait_for_step()
        process.engine.cancel(cancelled)
        now[0] = 5.0
        gate.open_wide()

        assert failure_of(process.result("overdue")).code == ErrorCode.DEADLINE_EXCEEDED.value
        assert failure_of(process.result("poison")).code == ErrorCode.ENGINE_ERROR.value
        assert usage_of(process.result("good")).completion == 20
        assert not process.has_ended("cancelled")
        assert process.is_idle()


def test_room_is_a_matter_of_choices_in_flight() -> None:
    gate = Gate()
    with OneProcess(gated(gate, slots=2), slots=2) as process:
        assert process.engine.wait_for_room(0)
        process.submit(request("one"))
        assert process.engine.wait_for_room(0)
        process.submit(request("two", n=3))
        assert process.engine.in_flight == 4
        assert not process.engine.wait_for_room(0)
        gate.open_wide()
        process.result("one")
        process.result("two")
        assert process.engine.wait_for_room(0)


def test_what_is_still_in_flight_does_not_keep_the_engine_from_stopping() -> None:
    with OneProcess(options="end_every=0&context=1000000") as process:
        process.submit(request("endless", max_tokens=None))
        wait_until(lambda: process.has_begun("endless"), what="the first token")


def test_a_running_answer_gets_a_token_in_every_step_beside_a_long_prompt() -> None:
    gate = Gate()
    with OneProcess(gated(gate, "pace=1&end_every=0"), prefill_chunk=16) as process:
        process.submit(request("stream", max_tokens=None))
        gate.wait_for_step()
        gate.let_one_pass()
        gate.wait_for_step()
        process.submit(request("long", "x" * 160, max_tokens=1))
        gate.let_one_pass()
        for _ in range(10):
            gate.wait_for_step()
            gate.let_one_pass()
        wait_until(lambda: process.has_ended("long"), what="the long prompt's token")
        gate.open_wide()
        until_long = next(index for index, names in enumerate(process.steps) if "long" in names)

        assert until_long >= 10
        assert all("stream" in names for names in process.steps[:until_long])


MIX = st.lists(
    st.tuples(
        st.sampled_from(["finish", "cancel", "cancel early", "poison", "overdue"]),
        st.integers(1, 3),
        st.sampled_from(["x", PREFIX, PREFIX + "y"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(MIX, st.integers(1, 3))
def test_nothing_stays_in_flight_after_any_mix_of_endings(mix: list[tuple[str, int, str]], slots: int) -> None:
    with OneProcess(options="end_every=6", slots=slots, prefill_chunk=4) as process:
        expected: dict[str, str] = {}
        for index, (ending, n, prompt) in enumerate(mix):
            name = f"request {index}"
            text = f"{prompt}<|poison|>" if ending == "poison" else prompt
            asked = request(name, text, n=n, sampling=seeded(index), max_tokens=5)
            attempt = process.prepare(asked, deadline=0.0 if ending == "overdue" else float("inf"))
            if ending == "cancel early":
                process.engine.cancel(attempt)
            process.engine.submit(attempt)
            if ending == "cancel":
                process.engine.cancel(attempt)
            elif ending != "cancel early":
                expected[name] = ending
        assert process.is_idle()
        assert all(process.has_ended(name) for name in expected)
        for name, ending in expected.items():
            assert isinstance(process.events[name][-1], Done) == (ending == "finish")
        for name, events in process.events.items():
            assert all(not isinstance(event, Done | Failed) for event in events[:-1]), name
            if isinstance(events[-1], Done):
                completion = sum(len(event.tokens) for event in events if isinstance(event, Chunk))
                assert usage_of(events).completion == completion
        assert usage_of(process.ask(request("after", sampling=GREEDY))).prompt == len("hello")
