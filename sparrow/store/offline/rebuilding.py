"""Rebuilding: makes the catalog anew from everything else, and keeps the old one.

The rule is in ``reconstruction``. The order of steps is such that a crash between any two of them leaves
a directory that can be rebuilt again with the same outcome: damaged segments get another name, batches
are sealed anew, the new catalog is written beside the old one and closed, the old one gets a second name,
and one rename puts the new one in its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC
from pathlib import Path

import msgspec
import pyarrow as pa

from sparrow.model.message import StreamId, from_us
from sparrow.model.settings import LakeSettings
from sparrow.store.batch import decode, to_table_form
from sparrow.store.catalog import Catalog
from sparrow.store.catalog_sqlite import wal_path
from sparrow.store.catalog_tables import Segment
from sparrow.store.directory import DataDirectory
from sparrow.store.disk import Disk
from sparrow.store.lake import write_segment
from sparrow.store.offline import access
from sparrow.store.offline.evidence import Evidence, SoundSegment, catalog_in_force, gather
from sparrow.store.offline.findings import Finding
from sparrow.store.offline.precedence import Reseal
from sparrow.store.offline.reconstruction import Reconstruction
from sparrow.store.offline.soundness import read_groups
from sparrow.store.segmentname import SegmentName, parse_name

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class RebuiltTopic(msgspec.Struct, kw_only=True):
    """A topic as the new catalog has it."""

    id: int
    name: str
    partitions: int
    segments: int
    sealed_messages: int
    journal_messages: int


class Rebuilt(msgspec.Struct, kw_only=True):
    """What a rebuild did, or would do."""

    directory: str
    is_dry_run: bool
    is_whole: bool
    version: int
    sealed_through: int
    old_catalog: str | None
    topics: list[RebuiltTopic]
    subscriptions: int
    cursors: int
    producers: int
    documents: int
    set_aside: list[str]
    """Damaged segments, under their new names."""
    doubled: list[str]
    """Segments that hold what others hold, under their new names."""
    redundant: list[str]
    """Segments that the journal still holds in full; they are made again."""
    resealed: list[str]
    """Segments made from journal batches whose segment is damaged or missing."""
    rescued: list[str]
    """Segments made from the sound row groups of damaged ones."""
    losses: list[Finding]
    notes: list[Finding]


def plan(root: Path, *, now_us: int, on_progress: OnProgress | None = None) -> Rebuilt:
    """What a rebuild would do; changes nothing."""
    with access.looking(root):
        evidence = gather(root, _counter(root, on_progress))
        try:
            found = Reconstruction(evidence, now_us)
            return _report(found, evidence, None, is_dry_run=True)
        finally:
            evidence.close()


def rebuild(
    root: Path, *, now_us: int, disk: Disk | None = None, on_progress: OnProgress | None = None
) -> Rebuilt:
    """Puts a new catalog in the place of the old one."""
    disk = disk or Disk()
    with access.changing(root, disk, now_us) as directory:
        evidence = gather(root, _counter(root, on_progress))
        try:
            found = Reconstruction(evidence, now_us)
            _move_files(disk, root, found, evidence)
            made = [_rescue(disk, directory, topic, part) for topic, part in found.rescues]
            made += [_reseal(disk, directory, evidence, reseal) for reseal in found.reseals]
            for topic in found.topics:
                directory.write_topic(topic, found.version)
            new = _write_catalog(disk, root, found, made)
            old = _swap(disk, root, new, now_us)
            _keep_damaged_journal(disk, evidence, found)
            return _report(found, evidence, old, is_dry_run=False)
        finally:
            evidence.close()


def _counter(root: Path, on_progress: OnProgress | None) -> Callable[[int], None]:
    files = [path for _, path in access.journal_files(root)]
    files += [path for path in (root / "topics").rglob("*.parquet") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if on_progress:
            on_progress(min(done, total), total)

    return count


def _move_files(disk: Disk, root: Path, found: Reconstruction, evidence: Evidence) -> None:
    for path in found.set_aside:
        disk.rename(path, _aside(path))
    for path in found.doubled:
        disk.rename(path, path.with_name(f"{path.name}.doubled"))
    for path in evidence.unknown_directories:
        # The next start removes directories of topics that it does not know.
        (root / "set-aside").mkdir(exist_ok=True)
        target = root / "set-aside" / path.name
        while target.exists():
            target = target.with_name(f"{target.name}~")
        os.rename(path, target)
        disk.sync_directory(root)


def _aside(path: Path) -> Path:
    """The name of a damaged segment once it is set aside."""
    return path if path.suffix == ".damaged" else path.with_name(f"{path.name}.damaged")


def _reseal(disk: Disk, directory: DataDirectory, evidence: Evidence, reseal: Reseal) -> Segment:
    return _seal(disk, directory, reseal.topic, reseal.stream, _tables(evidence, reseal))


def _rescue(disk: Disk, directory: DataDirectory, topic: str, part: SoundSegment) -> Segment:
    assert part.groups is not None
    aside = _aside(part.path)
    segment = part.segment
    name = parse_name(segment.file_name)
    rounds, is_compacted = (0, False) if name is None else name[1:]
    return _seal(
        disk,
        directory,
        topic,
        segment.stream,
        read_groups(aside, part.groups),
        span=(segment.first_offset, segment.end_offset) if rounds else None,
        name=str(SegmentName(segment.first_offset, rounds, is_compacted)) if rounds else None,
    )


def _seal(
    disk: Disk,
    directory: DataDirectory,
    topic: str,
    stream: StreamId,
    batches: Iterator[pa.RecordBatch],
    *,
    span: tuple[int, int] | None = None,
    name: str | None = None,
) -> Segment:
    settings = LakeSettings()
    return write_segment(
        disk,
        directory.make_partition(topic, stream.partition),
        topic,
        stream,
        batches,
        compression=settings.compression,
        row_group_bytes=settings.row_group_bytes,
        span=span,
        name=name,
    )


def _tables(evidence: Evidence, reseal: Reseal) -> Iterator[pa.RecordBatch]:
    files = {file.number: file for file in evidence.scan.files}
    for batch in reseal.batches:
        header = batch.header
        table = to_table_form(
            decode(files[batch.file_number].body(header), header.columns),
            header.base_offset,
            header.publish_time_us,
            header.producer_id,
            header.base_sequence,
        )
        skip = max(0, reseal.start_offset - header.base_offset)
        yield table.slice(skip, min(header.end_offset, reseal.end_offset) - header.base_offset - skip)


# The catalog.


def _write_catalog(disk: Disk, root: Path, found: Reconstruction, resealed: list[Segment]) -> Path:
    path = root / f"{access.CATALOG}.new"
    for leftover in root.glob(f"{access.CATALOG}.new*"):
        disk.remove(leftover)
    disk.remove(_marker(path))
    with Catalog.open(path, disk=disk) as catalog:
        rows = found.rows(resealed)
        catalog.restore(rows, version=found.version, sealed_through=found.sealed_through)
    disk.sync_file(path)
    return path


def _marker(catalog: Path) -> Path:
    return catalog.with_suffix(".clean")


def _swap(disk: Disk, root: Path, new: Path, now_us: int) -> Path | None:
    """The new catalog takes the old one's name; the old one, with its log, keeps another."""
    current = root / access.CATALOG
    old = _keep(current, now_us) if catalog_in_force(root) == current else catalog_in_force(root)
    disk.sync_directory(root)
    disk.remove(_marker(current))
    # Without its log the old file is stale, but its second name finds both (see evidence).
    disk.remove(wal_path(current))
    disk.remove(root / f"{access.CATALOG}-shm")
    disk.sync_directory(root)
    disk.rename(new, current)
    if _marker(new).exists():
        disk.rename(_marker(new), _marker(current))
    return old


