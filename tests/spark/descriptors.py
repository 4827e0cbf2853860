"""Protobuf descriptors for tests, made without a compiler."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_TYPES = descriptor_pb2.FieldDescriptorProto
ORDER = "shop.Order"


def files() -> descriptor_pb2.FileDescriptorSet:
    """A file that defines shop.Order, without what it imports."""
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    file.enum_type.add(name="Status").value.extend(
        [
            descriptor_pb2.EnumValueDescriptorProto(name="NEW", number=0),
            descriptor_pb2.EnumValueDescriptorProto(name="PAID", number=1),
        ]
    )
    line = file.message_type.add(name="Line")
    _field(line, "sku", 1, _TYPES.TYPE_STRING)
    _field(line, "count", 2, _TYPES.TYPE_UINT32)
    order = file.message_type.add(name="Order")
    _field(order, "id", 1, _TYPES.TYPE_INT64)
    _field(order, "country", 2, _TYPES.TYPE_STRING)
    _field(order, "status", 3, _TYPES.TYPE_ENUM, ".shop.Status")
    _field(order, "lines", 4, _TYPES.TYPE_MESSAGE, ".shop.Line", is_repeated=True)
    _field(order, "at", 5, _TYPES.TYPE_MESSAGE, ".google.protobuf.Timestamp")
    entry = order.nested_type.add(name="LabelsEntry")
    entry.options.map_entry = True
    _field(entry, "key", 1, _TYPES.TYPE_STRING)
    _field(entry, "value", 2, _TYPES.TYPE_ENUM, ".shop.Status")
    _field(order, "labels", 6, _TYPES.TYPE_MESSAGE, ".shop.Order.LabelsEntry", is_repeated=True)
    _field(order, "total", 7, _TYPES.TYPE_UINT64)
    _field(order, "first", 8, _TYPES.TYPE_MESSAGE, ".shop.Line")
    _field(order, "seen", 9, _TYPES.TYPE_BYTES, is_repeated=True)
    tree = file.message_type.add(name="Tree")
    _field(tree, "left", 1, _TYPES.TYPE_MESSAGE, ".shop.Tree")
    return descriptor_pb2.FileDescriptorSet(file=[file])


def order_class() -> type[Any]:
    """The class of shop.Order, to write messages with."""
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(files().file[0])
    return GetMessageClass(pool.FindMessageTypeByName(ORDER))


def _field(
    message: Any, name: str, number: int, kind: Any, type_name: str = "", *, is_repeated: bool = False
) -> None:
    label = _TYPES.LABEL_REPEATED if is_repeated else _TYPES.LABEL_OPTIONAL
    message.field.add(name=name, number=number, type=kind, type_name=type_name or None, label=label)
