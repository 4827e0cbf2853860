"""Shedding: which messages of a batch are kept when a topic takes only a part.

A ``Thin`` is a rule that a shell applies to the columns of a batch: keep what has a higher
priority than ``priority``; of those that have exactly it keep ``share``; drop the rest. Without a
priority the share holds for all. The share is taken by hash, of the message's number among all that
were offered to the topic, or of numbers that the shell brings along (of keys, say), so the same
numbers always get the same answer.

``PriorityMix`` remembers which priorities came lately. A threshold that rises by the scale alone would
drop nothing and then everything, since most messages have the same priority; by the mix it drops
the wanted share, whatever the priorities are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.kernel import sampling
from sparrow.model.limits import PRIORITY_MAX, PRIORITY_MIN

PRIORITY_DEFAULT = 0
MIX_SIZE = 10_000
"""Messages after which the older half of the mix is forgotten."""


class Thin(NamedTuple):
    """Which messages of a batch to keep."""

    share: float
    """Of those at ``priority``, or of all."""
    priority: int | None = None
    """What is above is kept, what is below is dropped."""
    first_number: int = 0
    """The number of the first message of the batch among all that were offered."""

    def mask(self, count: int, priorities: Any = None, numbers: Any = None) -> Any:
        """Which of ``count`` messages are kept, as an Arrow array of truth values.

        ``priorities`` is their column, ``None`` when all have the default; null is the default too.
        """
        if numbers is None:
            numbers = sampling.numbers_of(self.first_number, self.first_number + count)
        sampled = sampling.mask(numbers, self.share)
        if self.priority is None:
            return sampled
        if priorities is None:
            priorities = pa.repeat(pa.scalar(PRIORITY_DEFAULT, pa.int8()), count)
        priorities = pc.fill_null(priorities, PRIORITY_DEFAULT)
        is_level = pc.equal(priorities, self.priority)
        return pc.or_(pc.greater(priorities, self.priority), pc.and_(is_level, sampled))


class PriorityMix:
    """How common each priority is lately."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def note(self, count: int, priorities: Mapping[int, int] | None) -> None:
        """A batch was offered: how many of each priority; those not named have the default."""
        named = 0
        for priority, each in (priorities or {}).items():
            assert PRIORITY_MIN <= priority <= PRIORITY_MAX, f"no such priority: {priority}"
            self._counts[priority] = self._counts.get(priority, 0.0) + each
            named += each
        if count > named:
            self._counts[PRIORITY_DEFAULT] = self._counts.get(PRIORITY_DEFAULT, 0.0) + count - named
        self._total += count
        if self._total > MIX_SIZE:
            self._fade()

    def thin(self, shed: float, first_number: int) -> Thin:
        """The rule that drops about the share ``shed`` of such messages, the lowest first."""
        left = shed * self._total
        for priority in sorted(self._counts):
            count = self._counts[priority]
            if left < count:
                return Thin(1.0 - left / count, priority, first_number)
            left -= count
        return Thin(0.0, PRIORITY_MAX, first_number)

    def _fade(self) -> None:
        kept = MIX_SIZE / 2 / self._total
        self._counts = {p: c * kept for p, c in self._counts.items() if c * kept >= 0.01}
        self._total = sum(self._counts.values())
