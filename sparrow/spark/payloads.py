"""Payloads of a schema as columns: Avro and Protobuf are decoded by the batch, in Spark's Python workers.

Only ``data`` goes to a worker and only its fields come back; all other columns stay in the JVM, where filters
on them still reach the files. A payload that cannot be decoded becomes null, whatever is wrong with it: one
message must not end a query.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from sparrow.kernel.schema import columns_of, parse_schema
from sparrow.model.errors import InvalidSchema
from sparrow.model.schema import SchemaType, TopicSchema

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_MARKER = b"\xc3\x01"
_HEADER = 10
"""The marker of a single object and the fingerprint of its schema."""


def avro(definition: Any) -> TopicSchema:
    """Payloads that are Avro records of one schema, given as text or as a mapping: each the bare binary
    encoding, or with the header of the single-object encoding. Files of Avro (``Obj``) are not payloads."""
    return parse_schema(SchemaType.AVRO, definition)


def protobuf(descriptors: bytes | str | Path, message: str) -> TopicSchema:
    """Payloads that are Protobuf messages of a type, as in ``shop.Order``. Descriptors are a serialized
    FileDescriptorSet or the path of one, as ``protoc --include_imports --descriptor_set_out`` writes it."""
    if isinstance(descriptors, bytes):
        return parse_schema(SchemaType.PROTOBUF, descriptors, message)
    path = Path(descriptors)
    try:
        return parse_schema(SchemaType.PROTOBUF, path.read_bytes(), message)
    except OSError as error:
        raise InvalidSchema(
            f"descriptors: {path} cannot be read: {error.strerror}", place="descriptors"
        ) from error


def spark_schema(schema: TopicSchema) -> StructType:
    """The columns of a schema as Spark's types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    found: StructType = from_arrow_schema(columns_of(schema))
    return found


def decoded(schema: TopicSchema, data: Column) -> Column:
    """A struct of the fields of Avro or Protobuf; null where the data is null or is none of this schema."""
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]

    text = msgspec.json.encode(schema)

    def decode(payloads: pa.Array) -> pa.Array:
        return decoder_of(text)(payloads)

    found: Column = arrow_udf(decode, spark_schema(schema))(data)
    return found


@lru_cache(maxsize=64)
def decoder_of(text: bytes) -> Callable[[pa.Array], pa.Array]:
    """Turns payloads into rows; made once a worker."""
    schema = msgspec.json.decode(text, type=TopicSchema)
    read, columns = _reader(schema)
    wanted = pa.struct(list(columns))

    def decode(payloads: pa.Array) -> pa.Array:
        return _build([_attempt(read, payload) for payload in payloads.to_pylist()], wanted)

    return decode


def _reader(schema: TopicSchema) -> tuple[Callable[[bytes], Any], pa.Schema]:
    if schema.type is SchemaType.AVRO:
        from sparrow.kernel.avroschema import AvroShape

        return _avro_reader(AvroShape(schema.definition))
    assert schema.type is SchemaType.PROTOBUF
    assert isinstance(schema.definition, str)
    from sparrow.kernel.protoschema import ProtoShape

    return _protobuf_reader(ProtoShape(base64.b64decode(schema.definition), schema.message))


def _avro_reader(shape: Any) -> tuple[Callable[[bytes], Any], pa.Schema]:
    from fastavro import schemaless_reader

    schema, convert, header = shape.reading, shape.convert, _MARKER + shape.fingerprint

    def read(payload: bytes) -> Any:
        source = io.BytesIO(payload)
        if payload.startswith(header):
            source.seek(_HEADER)
        record = schemaless_reader(source, schema, None, return_named_type=True)
        if source.tell() != len(payload):
            raise ValueError("there is more behind the record")
        return record if convert is None else convert(record)

    return read, shape.columns


def _protobuf_reader(shape: Any) -> tuple[Callable[[bytes], Any], pa.Schema]:
    parse, convert = shape.message.FromString, shape.convert

    def read(payload: bytes) -> Any:
        message = parse(payload)
        if not message.IsInitialized():
            raise ValueError("a required field is missing")
        return convert(message)

    return read, shape.columns


def _attempt(read: Callable[[bytes], Any], payload: bytes | None) -> Any:
    if payload is None:
        return None
    try:
        return read(payload)
    except Exception:  # noqa: BLE001 - decoders raise all kinds of errors, and each is of one message only
        return None


def _build(rows: list[Any], wanted: pa.DataType) -> pa.Array:
    """The rows as an array; those with a value that its column cannot hold are null."""
    try:
        return pa.array(rows, wanted)
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError):
        if len(rows) == 1:
            return pa.nulls(1, wanted)
        half = len(rows) // 2
        return pa.concat_arrays([_build(rows[:half], wanted), _build(rows[half:], wanted)])
