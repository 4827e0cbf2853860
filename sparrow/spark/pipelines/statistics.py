"""``builtin: statistics``: what goes through topics, by topic and window of time.

One row a topic and window: how many messages and bytes, how many a second, the largest, how long they were
on their way (from ``event_time`` to ``publish_time``, where an event time is given), how many are dead
letters, how many keys there are and which are the most frequent. Messages are counted by the time they were
published. The source needs a watermark on ``publish_time`` in mode ``append``, which tells each window once,
when it is over; mode ``update`` tells the present one again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from sparrow.model.errors import InvalidPipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OPTIONS = {"window": "1 minute", "top": 5}
TOP_MAX = 100


def statistics(views: Mapping[str, DataFrame], options: dict[str, Any]) -> DataFrame:
    """See the module's text; ``window`` is a length like ``1 minute``, ``top`` how many keys are named."""
    for name in options:
        if name not in OPTIONS:
            hint = f"Options: {', '.join(OPTIONS)}."
            raise InvalidPipeline(f"options.{name} is not known", hint=hint, key=f"options.{name}")
    (rows,) = views.values() if len(views) == 1 else _refuse_many()
    if "data" not in rows.columns:
        raise InvalidPipeline(
            "sources: statistics reads messages as they are, without a schema", key="sources"
        )
    top = options.get("top", OPTIONS["top"])
    if not isinstance(top, int) or not 1 <= top <= TOP_MAX:
        raise InvalidPipeline(f"options.top is from 1 to {TOP_MAX}, not {top!r}", key="options.top")
    length = str(options.get("window", OPTIONS["window"]))
    size = F.coalesce(F.octet_length("data"), F.lit(0))
    latency_s = (F.unix_micros("publish_time") - F.unix_micros("event_time")) / 1_000_000
    measured = rows.select(
        "topic", "publish_time", "key", "attributes", size.alias("size"), latency_s.alias("latency")
    )
    grouped = measured.groupBy(F.window("publish_time", length).alias("window"), "topic").agg(
        F.count("*").alias("messages"),
        F.sum("size").alias("bytes"),
        F.max("size").alias("bytes_max"),
        F.percentile_approx("latency", F.array(F.lit(0.5), F.lit(0.95), F.lit(0.99))).alias("latency"),
        F.count_if(F.col("attributes")["dlq_reason"].isNotNull()).alias("errors"),
        F.approx_count_distinct("key").alias("keys"),
        F.expr(f"approx_top_k(key, {top})").alias("top_keys"),
    )
    seconds = F.unix_seconds("window.end") - F.unix_seconds("window.start")
    return grouped.select(
        F.col("window.start").alias("start"),
        F.col("window.end").alias("end"),
        "topic",
        "messages",
        (F.col("messages") / seconds).alias("messages_per_s"),
        "bytes",
        (F.col("bytes") / seconds).alias("bytes_per_s"),
        "bytes_max",
        F.get("latency", F.lit(0)).alias("latency_p50_s"),
        F.get("latency", F.lit(1)).alias("latency_p95_s"),
        F.get("latency", F.lit(2)).alias("latency_p99_s"),
        "errors",
        "keys",
        "top_keys",
    )


def _refuse_many() -> Any:
    raise InvalidPipeline("sources: statistics reads one source; a pattern names many topics", key="sources")
