"""The relay alone: front end, Redis and publishing around the fake engine, which costs almost nothing.

Three questions: how much later than from the engine itself does the first token arrive, how many tokens
a second go through one front-end process, and what do many open streams cost in memory.
"""

import asyncio
import threading
import time

import psutil
from prometheus_client import CollectorRegistry

from bench import servers
from bench.load import ask, measure, prompt, quantile
from bench.servers import Shape
from shared.domain import ChatMessage, ChatPrompt, Chunk, Event, GenerationRequest, SamplingParams
from workers.attempt import Attempt
from workers.backends.fake import FakeBackend, FakeOptions
from workers.engine import Engine
from workers.metrics import WorkerMetrics
from workers.observer import Observer
from workers.prepare import prepare
from workers.prompt import PromptEncoder
from workers.scheduler.scheduler import Scheduler

PACE_S = 0.02
STREAMS = 500

AT_ONCE = ("--prefill-chunk", "8192")
"""Prompts in one step: how they are scheduled beside answers is not what is measured here."""


def main() -> None:
    """Measure and print all three."""
    own = engine_ttft(samples=40)
    added = {count: relayed_ttft(count) - own for count in (1, 16)}
    for count, seconds in added.items():
        print(f"TTFT p50 over the engine's own, {count} clients: {seconds * 1000:+.1f} ms")
    print(f"tokens/s through one front-end process: {throughput():.0f}")
    print(f"memory of one front-end process with {STREAMS} open streams: {open_streams_bytes() / 1e6:.0f} MB")


def engine_ttft(samples: int) -> float:
    """Median seconds from handing an attempt to the engine to its first chunk, without any relay."""
    first = threading.Event()

    def emit(emitted: list[tuple[Attempt, list[Event]]]) -> None:
        if any(isinstance(event, Chunk) for _, events in emitted for event in events):
            first.set()

    backend = FakeBackend(FakeOptions(pace=PACE_S, end_every=0), slots=8)
    scheduler = Scheduler(slots=8, prefill_chunk=128, step_tokens=512, reuse=True)
    engine = Engine(backend, scheduler, emit, observer=Observer(WorkerMetrics("fake", CollectorRegistry())), slots=8)
    encoder = PromptEncoder(backend.tokenizer)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    times = []
    for index in range(samples):
        first.clear()
        started = time.perf_counter()
        messages = (ChatMessage(role="user", content=prompt(0, index)),)
        request = GenerationRequest(
            id=f"r{index}",
            model="fake",
            prompts=(ChatPrompt(messages),),
            sampling=SamplingParams(seed=0, temperature=0),
            max_tokens=4,
        )
        attempt = Attempt(request, 1, time.monotonic() + 60, 0, [])
        prepare(attempt, encoder, backend)
        engine.submit(attempt)
        first.wait(10)
        times.append(time.perf_counter() - started)
        engine.wait_until_idle(10)
    engine.stop()
    thread.join(10)
    return quantile(times, 0.5)


def relayed_ttft(clients: int) -> float:
    """Median seconds from sending a request over HTTP to its first content."""
    server = servers.tokenmill("tokenmill", f"fake=fake:pace={PACE_S}&end_every=0", *AT_ONCE)
    with servers.running(server, Shape(slots=32, threads=1, context=4096)) as (url, _):
        measure(url, "fake", clients=clients, requests=2, max_tokens=4, offset=50)
        return measure(url, "fake", clients=clients, requests=20, max_tokens=16, offset=0).ttft_p50


def throughput() -> float:
    """Tokens per second with 64 streams that together offer far more than is asked for."""
    server = servers.tokenmill("tokenmill", "fake=fake:pace=0.004&end_every=0", *AT_ONCE)
    with servers.running(server, Shape(slots=64, threads=1, context=4096)) as (url, _):
        measure(url, "fake", clients=8, requests=1, max_tokens=32, offset=50)
        return measure(url, "fake", clients=64, requests=1, max_tokens=1000, offset=0).tokens_per_s


def open_streams_bytes() -> int:
    """Resident bytes of the front-end process while it relays that many streams."""
    server = servers.tokenmill("tokenmill", "fake=fake:pace=0.5&end_every=0", *AT_ONCE, "--queue-limit", str(STREAMS))
    with servers.running(server, Shape(slots=512, threads=1, context=4096)) as (url, root):

        async def hold() -> int:
            asks = [asyncio.create_task(ask(url, "fake", prompt(index, 0), 24)) for index in range(STREAMS)]
            peak = 0
            while not all(task.done() for task in asks):
                peak = max(peak, _front_end_bytes(root))
                await asyncio.sleep(0.5)
            await asyncio.gather(*asks)
            return peak

        return asyncio.run(hold())


def _front_end_bytes(root: psutil.Process) -> int:
    sizes = [
        process.memory_info().rss
        for process in root.children(recursive=True)
        if process.cmdline()[:1] == ["tokenmill api"]
    ]
    return max(sizes, default=0)


if __name__ == "__main__":
    main()
