"""Causal delivery: a message waits until this subscription is done with those it depends on.

A message names the ids of earlier messages. What the subscription does not read (another topic) or
has filtered out cannot be waited for and counts as done; so does a message that expired or went to
the dead letters, because it will not come any more. Ids exist only after their message was stored,
so dependencies point back in time and honest publishers cannot build a circle.

The object holds only who waits for whom. What is done is told to it, message by message.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap64

from sparrow.kernel.offsets import to_list
from sparrow.model.message import MessageId, StreamId

Place = tuple[StreamId, int]


class Dependencies:
    """Who waits for whom."""

    __slots__ = ("_missing", "_waiters")

    def __init__(self) -> None:
        self._waiters: dict[StreamId, dict[int, list[Place]]] = {}
        self._missing: dict[Place, set[Place]] = {}

    @property
    def count(self) -> int:
        """How many messages wait."""
        return len(self._missing)

    def add(self, waiter: Place, needs: Iterable[MessageId]) -> None:
        """The message waits until all that it needs are done."""
        missing = {(need.stream, need.offset) for need in needs} - {waiter}
        if not missing:
            return
        self._missing[waiter] = missing
        for stream, offset in missing:
            self._waiters.setdefault(stream, {}).setdefault(offset, []).append(waiter)

    def missing(self, waiter: Place) -> list[Place]:
        """What a message still waits for, in order."""
        return sorted(self._missing.get(waiter, ()))

    def resolve(self, stream: StreamId, done: BitMap64) -> list[Place]:
        """These are done; returns the messages that wait no longer."""
        waiters = self._waiters.get(stream)
        if waiters is None:
            return []
        freed: list[Place] = []
        for offset in to_list(BitMap64(waiters) & done):
            for waiter in waiters.pop(offset):
                freed += self._settle(waiter, (stream, offset))
        if not waiters:
            del self._waiters[stream]
        return freed

    def cancel(self, waiter: Place) -> None:
        """The message is gone and waits no longer."""
        self._missing.pop(waiter, None)

    def clear(self, stream: StreamId) -> list[Place]:
        """Forget a stream's own waiters; what waited for it is freed, for it will not come."""
        for waiter in [place for place in self._missing if place[0] == stream]:
            del self._missing[waiter]
        waited = self._waiters.get(stream)
        return self.resolve(stream, BitMap64(waited)) if waited else []

    def _settle(self, waiter: Place, done: Place) -> list[Place]:
        missing = self._missing.get(waiter)
        if missing is None:
            return []
        missing.discard(done)
        if missing:
            return []
        del self._missing[waiter]
        return [waiter]
