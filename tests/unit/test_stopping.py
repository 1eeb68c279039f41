"""Stop strings: found on text, whatever the pieces it comes in, and never let out."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.stopping import StopMatcher

TEXT = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def cut_at_first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first; None if none ever is."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@given(TEXT, STOPS, CUTS)
def test_the_text_is_cut_before_the_first_stop_string_however_it_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)

    out = "".join(map(matcher.push, pieces_of(text, cuts)))

    expected = cut_at_first_stop(text, stops)
    assert matcher.stopped == (expected is not None)
    assert out + matcher.flush() == (text if expected is None else expected)


@given(TEXT, STOPS, CUTS)
def test_what_was_let_out_never_holds_a_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)

    out = "".join(map(matcher.push, pieces_of(text, cuts)))

    assert not any(stop in out for stop in stops)


@given(TEXT, STOPS, CUTS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces_of(text, cuts):
        out += matcher.push(piece)
        if matcher.stopped:
            return

    held = text[len(out) :]
    assert out + held == text
    assert not held or any(stop.startswith(held) for stop in stops)


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    matcher = StopMatcher(["c", "bc"])

    assert matcher.push("abcd") == "a"


def test_a_stop_string_inside_a_longer_one_counts_as_soon_as_it_is_there() -> None:
    whole, split = StopMatcher(["abcd", "c"]), StopMatcher(["abcd", "c"])

    assert whole.push("xabcd") == "xab"
    assert "".join(map(split.push, "xabcd")) == "xab"


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_text_without_a_stop_string_passes(stops: list[str]) -> None:
    matcher = StopMatcher(stops)

    assert matcher.push("nothing here") + matcher.push("") == "nothing here"
    assert matcher.flush() == ""


def test_after_a_match_nothing_comes_out() -> None:
    matcher = StopMatcher(["."])
    matcher.push("end.")

    assert matcher.push("more") == ""
    assert matcher.flush() == ""
