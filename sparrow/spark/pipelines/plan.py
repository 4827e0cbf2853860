"""A declaration as a DataFrame: sources become views, bad rows are left out, the rest is transformed.

The same is made of a stream and, to find out which row a transformation fails at, of a stretch of the log.
Bad rows do not flow through the query: a stateful one cannot be cut in two, and a stream that is used twice
is read as two that may differ. They are looked up when a batch is written, by the offsets that the batch is
of, and judged by the same conditions, so a message is in the query or among the letters, never in both.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparrow.model.errors import InvalidPipeline
from sparrow.model.pipeline import MALFORMED, POISON, Pipeline, Source
from sparrow.spark import tables
from sparrow.spark.options import Where
from sparrow.spark.pipelines import builtin

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

LETTER = "__letter"
_MESSAGE = "__message"
_KEPT = ("topic", "partition", "offset", "publish_time", "key", "data", "attributes", "original_id")
REPLAY_FOR = "replay_for"
REPLAYED = (REPLAY_FOR, "replay_from", "replay_round")
"""Attributes of a message that the broker stored again."""
_TEXT_MAX = 300

Place = tuple[str, int, int]
"""A topic, a partition and an offset."""
Load = Callable[[str, Source], "DataFrame"]
"""The rows of a source, by its subscription."""


@dataclass(frozen=True)
class Poisons:
    """Rows at which the transformation fails, by subscription, and why."""

    places: Mapping[str, Mapping[Place, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.places.values()))

    def joined(self, other: Poisons) -> Poisons:
        names = [*self.places, *(name for name in other.places if name not in self.places)]
        return Poisons({n: {**self.places.get(n, {}), **other.places.get(n, {})} for n in names})


def make_frame(spark: SparkSession, pipeline: Pipeline, load: Load, poisons: Poisons) -> DataFrame:
    """The result of a pipeline, of its good rows."""
    views: dict[str, DataFrame] = {}
    for view, (name, source) in zip(pipeline.sources, pipeline.subscriptions().items(), strict=True):
        rows = _judged(load(name, source), name, source, pipeline.expect, poisons)
        if may_refuse(pipeline, poisons):
            rows = rows.where(f"{LETTER} IS NULL")
        views[view] = _watermarked(rows.drop(LETTER, _MESSAGE, tables.MALFORMED), source)
    return transform(spark, pipeline, views)


def make_letters(pipeline: Pipeline, load: Load, poisons: Poisons) -> DataFrame:
    """The messages that are refused, with the reason."""
    found = [
        _judged(load(name, source), name, source, pipeline.expect, poisons)
        .where(f"{LETTER} IS NOT NULL")
        .select(f"{LETTER}.*")
        for name, source in pipeline.subscriptions().items()
    ]
    return reduce(lambda one, other: one.unionByName(other), found)


def may_refuse(pipeline: Pipeline, poisons: Poisons) -> bool:
    """Whether there can be letters."""
    has_schema = any(source.schema for source in pipeline.sources.values())
    return bool(has_schema or pipeline.expect or len(poisons))


def _judged(
    rows: DataFrame, name: str, source: Source, expect: Mapping[str, str], poisons: Poisons
) -> DataFrame:
    """The rows with a letter where they are refused."""
    own = F.coalesce(F.col("attributes")[REPLAY_FOR], F.lit(name)) == name
    message = F.struct(*_KEPT, F.lit(name).alias("subscription")).alias(_MESSAGE)
    rows = rows.where(own).select("*", message)
    if source.schema is not None:
        rows = tables.typed(rows, source.schema).withColumnRenamed(f"__{_MESSAGE}", _MESSAGE)
    reasons = [
        *_poisoned(poisons.places.get(name, {})),
        *_malformed(source),
        *((name, F.expr(condition), condition) for name, condition in expect.items()),
    ]
    verdict = F.lit(None).cast("struct<reason: string, error: string>")
    for reason, is_good, said in reversed(reasons):
        letter = F.struct(F.lit(reason).alias("reason"), F.lit(said[:_TEXT_MAX]).alias("error"))
        verdict = F.when(~F.coalesce(is_good, F.lit(False)), letter).otherwise(verdict)
    rows = rows.withColumn("__verdict", verdict)
    refused = F.struct(f"{_MESSAGE}.*", "__verdict.reason", "__verdict.error")
    return rows.withColumn(LETTER, F.when(F.col("__verdict").isNotNull(), refused)).drop("__verdict")


def _malformed(source: Source) -> Iterable[tuple[str, Column, str]]:
    if source.schema is not None:
        yield MALFORMED, F.col(tables.MALFORMED).isNull(), f"the data is not JSON of: {source.schema}"


def _poisoned(places: Mapping[Place, str]) -> Iterable[tuple[str, Column, str]]:
    for (topic, partition, offset), error in places.items():
        at = F.col(_MESSAGE)
        is_it = (at["topic"] == topic) & (at["partition"] == partition) & (at["offset"] == offset)
        yield POISON, ~is_it, error


def _watermarked(rows: DataFrame, source: Source) -> DataFrame:
    if source.watermark is None:
        return rows
    return rows.withWatermark(source.watermark.column, source.watermark.delay)


# What is done with the rows.


def transform(spark: SparkSession, pipeline: Pipeline, views: Mapping[str, DataFrame]) -> DataFrame:
    """What the pipeline makes of its sources."""
    if pipeline.sql is not None:
        for view, rows in views.items():
            rows.createOrReplaceTempView(view)
        return spark.sql(pipeline.sql)
    if pipeline.builtin is not None:
        return builtin.find(pipeline.builtin)(views, dict(pipeline.options))
    assert pipeline.function is not None
    found = find_function(pipeline.function)(**views)
    if not isinstance(found, DataFrame):
        raise InvalidPipeline(f"function {pipeline.function} returns {type(found).__name__}, not a DataFrame")
    return found


def find_function(place: str) -> Callable[..., Any]:
    """The function that ``module:name`` or ``file.py:name`` says."""
    owner, _, name = place.rpartition(":")
    try:
        module = load_file(Path(owner)) if owner.endswith(".py") else importlib.import_module(owner)
        found: Callable[..., Any] = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise InvalidPipeline(
            f"function {place} cannot be loaded: {error}",
            hint="Name a file or a module that the runner can import, and a function in it.",
            key="function",
        ) from error
    return found


def load_file(path: Path) -> Any:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"sparrow_pipeline_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Where the rows come from.


def stream_loader(spark: SparkSession, where: Where, positions: Mapping[str, Sequence[Place]]) -> Load:
    """Sources as streams that go on from positions; a checkpoint's are stronger."""

    def load(name: str, source: Source) -> DataFrame:
        options = _connection(where) | {
            "subscribePattern": source.topic,
            "startingOffsets": _offsets(positions.get(name, ())) or "earliest",
            "subscription": name,
            "maxOffsetsPerTrigger": str(source.max_offsets_per_trigger),
        }
        if source.filter:
            options["filter"] = source.filter
        return spark.readStream.format("sparrow").options(**options).load()

    return load


