"""The work of a job that rewrites segments: reads files, writes a draft beside them, touches nothing else.

It runs in the tasks of Spark, on any machine that sees the directory: what it needs is handed over, by
reference, and what it returns is a few numbers. Whether the draft takes the place of its sources is for the
broker to say (swapping.py). Files carry Parquet's page checksums, which are verified while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparrow.kernel.compaction import SCANNED, Rules, contenders, kept, spent
from sparrow.model.errors import DataDamaged, SegmentsChanged
from sparrow.model.message import StreamId
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.disk import Disk
from sparrow.store.lake import write_draft

JOB = "rewrite"
"""How the names of jobs, and so of their drafts, begin."""
STALE_S = 86400.0
NEWEST = pa.schema([("key", pa.string()), ("offset", pa.int64())])


class Rewrite(NamedTuple):
    """One draft to be written: neighbouring segments of a partition, as files."""

    topic: str
    topic_id: int
    partition: int
    directory: str
    """Of the partition."""
    sources: list[str]
    """File names there, in the order of their offsets."""
    first_offset: int
    end_offset: int
    compression: str
    row_group_bytes: int

    @property
    def stream(self) -> StreamId:
        return StreamId(self.topic_id, self.partition)


class Written(NamedTuple):
    """What came of it. Without a draft there was nothing to change, or nothing is left to be kept."""

    draft: str | None
    rows_before: int
    rows: int


def newest_by_key(path: Path, stream: StreamId) -> pa.Table:
    """The newest offset of each key in a segment; only keys and offsets are read."""
    found: list[pa.Table] = []
    with _Source(path, stream) as source:
        for index in range(source.groups):
            rows = source.read(index, ["offset", "key", "original_id"])
            rows = rows.filter(contenders(rows)).select(["key", "offset"])
            found.append(pa.Table.from_batches([rows]))
    return _newest(pa.concat_tables(found)) if found else NEWEST.empty_table()


def _newest(table: pa.Table) -> pa.Table:
    grouped = table.group_by("key").aggregate([("offset", "max")])
    return grouped.rename_columns([name.removesuffix("_max") for name in grouped.schema.names]).select(
        NEWEST.names
    )


def compact(wanted: Rewrite, newest: pa.Array, rules: Rules, draft: str) -> Written:
    """Writes what stays of some segments; ``newest`` are the offsets there that are the newest of a key."""
    sources = [_Source(Path(wanted.directory) / name, wanted.stream) for name in wanted.sources]
    try:
        plan = [
            (source, index, mask)
            for source in sources
            for index in range(source.groups)
            for mask in [kept(source.read(index, SCANNED), newest, rules)]
        ]
        before = sum(len(mask) for _, _, mask in plan)
        count = sum(pc.sum(mask).as_py() or 0 for _, _, mask in plan)
        if count == before and len(sources) == 1 and not _holds_spent(plan, rules):
            return Written(None, before, before)
        return _write(wanted, draft, before, _kept_rows(plan, rules))
    finally:
        for source in sources:
            source.close()


def merge(wanted: Rewrite, draft: str) -> Written:
    """Writes all that some segments hold as one."""
    sources = [_Source(Path(wanted.directory) / name, wanted.stream) for name in wanted.sources]
    try:
        before = sum(source.rows for source in sources)
        rows = (source.read(index) for source in sources for index in range(source.groups))
        return _write(wanted, draft, before, rows)
    finally:
        for source in sources:
            source.close()


def discard_drafts(directory: Path, job: str, stale_s: float = STALE_S) -> int:
    """Removes the drafts that a job left behind, and those of jobs that died long ago; what was put in place
    is not among them. A start of the broker removes them all."""
    left = 0
    for path in directory.glob(f"{JOB}-*.parquet.tmp"):
        with suppress(FileNotFoundError):
            if path.name.startswith(f"{job}-") or time() - path.stat().st_mtime > stale_s:
                path.unlink()
                left += 1
    return left


def _holds_spent(plan: Sequence[tuple[_Source, int, pa.Array]], rules: Rules) -> bool:
    columns = [*SCANNED, "data"]
    return any(pc.any(spent(source.read(index, columns), rules)).as_py() for source, index, _ in plan)


def _kept_rows(plan: Sequence[tuple[_Source, int, pa.Array]], rules: Rules) -> Iterator[pa.RecordBatch]:
    for source, index, mask in plan:
        if pc.any(mask).as_py():
            rows = source.read(index).filter(mask)
            rows = rows.filter(pc.invert(spent(rows, rules)))
            if rows.num_rows:
                yield rows


def _write(wanted: Rewrite, draft: str, before: int, rows: Iterator[pa.RecordBatch]) -> Written:
    counted = _Counted(rows)
    if counted.first is None:
        return Written(None, before, 0)
    write_draft(
        Disk(),
        Path(wanted.directory) / draft,
        wanted.topic,
        wanted.stream,
        counted,
        compression=wanted.compression,
        row_group_bytes=wanted.row_group_bytes,
        span=(wanted.first_offset, wanted.end_offset),
    )
    return Written(draft, before, counted.count)


class _Counted:
    """Batches on their way, the first of which has been looked at."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._rest = batches
        self.first = next(batches, None)
        self.count = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        batch = self.first
        while batch is not None:
            self.count += batch.num_rows
            yield batch
            batch = next(self._rest, None)


class _Source:
    """An open segment file that is what it was expected to be."""

    def __init__(self, path: Path, stream: StreamId) -> None:
        self._path = path
        try:
            self._file: Any = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        except FileNotFoundError as error:
            raise SegmentsChanged(f"{path} is gone") from error
        except (OSError, pa.ArrowInvalid) as error:
            raise DataDamaged(f"{path} cannot be read: {error}") from error
        self.groups = self._file.metadata.num_row_groups
        self.rows = self._file.metadata.num_rows
        names = self._file.metadata.metadata or {}
        stated = (names.get(b"sparrow.topic_id"), names.get(b"sparrow.partition"))
        if stated != (str(stream.topic_id).encode(), str(stream.partition).encode()):
            self.close()
            raise SegmentsChanged(f"{path} is of another topic by now")

    def read(self, index: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        names = TABLE_SCHEMA.names if columns is None else list(columns)
        try:
            table = self._file.read_row_group(index, columns=names, use_threads=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataDamaged(f"row group {index} of {self._path} cannot be read: {error}") from error
        fields = pa.schema([TABLE_SCHEMA.field(name) for name in names])
        arrays = [_one_chunk(table[name]) for name in names]
        return pa.RecordBatch.from_arrays(arrays, schema=fields)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
