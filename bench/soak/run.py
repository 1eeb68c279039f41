"""A soak from start to end: warm up, measure, let the storm loose, wait for quiet, measure again."""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import redis

from bench.soak.asks import Ask, asks
from bench.soak.checks import Growth, Ledger, footprints, leftovers, stored
from bench.soak.clients import Tally, run_clients
from bench.soak.processes import Servers, running
from bench.soak.report import Report

POOL = 120
"""How many different bodies there are."""

SETTLE_EVERY_S = 5.0
QUIET_LIMIT_S = 40.0
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of a soak it is. `warm_up` requests come before the first fault and are not counted."""

    requests: int
    warm_up: int
    clients: int
    kill_every_s: float
    seed: int

    @property
    def command(self) -> str:
        """What repeats it."""
        given = f"--requests {self.requests} --clients {self.clients} --kill-every {self.kill_every_s:g}"
        return f'make soak ARGS="{given} --seed {self.seed}"'


def soak(shape: Shape) -> Report:
    """Run one; what is wrong is in the report."""
    random = Random(shape.seed)
    pool = asks(POOL, random)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), Random(shape.seed)) as servers:
        complaints = _load(servers, pool, Tally(), Ledger(servers.client), shape.warm_up, shape.clients, random)
        complaints += _quiet(servers.client)
        before = footprints(servers)
        tally, ledger = Tally(), Ledger(servers.client)
        started = time.monotonic()
        servers.workers.hit(shape.kill_every_s)
        complaints += _load(servers, pool, tally, ledger, shape.requests, shape.clients, random)
        servers.workers.hit(None)
        minutes = (time.monotonic() - started) / 60
        servers.workers.wait_until_whole()
        complaints += _quiet(servers.client)
        complaints += [f"{item.request_id} has not ended" for item in ledger.settle(())]
        after = footprints(servers)
        kept = stored(servers.client)
    growth = [Growth(name, before[name], after[name]) for name in before]
    complaints += [*ledger.complaints, *servers.workers.complaints]
    complaints += [complaint for process in growth for complaint in process.complaints()]
    return Report(
        command=shape.command,
        cores=os.cpu_count() or 1,
        clients=shape.clients,
        minutes=minutes,
        tally=tally,
        ledger=ledger,
        blows=servers.workers.blows,
        growth=growth,
        stored=kept,
        complaints=complaints,
    )


def _load(
    servers: Servers,
    pool: Sequence[Ask],
    tally: Tally,
    ledger: Ledger,
    requests: int,
    clients: int,
    random: Random,
) -> list[str]:
    """Send so many requests and look each one up while Redis still knows it. Returns what the clients complain of."""

    async def load() -> None:
        settling = asyncio.create_task(settle())
        await run_clients(servers.ports, pool, tally, requests=requests, clients=clients, random=random)
        settling.cancel()
        with suppress(asyncio.CancelledError):
            await settling

    async def settle() -> None:
        while True:
            await asyncio.sleep(SETTLE_EVERY_S)
            take()

    def take() -> None:
        sent, tally.sent = tally.sent, []
        ledger.settle(sent)

    asyncio.run(load())
    take()
    return [f"{complaint.fault}: {complaint.what}" for complaint in tally.complaints]


def _quiet(client: "redis.Redis") -> list[str]:
    """Wait until nothing is left that waits, runs or listens; what still is."""
    until = time.monotonic() + QUIET_LIMIT_S
    while (left := leftovers(client)) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return [f"left behind: {item}" for item in left]
