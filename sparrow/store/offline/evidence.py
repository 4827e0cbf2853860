"""What a data directory tells without its catalog.

Four witnesses: each topic's own file, the segments' own metadata, the journal, and whatever rows of the
old catalog still match their checksums. This file hears them and judges each by itself; how their
stories are put together is in ``reconstruction``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sparrow.model.message import StreamId
from sparrow.model.topic import Topic, TopicPolicy
from sparrow.store.catalog_salvage import SalvagedRows, salvage
from sparrow.store.catalog_sqlite import wal_path
from sparrow.store.catalog_tables import Segment, SegmentKey, StreamRow
from sparrow.store.directory import TopicFile
from sparrow.store.entry import Header, Kind
from sparrow.store.offline import access
from sparrow.store.offline.examiner import Examiner, Report
from sparrow.store.offline.soundness import Flaw
from sparrow.store.recovery import JournalScan, scan_journal
from sparrow.store.segmentname import parse_name

OnBytes = Callable[[int], None]


class SoundSegment(NamedTuple):
    """A segment file that can be served, or the part of a damaged one that can be copied into another."""

    path: Path
    segment: Segment
    holes: list[Flaw]
    groups: range | None = None
    """The row groups to copy; None when the file itself is sound."""


class DamagedSegment(NamedTuple):
    """A segment file that cannot be trusted; ``end_offset`` is None when nothing tells it."""

    path: Path
    stream: StreamId
    first_offset: int
    end_offset: int | None
    what: str


class Batch(NamedTuple):
    """A valid message batch of the journal."""

    file_number: int
    start_offset: int
    end_offset: int
    header: Header


class Evidence:
    """All that was heard."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.salvaged: SalvagedRows | None = None
        self.listed: dict[SegmentKey, Segment] = {}
        self.stream_rows: dict[StreamId, StreamRow] = {}
        """What the old catalog said of segments and streams, as far as it is left."""
        self.topic_files: dict[str, TopicFile] = {}
        self.topics_by_segment: dict[str, Topic] = {}
        """Topics whose own file is lost, as their segments name them."""
        self.unknown_directories: list[Path] = []
        self.sound: dict[StreamId, list[SoundSegment]] = {}
        self.damaged: list[DamagedSegment] = []
        self.partitions_on_disk: set[StreamId] = set()
        """Streams that have had a segment at some time: their directory is there."""
        self.scan = JournalScan()
        self.batches: dict[StreamId, list[Batch]] = {}
        self.producers: dict[int, int] = {}
        """The highest epoch of every producer that the journal names."""
        self.file_numbers: list[int] = []

    @property
    def witnessed_version(self) -> int:
        """The highest catalog version that anything outside the catalog has seen."""
        return max([self.scan.catalog_version, *(f.catalog_version for f in self.topic_files.values())])

    @property
    def is_salvage_fresh(self) -> bool:
        """Whether the old catalog had lost no commit that anything else knows of."""
        found = self.salvaged
        return found is not None and (found.version or 0) >= max(1, self.witnessed_version)

    def close(self) -> None:
        for file in self.scan.files:
            file.close()


def gather(root: Path, on_bytes: OnBytes) -> Evidence:
    """Reads everything once; changes nothing."""
    with Examiner() as examiner:
        return _gather(root, examiner, on_bytes)


def _gather(root: Path, examiner: Examiner, on_bytes: OnBytes) -> Evidence:
    found = Evidence(root)
    found.salvaged = _salvage(root)
    if found.salvaged:
        found.listed = {segment.key: segment for segment in found.salvaged.rows.segments}
        found.stream_rows = {row.stream: row for row in found.salvaged.rows.streams}
    _hear_journal(found, on_bytes)
    _hear_topics(found, examiner)
    known = {name: file.topic.id for name, file in found.topic_files.items()}
    known |= {name: topic.id for name, topic in found.topics_by_segment.items()}
    for topic in found.salvaged.rows.topics if found.salvaged else []:
        known.setdefault(topic.name, topic.id)
    for name, topic_id in known.items():
        _hear_segments(found, examiner, name, topic_id, on_bytes)
    return found


# The old catalog.


def catalog_in_force(root: Path) -> Path:
    """The catalog whose rows are newest: after an interrupted swap, the one that was set aside with its
    log, as long as it is the same file as that in place."""
    current = root / access.CATALOG
    for path in sorted(root.glob(f"{access.CATALOG}.*.old")):
        if current.exists() and not wal_path(current).exists() and os.path.samefile(path, current):
            return path
    return current


def _salvage(root: Path) -> SalvagedRows | None:
    path = catalog_in_force(root)
    if path.exists():
        return salvage(path)
    if not wal_path(path).exists():
        return None
    with TemporaryDirectory(prefix="sparrow-catalog-") as place:  # Only the log is left.
        copy = Path(place) / path.name
        copy.touch()
        wal_path(copy).write_bytes(wal_path(path).read_bytes())
        return salvage(copy)


