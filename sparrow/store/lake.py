"""The lake: sealed segments, one Parquet file each, readable by anything that reads Parquet.

A segment is written once and never changed. The broker reads it a row group at a time: it checks the
group's bytes against the crc that the catalog holds, then decodes them. So a flipped bit is found before
it is served, and starting at any offset costs one row group.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import sleep
from typing import Any, TypeAlias

import google_crc32c
import pyarrow as pa

from sparrow.model.errors import DataDamaged
from sparrow.model.message import StreamId
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.catalog_tables import RowGroup, Segment, pack_groups
from sparrow.store.disk import Disk
from sparrow.store.segmentname import SegmentName, parse_name

Rows: TypeAlias = pa.Table | pa.RecordBatch
FORMAT = b"1"
_TAIL = struct.Struct("<I4s")  # Parquet ends with the footer's length and its magic.
_PARQUET_MAGIC = b"PAR1"
_FOOTER_GUESS_BYTES = 64 * 1024  # Parquet's reader fetches so much of a file's end, however short the footer
_CHECKSUM_BYTES = 1024 * 1024


def _parquet() -> Any:
    """pyarrow's Parquet module, loaded when the first segment is touched: it costs an idle broker 5 MB."""
    import pyarrow.parquet

    return pyarrow.parquet


def write_segment(
    disk: Disk,
    directory: Path,
    topic: str,
    stream: StreamId,
    batches: Iterable[Rows],
    *,
    compression: str,
    row_group_bytes: int,
    span: tuple[int, int] | None = None,
    name: str | None = None,
) -> Segment:
    """Writes the batches (table form, offsets ascending) as one segment whose name and bytes are durable."""
    temporary = directory / f"{stream.topic_id}-{stream.partition}.parquet.tmp"
    write_draft(
        disk,
        temporary,
        topic,
        stream,
        batches,
        compression=compression,
        row_group_bytes=row_group_bytes,
        span=span,
    )
    segment = describe(temporary, stream, name)
    disk.rename(temporary, directory / segment.file_name)
    return segment


def write_draft(
    disk: Disk,
    path: Path,
    topic: str,
    stream: StreamId,
    batches: Iterable[Rows],
    *,
    compression: str,
    row_group_bytes: int,
    span: tuple[int, int] | None = None,
) -> None:
    """Writes the batches as a segment under a name that is not its own yet; its bytes are durable. ``span``
    are the offsets that it stands for, where those of its first and last message do not say."""
    writer = _SegmentWriter(path, topic, stream, compression, span)
    hastened = 0
    try:
        for group in _row_groups(batches, row_group_bytes):
            writer.add(group)
            hastened = disk.hasten(path, hastened)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    disk.sync_file(path)


def _row_groups(tables: Iterable[Rows], size: int) -> Iterator[pa.Table]:
    gathered: list[pa.Table] = []
    weight = 0
    for rows in tables:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        for piece in _pieces(table, size):
            piece_bytes = piece.nbytes
            if gathered and weight + piece_bytes > size:
                yield pa.concat_tables(gathered)
                gathered, weight = [], 0
            gathered.append(piece)
            weight += piece_bytes
    if gathered:
        yield pa.concat_tables(gathered)