def stretch_loader(spark: SparkSession, where: Where, stretches: Mapping[str, Sequence[Any]]) -> Load:
    """Sources as they are between offsets: by subscription (topic, partition, start, end)."""

    def load(name: str, source: Source) -> DataFrame:
        chosen = stretches.get(name, ())
        options = _connection(where)
        if chosen:
            options["subscribe"] = ",".join(sorted({topic for topic, *_ in chosen}))
            options["startingOffsets"] = _offsets([(t, p, start) for t, p, start, _ in chosen])
            options["endingOffsets"] = _offsets([(t, p, end) for t, p, _, end in chosen])
        else:
            options |= {"subscribePattern": source.topic}
        if source.filter:
            options["filter"] = source.filter
        found = spark.read.format("sparrow").options(**options).load()
        if not chosen:
            return found.where("false")
        is_chosen = [f"(topic = '{t}' AND partition = {p})" for t, p, *_ in chosen]
        return found.where(" OR ".join(is_chosen))

    return load


def _connection(where: Where) -> dict[str, str]:
    found = {"servers": where.servers or ""}
    return found | {"token": where.token} if where.token else found


def _offsets(places: Iterable[Place]) -> str:
    found: dict[str, dict[str, int]] = {}
    for topic, partition, offset in places:
        found.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(found, sort_keys=True) if found else ""
