"""``builtin: replay``: messages of the past, published again.

It reads from ``start`` of the source on, takes what the options choose, and hands the messages over with
their data, key, attributes and event time. Each says in the attribute ``replay_of`` which message it is of,
as ``topic/partition/offset``, so that consumers recognise it. As any pipeline it publishes once however often
it is interrupted, shows what remains as its lag, and takes at most ``max_offsets_per_trigger`` a trigger.

Dead letters are another matter: the broker replays those by itself, under their own ids and to one
subscription, as a rule that which failed (`sparrow dlq replay`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from sparrow.model.errors import InvalidPipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OPTIONS = ("until", "keys", "where")
REPLAY_OF = "replay_of"


def replay(views: Mapping[str, DataFrame], options: dict[str, Any]) -> DataFrame:
    """``until`` is a time that the messages were published before, ``keys`` a list separated by commas,
    ``where`` a condition in SQL over the columns of a message."""
    for name in options:
        if name not in OPTIONS:
            hint = f"Options: {', '.join(OPTIONS)}."
            raise InvalidPipeline(f"options.{name} is not known", hint=hint, key=f"options.{name}")
    if len(views) != 1:
        raise InvalidPipeline("sources: replay reads one source; a pattern names many topics", key="sources")
    (rows,) = views.values()
    if "data" not in rows.columns:
        raise InvalidPipeline("sources: replay reads messages as they are, without a schema", key="sources")
    if "until" in options:
        rows = rows.where(F.col("publish_time") < F.lit(str(options["until"])).cast("timestamp"))
    if "keys" in options:
        rows = rows.where(F.col("key").isin([key.strip() for key in str(options["keys"]).split(",")]))
    if "where" in options:
        rows = rows.where(str(options["where"]))
    place = F.concat_ws("/", "topic", F.col("partition"), F.col("offset"))
    own = F.map_filter(
        F.coalesce("attributes", F.expr("CAST(map() AS MAP<STRING, STRING>)")),
        lambda name, _: name != REPLAY_OF,
    )
    said = F.create_map(F.lit(REPLAY_OF), F.coalesce("original_id", place))
    return rows.select(
        "data",
        "key",
        F.map_concat(own, said).alias("attributes"),
        F.coalesce("event_time", "publish_time").alias("event_time"),
    )
