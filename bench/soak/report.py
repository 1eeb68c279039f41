"""The report of a soak, for a terminal and for docs/reliability.md."""

from collections import Counter
from dataclasses import dataclass, field

from bench.soak.checks import Growth, Ledger, Stored
from bench.soak.clients import Manner, Tally
from bench.soak.processes import LEASE_S, WORKERS, Blow
from bench.soak.transcript import Fault

SHOWN = 20
"""How many of its complaints a report shows."""


@dataclass(slots=True)
class Report:
    """What a soak has found. It is clean if `complaints` is empty."""

    command: str
    cores: int
    clients: int
    minutes: float
    tally: Tally
    ledger: Ledger
    blows: Counter[Blow]
    growth: list[Growth]
    stored: Stored
    complaints: list[str] = field(default_factory=list)

    @property
    def faults(self) -> Counter[Fault]:
        """How many answers were wrong in each way."""
        return Counter(complaint.fault for complaint in self.tally.complaints)

    def text(self) -> str:
        """All of it, for a terminal."""
        lines = [f"{name}: {value}" for name, value in self._figures()]
        lines += [f"{row[0]}: memory x{row[1]}, descriptors {row[2]}, threads {row[3]}" for row in self._growth()]
        lines += [f"keys {kind}: {count}" for kind, count in sorted(self.stored.kinds.items())]
        lines += [f"- {complaint}" for complaint in self.complaints[:SHOWN]]
        if len(self.complaints) > SHOWN:
            lines.append(f"- and {len(self.complaints) - SHOWN} more")
        lines.append("FAILED" if self.complaints else "clean")
        return "\n".join(lines)

    def markdown(self) -> str:
        """The section for docs/reliability.md."""
        figures = "\n".join(f"| {name} | {value} |" for name, value in self._figures())
        growth = "\n".join(f"| {' | '.join(row)} |" for row in self._growth())
        return SECTION.format(
            command=self.command, workers=WORKERS, lease=LEASE_S, cores=self.cores, figures=figures, growth=growth
        )

    def _figures(self) -> list[tuple[str, str]]:
        manners, faults, deaths = self.tally.manners, self.faults, self.ledger.deaths
        return [
            ("requests", f"{self.tally.requests:,}"),
            ("tokens of whole answers", f"{self.tally.tokens:,}"),
            ("clients at once", f"{self.clients}"),
            ("minutes", f"{self.minutes:.1f}"),
            *((f"workers hit by {blow}", f"{self.blows[blow]}") for blow in Blow),
            ("clients that left for good", f"{manners[Manner.LEAVE]}"),
            ("clients that left and resumed at the other front end", f"{manners[Manner.RESUME]}"),
            ("requests that another worker carried on to their end", f"{self.ledger.carried_on}"),
            ("requests hit once, twice", f"{deaths[1]}, {deaths[2]}"),
            ("requests ended as poisonous", f"{self.ledger.poisonous}"),
            *((f"answers {fault}", f"{faults[fault]}") for fault in Fault),
            ("Redis keys without an expiry", f"{len(self.stored.without_expiry)}"),
            ("keys in Redis at the end", f"{self.stored.kinds.total():,}"),
            ("Redis memory at the end, MB", f"{self.stored.used_bytes / 1e6:.0f}"),
        ]

    def _growth(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                growth.name if growth.is_same else f"{growth.name} (a successor)",
                f"{growth.rss_ratio:.2f}",
                f"{growth.before.descriptors} → {growth.after.descriptors}",
                f"{growth.before.threads} → {growth.after.threads}",
            )
            for growth in self.growth
        ]


SECTION = """\
## Soak

Real processes on {cores} cores: a Valkey with an append-only file, two front ends, {workers} workers of the fake engine
with a lease of {lease} s, and a supervisor that starts a worker again when it is gone. Clients pick a front end at
random and ask for chat and text, streaming and not, greedy and seeded, some with two choices or a stop string.
Meanwhile workers are killed, stopped past their lease and woken, or terminated with a fifth of a second to drain, and
clients leave. The fake engine repeats itself, so the only right answer to each request is known before, and each one is
held against it: the texts, the finish reasons and the token counts of all choices, that the ids of events increase, and
that one end comes last. Of every request, also of those whose client left, Redis must say in the end that it has ended.

```sh
{command}
```

| what | how many |
| --- | --- |
{figures}

When all was quiet again nothing was left in the running and waiting sets, in RQ's queues and registry of started jobs,
or subscribed to. Each process against itself after the warm-up, before the first fault:

| process | memory, ratio | descriptors | threads |
| --- | --- | --- | --- |
{growth}

Worker 1 is only stopped and woken, never ended, so that one lives through all of it. Valkey's memory is what is stored:
a request and its log for five minutes after its end, RQ's record of it for ten, so nearly all of this run. `make soak`
fails when an answer is lost, wrong or duplicated, a request is ended as poisonous, a key of ours or a job has no
expiry, descriptors or threads of a process differ by more than ten, or, but for Valkey, its memory has grown by more
than a fifth and 20 MB.
"""
