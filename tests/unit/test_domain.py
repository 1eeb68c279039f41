"""The ranges that a request is checked against when a worker reads it."""

from dataclasses import fields

from shared import domain
from shared.settings import Limits


def test_whatever_a_front_end_can_be_set_to_let_through_a_worker_takes() -> None:
    most = {item.name: item.metadata["at_most"] for item in fields(Limits)}

    assert most["max_n"] <= domain.MOST_CHOICES
    assert most["max_choices"] <= domain.MOST_CHOICES_IN_ALL
    assert most["max_messages"] <= domain.MOST_MESSAGES
    assert most["max_stop"] <= domain.MOST_STOPS
    assert most["max_top_logprobs"] <= domain.MOST_LOGPROBS
