"""Archive: sealed messages of a topic as a lake table of its own, by topic and date, on any file system.

    <target>/topic=orders/date=2026-07-01/<topic id>-<partition>-<first offset>-<end offset>.parquet
    <target>/_archive/orders/<number>.json        one record for each run that added something
    <target>/_staging/orders/<run>/...            files that no record names yet

The record is what commits: files are written under ``_staging``, which readers of Parquet tables pass over,
then one record names all of them and the offsets that are archived from now on, then they are moved to their
places. A run that was stopped before its record left nothing that counts; one that was stopped after it is
finished by the next, which moves what is still to be moved. Offsets decide what is new, so running twice
archives once. One run a topic at a time; another that finds its work gone stops before its record. The target
may be a directory or any address that pyarrow or fsspec can open.
"""

from __future__ import annotations

import importlib
import os
import posixpath
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparrow.client.blocking import BlockingBroker
from sparrow.model.errors import InvalidArgument, PreconditionFailed
from sparrow.model.message import StreamId
from sparrow.model.segment import TopicSegments
from sparrow.spark.pipelines.rewrites import OnProgress, opened
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.segmentfile import scan_segment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOLD_S = 3600.0
"""How long the files that a run reads are kept for it."""
_ROW_GROUP_ROWS = 100_000


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a run committed."""

    topic: str
    topic_id: int
    number: int
    next: dict[str, int]
    """Per partition, the offset from which on nothing is archived yet."""
    staging: str
    files: list[str]
    """Below the target; they lie below the staging directory until they are moved."""


class Archived(msgspec.Struct, kw_only=True):
    """What a run did."""

    topic: str
    target: str
    messages: int = 0
    bytes: int = 0
    files: int = 0
    missed: int = 0
    """Offsets that retention had taken before they could be archived."""
    expired_files: int = 0
    """Files of the archive that its own retention removed."""
    next: dict[str, int] = {}
    seconds: float = 0.0


class _Piece(NamedTuple):
    """What a task archives: a stretch of a segment."""

    path: str
    topic_id: int
    partition: int
    start_offset: int
    end_offset: int


def run(
    spark: SparkSession,
    where: BlockingBroker | str | Path,
    topic: str,
    target: str | Path,
    *,
    retention_s: float | None = None,
    compression: str = "zstd",
    on_progress: OnProgress | None = None,
) -> Archived:
    """Adds what was sealed since the last run. ``retention_s`` is how long the archive keeps a day after its
    end; for ever unless it is given."""
    if retention_s is not None and not retention_s > 0:
        raise InvalidArgument(f"retention_s must be positive, or None for ever, not {retention_s!r}")
    start_s = perf_counter()
    with opened(where) as broker:
        archive = _Archive(str(target), topic)
        segments = broker.segments(topic, hold_s=HOLD_S)
        outcome = _add(spark, archive, segments, compression, on_progress)
        if retention_s is not None:
            outcome.expired_files = archive.expire(round((time() - retention_s) * 1e6))
    outcome.seconds = perf_counter() - start_s
    return outcome


def _add(
    spark: SparkSession,
    archive: _Archive,
    plan: TopicSegments,
    compression: str,
    on_progress: OnProgress | None,
) -> Archived:
    before = archive.recover()
    if before is not None and before.topic_id != plan.topic_id:
        raise PreconditionFailed(
            f"the archive holds an earlier topic {plan.topic!r}, which was deleted",
            hint="Archive the new one elsewhere, or move the old archive away.",
        )
    known = {} if before is None else before.next
    outcome = Archived(topic=plan.topic, target=archive.target, next=dict(known))
    pieces: list[_Piece] = []
    for each in plan.partitions:
        start = known.get(str(each.partition), each.start_offset if before is None else 0)
        outcome.missed += max(0, each.start_offset - start)
        for file in each.segments:
            first = max(start, file.first_offset)
            if first < file.end_offset:
                path = str(Path(plan.directory) / file.file)
                pieces.append(_Piece(path, plan.topic_id, each.partition, first, file.end_offset))
                outcome.next[str(each.partition)] = file.end_offset
    if not pieces:
        return outcome
    work = _Work(archive.target, archive.topic, f"_staging/{archive.topic}/{uuid4().hex}", compression)
    if on_progress is not None:
        on_progress(0, len(pieces))
    found = spark.sparkContext.parallelize(pieces, len(pieces)).map(work).collect()
    written = [file for some in found for file in some]
    archive.commit(
        Record(
            topic=plan.topic,
            topic_id=plan.topic_id,
            number=1 if before is None else before.number + 1,
            next=outcome.next,
            staging=work.staging,
            files=[file for file, _, _ in written],
        )
    )
    if on_progress is not None:
        on_progress(len(pieces), len(pieces))
    outcome.files = len(written)
    outcome.messages = sum(rows for _, rows, _ in written)
    outcome.bytes = sum(size for _, _, size in written)
    return outcome


class _Archive:
    """The archive of one topic: its records, and the files that they name."""

    def __init__(self, target: str, topic: str) -> None:
        self.target = target if "://" in target else str(Path(target).absolute())
        self.topic = topic
        self._fs, self._root = _file_system(self.target)
        self._records = posixpath.join(self._root, "_archive", topic)

    def recover(self) -> Record | None:
        """The newest record, after what it names has been moved to its place."""
        paths = [info.path for info in self._list(self._records) if info.base_name.endswith(".json")]
        newest: Record | None = None
        if paths:
            with self._fs.open_input_stream(max(paths)) as stream:
                newest = msgspec.json.decode(stream.read(), type=Record)
            self._move(newest)
        for info in self._list(posixpath.join(self._root, "_staging", self.topic)):
            self._fs.delete_dir(info.path)  # Of a run that was stopped before its record.
        return newest

    def commit(self, record: Record) -> None:
        """From here on the files count."""
        self._fs.create_dir(self._records, recursive=True)
        path = posixpath.join(self._records, f"{record.number:010d}.json")
        staged = [posixpath.join(self._root, record.staging, name) for name in record.files]
        infos = self._fs.get_file_info([path, *staged])
        is_free = infos[0].type is pafs.FileType.NotFound
        if not is_free or any(info.type is not pafs.FileType.File for info in infos[1:]):
            raise PreconditionFailed(
                f"another run has archived {self.topic!r} meanwhile", hint="Nothing was added. Run it again."
            )
        with self._fs.open_output_stream(f"{path}.tmp") as stream:
            stream.write(msgspec.json.encode(record))
        _sync(self._fs, f"{path}.tmp")
        self._fs.move(f"{path}.tmp", path)
        _sync(self._fs, self._records)
        self._move(record)

    def _move(self, record: Record) -> None:
        staging = posixpath.join(self._root, record.staging)
        for info in self._list(staging, recursive=True):
            if info.type is not pafs.FileType.File:
                continue
            name = posixpath.relpath(info.path, staging)
            if name in record.files:
                place = posixpath.join(self._root, name)
                self._fs.create_dir(posixpath.dirname(place), recursive=True)
                self._fs.move(info.path, place)
        if self._fs.get_file_info(staging).type is pafs.FileType.Directory:
            self._fs.delete_dir(staging)

    def expire(self, before_us: int) -> int:
        """Days that ended before a moment go."""
        gone = 0
        for info in self._list(posixpath.join(self._root, f"topic={self.topic}")):
            date = info.base_name.removeprefix("date=")
            try:
                end = datetime.fromisoformat(date).replace(tzinfo=UTC) + timedelta(days=1)
            except ValueError:
                continue
            if end.timestamp() * 1e6 <= before_us:
                gone += len([each for each in self._list(info.path) if each.type is pafs.FileType.File])
                self._fs.delete_dir(info.path)
        return gone

    def _list(self, path: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
        chosen = pafs.FileSelector(path, allow_not_found=True, recursive=recursive)
        found: list[pafs.FileInfo] = self._fs.get_file_info(chosen)
        return found


class _Work:
    """In a worker: reads a stretch of a segment and writes a file for each day of it."""

    def __init__(self, target: str, topic: str, staging: str, compression: str) -> None:
        self._target = target
        self._topic = topic
        self.staging = staging
        self._compression = compression

    def __call__(self, piece: _Piece) -> list[tuple[str, int, int]]:
        fs, root = _file_system(self._target)
        stream = StreamId(piece.topic_id, piece.partition)
        batches = scan_segment(
            Path(piece.path), stream, piece.start_offset, piece.end_offset, TABLE_SCHEMA.names
        )
        days = _Days(fs, root, self.staging, self._topic, piece, self._compression)
        try:
            for batch in batches:
                for day, rows in _by_day(batch):
                    days.write(day, rows)
        finally:
            days.close()
        for name in days.rows:
            _sync(fs, days.path(name))
        return [(name, rows, fs.get_file_info(days.path(name)).size) for name, rows in days.rows.items()]


class _Days:
    """The files of a task, one a day, open at once: days may come in any order."""

    def __init__(self, fs: Any, root: str, staging: str, topic: str, piece: _Piece, compression: str) -> None:
        self._fs = fs
        self._base = posixpath.join(root, staging)
        self._topic = topic
        self._piece = piece
        self._compression = compression
        self._writers: dict[str, tuple[Any, Any]] = {}
        self.rows: dict[str, int] = {}

    def path(self, name: str) -> str:
        return posixpath.join(self._base, name)

    def write(self, day: str, rows: pa.Table) -> None:
        piece = self._piece
        span = f"{piece.start_offset:020d}-{piece.end_offset:020d}"
        name = f"topic={self._topic}/date={day}/{piece.topic_id}-{piece.partition}-{span}.parquet"
        if name not in self._writers:
            path = self.path(name)
            self._fs.create_dir(posixpath.dirname(path), recursive=True)
            sink = self._fs.open_output_stream(path)
            writer = pq.ParquetWriter(
                sink, SCHEMA, compression=self._compression, write_page_checksum=True, store_schema=True
            )
            self._writers[name] = (sink, writer)
        numbers = pa.repeat(pa.scalar(piece.partition, pa.int32()), rows.num_rows)
        table = pa.Table.from_arrays([numbers, *rows.columns], schema=SCHEMA)
        self._writers[name][1].write_table(table, row_group_size=_ROW_GROUP_ROWS)
        self.rows[name] = self.rows.get(name, 0) + rows.num_rows

    def close(self) -> None:
        for sink, writer in self._writers.values():
            writer.close()
            sink.close()


SCHEMA = pa.schema([pa.field("partition", pa.int32(), nullable=False), *TABLE_SCHEMA])
"""The columns of a segment behind its partition; topic and date are in the path."""


def _by_day(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Table]]:
    days = pc.strftime(batch.column("publish_time"), format="%Y-%m-%d")
    table = pa.Table.from_batches([batch])
    found = pc.unique(days).to_pylist()
    for day in found:
        yield day, table if len(found) == 1 else table.filter(pc.equal(days, day))


def _sync(fs: Any, path: str) -> None:
    """A local file, or the names of a directory, are on the disk; others see to that themselves."""
    if isinstance(fs, pafs.LocalFileSystem):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_system(target: str) -> tuple[Any, str]:
    """The file system of an address or a path, and the path there."""
    try:
        if "://" not in target:
            return pafs.LocalFileSystem(), str(Path(target).absolute())
        try:
            found: tuple[Any, str] = pafs.FileSystem.from_uri(target)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            own, path = importlib.import_module("fsspec.core").url_to_fs(target)
            found = pafs.PyFileSystem(pafs.FSSpecHandler(own)), path
    except (ImportError, ValueError, pa.ArrowException, OSError) as error:
        raise InvalidArgument(
            f"the target {target!r} cannot be opened: {error}",
            hint="Give a directory, or an address that pyarrow or fsspec knows (install fsspec for others).",
        ) from error
    return found
