"""How long syncs took, as a histogram. Written by the journal's thread, read by anybody: counts only grow."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper ends: a good disk takes around a millisecond, a bad one tens, and a stalled one seconds."""


class SyncTimes:
    """See the module's text."""

    __slots__ = ("_counts", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """A sync took so long."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds
        self.count += 1

    def buckets(self) -> tuple[int, ...]:
        """How many took up to each of the bounds, and how many longer than all of them."""
        return tuple(self._counts)
