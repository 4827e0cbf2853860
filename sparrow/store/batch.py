"""A batch of messages: Python values or Arrow columns ↔ the body of a journal entry ↔ the table form.

Three forms of one thing. The *publish form* has only the columns that hold something; it is what a
publisher builds and what the journal stores, byte for byte (docs/format.md §3). The *table form* has
every column of the lake plus offset and publish time; it is what readers, Parquet and Spark see.
Nothing here looks at single messages except when it builds columns from Python values.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model.errors import DataDamaged, InvalidArgument
from sparrow.model.limits import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from sparrow.model.topic import Codec

_TIME = pa.timestamp("us", tz="UTC")
_ATTRIBUTES = pa.map_(pa.string(), pa.string())
_IDS = pa.list_(pa.string())
_SHARED_NULLS = 4096

PUBLISH_FIELDS = (
    pa.field("data", pa.binary()),
    pa.field("key", pa.string()),
    pa.field("attributes", _ATTRIBUTES),
    pa.field("event_time", _TIME),
    pa.field("priority", pa.int8()),
    pa.field("ttl_ms", pa.int64()),
    pa.field("deliver_at", _TIME),
    pa.field("idempotency_key", pa.string()),
    pa.field("sequence", pa.int64()),
    pa.field("depends_on", _IDS),
    pa.field("original_id", pa.string()),
)
"""The columns of a publish form; a column's place is its bit."""

BIT = {field.name: 1 << place for place, field in enumerate(PUBLISH_FIELDS)}

TABLE_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("publish_time", _TIME, nullable=False),
        pa.field("key", pa.string()),
        pa.field("data", pa.binary()),
        pa.field("attributes", _ATTRIBUTES),
        pa.field("event_time", _TIME),
        pa.field("priority", pa.int8()),
        pa.field("ttl_ms", pa.int64()),
        pa.field("deliver_at", _TIME),
        pa.field("idempotency_key", pa.string()),
        pa.field("producer_id", pa.int64()),
        pa.field("sequence", pa.int64()),
        pa.field("depends_on", _IDS),
        pa.field("original_id", pa.string()),
    ]
)

_PLACE = {name: place for place, name in enumerate(TABLE_SCHEMA.names)}
_INT64 = pa.int64()

_CODEC_NUMBER = {Codec.NONE: 0, Codec.LZ4: 1, Codec.ZSTD: 2}
_OPTIONS = {
    Codec.NONE: pa.ipc.IpcWriteOptions(),
    Codec.LZ4: pa.ipc.IpcWriteOptions(compression="lz4"),
    Codec.ZSTD: pa.ipc.IpcWriteOptions(compression="zstd"),
}


class Body(NamedTuple):
    """A publish form, encoded."""

    buffer: Any
    crc: int
    record_count: int
    columns: int
    codec: int


@lru_cache(maxsize=512)
def schema_of(columns: int) -> pa.Schema:
    """The publish schema that a bit set describes."""
    if columns >> len(PUBLISH_FIELDS) or not columns & 1:
        raise DataDamaged(
            f"the column set {columns:#x} is not one of this version",
            hint="The batch was written by a newer version of Sparrow; use that one.",
        )
    return pa.schema([field for place, field in enumerate(PUBLISH_FIELDS) if columns >> place & 1])


def columns_of(batch: pa.RecordBatch) -> int:
    """The bit set of a publish form."""
    return sum(BIT[name] for name in batch.schema.names)


def build(data: Sequence[bytes | None], **columns: Sequence[Any] | None) -> pa.RecordBatch:
    """A publish form from Python values; columns that are None or hold only None are left out."""
    arrays, fields = [], []
    for field in PUBLISH_FIELDS:
        values = data if field.name == "data" else columns.get(field.name)
        if values is None:
            continue
        array = _array(field, values)
        if field.name == "data" or array.null_count < len(array):
            arrays.append(array)
            fields.append(field)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _array(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    try:
        if field.name == "attributes":
            values = [None if not value else list(value.items()) for value in values]
        _refuse_silent_conversions(field, values)
        return pa.array(values, field.type)
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        UnicodeEncodeError,
        OverflowError,
        TypeError,
        AttributeError,
    ) as error:
        raise InvalidArgument(f"{field.name} cannot be stored as {field.type}: {error}") from error


