"""Schemas: whether a definition is right, and the columns that it means, as Arrow types.

``parse_schema`` is the one way in. A definition that is wrong, or that has no columns, is refused with the
place where. Libraries that a kind of schema needs are imported when there is one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa

from sparrow.model.errors import InvalidSchema
from sparrow.model.schema import DEFINITION_BYTES_MAX, RESERVED, SchemaType, TopicSchema


def parse_schema(type: object, definition: object, message: object = "") -> TopicSchema:
    """A schema that has columns. A definition is a mapping or its JSON text, for Protobuf bytes or base64."""
    try:
        kind = type if isinstance(type, SchemaType) else SchemaType(type)
    except ValueError as error:
        raise InvalidSchema(f"type: {type!r} is not json, avro or protobuf", place="type") from error
    if kind is SchemaType.PROTOBUF:
        if not isinstance(message, str) or not message:
            raise InvalidSchema(
                "message: a Protobuf schema names its message", hint="As in shop.Order.", place="message"
            )
        found = TopicSchema(type=kind, definition=_base64(definition), message=message)
    elif message:
        raise InvalidSchema(f"message: only Protobuf schemas have one, not {kind.value}", place="message")
    else:
        found = TopicSchema(type=kind, definition=_object(definition))
    try:
        columns = columns_of(found)
    except RecursionError as error:
        raise InvalidSchema("definition: it is nested too deeply", place="definition") from error
    for field in columns:
        if field.name.startswith(RESERVED):
            raise InvalidSchema(
                f"definition: the name {field.name!r} begins with __, as the message's own columns do",
                place="definition",
            )
    return found


def columns_of(schema: TopicSchema) -> pa.Schema:
    """The columns of a schema; all of them may be null."""
    if schema.type is SchemaType.JSON:
        from sparrow.kernel.jsonschema import json_columns

        return json_columns(schema.definition)
    if schema.type is SchemaType.AVRO:
        from sparrow.kernel.avroschema import AvroShape

        return AvroShape(schema.definition).columns
    from sparrow.kernel.protoschema import ProtoShape

    return ProtoShape(base64.b64decode(schema.definition), schema.message).columns  # type: ignore[arg-type]


def _object(definition: object) -> dict[str, Any]:
    """Plain data, also when it was text or a struct."""
    try:
        text = definition if isinstance(definition, str | bytes) else msgspec.json.encode(definition)
        if len(text) > DEFINITION_BYTES_MAX:
            raise _too_large()
        found = msgspec.json.decode(text)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidSchema):
            raise
        raise InvalidSchema(f"definition: it is not JSON: {error}", place="definition") from error
    if not isinstance(found, Mapping):
        raise InvalidSchema(
            "definition: it is not an object",
            hint="A payload with columns is a record (Avro) or an object (JSON Schema).",
            place="definition",
        )
    return dict(found)


def _base64(definition: object) -> str:
    if isinstance(definition, bytes):
        raw = definition
    else:
        try:
            raw = base64.b64decode(definition, validate=True)  # type: ignore[arg-type]
        except (TypeError, ValueError, binascii.Error) as error:
            raise InvalidSchema(
                "definition: it is not base64",
                hint="It is a FileDescriptorSet: protoc --include_imports --descriptor_set_out=FILE.",
                place="definition",
            ) from error
    if len(raw) > DEFINITION_BYTES_MAX:
        raise _too_large()
    return base64.b64encode(raw).decode()


def _too_large() -> InvalidSchema:
    return InvalidSchema(
        f"definition: it is larger than {DEFINITION_BYTES_MAX // 1024} KiB", place="definition"
    )
