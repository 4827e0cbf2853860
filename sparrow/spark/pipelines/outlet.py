"""Where a batch goes: all messages, results and dead letters of all topics, by one write; tables one by one.

Each is done once for a query and a batch, however often Spark repeats it. The broker remembers the newest
batch that it published for a query. A table gets a directory a batch, made aside and renamed: it is there
whole or not at all, and one that is there is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from sparrow.model.pipeline import Pipeline, Sink
from sparrow.spark.options import Where
from sparrow.spark.origins import open_broker
from sparrow.spark.pipelines.batches import Batches
from sparrow.spark.pipelines.plan import REPLAYED, Poisons, make_letters, may_refuse, stretch_loader

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BATCH = "batch"
"""The column by which a table is divided into batches."""
_COLUMNS = ("topic", "data", "key", "attributes", "event_time")
_NO_ATTRIBUTES = "CAST(map() AS MAP<STRING, STRING>)"
_ROUNDS_MAX = 3
_VALUE_LENGTH_MAX = 1000


@dataclass
class Outlet:
    """What ``foreachBatch`` calls."""

    pipeline: Pipeline
    where: Where
    poisons: Poisons
    tables: str
    """Below it relative tables are."""
    batches: Batches

    def __call__(self, batch: DataFrame, number: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query, "Spark says which query a batch is of"
        tables = [sink for sink in self.pipeline.sinks if sink.table is not None]
        is_shared = len(self.pipeline.sinks) > 1 or bool(tables)
        if is_shared:  # What is read several times is made once.
            batch = batch.persist()
        try:
            self._publish(batch, query, number)
            for sink in tables:
                self._store(batch, sink, query, number)
        finally:
            if is_shared:
                batch.unpersist()

    def _publish(self, batch: DataFrame, query: str, number: int) -> None:
        found = [*to_messages(self.pipeline, batch), *self._letters(batch, number)]
        if not found:
            return
        options = {"applicationId": f"pipeline/{self.pipeline.name}/{query}", "batchId": str(number)}
        options |= {"servers": self.where.servers or ""}
        if self.where.token:
            options["token"] = self.where.token
        written = reduce(lambda one, other: one.unionByName(other), found)
        written.write.format("sparrow").options(**options).mode("append").save()

    def _letters(self, batch: DataFrame, number: int) -> Iterator[DataFrame]:
        stretches = self.batches.stretches(number) if may_refuse(self.pipeline, self.poisons) else {}
        if not any(stretches.values()):
            return
        load = stretch_loader(batch.sparkSession, self.where, stretches)
        patterns = [source.topic for source in self.pipeline.sources.values()]
        ids = {extent.topic: extent.topic_id for extent in open_broker(self.where).extents(patterns)}
        yield make_letters(self.pipeline, load, self.poisons).select(
            F.lit(self.pipeline.dead_letter_topic).alias("topic"),
            "data",
            "key",
            _letter_attributes(ids).alias("attributes"),
            F.lit(None).cast("timestamp").alias("event_time"),
        )

    def _store(self, batch: DataFrame, sink: Sink, query: str, number: int) -> None:
        rows = _chosen(batch, sink)
        if not rows.isEmpty():
            _write_table(rows, sink, self._place(sink.table or ""), query, number)

    def _place(self, table: str) -> str:
        is_whole = table.startswith("/") or "://" in table
        return table if is_whole else f"{self.tables.rstrip('/')}/{table}"


def to_messages(pipeline: Pipeline, rows: DataFrame) -> list[DataFrame]:
    """The rows of a result as messages of each topic."""
    return [_messages(rows, sink) for sink in pipeline.sinks if sink.topic is not None]


def _chosen(rows: DataFrame, sink: Sink) -> DataFrame:
    return rows if sink.where is None else rows.where(sink.where)


def _messages(rows: DataFrame, sink: Sink) -> DataFrame:
    rows = _chosen(rows, sink)
    has_data = "data" in rows.columns
    if sink.data is not None:
        data = F.expr(sink.data)
    else:
        data = F.col("data") if has_data else F.to_json(F.struct("*"))
    key = F.lit(None) if sink.key is None else F.expr(sink.key)
    if sink.key is None and has_data and "key" in rows.columns:
        key = F.col("key")
    attributes = F.expr(_NO_ATTRIBUTES)
    if sink.attributes:
        pairs = [each for name, text in sink.attributes.items() for each in (F.lit(name), _text(text))]
        attributes = F.map_filter(F.create_map(*pairs), lambda _, value: value.isNotNull())
    elif has_data and "attributes" in rows.columns:
        attributes = F.col("attributes")
    has_time = has_data and "event_time" in rows.columns
    event_time = F.col("event_time") if has_time else F.lit(None)
    return rows.select(
        F.lit(sink.topic).alias("topic"),
        data.cast("binary").alias("data"),
        key.cast("string").alias("key"),
        attributes.alias("attributes"),
        event_time.cast("timestamp").alias("event_time"),
    )


def _text(expression: str) -> Column:
    return F.expr(expression).cast("string")


def _letter_attributes(ids: dict[str, int]) -> Column:
    """The attributes that the broker gives to dead letters, so that they are seen and replayed alike."""
    known = [each for topic, number in ids.items() for each in (F.lit(topic), F.lit(str(number)))]
    topic_id = F.create_map(*known)[F.col("topic")] if known else F.lit("0")
    place = F.concat_ws("-", topic_id, F.col("partition"), F.col("offset"))
    rounds = F.coalesce(F.col("attributes")["replay_round"], F.lit("0"))
    is_loop = F.when(rounds.cast("int") >= _ROUNDS_MAX, F.lit("true"))
    pairs: Sequence[tuple[str, Column]] = (
        ("message_id", F.coalesce("original_id", place)),
        ("topic", F.col("topic")),
        ("subscription", F.col("subscription")),
        ("reason", F.col("reason")),
        ("attempts", F.lit("1")),
        ("round", rounds),
        ("at_us", F.lit(str(time.time_ns() // 1000))),
        ("publish_time_us", F.unix_micros("publish_time").cast("string")),
        ("last_error", F.substring("error", 1, _VALUE_LENGTH_MAX)),
        ("last_consumer", F.lit("spark")),
        ("loop", is_loop),
    )
    flat = [each for name, value in pairs for each in (F.lit(f"dlq_{name}"), value)]
    ours = F.map_filter(F.create_map(*flat), lambda _, value: value.isNotNull())
    own = F.map_filter(
        F.coalesce("attributes", F.expr(_NO_ATTRIBUTES)),
        lambda name, _: ~name.startswith("dlq_") & ~name.isin(*REPLAYED),
    )
    return F.map_concat(own, ours)


# Tables.


def _write_table(rows: DataFrame, sink: Sink, place: str, query: str, number: int) -> None:
    """A directory a batch, as Spark's partitions are: ``batch=<query>-<number>``."""
    spark = rows.sparkSession
    jvm: Any = spark.sparkContext._jvm
    path = jvm.org.apache.hadoop.fs.Path
    name = f"{query[:8]}-{number:09d}"
    target, aside = path(f"{place}/{BATCH}={name}"), path(f"{place}/_aside/{name}")
    files = target.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    if files.exists(target):
        return
    writer = rows.write.mode("overwrite")
    if sink.partition_by:
        writer = writer.partitionBy(*sink.partition_by)
    writer.parquet(aside.toString())
    if not files.rename(aside, target) and not files.exists(target):
        raise OSError(f"{aside} cannot be renamed to {target}")
