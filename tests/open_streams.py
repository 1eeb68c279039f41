"""A stream that a client reads in the background while a test does things to the servers."""

import json
import threading
from typing import Any

import httpx
from asking import OneProcess, request, text_of
from servers import FrontEnd, wait_until
from streaming import events

MODEL = "fake=fake:pace=0.02&end_every=0&context=100000"
"""About fifty tokens a second, for as long as is asked."""


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion whose text is always the same."""
    return {"model": "fake", "prompt": "hello", "max_tokens": max_tokens, "temperature": 0, **fields}


def undisturbed(max_tokens: int) -> str:
    """The text that a completion has when nothing happens to it."""
    with OneProcess(options="end_every=0&context=100000") as process:
        return text_of(process.ask(request(prompt="hello", max_tokens=max_tokens)))


def ask(front_end: FrontEnd, max_tokens: int = 4) -> httpx.Response:
    """A whole answer, or whatever is said instead."""
    return httpx.post(f"{front_end.url}/v1/completions", json=body(max_tokens), timeout=40)


def answers(front_end: FrontEnd) -> bool:
    """Whether a new request is answered."""
    try:
        return ask(front_end).status_code == 200
    except httpx.HTTPError:
        return False


class OpenStream:
    """Reads one completion to its end, on a thread of its own; streamed, unless told otherwise."""

    def __init__(self, front_end: FrontEnd, max_tokens: int, *, stream: bool = True) -> None:
        self.raw = ""
        self.status = 0
        self.error: Exception | None = None
        self._url = f"{front_end.url}/v1/completions"
        self._body = body(max_tokens, stream=stream)
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.raw += piece
        except Exception as error:
            self.error = error

    @property
    def text(self) -> str:
        """The text so far."""
        bodies = [json.loads(data) for data in self._bodies() if data.startswith("{")]
        return "".join(choice["text"] for body in bodies for choice in body.get("choices", ()))

    @property
    def failure(self) -> str | None:
        """The code of the error in which it ended."""
        last = self._last()
        return json.loads(last)["error"]["code"] if last.startswith('{"error"') else None

    @property
    def is_complete(self) -> bool:
        return self._last() == "[DONE]" or (self.status == 200 and self.raw.startswith("{") and self.has_ended)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def has_begun(self) -> "OpenStream":
        """Wait until some text is there."""
        wait_until(lambda: self.text or self.has_ended, what="the stream's first text")
        assert self.text, (self.raw, self.error)
        return self

    def end(self, limit_s: float) -> "OpenStream":
        """Wait for the end, which is a complete answer or an error event."""
        self._thread.join(limit_s)
        assert self.has_ended, f"the stream hangs after {self.raw[-300:]!r}"
        assert self.error is None, self.error
        assert self.is_complete or self.failure, self.raw[-300:]
        return self

    def _bodies(self) -> list[str]:
        return [self.raw] if self.raw.startswith("{") else [data for _, data in events(self.raw)]

    def _last(self) -> str:
        return (self._bodies() or [""])[-1]
