"""Typed columns of Avro and Protobuf: decoded by the batch, poison beside its neighbours, as JSON is."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest

import sparrow.spark
from sparrow.kernel.schema import parse_schema
from sparrow.model import errors
from sparrow.model.errors import InvalidSchema
from tests.spark.conftest import Served
from tests.spark.descriptors import ORDER, files, order_class

AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "country", "type": ["null", "string"]},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {"type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]},
            },
        },
        {"name": "gift", "type": ["null", "Line"]},
        {"name": "labels", "type": {"type": "map", "values": "Status"}},
        {"name": "note", "type": ["null", "string", "long", "Line"]},
    ],
}
AT = datetime(2026, 11, 15, 12, 0, 0, 5000, UTC)


def record(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number, "country": "de", "amount": Decimal("12.34"), "status": "PAID", "at": AT,
        "day": date(2026, 11, 15), "lines": [{"sku": "a"}, {"sku": "b"}], "gift": {"sku": "g"},
        "labels": {"x": "NEW"}, "note": "hello", **more,
    }  # fmt: skip


def datum(schema: Any, value: Any) -> bytes:
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(schema), value)
    return sink.getvalue()


def by_key(frame: Any) -> dict[str, Any]:
    return {row["__key"]: row for row in frame.collect()}


def publish(served: Served, rows: dict[str, bytes | None]) -> None:
    """Half of the rows in files, half in the tail."""
    served.client.create_topic("orders", partitions=2)
    for place, (key, data) in enumerate(rows.items()):
        served.client.publish("orders", data, key=key)
        if place == len(rows) // 2:
            served.client.seal()


def test_avro_becomes_columns_and_poison_stands_beside_its_neighbours(spark: Any, served: Served) -> None:
    good = datum(AVRO, record(1))
    print_ = bytes.fromhex(
        fastavro.schema.fingerprint(
            fastavro.schema.to_parsing_canonical_form(fastavro.parse_schema(AVRO)), "CRC-64-AVRO"
        )
    )
    publish(
        served,
        {
            "raw": good,
            "single": b"\xc3\x01" + print_ + datum(AVRO, record(2, country=None, day=None, note=7)),
            "foreign": b"\xc3\x01" + b"\0" * 8 + good,
            "torn": good[:-3],
            "longer": good + b"\0",
            "late": datum(AVRO, record(3)).replace(
                datum("long", int(AT.timestamp() * 1000)), datum("long", 2**62)
            ),
            "wide": datum(AVRO, record(4)).replace(b"\x04\x04\xd2", b"\x08\x7f\xff\xff\xff"),
            "empty": b"",
            "noise": bytes(range(255, 200, -1)),
            "tombstone": None,
            "last": datum(AVRO, record(5, gift=None, note={"sku": "n"}, labels={}, lines=[])),
        },
    )
    frame = sparrow.spark.table(spark, "orders", servers=served.address, schema=sparrow.spark.avro(AVRO))
    names = [field["name"] for field in AVRO["fields"]]
    assert frame.columns[: len(names) + 3] == [*names, "__malformed", "__topic", "__partition"]
    rows = by_key(frame)
    raw = rows["raw"]
    assert raw.asDict(recursive=True).items() >= {
        "id": 1, "country": "de", "amount": Decimal("12.34"), "status": "PAID", "day": date(2026, 11, 15),
        "lines": [{"sku": "a"}, {"sku": "b"}], "gift": {"sku": "g"}, "labels": {"x": "NEW"},
        "note": {"member0": "hello", "member1": None, "member2": None}, "__malformed": None,
        "__topic": "orders",
    }.items()  # fmt: skip
    assert raw["at"].astimezone(UTC) == AT
    assert (rows["single"]["id"], rows["single"]["country"], rows["single"]["day"]) == (2, None, None)
    assert rows["single"]["note"].asDict() == {"member0": None, "member1": 7, "member2": None}
    assert (rows["last"]["gift"], rows["last"]["labels"], rows["last"]["lines"]) == (None, {}, [])
    assert rows["last"]["note"]["member2"]["sku"] == "n"
    for key in ("foreign", "torn", "longer", "late", "wide", "empty", "noise"):
        assert rows[key]["id"] is None, key
        assert rows[key]["__malformed"] is not None, key
    # The text holds the bytes as they came.
    kept = frame.where("__key = 'noise'").selectExpr("cast(__malformed as binary) as b").collect()
    assert bytes(kept[0]["b"]) == bytes(range(255, 200, -1))
    assert (rows["tombstone"]["id"], rows["tombstone"]["__malformed"]) == (None, None)
    assert frame.where("id >= 2 and status = 'PAID'").count() == 2
    assert frame.where("__malformed is not null").count() == 7


@pytest.mark.soak
def test_protobuf_becomes_columns_also_of_a_stream(spark: Any, served: Served, tmp_path: Path) -> None:
    order = order_class()
    whole = order(id=1, country="de", status=1, total=2**64 - 1, labels={"x": 1, "y": 9}, seen=[b"\xff"])
    whole.at.FromDatetime(AT)
    whole.lines.add(sku="a", count=2**32 - 1)
    late = order(id=3)
    late.at.seconds = 2**60
    publish(
        served,
        {
            "whole": whole.SerializeToString(),
            "bad": b"\xff\xff no message",
            "late": late.SerializeToString(),
            "empty": b"",
            "tombstone": None,
        },
    )
    (tmp_path / "shop.desc").write_bytes(files().SerializeToString())
    schema = sparrow.spark.protobuf(tmp_path / "shop.desc", ORDER)
    frame = sparrow.spark.table(spark, "orders", servers=served.address, schema=schema)
    rows = by_key(frame)
    assert rows["whole"].asDict(recursive=True).items() >= {
        "id": 1, "country": "de", "status": "PAID", "lines": [{"sku": "a", "count": 2**32 - 1}],
        "labels": {"x": "PAID", "y": "9"}, "total": Decimal(2**64 - 1), "first": None, "seen": [b"\xff"],
        "__malformed": None,
    }.items()  # fmt: skip
    assert rows["whole"]["at"].astimezone(UTC) == AT
    for key in ("bad", "late"):
        assert (rows[key]["id"], rows[key]["__malformed"] is None) == (None, False), key
    assert (rows["empty"]["id"], rows["empty"]["status"], rows["empty"]["at"]) == (0, "NEW", None)
    assert (rows["tombstone"]["id"], rows["tombstone"]["__malformed"]) == (None, None)
    live = sparrow.spark.stream(spark, "orders", servers=served.address, schema=schema)
    query = (
        live.writeStream.format("parquet")
        .options(path=str(tmp_path / "out"), checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(row["id"] for row in found.where("id is not null").collect()) == [0, 1]
    assert found.where("__malformed is not null").count() == 2


def test_a_schema_whose_names_clash_or_without_data_is_refused(spark: Any, served: Served) -> None:
    served.client.create_topic("orders")
    with pytest.raises(InvalidSchema, match="begins with __"):
        sparrow.spark.avro({"type": "record", "name": "R", "fields": [{"name": "__key", "type": "int"}]})
    with pytest.raises(errors.InvalidArgument, match="columns must have data"):
        sparrow.spark.table(
            spark, "orders", servers=served.address, columns=["key"], schema=sparrow.spark.avro(AVRO)
        )


@pytest.mark.soak
def test_a_json_schema_gives_the_same_columns_as_its_ddl(spark: Any, served: Served) -> None:
    publish(served, {"good": b'{"id": 1, "at": "2026-11-15T12:00:00Z", "tags": ["a"]}', "bad": b"no json"})
    schema = parse_schema(
        "json",
        {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "at": {"type": "string", "format": "date-time"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    )
    frame = sparrow.spark.table(spark, "orders", servers=served.address, schema=schema)
    by_ddl = sparrow.spark.table(
        spark, "orders", servers=served.address, schema="id BIGINT, at TIMESTAMP, tags ARRAY<STRING>"
    )
    assert frame.schema == by_ddl.schema
    assert by_key(frame) == by_key(by_ddl)
    assert by_key(frame)["bad"]["__malformed"] == "no json"


def test_a_topic_that_has_a_schema_is_typed_by_itself(spark: Any, served: Served, tmp_path: Path) -> None:
    small = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    publish(served, {f"k-{number}": datum(small, {"id": number}) for number in range(4)})
    where = {"servers": served.address}
    assert "data" in sparrow.spark.table(spark, "orders", **where).columns
    served.client.set_topic_schema("orders", type="avro", definition=small)
    frame = sparrow.spark.table(spark, "orders", **where)
    assert frame.columns[:2] == ["id", "__malformed"]
    assert sorted(row["id"] for row in frame.collect()) == [0, 1, 2, 3]
    assert sparrow.spark.stream(spark, "orders", **where).columns[:2] == ["id", "__malformed"]
    # None is the data as it is; so are columns without it, and patterns, whose topics may differ.
    assert "data" in sparrow.spark.table(spark, "orders", schema=None, **where).columns
    assert sparrow.spark.table(spark, "orders", columns=["key"], **where).columns == ["key"]
    assert "data" in sparrow.spark.table(spark, "orders.#", **where).columns
    assert sparrow.spark.table(spark, "orders", schema="x BIGINT", **where).columns[0] == "x"
    served.close()
    stopped = sparrow.spark.table(spark, "orders", path=str(served.directory))
    assert stopped.columns[:2] == ["id", "__malformed"]
    assert sorted(row["id"] for row in stopped.collect()) == [0, 1, 2, 3]


@pytest.mark.soak
def test_times_do_not_depend_on_the_time_zone_of_the_session(spark: Any) -> None:
    times = {
        "type": "record",
        "name": "Times",
        "fields": [
            {"name": "nanos", "type": {"type": "long", "logicalType": "timestamp-nanos"}},
            {"name": "here", "type": {"type": "long", "logicalType": "local-timestamp-millis"}},
        ],
    }
    payload = datum({**times, "fields": [{"name": n, "type": "long"} for n in ("nanos", "here")]},
                    {"nanos": 1_700_000_000_123_456_789, "here": 1_700_000_000_123})  # fmt: skip
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        frame = sparrow.spark.typed(
            spark.createDataFrame([(bytearray(payload),)], "data BINARY"), sparrow.spark.avro(times)
        )
        assert [field.dataType.simpleString() for field in frame.schema][:2] == ["timestamp", "timestamp_ntz"]
        (row,) = frame.selectExpr("unix_micros(nanos) as us", "cast(here as string) as here").collect()
        assert tuple(row) == (1_700_000_000_123_456, "2023-11-14 22:13:20.123")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
