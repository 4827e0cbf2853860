"""Opening a data directory: lock, catalog, recovery, and the clearing away of leftovers.

The order matters and is the design's: catalog first, then the journal's unsealed tail, nothing is changed
before everything has been judged. Runs in the catalog's thread, because SQLite ties a connection to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sparrow.model.errors import CatalogDamaged
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic
from sparrow.store.catalog import Catalog
from sparrow.store.catalog_tables import Segment, StreamRow, SubscriptionRow
from sparrow.store.directory import DELETED, DataDirectory, typed_error
from sparrow.store.disk import Disk
from sparrow.store.hot import HotWindow
from sparrow.store.ports import Damage, Recovered, RecoveryReport
from sparrow.store.recovery import JournalScan, Replay, refuse_damage, refuse_older_catalog, scan_journal
from sparrow.store.segmentname import parse_name
from sparrow.store.segments import SegmentIndex
from sparrow.store.stage import StageFiles


class Opened(NamedTuple):
    """A directory that has been opened and recovered."""

    directory: DataDirectory
    catalog: Catalog
    hot: HotWindow
    lake: SegmentIndex
    scan: JournalScan
    topics: list[Topic]
    subscriptions: list[SubscriptionRow]
    recovered: Recovered
    stages: StageFiles


def open_directory(
    root: Path, disk: Disk, now_us: int, on_damage: str, elapsed_s: Callable[[], float]
) -> Opened:
    """Opens, recovers, clears away."""
    directory = DataDirectory.open(root, disk, now_us)
    try:
        catalog = Catalog.open(directory.catalog, disk=disk)
        try:
            return _recover(directory, catalog, disk, on_damage, elapsed_s)
        except BaseException:
            catalog.close()
            raise
    except BaseException as error:
        directory.close()
        if isinstance(error, OSError):
            raise typed_error(root, error) from error
        raise


def _recover(
    directory: DataDirectory,
    catalog: Catalog,
    disk: Disk,
    on_damage: str,
    elapsed_s: Callable[[], float],
) -> Opened:
    topics, streams, segments = catalog.topics(), catalog.streams(), catalog.segments()
    hot = HotWindow()
    for row in streams:
        hot.open(row.stream, row.start_offset, row.sealed_end_offset)
    index = SegmentIndex(segments)
    sealed_through = catalog.sealed_through
    newest = int(catalog.documents("journal").get("newest", b"0"))
    files = directory.journal_files()
    live = [(number, path) for number, path in files if number > sealed_through]
    scan = scan_journal(disk, live, max(1, sealed_through + 1), newest)
    refuse_older_catalog(catalog.version, scan.catalog_version)
    _refuse_newer_topics(directory, catalog.version, topics)
    replay = Replay(scan, hot)
    scan.damages.extend(_missing_segments(directory, index, topics))
    if on_damage == "halt":
        refuse_damage(scan.damages)
    scan.cut()
    sealed = [path for number, path in files if number <= sealed_through]
    removed = _clear_away(disk, directory, topics, streams, index, [*sealed, *scan.removable])
    report = RecoveryReport(
        seconds=elapsed_s(),
        journal_files=len(scan.files),
        journal_bytes=sum(scan.end_of(file) for file in scan.files),
        entries=scan.entries,
        messages=replay.messages,
        torn_bytes=scan.torn_bytes,
        segments=index.count,
        removed_files=removed,
        damages=tuple(scan.damages),
    )
    recovered = Recovered(
        replay.facts,
        replay.producers,
        catalog.cursors(),
        catalog.producer_states(),
        {producer.id: producer.epoch for producer in catalog.producers()},
        report,
    )
    stages = StageFiles.open(directory.root, disk)
    return Opened(directory, catalog, hot, index, scan, topics, catalog.subscriptions(), recovered, stages)


def _refuse_newer_topics(directory: DataDirectory, version: int, topics: Sequence[Topic]) -> None:
    """A topic's own file remembers the catalog version that made it."""
    known = {topic.id for topic in topics}
    for path, found in directory.topic_files():
        if found is not None and found.topic.id not in known and found.catalog_version > version:
            raise CatalogDamaged(f"the catalog is at version {version} and has lost topic {path.name!r}")


def _missing_segments(directory: DataDirectory, index: SegmentIndex, topics: Sequence[Topic]) -> list[Damage]:
    names = {topic.id: topic.name for topic in topics}
    damages = []
    for segment in index:
        path = directory.partition(names[segment.topic_id], segment.partition) / segment.file_name
        complaint = _complaint(path, segment)
        if complaint:
            damages.append(
                Damage(
                    file=str(path.relative_to(directory.root)),
                    what=complaint,
                    topic_id=segment.topic_id,
                    partition=segment.partition,
                    start_offset=segment.first_offset,
                    end_offset=segment.end_offset,
                )
            )
    return damages


def _complaint(path: Path, segment: Segment) -> str | None:
    try:
        size = path.stat().st_size
    except OSError:
        return "the segment is missing"
    return None if size == segment.size_bytes else f"the segment has {size} bytes, not {segment.size_bytes}"


def _clear_away(
    disk: Disk,
    directory: DataDirectory,
    topics: Sequence[Topic],
    streams: Sequence[StreamRow],
    index: SegmentIndex,
    journal: Sequence[Path],
) -> int:
    """Removes what an interrupted step left behind; only what provably is no longer, or not yet, in force."""
    doomed = list(journal)
    listed = {(segment.stream, segment.file_name) for segment in index}
    rows = {row.stream: row for row in streams}
    for topic in topics:
        for partition, path in directory.segment_files(topic.name):
            stream = StreamId(topic.id, partition)
            if (stream, path.name) in listed:
                continue
            whole = (s for s in index.of(stream) if _complaint(path.with_name(s.file_name), s) is None)
            if _is_leftover(path, rows.get(stream), whole):
                doomed.append(path)
    for path in doomed:
        disk.remove(path)
    names = {topic.name for topic in topics}
    strangers = [
        path
        for path, found in directory.topic_files()
        if path.name not in names and (found is not None or path.name.endswith(DELETED))
    ]  # What holds no topic.json of ours was put there by somebody else.
    for path in strangers:
        directory.remove_topic(path)
    return len(doomed) + len(strangers)


def _is_leftover(path: Path, row: StreamRow | None, segments: Iterable[Segment]) -> bool:
    """A half-written file, one whose journal file is still in force, one that retention dropped, or the
    losing side of a swap: the offsets that it holds are held by segments that the catalog lists and that
    are there."""
    if path.suffix == ".tmp":
        return True
    name = parse_name(path.name)
    if name is None or row is None:
        return False
    at = name.first_offset
    if at >= row.sealed_end_offset or at < row.start_offset:
        return True
    return any(segment.first_offset <= at < segment.end_offset for segment in segments)
