"""Which segments there are: an index by stream and offset over what the catalog lists."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from sparrow.model.message import StreamId
from sparrow.store.catalog_tables import Segment

_first = attrgetter("first_offset")


class SegmentIndex:
    """The lake's segments in memory."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self._streams: dict[StreamId, list[Segment]] = {}
        self.size_bytes = 0
        self.count = 0
        for segment in segments:
            self.add(segment)

    def __iter__(self) -> Iterator[Segment]:
        for listed in self._streams.values():
            yield from listed

    def add(self, segment: Segment) -> None:
        insort(self._streams.setdefault(segment.stream, []), segment, key=_first)
        self.size_bytes += segment.size_bytes
        self.count += 1

    def drop(self, segment: Segment) -> None:
        self._streams[segment.stream].remove(segment)
        self.size_bytes -= segment.size_bytes
        self.count -= 1

    def forget_topic(self, topic_id: int) -> None:
        for stream in [stream for stream in self._streams if stream.topic_id == topic_id]:
            for segment in list(self._streams[stream]):
                self.drop(segment)
            del self._streams[stream]

    def of(self, stream: StreamId) -> list[Segment]:
        """The stream's segments in offset order."""
        return self._streams.get(stream, [])

    def find(self, stream: StreamId, offset: int) -> Segment | None:
        """The segment that holds ``offset``, or the next one when it lies in a gap."""
        listed = self.of(stream)
        place = bisect_right(listed, offset, key=_first) - 1
        if place >= 0 and offset < listed[place].end_offset:
            return listed[place]
        return listed[place + 1] if place + 1 < len(listed) else None
