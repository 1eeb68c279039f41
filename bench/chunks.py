"""The trade-off of batching tokens into chunks: events and CPU saved against delay added.

One server per delay on the same paced engine; every figure is relative to sending each token by itself.
"""

from dataclasses import dataclass

from bench import servers
from bench.load import measure
from bench.servers import Shape

DELAYS_S = (0.0, 0.01, 0.02, 0.05, 0.1)
CLIENTS = 16
PACE_S = 0.01
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Measured:
    """What one delay costs: gaps are between events, CPU is of all our processes but the engine's sleep."""

    delay_s: float
    tokens_per_event: float
    cpu_per_1000_tokens_s: float
    gap_p50_s: float


def main() -> None:
    """Measure each delay and print the table."""
    rows = [_measure(delay) for delay in DELAYS_S]
    each = rows[0]
    print("| chunk delay | tokens per event | CPU per token, relative | gap between events p50, relative |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.delay_s * 1000:.0f} ms | {row.tokens_per_event:.1f} "
            f"| {row.cpu_per_1000_tokens_s / each.cpu_per_1000_tokens_s:.2f} "
            f"| {row.gap_p50_s / each.gap_p50_s:.1f} |"
        )


def _measure(delay_s: float) -> Measured:
    extra = ("--chunk-delay", str(delay_s), "--chunk-tokens", "1" if delay_s == 0 else "64")
    server = servers.tokenmill("tokenmill", f"fake=fake:pace={PACE_S}&end_every=0", *extra)
    with servers.running(server, Shape(slots=CLIENTS, threads=1, context=4096)) as (url, process):
        measure(url, "fake", clients=2, requests=1, max_tokens=32, offset=50)
        with servers.metered(process) as cost:
            load = measure(url, "fake", clients=CLIENTS, requests=1, max_tokens=MAX_TOKENS, offset=0)
    return Measured(
        delay_s=delay_s,
        tokens_per_event=load.tokens / load.events,
        cpu_per_1000_tokens_s=sum(cost.cpu_s.values()) / load.tokens * 1000,
        gap_p50_s=load.gap_p50,
    )


if __name__ == "__main__":
    main()
