"""DataFrames into topics: whole, once, in order, and errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow.client.blocking import BlockingClient
from tests.spark.conftest import Served

pytestmark = pytest.mark.usefixtures("spark")


def read(client: BlockingClient, topic: str) -> list[Any]:
    found: list[Any] = []
    for partition in range(client.topic(topic).partitions):
        offset = 0
        while messages := client.read(topic, partition=partition, offset=offset, max_messages=10_000):
            found += messages
            offset = messages[-1].offset + 1
    return found


def data(client: BlockingClient, topic: str) -> list[str]:
    return [message.data.decode() for message in read(client, topic)]


def write(frame: Any, served: Served, **options: Any) -> None:
    writer = frame.write.format("sparrow").mode("append").option("servers", served.address)
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def rows(spark: Any, count: int, partitions: int = 3) -> Any:
    return spark.range(0, count, numPartitions=partitions).selectExpr("cast(id as string) as value")


def test_a_dataframe_is_published_whole_and_in_order(spark: Any, served: Served) -> None:
    write(rows(spark, 25_000), served, topic="out")
    assert data(served.client, "out") == [str(number) for number in range(25_000)]
    assert served.client.stages() == []


def test_every_column_arrives(spark: Any, served: Served) -> None:
    frame = spark.sql(
        """select 'k1' as key, cast('payload' as binary) as data, map('env', 'prod') as attributes,
        timestamp'2026-01-31 12:00:00' as event_time, 5 as priority, 60.0D as ttl_s"""
    )
    write(frame, served, topic="out", compression="lz4")
    (found,) = read(served.client, "out")
    assert (found.key, found.data, found.attributes) == ("k1", b"payload", {"env": "prod"})
    assert (found.priority, found.ttl_s) == (5, 60.0)
    assert found.event_time.isoformat() == "2026-01-31T12:00:00+00:00"


def test_rows_go_to_the_topic_of_their_column_and_the_partition_of_their_key(
    spark: Any, served: Served
) -> None:
    served.client.create_topic("even", partitions=3)
    frame = spark.range(0, 2000, numPartitions=2).selectExpr(
        "if(id % 2 = 0, 'even', 'odd') as topic",
        "concat('k', cast(id % 14 as string)) as key",
        "cast(id as string) as value",
    )
    write(frame, served)
    assert data(served.client, "odd") == [str(number) for number in range(1, 2000, 2)]
    even = read(served.client, "even")
    assert sorted(int(message.data) for message in even) == list(range(0, 2000, 2))
    for number in range(0, 14, 2):
        mine = [m for m in even if m.key == f"k{number}"]
        assert len({m.partition for m in mine}) == 1
        assert [int(m.data) for m in mine] == list(range(number, 2000, 14))


def test_a_batch_write_of_a_known_application_is_published_once(spark: Any, served: Served) -> None:
    for _ in range(2):
        write(rows(spark, 10), served, topic="out", applicationId="job", batchId=7)
    write(rows(spark, 5), served, topic="out", applicationId="job", batchId=8)
    assert len(data(served.client, "out")) == 15


def test_a_write_that_fails_publishes_nothing(spark: Any, served: Served) -> None:
    frame = spark.range(0, 1000, numPartitions=4).selectExpr(
        "if(id = 900, cast(raise_error('boom') as string), cast(id as string)) as value"
    )
    with pytest.raises(Exception, match="boom"):
        write(frame, served, topic="out")
    assert "out" not in [topic.name for topic in served.client.topics()] or data(served.client, "out") == []


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("cast(id as string) as colour", {"topic": "out"}, "colour"),
        ("id as data", {"topic": "out"}, "'data' is binary or a string, not bigint"),
        ("cast(id as string) as data", {}, "'topic' is missing"),
        ("cast(id as string) as data", {"topik": "out"}, "Did you mean topic"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(
    spark: Any, served: Served, columns: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(Exception, match=said):
        write(spark.range(3).selectExpr(columns), served, **options)


def test_a_broker_that_is_away_is_a_clear_error(spark: Any, serve: Callable[..., Served]) -> None:
    gone = serve("gone")
    gone.close()
    with pytest.raises(Exception, match="CONNECTION_LOST"):
        write(rows(spark, 3), gone, topic="out", retryTimeout="1s")


def test_a_stream_is_published_once_and_goes_on_after_a_restart(
    spark: Any, served: Served, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def run() -> None:
        source = spark.readStream.schema("value string").text(str(folder))
        query = (
            source.writeStream.format("sparrow")
            .option("servers", served.address)
            .option("topic", "out")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        assert query.exception() is None

    (folder / "1.txt").write_text("a\nb\n")
    run()
    assert data(served.client, "out") == ["a", "b"]
    # As if the driver had died between the commit and its own note of it: the batch runs again.
    (tmp_path / "checkpoint" / "commits" / "0").unlink()
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
    run()
    assert data(served.client, "out") == ["a", "b"]
    (folder / "2.txt").write_text("c\n")
    run()
    assert data(served.client, "out") == ["a", "b", "c"]
    assert served.client.stages() == []


def test_for_each_batch_can_write_exactly_once_by_options(spark: Any, served: Served, tmp_path: Path) -> None:
    def publish(frame: Any, batch: int) -> None:
        for _ in range(2):
            write(frame, served, topic="out", applicationId="foreach", batchId=batch)

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.txt").write_text("a\nb\n")
    source = spark.readStream.schema("value string").text(str(tmp_path / "in"))
    query = source.writeStream.foreachBatch(publish).trigger(availableNow=True)
    running = query.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert running.awaitTermination(60)
    assert sorted(data(served.client, "out")) == ["a", "b"]
