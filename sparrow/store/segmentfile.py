"""A stretch of a segment file, read without the catalog: only the columns that are wanted, of only the row
groups that hold the offsets.

The broker checks row groups against sums in the catalog. Whoever reads a file by themselves has Parquet's own
page checksums, which every segment carries, and the names in its footer, which tell whether the file is what
was expected: paths are used again when a topic is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model.errors import DataDamaged, NotFound
from sparrow.model.message import StreamId
from sparrow.store.batch import TABLE_SCHEMA


def scan_segment(
    path: Path, stream: StreamId, start_offset: int, end_offset: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Rows with offsets from ``start_offset`` up to ``end_offset``, a row group at a time. The offset is
    always among the columns. A file that is gone or is another one's is NotFound, before the first row."""
    import pyarrow.parquet

    schema = pa.schema([field for field in TABLE_SCHEMA if field.name in columns or field.name == "offset"])
    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is gone") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, stream, start_offset, end_offset, error) from error
    with file:
        _check_names(path, file.metadata, stream)
        for index in range(file.metadata.num_row_groups):
            found = file.metadata.row_group(index).column(0).statistics
            if found.max < start_offset or found.min >= end_offset:
                continue
            try:
                table = file.read_row_group(index, columns=schema.names, use_threads=False)
            except (OSError, pa.ArrowInvalid) as error:
                raise _damaged(path, stream, found.min, found.max + 1, error) from error
            batch = _one_batch(table, schema)
            if found.min < start_offset or found.max >= end_offset:
                offsets = batch.column("offset")
                batch = batch.filter(
                    pc.and_(pc.greater_equal(offsets, start_offset), pc.less(offsets, end_offset))
                )
            yield batch


def _one_batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    columns = [table[name] for name in schema.names]
    arrays = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_names(path: Path, metadata: Any, stream: StreamId) -> None:
    names = metadata.metadata or {}
    expected = (str(stream.topic_id).encode(), str(stream.partition).encode())
    if (names.get(b"sparrow.topic_id"), names.get(b"sparrow.partition")) != expected:
        raise NotFound(f"{path} is of another topic by now")


def _damaged(path: Path, stream: StreamId, start: int, end: int, error: Exception) -> DataDamaged:
    return DataDamaged(
        f"segment {path.parent.name}/{path.name} cannot be read: {error}",
        topic_id=stream.topic_id,
        partition=stream.partition,
        start_offset=start,
        end_offset=end,
    )
