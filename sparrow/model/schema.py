"""The schema of a topic: what its payloads are, so that Spark can show their fields as columns.

A definition is data: a JSON Schema or an Avro schema as an object, or the descriptors of a Protobuf message
as base64. What it means, and whether it is right, is decided in kernel/schema.py.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

DOCUMENTS = "schema"
"""The kind under which the catalog keeps schemas, by the id of their topic."""
DEFINITION_BYTES_MAX = 512 * 1024
COLUMNS_MAX = 4096
"""Fields of a schema with those of its records inside, each as often as it is used."""
RESERVED = "__"
"""How the message's own columns begin beside typed ones."""


class SchemaType(enum.Enum):
    """How payloads are written."""

    JSON = "json"
    AVRO = "avro"
    PROTOBUF = "protobuf"


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    """What the payloads of a topic are."""

    type: SchemaType
    definition: dict[str, Any] | str
    """JSON Schema or Avro as an object; for Protobuf a FileDescriptorSet as base64."""
    message: str = ""
    """The full name of the Protobuf message."""
