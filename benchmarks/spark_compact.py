"""Compaction by Spark: how much smaller a changelog gets, how long it takes, and publishing beside it.

    python -m benchmarks.spark_compact [--quick] [--json] [--data DIR]

A changelog of JSON documents of about 130 bytes over 100,000 keys, 10 million messages in one partition, all
sealed. A broker (``sparrow up``, default settings) in a process of its own and one Spark session, local[2].
A publisher sends durable batches of 1,000 messages of 1 KB to another topic of the broker as fast as it takes
them, first alone, then beside the compaction.

The size is that of the topic's segments before and after; the time is that of the whole job, its plan and the
broker's checks and swaps counted. Afterwards the topic must hold the newest message of each key, each under
its offset, and a second run must change nothing.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import pyarrow as pa

import sparrow
import sparrow.spark
from benchmarks import measure, remote
from benchmarks.measure import Options, Report
from sparrow.spark.pipelines import compact

KEPT_SHARE_MAX = 0.5
WAIT_S_MAX = 2.0
BATCH = 10_000
BESIDE_BATCH = 1_000
BESIDE_BYTES = 1_024
ALONE_S = 10.0


def run(options: Options, report: Report) -> None:
    messages, keys = (200_000, 2_000) if options.quick else (10_000_000, 100_000)
    report.set_out(messages=messages, keys=keys, durability="durable")
    spark = sparrow.spark.session("spark-compact", master="local[2]", config={"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with (
            remote.broker(options.data / "broker") as process,
            sparrow.connect(process.url, reconnect_s=60.0) as client,
        ):
            _Bench(spark, client, process.url, options, report).run(messages, keys)
    finally:
        spark.stop()


class _Bench:
    def __init__(self, spark: Any, client: Any, url: str, options: Options, report: Report) -> None:
        self._spark = spark
        self._client = client
        self._url = url
        self._report = report
        self._alone_s = 1.0 if options.quick else ALONE_S

    def run(self, messages: int, keys: int) -> None:
        client, report = self._client, self._report
        client.create_topic("customers", compaction="key", dedupe_window_s=0)
        client.create_topic("beside")
        newest = self._fill(messages, keys)
        client.seal()
        compact.run(self._spark, client, self._small())  # Spark starts its workers.
        with _Publisher(self._url) as publisher:
            alone = publisher.rate_over(self._alone_s)
            start, count = time.perf_counter(), publisher.count
            outcome = compact.run(self._spark, client, "customers")
            beside = (publisher.count - count) / (time.perf_counter() - start)
            longest_s = publisher.longest_s
        self._check(newest)
        share = outcome.bytes / outcome.bytes_before
        report.check("bytes left", share, KEPT_SHARE_MAX, "of what there was")
        report.figure("size", outcome.bytes_before / 1e6, "MB before", f"{outcome.bytes / 1e6:,.1f} MB after")
        report.figure("messages", outcome.messages_before, "before", f"{outcome.messages:,} after")
        report.figure("time", outcome.seconds, "s", f"{messages / outcome.seconds:,.0f} messages/s")
        report.figure("publishing alone", alone, "messages/s")
        report.figure("publishing beside it", beside, "messages/s", f"{beside / alone:.0%} of alone")
        report.check("longest wait for a receipt beside it", longest_s, WAIT_S_MAX, "s")
        again = compact.run(self._spark, client, "customers")
        assert again.messages == outcome.messages, "a second run finds nothing to do"
        report.figure("a second run", again.seconds, "s")

    def _small(self) -> str:
        self._client.create_topic("warm-up", compaction="key")
        self._client.publish("warm-up", b"x", key="a")
        self._client.seal()
        return "warm-up"

    def _fill(self, messages: int, keys: int) -> dict[str, int]:
        """Publishes the changelog; the offset of the newest message of each key."""
        dice = random.Random(0)
        newest: dict[str, int] = {}
        for first in range(0, messages, BATCH):
            chosen = [f"customer-{dice.randrange(keys):06d}" for _ in range(BATCH)]
            data = [_document(key, first + row, dice) for row, key in enumerate(chosen)]
            table = pa.table({"data": pa.array(data, pa.binary()), "key": chosen})
            self._client.publish_table("customers", table)
            newest.update((key, first + row) for row, key in enumerate(chosen))
        return newest

    def _check(self, newest: dict[str, int]) -> None:
        found: dict[str, int] = {}
        at, end = self._client.bounds("customers")
        while at < end:
            batches = self._client.read_batches("customers", offset=at)
            for batch in batches:
                offsets, keys = batch.column("offset").to_pylist(), batch.column("key").to_pylist()
                assert len(set(keys) | found.keys()) == len(found) + len(keys), "each key is there once"
                found.update(zip(keys, offsets, strict=True))
            at = batches[-1].column("offset")[-1].as_py() + 1
        assert found == newest, "the newest message of each key, and nothing else"


def _document(key: str, number: int, dice: random.Random) -> bytes:
    balance, city = dice.randrange(10**9), dice.randrange(1000)
    return (
        f'{{"id":"{key}","change":{number},"balance":{balance},"city":"city-{city}",'
        f'"tier":"{("free", "plus", "pro")[balance % 3]}","score":{balance / 7:.6f}}}'
    ).encode()


class _Publisher:
    """Publishes without a pause in a thread of its own, until the block ends."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self.count = 0
        self.longest_s = 0.0
        """Of the receipts since a rate was taken."""

    def __enter__(self) -> _Publisher:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._is_over.set()
        self._thread.join()

    def rate_over(self, seconds: float) -> float:
        start, count = time.perf_counter(), self.count
        time.sleep(seconds)
        self.longest_s = 0.0
        return (self.count - count) / (time.perf_counter() - start)

    def _publish(self) -> None:
        data = random.Random(1).randbytes(BESIDE_BATCH * BESIDE_BYTES)
        rows = [data[at : at + BESIDE_BYTES] for at in range(0, len(data), BESIDE_BYTES)]
        with sparrow.connect(self._url, reconnect_s=60.0) as client:
            while not self._is_over.is_set():
                start = time.perf_counter()
                client.publish_batch("beside", rows)
                self.longest_s = max(self.longest_s, time.perf_counter() - start)
                self.count += len(rows)


if __name__ == "__main__":
    sys.exit(measure.main("spark_compact", __doc__, run))
