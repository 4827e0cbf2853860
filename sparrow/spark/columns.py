"""The columns that Spark sees: those of the lake, behind the topic and the partition.

Spark compares Arrow schemas to the letter, so the two forms below are made from one list. ``headers`` is the
attributes in the shape of Spark's Kafka source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sparrow.model.errors import InvalidOption
from sparrow.store.batch import TABLE_SCHEMA

HEADERS = StructField(
    "headers",
    ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
)
_OF_ARROW: dict[pa.DataType, DataType] = {
    pa.int8(): ByteType(),
    pa.int64(): LongType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.timestamp("us", tz="UTC"): TimestampType(),
    pa.map_(pa.string(), pa.string()): MapType(StringType(), StringType()),
    pa.list_(pa.string()): ArrayType(StringType()),
}
CANONICAL = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("partition", IntegerType(), nullable=False),
        *(StructField(field.name, _OF_ARROW[field.type], field.nullable) for field in TABLE_SCHEMA),
    ]
)
LAKE = StructType(CANONICAL.fields[2:])
"""What a segment file holds."""


def choose(columns: Sequence[str], has_headers: bool) -> StructType:
    """The schema that options ask for."""
    known = {field.name: field for field in [*CANONICAL.fields, HEADERS]}
    if not columns:
        return StructType([*CANONICAL.fields, *([HEADERS] if has_headers else [])])
    for name in columns:
        if name not in known:
            raise InvalidOption(
                f"option columns: there is no column {name!r}",
                hint=f"Columns are: {', '.join(known)}.",
                option="columns",
            )
    chosen = [known[name] for name in columns]
    if has_headers and HEADERS not in chosen:
        chosen.append(HEADERS)
    return StructType(chosen)


def check_schema(given: StructType) -> None:
    """A schema that the user wrote narrows the columns as the option does; it cannot change their types."""
    known = {field.name: field for field in [*CANONICAL.fields, HEADERS]}
    for field in given.fields:
        found = known.get(field.name)
        if found is None or found.dataType != field.dataType:
            said = "is not one of the source" if found is None else f"is {found.dataType.simpleString()}"
            raise InvalidOption(
                f"schema: the column {field.name!r} {said}",
                hint="Leave the schema out, or take table(..., schema=...) for typed columns.",
                option="schema",
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema that batches must have."""
    from pyspark.sql.pandas.types import to_arrow_schema

    found: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return found


class Shape:
    """Turns rows of the table form into rows of a schema."""

    def __init__(self, schema: StructType) -> None:
        self.names = [field.name for field in schema.fields]
        self._schema = arrow_schema(schema)

    @property
    def needed(self) -> list[str]:
        """The columns of the table form that are needed."""
        wanted = {"attributes" if name == "headers" else name for name in self.names}
        return [field.name for field in TABLE_SCHEMA if field.name in wanted]

    def take(self, rows: pa.RecordBatch, topic: str, partition: int) -> pa.RecordBatch:
        """The rows as Spark wants them."""
        arrays = [self._column(rows, name, topic, partition) for name in self.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, rows: pa.RecordBatch, name: str, topic: str, partition: int) -> Any:
        if name == "topic":
            return pa.repeat(pa.scalar(topic, pa.string()), rows.num_rows)
        if name == "partition":
            return pa.repeat(pa.scalar(partition, pa.int32()), rows.num_rows)
        if name == "headers":
            return _headers(rows.column("attributes"))
        found = rows.column(name)
        wanted = self._schema.field(name).type
        return found if found.type == wanted else found.cast(wanted)


def _headers(attributes: Any) -> Any:
    """A map as a list of key and value, its values as bytes."""
    whole = pa.concat_arrays([attributes, attributes.slice(0, 0)])  # without the offset of a slice
    pairs = pa.StructArray.from_arrays([whole.keys, whole.items.cast(pa.binary())], ["key", "value"])
    mask = whole.is_null() if whole.null_count else None
    offsets = pa.array(whole.offsets.to_numpy(), pa.int32())
    return pa.ListArray.from_arrays(offsets, pairs, mask=mask)