def _pieces(table: pa.Table, size: int) -> Iterator[pa.Table]:
    """The table, cut so that no piece is much larger than ``size``."""
    count = max(1, min(table.num_rows, round(table.nbytes / size)))
    step = -(-table.num_rows // count)
    for start in range(0, table.num_rows, step):
        yield table.slice(start, step)


class _SegmentWriter:
    def __init__(
        self, path: Path, topic: str, stream: StreamId, compression: str, span: tuple[int, int] | None
    ) -> None:
        self._path = path
        self._span = span
        self._first_offset: int | None = None
        self._names = {
            "sparrow.format": FORMAT,
            "sparrow.topic": topic,
            "sparrow.topic_id": str(stream.topic_id),
            "sparrow.partition": str(stream.partition),
        }
        self._end_offset = 0
        self._writer: Any = _parquet().ParquetWriter(
            path,
            TABLE_SCHEMA,
            compression=compression,
            compression_level=1 if compression == "zstd" else None,
            use_dictionary=["attributes.key_value.key"],
            column_encoding={"offset": "DELTA_BINARY_PACKED", "data": "DELTA_LENGTH_BYTE_ARRAY"},
            write_statistics=["offset", "publish_time", "idempotency_key"],
            write_page_checksum=True,
            store_schema=True,
        )

    def add(self, group: pa.Table) -> None:
        if self._first_offset is None:
            self._first_offset = group["offset"][0].as_py()
        self._end_offset = group["offset"][-1].as_py() + 1
        self._writer.write_table(group, row_group_size=group.num_rows)

    def finish(self) -> None:
        assert self._first_offset is not None, "a segment holds at least one message"
        first, end = self._span or (self._first_offset, self._end_offset)
        assert first <= self._first_offset < self._end_offset <= end, "messages lie within the span"
        self._names["sparrow.first_offset"] = str(first)
        self._names["sparrow.end_offset"] = str(end)
        self._writer.add_key_value_metadata(self._names)
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()
        self._path.unlink(missing_ok=True)


def describe(path: Path, stream: StreamId, name: str | None = None) -> Segment:
    """Measures a segment file: sums, places, times; also what a rebuilt catalog is made from. ``name`` is
    what it will be called; else it is taken to have its name, or to get the usual one."""
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
    footer_start, footer_length = _footer_place(whole, path)
    metadata = _parquet().read_metadata(pa.BufferReader(whole))
    names = {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}
    groups = [_place(metadata.row_group(index), whole) for index in range(metadata.num_row_groups)]
    times = [_times(metadata, index) for index in range(metadata.num_row_groups)]
    first_offset = int(names["sparrow.first_offset"])
    return Segment(
        topic_id=stream.topic_id,
        partition=stream.partition,
        first_offset=first_offset,
        end_offset=int(names["sparrow.end_offset"]),
        rows=metadata.num_rows,
        size_bytes=whole.size,
        first_time_us=min(low for low, _ in times),
        last_time_us=max(high for _, high in times),
        file_name=name or _own_name(path, first_offset),
        footer_crc=google_crc32c.value(whole.slice(footer_start)),
        footer_length=footer_length,
        has_idempotency_keys=_has_values(metadata, "idempotency_key"),
        groups=pack_groups(groups),
    )


def _own_name(path: Path, first_offset: int) -> str:
    name = path.name.removesuffix(".damaged")
    return name if parse_name(name) else str(SegmentName(first_offset))


def _footer_place(whole: Any, path: Path) -> tuple[int, int]:
    """Start and length of the footer, with the eight bytes that close the file."""
    if whole.size < 12:
        raise DataDamaged(f"{path.name} is too short to be a segment")
    length, magic = _TAIL.unpack(whole.slice(whole.size - _TAIL.size).to_pybytes())
    total = length + _TAIL.size
    if magic != _PARQUET_MAGIC or total > whole.size:
        raise DataDamaged(f"{path.name} does not end as a segment does")
    return whole.size - total, total


def _place(group: Any, whole: Any) -> RowGroup:
    starts, ends = [], []
    for index in range(group.num_columns):
        column = group.column(index)
        start = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset:
            start = min(start, column.dictionary_page_offset)
        starts.append(start)
        ends.append(start + column.total_compressed_size)
    start, length = min(starts), max(ends) - min(starts)
    crc = _checksum(whole.slice(start, length))
    return RowGroup(group.column(0).statistics.min, group.num_rows, start, length, crc)


def _checksum(content: Any) -> int:
    """In pieces: while one is paged in and summed up nobody else gets the interpreter."""
    crc, size = 0, content.size
    for start in range(0, size, _CHECKSUM_BYTES):
        crc = google_crc32c.extend(crc, content.slice(start, min(_CHECKSUM_BYTES, size - start)))
        sleep(0)
    return crc


def _times(metadata: Any, group: int) -> tuple[int, int]:
    """First and last publish time of a row group in µs. As they are stored: for a ``datetime`` pyarrow would
    import pandas where it is installed, which stops everything for a second."""
    found = metadata.row_group(group).column(_column(metadata, "publish_time")).statistics
    return int(found.min_raw), int(found.max_raw)


def _has_values(metadata: Any, name: str) -> bool:
    place = _column(metadata, name)
    parts = [metadata.row_group(index).column(place) for index in range(metadata.num_row_groups)]
    return any(part.statistics is None or part.statistics.null_count < part.num_values for part in parts)


def _column(metadata: Any, name: str) -> int:
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    return paths.index(name)


class _Stretch:
    """A file of which only one stretch is in memory; Parquet's reader asks for nothing else."""

    closed = False

    def __init__(self, size: int, start: int, content: bytes) -> None:
        self._size = size
        self._start = start
        self._content = memoryview(content)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = position + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, length: int = -1) -> bytes:
        first = self._position - self._start
        length = self._size - self._position if length < 0 else length
        assert 0 <= first <= len(self._content) - length, "only what was fetched is asked for"
        self._position += length
        return bytes(self._content[first : first + length])

    def close(self) -> None:
        """Nothing to close."""


