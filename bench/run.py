"""Measures ours and the installed peers on the same model, in one run.

All servers are up at once and take turns, round after round: a machine's speed drifts by more than what
servers differ in, so only what was measured within seconds of each other is compared. A ratio is the
median over the rounds.

Writes every figure to `bench/results/`, and the ratios to standard output and to `--markdown FILE`.
Absolute figures say more about the machine than about the servers, so only ratios are shown.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
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
    """One server at one number of clients in one round."""

    server: str
    round: int
    load: LoadResult
    cost: Cost


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    clients = [int(count) for count in options.clients.split(",")]
    found = _contenders(options.engine, options.beside)
    contenders = [server for server in found if _is_wanted(server, options.only)]
    measured: list[Measured] = []
    for slots in sorted({_slots_for(count) for count in clients}):
        counts = [count for count in clients if _slots_for(count) == slots]
        measured += _measure(contenders, Shape(slots, options.threads), counts, options)
    _save(options.engine, measured)
    table = ratios(measured, contenders[0].name)
    print(table)
    if options.markdown:
        Path(options.markdown).write_text(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("gguf", "torch"), default="gguf")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=1, help="requests per client and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="measure only servers whose name contains this; comma-separated")
    parser.add_argument("--beside", type=Path, help="measure the Tokenmill of another checkout as well")
    parser.add_argument("--markdown", default="", help="file to write the table of ratios to")
    return parser.parse_args()


def _contenders(engine: str, other_checkout: Path | None) -> list[Server]:
    """Ours first, then that of another checkout if one is given, then the peers that are installed."""
    model = f"smollm2={packaged_gguf() if engine == 'gguf' else smollm2_folder()}"
    arguments = () if engine == "gguf" else ("--device", "cpu", "--dtype", "float32")
    ours = [servers.tokenmill("tokenmill", model, *arguments)]
    if other_checkout is not None:
        name = f"tokenmill in {other_checkout.name}"
        ours.append(servers.tokenmill(name, model, *arguments, checkout=other_checkout.resolve()))
    return ours + _peers(engine)


def _peers(engine: str) -> list[Server]:
    gguf = packaged_gguf()
    if engine == "gguf":
        found = [
            servers.llama_server(gguf),
            servers.llama_cpp_server(gguf),
        ]
    else:
        folder = smollm2_folder()
        found = [
            servers.transformers_serve(folder, batching=True),
            servers.transformers_serve(folder, batching=False),
        ]
    return [server for server in found if server is not None]


def _is_wanted(server: Server, only: str) -> bool:
    return not only or any(part in server.name for part in only.split(","))


def _slots_for(clients: int) -> int:
    return 16 if clients > 8 else 8


def _measure(contenders: list[Server], shape: Shape, counts: list[int], options: argparse.Namespace) -> list[Measured]:
    measured = []
    with contextlib.ExitStack() as stack:
        up = [(server, *stack.enter_context(servers.running(server, shape))) for server in contenders]
        for server, url, _ in up:
            # Lazy set-up is over after this, and the shared beginning of the prompts cached where a server does that.
            measure(url, server.model, clients=2, requests=1, max_tokens=options.max_tokens, offset=1000)
        for turn, (number, count) in enumerate(itertools.product(range(options.rounds), counts)):
            for server, url, process in up:
                with servers.metered(process) as cost:
                    load = measure(
                        url,
                        server.model,
                        clients=count,
                        requests=options.requests,
                        max_tokens=options.max_tokens,
                        # No prompt comes twice: it would measure who remembers the last count's answers longest.
                        offset=turn * options.requests,
                    )
                _show(server, load)
                measured.append(Measured(server.name, number, load, cost))
    return measured


def _show(server: Server, load: LoadResult) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {server.name}, {load.clients} clients: {load.tokens_per_s:.1f} tok/s, "
        f"ttft {load.ttft_p50 * 1000:.0f}/{load.ttft_p95 * 1000:.0f} ms, "
        f"gap {load.gap_p50 * 1000:.0f}/{load.gap_p99 * 1000:.0f} ms, {load.tokens} tokens",
        flush=True,
    )


def _save(engine: str, measured: list[Measured]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{engine}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps([dataclasses.asdict(item) for item in measured], indent=1))
    print(f"every figure: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def ratios(measured: list[Measured], ours: str) -> str:
    """A Markdown table of ours over each peer, per number of clients; medians over the rounds.

    Above 1 is better for us in tokens/s; below 1 is better for us in everything else.
    """
    mine = {(item.load.clients, item.round): item for item in measured if item.server == ours}
    pairs: dict[tuple[str, int], list[tuple[Measured, Measured]]] = {}
    for item in measured:
        if item.server != ours:
            own = mine[item.load.clients, item.round]
            pairs.setdefault((item.server, item.load.clients), []).append((own, item))
    lines = [f"Machine: {os.cpu_count()} cores. Ours divided by the peer's, same run.", ""]
    lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    for (peer, clients), rounds in pairs.items():
        cells = [
            _median(own.load.tokens_per_s / other.load.tokens_per_s for own, other in rounds),
            _median(own.load.ttft_p50 / other.load.ttft_p50 for own, other in rounds),
            _median(own.load.ttft_p95 / other.load.ttft_p95 for own, other in rounds),
            _median(((own.load.ttft_p50 - other.load.ttft_p50) * 1000 for own, other in rounds), "+.0f"),
            _median(own.load.gap_p99 / (other.load.gap_p99 or 1.0) for own, other in rounds),
            _median(own.cost.peak_bytes / (other.cost.peak_bytes or 1) for own, other in rounds),
            _median(_cpu_per_token(own) / (_cpu_per_token(other) or 1.0) for own, other in rounds),
        ]
        lines.append(_row([peer, str(clients), *cells]))
    lines += ["", "CPU seconds of our processes, as shares of their sum:", ""]
    lines += ["| clients | worker | front end | Redis | launcher |", "| --- | --- | --- | --- | --- |"]
    for clients in sorted({clients for clients, _ in mine}):
        used = collections.Counter[str]()
        for item in (item for (count, _), item in mine.items() if count == clients):
            used.update(item.cost.cpu_s)
        total = sum(used.values()) or 1.0
        lines.append(_row([str(clients), *(f"{used[name] / total:.1%}" for name in ("worker", "api", "redis", "up"))]))
    return "\n".join(lines) + "\n"


def _median(values: Iterable[float], form: str = ".2f") -> str:
    return format(statistics.median(values), form)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cpu_per_token(item: Measured) -> float:
    return sum(item.cost.cpu_s.values()) / max(1, item.load.tokens)


if __name__ == "__main__":
    main()
