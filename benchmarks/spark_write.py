"""Spark into topics: a batch write, a stream from topic to topic, and the latency of its micro-batches.

    python -m benchmarks.spark_write [--quick] [--json] [--data DIR]

A broker (``sparrow up``, default settings) in a process of its own and one Spark session, ``local[2]``,
warmed up by a write of each kind. Messages have 1 KB. Every write is exactly once and durable: a rate counts
until the commit is on the disk and Spark has noted it.

Latency is from the moment at which a message was *due* to be published into one topic to the moment at which
a client reads it from the other; a stall makes every message late that was due meanwhile. The settings are
those for tiny batches (docs/guides/spark-sink.md): whole-stage code generation and adaptive execution off,
and the checkpoint on a fast disk. The query has run at the same rate for 20 seconds before: a JVM is three
times as slow in its first ones.
"""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import sparrow
import sparrow.spark
from benchmarks import measure, remote
from benchmarks.measure import KB, Options, Report

BATCH_PER_S_MIN = 100_000
STREAM_PER_S_MIN = 60_000
P50_MS_MAX, P99_MS_MAX = 150.0, 400.0
RATE = 1_000
PARTITIONS = 2
_DUE = struct.Struct("<d")
_PADDING = bytes(KB - _DUE.size)
_TICK_S = 0.005
_WARM_S = 20.0
_PATIENCE_S = 600.0
QUICK_BATCHES = {"spark.sql.codegen.wholeStage": "false", "spark.sql.adaptive.enabled": "false"}


