"""Requests, and an engine in this very process that answers them into a list."""

import threading
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from servers import wait_until

from shared.domain import (
    ChosenLogprob,
    Chunk,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TextPrompt,
    Usage,
    is_terminal,
)
from shared.fleet import StateKind
from workers.attempt import Attempt
from workers.backends.fake import FakeBackend, parse_options
from workers.backends.protocol import Backend
from workers.engine import Engine
from workers.metrics import WorkerMetrics
from workers.observer import Observer
from workers.prepare import prepare
from workers.prompt import PromptEncoder
from workers.scheduler.scheduler import Scheduler

NEVER = float("inf")
GREEDY = SamplingParams(seed=1, temperature=0.0)


def request(name: str = "request", prompt: str = "hello", **fields: Any) -> GenerationRequest:
    """A request with one text prompt, unless the fields say otherwise."""
    defaults: dict[str, Any] = {"model": "fake", "prompts": (TextPrompt(prompt),), "sampling": GREEDY, "max_tokens": 8}
    return GenerationRequest(id=name, **(defaults | fields))


def text_of(events: Sequence[Event], choice: int = 0) -> str:
    """The whole text of a choice."""
    return "".join(event.text for event in events if isinstance(event, Chunk) and event.choice == choice)


def tokens_of(events: Sequence[Event], choice: int = 0) -> list[int]:
    """All tokens of a choice."""
    chunks = [event for event in events if isinstance(event, Chunk) and event.choice == choice]
    return [token for chunk in chunks for token in chunk.tokens]


def logprobs_of(events: Sequence[Event]) -> list[ChosenLogprob]:
    """All logprob entries, in order."""
    return [entry for event in events if isinstance(event, Chunk) for entry in event.logprobs]


def reasons_of(events: Sequence[Event]) -> dict[int, FinishReason]:
    """Each choice's finish reason; every choice ends once."""
    finished = [event for event in events if isinstance(event, Finished)]
    reasons = {event.choice: event.reason for event in finished}
    assert len(reasons) == len(finished)
    return reasons


def usage_of(events: Sequence[Event]) -> Usage:
    """The usage of a request that is done."""
    last = events[-1]
    assert isinstance(last, Done), last
    return last.usage


def failure_of(events: Sequence[Event]) -> Failed:
    """The failure in which a request ended."""
    last = events[-1]
    assert isinstance(last, Failed), last
    return last


class OneProcess:
    """An engine on a thread of its own, without a queue: requests go in, events land in lists.

    What each event list holds is checked as it grows: nothing follows a terminal event.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        options: str = "",
        slots: int = 4,
        prefill_chunk: int = 128,
        step_tokens: int = 512,
        **engine_options: Any,
    ) -> None:
        self.backend = backend or FakeBackend(parse_options(options), slots=slots)
        self.encoder = PromptEncoder(self.backend.tokenizer)
        scheduler = Scheduler(
            slots=slots,
            prefill_chunk=prefill_chunk,
            step_tokens=step_tokens,
            reuse=self.backend.description.state_kind is StateKind.TRIMMABLE,
            exact_prefill=self.backend.description.exact_prefill,
        )
        self.registry = CollectorRegistry()
        self.observer = Observer(WorkerMetrics("fake", self.registry))
        self.engine = Engine(self.backend, scheduler, self._emit, observer=self.observer, slots=slots, **engine_options)
        self.events: dict[str, list[Event]] = {}
        self.steps: list[set[str]] = []
        self.after_end: list[Event] = []
        self._thread = threading.Thread(target=self.engine.run, name="engine")

    def __enter__(self) -> "OneProcess":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        assert not self.after_end

    def _emit(self, emitted: list[tuple[Attempt, list[Event]]]) -> None:
        self.steps.append({attempt.request.id for attempt, events in emitted if events})
        for attempt, events in emitted:
            log = self.events.setdefault(attempt.request.id, [])
            if log and is_terminal(log[-1]):
                self.after_end += events
            log += events

    def prepare(self, asked: GenerationRequest, *, deadline: float = NEVER) -> Attempt:
        attempt = Attempt(asked, 1, deadline, 0, [])
        prepare(attempt, self.encoder, self.backend)
        return attempt

    def submit(self, asked: GenerationRequest, *, deadline: float = NEVER) -> Attempt:
        attempt = self.prepare(asked, deadline=deadline)
        self.engine.submit(attempt)
        return attempt

    def result(self, name: str) -> list[Event]:
        """All events of a request, once it has ended."""
        wait_until(lambda: self.has_ended(name), limit_s=60, what=f"the end of {name}")
        return self.events[name]

    def has_ended(self, name: str) -> bool:
        return bool(self.events.get(name)) and is_terminal(self.events[name][-1])

    def has_begun(self, name: str) -> bool:
        return bool(self.events.get(name))

    def ask(self, asked: GenerationRequest) -> list[Event]:
        """Submit a request and wait for its end."""
        self.submit(asked)
        return self.result(asked.id)

    def is_idle(self) -> bool:
        return self.engine.wait_until_idle(10) and self.engine.in_flight == 0
