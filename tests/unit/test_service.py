"""When the launcher starts a child again, and when it gives up."""

import pytest

from deploy.service import Change, Service
from shared.errors import StartupError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Puppet:
    """A child that lives until the test says otherwise."""

    pid = 1

    def __init__(self) -> None:
        self.dead = False

    def is_dead(self) -> bool:
        return self.dead

    def end(self) -> str:
        return "was killed by SIGKILL"

    def terminate(self) -> None:
        self.dead = True

    def kill(self) -> None:
        self.dead = True


class Stage:
    """A service with puppets for children, and a clock that stands still."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.children: list[Puppet] = []
        self.is_ready = True
        self.service = Service("worker x", self._start, lambda _pid: self.is_ready, monotonic=self.clock)

    def _start(self) -> Puppet:
        self.children.append(Puppet())
        return self.children[-1]

    def start(self) -> None:
        assert self.service.look() is None
        assert self.service.look() is Change.READY

    def die(self) -> None:
        self.children[-1].dead = True
        assert self.service.look() is Change.DIED

    def come_back(self) -> None:
        self.clock.now += self.service.wait_s()
        assert self.service.look() is None
        assert self.service.look() is Change.BACK


def test_a_child_is_ready_once_it_says_so() -> None:
    stage = Stage()
    stage.is_ready = False
    assert [stage.service.look() for _ in range(3)] == [None, None, None]
    assert not stage.service.ready
    stage.is_ready = True
    assert stage.service.look() is Change.READY
    assert stage.service.look() is None
    assert len(stage.children) == 1


def test_a_child_that_dies_before_it_is_ready_is_not_started_again() -> None:
    stage = Stage()
    stage.is_ready = False
    stage.service.look()
    stage.children[0].dead = True
    with pytest.raises(StartupError, match="worker x was killed by SIGKILL before it was ready"):
        stage.service.look()


def test_a_child_that_was_ready_is_started_again_after_a_pause() -> None:
    stage = Stage()
    stage.start()
    stage.die()
    assert not stage.service.ready
    assert stage.service.wait_s() == 0.5
    assert stage.service.look() is None
    assert len(stage.children) == 1
    stage.come_back()
    assert len(stage.children) == 2


def test_the_pauses_grow() -> None:
    stage = Stage()
    stage.start()
    pauses = []
    for _ in range(4):
        stage.die()
        pauses.append(stage.service.wait_s())
        stage.come_back()
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_the_fifth_death_within_a_minute_is_the_last() -> None:
    stage = Stage()
    stage.start()
    for _ in range(4):
        stage.die()
        stage.come_back()
    with pytest.raises(StartupError, match="the 5th time within 60 s; giving up"):
        stage.die()


def test_deaths_that_are_far_apart_are_forgiven() -> None:
    stage = Stage()
    stage.start()
    for _ in range(10):
        stage.die()
        assert stage.service.backoff_s == 0.5
        stage.come_back()
        stage.clock.now += 61