def _refuse_silent_conversions(field: pa.Field, values: Sequence[Any]) -> None:
    """Arrow would cut 1.5 to 1, and take a string for the list of its characters."""
    wrong = {float, bool} if pa.types.is_integer(field.type) else {str} if field.type == _IDS else set()
    found = wrong and wrong.intersection(map(type, values))
    if found:
        raise TypeError(f"{found.pop().__name__} given")


def from_table(table: pa.Table | pa.RecordBatch) -> pa.Table:
    """The publish form of a user's Arrow table: known columns, cast to their types, in their order."""
    unknown = [name for name in table.schema.names if name not in BIT]
    if unknown or "data" not in table.schema.names:
        complaint = f"unknown column {', '.join(unknown)}" if unknown else "there is no column data"
        raise InvalidArgument(
            f"the table cannot be published: {complaint}",
            hint=f"Columns are: {', '.join(BIT)}; data is required. Rename or drop the others.",
        )
    if len(set(table.schema.names)) != len(table.schema.names):
        raise InvalidArgument("the table cannot be published: a column appears twice")
    fields = [field for field in PUBLISH_FIELDS if field.name in table.schema.names]
    chosen = pa.table(table) if isinstance(table, pa.RecordBatch) else table
    chosen = chosen.select([field.name for field in fields])
    kept = [f for f in fields if f.name == "data" or chosen[f.name].null_count < len(chosen)]
    try:
        return chosen.select([field.name for field in kept]).cast(pa.schema(kept))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise InvalidArgument(f"the table cannot be published: {error}") from error


def cut(table: pa.Table) -> list[pa.RecordBatch]:
    """A table in publish form as batches of a good size."""
    whole = table.combine_chunks().to_batches(max_chunksize=BATCH_MESSAGES_MAX)
    return [piece for batch in whole for piece in _cut_evenly(batch)]


