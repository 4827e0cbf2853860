"""The log of a data directory that no broker has open, for programs that only read.

It sees what a broker would serve after opening the directory: the catalog's segments and the whole part of
the journal's tail. Nothing is changed: a torn tail is passed over, not cut, and the catalog is read from a
copy. Use it within ``access.looking``; it may be used again in a later look as long as ``stamp`` is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import InvalidArgument, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.schema import TopicSchema
from sparrow.model.segment import (
    Extent,
    Measured,
    PartitionSegments,
    SegmentFile,
    Stretch,
    TopicSegments,
)
from sparrow.model.topic import Topic
from sparrow.store.catalog_tables import Segment
from sparrow.store.hot import HotWindow
from sparrow.store.journalfile import JournalFile
from sparrow.store.offline import access
from sparrow.store.ports import LogBatch
from sparrow.store.reader import LogReader
from sparrow.store.recovery import Replay, refuse_older_catalog, scan_journal
from sparrow.store.segmentfile import scan_segment
from sparrow.store.segments import SegmentIndex

T = TypeVar("T")
_READ_BYTES = 8 * 1024 * 1024


def stamp(root: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when anything was written to the directory's catalog or journal."""
    files = [root / "catalog.db", root / "catalog.db-wal", *sorted((root / "journal").glob("*"))]
    seen = [(path, path.stat()) for path in files if path.exists()]
    return tuple((path.name, found.st_size, found.st_mtime_ns) for path, found in seen)


class OfflineLog:
    """See the module's text; methods are those of the broker."""

    def __init__(self, root: Path) -> None:
        self._root = root
        view = access.read_catalog(root)
        self._topics = {topic.name: topic for topic in view.topics}
        self._names = {topic.id: topic.name for topic in view.topics}
        self._schemas = view.schemas
        self._hot = HotWindow()
        for row in view.streams:
            self._hot.open(row.stream, row.start_offset, row.sealed_end_offset)
        self._index = SegmentIndex(view.segments)
        live = [(number, path) for number, path in access.journal_files(root) if number > view.sealed_through]
        scan = scan_journal(access.ReadOnlyDisk(), live, max(1, view.sealed_through + 1), view.newest_file)
        refuse_older_catalog(view.version, scan.catalog_version)
        Replay(scan, self._hot)
        files: dict[int, JournalFile] = {}
        for file in scan.files:
            file.end = scan.end_of(file)
            file.close()
            files[file.number] = file
        self._reader = _ReaderHere(self._hot, self._index, lambda: files, self._path, lambda damage: None)

    def _path(self, segment: Segment) -> Path:
        return access.segment_path(self._root, self._names[segment.topic_id], segment)

    def _topic(self, name: str) -> Topic:
        found = self._topics.get(name)
        if found is None:
            raise TopicNotFound(f"{self._root} holds no topic {name!r}", hint="Check the name and the path.")
        return found

    def _stream(self, topic: str, partition: int) -> StreamId:
        found = self._topic(topic)
        if not 0 <= partition < found.partitions:
            raise InvalidArgument(f"{topic!r} has partitions 0 to {found.partitions - 1}, not {partition!r}")
        return StreamId(found.id, partition)

    def extents(self, patterns: Sequence[str]) -> list[Extent]:
        """The topics that match any of the patterns, and from where to where each partition can be read."""
        wanted = [parse_pattern(pattern) for pattern in patterns]
        found = []
        for name, topic in sorted(self._topics.items()):
            if any(pattern.matches(name) for pattern in wanted):
                streams = [StreamId(topic.id, partition) for partition in range(topic.partitions)]
                bounds = [self._reader.bounds(stream) for stream in streams]
                found.append(Extent(name, topic.id, bounds))
        return found

    def segments(self, topic: str) -> TopicSegments:
        """The sealed segments of a topic."""
        found, partitions = self._topic(topic), []
        for partition in range(found.partitions):
            stream = StreamId(found.id, partition)
            hot = self._reader.stream(stream)
            files = [self._file(segment) for segment in self._index.of(stream)]
            partitions.append(
                PartitionSegments(partition, hot.start_offset, hot.sealed_end, hot.end_offset, files)
            )
        return TopicSegments(topic, found.id, str(self._root.absolute()), partitions)

    def _file(self, segment: Segment) -> SegmentFile:
        return SegmentFile(
            str(self._path(segment).relative_to(self._root)),
            segment.first_offset,
            segment.end_offset,
            segment.rows,
            segment.size_bytes,
            segment.first_time_us,
            segment.last_time_us,
        )

    def topic_schema(self, topic: str) -> TopicSchema | None:
        """What the payloads of a topic are."""
        raw = self._schemas.get(str(self._topic(topic).id))
        return None if raw is None else msgspec.json.decode(raw, type=TopicSchema)

    def measure(self, topic: str, stretches: Sequence[Stretch], max_bytes: int) -> list[Measured]:
        """For each stretch: up to which offset ``max_bytes`` reach, and how many bytes that are."""
        return [
            self._reader.measure(self._stream(topic, partition), start, end, max_bytes)
            for partition, start, end in stretches
        ]

    def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """The first offset published at or after a moment."""
        return _finish(self._reader.offset_at(self._stream(topic, partition), time_us))

    def scan(
        self, topic: str, partition: int, start_offset: int, end_offset: int, columns: Sequence[str]
    ) -> Iterator[LogBatch]:
        """Batches with these columns and the offset, from the lake and then from the journal."""
        stream = self._stream(topic, partition)
        at, hot = start_offset, self._reader.stream(stream)
        while at < min(end_offset, hot.sealed_end):
            segment = self._index.find(stream, at)
            if segment is None or segment.first_offset >= end_offset:
                break
            last = min(segment.end_offset, end_offset)
            for batch in scan_segment(self._path(segment), stream, at, last, columns):
                if batch.num_rows:
                    yield LogBatch(stream, at, batch.column("offset")[-1].as_py() + 1, batch)
            at = last
        while at < end_offset:
            found = _finish(self._reader.read(stream, at, _READ_BYTES))
            if not found:
                return
            for each in found:
                yield each
                at = each.end_offset


class _ReaderHere(LogReader):
    """Decodes in the thread of the caller, who has no event loop."""

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("reading here never waits")
