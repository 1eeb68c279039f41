"""The process that renders a model's chat template: `python -m workers.template_process DESCRIPTOR`.

A template is a program that came with a model. Jinja's sandbox keeps it from what Python could do, and nothing
but a process of its own keeps it from taking all time and memory: this one has a limit of both, no environment, and
nothing to write to or to start. It ends with the worker, whose end of the connection is then closed.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from setproctitle import setproctitle

CPU_LIMIT_S = 1.0
"""For one rendering. A conversation of a million characters takes some hundredths of that."""

MEMORY_LIMIT_BYTES = 512 * 1024**2
OPEN_FILES = 16
MOST_OF_A_REFUSAL = 300


class Setup(msgspec.Struct, frozen=True):
    """The first message, which is not answered: the template, and the names it knows besides the conversation."""

    template: str
    names: dict[str, str]


class Conversation(msgspec.Struct, frozen=True):
    """Each further message: what to render, and of how many characters the text is of no use any more."""

    messages: list[dict[str, str]]
    most_characters: int


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The text; without it, it would have had more characters than are of use."""

    characters: int
    text: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The template says that it does not take this, or it is no template."""

    reason: str


class Broke(msgspec.Struct, frozen=True, tag=True):
    """It fails, with an exception of this name."""

    error: str


Answer = Rendered | Refused | Broke


def main() -> None:
    """Answer one message after the other, until there is nobody to ask."""
    setproctitle("tokenmill template")
    # A terminal's Ctrl-C is for the worker, which may still want a prompt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    _confine()
    with contextlib.suppress(EOFError, ConnectionError):
        renderer = _Renderer(msgspec.json.decode(connection.recv_bytes(), type=Setup))
        while True:
            conversation = msgspec.json.decode(connection.recv_bytes(), type=Conversation)
            with _cpu_limit():
                answer = renderer.answer(conversation)
            connection.send_bytes(answer)


def _confine() -> None:
    """Give up what a template has no use for. A limit that this system does not know is left out."""
    limits = {
        resource.RLIMIT_AS: MEMORY_LIMIT_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    for limit, value in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


@contextlib.contextmanager
def _cpu_limit() -> Any:
    """Beyond the limit the kernel ends this process, whatever it is doing."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


class _Renderer:
    """The template, compiled when it is needed first, since compiling computes what is constant in it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._template: jinja2.Template | None = None

    def answer(self, conversation: Conversation) -> bytes:
        """The answer, encoded."""
        try:
            if self._template is None:
                self._template = _environment().from_string(self._setup.template)
            text = self._template.render(
                messages=conversation.messages, add_generation_prompt=True, **self._setup.names
            )
            is_of_use = len(text) <= conversation.most_characters
            return msgspec.json.encode(Rendered(len(text), text if is_of_use else ""))
        except jinja2.TemplateError as error:
            return msgspec.json.encode(Refused(_one_line(error)))
        except Exception as error:
            # A template is the model's code: it may raise anything, and give what is no text.
            return msgspec.json.encode(Broke(type(error).__name__))


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it (the names that transformers gives them)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MOST_OF_A_REFUSAL]


if __name__ == "__main__":
    main()
