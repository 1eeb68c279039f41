"""A model's chat template, rendered in a process that has limits (`workers.template_process`)."""

import contextlib
import logging
import os
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection, Pipe

import msgspec

from shared.errors import ErrorCode, ModelLoadError, RequestError
from workers.template_process import Answer, Broke, Conversation, Refused, Rendered, Setup

ANSWER_LIMIT_S = 10.0
"""How long an answer may take on a machine that has much else to do; the process itself has a limit of CPU time."""

GREETING = [{"role": "user", "content": "Hello"}]
"""What any template must be able to render."""

logger = logging.getLogger("tokenmill.worker")


class ChatTemplate:
    """Renders conversations. Used by one thread; the process is started when it is needed, and again when it ended."""

    def __init__(self, template: str, names: dict[str, str]) -> None:
        self._setup = Setup(template, names)
        self._connection: Connection[bytes, bytes] | None = None
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
        self._stop: weakref.finalize[..., ChatTemplate] | None = None

    def check(self) -> None:
        """Render a greeting.

        Raises:
            ModelLoadError: that cannot be done; in one line.
        """
        match self._ask(Conversation(GREETING, sys.maxsize)):
            case Refused(reason):
                raise ModelLoadError(f"the model's chat template cannot be used: {reason}")
            case Broke(error):
                raise ModelLoadError(f"the model's chat template cannot be used: it fails on a greeting ({error})")
            case None:
                raise ModelLoadError("the model's chat template takes too much time or memory for a greeting")

    def render(self, messages: list[dict[str, str]], *, most_characters: int) -> Rendered:
        """The prompt, or only its length if that is more than is of use.

        Raises:
            RequestError: the template refuses the messages, or fails on them, or takes too much time or memory.
        """
        match self._ask(Conversation(messages, most_characters)):
            case Rendered() as rendered:
                return rendered
            case Refused(reason):
                message = f"The model's chat template refuses these messages: {reason}"
            case Broke(error):
                message = f"The model's chat template fails on these messages ({error})."
            case None:
                message = "The model's chat template takes too much time or memory for these messages."
        raise RequestError(ErrorCode.INVALID_REQUEST, message, param="messages")

    def close(self) -> None:
        """End the process. The next rendering would start another."""
        if self._stop is not None:
            self._stop()
        self._connection = self._stop = None

    def _ask(self, conversation: Conversation) -> Answer | None:
        """What the process answers; None if it came to the end of its time or memory."""
        raw = msgspec.json.encode(conversation)
        answer: Answer | None = None
        try:
            connection = self._send(raw)
            if connection.poll(ANSWER_LIMIT_S):
                answer = self._decoder.decode(connection.recv_bytes())
        except EOFError:
            pass  # it had used up its limits
        except OSError as error:
            logger.warning("the process that renders the chat template is of no use: %s", error)
        if answer is None or answer == Broke(MemoryError.__name__):
            self.close()
            return None
        return answer

    def _send(self, raw: bytes) -> "Connection[bytes, bytes]":
        if self._connection is not None:
            try:
                self._connection.send_bytes(raw)
                return self._connection
            except OSError:
                self.close()  # somebody has ended it meanwhile
        connection = self._start()
        connection.send_bytes(raw)
        return connection

    def _start(self) -> "Connection[bytes, bytes]":
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "workers.template_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
        )
        theirs.close()
        self._connection = ours
        self._stop = weakref.finalize(self, _end, process, ours)
        ours.send_bytes(msgspec.json.encode(self._setup))
        return ours


def _end(process: "subprocess.Popen[bytes]", connection: "Connection[bytes, bytes]") -> None:
    with contextlib.suppress(OSError):
        connection.close()
    process.kill()
    process.wait()
