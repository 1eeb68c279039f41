"""The watchdog: it gives up on an engine that hangs, and on no other."""

from dataclasses import dataclass, field

import pytest

from workers.watchdog import FIRST_STEP_LIMIT_S, LEAST_LIMIT_S, LONGEST_STEPS, TICK_S, Watchdog


@dataclass
class Engine:
    """What the watchdog sees of one."""

    in_flight: int = 1
    steps: int = 1
    longest_step_s: float = 0.0


@dataclass
class Watch:
    """A watchdog, and when it gave up."""

    engine: Engine
    limit_s: float = 0.0
    gave_up: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.engine, self.gave_up.append, limit_s=self.limit_s)  # type: ignore[arg-type]
        self.watchdog.look()

    def pass_by(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.watchdog.look()


@pytest.mark.parametrize(
    ("engine", "limit_s", "expected"),
    [
        (Engine(), 0.0, LEAST_LIMIT_S),
        (Engine(longest_step_s=3.0), 0.0, 3.0 * LONGEST_STEPS),
        (Engine(steps=0), 0.0, FIRST_STEP_LIMIT_S),
        (Engine(longest_step_s=3.0), 5.0, 5.0),
    ],
)
def test_an_engine_that_completes_no_step_is_given_up_after_its_limit(
    engine: Engine, limit_s: float, expected: float
) -> None:
    watch = Watch(engine, limit_s)

    watch.pass_by(expected - 1)
    assert not watch.gave_up
    watch.pass_by(2)
    assert watch.gave_up


def test_an_engine_with_nothing_to_do_or_that_goes_on_is_left_alone() -> None:
    idle, busy = Watch(Engine(in_flight=0)), Watch(Engine())

    idle.pass_by(10 * LEAST_LIMIT_S)
    for _ in range(10):
        busy.pass_by(LEAST_LIMIT_S - 1)
        busy.engine.steps += 1

    assert not idle.gave_up
    assert not busy.gave_up


def test_a_watchdog_that_is_stopped_looks_no_more() -> None:
    watch = Watch(Engine())
    watch.watchdog.stop()

    watch.watchdog.run()

    assert not watch.gave_up
