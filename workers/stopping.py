"""Stop strings: matched on text, across tokens, with nothing of them let out."""

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string.

    The first is the one that is complete first, and the longest of those that end together: so the
    cut does not depend on the pieces in which the text comes. What could still turn out to be the
    beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be let out now. After a match nothing more is."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        self._held += text
        found = [(index + len(stop), index) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            out, self._held = self._held[:start], ""
            return out
        keep = max(self._overlap(stop) for stop in self._stops)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return out

    def flush(self) -> str:
        """What was held back, when the answer ends otherwise."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """The length of the longest end of the held text that a stop string begins with."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
