"""Protobuf: the columns of a message, and what its fields become on their way there.

Unsigned numbers get the next type that holds them all, uint64 a decimal. An enum is the name of its value, or
the number as text where this schema has no name for it. A field that can be told to be absent is null then.
Timestamps and durations are in microseconds, wrappers are what they wrap, and ``Struct``, ``Value`` and
``ListValue`` are their JSON. A message that holds itself has no columns and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from sparrow.kernel.avroschema import SECOND_US, check_us
from sparrow.model.errors import InvalidSchema
from sparrow.model.schema import COLUMNS_MAX

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
    from google.protobuf.descriptor_pool import DescriptorPool

_WRAPPERS = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
_JSON = ("Struct", "Value", "ListValue")
_GOOGLE = "google.protobuf."


class _Node(NamedTuple):
    type: pa.DataType
    convert: Callable[[Any], Any] | None = None


class ProtoShape:
    """What is known of a Protobuf message before one is read."""

    def __init__(self, descriptors: bytes, message: str) -> None:
        from google.protobuf.message_factory import GetMessageClass

        found = _find(_pool(descriptors), message)
        self._inside: list[str] = []
        self._count = 0
        whole = self._message(found, message)
        self.columns: pa.Schema = pa.schema(list(whole.type))
        assert whole.convert is not None
        self.convert: Callable[[Any], dict[str, Any]] = whole.convert
        self.message: type[Any] = GetMessageClass(found)

    def _message(self, given: Descriptor, place: str) -> _Node:
        if given.full_name in self._inside:
            raise InvalidSchema(
                f"{place}: the message {given.full_name} holds itself, which columns cannot",
                hint="Leave that field out of the reader's descriptors, or read the data as it is.",
                place=place,
            )
        self._inside.append(given.full_name)
        fields, readers = [], []
        for field in given.fields:
            self._count += 1
            if self._count > COLUMNS_MAX:
                raise InvalidSchema(f"{place}: there are more than {COLUMNS_MAX} fields", place=place)
            found = self._field(field, f"{place}.{field.name}")
            fields.append(pa.field(field.name, found.type))
            readers.append((field.name, field.has_presence, found.convert))
        self._inside.pop()

        def convert(message: Any) -> dict[str, Any]:
            row: dict[str, Any] = {}
            for name, is_told, change in readers:
                if not is_told or message.HasField(name):
                    value = getattr(message, name)
                    row[name] = value if change is None else change(value)
            return row

        return _Node(pa.struct(fields), convert)

    def _field(self, field: FieldDescriptor, place: str) -> _Node:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key = self._value(entry.fields_by_name["key"], place)
            value = self._value(entry.fields_by_name["value"], place)
            return _Node(pa.map_(key.type, value.type), _pairs(value.convert))
        found = self._value(field, place)
        if field.is_repeated:
            return _Node(pa.list_(found.type), _each(found.convert))
        return found

    def _value(self, field: FieldDescriptor, place: str) -> _Node:
        if field.message_type is not None:
            return self._known(field.message_type, place) or self._message(field.message_type, place)
        if field.enum_type is not None:
            return _Node(pa.string(), _names(field.enum_type))
        return _Node(_plain(field))

    def _known(self, given: Descriptor, place: str) -> _Node | None:
        """A type that everybody knows, as what it stands for."""
        if not given.full_name.startswith(_GOOGLE):
            return None
        name = given.full_name.removeprefix(_GOOGLE)
        if name == "Timestamp":
            return _Node(pa.timestamp("us", "UTC"), lambda value: check_us(_us(value)))
        if name == "Duration":
            return _Node(pa.duration("us"), _us)
        if name in _JSON:
            return _Node(pa.string(), _to_json)
        if name.removesuffix("Value") in _WRAPPERS:
            inner = self._value(given.fields_by_name["value"], place)
            return _Node(inner.type, lambda wrapper: wrapper.value)
        return None


def _pool(descriptors: bytes) -> DescriptorPool:
    """A pool of its own: names of two topics cannot clash."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError

    files = FileDescriptorSet()
    try:
        files.ParseFromString(descriptors)
    except DecodeError as error:
        raise InvalidSchema(
            "definition: it is not a FileDescriptorSet",
            hint="Make it with protoc --include_imports --descriptor_set_out=FILE.",
            place="definition",
        ) from error
    waiting, pool = {file.name: file for file in files.file}, DescriptorPool()

    def add(name: str, wanted_by: str) -> None:
        file = waiting.pop(name, None)
        if file is None:
            if name not in added:
                added.add(name)
                pool.AddSerializedFile(_well_known(name, wanted_by))
            return
        added.add(name)
        for needed in file.dependency:
            add(needed, name)
        try:
            pool.Add(file)
        except TypeError as error:
            said = " ".join(str(error).split())
            raise InvalidSchema(f"definition: {name}: {said}", place=f"definition.{name}") from error

    added: set[str] = set()
    for name in list(waiting):
        add(name, "")
    return pool


def _well_known(name: str, wanted_by: str) -> bytes:
    """A file that comes with the library, where the set was made without imports."""
    from google.protobuf import (
        any_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )

    known = (any_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
    for each in known:
        if each.DESCRIPTOR.name == name:
            found: bytes = each.DESCRIPTOR.serialized_pb
            return found
    raise InvalidSchema(
        f"definition: {wanted_by} imports {name}, which is not in it",
        hint="Make it with protoc --include_imports --descriptor_set_out=FILE.",
        place=f"definition.{wanted_by}",
    )


def _find(pool: DescriptorPool, message: str) -> Descriptor:
    try:
        found: Descriptor = pool.FindMessageTypeByName(message)
    except KeyError as error:
        raise InvalidSchema(f"message: the definition has no message {message!r}", place="message") from error
    return found


def _plain(field: FieldDescriptor) -> pa.DataType:
    types = {
        field.CPPTYPE_INT32: pa.int32(),
        field.CPPTYPE_INT64: pa.int64(),
        field.CPPTYPE_UINT32: pa.int64(),
        field.CPPTYPE_UINT64: pa.decimal128(20, 0),
        field.CPPTYPE_DOUBLE: pa.float64(),
        field.CPPTYPE_FLOAT: pa.float32(),
        field.CPPTYPE_BOOL: pa.bool_(),
    }
    if field.cpp_type == field.CPPTYPE_STRING:
        return pa.binary() if field.type == field.TYPE_BYTES else pa.string()
    return types[field.cpp_type]


# What fields become.


def _us(value: Any) -> int:
    found: int = value.seconds * SECOND_US + value.nanos // 1000
    return found


def _to_json(value: Any) -> str:
    from google.protobuf.json_format import MessageToJson

    return MessageToJson(value, indent=None)


def _names(enum: EnumDescriptor) -> Callable[[int], str]:
    # Of several names of a number the first is the one that the others are aliases of.
    names = {value.number: value.name for value in reversed(enum.values)}
    return lambda number: names.get(number) or str(number)


def _each(convert: Callable[[Any], Any] | None) -> Callable[[Any], list[Any]]:
    if convert is None:
        return list
    return lambda values: [convert(value) for value in values]


def _pairs(convert: Callable[[Any], Any] | None) -> Callable[[Any], list[tuple[Any, Any]]]:
    if convert is None:
        return lambda values: list(values.items())
    return lambda values: [(key, convert(value)) for key, value in values.items()]
