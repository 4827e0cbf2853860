"""Spark over topics: a table next to plain Parquet on the same rows, and the hot tail through the source.

    python -m benchmarks.spark_read [--quick] [--json] [--data DIR]

A broker (``sparrow up``) in a process of its own and one Spark session, ``local[2]``. Messages of 1 KB,
random bytes, in two partitions. Of the history everything is sealed; ``spark.read.parquet`` and pyarrow read
the very files that the table reads. The tail is all in the journal: its file is made large enough, so that
nothing is sealed meanwhile.

Each query runs in turns over the plain files and over the table, after a run of each that does not count, and
the median of the rounds' ratios is judged. A scan has Spark make every row with every column and drop it
(``noop``), a count needs none, a one-column query sums the lengths of the keys.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow.dataset

import sparrow
import sparrow.spark
from benchmarks import measure, remote
from benchmarks.measure import BATCH, MESSAGE_BYTES, MIB, Options, Report

RATIO_MAX = 1.3
TAIL_PER_S_MIN = 400_000
PARTITIONS = 2
DISTINCT = 64


def run(options: Options, report: Report) -> None:
    history = 20_000 if options.quick else 2_000_000
    tail = history
    report.set_out(
        message_bytes=MESSAGE_BYTES, history=history, tail=tail, partitions=PARTITIONS, master="local[2]"
    )
    file_bytes = max(64 * MIB, tail * MESSAGE_BYTES * 3 // 2)
    spark = sparrow.spark.session("spark-read", master="local[2]", config={"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with (
            remote.broker(options.data / "broker", JOURNAL__FILE_BYTES=file_bytes) as process,
            sparrow.connect(process.url) as client,
        ):
            publish(client, "history", history)
            client.seal()
            publish(client, "tail", tail)
            bench = Bench(spark, process.url, options.data / "broker", 1 if options.quick else 3, report)
            bench.history(history)
            bench.tail(tail)
    finally:
        spark.stop()


def publish(client: Any, topic: str, count: int) -> None:
    client.create_topic(topic, partitions=PARTITIONS)
    batches = measure.random_batches(min(DISTINCT, count // BATCH))
    keys = [f"key-{number}" for number in range(BATCH)]
    for number in range(count // BATCH):
        client.publish_batch(topic, batches[number % len(batches)], keys=keys)


class Bench:
    """The session, the broker, and what is measured with them."""

    def __init__(self, spark: Any, url: str, data: Path, rounds: int, report: Report) -> None:
        self._spark = spark
        self._url = url
        self._data = data
        self._rounds = rounds
        self._report = report

    def history(self, messages: int) -> None:
        """The table to plain files, query by query."""
        files = [str(path) for path in sorted(self._data.glob("topics/history/*/*.parquet"))]
        assert self._table().count() == messages, "the table shows what was published"
        queries: dict[str, Callable[[Any], Any]] = {
            "full scan": lambda frame: frame.write.format("noop").mode("overwrite").save(),
            "count": lambda frame: frame.count(),
            "one column": lambda frame: frame.selectExpr("sum(length(key))").collect(),
        }
        for name, query in queries.items():
            plain, table = self._in_turns(query, files)
            ratio = measure.median_ratio(table, plain)
            took_s = statistics.median(table)
            rate = messages / took_s
            note = f"{took_s:.2f} s, {rate:,.0f} messages/s, {rate * MESSAGE_BYTES / 1e6:,.0f} MB/s"
            self._report.check(
                f"table to plain Parquet, {name}", ratio, RATIO_MAX, "times as long", note=note
            )
        alone = [_seconds(lambda: _scan_alone(files)) for _ in range(self._rounds)]
        rate = messages / statistics.median(alone)
        note = f"{rate * MESSAGE_BYTES / 1e6:,.0f} MB/s"
        self._report.figure("pyarrow alone, all columns", rate, "messages/s", note)

    def _in_turns(self, query: Callable[[Any], Any], files: list[str]) -> tuple[list[float], list[float]]:
        plain: list[float] = []
        table: list[float] = []
        for number in range(self._rounds + 1):
            took = (
                _seconds(lambda: query(self._spark.read.parquet(*files))),
                _seconds(lambda: query(self._table())),
            )
            if number:  # The first warms up.
                plain.append(took[0])
                table.append(took[1])
        return plain, table

    def _table(self) -> Any:
        return sparrow.spark.table(self._spark, "history", servers=self._url)

    def tail(self, messages: int) -> None:
        """What is in the journal, by the source."""
        for name, columns in (("", None), (", key and data", "key,data")):
            rates = []
            for number in range(self._rounds + 1):
                seconds = _seconds(lambda columns=columns: self._scan_tail(columns))  # type: ignore[misc]
                if number:
                    rates.append(messages / seconds)
            rate = statistics.median(rates)
            note = f"{rate * MESSAGE_BYTES / 1e6:,.0f} MB/s"
            if columns is None:
                self._report.check(
                    "hot tail by the source", rate, TAIL_PER_S_MIN, "messages/s", at_least=True, note=note
                )
            else:
                self._report.figure(f"hot tail by the source{name}", rate, "messages/s", note)

    def _scan_tail(self, columns: str | None) -> None:
        reader = self._spark.read.format("sparrow").option("servers", self._url).option("subscribe", "tail")
        reader = reader if columns is None else reader.option("columns", columns)
        reader.load().write.format("noop").mode("overwrite").save()


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _scan_alone(files: list[str]) -> int:
    return sum(batch.num_rows for batch in pyarrow.dataset.dataset(files).to_batches())


if __name__ == "__main__":
    sys.exit(measure.main("spark_read", __doc__, run))