class SegmentReader:
    """An open segment; groups are fetched, checked and decoded one at a time.

    A group is fetched with one read of just its bytes. Mapping the file would let the kernel read far
    ahead of a reader that wants one group (18 times as much, measured), and a bad disk kill the process.
    """

    def __init__(self, path: Path, segment: Segment) -> None:
        self._path = path
        self._segment = segment
        self._groups = segment.row_groups()
        self._firsts = [group.first_offset for group in self._groups]
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._damaged(f"cannot be opened: {error}") from error
        try:
            self._metadata = self._checked_footer()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def group_of(self, offset: int) -> int:
        """The group that holds ``offset``, or the next one when it lies in a gap."""
        return max(0, bisect_right(self._firsts, offset) - 1)

    def read_group(self, index: int, columns: list[str] | None = None) -> pa.RecordBatch:
        """One row group as one record batch."""
        group = self._groups[index]
        content = self._fetch(group.byte_start, group.byte_length)
        if google_crc32c.value(content) != group.crc32c:
            raise self._damaged(f"row group {index} does not match its checksum", index)
        source = _Stretch(self._segment.size_bytes, group.byte_start, content)
        file = _parquet().ParquetFile(pa.PythonFile(source, "r"), metadata=self._metadata, pre_buffer=False)
        table = file.read_row_group(index, columns=columns, use_threads=False)
        schema = TABLE_SCHEMA if columns is None else pa.schema([TABLE_SCHEMA.field(c) for c in columns])
        arrays = [_one_chunk(table[name]) for name in schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _checked_footer(self) -> Any:
        segment, size = self._segment, os.fstat(self._descriptor).st_size
        if size != segment.size_bytes:
            raise self._damaged(f"has {size} bytes instead of {segment.size_bytes}")
        if self._fetch(0, 4) != _PARQUET_MAGIC:
            raise self._damaged("does not start as a segment does")
        start = max(0, size - max(segment.footer_length, _FOOTER_GUESS_BYTES))
        tail = self._fetch(start, size - start)
        if google_crc32c.value(tail[-segment.footer_length :]) != segment.footer_crc:
            raise self._damaged("has a footer that does not match its checksum")
        return _parquet().read_metadata(pa.PythonFile(_Stretch(size, start, tail), "r"))

    def _fetch(self, start: int, length: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, start)
        except OSError as error:
            raise self._damaged(f"cannot be read: {error}") from error

    def _damaged(self, what: str, index: int | None = None) -> DataDamaged:
        start, end = self._segment.first_offset, self._segment.end_offset
        if index is not None:
            groups = self._groups
            start = groups[index].first_offset
            end = groups[index + 1].first_offset if index + 1 < len(groups) else end
        return DataDamaged(
            f"segment {self._path.parent.name}/{self._path.name} {what}",
            topic_id=self._segment.stream.topic_id,
            partition=self._segment.stream.partition,
            start_offset=start,
            end_offset=end,
        )


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class GroupCache:
    """Decoded row groups and open readers, bounded by bytes and by count: a consumer that takes small
    steps through history must not decode a group at every step."""

    def __init__(self, bytes_max: int, readers_max: int) -> None:
        self._bytes_max = bytes_max
        self._readers_max = readers_max
        self._bytes = 0
        self._groups: OrderedDict[tuple[Path, int], pa.RecordBatch] = OrderedDict()
        self._readers: OrderedDict[Path, SegmentReader] = OrderedDict()

    def reader(self, path: Path, segment: Segment) -> SegmentReader:
        reader = self._readers.get(path)
        if reader is None:
            reader = self._readers[path] = SegmentReader(path, segment)
            if len(self._readers) > self._readers_max:
                self._readers.popitem(last=False)[1].close()
        self._readers.move_to_end(path)
        return reader

    def group(self, path: Path, reader: SegmentReader, index: int) -> pa.RecordBatch:
        batch = self._groups.get((path, index))
        if batch is None:
            batch = self._groups[path, index] = reader.read_group(index)
            self._bytes += batch.nbytes
            while self._bytes > self._bytes_max and len(self._groups) > 1:
                _, gone = self._groups.popitem(last=False)
                self._bytes -= gone.nbytes
        self._groups.move_to_end((path, index))
        return batch

    def forget(self, path: Path) -> None:
        reader = self._readers.pop(path, None)
        if reader is not None:
            reader.close()
        for key in [key for key in self._groups if key[0] == path]:
            self._bytes -= self._groups.pop(key).nbytes

    def close(self) -> None:
        for path in list(self._readers):
            self.forget(path)