# The journal.


def _hear_journal(found: Evidence, on_bytes: OnBytes) -> None:
    files = access.journal_files(found.root)
    found.file_numbers = [number for number, _ in files]
    first = min(found.file_numbers, default=1)
    found.scan = scan_journal(access.ReadOnlyDisk(), files, first, 0)
    for chain in found.scan.chains:
        for header in chain:
            if header.kind == Kind.BATCH:
                _hear_batch(found, header)
    for _, path in files:
        on_bytes(path.stat().st_size)


def _hear_batch(found: Evidence, header: Header) -> None:
    if header.producer_id:
        epoch = found.producers.get(header.producer_id, 0)
        found.producers[header.producer_id] = max(epoch, header.producer_epoch)
    batches = found.batches.setdefault(StreamId(header.topic_id, header.partition), [])
    if not batches or header.base_offset >= batches[-1].end_offset:
        batches.append(Batch(header.file_number, header.base_offset, header.end_offset, header))


# Topics and segments.


def _hear_topics(found: Evidence, examiner: Examiner) -> None:
    salvaged = {topic.name for topic in found.salvaged.rows.topics} if found.salvaged else set()
    for path, file in access.topic_files(found.root):
        if path.name.endswith("#deleted"):
            continue
        if file is not None and file.topic.name == path.name:
            found.topic_files[path.name] = file
        elif path.name not in salvaged:
            topic = _topic_by_segments(path, examiner)
            if topic is None:
                found.unknown_directories.append(path)
            else:
                found.topics_by_segment[path.name] = topic


def _topic_by_segments(directory: Path, examiner: Examiner) -> Topic | None:
    files = access.partition_files(directory)
    for partition, path in files:
        is_segment = path.suffix == ".parquet"
        names = examiner.examine(path, directory.name, StreamId(0, partition)).names if is_segment else {}
        topic_id = names.get("sparrow.topic_id", "")
        if names.get("sparrow.topic") == directory.name and topic_id.isdigit():
            created_at_us = int(directory.stat().st_mtime * 1_000_000)
            partitions = 1 + max(partition for partition, _ in files)
            return Topic(
                id=int(topic_id),
                name=directory.name,
                partitions=partitions,
                policy=TopicPolicy(),
                created_at_us=created_at_us,
            )
    return None


def _hear_segments(found: Evidence, examiner: Examiner, topic: str, topic_id: int, on_bytes: OnBytes) -> None:
    directory = found.root / "topics" / topic
    for place in directory.glob("*/"):
        if place.name.isdigit():
            found.partitions_on_disk.add(StreamId(topic_id, int(place.name)))
    for partition, path in access.partition_files(directory):
        name = parse_name(path.name.removesuffix(".damaged"))
        if name is not None:
            stream = StreamId(topic_id, partition)
            listed = _listed(found, path, SegmentKey(*stream, name.first_offset))
            _hear_segment(found, path, stream, examiner.examine(path, topic, stream, listed))
            on_bytes(path.stat().st_size if path.suffix == ".parquet" else 0)


def _listed(found: Evidence, path: Path, key: SegmentKey) -> Segment | None:
    """What the old catalog said of this very file."""
    listed = found.listed.get(key)
    is_it = listed is not None and listed.file_name == path.name.removesuffix(".damaged")
    return listed if is_it else None


def _hear_segment(found: Evidence, path: Path, stream: StreamId, report: Report) -> None:
    segment = report.segment
    complaint = "it was set aside earlier" if path.suffix == ".damaged" else report.complaint
    if segment is not None and found.is_salvage_fresh:
        complaint = complaint or _complaint(segment, _listed(found, path, segment.key))
    if segment is not None and not complaint:
        found.sound.setdefault(stream, []).append(SoundSegment(path, segment, report.holes))
        return
    found.damaged.append(_damaged(found, path, stream, report.names, complaint))
    for rescue in report.rescues:
        groups = range(rescue.first_group, rescue.end_group)
        found.sound.setdefault(stream, []).append(SoundSegment(path, rescue.segment, [], groups))


def _complaint(segment: Segment, listed: Segment | None) -> str:
    """A file that passes its own checks can still not be the one that the catalog lists."""
    return "it does not match the catalog's sums" if listed is not None and listed != segment else ""


def _damaged(
    found: Evidence, path: Path, stream: StreamId, names: dict[str, str], what: str
) -> DamagedSegment:
    name = parse_name(path.name.removesuffix(".damaged"))
    assert name is not None, "only segments are heard"
    first_offset = name.first_offset
    listed = _listed(found, path, SegmentKey(*stream, first_offset))
    stated = names.get("sparrow.end_offset", "")
    end = listed.end_offset if listed else int(stated) if stated.isdigit() else None
    if end is not None and end <= first_offset:
        end = None
    return DamagedSegment(path, stream, first_offset, end, what)
