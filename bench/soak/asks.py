"""What is asked, and what the answer must be: the fake engine repeats itself, so each answer is known before."""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from api.schemas import chat, completions
from api.schemas.answer import FINISH_REASONS
from api.schemas.parsing import parse
from api.translate import chat as translate_chat
from api.translate import completions as translate_completions
from bench.load import prompt
from shared.domain import Chunk, Done, Event, Finished, GenerationRequest
from shared.settings import Limits
from workers.attempt import Attempt
from workers.backends.fake import FakeBackend, FakeOptions
from workers.engine import Engine
from workers.metrics import WorkerMetrics
from workers.observer import Observer
from workers.prepare import prepare
from workers.prompt import PromptEncoder
from workers.scheduler.scheduler import Scheduler

MODEL = "fake"
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"

END_EVERY = 100
"""Some answers end by themselves, most at their limit."""

ANSWER_LIMIT_S = 10.0
STOP_LENGTH = 7
"""Longer than a word, so that a stop string is never found in one token."""


@dataclass(frozen=True, slots=True)
class Told:
    """All that an answer says, however it was cut into events. Texts and finish reasons by choice."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One of the bodies that are sent, and its only right answer."""

    path: str
    body: bytes
    is_stream: bool
    expected: Told


def asks(count: int, random: Random) -> list[Ask]:
    """Bodies of every kind: chat and text, streaming and not, greedy and seeded, some with two choices or a stop."""
    drafts = [_draft(number, random) for number in range(count)]
    told = _answers(drafts)
    for number in range(0, count, 4):
        text = told[number].texts[0]
        middle = len(text) // 2
        if stop := text[middle : middle + STOP_LENGTH]:
            drafts[number][1]["stop"] = [stop, "never said"]
    return [
        Ask(path, json.dumps(fields).encode(), fields["stream"], expected)
        for (path, fields), expected in zip(drafts, _answers(drafts), strict=True)
    ]


def _draft(number: int, random: Random) -> tuple[str, dict[str, Any]]:
    """A path and the fields of a body for it."""
    path = CHAT_PATH if random.random() < 0.6 else TEXT_PATH
    text = prompt(number, random.randrange(1000))
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": random.randint(4, 64), "seed": random.randrange(2**32)}
    fields |= {"messages": [{"role": "user", "content": text}]} if path == CHAT_PATH else {"prompt": text}
    fields["stream"] = random.random() < 0.75
    if fields["stream"]:
        fields["stream_options"] = {"include_usage": True}
    if random.random() < 0.5:
        fields["temperature"] = 0
    else:
        fields |= {"temperature": 1.2, "top_p": 0.95, "presence_penalty": random.choice((0, 0.5))}
    if random.random() < 0.2:
        fields["n"] = 2
    return path, fields


def _request(path: str, fields: dict[str, Any], request_id: str) -> GenerationRequest:
    """What the front end makes of a body."""
    raw = json.dumps(fields).encode()
    if path == CHAT_PATH:
        chat_body = parse(raw, chat.ChatCompletionRequest, no_op=chat.NO_OP, limits=Limits())
        return translate_chat.generation_request(chat_body, request_id)
    text_body = parse(raw, completions.CompletionRequest, no_op=completions.NO_OP, limits=Limits())
    return translate_completions.generation_request(text_body, request_id)


def _answers(drafts: Iterable[tuple[str, dict[str, Any]]]) -> list[Told]:
    """The answers of an engine in this process, asked one after the other."""
    events: list[Event] = []

    def emit(emitted: list[tuple[Attempt, list[Event]]]) -> None:
        for _, some in emitted:
            events.extend(some)

    backend = FakeBackend(FakeOptions(end_every=END_EVERY), slots=2)
    scheduler = Scheduler(slots=2, prefill_chunk=4096, step_tokens=4096, reuse=False)
    engine = Engine(backend, scheduler, emit, observer=Observer(WorkerMetrics("fake", CollectorRegistry())), slots=2)
    encoder = PromptEncoder(backend.tokenizer)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    answers = []
    for number, (path, fields) in enumerate(drafts):
        attempt = Attempt(_request(path, fields, f"expected-{number}"), 1, float("inf"), 0, [])
        prepare(attempt, encoder, backend)
        engine.submit(attempt)
        if not engine.wait_until_idle(ANSWER_LIMIT_S):
            raise RuntimeError(f"no answer to {fields}")
        answers.append(_told(events, attempt.request.choices))
        events.clear()
    engine.stop()
    thread.join(ANSWER_LIMIT_S)
    return answers


def _told(events: list[Event], choices: int) -> Told:
    texts = [""] * choices
    reasons = [""] * choices
    for event in events:
        match event:
            case Chunk(choice, text):
                texts[choice] += text
            case Finished(choice, reason):
                reasons[choice] = FINISH_REASONS[reason]
            case Done(usage):
                return Told(tuple(texts), tuple(reasons), usage.prompt, usage.completion)
    raise RuntimeError(f"an answer without its end: {events}")
