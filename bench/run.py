"""Measures ours and the installed peers on the same model, one server after the other, in one run.

Writes every figure to `bench/results/`, and the ratios to standard output and to `--markdown FILE`.
Absolute figures say more about the machine than about the servers, so only ratios are shown.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench import servers
from bench.load import LoadResult, measure
from bench.servers import Cost, Server, Shape
from tests.models import packaged_gguf, smollm2_folder

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("peer", "clients", "tokens/s", "TTFT p50", "TTFT p95", "TTFT p50, ms more"),
    *("gap p99", "peak memory", "CPU per token"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One server at one number of clients."""

    server: str
    load: LoadResult
    cost: Cost


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    clients = [int(count) for count in options.clients.split(",")]
    contenders = [server for server in _contenders(options.engine) if _is_wanted(server, options.only)]
    measured: list[Measured] = []
    for server in contenders:
        for slots in sorted({_slots_for(count) for count in clients}):
            counts = [count for count in clients if _slots_for(count) == slots]
            measured += _measure_server(server, Shape(slots, options.threads), counts, options)
    _save(options.engine, measured)
    table = ratios(measured, contenders[0].name)
    print(table)
    if options.markdown:
        Path(options.markdown).write_text(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("gguf", "torch"), default="gguf")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=3, help="requests per client")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="measure only servers whose name contains this; comma-separated")
    parser.add_argument("--markdown", default="", help="file to write the table of ratios to")
    return parser.parse_args()


def _contenders(engine: str) -> list[Server]:
    """Ours first, then the peers that are installed."""
    gguf = packaged_gguf()
    if engine == "gguf":
        found = [
            servers.tokenmill("tokenmill", f"smollm2={gguf}"),
            servers.llama_server(gguf),
            servers.llama_cpp_server(gguf),
        ]
    else:
        folder = smollm2_folder()
        found = [
            servers.tokenmill("tokenmill", f"smollm2={folder}", "--device", "cpu", "--dtype", "float32"),
            servers.transformers_serve(folder, batching=True),
            servers.transformers_serve(folder, batching=False),
        ]
    return [server for server in found if server is not None]


def _is_wanted(server: Server, only: str) -> bool:
    return not only or any(part in server.name for part in only.split(","))


def _slots_for(clients: int) -> int:
    return 16 if clients > 8 else 8


def _measure_server(server: Server, shape: Shape, counts: list[int], options: argparse.Namespace) -> list[Measured]:
    measured = []
    with servers.running(server, shape) as (url, process):
        # Twice, so that lazy set-up is over and the shared beginning of the prompts is cached where
        # a server does that.
        measure(url, server.model, clients=2, requests=1, max_tokens=options.max_tokens, offset=90)
        for index, count in enumerate(counts):
            with servers.metered(process) as cost:
                load = measure(
                    url,
                    server.model,
                    clients=count,
                    requests=options.requests,
                    max_tokens=options.max_tokens,
                    offset=index * options.requests,
                )
            print(
                f"{time.strftime('%H:%M:%S')} {server.name}, {count} clients: {load.tokens_per_s:.1f} tok/s, "
                f"ttft {load.ttft_p50 * 1000:.0f}/{load.ttft_p95 * 1000:.0f} ms, "
                f"gap {load.gap_p50 * 1000:.0f}/{load.gap_p99 * 1000:.0f} ms, {load.tokens} tokens",
                flush=True,
            )
            measured.append(Measured(server.name, load, cost))
    return measured


def _save(engine: str, measured: list[Measured]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{engine}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps([dataclasses.asdict(item) for item in measured], indent=1))
    print(f"every figure: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def ratios(measured: list[Measured], ours: str) -> str:
    """A Markdown table of ours over each peer, per number of clients.

    Above 1 is better for us in tokens/s; below 1 is better for us in everything else.
    """
    lines = [
        f"Machine: {os.cpu_count()} cores. Ours divided by the peer's, same run.",
        "",
        _row(COLUMNS),
        _row(["---"] * len(COLUMNS)),
    ]
    mine = {item.load.clients: item for item in measured if item.server == ours}
    for item in measured:
        own = mine.get(item.load.clients)
        if item.server == ours or own is None:
            continue
        a, b = own.load, item.load
        lines.append(
            f"| {item.server} | {b.clients} | {a.tokens_per_s / b.tokens_per_s:.2f} "
            f"| {a.ttft_p50 / b.ttft_p50:.2f} | {a.ttft_p95 / b.ttft_p95:.2f} "
            f"| {(a.ttft_p50 - b.ttft_p50) * 1000:+.0f} | {_ratio(a.gap_p99, b.gap_p99)} "
            f"| {_ratio(own.cost.peak_bytes, item.cost.peak_bytes)} "
            f"| {_ratio(_cpu_per_token(own), _cpu_per_token(item))} |"
        )
    lines += ["", "CPU seconds of our processes, as shares of their sum:", ""]
    lines += ["| clients | worker | front end | Redis | launcher |", "| --- | --- | --- | --- | --- |"]
    for count, item in sorted(mine.items()):
        total = sum(item.cost.cpu_s.values()) or 1.0
        shares = [item.cost.cpu_s.get(name, 0.0) / total for name in ("worker", "api", "redis", "up")]
        lines.append(f"| {count} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(ours: float, peer: float) -> str:
    return f"{ours / peer:.2f}" if peer else "-"


def _cpu_per_token(item: Measured) -> float:
    return sum(item.cost.cpu_s.values()) / max(1, item.load.tokens)


if __name__ == "__main__":
    main()
