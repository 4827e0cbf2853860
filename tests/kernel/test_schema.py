"""Schemas of payloads: the columns that they mean, and what is refused, with the place."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from sparrow.kernel.schema import columns_of, parse_schema
from sparrow.model.errors import InvalidSchema
from sparrow.model.schema import COLUMNS_MAX
from tests.spark.descriptors import ORDER, files


def record(*fields: Any, **more: Any) -> dict[str, Any]:
    shown = [{"name": f"f{place}", "type": field} for place, field in enumerate(fields)]
    return {"type": "record", "name": "R", "fields": shown, **more}


def columns(kind: str, definition: Any, message: str = "") -> dict[str, Any]:
    found = columns_of(parse_schema(kind, definition, message))
    return {field.name: field.type for field in found}


LINE = {"type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}
UTC = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("boolean", pa.bool_()),
        ("int", pa.int32()),
        ("long", pa.int64()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("bytes", pa.binary()),
        ({"type": "string"}, pa.string()),
        (["null", "int"], pa.int32()),
        (["string", "null"], pa.string()),
        (["int", "null", "long"], pa.int64()),
        (["float", "double"], pa.float64()),
        (["null"], pa.string()),
        (["string", "long"], pa.struct([("member0", pa.string()), ("member1", pa.int64())])),
        ({"type": "int", "logicalType": "date"}, pa.date32()),
        ({"type": "long", "logicalType": "timestamp-millis"}, UTC),
        ({"type": "long", "logicalType": "timestamp-micros"}, UTC),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, pa.timestamp("us")),
        ({"type": "long", "logicalType": "time-micros"}, pa.int64()),
        ({"type": "string", "logicalType": "uuid"}, pa.string()),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, pa.decimal128(9, 2)),
        ({"type": "fixed", "name": "F", "size": 4}, pa.binary()),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.string()),
        ({"type": "array", "items": ["null", "int"]}, pa.list_(pa.int32())),
        ({"type": "map", "values": LINE}, pa.map_(pa.string(), pa.struct([("sku", pa.string())]))),
        (LINE, pa.struct([("sku", pa.string())])),
    ],
)
def test_avro_types_are_columns(given: Any, wanted: pa.DataType) -> None:
    assert columns("avro", record(given)) == {"f0": wanted}


def test_a_named_type_is_known_wherever_it_is_used_again() -> None:
    found = columns("avro", record(LINE, {"type": "array", "items": "shop.Line"}, "Line", namespace="shop"))
    assert found["f1"] == pa.list_(found["f0"])
    assert found["f2"] == found["f0"]


def test_a_definition_may_be_text() -> None:
    assert columns("avro", '{"type": "record", "name": "R", "fields": []}') == {}
    text = '{"properties": {"id": {"type": "integer"}}}'
    assert columns("json", text) == {"id": pa.int64()}


@pytest.mark.parametrize(
    ("given", "place", "said"),
    [
        ("not json", "definition", "not JSON"),
        ([1], "definition", "not an object"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "definition.type", "a record"),
        ({"type": "record", "name": "R"}, "definition.fields", "not an array"),
        ({"type": "record", "fields": []}, "definition.name", "has one"),
        (record("strin"), "definition", "no type strin"),
        (record({"type": "array"}), "definition.f0.items", "missing"),
        (record({"type": "map", "values": 7}), "definition.f0.values", "a type is"),
        (record({"type": "array", "items": {"type": "map"}}), "definition.f0.items.values", "missing"),
        (record({"type": "bytes", "logicalType": "decimal"}), "definition.f0", "precision"),
        (
            record({"type": "bytes", "logicalType": "decimal", "precision": 39}),
            "definition.f0",
            "precision from 1 to 38",
        ),
        (record(["null", "R"]), "definition.f0", "holds itself"),
        (record({"type": "array", "items": "null"}), "definition.f0.items", "take no bytes"),
        (
            record({"type": "array", "items": {"type": "record", "name": "E", "fields": []}}),
            "definition.f0.items",
            "take no bytes",
        ),
        (record([{"type": "int", "logicalType": "date"}, "long"]), "definition.f0.member1", "told from"),
        ({"type": "record", "name": "R", "fields": [{"name": "a"}]}, "definition.fields[0]", "a name and"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}] * 2},
            "definition.fields[1]",
            "is taken",
        ),
        (
            {"type": "record", "name": "R", "fields": [{"name": "__key", "type": "int"}]},
            "definition",
            "begins with __",
        ),
        ({"type": "x" * 600_000}, "definition", "larger than"),
    ],
)
def test_an_avro_schema_that_is_wrong_is_refused_with_the_place(given: Any, place: str, said: str) -> None:
    with pytest.raises(InvalidSchema, match=said) as refused:
        parse_schema("avro", given)
    assert refused.value.details["place"] == place
    assert refused.value.message.startswith(place.split("[")[0].split(".")[0])


def test_records_that_multiply_are_refused_before_they_fill_the_memory() -> None:
    inner: dict[str, Any] = {"type": "record", "name": "R0", "fields": [{"name": "x", "type": "int"}]}
    for level in range(1, 40):
        twice = [{"name": "a", "type": inner}, {"name": "b", "type": f"R{level - 1}"}]
        inner = {"type": "record", "name": f"R{level}", "fields": twice}
    with pytest.raises(InvalidSchema, match=f"more than {COLUMNS_MAX}"):
        parse_schema("avro", inner)


def test_protobuf_fields_are_columns() -> None:
    line = pa.struct([("sku", pa.string()), ("count", pa.int64())])
    assert columns("protobuf", files().SerializeToString(), ORDER) == {
        "id": pa.int64(),
        "country": pa.string(),
        "status": pa.string(),
        "lines": pa.list_(line),
        "at": UTC,
        "labels": pa.map_(pa.string(), pa.string()),
        "total": pa.decimal128(20, 0),
        "first": line,
        "seen": pa.list_(pa.binary()),
    }


@pytest.mark.parametrize(
    ("definition", "message", "place", "said"),
    [
        (files().SerializeToString(), "", "message", "names its message"),
        (files().SerializeToString(), "shop.Ordr", "message", "no message 'shop.Ordr'"),
        (files().SerializeToString(), "shop.Tree", "shop.Tree.left", "holds itself"),
        (b"\xff\xff", ORDER, "definition", "not a FileDescriptorSet"),
        ("no base64!", ORDER, "definition", "not base64"),
        (7, ORDER, "definition", "not base64"),
    ],
)
def test_protobuf_descriptors_that_are_wrong_are_refused(
    definition: Any, message: str, place: str, said: str
) -> None:
    with pytest.raises(InvalidSchema, match=said) as refused:
        parse_schema("protobuf", definition, message)
    assert refused.value.details["place"] == place


def test_descriptors_without_what_they_import_are_refused_by_the_name_of_the_file() -> None:
    given = files()
    given.file[0].dependency.append("shop/prices.proto")
    with pytest.raises(InvalidSchema, match=r"imports shop/prices\.proto") as refused:
        parse_schema("protobuf", given.SerializeToString(), ORDER)
    assert "--include_imports" in refused.value.hint


def test_json_schemas_are_columns_and_what_has_no_one_type_is_text() -> None:
    found = columns(
        "json",
        {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "price": {"type": ["number", "null"]},
                "at": {"type": "string", "format": "date-time"},
                "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
                "ok": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "line": {"$ref": "#/$defs/line"},
                "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
                "any": True,
                "mixed": {"type": ["string", "integer"]},
                "free": {"type": "object"},
                "tree": {"$ref": "#/$defs/tree"},
            },
            "$defs": {
                "line": {"properties": {"sku": {"type": "string"}}},
                "tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}},
            },
        },
    )
    text = pa.string()
    assert found == {
        "id": pa.int64(), "price": pa.float64(), "at": UTC, "day": pa.date32(), "ok": pa.bool_(),
        "tags": pa.list_(text), "line": pa.struct([("sku", text)]), "counts": pa.map_(text, pa.int64()),
        "any": text, "mixed": text, "free": text, "tree": pa.struct([("left", text)]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"type": "string"}, "definition.properties"),
        ({"properties": []}, "definition.properties"),
        ({"properties": {"a": {"type": "strin"}}}, "definition.a.type"),
        ({"properties": {"a": 7}}, "definition.a"),
        ({"properties": {"a": {"type": "array", "items": {"type": 7}}}}, "definition.a.items.type"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "definition.a.$ref"),
        ({"properties": {"a": {"$ref": "http://elsewhere"}}}, "definition.a.$ref"),
        ({"properties": {"a": {"anyOf": []}}}, "definition.a.anyOf"),
    ],
)
def test_a_json_schema_that_is_wrong_is_refused_with_the_place(given: Any, place: str) -> None:
    with pytest.raises(InvalidSchema) as refused:
        parse_schema("json", given)
    assert refused.value.details["place"] == place
    assert refused.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize(("kind", "message"), [("xml", ""), (None, ""), ("avro", "shop.Order")])
def test_only_known_types_and_messages_of_protobuf_are_taken(kind: Any, message: str) -> None:
    with pytest.raises(InvalidSchema):
        parse_schema(kind, record("int"), message)


def test_nothing_is_imported_for_schemas_before_there_is_one() -> None:
    code = (
        "import sys, sparrow.broker.broker; "
        "sys.exit(any(name.startswith(('fastavro', 'google.protobuf')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