def _keep(current: Path, now_us: int) -> Path | None:
    """A second name for the catalog and its log."""
    moment = from_us(now_us).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    old = current.with_name(f"{current.name}.{moment}.old")
    count = 1
    while old.exists():
        count += 1
        old = current.with_name(f"{current.name}.{moment}-{count}.old")
    for source, target in ((current, old), (wal_path(current), wal_path(old))):
        if source.exists():
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)  # A file system without links.
    return old if old.exists() else None


def _keep_damaged_journal(disk: Disk, evidence: Evidence, found: Reconstruction) -> None:
    """As sealing does: a file that held damage is not removed but kept for inspection."""
    for file in evidence.scan.files:
        if file.has_damage and file.number <= found.sealed_through:
            with suppress(FileNotFoundError):
                disk.rename(file.path, file.path.with_suffix(".damaged"))


# The report.


def _report(found: Reconstruction, evidence: Evidence, old: Path | None, *, is_dry_run: bool) -> Rebuilt:
    root = evidence.root
    rows = found.rows([])
    return Rebuilt(
        directory=str(root),
        is_dry_run=is_dry_run,
        is_whole=not found.losses,
        version=found.version,
        sealed_through=found.sealed_through,
        old_catalog=str(old.relative_to(root)) if old else None,
        topics=[_topic(found, evidence, topic.id, topic.name, topic.partitions) for topic in found.topics],
        subscriptions=len(rows.subscriptions),
        cursors=len(rows.cursors),
        producers=len(rows.producers),
        documents=len(rows.documents),
        set_aside=[f"{path.relative_to(root)}.damaged" for path in found.set_aside],
        doubled=[f"{path.relative_to(root)}.doubled" for path in found.doubled],
        redundant=[str(path.relative_to(root)) for path in found.redundant],
        resealed=[
            f"topics/{reseal.topic}/{reseal.stream.partition}/{reseal.start_offset:020d}.parquet"
            for reseal in found.reseals
        ],
        rescued=[
            f"topics/{topic}/{part.segment.partition}/{part.segment.first_offset:020d}.parquet"
            for topic, part in found.rescues
        ],
        losses=found.losses,
        notes=found.notes,
    )


def _topic(
    found: Reconstruction, evidence: Evidence, topic_id: int, name: str, partitions: int
) -> RebuiltTopic:
    rescued = [part.segment for _, part in found.rescues]
    segments = [segment for segment in (*found.segments, *rescued) if segment.topic_id == topic_id]
    reseals = [reseal for reseal in found.reseals if reseal.stream.topic_id == topic_id]
    unsealed = [
        batch.end_offset - batch.start_offset
        for stream, batches in evidence.batches.items()
        for batch in batches
        if stream.topic_id == topic_id and batch.file_number > found.sealed_through
    ]
    return RebuiltTopic(
        id=topic_id,
        name=name,
        partitions=partitions,
        segments=len(segments) + len(reseals),
        sealed_messages=sum(segment.rows for segment in segments)
        + sum(reseal.end_offset - reseal.start_offset for reseal in reseals),
        journal_messages=sum(unsealed),
    )
