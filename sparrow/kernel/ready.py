"""Ready messages that wait for nobody: per priority and stream a set of offsets.

Handing over takes the highest priority first; within one priority the streams take turns, and within
a stream the lowest offsets go first, so a retried message goes before what came after it. A plain
subscription has one level and one stream: putting and taking are a few bitmap operations, whatever
the number of messages.
"""

from __future__ import annotations

from collections.abc import Collection

from pyroaring import BitMap64

from sparrow.kernel.offsets import take_first
from sparrow.model.message import StreamId

Taken = list[tuple[StreamId, BitMap64]]


class ReadySet:
    """Offsets ready to be handed over, by priority and stream."""

    __slots__ = ("_levels", "_order", "_turn", "count")

    def __init__(self) -> None:
        self._levels: dict[int, dict[StreamId, BitMap64]] = {}
        self._order: list[int] = []
        """The priorities in use, highest first."""
        self._turn = 0
        self.count = 0

    def put(self, stream: StreamId, offsets: BitMap64, priority: int = 0) -> None:
        """Make these ready. The set is owned by this object from now on."""
        if not offsets:
            return
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = {}
            self._order = sorted(self._levels, reverse=True)
        known = level.get(stream)
        if known is None:
            level[stream] = offsets
            self.count += len(offsets)
            return
        self.count -= len(known)
        known |= offsets
        self.count += len(known)

    def count_in(self, streams: Collection[StreamId]) -> int:
        """How many of some streams are ready."""
        return sum(len(known) for x in self._levels.values() for s, known in x.items() if s in streams)

    def take(self, count: int, streams: Collection[StreamId] | None = None) -> Taken:
        """Remove and return up to ``count`` messages, of the named streams if given."""
        taken: Taken = []
        for priority in list(self._order):
            if count <= 0:
                break
            count = self._take_level(priority, count, streams, taken)
        return taken

    def take_only(self, stream: StreamId, wanted: BitMap64, count: int) -> BitMap64:
        """Remove and return up to ``count`` of the ``wanted`` messages of one stream."""
        found = BitMap64()
        for level in self._levels.values():
            if stream in level:
                found |= level[stream] & wanted
        found = take_first(found, count)
        self.discard(stream, found)
        return found

    def discard(self, stream: StreamId, offsets: BitMap64) -> BitMap64:
        """Make these not ready; returns those that were."""
        gone = BitMap64()
        for priority in list(self._order):
            known = self._levels[priority].get(stream)
            if known is None:
                continue
            some = known & offsets
            if some:
                known -= some
                gone |= some
                self.count -= len(some)
                self._prune(priority, stream)
        return gone

    def clear(self, stream: StreamId) -> None:
        """Forget a stream."""
        for priority in list(self._order):
            known = self._levels[priority].get(stream)
            if known is not None:
                self.count -= len(known)
                known.clear()
                self._prune(priority, stream)

    def holds(self, stream: StreamId, offset: int) -> bool:
        """Whether a message is ready."""
        return any(stream in x and offset in x[stream] for x in self._levels.values())

    def _take_level(
        self, priority: int, count: int, streams: Collection[StreamId] | None, taken: Taken
    ) -> int:
        level = self._levels[priority]
        order = list(level) if streams is None else [s for s in level if s in streams]
        if not order:
            return count
        first = self._turn % len(order)
        self._turn += 1
        for stream in order[first:] + order[:first]:
            if count <= 0:
                break
            known = level[stream]
            if len(known) <= count:
                some = known
                del level[stream]
                self._prune(priority, stream)
            else:
                some = take_first(known, count)
            taken.append((stream, some))
            count -= len(some)
            self.count -= len(some)
        return count

    def _prune(self, priority: int, stream: StreamId) -> None:
        level = self._levels[priority]
        if stream in level and not level[stream]:
            del level[stream]
        if not level:
            del self._levels[priority]
            self._order.remove(priority)
