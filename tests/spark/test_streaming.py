"""``spark.readStream.format("sparrow")``: every message once, across restarts of the query and the broker."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq
import pytest

import sparrow
import sparrow.spark
from sparrow.model import errors
from sparrow.model.settings import MIB, JournalSettings, Settings
from tests.spark.conftest import Served

WAIT_S = 120.0


class Query:
    """A stream into a folder of Parquet files, which is exactly once, with its checkpoint beside it."""

    def __init__(self, spark: Any, place: Path, address: str) -> None:
        self._spark = spark
        self._place = place
        self._address = address
        self._read: dict[str, list[tuple[str, int, int]]] = {}

    def source(self, **options: Any) -> Any:
        if "subscribePattern" not in options:
            options.setdefault("subscribe", "orders")
        options.setdefault("startingOffsets", "earliest")
        given = {name: str(value) for name, value in options.items()}
        return self._spark.readStream.format("sparrow").option("servers", self._address).options(**given)

    def start(self, *, is_endless: bool = False, **options: Any) -> Any:
        writer = self.source(**options).load().writeStream.format("parquet")
        writer = writer.option("path", str(self._place / "out"))
        writer = writer.option("checkpointLocation", str(self._place / "checkpoint"))
        trigger = {"processingTime": "0 seconds"} if is_endless else {"availableNow": True}
        return writer.trigger(**trigger).start()

    def run(self, **options: Any) -> list[Any]:
        """Runs until everything that is there now was read; the batches that had rows."""
        query = self.start(**options)
        query.awaitTermination()
        return [progress for progress in query.recentProgress if progress["numInputRows"]]

    def rows(self) -> list[tuple[str, int, int]]:
        """What committed batches wrote; read without Spark, which has better things to do."""
        for log in (self._place / "out" / "_spark_metadata").glob("[0-9]*"):
            for line in log.read_text().splitlines()[1:]:
                path = unquote(urlparse(json.loads(line)["path"]).path)
                if path not in self._read:
                    table = pq.read_table(path, columns=["topic", "partition", "offset"], partitioning=None)
                    self._read[path] = list(
                        zip(*(column.to_pylist() for column in table.columns), strict=True)
                    )
        return sorted(row for rows in self._read.values() for row in rows)


@pytest.fixture
def query(spark: Any, served: Served, tmp_path: Path) -> Query:
    return Query(spark, tmp_path / "query", served.address)


def publish(client: Any, count: int, topic: str = "orders", size: int = 10) -> None:
    client.publish_batch(topic, [b"x" * size] * count, keys=[f"k-{n}" for n in range(count)])


def everything(client: Any, topic: str = "orders") -> list[tuple[str, int, int]]:
    partitions = range(client.topic(topic).partitions)
    return sorted((topic, p, at) for p in partitions for at in range(*client.bounds(topic, p)))


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to be"
        time.sleep(0.1)


def failure(work: Callable[[], Any]) -> sparrow.SparrowError:
    with pytest.raises(Exception) as raised:
        work()
    found = sparrow.spark.cause(raised.value)
    assert found is not None, raised.value
    return found


def test_a_checkpoint_is_gone_on_from_and_limits_cut_batches(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders", partitions=3)
    publish(client, 100)
    client.seal()
    publish(client, 50)
    sizes = [batch["numInputRows"] for batch in query.run(maxOffsetsPerTrigger=60)]
    assert sizes == [60, 60, 30]
    assert query.rows() == everything(client)
    publish(client, 25)
    assert [batch["numInputRows"] for batch in query.run(maxOffsetsPerTrigger=60)] == [25]
    assert query.run() == []
    assert query.rows() == everything(client)


@pytest.mark.soak
def test_bytes_limit_a_batch(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders", partitions=2)
    for _ in range(8):
        publish(client, 50, size=1000)
    batches = query.run(maxBytesPerTrigger="128k")
    assert 3 <= len(batches) <= 8
    assert max(batch["numInputRows"] for batch in batches) <= 140
    assert query.rows() == everything(client)


@pytest.mark.soak
def test_a_batch_waits_for_enough_messages_or_long_enough(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders")
    publish(client, 3)
    running = query.start(is_endless=True, minOffsetsPerTrigger=10, maxTriggerDelay="600s")
    try:
        eventually(lambda: running.status["message"] == "Waiting for data to arrive", "waiting")
        assert query.rows() == []
        publish(client, 7)
        eventually(lambda: len(query.rows()) == 10, "ten messages")
    finally:
        running.stop()
    publish(client, 3)
    running = query.start(is_endless=True, minOffsetsPerTrigger=10, maxTriggerDelay="1ms")
    try:
        eventually(lambda: len(query.rows()) == 13, "what was there after the delay")
    finally:
        running.stop()


@pytest.mark.soak
def test_new_topics_and_partitions_appear_in_a_running_stream(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders.us")
    publish(client, 5, "orders.us")
    running = query.start(is_endless=True, subscribePattern="orders.#")
    try:
        eventually(lambda: len(query.rows()) == 5, "the first topic")
        client.create_topic("orders.de")
        publish(client, 7, "orders.de")
        client.update_topic("orders.us", partitions=3)
        publish(client, 40, "orders.us")
        eventually(lambda: len(query.rows()) == 52, "topics and partitions that came later")
    finally:
        running.stop()
    assert query.rows() == sorted(everything(client, "orders.us") + everything(client, "orders.de"))
    assert {place[:2] for place in query.rows()} >= {("orders.us", 0), ("orders.us", 1), ("orders.us", 2)}


@pytest.mark.soak
def test_available_now_ends_while_messages_keep_coming(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders")
    publish(client, 30)
    running = query.start(maxOffsetsPerTrigger=500)
    while running.isActive:
        publish(client, 10)
        time.sleep(0.05)
    running.awaitTermination()
    assert len(query.rows()) >= 30
    query.run()
    assert query.rows() == everything(client)


@pytest.mark.soak
def test_progress_is_a_subscription_that_has_no_lag_after_the_last_batch(
    spark: Any, query: Query, served: Served
) -> None:
    client = served.client
    client.create_topic("orders", partitions=2)
    publish(client, 40)
    listener = sparrow.spark.watch_progress(spark, servers=served.address)
    assert sparrow.spark.watch_progress(spark, servers=served.address) is listener
    progress = query.run(subscription="billing", maxOffsetsPerTrigger=15)
    assert len(progress) == 3
    billing = client.subscription("billing")
    eventually(lambda: billing.lag() == 0, "the lag after the last batch")
    assert json.loads(progress[-1]["sources"][0]["latestOffset"])["subscription"] == "billing"
    publish(client, 5)
    assert billing.lag() == 5
    spark.streams.removeListener(listener)
    query.run(subscription="billing", maxOffsetsPerTrigger=2)
    assert billing.lag() <= 2  # Spark itself tells of all batches but the last.


def test_a_subscription_that_reads_something_else_is_refused(query: Query, served: Served) -> None:
    served.client.create_topic("orders")
    served.client.subscribe("people", "people.#")
    found = failure(lambda: query.run(subscription="people"))
    assert isinstance(found, errors.InvalidOption)
    assert "does not cover 'orders'" in found.message


@pytest.mark.soak
def test_retention_that_overtook_a_checkpoint_stops_the_query(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders", retention_messages=10)
    publish(client, 10)
    query.run()
    for _ in range(3):
        publish(client, 10)
        client.seal()
    client.apply_retention()
    found = failure(query.run)
    assert isinstance(found, errors.DataLost)
    assert "orders/0: the query is at offset 10" in found.message
    assert "20 messages are lost" in found.message
    query.run(failOnDataLoss="false")
    assert [at for _, _, at in query.rows()] == [*range(10), *range(30, 40)]


def test_a_topic_that_was_made_anew_stops_the_query(query: Query, served: Served) -> None:
    client = served.client
    client.create_topic("orders")
    publish(client, 10)
    query.run()
    client.delete_topic("orders")
    assert isinstance(failure(query.run), errors.TopicNotFound | errors.DataLost)
    client.create_topic("orders")
    publish(client, 12)
    assert isinstance(failure(query.run), errors.TopicRecreated)
    query.run(failOnDataLoss="false")
    assert Counter(at for _, _, at in query.rows()) == Counter([*range(10), *range(12)])


def test_ends_are_for_batches_and_topics_must_exist(query: Query, served: Served) -> None:
    served.client.create_topic("orders")
    assert "endingOffsets is for a batch" in failure(lambda: query.run(endingOffsets="latest")).message
    assert isinstance(failure(lambda: query.run(subscribe="ordres")), errors.TopicNotFound)


# Faults of the world.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


class Process:
    """`sparrow up` in a process of its own, which can be killed and started again."""

    def __init__(self, data: Path) -> None:
        self.tcp, self.http = free_port(), free_port()
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "sparrow.cli.main", "up", "--data", str(self._data)]
        command += ["--tcp", f"127.0.0.1:{self.tcp}", "--http", f"127.0.0.1:{self.http}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.mark.soak
def test_a_stream_survives_a_broker_that_is_killed(spark: Any, tmp_path: Path) -> None:
    broker = Process(tmp_path / "data")
    broker.start()
    try:
        with sparrow.connect(f"sparrow://127.0.0.1:{broker.tcp}", connect_s=60, reconnect_s=60) as client:
            client.create_topic("orders", partitions=2)
            query = Query(spark, tmp_path / "query", f"127.0.0.1:{broker.tcp}")
            running = query.start(is_endless=True, maxOffsetsPerTrigger=40, retryTimeout="60s")
            try:
                for _ in range(2):
                    publish(client, 200)
                    eventually(lambda: len(query.rows()) > 0, "a batch")
                    broker.kill()
                    broker.start()
                    publish(client, 50)
                eventually(lambda: len(query.rows()) >= 500, "all messages")
            finally:
                running.stop()
            assert running.exception() is None
            assert query.rows() == everything(client)
    finally:
        broker.kill()


# Lake and source agree.


@pytest.mark.soak
def test_every_row_is_seen_once_while_segments_are_sealed_and_expire(
    spark: Any, serve: Any, tmp_path: Path
) -> None:
    """Publishes, seals and expires at random; a stream and tables look on."""
    chance = random.Random(7)
    served = serve(settings=Settings(journal=JournalSettings(file_bytes=MIB)))
    client = served.client
    client.create_topic("orders", partitions=2, retention_messages=400)
    query = Query(spark, tmp_path / "query", served.address)
    running = query.start(is_endless=True, failOnDataLoss="true")
    try:
        for _ in range(12):
            for _ in range(chance.randint(1, 3)):
                publish(client, chance.randint(1, 60), size=chance.randint(1, 2000))
            if chance.random() < 0.6:
                client.seal()
            frame = sparrow.spark.table(
                spark, "orders", servers=served.address, columns=["partition", "offset"]
            )
            bounds = {p: client.bounds("orders", p) for p in range(2)}
            publish(client, 20)
            client.seal()  # Between the plan and the read.
            reached = sum(bound.end_offset for bound in bounds.values())
            eventually(lambda reached=reached: len(query.rows()) >= reached, "the stream")  # type: ignore[misc]
            client.apply_retention()  # Files that the plan names are held.
            found = sorted(tuple(row) for row in frame.collect())
            assert found == [(p, at) for p in range(2) for at in range(*bounds[p])]
        end = {p: client.bounds("orders", p).end_offset for p in range(2)}
        assert client.bounds("orders", 0).start_offset > 0, "something has to expire"
        eventually(lambda: len(query.rows()) >= sum(end.values()), "the end of the stream")
    finally:
        running.stop()
    assert query.rows() == [("orders", p, at) for p in range(2) for at in range(end[p])]
