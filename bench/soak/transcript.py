"""What a client was told, event by event, and what is wrong with it."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.soak.asks import Told
from shared.log import EntryId, parse_entry_id


class Fault(StrEnum):
    """What can be wrong with an answer."""

    LOST = "lost"
    """It does not come to its end."""
    WRONG = "wrong"
    """It says something else than the engine does."""
    DUPLICATED = "duplicated"
    """It says something twice."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is wrong."""

    fault: Fault
    what: str


@dataclass(slots=True)
class Transcript:
    """A stream as its client saw it, over all of its connections."""

    ids: list[EntryId] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    is_done: bool = False
    complaints: list[Complaint] = field(default_factory=list)

    def add(self, block: str) -> bool:
        """Take one event's lines. True if it has an id: here a stream can be left and resumed."""
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" not in fields:
            return False
        if self.is_done:
            self._complain(Fault.DUPLICATED, f"after the end came {block!r}")
        if fields["data"] == "[DONE]":
            self.is_done = True
        else:
            self._read(json.loads(fields["data"]))
        if "id" in fields:
            self._place(fields["id"])
        return "id" in fields

    def _place(self, text: str) -> None:
        position = parse_entry_id(text)
        if position is None:
            self._complain(Fault.WRONG, f"an event has the id {text!r}")
            return
        if self.ids and position <= self.ids[-1]:
            self._complain(Fault.DUPLICATED, f"event {position} came after {self.ids[-1]}")
        self.ids.append(position)

    def _read(self, payload: dict[str, Any]) -> None:
        if "error" in payload:
            self._complain(Fault.LOST, f"ended with {payload['error']}")
            return
        self.usage = payload.get("usage") or self.usage
        for choice in payload["choices"]:
            index = choice["index"]
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self.texts[index] = self.texts.get(index, "") + (text or "")
            if text and index in self.reasons:
                self._complain(Fault.DUPLICATED, f"text of choice {index} came after its end")
            if reason := choice["finish_reason"]:
                if index in self.reasons:
                    self._complain(Fault.DUPLICATED, f"choice {index} ended twice")
                self.reasons[index] = reason

    def _complain(self, fault: Fault, what: str) -> None:
        self.complaints.append(Complaint(fault, what))

    def told(self) -> Told:
        """What was said so far."""
        choices = range(max(self.texts, default=-1) + 1)
        usage = self.usage or {}
        return Told(
            tuple(self.texts.get(choice, "") for choice in choices),
            tuple(self.reasons.get(choice, "") for choice in choices),
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
        )

    def judged(self, expected: Told, *, whole: bool) -> list[Complaint]:
        """What is wrong with it; unless it is `whole`, its client left and it is only the beginning."""
        if self.complaints:
            return self.complaints
        if not whole:
            return self._judged_beginning(expected)
        if not self.is_done:
            return [Complaint(Fault.LOST, "the stream broke off")]
        return differences(self.told(), expected)

    def _judged_beginning(self, expected: Told) -> list[Complaint]:
        return [
            Complaint(Fault.WRONG, f"choice {index} began {text!r}, not {expected.texts[index]!r}")
            for index, text in self.texts.items()
            if not expected.texts[index].startswith(text)
        ]


def whole_answer(body: bytes) -> Told:
    """What an answer in one piece says."""
    answer = json.loads(body)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return Told(
        tuple(choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices),
        tuple(choice["finish_reason"] for choice in choices),
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )


def differences(told: Told, expected: Told) -> list[Complaint]:
    """Nothing, or what was told instead."""
    return [] if told == expected else [Complaint(Fault.WRONG, f"said {told}, not {expected}")]
