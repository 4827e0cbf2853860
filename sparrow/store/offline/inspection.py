"""Inspection: what is in a data directory, from the whole down to single entries and messages.

Everything is read where it lies and nothing is changed. A directory whose catalog is damaged can be
looked into as well: then topics are as their own files say, and segments as their footers say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from sparrow.kernel import facts
from sparrow.model.errors import CatalogDamaged, DataDamaged, DataDirectoryNewer, NotFound, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic
from sparrow.store.batch import decode, to_table_form
from sparrow.store.catalog_tables import Segment, StreamRow
from sparrow.store.entry import CONTINUES, FILE_HEADER_BYTES, SEQUENCES, Broken, Header, Kind, Scan, unpack
from sparrow.store.journalfile import JournalFile
from sparrow.store.lake import SegmentReader
from sparrow.store.offline import access
from sparrow.store.offline.examiner import Examiner
from sparrow.store.offline.findings import Finding, gap
from sparrow.store.offline.summaries import (
    CatalogSummary,
    EntrySummary,
    JournalSummary,
    MessageSummary,
    Page,
    PartitionSummary,
    SegmentSummary,
    Summary,
)

_CODECS = {0: "none", 1: "lz4", 2: "zstd"}


class Inspection:
    """A look into a directory; use it within ``access.looking``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._complaint: str | None = None
        try:
            self._catalog: access.CatalogView | None = access.read_catalog(root)
        except CatalogDamaged as error:
            self._catalog, self._complaint = None, error.message
        self._files = access.journal_files(root)
        self._topics = self._known_topics()
        self._names = {topic.id: topic.name for topic in self._topics}
        self._segments = self._known_segments()

    def _known_topics(self) -> list[Topic]:
        if self._catalog is not None:
            return sorted(self._catalog.topics, key=lambda topic: topic.name)
        return [found.topic for _, found in access.topic_files(self._root) if found is not None]

    def _known_segments(self) -> list[Segment]:
        if self._catalog is not None:
            return self._catalog.segments
        with Examiner() as examiner:
            return [segment for topic in self._topics for segment in self._sound(topic, examiner)]

    def _sound(self, topic: Topic, examiner: Examiner) -> Iterator[Segment]:
        """Segments that pass their own checks; `verify` names the others."""
        for partition, path in access.partition_files(self._root / "topics" / topic.name):
            if path.suffix == ".parquet":
                report = examiner.examine(path, topic.name, StreamId(topic.id, partition))
                if report.segment is not None:
                    yield report.segment

    def topic(self, name: str) -> Topic:
        """The topic of this name."""
        for topic in self._topics:
            if topic.name == name:
                return topic
        known = ", ".join(topic.name for topic in self._topics[:10])
        raise TopicNotFound(
            f"{self._root} holds no topic {name!r}",
            hint=f"It holds: {known}." if known else "It holds no topic at all.",
        )

    # The whole.

    def summary(self, topic: str | None = None, partition: int | None = None) -> Summary:
        """Tables of everything, or of one topic or partition."""
        chosen = self._topics if topic is None else [self.topic(topic)]
        if partition is not None:
            for each in chosen:
                _check_partition(each, partition)
        ids = {each.id for each in chosen}
        marker = access.read_marker(self._root)
        segments = [
            segment
            for segment in self._segments
            if segment.topic_id in ids and partition in (None, segment.partition)
        ]
        journal, ends = self._journal()
        return Summary(
            directory=str(self._root),
            format=marker.format,
            created_at_us=marker.created_at_us,
            catalog=self._catalog_summary(),
            partitions=[
                self._partition(each, number, segments, ends)
                for each in chosen
                for number in range(each.partitions)
                if partition in (None, number)
            ],
            journal=journal,
            segments=sorted((self._segment(s) for s in segments), key=lambda s: (s.topic, s.file)),
        )

    def _catalog_summary(self) -> CatalogSummary:
        found = self._catalog
        if found is None:
            return CatalogSummary(state=f"damaged: {self._complaint}")
        is_clean = (self._root / "catalog.clean").exists()
        return CatalogSummary(
            state="closed in order" if is_clean else "not closed in order, and whole",
            version=found.version,
            sealed_through=found.sealed_through,
            subscriptions=len(found.subscriptions),
            producers=len(found.producers),
        )

    def _partition(
        self, topic: Topic, partition: int, segments: Sequence[Segment], ends: dict[StreamId, tuple[int, int]]
    ) -> PartitionSummary:
        stream = StreamId(topic.id, partition)
        own = [segment for segment in segments if segment.stream == stream]
        row = self._row(stream, own, ends)
        return PartitionSummary(
            topic=topic.name,
            topic_id=topic.id,
            partition=partition,
            start_offset=row.start_offset,
            sealed_end_offset=row.sealed_end_offset,
            end_offset=max(row.sealed_end_offset, ends.get(stream, (0, 0))[1]),
            segments=len(own),
            segment_bytes=sum(segment.size_bytes for segment in own),
        )

    def _row(
        self, stream: StreamId, segments: Sequence[Segment], ends: dict[StreamId, tuple[int, int]]
    ) -> StreamRow:
        for row in self._catalog.streams if self._catalog else []:
            if row.stream == stream:
                return row
        starts = [segment.first_offset for segment in segments]
        starts += [ends[stream][0]] if stream in ends else []
        end = max([segment.end_offset for segment in segments], default=0)
        return StreamRow(*stream, min(starts, default=0), end)

    def _segment(self, segment: Segment) -> SegmentSummary:
        topic = self._names[segment.topic_id]
        path = access.segment_path(self._root, topic, segment)
        return SegmentSummary(
            file=str(path.relative_to(self._root)),
            topic=topic,
            partition=segment.partition,
            first_offset=segment.first_offset,
            end_offset=segment.end_offset,
            rows=segment.rows,
            row_groups=len(segment.row_groups()),
            size_bytes=segment.size_bytes,
            first_time_us=segment.first_time_us,
            last_time_us=segment.last_time_us,
        )

    # The journal.

    def _journal(self) -> tuple[list[JournalSummary], dict[StreamId, tuple[int, int]]]:
        """A summary of each file, and where each stream's batches start and end."""
        ends: dict[StreamId, tuple[int, int]] = {}
        summaries = []
        for number, path in self._files:
            items = list(self._items(number, path))
            headers = [item for item in items if isinstance(item, Header)]
            for header in headers:
                if header.kind == Kind.BATCH:
                    stream = StreamId(header.topic_id, header.partition)
                    start, end = ends.get(stream, (header.base_offset, 0))
                    ends[stream] = min(start, header.base_offset), max(end, header.end_offset)
            summaries.append(self._file(number, path, items, headers))
        return summaries, ends

    def _items(self, number: int, path: Path) -> Iterator[Header | Broken]:
        file = JournalFile.open(access.ReadOnlyDisk(), path, number)
        if file is not None:
            file.close()
            yield from Scan(file.source, file.buffer, number, file.size)

    def _file(
        self, number: int, path: Path, items: Sequence[Header | Broken], headers: Sequence[Header]
    ) -> JournalSummary:
        kinds = [header.kind for header in headers]
        batches = [header for header in headers if header.kind == Kind.BATCH]
        end = max((header.end_position for header in headers), default=FILE_HEADER_BYTES)
        broken = [item for item in items if isinstance(item, Broken)]
        size = path.stat().st_size
        file = JournalFile.open(access.ReadOnlyDisk(), path, number)
        header = file.file_header() if file else None
        if file:
            file.close()
        return JournalSummary(
            file=path.name,
            number=number,
            is_sealed=self._catalog is not None and number <= self._catalog.sealed_through,
            created_at_us=header.created_at_us if header else None,
            bytes=min(end, size),
            size_bytes=size,
            torn_bytes=sum(item.end_position - item.position for item in broken if item.position >= end),
            entries=len(headers),
            batches=len(batches),
            facts=kinds.count(Kind.FACTS),
            notes=kinds.count(Kind.NOTE),
            messages=sum(header.record_count for header in batches),
            broken=sum(item.position < end for item in broken),
        )

    def entries(self, number: int | None = None) -> Iterator[EntrySummary]:
        """The entries of one journal file, or of all, in the order of the log."""
        chosen = [(at, path) for at, path in self._files if number in (None, at)]
        if number is not None and not chosen:
            known = ", ".join(str(at) for at, _ in self._files) or "none"
            raise NotFound(
                f"there is no journal file {number} in {self._root}", hint=f"Files there: {known}."
            )
        for at, path in chosen:
            file = JournalFile.open(access.ReadOnlyDisk(), path, at)
            if file is None:
                continue
            file.close()
            for item in Scan(file.source, file.buffer, at, file.size):
                yield self._entry(file, item)

    def _entry(self, file: JournalFile, item: Header | Broken) -> EntrySummary:
        header = item if isinstance(item, Header) else unpack(file.source, item.position, file.number)
        if header is None:
            return EntrySummary(
                file=file.path.name,
                position=item.position,
                end_position=item.end_position,
                kind="unreadable",
                is_crc_right=False,
            )
        is_right = isinstance(item, Header)
        is_batch = header.kind == Kind.BATCH
        flags = {CONTINUES: "continues", SEQUENCES: "sequences"}
        return EntrySummary(
            file=file.path.name,
            position=header.position,
            end_position=header.end_position,
            kind=Kind(header.kind).name.lower() if header.kind in list(Kind) else str(header.kind),
            is_crc_right=is_right,
            flags=[name for bit, name in flags.items() if header.flags & bit],
            codec=_CODECS.get(header.codec, str(header.codec)),
            count=header.record_count,
            topic=self._names.get(header.topic_id),
            topic_id=header.topic_id,
            partition=header.partition,
            base_offset=header.base_offset if is_batch else None,
            end_offset=header.end_offset if is_batch else None,
            publish_time_us=header.publish_time_us,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            durable_position=header.durable_position,
            catalog_version=header.catalog_version,
            facts=_told(file, header) if is_right and header.kind == Kind.FACTS else [],
        )

    # Messages.

    def messages(self, topic: str, partition: int, offset: int, limit: int) -> Page:
        """Messages from an offset on; what cannot be read is named and passed over."""
        found = self.topic(topic)
        _check_partition(found, partition)
        page = Page(topic=topic, partition=partition, messages=[], damages=[])
        at = offset
        for file, table in self._tables(StreamId(found.id, partition), topic, offset, page.damages):
            for row in table.to_pylist():
                if row["offset"] >= at and len(page.messages) < limit:
                    at = row["offset"] + 1
                    page.messages.append(_message(found.id, partition, file, row))
            if len(page.messages) >= limit:
                break
        return page

    def _tables(
        self, stream: StreamId, topic: str, offset: int, damages: list[Finding]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        own = [s for s in self._segments if s.stream == stream and s.end_offset > offset]
        for segment in sorted(own, key=lambda segment: segment.first_offset):
            path = access.segment_path(self._root, topic, segment)
            name = f"{stream.partition}/{path.name}"
            try:
                reader = SegmentReader(path, segment)
            except DataDamaged as error:
                damages.append(_gap(error, topic, segment, name))
                continue
            for index in range(reader.group_of(offset), len(segment.row_groups())):
                try:
                    yield name, reader.read_group(index)
                except DataDamaged as error:
                    damages.append(_gap(error, topic, segment, name))
        yield from self._journal_tables(stream, offset)

    def _journal_tables(self, stream: StreamId, offset: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        for number, path in self._files:
            file = JournalFile.open(access.ReadOnlyDisk(), path, number)
            if file is None:
                continue
            file.close()
            for item in Scan(file.source, file.buffer, number, file.size):
                if isinstance(item, Broken) or item.kind != Kind.BATCH:
                    continue
                if (item.topic_id, item.partition) != stream or item.end_offset <= offset:
                    continue
                yield (
                    path.name,
                    to_table_form(
                        decode(file.body(item), item.columns),
                        item.base_offset,
                        item.publish_time_us,
                        item.producer_id,
                        item.base_sequence,
                    ),
                )


def _check_partition(topic: Topic, partition: int) -> None:
    if not 0 <= partition < topic.partitions:
        raise NotFound(
            f"{topic.name} has no partition {partition}", hint=f"It has 0 to {topic.partitions - 1}."
        )


def _gap(error: DataDamaged, topic: str, segment: Segment, name: str) -> Finding:
    start = int(error.details.get("start_offset", segment.first_offset))
    end = int(error.details.get("end_offset", segment.end_offset))
    return gap(f"topics/{topic}/{name}", error.message, topic, segment.partition, start, end)


def _told(file: JournalFile, header: Header) -> list[dict[str, Any]]:
    """The facts of an entry by name; one that this version does not know is said to be so."""
    try:
        found = facts.decode(file.body(header).to_pybytes())
    except (DataDamaged, DataDirectoryNewer) as error:
        return [{"fact": "unknown", "why": error.message}]
    return [_fields(fact) for fact in found]


def _fields(fact: facts.Fact) -> dict[str, Any]:
    fields = msgspec.structs.asdict(fact)
    if isinstance(fact, facts.OffsetsFact):
        offsets = fact.offsets
        del fields["ranges"], fields["dense"]
        fields |= {"offsets": len(offsets)}
        if offsets:
            fields |= {"first_offset": offsets.min(), "last_offset": offsets.max()}
    return {"fact": type(fact).__name__, **fields}


def _message(topic_id: int, partition: int, file: str, row: dict[str, Any]) -> MessageSummary:
    return MessageSummary(
        id=f"{topic_id}-{partition}-{row['offset']}",
        offset=row["offset"],
        publish_time_us=int(pa.scalar(row["publish_time"], pa.timestamp("us", tz="UTC")).value),
        file=file,
        key=row["key"],
        data=row["data"],
        attributes=dict(row["attributes"] or ()),
        original_id=row["original_id"],
        producer_id=row["producer_id"],
        sequence=row["sequence"],
    )
