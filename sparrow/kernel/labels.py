"""Which of many things have a name of their own in the metrics, and what all others come to together.

A label costs memory in whoever scrapes, so their number is bounded: the first ones have one, the rest are
summed up as ``_other``. A counter must not fall, so a thing that was summed up stays so, also when a place
becomes free: that goes to the next new one. What a thing had counted when it went stays in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OTHER = "_other"


class Labels:
    """Who has a place; things go by ids that are never used again."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._own: set[int] = set()
        self._rest: set[int] = set()

    def update(self, alive: Iterable[int]) -> None:
        """Who is there now, oldest first."""
        order = list(alive)
        present = set(order)
        self._own &= present
        self._rest &= present
        for each in order:
            if each not in self._own and each not in self._rest:
                (self._own if len(self._own) < self._count_max else self._rest).add(each)

    def has(self, each: int) -> bool:
        """Whether it has a name of its own."""
        return each in self._own


class Remainder:
    """Counters of all that have no label, as one sum that never falls."""

    def __init__(self, width: int) -> None:
        self.totals = [0] * width
        self._last: dict[int, Sequence[int]] = {}
        self._zero = (0,) * width

    def update(self, found: dict[int, Sequence[int]]) -> None:
        """What each of them has counted by now."""
        for each, values in found.items():
            before = self._last.get(each, self._zero)
            for place, value in enumerate(values):
                self.totals[place] += max(0, value - before[place])
        self._last = found
