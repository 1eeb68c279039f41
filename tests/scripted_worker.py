"""A worker without an engine: it takes real jobs off the queue and answers each as a test's script says."""

import threading
import uuid
from collections.abc import Callable, Sequence

import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.serializers import JSONSerializer

from shared.codec import request_from_payload
from shared.domain import (
    Accepted,
    ChosenLogprob,
    Chunk,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Priority,
    Usage,
)
from shared.errors import ErrorCode
from shared.fleet import Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.jobs import DataJob, rq_queue
from shared.log import Append, LogWriter
from shared.queue import RequestQueue
from shared.store import connect

PROMPT_TOKENS = 7
VOCABULARY = 1000


class Fenced(Exception):
    """The request was taken from this worker."""


class Turn:
    """One request, as its script sees it."""

    def __init__(self, request: GenerationRequest, attempt: int, writer: LogWriter, lock: threading.Lock) -> None:
        self.request = request
        self.attempt = attempt
        self._writer = writer
        self._lock = lock
        self._seq = 0
        self._tokens = 0

    def append(self, *events: Event) -> None:
        """Write events to the log.

        Raises:
            Fenced: someone else has ended or taken the request.
        """
        with self._lock:
            (written,) = self._writer.append([Append(self.request.id, self.attempt, self._seq + 1, events)])
        if not written:
            raise Fenced
        self._seq += len(events)

    @property
    def written(self) -> int:
        """How many entries are in the log."""
        return self._seq

    def accept(self) -> None:
        self.append(Accepted(PROMPT_TOKENS))

    def say(self, text: str, *, choice: int = 0, logprobs: Sequence[ChosenLogprob] = ()) -> None:
        self._tokens += 1
        self.append(Chunk(choice, text, (self._tokens,), tuple(logprobs)))

    def finish(self, choice: int = 0, reason: FinishReason = FinishReason.STOP) -> None:
        self.append(Finished(choice, reason))

    def done(self, *, cached: int = 0) -> None:
        self.append(Done(Usage(prompt=PROMPT_TOKENS, completion=self._tokens, cached=cached)))

    def fail(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        self.append(Failed(code.value, message, param))


Script = Callable[[Turn], None]


def say_words(*words: str) -> Script:
    """A script that accepts, says the words in every choice, and ends."""

    def script(turn: Turn) -> None:
        turn.accept()
        for choice in range(turn.request.choices):
            for word in words:
                turn.say(word, choice=choice)
            turn.finish(choice)
        turn.done()

    return script


class ScriptedWorker:
    """Serves one model; each request's script runs in a thread of its own."""

    def __init__(self, redis_url: str, script: Script, *, model: str = "scripted", slots: int = 200) -> None:
        self._client = connect(redis_url)
        self._queue = RequestQueue(self._client)
        self._script = script
        self._model = ModelInfo(
            name=model,
            backend="scripted",
            device="cpu",
            context=512,
            vocabulary=VOCABULARY,
            state_kind=StateKind.RECURRENT,
            created=1_700_000_000,
        )
        self._slots = slots
        self._writer = LogWriter(self._client, self.name)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.turns: list[Turn] = []
        self.fenced: list[str] = []
        self.errors: list[BaseException] = []

    @property
    def name(self) -> str:
        return f"scripted-{self._model.name}"

    def announce(self, state: WorkerState = WorkerState.READY) -> None:
        """Say that this worker lives, for longer than any test takes."""
        info = WorkerInfo(
            name=self.name, model=self._model, state=state, pid=1, host="here", slots=self._slots, running=0
        )
        Fleet(self._client).renew(info, lease_s=60)

    def start(self) -> "ScriptedWorker":
        self.announce()
        taker = threading.Thread(target=self._take, name="taker")
        taker.start()
        self._threads.append(taker)
        return self

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(10)
        self._client.close()
        self._client.connection_pool.disconnect()
        if self.errors:
            raise self.errors[0]

    def __enter__(self) -> "ScriptedWorker":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take(self) -> None:
        queues = [rq_queue(self._client, self._model.name, priority) for priority in Priority]
        while not self._stopped.is_set():
            try:
                if not any(self._take_from(queue) for queue in queues):
                    self._stopped.wait(0.01)
            except redis.ConnectionError:
                self._stopped.wait(0.05)

    def _take_from(self, queue: Queue) -> bool:
        between = IntermediateQueue.get_intermediate_queue_key(queue.key)
        raw = self._client.lmove(queue.key, between, "LEFT", "RIGHT")
        if raw is None:
            return False
        self._client.lrem(between, 1, raw)
        self._begin(raw.decode())
        return True

    def _begin(self, job_id: str) -> None:
        try:
            job = DataJob.fetch(job_id, connection=self._client, serializer=JSONSerializer)
        except NoSuchJobError:
            return
        request = request_from_payload(job.payload())
        claim = self._queue.claim(request.id, model=request.model, worker=self.name, token=uuid.uuid4().hex)
        if claim.outcome != "claimed":
            return
        turn = Turn(request, claim.attempt, self._writer, self._lock)
        self.turns.append(turn)
        thread = threading.Thread(target=self._run, args=(turn,), name=request.id)
        thread.start()
        self._threads.append(thread)

    def _run(self, turn: Turn) -> None:
        try:
            self._script(turn)
        except Fenced:
            self.fenced.append(turn.request.id)
        except BaseException as error:
            self.errors.append(error)
