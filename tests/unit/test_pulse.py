"""The pulse: what a worker says of its last minute."""

import pytest

from workers.pulse import MOST_SAMPLES, WINDOW_S, Beat, Pulse


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    return Pulse(monotonic=clock)


def test_a_worker_that_has_done_nothing_says_nothing(pulse: Pulse, clock: Clock) -> None:
    assert pulse.read() == Beat(0.0, 0.0, 0.0)
    clock.now += 5
    assert pulse.read() == Beat(0.0, 0.0, 0.0)


def test_the_rate_is_that_of_the_last_minute_or_of_a_younger_worker_s_whole_life(pulse: Pulse, clock: Clock) -> None:
    clock.now += 10
    pulse.tokens(clock.now, 60)
    pulse.tokens(clock.now, 40)
    assert pulse.read().tokens_per_s == pytest.approx(10)

    clock.now += WINDOW_S - 1
    pulse.tokens(clock.now, 20)
    assert pulse.read().tokens_per_s == pytest.approx(2)

    clock.now += 1
    assert pulse.read().tokens_per_s == pytest.approx(20 / WINDOW_S)


def test_the_times_are_medians_of_the_last_minute(pulse: Pulse, clock: Clock) -> None:
    for seconds in (9.0, 9.0, 9.0):
        pulse.first_token(clock.now, seconds)
        pulse.gap(clock.now, seconds)
    clock.now += WINDOW_S
    for seconds in (0.1, 0.2, 0.9):
        pulse.first_token(clock.now, seconds)
        pulse.gap(clock.now, seconds / 10)

    beat = pulse.read()

    assert beat.first_token_p50_s == pytest.approx(0.2)
    assert beat.token_gap_p50_s == pytest.approx(0.02)


def test_what_is_kept_is_bounded_and_of_the_newest(pulse: Pulse, clock: Clock) -> None:
    for _ in range(MOST_SAMPLES):
        pulse.gap(clock.now, 1.0)
    for _ in range(MOST_SAMPLES):
        pulse.gap(clock.now, 0.5)

    assert pulse.read().token_gap_p50_s == pytest.approx(0.5)
