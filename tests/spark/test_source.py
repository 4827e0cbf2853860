"""``spark.read.format("sparrow")``: exactly the messages that were asked for, of a broker or a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import sparrow
import sparrow.spark
from sparrow.model import errors
from tests.spark.conftest import Served

MOMENT = datetime(2024, 5, 6, 7, 8, 9, 123_456, UTC)
PROD = 'attributes.env = "prod"'


def read(spark: Any, given: Served, **options: Any) -> Any:
    reader = spark.read.format("sparrow").option("servers", given.address)
    if "subscribePattern" not in options:
        options.setdefault("subscribe", "orders")
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def offsets(frame: Any) -> list[tuple[int, int]]:
    return sorted((row["partition"], row["offset"]) for row in frame.select("partition", "offset").collect())


def payloads(frame: Any) -> list[bytes]:
    return sorted(bytes(row["data"]) for row in frame.select("data").collect())


def fill(given: Served, count: int = 100, *, partitions: int = 2, topic: str = "orders") -> list[bytes]:
    """Messages 0 to ``count``, of which the first half is sealed."""
    client = given.client
    client.create_topic(topic, partitions=partitions)
    data = [b"%04d" % number for number in range(count)]
    for part in (data[: count // 2], data[count // 2 :]):
        client.publish_batch(
            topic,
            part,
            keys=[f"k-{int(each)}" for each in part],
            attributes=[{"env": "prod" if int(each) % 2 else "test"} for each in part],
        )
        if part is not data[count // 2 :] and part[0] == data[0]:
            client.seal()
    return data


def failure(work: Callable[[], Any]) -> sparrow.SparrowError:
    """The error of ours in what Spark raises."""
    with pytest.raises(Exception) as raised:
        work()
    found = sparrow.spark.cause(raised.value)
    assert found is not None, raised.value
    return found


def test_a_batch_reads_sealed_and_unsealed_messages_with_all_their_columns(
    spark: Any, served: Served
) -> None:
    client = served.client
    client.create_topic("orders")
    client.publish("orders", b"\x00\xff", key="k", attributes={"env": "prod", "ü": ""}, event_time=MOMENT,
                   priority=-5, ttl_s=60.0, idempotency_key="once")  # fmt: skip
    client.seal()
    client.publish("orders", None, key="gone")
    client.publish("orders", b"")
    frame = read(spark, served, includeHeaders="true")
    first, second, third = frame.orderBy("offset").collect()
    assert (first["topic"], first["partition"], first["offset"]) == ("orders", 0, 0)
    assert (bytes(first["data"]), first["key"], first["attributes"]) == (
        b"\x00\xff",
        "k",
        {"env": "prod", "ü": ""},
    )
    assert (first["priority"], first["ttl_ms"], first["idempotency_key"]) == (-5, 60_000, "once")
    assert frame.where("event_time = timestamp'2024-05-06 07:08:09.123456 UTC'").count() == 1
    assert [(row["key"], bytes(row["value"])) for row in first["headers"]] == [("env", b"prod"), ("ü", b"")]
    assert (second["data"], second["key"], second["headers"]) == (None, "gone", None)
    assert (bytes(third["data"]), third["key"]) == (b"", None)


def test_columns_and_filter_narrow_what_reaches_spark(spark: Any, served: Served) -> None:
    data = fill(served)
    frame = read(spark, served, columns="offset,partition,data", filter=PROD)
    assert frame.columns == ["offset", "partition", "data"]
    assert payloads(frame) == [each for each in data if int(each) % 2]
    assert read(spark, served, columns="key", filter='key = "k-7"').collect()[0]["key"] == "k-7"
    assert read(spark, served, columns="topic").distinct().collect()[0]["topic"] == "orders"


def test_a_schema_that_the_user_writes_narrows_too(spark: Any, served: Served) -> None:
    data = fill(served)
    load = spark.read.format("sparrow").schema("data BINARY").option("servers", served.address)
    assert payloads(load.option("subscribe", "orders").load()) == data
    wrong = spark.read.format("sparrow").schema("data STRING").option("servers", served.address)
    assert "'data' is binary" in failure(lambda: wrong.option("subscribe", "orders").load().count()).message


def test_offsets_and_times_bound_a_batch(spark: Any, served: Served) -> None:
    client = served.client
    client.create_topic("orders", partitions=2)
    client.publish_batch("orders", [b"a"] * 20, keys=["x"] * 20)
    where = client.publish("orders", b"b", key="x").partition
    time.sleep(0.01)
    middle = datetime.now(UTC)
    time.sleep(0.01)
    client.publish_batch("orders", [b"c"] * 9, keys=["x"] * 9)
    starts, ends = f'{{"orders": {{"{where}": 5}}}}', f'{{"orders": {{"{where}": 25}}}}'
    assert offsets(read(spark, served, startingOffsets=starts)) == [(where, at) for at in range(5, 30)]
    bounded = read(spark, served, startingOffsets=starts, endingOffsets=ends)
    assert offsets(bounded) == [(where, at) for at in range(5, 25)]
    assert payloads(read(spark, served, endingTimestamp=middle.isoformat())) == [b"a"] * 20 + [b"b"]
    assert payloads(read(spark, served, startingTimestamp=middle.isoformat())) == [b"c"] * 9
    assert read(spark, served, startingOffsets="latest").count() == 0


def test_patterns_and_lists_read_several_topics(spark: Any, served: Served) -> None:
    for name in ("orders.us", "orders.de.paid", "people"):
        served.client.create_topic(name)
        served.client.publish(name, name.encode())
    assert payloads(read(spark, served, subscribePattern="orders.#")) == [b"orders.de.paid", b"orders.us"]
    assert payloads(read(spark, served, subscribe="people, orders.us")) == [b"orders.us", b"people"]
    assert read(spark, served, subscribePattern="nothing.*").count() == 0


def test_big_partitions_are_split_and_small_ones_gathered(spark: Any, served: Served) -> None:
    data = fill(served, 400, partitions=4)
    assert read(spark, served).rdd.getNumPartitions() == 1
    split = read(spark, served, maxRecordsPerPartition=30)
    assert split.rdd.getNumPartitions() >= 400 // 30
    assert payloads(split) == data
    many = read(spark, served, minPartitions=7)
    assert many.rdd.getNumPartitions() >= 7
    assert payloads(many) == data


def test_a_file_that_cannot_be_opened_is_read_through_the_broker(spark: Any, served: Served) -> None:
    data = fill(served)
    assert payloads(read(spark, served, localFiles="false")) == data
    frame = read(spark, served)
    frame.rdd.getNumPartitions()
    for path in served.directory.glob("topics/orders/*/*.parquet"):
        path.chmod(0)
    if os.geteuid():  # Root may open anything.
        assert payloads(frame) == data


def test_a_directory_is_read_with_no_broker_and_left_as_it_was(
    spark: Any, serve: Any, tmp_path: Path
) -> None:
    given = serve()
    data = fill(given)
    frame = spark.read.format("sparrow").option("subscribe", "orders").option("path", str(given.directory))
    locked = failure(lambda: frame.load().count())
    assert isinstance(locked, errors.DataDirectoryLocked)
    assert "servers instead of path" in locked.hint
    given.close()

    def seen() -> list[tuple[str, int, int]]:
        found = sorted(given.directory.rglob("*"))
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found]

    before = seen()
    assert payloads(frame.load()) == data
    assert payloads(frame.option("filter", PROD).load()) == [each for each in data if int(each) % 2]
    assert seen() == before


def test_a_directory_keeps_what_a_killed_broker_had_receipted(spark: Any, serve: Any, tmp_path: Path) -> None:
    import shutil

    given = serve()
    data = fill(given)
    shutil.copytree(given.directory, tmp_path / "copy")  # As a kill would have left it.
    given.client.publish("orders", b"later")
    frame = spark.read.format("sparrow").options(path=str(tmp_path / "copy"), subscribe="orders").load()
    assert payloads(frame) == data
    table = sparrow.spark.table(spark, "orders", path=str(tmp_path / "copy"))
    assert payloads(table) == data


# What is wrong is said.


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"startingOffset": "earliest"}, errors.InvalidOption, "'startingoffset' is not known"),
        ({"subscribe": "ordres"}, errors.TopicNotFound, "option subscribe: there is no topic ordres"),
        ({"columns": "offset,value"}, errors.InvalidOption, "option columns: there is no column 'value'"),
        ({"filter": "nonsense("}, errors.InvalidOption, "option filter"),
        ({"startingOffsets": '{"orders": {"0": 999}}'}, errors.InvalidOption, "option startingOffsets"),
        ({"startingOffsets": '{"orders": {"9": 0}}'}, errors.InvalidOption, "no partition 9"),
        ({"endingOffsets": '{"people": {"0": 0}}'}, errors.InvalidOption, "option endingOffsets"),
        ({"maxOffsetsPerTrigger": "5"}, errors.InvalidOption, "maxOffsetsPerTrigger is for a stream"),
        ({"epochs": '{"orders": 99}'}, errors.TopicRecreated, "made anew"),
    ],
)
def test_bad_options_fail_when_the_query_is_planned(
    spark: Any, served: Served, options: dict[str, str], kind: type[sparrow.SparrowError], says: str
) -> None:
    served.client.create_topic("orders")
    served.client.publish("orders", b"x")
    found = failure(lambda: read(spark, served, **options).count())
    assert type(found) is kind
    assert says in found.message


def test_a_broker_that_is_away_is_waited_for_and_then_named(spark: Any) -> None:
    frame = spark.read.format("sparrow").option("servers", "127.0.0.1:9").option("subscribe", "orders")
    found = failure(lambda: frame.option("retryTimeout", "300ms").load().count())
    assert isinstance(found, errors.ConnectionLost)
    assert "no broker answers at sparrow://127.0.0.1:9" in found.message


def test_a_path_that_is_no_data_directory_is_named(spark: Any, tmp_path: Path) -> None:
    frame = spark.read.format("sparrow").option("path", str(tmp_path)).option("subscribe", "orders")
    assert "option path" in failure(lambda: frame.load().count()).message


def test_offsets_that_retention_removed_are_a_loss_unless_that_is_allowed(spark: Any, served: Served) -> None:
    client = served.client
    client.create_topic("orders", retention_messages=10)
    for number in range(4):
        client.publish_batch("orders", [b"%d" % number] * 10)
        client.seal()
    client.apply_retention()
    assert client.bounds("orders").start_offset == 30
    options = {"startingOffsets": '{"orders": {"0": 5}}'}
    assert isinstance(failure(lambda: read(spark, served, **options).count()), errors.DataLost)
    assert offsets(read(spark, served, **options, failOnDataLoss="false")) == [
        (0, at) for at in range(30, 40)
    ]


def test_the_source_needs_no_registration_and_little_to_import() -> None:
    import subprocess
    import sys

    script = (
        "import sys, pyspark_sparrow; assert pyspark_sparrow.DefaultSource.name() == 'sparrow';"
        "heavy = {'sqlalchemy', 'asyncio', 'aiohttp', 'uvloop'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
