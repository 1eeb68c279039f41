"""Prompts, answers and keys are in the request's own payload and log in Redis, and nowhere else.

Everything that `tokenmill up` runs is searched, at the most talkative log level, after all that can go wrong has.
"""

import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from collector import Collector, collecting
from launched import Up
from raw_http import answer_on, connection, exchange
from scraping import scrape
from servers import free_port, wait_until
from streaming import post

from shared.store import connect
from workers.backends.fake import CRASH, FIRST_WORD, WORDS

PROMPT, MADE_UP, IDEMPOTENCY = "xylophone-quarantine", "nobody-s-model", "idem-walrus-trombone"
KEY, UNKNOWN_KEY = "sk-zebra-umbrella", "sk-gazelle-parasol"
ANSWER = "flour flour flour"
"""What the fake engine says if one of its words is all that it may say."""

TOKENS = list(PROMPT.encode())
SPELLED = json.dumps(TOKENS[:8])[1:-1]
CANARIES = (PROMPT, KEY, UNKNOWN_KEY, IDEMPOTENCY, MADE_UP, ANSWER, SPELLED, SPELLED.replace(" ", ""))

KEYS = f"""
[[key]]
name = "alice"
hash = "sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
requests = 1000
"""

ONLY_FLOUR = {str(FIRST_WORD + WORDS.index("flour")): 100}
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
JOB, LOG = "rq:job:", "tokenmill:log:"
INTERNALS = ("Traceback", 'File "', ".py", "redis", "unix:", "/tmp", "Error:", "msgspec", "pydantic")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with collecting() as collector:
        yield collector


class Everything:
    """A whole `tokenmill up`, what it answered, and all that it leaves for others to read."""

    def __init__(self, folder: Path, collector: Collector, log_format: str) -> None:
        self.collector = collector
        self.metrics_port = free_port()
        self.keys = folder / "keys.toml"
        self.keys.write_text(KEYS)
        self.up = Up(
            folder,
            *("--model", "fake=fake:pace=0.01&context=512&end_every=0"),
            *("--workers", "2", "--lease", "1", "--header-timeout", "1", "--body-timeout", "1"),
            *("--log-level", "debug", "--log-format", log_format, "--otlp-endpoint", collector.url),
            *("--metrics-port", str(self.metrics_port), "--api-keys", str(self.keys)),
        ).ready()
        self.port = int(self.up.url.rpartition(":")[2])
        self.answers: list[httpx.Response] = []
        self.status = self._run("-m", "deploy.cli", "status", "--json")
        self.redis_url = json.loads(self.status)["redis"]
        self.client = connect(self.redis_url)

    def ask(self, path: str = TEXT_PATH, **fields: Any) -> httpx.Response:
        """A request full of what nobody else shall see."""
        body: dict[str, Any] = {"model": "fake", "max_tokens": 8, "logit_bias": ONLY_FLOUR}
        body |= {"user": PROMPT, "metadata": {"about": PROMPT}, "stop": [PROMPT], **fields}
        if path == CHAT_PATH:
            body.setdefault("messages", [{"role": "user", "content": PROMPT}])
        else:
            body.setdefault("prompt", PROMPT)
        headers = AUTHORIZED | {"X-API-Key": KEY}
        headers["Idempotency-Key"] = f"{IDEMPOTENCY}-{len(self.answers)}"
        self.answers.append(httpx.post(self.up.url + path, json=body, headers=headers, timeout=60))
        return self.answers[-1]

    def get(self, path: str) -> None:
        self.answers.append(httpx.get(self.up.url + path, headers=AUTHORIZED, timeout=60))

    def told(self) -> dict[str, str]:
        """All that anybody could read, by where it is."""
        url = self.redis_url
        self.status = self._run("-m", "deploy.cli", "status", "--json")
        told = {
            "status": self.status,
            "doctor": self._run("-m", "deploy.cli", "doctor", "--redis", url, "--model", "fake=fake:", check=False),
            "rq info": self._run("-m", "rq.cli", "info", "--url", url),
            "front end's metrics": scrape(self.up.url).text,
            "traces": self.collector.raw.decode(errors="replace"),
            "titles": "\n".join(" ".join(each.cmdline()) for each in self._processes()),
            "slow commands": str(self.client.slowlog_get(-1)),
            "large commands": str(self.client.execute_command("COMMANDLOG", "GET", "-1", "large-request")),
            "large answers": str(self.client.execute_command("COMMANDLOG", "GET", "-1", "large-reply")),
        }
        for number in range(2):
            told[f"worker {number}'s metrics"] = scrape(f"http://127.0.0.1:{self.metrics_port + number}").text
        folder = Path(url.removeprefix("unix://")).parent
        told["Valkey's log"] = (folder / "valkey.log").read_text()
        told |= {f"Redis: {place}": text for place, text in self.redis().items() if not self._may_hold(place)}
        told["output"] = self.up.output()
        return told

    def redis(self) -> dict[str, str]:
        """Every value in Redis, by its key and field."""
        found: dict[str, str] = {}
        client: Any = self.client
        for raw in client.scan_iter():
            key = raw.decode()
            match client.type(raw).decode():
                case "hash":
                    values = {f"{key} {name.decode()}": value for name, value in client.hgetall(raw).items()}
                case "string":
                    values = {key: client.get(raw)}
                case "stream":
                    values = {key: str(client.xrange(raw)).encode()}
                case "list":
                    values = {key: str(client.lrange(raw, 0, -1)).encode()}
                case "set":
                    values = {key: str(client.smembers(raw)).encode()}
                case "zset":
                    values = {key: str(client.zrange(raw, 0, -1)).encode()}
                case "none":
                    continue  # it has just expired
                case kind:
                    raise AssertionError(f"{key} is a {kind}")
            found |= {place: _readable(value) for place, value in values.items()}
        return found

    @staticmethod
    def _may_hold(place: str) -> bool:
        """Whether this is a request's payload or its log."""
        return place.startswith(LOG) or (place.startswith(JOB) and place.endswith(" data"))

    def own(self) -> str:
        """What requests have of their own in Redis, where all of it should be found."""
        return "\n".join(text for place, text in self.redis().items() if self._may_hold(place))

    def _processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.up.popen.pid), *self.up.family()]

    def _run(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            env=self.up.environment | {"PYTHONWARNINGS": "ignore"},
            cwd=os.getcwd(),
            capture_output=True,
            text=True,
            check=check,
            timeout=60,
        )
        return done.stdout + done.stderr


