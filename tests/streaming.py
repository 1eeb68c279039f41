"""Streams as clients see them: requests, scripts that wait for a test, and what came over the wire."""

import json
import socket
import threading
from typing import Any

from scripted_worker import Turn
from servers import FrontEnd

CHAT: Any = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}


class Gate:
    """A script that stops at named points until the test opens them."""

    def __init__(self, *, accept: bool = True, words: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.accept = threading.Event()
        self.go_on = threading.Event()
        self._words = words
        if accept:
            self.accept.set()

    def __call__(self, turn: Turn) -> None:
        assert self.accept.wait(20)
        turn.accept()
        turn.say(self._words[0])
        assert self.go_on.wait(20)
        for word in self._words[1:]:
            turn.say(word)
        turn.finish()
        turn.done()


def endless(turn: Turn) -> None:
    """Goes on until it is fenced off."""
    turn.accept()
    while True:
        turn.say("x")
        threading.Event().wait(0.05)


def post(front_end: FrontEnd, body: Any, path: str = "/v1/chat/completions", **headers: str) -> socket.socket:
    """A request on a raw connection, whose answer is not read."""
    connection = socket.create_connection(("127.0.0.1", front_end.port), timeout=20)
    raw = json.dumps(body, separators=(",", ":")).encode()  # as httpx does
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(raw)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw)
    return connection


def events(text: str) -> list[tuple[str | None, str]]:
    """The (id, data) of each event of a stream."""
    found = []
    for block in text.split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":")]
        if fields:
            named = dict(fields)
            found.append((named.get("id"), named["data"]))
    return found


def request_state(client: Any, turn_or_id: Any) -> str | None:
    state = client.hget(f"tokenmill:request:{turn_or_id}", "state")
    return state.decode() if state else None
