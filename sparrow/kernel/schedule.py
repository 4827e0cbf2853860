"""Messages that wait for a moment: ``deliver_at``, the next try after a failure, the time to live.

A timetable maps moments to messages, exactly: nothing is early, and what is due is found by one heap
look-up. Messages with the same moment (a batch that failed together) share one entry. Cancelling is
immediate; the heap's leftover is skipped when it surfaces.

Times are those of the log and of facts, so a timetable is rebuilt after a crash by reading the log
from the cursor again; it is not stored. Its owner bounds it (``max_scheduled``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from sparrow.model.message import StreamId

NEVER_US = 2**63 - 1


class Timetable:
    """Which message is due when."""

    __slots__ = ("_due", "_heap", "_slots")

    def __init__(self) -> None:
        self._due: dict[StreamId, dict[int, int]] = {}
        self._slots: dict[int, list[tuple[StreamId, int]]] = {}
        self._heap: list[int] = []

    @property
    def count(self) -> int:
        """How many messages wait."""
        return sum(map(len, self._due.values()))

    def put(self, stream: StreamId, offsets: Iterable[int], due_at_us: int) -> None:
        """These are due at a moment; an earlier entry of theirs no longer counts."""
        slot = self._slots.get(due_at_us)
        if slot is None:
            slot = self._slots[due_at_us] = []
            heapq.heappush(self._heap, due_at_us)
        due = self._due.setdefault(stream, {})
        for offset in offsets:
            due[offset] = due_at_us
            slot.append((stream, offset))

    def due_at_us(self, stream: StreamId, offset: int) -> int | None:
        """When a message is due, if it waits here."""
        due = self._due.get(stream)
        return None if due is None else due.get(offset)

    def take_due(self, now_us: int) -> list[tuple[StreamId, int]]:
        """Remove and return what is due by ``now_us``, earliest first."""
        taken: list[tuple[StreamId, int]] = []
        while self._heap and self._heap[0] <= now_us:
            moment = heapq.heappop(self._heap)
            for stream, offset in self._slots.pop(moment):
                if self.due_at_us(stream, offset) == moment:
                    self._remove(stream, offset)
                    taken.append((stream, offset))
        return taken

    def cancel(self, stream: StreamId, offsets: Iterable[int]) -> None:
        """These no longer wait."""
        due = self._due.get(stream)
        if due is None:
            return
        for offset in offsets:
            due.pop(offset, None)
        if not due:
            del self._due[stream]

    def clear(self, stream: StreamId) -> None:
        """Forget a stream."""
        self._due.pop(stream, None)

    def waiting(self, stream: StreamId) -> Iterable[int]:
        """The messages of a stream that wait here."""
        return self._due.get(stream, ())

    def next_due_us(self) -> int:
        """When ``take_due`` will next find something."""
        while self._heap:
            moment = self._heap[0]
            if any(self.due_at_us(*message) == moment for message in self._slots[moment]):
                return moment
            del self._slots[heapq.heappop(self._heap)]
        return NEVER_US

    def _remove(self, stream: StreamId, offset: int) -> None:
        due = self._due[stream]
        del due[offset]
        if not due:
            del self._due[stream]
