"""The hot window: where in the journal each stream's batches lie, until they are sealed.

Per stream three parallel arrays, 24 bytes a batch, so that a long unsealed tail of tiny batches stays
small in memory. A batch enters when its publisher may have the receipt and leaves when the segment that
holds it has been entered in the catalog.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from sparrow.model.message import StreamId
from sparrow.store.entry import Header


class Place(NamedTuple):
    """Where a batch lies."""

    base_offset: int
    file_number: int
    position: int


class HotStream:
    """One stream: its offsets and the places of its unsealed batches, in offset order."""

    __slots__ = (
        "_bases",
        "_files",
        "_positions",
        "end_offset",
        "next_offset",
        "sealed_end",
        "start_offset",
    )

    def __init__(self, start_offset: int = 0, sealed_end: int = 0) -> None:
        self.start_offset = start_offset
        self.sealed_end = sealed_end
        self.end_offset = sealed_end
        """Readable up to here."""
        self.next_offset = sealed_end
        """The next message gets this one; ahead of ``end_offset`` while a group is being written."""
        self._bases = array("q")
        self._files = array("q")
        self._positions = array("q")

    def __len__(self) -> int:
        return len(self._bases)

    @property
    def first_hot_offset(self) -> int:
        """The first offset that is read from the journal; the end when nothing is hot."""
        return self._bases[0] if self._bases else self.end_offset

    def add(self, header: Header) -> None:
        """A batch has become readable."""
        assert header.base_offset >= self.end_offset, "batches enter in offset order"
        self._bases.append(header.base_offset)
        self._files.append(header.file_number)
        self._positions.append(header.position)
        self.end_offset = header.end_offset
        if self.next_offset < self.end_offset:
            self.next_offset = self.end_offset  # Only in recovery: later the journal's thread owns it.

    def skip_to(self, end_offset: int) -> None:
        """The offsets up to here are taken, though their messages cannot be read."""
        assert end_offset >= self.end_offset, "the end of a stream never goes back"
        self.end_offset = end_offset
        self.next_offset = max(self.next_offset, end_offset)

    def places_from(self, offset: int) -> Iterator[Place]:
        """The batches from the one that holds ``offset`` (or the next one) on."""
        start = max(0, bisect_right(self._bases, offset) - 1)
        for index in range(start, len(self._bases)):
            yield Place(self._bases[index], self._files[index], self._positions[index])

    def places_through(self, file_number: int) -> list[Place]:
        """The batches that lie in files up to ``file_number``."""
        count = bisect_right(self._files, file_number)
        return [Place(self._bases[i], self._files[i], self._positions[i]) for i in range(count)]

    def drop_files_through(self, file_number: int, sealed_end: int) -> None:
        """The batches of files up to ``file_number`` are served from the lake from now on."""
        count = bisect_right(self._files, file_number)
        del self._bases[:count], self._files[:count], self._positions[:count]
        self.sealed_end = max(self.sealed_end, sealed_end)

    def drop_before(self, offset: int) -> None:
        """Retention has moved the start."""
        assert offset <= self.sealed_end, "only sealed messages are dropped"
        self.start_offset = max(self.start_offset, offset)


class HotWindow:
    """All streams of the store."""

    def __init__(self) -> None:
        self._streams: dict[StreamId, HotStream] = {}

    def open(self, stream: StreamId, start_offset: int = 0, sealed_end: int = 0) -> HotStream:
        self._streams[stream] = found = HotStream(start_offset, sealed_end)
        return found

    def get(self, stream: StreamId) -> HotStream | None:
        return self._streams.get(stream)

    def forget_topic(self, topic_id: int) -> None:
        for stream in [stream for stream in self._streams if stream.topic_id == topic_id]:
            del self._streams[stream]

    def __iter__(self) -> Iterator[tuple[StreamId, HotStream]]:
        return iter(self._streams.items())
