"""``sparrow.spark.table`` and ``stream``: history by Parquet, the tail by the source, each row once."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import sparrow
import sparrow.spark
from sparrow.model import errors
from tests.spark.conftest import Served


def publish(given: Served, *batches: int, topic: str = "orders", partitions: int = 2) -> list[datetime]:
    """Batches of messages, every one but the last sealed; the moments between them."""
    client, moments, number = given.client, [], 0
    client.create_topic(topic, partitions=partitions)
    for place, count in enumerate(batches):
        client.publish_batch(
            topic,
            [json.dumps({"id": number + at, "country": "de"}).encode() for at in range(count)],
            keys=[f"k-{number + at}" for at in range(count)],
        )
        number += count
        if place < len(batches) - 1:
            client.seal()
        time.sleep(0.005)
        moments.append(datetime.now(UTC))
        time.sleep(0.005)
    return moments


def ids(frame: Any) -> list[int]:
    return sorted(json.loads(bytes(row["data"]))["id"] for row in frame.select("data").collect())


def places(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.select("topic", "partition", "offset").collect())


def test_a_table_is_files_and_tail_stitched_and_stays_as_it_was_planned(spark: Any, served: Served) -> None:
    publish(served, 40, 30, 20)
    frame = sparrow.spark.table(spark, "orders", servers=served.address)
    assert frame.columns == spark.read.format("sparrow").options(
        servers=served.address, subscribe="orders").load().columns  # fmt: skip
    plan = frame._jdf.queryExecution().toString()
    assert "parquet" in plan.lower()
    assert "sparrow" in plan.lower()
    assert ids(frame) == list(range(90))
    served.client.publish_batch("orders", [b'{"id": 999}'] * 5)
    served.client.seal()
    assert ids(frame) == list(range(90))
    later = sparrow.spark.table(spark, "orders", servers=served.address)
    assert later.count() == 95
    assert "sparrow" not in later._jdf.queryExecution().toString().lower().replace(
        str(served.directory).lower(), ""
    )
    assert later.where("offset < 3").count() == 6


@pytest.mark.soak
def test_offsets_and_times_prune_files_and_tail(spark: Any, served: Served) -> None:
    first, second, _ = publish(served, 40, 30, 20)

    def table(**edges: Any) -> Any:
        return sparrow.spark.table(spark, "orders", servers=served.address, **edges)

    after = table(start_time=first)
    assert ids(after) == list(range(40, 90))
    assert len(after.inputFiles()) == 2
    assert ids(table(end_time=first)) == list(range(40))
    assert ids(table(start_time=first, end_time=second.isoformat())) == list(range(40, 70))
    assert ids(table(start_time=second)) == list(range(70, 90))
    some = places(table(start_offset=5, end_offset={0: 9, 1: 7}))
    assert some == [("orders", 0, at) for at in range(5, 9)] + [("orders", 1, at) for at in range(5, 7)]
    assert table(start_time=datetime(2100, 1, 1, tzinfo=UTC)).count() == 0
    with pytest.raises(errors.InvalidArgument, match="exclude each other"):
        table(start_offset=3, start_time=first)


def test_typed_columns_come_from_json_and_what_does_not_parse_is_shown(spark: Any, served: Served) -> None:
    publish(served, 3, 1)
    served.client.publish("orders", b"no json", key="bad")
    frame = sparrow.spark.table(spark, "orders", servers=served.address, schema="id BIGINT, country STRING")
    assert frame.columns[:3] == ["id", "country", "__malformed"]
    assert {"__topic", "__partition", "__offset", "__publish_time", "__key", "__attributes"} <= set(
        frame.columns
    )
    rows = {row["__key"]: row for row in frame.collect()}
    assert [(rows[f"k-{n}"]["id"], rows[f"k-{n}"]["country"]) for n in range(4)] == [
        (n, "de") for n in range(4)
    ]
    assert (rows["bad"]["id"], rows["bad"]["__malformed"]) == (None, "no json")
    assert rows["k-0"]["__malformed"] is None
    assert frame.where("id >= 2").groupBy("country").count().collect()[0]["count"] == 2


@pytest.mark.parametrize("schema", ["id BIGNUM", "__id BIGINT"])
def test_a_schema_that_cannot_be_is_named(spark: Any, served: Served, schema: str) -> None:
    served.client.create_topic("orders")
    with pytest.raises(errors.InvalidArgument, match="schema"):
        sparrow.spark.table(spark, "orders", servers=served.address, schema=schema)


def test_patterns_columns_and_empty_topics(spark: Any, served: Served) -> None:
    publish(served, 4, 3, topic="orders.us", partitions=1)
    publish(served, 2, topic="orders.de", partitions=1)
    served.client.create_topic("orders.fr")
    frame = sparrow.spark.table(spark, "orders.#", servers=served.address, columns=["topic", "offset"])
    assert frame.columns == ["topic", "offset"]
    assert {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()} == {
        "orders.us": 7, "orders.de": 2}  # fmt: skip
    empty = sparrow.spark.table(spark, "orders.fr", servers=served.address)
    assert (empty.count(), "publish_time" in empty.columns) == (0, True)
    with pytest.raises(errors.TopicNotFound, match="no topic orders"):
        sparrow.spark.table(spark, "orders.es", servers=served.address)


def test_files_of_another_machine_are_read_through_the_broker_or_from_where_they_are_seen(
    spark: Any, serve: Any, tmp_path: Path
) -> None:
    given = serve()
    publish(given, 30, 10)
    seen = tmp_path / "mounted"
    seen.symlink_to(given.directory)
    frame = sparrow.spark.table(spark, "orders", servers=given.address, lake=f"file://{seen}")
    assert ids(frame) == list(range(40))
    assert all("/mounted/" in name for name in frame.inputFiles())
    for partition in range(2):
        given.client.read_batches("orders", partition=partition)  # The broker has its files open from now on.
    given.directory.rename(tmp_path / "elsewhere")
    try:
        assert ids(sparrow.spark.table(spark, "orders", servers=given.address)) == list(range(40))
    finally:
        (tmp_path / "elsewhere").rename(given.directory)


@pytest.mark.parametrize("lake", ["/no/such/directory", "nowhere://lake"])
def test_a_lake_that_cannot_be_read_is_named(spark: Any, served: Served, lake: str) -> None:
    publish(served, 4, 2)
    with pytest.raises(errors.InvalidArgument, match=f"lake: Spark cannot read {lake}/.*") as caught:
        sparrow.spark.table(spark, "orders", servers=served.address, lake=lake)
    assert "executors see" in str(caught.value.hint)


def test_the_cause_names_the_file_that_an_executor_cannot_read(
    spark: Any, served: Served, tmp_path: Path
) -> None:
    publish(served, 4, 2)
    seen = tmp_path / "mounted"
    seen.symlink_to(served.directory)
    frame = sparrow.spark.table(spark, "orders", servers=served.address, lake=f"file://{seen}")
    seen.unlink()
    with pytest.raises(Exception, match="FAILED_READ_FILE") as caught:
        frame.count()
    found = sparrow.spark.cause(caught.value)
    assert isinstance(found, errors.PreconditionFailed)
    assert str(seen) in found.message
    assert "lake" in str(found.hint)


def test_files_that_retention_drops_stay_for_those_who_hold_them(spark: Any, served: Served) -> None:
    client = served.client
    client.create_topic("orders", retention_messages=10)
    for _ in range(3):
        client.publish_batch("orders", [b"x"] * 10)
        client.seal()
    held = sparrow.spark.table(spark, "orders", servers=served.address, hold_s=600)
    assert client.apply_retention() == 2
    assert held.count() == 30
    assert sparrow.spark.table(spark, "orders", servers=served.address).count() == 10


def test_a_stream_begins_with_history_and_goes_on(spark: Any, served: Served, tmp_path: Path) -> None:
    publish(served, 40, 20)
    frame = sparrow.spark.stream(
        spark, "orders", servers=served.address, schema="id BIGINT", subscription="reports"
    )

    def run() -> list[int]:
        query = (
            frame.writeStream.format("parquet")
            .options(path=str(tmp_path / "out"), checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sorted(row["id"] for row in spark.read.parquet(str(tmp_path / "out")).collect())

    assert run() == list(range(60))
    served.client.publish("orders", b'{"id": 60}')
    assert run() == list(range(61))
    deadline = time.monotonic() + 60
    while served.client.subscription("reports").lag() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.client.subscription("reports").lag() == 0
    with pytest.raises(errors.TopicNotFound):
        sparrow.spark.stream(spark, "ordres", servers=served.address)