def run(options: Options, report: Report) -> None:
    messages, seconds = (20_000, 3.0) if options.quick else (1_000_000, 30.0)
    report.set_out(
        durability="durable (commit after fdatasync)",
        message_bytes=KB,
        messages=messages,
        rate=RATE,
        seconds=seconds,
    )
    spark = sparrow.spark.session("spark-write", master="local[2]", config={"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with (
            remote.broker(options.data / "broker") as process,
            sparrow.connect(process.url, reconnect_s=60.0) as client,
        ):
            bench = Bench(spark, client, process.url, options, report)
            bench.batch(messages)
            bench.stream(messages)
            bench.latency(seconds)
    finally:
        spark.stop()


class Bench:
    """The session, the broker, and what is measured with them."""

    def __init__(self, spark: Any, client: Any, url: str, options: Options, report: Report) -> None:
        self._spark = spark
        self._client = client
        self._url = url
        self._report = report
        self._rounds = 1 if options.quick else 3
        self._fast = Path("/dev/shm") if Path("/dev/shm").is_dir() else options.data
        self._checkpoints = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.data))

    # A batch write.

    def batch(self, messages: int) -> None:
        self._client.create_topic("batch", partitions=PARTITIONS)
        self._write_batch(2_000)
        rates = []
        for _ in range(self._rounds):
            start = time.perf_counter()
            self._write_batch(messages)
            rates.append(messages / (time.perf_counter() - start))
        held = self._count("batch")
        assert held == 2_000 + self._rounds * messages, f"{held} messages arrived"
        rate = sorted(rates)[len(rates) // 2]
        self._report.check(
            "batch write",
            rate,
            BATCH_PER_S_MIN,
            "messages/s",
            at_least=True,
            note=f"{rate * KB / 1e6:,.0f} MB/s",
        )

    def _write_batch(self, messages: int) -> None:
        frame = self._spark.range(0, messages, 1, 2).selectExpr(
            f"rpad(cast(id as string), {KB}, 'abcdefghijklmnop') as value"
        )
        frame.write.format("sparrow").mode("append").options(servers=self._url, topic="batch").save()

    # A stream.

    def stream(self, messages: int) -> None:
        for name in ("from", "to"):
            self._client.create_topic(name, partitions=PARTITIONS)
        self._relay_all("from", "to", 2_000)
        rates = [self._relay_all("from", "to", messages) for _ in range(self._rounds)]
        assert self._count("to") == self._count("from"), "what was read must have been written"
        rate = sorted(rates)[len(rates) // 2]
        self._report.check(
            "stream from topic to topic",
            rate,
            STREAM_PER_S_MIN,
            "messages/s",
            at_least=True,
            note=f"{rate * KB / 1e6:,.0f} MB/s read and written",
        )

    def _relay_all(self, source: str, target: str, messages: int) -> float:
        """Fills the source, then lets a query catch up; messages a second until it has stopped."""
        payload = pa.array([bytes(KB)] * min(messages, 10_000), pa.binary())
        for _ in range(0, messages, len(payload)):
            self._client.publish_table(source, pa.table({"data": payload}))
        query = self._query(source, target, self._checkpoints / "stream").trigger(availableNow=True)
        start = time.perf_counter()
        running = query.start()
        assert running.awaitTermination(int(_PATIENCE_S)), "the query must end"
        return messages / (time.perf_counter() - start)

    def _query(self, source: str, target: str, checkpoint: Path) -> Any:
        messages = (
            self._spark.readStream.format("sparrow")
            .options(servers=self._url, subscribe=source, startingOffsets="earliest", columns="data")
            .load()
        )
        return messages.writeStream.format("sparrow").options(
            servers=self._url, topic=target, checkpointLocation=str(checkpoint)
        )

    # Latency.

    def latency(self, seconds: float) -> None:
        for name, value in QUICK_BATCHES.items():
            self._spark.conf.set(name, value)
        for name in ("due", "done"):
            self._client.create_topic(name)
        checkpoint = Path(tempfile.mkdtemp(prefix="sparrow-", dir=self._fast))
        query = self._query("due", "done", checkpoint).trigger(processingTime="0 seconds").start()
        try:
            self._feed(_WARM_S if seconds > _WARM_S else 2.0, RATE)  # The JVM compiles what it does often.
            warm = self._count("due")
            self._until(warm)
            late_ms: list[float] = []
            count = int(seconds * RATE)
            collected = self._client.subscribe("collect", "done", start="latest")
            reading = threading.Thread(target=self._collect, args=(collected, count, late_ms))
            reading.start()
            self._feed(seconds, RATE)
            reading.join(_PATIENCE_S)
            assert len(late_ms) == count, f"{len(late_ms)} of {count} messages arrived"
        finally:
            query.stop()
            shutil.rmtree(checkpoint, ignore_errors=True)
        note = f"{len(late_ms):,} messages at {RATE:,}/s"
        self._report.check(
            "due to read from the other topic, p50",
            measure.percentile(late_ms, 0.5),
            P50_MS_MAX,
            "ms",
            note=note,
        )
        self._report.check(
            "due to read from the other topic, p99",
            measure.percentile(late_ms, 0.99),
            P99_MS_MAX,
            "ms",
            note=note,
        )
        self._report.figure("due to read from the other topic, longest", max(late_ms), "ms")

    def _feed(self, seconds: float, rate: int) -> None:
        """What is due is sent; each message carries the time at which it was."""
        start, sent, count = time.perf_counter(), 0, int(seconds * rate)
        while sent < count:
            due = min(count, int((time.perf_counter() - start) * rate) + 1)
            if due > sent:
                batch = [_DUE.pack(start + number / rate) + _PADDING for number in range(sent, due)]
                self._client.publish_batch("due", batch)
                sent = due
            time.sleep(_TICK_S)

    def _collect(self, subscription: Any, count: int, late_ms: list[float]) -> None:
        """Takes in what arrives in the other topic."""
        end_s = time.perf_counter() + _PATIENCE_S
        while len(late_ms) < count and time.perf_counter() < end_s:
            found = subscription.pull(10_000, timeout_s=1.0)
            now = time.perf_counter()
            late_ms.extend((now - _DUE.unpack_from(message.data or b"")[0]) * 1000 for message in found)
            subscription.ack(found)

    def _until(self, count: int) -> None:
        end_s = time.perf_counter() + _PATIENCE_S
        while self._count("done") < count and time.perf_counter() < end_s:
            time.sleep(0.05)

    def _count(self, topic: str) -> int:
        partitions = self._client.topic(topic).partitions
        return sum(self._client.bounds(topic, number).end_offset for number in range(partitions))


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("spark_write", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
