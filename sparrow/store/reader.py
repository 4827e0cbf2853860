"""Reading the log of the embedded store: from the journal while it is hot, from the lake when it is sealed.

A read is sent to one of the two by its offset alone: below ``sealed_end`` to a segment, the rest to the
journal. Both sides move in one step on the event loop, so no message is seen twice or not at all. Segments
are decoded in a thread of their own; a segment that retention takes meanwhile is looked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model.errors import DataDamaged, OffsetOutOfRange, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.segment import BatchPlace, Measured
from sparrow.model.topic import Topic
from sparrow.store import batch as batches
from sparrow.store.catalog_tables import Segment
from sparrow.store.disk import Disk
from sparrow.store.hot import HotStream, HotWindow
from sparrow.store.journalfile import JournalFile
from sparrow.store.lake import GroupCache
from sparrow.store.ports import Bounds, LogBatch
from sparrow.store.segments import SegmentIndex

_CACHE_BYTES = 32 * 1024 * 1024  # decoded row groups: eight of the default size
_CACHE_READERS = 64
_TOLD_BATCHES_MAX = 10_000
_MEASURED_BATCHES_MAX = 20_000  # of the journal, looked at in one go: some 50 ms


class LogReader:
    """The reading side of a store; see the module's text."""

    def __init__(
        self,
        hot: HotWindow,
        index: SegmentIndex,
        files: Callable[[], Mapping[int, JournalFile]],
        path: Callable[[Segment], Path],
        on_damage: Callable[[DataDamaged], None],
    ) -> None:
        self._hot = hot
        self._index = index
        self._files = files
        self._path = path
        self._on_damage = on_damage
        self._cache = GroupCache(_CACHE_BYTES, _CACHE_READERS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-lake")

    def bounds(self, stream: StreamId) -> Bounds:
        hot = self.stream(stream)
        return Bounds(hot.start_offset, hot.end_offset)

    async def read(
        self, stream: StreamId, offset: int, max_bytes: int, *, is_whole: bool = False
    ) -> list[LogBatch]:
        hot = self.stream(stream)
        if not hot.start_offset <= offset <= hot.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is not between {hot.start_offset} and {hot.end_offset}",
                start_offset=hot.start_offset,
                end_offset=hot.end_offset,
            )
        while True:
            segment = self._index.find(stream, offset) if offset < hot.sealed_end else None
            if segment is None:
                return self._read_hot(stream, hot, offset, max_bytes, is_whole)
            found = await self._read_lake(stream, segment, offset, max_bytes, is_whole)
            if found or segment.end_offset <= offset:
                return found
            offset = segment.end_offset  # A gap of a compacted segment reaches to its end.

    async def _read_lake(
        self, stream: StreamId, segment: Segment, offset: int, max_bytes: int, is_whole: bool
    ) -> list[LogBatch]:
        path = self._path(segment)
        try:
            found: list[LogBatch] = await self._in_thread(
                self._read_segment, segment, path, offset, max_bytes, is_whole
            )
            return found
        except DataDamaged:
            if self._index.find(stream, offset) is not segment:
                start = self.stream(stream).start_offset
                return await self.read(stream, max(offset, start), max_bytes, is_whole=is_whole)
            raise

    def _read_hot(
        self, stream: StreamId, hot: HotStream, offset: int, max_bytes: int, is_whole: bool
    ) -> list[LogBatch]:
        found: list[LogBatch] = []
        size = 0
        for place in hot.places_from(offset):
            if size >= max_bytes:
                break
            file = self._files()[place.file_number]
            header = file.header(place.position)
            if header.end_offset <= offset:
                continue
            table = batches.to_table_form(
                batches.decode(file.body(header), header.columns),
                header.base_offset,
                header.publish_time_us,
                header.producer_id,
                header.base_sequence,
            )
            skip = 0 if is_whole else max(0, offset - header.base_offset)
            found.append(LogBatch(stream, header.base_offset + skip, header.end_offset, table.slice(skip)))
            size += header.body_length
        return found

    def _read_segment(
        self, segment: Segment, path: Path, offset: int, max_bytes: int, is_whole: bool
    ) -> list[LogBatch]:
        """Runs in the lake's thread."""
        reader = self._cache.reader(path, segment)
        groups = segment.row_groups()
        found: list[LogBatch] = []
        size = 0
        for index in range(reader.group_of(offset), len(groups)):
            try:
                table = self._cache.group(path, reader, index)
            except DataDamaged:
                if found:
                    break  # What is whole is served first; the next read meets the damage.
                raise
            end = groups[index + 1].first_offset if index + 1 < len(groups) else segment.end_offset
            if end <= offset:
                continue
            start = groups[index].first_offset
            if not is_whole and offset > start:
                table, start = _from_offset(table, start, offset), offset
                if table.num_rows == 0:
                    continue  # Only a gap is left of this group.
            found.append(LogBatch(segment.stream, start, end, table))
            size += table.nbytes
            if size >= max_bytes:
                break
        return found

    async def offset_at(self, stream: StreamId, time_us: int) -> int:
        """The first offset whose message was published at or after ``time_us``."""
        hot = self.stream(stream)
        for segment in self._index.of(stream):
            if segment.last_time_us >= time_us:
                if segment.first_time_us >= time_us:
                    return segment.first_offset
                path = self._path(segment)
                try:
                    return int(await self._in_thread(self._segment_offset_at, segment, path, time_us))
                except DataDamaged:
                    if self._index.find(stream, segment.first_offset) is segment:
                        raise
                    return await self.offset_at(stream, time_us)  # Retention took it meanwhile.
        for place in hot.places_from(hot.first_hot_offset):
            header = self._files()[place.file_number].header(place.position)
            if header.publish_time_us >= time_us:
                return header.base_offset
        return hot.end_offset

    def _segment_offset_at(self, segment: Segment, path: Path, time_us: int) -> int:
        reader = self._cache.reader(path, segment)
        moment = pa.scalar(time_us, pa.timestamp("us", tz="UTC"))
        for index in range(len(segment.row_groups())):
            table = self._cache.group(path, reader, index)
            late = pc.greater_equal(table.column("publish_time"), moment)
            place = pc.index(late, True).as_py()
            if place >= 0:
                return int(table.column("offset")[place].as_py())
        return segment.end_offset

    def measure(self, stream: StreamId, start_offset: int, end_offset: int, max_bytes: int) -> Measured:
        """How far from ``start_offset`` on ``max_bytes`` reach, as bytes are stored: compressed in the lake.
        At least one message, at most up to ``end_offset``."""
        hot = self.stream(stream)
        at, end, size = max(start_offset, hot.start_offset), min(end_offset, hot.end_offset), 0
        for first, last, weight in self._weights(stream, hot, at, end):
            count = last - max(at, first)
            part = weight * count // (last - first)
            if size + part > max_bytes:
                fitting = count * (max_bytes - size) // max(1, part)
                reached = max(at, first) + fitting
                if reached <= max(start_offset, hot.start_offset):
                    reached = max(at, first) + 1
                reached = min(reached, end)
                return Measured(reached, size + part * (reached - max(at, first)) // count)
            at, size = last, size + part
        return Measured(max(at, min(start_offset, end)), size)

    def _weights(self, stream: StreamId, hot: HotStream, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """First offset, end and stored bytes of each piece that has something between the two offsets."""
        for segment in self._index.of(stream):
            if segment.end_offset > at and segment.first_offset < end:
                last = min(segment.end_offset, end)
                weight = segment.size_bytes * (last - segment.first_offset)
                span = segment.end_offset - segment.first_offset
                yield segment.first_offset, last, weight // span
        for place in islice(hot.places_from(max(at, hot.first_hot_offset)), _MEASURED_BATCHES_MAX):
            if place.base_offset >= end:
                return
            header = self._files()[place.file_number].header(place.position)
            if header.end_offset > at:
                last = min(header.end_offset, end)
                weight = header.body_length * (last - header.base_offset)
                yield header.base_offset, last, weight // header.record_count

    def places(self, stream: StreamId, start_offset: int, end_offset: int) -> list[BatchPlace]:
        """Where the unsealed batches between two offsets lie; nothing when they are too many to tell."""
        hot, found = self.stream(stream), list[BatchPlace]()
        for place in hot.places_from(max(start_offset, hot.first_hot_offset)):
            if place.base_offset >= end_offset:
                return found
            if len(found) == _TOLD_BATCHES_MAX:
                return []
            header = self._files()[place.file_number].header(place.position)
            found.append(BatchPlace(*place, header.body_length))
        return found

    async def idempotency_keys(self, topic: Topic, since_us: int) -> list[LogBatch]:
        """What may hold keys that are still in their window, in publish order within each stream."""
        found: list[LogBatch] = []
        for partition in range(topic.partitions):
            stream = StreamId(topic.id, partition)
            # Taken in one step: what is sealed while segments are read must be in one of the two.
            at, end, hot = 0, self.stream(stream).sealed_end, self._hot_keys(stream)
            while (segment := self._index.find(stream, at)) is not None and segment.first_offset < end:
                keys: list[LogBatch] = []
                if segment.has_idempotency_keys and segment.last_time_us >= since_us:
                    keys = await self._keys_in_force(segment)
                    if not self._is_in_force(segment):
                        at = max(at, self.stream(stream).start_offset)
                        continue  # Dropped, or another one took its place: look again.
                found.extend(keys)
                at = segment.end_offset
            found.extend(hot)
        return found

    def _is_in_force(self, segment: Segment) -> bool:
        return self._index.find(segment.stream, segment.first_offset) is segment

    async def _keys_in_force(self, segment: Segment) -> list[LogBatch]:
        try:
            found: list[LogBatch] = await self._in_thread(self._keys_of, segment, self._path(segment))
            return found
        except DataDamaged as damage:
            if self._is_in_force(segment):
                # Its keys are lost with it; keyed publishing goes on without them.
                self._on_damage(damage)
            return []

    def _keys_of(self, segment: Segment, path: Path) -> list[LogBatch]:
        reader = self._cache.reader(path, segment)
        columns = ["offset", "publish_time", "idempotency_key"]
        found = []
        for index in range(len(segment.row_groups())):
            table = reader.read_group(index, columns)
            found.append(LogBatch(segment.stream, segment.first_offset, segment.end_offset, table))
        return found

    def _hot_keys(self, stream: StreamId) -> list[LogBatch]:
        hot = self.stream(stream)
        found = []
        for place in hot.places_from(hot.first_hot_offset):
            header = self._files()[place.file_number].header(place.position)
            if header.columns & batches.BIT["idempotency_key"]:
                found.extend(self._read_hot(stream, hot, header.base_offset, 1, is_whole=True))
        return found

    def stream(self, stream: StreamId) -> HotStream:
        hot = self._hot.get(stream)
        if hot is None:
            raise TopicNotFound(f"there is no partition {stream.partition} of topic id {stream.topic_id}")
        return hot

    async def forget(self, paths: Sequence[Path], disk: Disk | None = None) -> None:
        """Segments are gone; with a disk, their files go too."""
        await self._in_thread(self._forget, paths, disk)

    def _forget(self, paths: Sequence[Path], disk: Disk | None) -> None:
        for path in paths:
            self._cache.forget(path)
            if disk is not None:
                disk.remove(path)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._cache.close()

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _from_offset(table: pa.RecordBatch, first_offset: int, offset: int) -> pa.RecordBatch:
    """The rows from ``offset`` on; offsets are dense but for reported gaps, so the guess mostly holds."""
    if offset <= first_offset:
        return table
    guess = min(offset - first_offset, table.num_rows - 1)
    offsets = table.column("offset")
    if offsets[guess].as_py() == offset:
        return table.slice(guess)
    late = pc.index(pc.greater_equal(offsets, offset), True).as_py()
    return table.slice(late if late >= 0 else table.num_rows)
