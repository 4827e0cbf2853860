"""What a write asks for is checked when it is planned, and complaints name the option or the column."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sparrow.model.errors import InvalidArgument, InvalidOption
from sparrow.spark import sink
from sparrow.spark.writeplan import WritePlan, parse_plan
from sparrow.spark.writer import to_messages

SERVERS = {"servers": "127.0.0.1:9092"}


def headers_of(value: DataType) -> ArrayType:
    return ArrayType(StructType([StructField("key", StringType()), StructField("value", value)]))


TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
    "array<string>": ArrayType(StringType()),
    "array<struct<key:string,value:binary>>": headers_of(BinaryType()),
    "array<struct<key:string,value:int>>": headers_of(IntegerType()),
}


def schema(text: str) -> StructType:
    """The schema that a text describes, without a JVM that could parse it."""
    pairs = [column.split(" ", 1) for column in text.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in pairs])


def plan(columns: str, **options: str) -> WritePlan:
    return parse_plan({**SERVERS, **options}, schema(columns), False, is_stream=True)


@pytest.mark.parametrize(
    "columns",
    [
        "data binary",
        "value string",
        "key string, value binary, headers array<struct<key:string,value:binary>>",
        "data string, attributes map<string,string>, event_time timestamp, priority int, ttl_ms bigint",
        "data string, key binary, ttl_s double, deliver_at timestamp, depends_on array<string>, topic string",
    ],
)
def test_columns_of_messages_are_taken(columns: str) -> None:
    found = dict(plan(columns, topic="out").columns)
    assert set(found) == set(schema(columns).fieldNames()) - {"topic"}


@pytest.mark.parametrize(
    ("columns", "named", "said"),
    [
        ("key string", "data", "missing"),
        ("data int", "data", "binary or a string, not int"),
        ("data string, value string", "value", "'data'"),
        ("data string, colour string", "colour", "not one of a message"),
        ("data string, attributes map<string,int>", "attributes", "map of strings"),
        ("data string, headers array<string>", "headers", "array of structs"),
        ("data string, headers array<struct<key:string,value:int>>", "headers", "array of structs"),
        ("data string, event_time string", "event_time", "timestamp"),
        ("data string, priority double", "priority", "whole number"),
        ("data string, ttl_ms bigint, ttl_s double", "ttl_s", "'ttl_ms'"),
        ("data string, depends_on string", "depends_on", "array of strings"),
        ("data string, offset bigint", "offset", "not one of a message"),
    ],
)
def test_a_wrong_column_is_named(columns: str, named: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        plan(columns, topic="out")
    assert caught.value.details["column"] == named
    assert repr(named) in str(caught.value)


def test_a_topic_comes_from_the_option_or_the_column() -> None:
    assert plan("data string", topic="out").topic == "out"
    assert plan("data string, topic string").topic is None
    assert ("topic", "topic") in plan("data string, topic string").columns
    with pytest.raises(InvalidArgument, match="'topic' is missing"):
        plan("data string")


@pytest.mark.parametrize(
    ("options", "named", "said"),
    [
        ({"topik": "out"}, "topik", "Did you mean topic"),
        ({"topic": "a..b"}, "topic", "empty"),
        ({"topic": "out", "compression": "gzip"}, "compression", "lz4"),
        ({"topic": "out", "priorityClass": "royal"}, "priorityClass", "royal"),
        ({"topic": "out", "applicationId": ""}, "applicationId", "application"),
        ({"topic": "out", "batchId": "3"}, "batchId", "batch writes alone"),
        ({"topic": "out", "path": "/x"}, "path", "for reading"),
        ({"topic": "out", "servers": "a b"}, "servers", "address"),
        ({"topic": "out", "retryTimeout": "soon"}, "retryTimeout", "duration"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], named: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said) as caught:
        plan("data string", **options)
    assert caught.value.details["option"] == named


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"applicationId": "job"}, "go together"),
        ({"batchId": "1"}, "go together"),
        ({"applicationId": "job", "batchId": "-1"}, "whole number"),
    ],
)
def test_a_batch_write_names_application_and_batch_together(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        sink.batch_writer({**SERVERS, "topic": "out", **options}, schema("data string"), False)


def test_overwriting_is_refused() -> None:
    with pytest.raises(InvalidOption, match="overwritten"):
        sink.stream_writer({**SERVERS, "topic": "out"}, schema("data string"), True)


def test_what_spark_adds_to_the_options_is_passed_over() -> None:
    plan("data string", topic="out", checkpointLocation="/x", queryName="q")


def test_writers_travel_and_batch_writes_have_an_application_of_their_own() -> None:
    one = sink.batch_writer({**SERVERS, "topic": "out"}, schema("data string"), False)
    two = sink.batch_writer({**SERVERS, "topic": "out"}, schema("data string"), False)
    again = pickle.loads(pickle.dumps(one))
    assert again._plan == one._plan
    assert one._plan.application != two._plan.application


def messages(columns: str, **values: Any) -> list[dict[str, Any]]:
    """Values of a DataFrame as the messages that they become."""
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = schema(columns)
    batch = pa.RecordBatch.from_pydict(values, schema=to_arrow_schema(wanted, timezone="UTC"))
    return list(to_messages(batch, plan(columns, topic="out").columns).to_pylist())


def test_values_become_message_columns() -> None:
    found = messages(
        "value string, key binary, priority int, ttl_s double",
        value=["ä", None],
        key=[b"k", None],
        priority=[5, None],
        ttl_s=[1.5, None],
    )
    assert found == [
        {"data": "ä".encode(), "key": "k", "priority": 5, "ttl_ms": 1500},
        {"data": None, "key": None, "priority": None, "ttl_ms": None},
    ]


def test_headers_become_attributes() -> None:
    kind = "data string, headers array<struct<key:string,value:binary>>"
    headers = [[{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], None, []]
    found = messages(kind, data=["x", "y", "z"], headers=headers)
    assert [row["attributes"] for row in found] == [[("a", "1"), ("b", "2")], None, []]


@pytest.mark.parametrize(
    ("columns", "values", "named"),
    [
        ("data string, key binary", {"data": ["x"], "key": [b"\xff"]}, "key"),
        ("data string, priority int", {"data": ["x"], "priority": [1000]}, "priority"),
    ],
)
def test_a_value_that_cannot_be_written_names_its_column(
    columns: str, values: dict[str, list[Any]], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"'{named}'"):
        messages(columns, **values)
