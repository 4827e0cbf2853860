"""A task's part of a write, without Spark around it: what is staged, what is sent again, what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from sparrow.model.errors import InvalidArgument, PreconditionFailed, TopicNotFound
from sparrow.model.settings import Settings, TopicSettings
from sparrow.spark import sink, writer
from sparrow.spark.writeplan import Staged
from tests.client.test_direct import Lossy
from tests.spark.conftest import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "data")
    yield made
    made.close()


def writer_of(address: str, *columns: str, **options: str) -> sink.BatchWriter:
    schema = StructType([StructField(name, StringType()) for name in columns])
    return sink.batch_writer({"servers": address, **options}, schema, False)


def batch(**columns: Sequence[Any]) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values, pa.string()) for name, values in columns.items()})


def data(served: Served, topic: str) -> list[str]:
    return [str(message.data or b"", "utf-8") for message in served.client.read(topic, max_messages=100_000)]


def test_tasks_are_committed_in_the_order_of_their_partitions(served: Served) -> None:
    made = writer_of(served.address, "value", topic="out")
    messages = [made.write(iter([batch(value=[f"{task}"])])) for task in range(3)]
    for place, message in enumerate(messages):
        assert isinstance(message, Staged)
        message.partition = 2 - place
    made.commit([None, *messages])
    assert data(served, "out") == ["2", "1", "0"]
    made.commit([*messages])
    assert data(served, "out") == ["2", "1", "0"]
    assert served.client.stages() == []


def test_small_batches_are_gathered_and_large_ones_cut(served: Served) -> None:
    made = writer_of(served.address, "value", topic="out")
    small = [batch(value=[f"{n:05}"]) for n in range(500)]
    staged = made.write(iter([*small, batch(value=["x" * 1_000_000] * 30)]))
    (stage,) = served.client.stages()
    assert stage.messages == 530
    assert 3 < stage.calls < 20
    made.commit([staged])
    assert data(served, "out")[:500] == [f"{n:05}" for n in range(500)]


def test_a_task_without_rows_stages_nothing(served: Served) -> None:
    made = writer_of(served.address, "value", topic="out")
    staged = made.write(iter([batch(value=[])]))
    assert served.client.stages() == []
    made.commit([staged])
    assert served.client.topics() == []


def test_calls_lost_with_the_connection_are_sent_again(served: Served) -> None:
    with Lossy(served.address) as between:
        made = writer_of(between.address, "value", topic="out")
        rows = [f"{n:04}" + "x" * 100_000 for n in range(60)]
        made.commit([made.write(iter([batch(value=rows[:20]), batch(value=rows[20:])]))])
        assert between.connections >= 2
    assert data(served, "out") == rows


def test_a_quota_makes_the_task_wait_and_loses_nothing(served: Served) -> None:
    served.client.create_topic("out", flow={"overflow": "reject"})
    served.client.set_publisher_limits("etl", messages_per_s=400.0, burst_s=0.1)
    made = writer_of(served.address, "value", topic="out", publisher="etl", retryTimeout="60s")
    rows = [f"{n:04}" + "x" * 60_000 for n in range(200)]
    made.commit([made.write(iter([batch(value=rows[at : at + 20]) for at in range(0, 200, 20)]))])
    assert data(served, "out") == rows
    assert served.client.flow("out").rejected > 0


def test_a_task_that_fails_leaves_nothing_staged(served: Served) -> None:
    made = writer_of(served.address, "value", "topic")

    def rows() -> Iterator[pa.RecordBatch]:
        yield batch(value=["x" * 3_000_000], topic=["out"])
        yield batch(value=["y"], topic=[None])

    with pytest.raises(InvalidArgument, match="'topic' is null"):
        made.write(rows())
    assert served.client.stages() == []


def test_aborting_drops_what_all_tasks_staged(served: Served) -> None:
    made = writer_of(served.address, "value", topic="out")
    made.write(iter([batch(value=["a"])]))
    made.write(iter([batch(value=["b"])]))
    made.abort([None, None])
    assert served.client.stages() == []


def test_a_topic_that_does_not_exist_is_named(tmp_path: Path) -> None:
    made = Served(tmp_path / "data", Settings(topics=TopicSettings(auto_create=False)))
    try:
        with pytest.raises(TopicNotFound, match="nowhere"):
            writer_of(made.address, "value", topic="nowhere").write(iter([batch(value=["a"])]))
    finally:
        made.close()


def test_a_streaming_task_must_know_its_query() -> None:
    with pytest.raises(PreconditionFailed):
        writer.streaming_identity()