def _cut_evenly(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Pieces of equal rows; where the large messages stand together, pieces are cut again."""
    count = -(-batch.nbytes // BATCH_BYTES_MAX)
    step = -(-batch.num_rows // max(1, count))
    for start in range(0, batch.num_rows, max(1, step)):
        piece = batch.slice(start, step)
        is_large = piece.nbytes > BATCH_BYTES_MAX * 5 // 4
        if is_large and 1 < piece.num_rows < batch.num_rows:
            yield from _cut_evenly(piece)
        else:
            yield piece


def encode(batch: pa.RecordBatch, codec: Codec = Codec.NONE) -> Body:
    """The bytes that the journal stores."""
    buffer = batch.serialize() if codec is Codec.NONE else _compressed(batch, codec)
    return Body(buffer, google_crc32c.value(buffer), batch.num_rows, columns_of(batch), _CODEC_NUMBER[codec])


def _compressed(batch: pa.RecordBatch, codec: Codec) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS[codec]) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return reader.read_next_message().serialize()


def decode(buffer: Any, columns: int) -> pa.RecordBatch:
    """The publish form again; without copying unless it was compressed."""
    try:
        return pa.ipc.read_record_batch(buffer, schema_of(columns))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataDamaged(f"a stored batch cannot be decoded: {error}") from error


def to_table_form(
    batch: pa.RecordBatch,
    base_offset: int,
    publish_time_us: int,
    producer_id: int = 0,
    base_sequence: int = 0,
) -> pa.RecordBatch:
    """The batch as readers see it; what all messages share becomes columns of one repeated value."""
    count = batch.num_rows
    arrays = list(_null_columns(count))
    arrays[_PLACE["offset"]] = pa.arange(base_offset, base_offset + count)
    arrays[_PLACE["publish_time"]] = _repeated(publish_time_us, _TIME, count)
    if producer_id:
        arrays[_PLACE["producer_id"]] = _repeated(producer_id, _INT64, count)
        arrays[_PLACE["sequence"]] = pa.arange(base_sequence, base_sequence + count)
    for place, name in enumerate(batch.schema.names):
        arrays[_PLACE[name]] = batch.column(place)
    return pa.RecordBatch.from_arrays(arrays, schema=TABLE_SCHEMA)


def _repeated(value: int, kind: pa.DataType, count: int) -> Any:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(array("q", [value]) * count)])


class Lot(NamedTuple):
    """A batch in publish form, and what its messages share."""

    batch: pa.RecordBatch
    base_offset: int
    publish_time_us: int
    producer_id: int
    base_sequence: int


def to_table(lots: Sequence[Lot]) -> pa.Table:
    """Batches with the same columns, all of producers or none, as one table. Costs a few calls for all of
    them, where ``to_table_form`` makes a dozen for each."""
    counts = [lot.batch.num_rows for lot in lots]
    total = sum(counts)
    made = {
        "offset": _spread([lot.base_offset for lot in lots], counts, pa.int64(), step=1),
        "publish_time": _spread([lot.publish_time_us for lot in lots], counts, _TIME, step=0),
    }
    if lots[0].producer_id:
        made["producer_id"] = _spread([lot.producer_id for lot in lots], counts, pa.int64(), step=0)
        made["sequence"] = _spread([lot.base_sequence for lot in lots], counts, pa.int64(), step=1)
    table = pa.Table.from_batches([lot.batch for lot in lots])
    names = table.schema.names
    columns = [
        table.column(names.index(field.name))
        if field.name in names
        else made[field.name]
        if field.name in made
        else _nulls(field.type, total)
        for field in TABLE_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=TABLE_SCHEMA)


def _spread(starts: Sequence[int], counts: Sequence[int], kind: pa.DataType, *, step: int) -> Any:
    """For each start as many values as counted: the start itself, or with a step the numbers from it on."""
    values = array("q")
    for start, count in zip(starts, counts, strict=True):
        values.extend(range(start, start + count) if step else array("q", [start]) * count)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _nulls(kind: pa.DataType, count: int) -> Any:
    """So many nulls, cut from shared ones: every call into Arrow that allocates may lose the interpreter."""
    return _many_nulls(kind).slice(0, count) if count <= _SHARED_NULLS else pa.nulls(count, kind)


def _null_columns(count: int) -> Sequence[Any]:
    """A column of nulls for every column of the table form."""
    if count > _SHARED_NULLS:
        return [pa.nulls(count, field.type) for field in TABLE_SCHEMA]
    return _few_null_columns(count)


@lru_cache(maxsize=1024)
def _few_null_columns(count: int) -> Sequence[Any]:
    return [_nulls(field.type, count) for field in TABLE_SCHEMA]


@cache
def _many_nulls(kind: pa.DataType) -> Any:
    return pa.nulls(_SHARED_NULLS, kind)


def size_of(batch: pa.RecordBatch | pa.Table) -> int:
    """Bytes of payload and metadata, without what slicing left behind."""
    return int(batch.get_total_buffer_size() if batch.num_rows == 0 else batch.nbytes)


def is_within(column: Any, bytes_max: int) -> bool:
    """Whether no value of a binary column is longer."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if sum(chunk.total_values_length for chunk in chunks) <= bytes_max:
        return True
    return longest(column) <= bytes_max


def longest(column: Any) -> int:
    """Bytes of the longest value of a binary or string column; 0 when there is none."""
    found = pc.max(pc.binary_length(column)).as_py()
    return int(found or 0)
