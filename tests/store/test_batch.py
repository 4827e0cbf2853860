"""The three forms of a batch: Python values, stored bytes, table."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.model.errors import DataDamaged, InvalidArgument
from sparrow.model.limits import BATCH_BYTES_MAX
from sparrow.model.topic import Codec
from sparrow.store import batch as batches
from sparrow.store.batch import (
    BIT,
    PUBLISH_FIELDS,
    TABLE_SCHEMA,
    build,
    columns_of,
    decode,
    encode,
    from_table,
    schema_of,
    to_table_form,
)

MOMENT = datetime(2024, 5, 6, 7, 8, 9, 10, UTC)
FULL: dict[str, list[Any]] = {
    "key": ["k1", None, "k3"],
    "attributes": [{"a": "1", "b": "2"}, None, {}],
    "event_time": [MOMENT, None, 5],
    "priority": [-128, None, 127],
    "ttl_ms": [1, None, 2**40],
    "deliver_at": [None, MOMENT, None],
    "idempotency_key": ["i", None, "j"],
    "sequence": [5, 9, 10],
    "depends_on": [["1-0-1", "1-0-2"], None, []],
    "original_id": [None, None, "9-9-9"],
}


def full() -> pa.RecordBatch:
    return build([b"a", None, b""], **FULL)


# Building.


def test_a_batch_of_data_alone_has_one_column() -> None:
    batch = build([b"a", b"b"])
    assert batch.schema.names == ["data"]
    assert columns_of(batch) == 1


def test_columns_come_in_the_order_of_their_bits_however_they_were_given() -> None:
    batch = build([b"a"], idempotency_key=["i"], key=["k"], priority=[1])
    assert batch.schema.names == ["data", "key", "priority", "idempotency_key"]
    assert columns_of(batch) == BIT["data"] | BIT["key"] | BIT["priority"] | BIT["idempotency_key"]


def test_a_column_in_which_nothing_stands_is_left_out() -> None:
    batch = build([b"a", b"b"], key=[None, None], attributes=[{}, None], priority=None)
    assert batch.schema.names == ["data"]


def test_data_is_there_even_when_all_messages_are_tombstones() -> None:
    batch = build([None, None])
    assert batch.schema.names == ["data"]
    assert batch.column("data").null_count == 2


def test_every_column_holds_what_was_given() -> None:
    rows = full().to_pylist()
    assert [row["data"] for row in rows] == [b"a", None, b""]
    assert [row["key"] for row in rows] == ["k1", None, "k3"]
    assert [row["attributes"] for row in rows] == [[("a", "1"), ("b", "2")], None, None]
    assert rows[0]["event_time"] == MOMENT
    assert full().column("event_time").cast(pa.int64()).to_pylist()[2] == 5
    assert [row["priority"] for row in rows] == [-128, None, 127]
    assert [row["depends_on"] for row in rows] == [["1-0-1", "1-0-2"], None, []]
    assert [row["original_id"] for row in rows] == [None, None, "9-9-9"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("key", 7),
        ("priority", 128),
        ("priority", "high"),
        ("ttl_ms", 2**63),
        ("attributes", {"a": 1}),
        ("attributes", ["a"]),
        ("event_time", "yesterday"),
        ("depends_on", "1-0-1"),
        ("sequence", 1.5),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_refused_and_the_column_named(
    column: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument, match=column):
        build([b"a"], **{column: [value]})


def test_the_payload_is_not_taken_from_other_types() -> None:
    with pytest.raises(InvalidArgument, match="data cannot be stored"):
        build([7])


# From a user's table.


def test_a_table_is_cast_and_put_in_order() -> None:
    table = pa.table(
        {
            "priority": pa.array([1, 2], pa.int64()),
            "key": pa.array(["a", "b"], pa.large_string()),
            "data": pa.array(["x", "y"], pa.string()),
            "event_time": pa.array([1, 2], pa.timestamp("ms", tz="Europe/Paris")),
        }
    )
    got = from_table(table)
    assert got.schema.names == ["data", "key", "event_time", "priority"]
    assert got.schema.equals(pa.schema([f for f in PUBLISH_FIELDS if f.name in got.schema.names]))
    assert got["data"].to_pylist() == [b"x", b"y"]
    assert got["event_time"].cast(pa.int64()).to_pylist() == [1000, 2000]


def test_a_record_batch_is_taken_as_a_table() -> None:
    assert from_table(pa.record_batch({"data": [b"a"]}))["data"].to_pylist() == [b"a"]


def test_dictionary_columns_are_unfolded() -> None:
    table = pa.table({"data": [b"a", b"b"], "key": pa.array(["k", "k"]).dictionary_encode()})
    assert from_table(table)["key"].to_pylist() == ["k", "k"]


def test_a_column_of_nulls_is_left_out_of_whatever_type_it_is() -> None:
    table = pa.table({"data": [b"a"], "key": pa.nulls(1), "attributes": pa.nulls(1, pa.int8())})
    assert from_table(table).schema.names == ["data"]


def test_a_table_without_data_is_refused_with_the_list_of_columns() -> None:
    with pytest.raises(InvalidArgument, match="there is no column data") as caught:
        from_table(pa.table({"key": ["a"]}))
    assert all(name in caught.value.hint for name in BIT)


def test_an_unknown_column_is_refused_and_named() -> None:
    with pytest.raises(InvalidArgument, match="unknown column colour, size"):
        from_table(pa.table({"data": [b"a"], "colour": [1], "size": [2]}))


def test_a_column_that_appears_twice_is_refused() -> None:
    twice = pa.Table.from_arrays([pa.array([b"a"]), pa.array(["k"]), pa.array(["l"])], ["data", "key", "key"])
    with pytest.raises(InvalidArgument, match="a column appears twice"):
        from_table(twice)


@pytest.mark.parametrize(
    "column",
    [
        {"priority": [300]},
        {"priority": ["x"]},
        {"key": [["a"]]},
        {"attributes": [1]},
        {"event_time": ["soon"]},
    ],
)
def test_a_column_that_cannot_be_cast_is_refused(column: dict[str, list[Any]]) -> None:
    with pytest.raises(InvalidArgument, match="the table cannot be published"):
        from_table(pa.table({"data": [b"a"], **column}))


# Encoding.


@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_gives_the_batch_back(codec: Codec) -> None:
    body = encode(full(), codec)
    again = decode(body.buffer, body.columns)
    assert again.equals(full())
    assert again.schema.equals(full().schema)
    assert body.record_count == 3
    assert body.crc == google_crc32c.value(body.buffer)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_compression_makes_repetitive_data_small(codec: Codec) -> None:
    batch = build([b"sparrow" * 100] * 100)
    assert len(encode(batch, codec).buffer) < len(encode(batch).buffer) / 10


def test_the_whole_body_is_the_size_that_its_buffer_says() -> None:
    for codec in Codec:
        body = encode(full(), codec)
        assert len(memoryview(body.buffer)) == len(body.buffer)


def test_an_uncompressed_batch_is_decoded_where_it_lies() -> None:
    body = encode(build([b"x" * 1000] * 10))
    data = decode(body.buffer, body.columns).column("data").buffers()[2]
    assert body.buffer.address <= data.address < body.buffer.address + body.buffer.size


def test_a_slice_is_stored_without_what_it_was_cut_from() -> None:
    large = build([bytes([n]) * 1000 for n in range(100)], key=[f"k{n}" for n in range(100)])
    body = encode(large.slice(40, 2))
    assert len(body.buffer) < 3000
    assert decode(body.buffer, body.columns).to_pylist() == large.slice(40, 2).to_pylist()


@given(
    st.lists(st.binary(max_size=40) | st.none(), min_size=1, max_size=40),
    st.sampled_from(list(Codec)),
    st.data(),
)
def test_any_batch_survives_storing(data: list[bytes | None], codec: Codec, more: st.DataObject) -> None:
    keys = more.draw(st.lists(st.text(max_size=8) | st.none(), min_size=len(data), max_size=len(data)))
    batch = build(data, key=keys)
    body = encode(batch, codec)
    assert decode(body.buffer, body.columns).to_pylist() == batch.to_pylist()


def test_every_set_of_columns_has_its_schema() -> None:
    for columns in range(1, 1 << len(PUBLISH_FIELDS), 2):
        names = [field.name for place, field in enumerate(PUBLISH_FIELDS) if columns >> place & 1]
        assert schema_of(columns).names == names


@pytest.mark.parametrize("columns", [0, 2, 1 << 11 | 1, 1 << 31 | 1])
def test_a_set_of_columns_of_another_version_is_refused(columns: int) -> None:
    with pytest.raises(DataDamaged, match="is not one of this version"):
        schema_of(columns)


def test_bytes_that_are_no_batch_are_called_damaged() -> None:
    with pytest.raises(DataDamaged, match="cannot be decoded"):
        decode(pa.py_buffer(b"\0" * 64), 1)
    body = encode(full())
    with pytest.raises(DataDamaged):
        decode(body.buffer.slice(0, 40), body.columns)


# The table form.


def test_the_table_form_has_every_column_of_the_lake() -> None:
    table = to_table_form(build([b"a", b"b"]), 40, 1_000_000)
    assert table.schema.equals(TABLE_SCHEMA)
    assert table.column("offset").to_pylist() == [40, 41]
    assert table.column("publish_time").cast(pa.int64()).to_pylist() == [1_000_000, 1_000_000]


def test_absent_columns_are_null() -> None:
    table = to_table_form(build([b"a"]), 0, 1)
    for name in TABLE_SCHEMA.names:
        expected = 0 if name in ("offset", "publish_time", "data") else 1
        assert table.column(name).null_count == expected, name


def test_present_columns_are_the_published_ones_and_not_copied() -> None:
    batch = full()
    table = to_table_form(batch, 0, 1)
    for name in batch.schema.names:
        assert table.column(name).equals(batch.column(name))
    assert table.column("data").buffers()[2].address == batch.column("data").buffers()[2].address


def test_a_producers_sequences_count_up_from_the_base() -> None:
    table = to_table_form(build([b"a", b"b"]), 0, 1, producer_id=9, base_sequence=100)
    assert table.column("producer_id").to_pylist() == [9, 9]
    assert table.column("sequence").to_pylist() == [100, 101]


def test_scattered_sequences_of_a_producer_come_from_their_column() -> None:
    table = to_table_form(build([b"a", b"b"], sequence=[100, 107]), 0, 1, producer_id=9, base_sequence=100)
    assert table.column("sequence").to_pylist() == [100, 107]


def test_the_table_form_passes_arrows_own_full_check() -> None:
    to_table_form(full(), 7, 1, producer_id=2, base_sequence=3).validate(full=True)


@pytest.mark.parametrize(
    ("values", "expected"), [([b"a", b"abc", None], 3), ([None], 0), ([], 0), ([b""], 0)]
)
def test_the_longest_value_is_measured_in_bytes(values: list[bytes | None], expected: int) -> None:
    assert batches.longest(pa.array(values, pa.binary())) == expected


def test_the_size_of_a_slice_is_its_own() -> None:
    large = build([b"x" * 1000] * 100)
    assert batches.size_of(large) > 100_000
    assert batches.size_of(large.slice(0, 1)) < 1_200


def test_a_table_whose_large_messages_stand_together_is_cut_where_they_are() -> None:
    table = pa.table({"data": pa.array([b"x"] * 500 + [b"y" * 1_000_000] * 30, pa.binary())})
    pieces = batches.cut(table)
    assert max(piece.nbytes for piece in pieces) <= BATCH_BYTES_MAX * 5 // 4
    assert pa.Table.from_batches(pieces).equals(table)
