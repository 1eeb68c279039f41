"""`python -m bench.soak`: thousands of requests while workers die and clients leave, and nothing may be lost.

Exits with 1, and says what is wrong, when anything was lost, wrong, told twice or left behind.
"""

import argparse
import sys
from pathlib import Path

from bench.soak.run import Shape, soak


def main() -> None:
    """Run a soak and print its report."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=500, help="requests before the first fault, not counted")
    parser.add_argument("--clients", type=int, default=32, help="how many ask at once")
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=1, help="what is asked, who leaves and who is hit")
    parser.add_argument("--markdown", type=Path, help="write the section of docs/reliability.md here")
    options = parser.parse_args()
    shape = Shape(
        requests=options.requests,
        warm_up=options.warm_up,
        clients=options.clients,
        kill_every_s=options.kill_every,
        seed=options.seed,
    )
    report = soak(shape)
    print(report.text())
    if options.markdown:
        options.markdown.write_text(report.markdown())
    sys.exit(bool(report.complaints))


if __name__ == "__main__":
    main()