def _readable(value: bytes) -> str:
    with suppress(zlib.error):
        value = zlib.decompress(value)
    return value.decode(errors="replace")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_clients_send_and_get_is_found_nowhere_but_in_their_requests(
    tmp_path: Path, collector: Collector, log_format: str
) -> None:
    everything = Everything(tmp_path, collector, log_format)
    try:
        all_that_can_happen(everything)
        own, told = everything.own(), everything.told()
        everything.client.connection_pool.disconnect()
    finally:
        everything.up.clean()
    told["output"] = everything.up.output()

    for canary in (PROMPT, ANSWER.split()[0]):
        assert canary in own, "the search finds what is there"
    assert [(place, canary) for place, text in told.items() for canary in CANARIES if canary in text] == []
    assert [answer.text for answer in everything.answers if any(word in answer.text for word in INTERNALS)] == []


def all_that_can_happen(everything: Everything) -> None:
    """Requests that go well, and all the ways in which others do not."""
    url, port = everything.up.url, everything.port
    chat = CHAT_PATH

    assert ANSWER in everything.ask().text
    assert "flour" in everything.ask(chat, stream=True).text
    assert everything.ask(chat, logprobs=True, top_logprobs=2).status_code == 200

    # Refused by the front end.
    for fields in ({"temperature": PROMPT}, {"n": 0}, {PROMPT: 1}, {"suffix": PROMPT}, {"model": MADE_UP}):
        assert everything.ask(**fields).status_code in (400, 404)
    for headers in ({}, {"Content-Encoding": PROMPT}):
        everything.answers.append(httpx.post(url + chat, content=f'{{"{PROMPT}', headers=AUTHORIZED | headers))
    for path in (f"/{PROMPT}?key={KEY}", f"/v1/models/{PROMPT}", f"/v1/streams/{PROMPT}", f"/health?key={KEY}"):
        everything.get(path)
    again = AUTHORIZED | {"Idempotency-Key": f"{IDEMPOTENCY}-0"}
    everything.answers.append(httpx.post(url + TEXT_PATH, json={"model": "fake", "prompt": PROMPT}, headers=again))
    assert everything.answers[-1].status_code == 422
    for stranger in ({}, {"Authorization": f"Bearer {UNKNOWN_KEY}"}, {"X-API-Key": UNKNOWN_KEY}):
        everything.answers.append(httpx.get(f"{url}/v1/models", headers=stranger))
        assert everything.answers[-1].status_code == 401
    # Somebody wrote the key itself where its hash belongs.
    everything.keys.write_text(KEYS.replace("sha256:", f"{UNKNOWN_KEY} sha256:"))
    wait_until(
        lambda: everything.get("/v1/models") or "stay as they were" in everything.up.output(), what="a complaint"
    )
    everything.keys.write_text(KEYS)

    # Refused before the app sees it.
    secret = f"Authorization: Bearer {KEY}\r\nX: {PROMPT}\r\n"
    for raw in (
        f"{PROMPT} {KEY}\r\n\r\n",
        f"GET /{PROMPT} HTTP/1.1\r\nHost: x\r\n{secret}Bad {KEY}: x\r\n\r\n",
        f"GET /{PROMPT} HTTP/1.1\r\nHost: x\r\n{secret * 200}\r\n",
        f"GET /{PROMPT * 300} HTTP/1.1\r\nHost: x\r\n{secret}\r\n",
        f"POST {chat} HTTP/1.1\r\nHost: x\r\n{secret}Transfer-Encoding: chunked\r\n\r\n{PROMPT}\r\n",
        f"POST {chat} HTTP/1.1\r\nHost: x\r\n{secret}Transfer-Encoding: {KEY}\r\n\r\n",
        f"POST {chat} HTTP/1.1\r\nHost: x\r\n{secret}Expect: {KEY}\r\n\r\n",
    ):
        assert exchange(port, raw.encode()).status >= 400
    # Too slow, with headers and with a body; and gone in the middle of either.
    head = f"POST {chat} HTTP/1.1\r\n{secret}"
    for begun in (head, f"{head}Content-Length: 99\r\n\r\n{PROMPT}"):
        with connection(port) as slow:
            slow.sendall(begun.encode())
            assert answer_on(slow).status == 408
        with connection(port) as gone:
            gone.sendall(begun.encode())

    # Refused by the worker, broken in the engine, left by the client.
    assert everything.ask(prompt=PROMPT * 100).json()["error"]["code"] == "context_length_exceeded"
    assert everything.ask(prompt=f"{PROMPT}<|poison|>").json()["error"]["code"] == "engine_error"
    streamed = {"model": "fake", "prompt": PROMPT, "logit_bias": ONLY_FLOUR, "stream": True, "max_tokens": 400}
    with post(everything, streamed, TEXT_PATH, Authorization=f"Bearer {KEY}") as left:
        assert left.recv(100)

    # Redis takes nothing any more for a while, also from a worker in the middle of an answer.
    with post(everything, streamed, TEXT_PATH, Authorization=f"Bearer {KEY}") as stream:
        assert stream.recv(100)
        everything.client.config_set("maxmemory", 1)
        assert everything.ask().status_code == 503
        wait_until(lambda: "holding" in everything.up.output(), what="a worker that cannot write")
        everything.client.config_set("maxmemory", 0)
        rest = b""
        while b"[DONE]" not in rest:
            rest += stream.recv(65536)

    # What is slow or large for Redis itself.
    everything.client.eval("for _ = 1, 3e7 do end return 1", 0, PROMPT)
    everything.client.set("large", PROMPT * 100_000)
    assert everything.client.get("large")
    everything.client.delete("large")

    # A request that takes one worker after the other with it.
    assert everything.ask(prompt=[*TOKENS, CRASH]).json()["error"]["code"] == "request_poisonous"
    everything.collector.wait_for(20)
