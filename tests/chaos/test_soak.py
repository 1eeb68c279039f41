"""A short soak: hundreds of requests while workers die and clients leave; `make soak` is the long one."""

from bench.soak.clients import Manner
from bench.soak.run import Shape, soak


def test_a_short_soak_loses_repeats_and_leaves_behind_nothing() -> None:
    report = soak(Shape(requests=400, warm_up=100, clients=24, kill_every_s=1.0, seed=3))

    assert not report.complaints, report.text()
    assert report.tally.requests == 400
    assert report.blows.total() >= 3
    assert report.ledger.carried_on > 0
    assert report.tally.manners[Manner.LEAVE] > 0
    assert report.tally.manners[Manner.RESUME] > 0
