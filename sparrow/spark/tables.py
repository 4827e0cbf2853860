"""Topics as tables: sealed history by Spark's own Parquet reader, the rest by the source, stitched at an
offset.

Where a partition is stitched, and where it ends, is seen at one moment for all of a topic and written into
the query. From then on the two sides cannot move: a segment file never changes, and what is sealed later is
still read by its offsets. So no row is there twice or missing while the broker seals, and every action on
the same DataFrame sees the same rows.

Files that retention drops stay for ``hold_s``. A table that is used for longer may find one gone; Spark then
fails with FILE_NOT_EXIST, and a new ``table(...)`` shows what is kept by now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from sparrow.model.errors import InvalidArgument, OffsetOutOfRange
from sparrow.model.message import to_us
from sparrow.model.schema import RESERVED, SchemaType, TopicSchema
from sparrow.model.segment import PartitionSegments, SegmentFile, TopicSegments
from sparrow.spark import payloads
from sparrow.spark.columns import LAKE, choose
from sparrow.spark.options import ReadOptions, Where, parse_options, parse_where
from sparrow.spark.origins import Origin, open_origin
from sparrow.spark.planning import find_topics
from sparrow.spark.progress import watch_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOLD_S = 600.0
HISTORY_BATCH = "2g"
"""How much of history a stream takes at once, as it is stored."""
MALFORMED = "__malformed"
TOPIC = "topic"
"""The schema that a topic has itself, if it has one."""

Schema = str | StructType | TopicSchema
Offsets = int | Mapping[int, int]
Time = datetime | float | str


@dataclass(frozen=True)
class Piece:
    """What a table shows of one partition."""

    topic: str
    topic_id: int
    partition: int
    files: tuple[str, ...]
    start: int | None
    """Clips the first file; None when it begins there."""
    end: int | None
    tail: tuple[int, int] | None


def table(
    spark: SparkSession,
    topic: str,
    *,
    servers: str | None = None,
    path: str | None = None,
    token: str = "",
    columns: Sequence[str] | None = None,
    start_offset: Offsets | None = None,
    end_offset: Offsets | None = None,
    start_time: Time | None = None,
    end_time: Time | None = None,
    schema: Schema | None = TOPIC,
    hold_s: float = HOLD_S,
    lake: str | None = None,
) -> DataFrame:
    """A topic, or all topics of a pattern, as a DataFrame that shows what the log holds now.

    Offsets are one number for all partitions or ``{partition: offset}``; times are those of publishing. Both
    pick files before anything is read. ``schema`` says what the data is: DDL or a StructType for JSON, or
    what ``sparrow.spark.avro`` and ``protobuf`` give. Its fields become columns and the message's own get the
    prefix ``__``. A topic that has a schema itself needs none here; None leaves the data as it is. ``lake``
    is where driver and executors see the data directory, if elsewhere: any path or URL that Spark reads."""
    where = parse_where(_given(servers=servers, path=path, token=token))
    options = _reading(where, topic)
    origin = open_origin(where)
    chosen = choose(tuple(columns or ()), False)
    edges = _Edges(start_offset, end_offset, start_time, end_time)
    pieces = [
        piece
        for extent in find_topics(origin, options)
        for piece in _pieces(origin, origin.segments(extent.topic, hold_s), edges, lake)
    ]
    parts = [_history(spark, piece, chosen) for piece in pieces if piece.files]
    tail = _tail(spark, where, [piece for piece in pieces if piece.tail], chosen)
    parts += [] if tail is None else [tail]
    whole = parts[0] if parts else spark.createDataFrame([], chosen)
    for part in parts[1:]:
        whole = whole.unionAll(part)
    found = _chosen(schema, origin, topic, whole)
    return whole if found is None else typed(whole, found)


def stream(
    spark: SparkSession,
    topic: str,
    *,
    servers: str | None = None,
    path: str | None = None,
    token: str = "",
    columns: Sequence[str] | None = None,
    start: str = "earliest",
    start_time: Time | None = None,
    schema: Schema | None = TOPIC,
    subscription: str | None = None,
    max_bytes_per_trigger: int | str = HISTORY_BATCH,
    **options: Any,
) -> DataFrame:
    """A topic, or all topics of a pattern, as a stream that begins with history, in large batches, and goes
    on with what comes. Tasks open segment files by themselves where they can. Other options of the source
    are given by their names. With ``subscription`` progress is committed there after every batch."""
    given = _given(
        servers=servers,
        path=path,
        token=token,
        subscribePattern=topic,
        columns=None if columns is None else ",".join(columns),
        startingOffsets=None if start_time is not None else start,
        startingTimestamp=None if start_time is None else _iso(start_time),
        subscription=subscription,
        maxBytesPerTrigger=str(max_bytes_per_trigger),
        **options,
    )
    parsed = parse_options(given, is_stream=True)
    origin = open_origin(parsed.where)
    find_topics(origin, _reading(parsed.where, topic))
    if subscription is not None:
        watch_progress(spark, parsed.where)
    frame = spark.readStream.format("sparrow").options(**given).load()
    found = _chosen(schema, origin, topic, frame)
    return frame if found is None else typed(frame, found)


def typed(frame: DataFrame, schema: Schema) -> DataFrame:
    """The fields of the data as columns; those of the message behind them, with the prefix ``__``. What does
    not parse is shown in ``__malformed`` as it came, beside fields that are null. A schema that is text or a
    StructType is one of JSON."""
    fields = _fields(schema)
    if "data" not in frame.columns:
        raise InvalidArgument("columns must have data among them for a schema to apply to")
    clash = [field.name for field in fields if field.name.startswith(RESERVED)]
    if clash:
        raise InvalidArgument(
            f"schema: the name {clash[0]!r} begins with __, as the message's own columns do"
        )
    own = [name for name in frame.columns if name != "data"]
    text = F.col("data").cast("string")
    if isinstance(schema, TopicSchema) and schema.type is not SchemaType.JSON:
        parsed = payloads.decoded(schema, F.col("data"))
        malformed = F.when(F.col("__parsed").isNull(), F.col("__data"))
    else:
        whole = StructType([*fields, StructField(MALFORMED, StringType())])
        parsed = F.from_json(text, whole, {"columnNameOfCorruptRecord": MALFORMED})
        malformed = F.col("__parsed").getField(MALFORMED)
    found = frame.select(
        parsed.alias("__parsed"), text.alias("__data"), *(F.col(name).alias(f"__{name}") for name in own)
    )
    return found.select(
        *(F.col("__parsed").getField(field.name).alias(field.name) for field in fields),
        malformed.alias(MALFORMED),
        *(F.col(f"__{name}") for name in own),
    )


def _chosen(schema: Schema | None, origin: Origin, topic: str, frame: DataFrame) -> Schema | None:
    """The schema to apply. Topics of a pattern may have several, so there one has to be given."""
    if schema != TOPIC:
        return schema
    return None if _is_pattern(topic) or "data" not in frame.columns else origin.topic_schema(topic)


def _fields(schema: Schema) -> list[StructField]:
    if isinstance(schema, TopicSchema):
        return list(payloads.spark_schema(schema).fields)
    if isinstance(schema, StructType):
        return list(schema.fields)
    try:
        found = StructType.fromDDL(schema)
    except Exception as error:
        raise InvalidArgument(
            f"schema: {schema!r} cannot be read: {str(error).splitlines()[0]}",
            hint="Write it as in SQL: 'id BIGINT, country STRING'.",
        ) from error
    assert isinstance(found, StructType)
    return list(found.fields)


def _given(**options: Any) -> dict[str, str]:
    return {name: str(value) for name, value in options.items() if value not in (None, "")}


def _reading(where: Where, topic: str) -> ReadOptions:
    """How a topic that is not a pattern has to exist, though a pattern may match none."""
    wanted = {"servers": where.servers} if where.servers else {"path": where.path or ""}
    return parse_options({**wanted, "subscribePattern" if _is_pattern(topic) else "subscribe": topic})


def _is_pattern(topic: str) -> bool:
    return any(letter in str(topic) for letter in "*#")


def _iso(moment: Time) -> str:
    return moment if isinstance(moment, str) else str(to_us(moment) // 1000)


@dataclass(frozen=True)
class _Edges:
    """From where to where a table shows its partitions."""

    start_offset: Offsets | None
    end_offset: Offsets | None
    start_time: Time | None
    end_time: Time | None

    def __post_init__(self) -> None:
        for which in ("start", "end"):
            offset, time = getattr(self, f"{which}_offset"), getattr(self, f"{which}_time")
            if offset is not None and time is not None:
                raise InvalidArgument(f"{which}_offset and {which}_time exclude each other")

    def of(self, origin: Origin, topic: str, held: PartitionSegments) -> tuple[int, int]:
        start = self._at(origin, topic, held, self.start_offset, self.start_time, held.start_offset)
        end = self._at(origin, topic, held, self.end_offset, self.end_time, held.end_offset)
        if self.start_offset is not None and start < held.start_offset:
            raise OffsetOutOfRange(
                f"start_offset {start} of {topic}/{held.partition} is gone; it begins at {held.start_offset}",
                start_offset=held.start_offset,
                end_offset=held.end_offset,
            )
        return max(start, held.start_offset), min(end, held.end_offset)

    def _at(
        self,
        origin: Origin,
        topic: str,
        held: PartitionSegments,
        offset: Offsets | None,
        time: Time | None,
        default: int,
    ) -> int:
        if time is not None:
            moment = datetime.fromisoformat(time) if isinstance(time, str) else time
            return origin.offset_at(topic, held.partition, to_us(moment))
        if offset is None:
            return default
        return offset if isinstance(offset, int) else offset.get(held.partition, default)


def _pieces(origin: Origin, seen: TopicSegments, edges: _Edges, lake: str | None) -> Iterator[Piece]:
    """What is read of each partition, and how. Where no file can be opened the source reads everything."""
    place = seen.directory if lake is None else lake.rstrip("/")
    scheme = "file://" if lake is None else ""  # Where Spark's default is another file system.
    for held in seen.partitions:
        start, end = edges.of(origin, seen.topic, held)
        if start >= end:
            continue
        files = [each for each in held.segments if each.end_offset > start and each.first_offset < end]
        stitch = max(start, min(end, held.sealed_end_offset))
        if files and lake is None and not os.access(f"{place}/{files[0].file}", os.R_OK):
            files, stitch = [], start
        yield Piece(
            seen.topic,
            seen.topic_id,
            held.partition,
            tuple(f"{scheme}{place}/{each.file}" for each in files),
            start if _begins_before(files, start) else None,
            end if files and files[-1].end_offset > end else None,
            (stitch, end) if stitch < end else None,
        )


def _begins_before(files: Sequence[SegmentFile], start: int) -> bool:
    return bool(files) and files[0].first_offset < start


def _history(spark: SparkSession, piece: Piece, chosen: StructType) -> DataFrame:
    try:
        found = spark.read.schema(LAKE).parquet(*piece.files)
    except (PySparkException, Py4JError) as error:
        raise InvalidArgument(
            f"lake: Spark cannot read {piece.files[0]}: {_first_line(error)}",
            hint="Give the path or URL under which driver and executors see the data directory, with what "
            'Spark needs for it, or read with format("sparrow"), which asks the broker.',
        ) from error
    if piece.start is not None:
        found = found.where(F.col("offset") >= piece.start)
    if piece.end is not None:
        found = found.where(F.col("offset") < piece.end)
    fixed = {"topic": F.lit(piece.topic), "partition": F.lit(piece.partition)}
    return found.select(*(fixed.get(name, F.col(name)).alias(name) for name in chosen.names))


def _first_line(error: Exception) -> str:
    """What is wrong; an error of the JVM begins with the call that it came from."""
    lines = str(error).splitlines()
    said = lines[1] if isinstance(error, Py4JError) and len(lines) > 1 else lines[0]
    return said.lstrip(": ")


def _tail(spark: SparkSession, where: Where, pieces: Sequence[Piece], chosen: StructType) -> DataFrame | None:
    if not pieces:
        return None
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for piece in pieces:
        assert piece.tail is not None
        starts.setdefault(piece.topic, {})[str(piece.partition)] = piece.tail[0]
        ends.setdefault(piece.topic, {})[str(piece.partition)] = piece.tail[1]
    given = _given(
        servers=where.servers,
        path=where.path,
        token=where.token,
        subscribe=",".join(sorted(starts)),
        startingOffsets=json.dumps(starts),
        endingOffsets=json.dumps(ends),
        epochs=json.dumps({piece.topic: piece.topic_id for piece in pieces}),
        columns=",".join(chosen.names),
    )
    return spark.read.format("sparrow").options(**given).load()
