"""A pipeline: a subscription whose consumer is Spark, as it is declared and as it is seen.

A declaration says what is read, what is made of it and where that goes. It is strict data: an unknown key, a
wrong type or a contradiction is refused with the key's path before anything has changed. It comes from YAML
(``pipelines/*.yaml``), from JSON over a network, or from a function decorated with ``@sparrow.pipeline``.

Each source of a pipeline is a subscription: the pipeline's own name where there is one source,
``<pipeline>.<view>`` where there are several. So lag, seek, pause, dead letters and metrics are those of
subscriptions. Whether a pipeline is to run is whether its subscriptions are paused.

The built-ins ``compact`` and ``merge`` are *jobs*: they rewrite what is sealed of topics, a turn at a time,
``every`` so often. A job reads no messages, so it has no subscription, no lag and no sinks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sparrow.model.errors import InvalidArgument, InvalidPipeline
from sparrow.model.names import parse_subscription, parse_topic
from sparrow.model.rewrite import SEGMENT_BYTES

VIEW = "source"
"""The name of the only source, where it has no other."""
MALFORMED = "malformed"
"""The reason of rows whose data does not parse as the source's schema."""
POISON = "poison"
"""The reason of rows that make the transformation itself fail."""
SOURCES_MAX = 16
SINKS_MAX = 16
EXPECTATIONS_MAX = 64
TRIGGER_S_MAX = 86_400.0
TRIGGER_S = 1.0
JOBS = ("compact", "merge")
"""Built-ins that are done every so often."""
EVERY_S_MIN, EVERY_S_MAX = 1.0, 31 * 86_400.0
SEGMENT_MIB = "segment_mib"
"""The option of a job: how large new segments may get."""
SEGMENT_MIB_MAX = 4096

_MIB = 1024 * 1024
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?\Z")
_SPANS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Spark jobs that run beside the broker."""

    enabled: Annotated[
        bool, Meta(description="Whether `sparrow up` runs pipelines; Spark starts when there is one to run.")
    ] = True
    directory: Annotated[
        str, Meta(description="A directory of declarations that are applied at the start; none when empty.")
    ] = ""
    home: Annotated[
        str,
        Meta(description="Where checkpoints and relative tables are; beside the data when it is empty."),
    ] = ""
    master: Annotated[
        str, Meta(min_length=1, description="The Spark master, like local[2] or spark://host:7077.")
    ] = "local[*]"
    servers: Annotated[
        str,
        Meta(
            pattern=r"^(sparrows?://[^\s/@]+)?$",
            description="How Spark's driver and executors reach this broker, like sparrow://broker:9092; the "
            "address that it listens on when empty.",
        ),
    ] = ""
    driver_memory: Annotated[
        str, Meta(pattern=r"^[0-9]+[kmg]$", description="Memory of Spark's driver, like 1g.")
    ] = "1g"
    pipelines_max: Annotated[
        int, Meta(ge=1, le=1000, description="How many pipelines run at once; others wait.")
    ] = 32
    backoff_min_s: Annotated[
        float, Meta(ge=0.05, le=3600.0, description="The first wait before a pipeline that failed goes on.")
    ] = 1.0
    backoff_max_s: Annotated[float, Meta(ge=0.05, le=86_400.0, description="The longest of these waits.")] = (
        60.0
    )
    idle_s: Annotated[
        float, Meta(ge=0.0, le=86_400.0, description="How long Spark stays when no pipeline is to run.")
    ] = 60.0


class Watermark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How late rows may come, by a column of the source."""

    column: str
    delay: str
    """As in SQL: ``10 minutes``."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is read: a topic or a pattern, shown to the transformation as a view."""

    topic: str
    """A topic or a pattern, like ``orders.#``."""
    start: str | float = "latest"
    """Where a new pipeline begins: earliest, latest or a time."""
    schema: str | None = None
    """Columns of JSON data, as in SQL: ``id BIGINT, country STRING``."""
    filter: str | None = None
    watermark: Watermark | None = None
    max_offsets_per_trigger: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000


class Sink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows go: a topic or a Parquet table. Expressions are SQL over the columns of the result."""

    topic: str | None = None
    table: str | None = None
    """A directory or URL; a relative one lies below the pipelines' home."""
    where: str | None = None
    """Only rows for which it holds."""
    data: str | None = None
    """The message's data; all columns as JSON when it is left out and there is no column ``data``."""
    key: str | None = None
    attributes: dict[str, str] = {}
    partition_by: list[str] = []


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What Spark may use for it."""

    shuffle_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Tasks, and files a batch, behind a shuffle."""
    config: dict[str, str] = {}
    """Other Spark settings of its session, like ``spark.sql.*``."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A declaration that has been checked; ``parse_pipeline`` makes it."""

    name: str
    sources: dict[str, Source]
    sinks: list[Sink]
    sql: str | None = None
    function: str | None = None
    """``module:name`` or ``/path/file.py:name``."""
    builtin: str | None = None
    options: dict[str, str | int | float | bool] = {}
    """Of a built-in."""
    mode: str = "append"
    expect: dict[str, str] = {}
    dead_letter_topic: str = ""
    trigger_s: float = TRIGGER_S
    every_s: float = 0.0
    """Of a job: the time from one turn to the next."""
    resources: Resources = Resources()

    @property
    def is_job(self) -> bool:
        """Whether it is done every so often, and is no stream."""
        return self.builtin in JOBS

    @property
    def segment_bytes(self) -> int:
        """Of a job: how large new segments may get."""
        return int(self.options.get(SEGMENT_MIB, SEGMENT_BYTES // _MIB)) * _MIB

    def subscriptions(self) -> dict[str, Source]:
        """The subscriptions that it is, and what each reads."""
        if self.is_job:
            return {}
        if len(self.sources) == 1:
            return {self.name: next(iter(self.sources.values()))}
        return {f"{self.name}.{view}": source for view, source in self.sources.items()}

    def is_same_query(self, other: Pipeline) -> bool:
        """Whether a query's checkpoint serves both: sinks, limits and expectations may differ."""
        fixed = (self.sql, self.function, self.builtin, self.options, self.mode)
        if fixed != (other.sql, other.function, other.builtin, other.options, other.mode):
            return False
        return _essence(self.sources) == _essence(other.sources)


def _essence(sources: Mapping[str, Source]) -> dict[str, Any]:
    return {
        view: (each.topic, each.schema, each.filter, each.watermark) for view, each in sorted(sources.items())
    }


class PipelineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner tells of a pipeline that it runs."""

    name: str
    run: int
    state: str
    """starting, running, failing or stopping; of a job at last done or failed."""
    error: str = ""
    """The last one; it stays until a batch is done."""
    batch: int = -1
    rows: int = 0
    """Of the last batch."""
    batch_s: float = 0.0
    rows_per_s: float = 0.0
    done_rows: int = 0
    """Since the runner took it up."""
    restarts: int = 0
    turn: int = 0
    """Of a job: which one this is."""
    outcome: str = ""
    """Of a job that is done: what it did."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Of a job: how much of how much of the present topic."""


class PipelineTurns(msgspec.Struct, frozen=True, kw_only=True):
    """A job's turns: the last, how that went, and when the next is due."""

    next_at_us: int
    count: int = 0
    """How many are over."""
    began_at_us: int | None = None
    ended_at_us: int | None = None
    outcome: str = ""
    """Of the last one: done, failed, or idle when there was not enough to do."""
    detail: str = ""
    failures: int = 0
    """In a row."""


class PipelineLine(msgspec.Struct, frozen=True):
    """A line of a pipeline's log."""

    number: int
    at_us: int
    level: str
    text: str


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline as it is seen."""

    pipeline: Pipeline
    state: str
    """stopped, waiting, starting, running, failing or stopping; scheduled for a job that is not due."""
    is_wanted: bool
    """Whether it is to run."""
    run: int
    """Counts its lives: a seek or another transformation begins a new one, with a new checkpoint."""
    positions: list[tuple[str, int, int]] | None = None
    """Where the run begins, until its runner took that up: topic, partition, offset."""
    runner: str = ""
    lag: int = 0
    created_at_us: int = 0
    changed_at_us: int = 0
    error: str = ""
    error_at_us: int | None = None
    progress: PipelineProgress | None = None
    """What its runner said last."""
    is_due: bool = True
    """Whether it is to run now; a job is when its turn has come."""
    turns: PipelineTurns | None = None
    """Of a job."""


# Parsing.

T = TypeVar("T")
_Declared = TypeVar("_Declared", bound=Callable[..., Any])
_HINT = "docs/guides/pipelines.md shows every key."
_ALIASES = ("source", "trigger", "every")


def parse_pipeline(given: object, *, name: str | None = None) -> Pipeline:
    """The pipeline that a mapping declares; ``name`` is its name unless the mapping has one."""
    if isinstance(given, Pipeline):
        given = msgspec.to_builtins(given)
    if not isinstance(given, Mapping):
        raise InvalidPipeline(f"a pipeline is a mapping of keys, not {type(given).__name__}", hint=_HINT)
    fields = dict(given)
    if "name" not in fields and name is not None:
        fields["name"] = name
    known = [*Pipeline.__struct_fields__, *_ALIASES]
    for key in fields:
        if key not in known:
            raise _unknown("", str(key), known)
    fields["sources"] = _sources(fields)
    if "trigger" in fields:
        fields["trigger_s"] = parse_span(fields.pop("trigger"))
    if "every" in fields:
        fields["every_s"] = parse_span(fields.pop("every"), "every", EVERY_S_MAX)
    if fields.get("builtin") in JOBS:
        fields.setdefault("sinks", [])
    if "sinks" not in fields:
        raise _wrong("sinks", "is missing: a pipeline writes to topics or tables")
    found = _convert(fields)
    _check(found)
    if not found.dead_letter_topic and not found.is_job:
        found = msgspec.structs.replace(found, dead_letter_topic=f"{found.name}.dead")
    return found


def _sources(fields: dict[str, Any]) -> Any:
    one, many = fields.pop("source", None), fields.get("sources")
    if (one is None) == (many is None):
        said = "are both given" if one is not None else "are both missing"
        raise _wrong("source", f"and sources {said}: give one of them")
    if isinstance(many, Mapping):
        return {view: _with_text(each) for view, each in many.items()}
    if many is not None:
        return many
    if isinstance(one, str):
        return {VIEW: {"topic": one}}
    if not isinstance(one, Mapping):
        raise _wrong("source", f"is a topic or a mapping, not {type(one).__name__}")
    rest = _with_text(one)
    view = rest.pop("view", VIEW)
    return {view: rest}


def _with_text(source: Any) -> Any:
    """YAML reads a time as a time; it is kept as its text."""
    if not isinstance(source, Mapping):
        return source
    return {key: each.isoformat() if isinstance(each, datetime) else each for key, each in source.items()}


def _convert(fields: dict[str, Any]) -> Pipeline:
    if isinstance(fields["sources"], Mapping):
        # One by one, because a complaint about a value of a map would not say which.
        fields["sources"] = {
            str(view): _converted(each, Source, f"sources.{view}") for view, each in fields["sources"].items()
        }
    return _converted(fields, Pipeline, "")


def _converted(fields: Any, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        where = place + path.rstrip("`").removeprefix("$")
        where = where.removeprefix(".")
        unknown = re.match(r"Object contains unknown field `(.*)`", message)
        if unknown:
            raise _unknown(where, unknown[1], _keys_at(where)) from error
        raise _wrong(where or "pipeline", f"is wrong: {message}") from error


def _keys_at(where: str) -> list[str]:
    kinds: dict[str, Any] = {"watermark": Watermark, "sources": Source, "sinks": Sink, "resources": Resources}
    for part, kind in kinds.items():
        if where.endswith(part) or (part in ("sources", "sinks") and where.startswith(part)):
            return list(kind.__struct_fields__)
    return list(Pipeline.__struct_fields__)


def parse_span(given: object, key: str = "trigger", max_s: float = TRIGGER_S_MAX) -> float:
    """Seconds: a number, or a text like ``500ms``, ``2s``, ``1m``."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        seconds = float(given)
    else:
        match = _SPAN.match(given.strip()) if isinstance(given, str) else None
        if match is None:
            raise _wrong(key, f"is a span of time like 2s or 500ms, not {given!r}")
        seconds = float(match[1]) * _SPANS[match[2]]
    if not 0 <= seconds <= max_s:
        raise _wrong(key, f"is from 0 to {max_s:g} s, not {given!r}")
    return seconds


def _check(found: Pipeline) -> None:
    """Values that are good one by one and make no pipeline."""
    with _at("name"):
        parse_subscription(found.name)
    if not 1 <= len(found.sources) <= SOURCES_MAX:
        raise _wrong("sources", f"has {len(found.sources)}; 1 to {SOURCES_MAX} are allowed")
    for view, source in found.sources.items():
        _check_source(view, source)
    transforms = [name for name in ("sql", "function", "builtin") if getattr(found, name) is not None]
    if len(transforms) != 1:
        said = f"{' and '.join(transforms)} are given" if transforms else "none of them is given"
        raise _wrong("sql", f"or function or builtin says what is done: {said}")
    if found.function is not None and not re.fullmatch(r".+:[A-Za-z_]\w*", found.function):
        raise _wrong("function", f"is module:name or file.py:name, not {found.function!r}")
    if found.builtin is None and found.options:
        raise _wrong("options", "are those of a builtin")
    if found.is_job:
        _check_job(found)
        return
    if found.every_s:
        raise _wrong("every", f"is for {' and '.join(JOBS)}; a stream has a trigger")
    if found.mode not in ("append", "update"):
        raise _wrong("mode", f"is append or update, not {found.mode!r}")
    if not 0 <= found.trigger_s <= TRIGGER_S_MAX:
        raise _wrong("trigger_s", f"is from 0 to {TRIGGER_S_MAX:g}, not {found.trigger_s!r}")
    if not 1 <= len(found.sinks) <= SINKS_MAX:
        raise _wrong("sinks", f"has {len(found.sinks)}; 1 to {SINKS_MAX} are allowed")
    for number, sink in enumerate(found.sinks):
        _check_sink(f"sinks[{number}]", sink)
    if len(found.expect) > EXPECTATIONS_MAX:
        raise _wrong("expect", f"has {len(found.expect)}; {EXPECTATIONS_MAX} are allowed")
    for reason, condition in found.expect.items():
        if not reason.strip() or not condition.strip():
            raise _wrong(f"expect.{reason}", "is a name and a condition in SQL, neither of them empty")
    if found.dead_letter_topic:
        with _at("dead_letter_topic"):
            parse_topic(found.dead_letter_topic)


def _check_job(found: Pipeline) -> None:
    """It has topics, a time from turn to turn and the size of new segments; nothing else would do
    anything."""
    if len(found.sources) != 1:
        raise _wrong("sources", f"has {len(found.sources)}; a job has one, and a pattern names many topics")
    ((view, source),) = found.sources.items()
    for key in Source.__struct_fields__:
        if key != "topic" and getattr(source, key) != getattr(Source(topic=source.topic), key):
            raise _wrong(f"sources.{view}.{key}", f"means nothing to {found.builtin}, which reads files")
    plain = Pipeline(name=found.name, sources=found.sources, sinks=[])
    for key in ("sinks", "expect", "dead_letter_topic", "mode", "trigger_s"):
        if getattr(found, key) != getattr(plain, key):
            raise _wrong(key.removesuffix("_s"), f"means nothing to {found.builtin}: leave it out")
    if not EVERY_S_MIN <= found.every_s <= EVERY_S_MAX:
        said = f"is the time from one turn to the next, from {EVERY_S_MIN:g} s to {EVERY_S_MAX / 86400:g} d"
        raise _wrong("every", said)
    for key, value in found.options.items():
        if key != SEGMENT_MIB:
            raise _unknown("options", key, [SEGMENT_MIB])
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= SEGMENT_MIB_MAX:
            raise _wrong(f"options.{key}", f"is a number from 1 to {SEGMENT_MIB_MAX}, not {value!r}")


def _check_source(view: str, source: Source) -> None:
    key = f"sources.{view}"
    if not _NAME.match(view):
        raise _wrong(key, "is not the name of a view: use letters, digits and _")
    if not source.topic.strip():
        raise _wrong(f"{key}.topic", "is empty")
    if isinstance(source.start, str) and source.start not in ("earliest", "latest"):
        try:
            msgspec.convert(source.start, datetime)
        except msgspec.ValidationError:
            said = f"is earliest, latest or a time like 2026-01-31T12:00:00Z, not {source.start!r}"
            raise _wrong(f"{key}.start", said) from None
    if source.schema is not None and not source.schema.strip():
        raise _wrong(f"{key}.schema", "is empty")


def _check_sink(key: str, sink: Sink) -> None:
    if (sink.topic is None) == (sink.table is None):
        said = "are both given" if sink.topic is not None else "are both missing"
        raise _wrong(f"{key}.topic", f"and table {said}: a sink is one of them")
    if sink.topic is not None:
        with _at(f"{key}.topic"):
            parse_topic(sink.topic)
        if sink.partition_by:
            raise _wrong(f"{key}.partition_by", "is for a table")
        return
    if not (sink.table or "").strip():
        raise _wrong(f"{key}.table", "is empty")
    for name in ("key", "data", "attributes"):
        if getattr(sink, name):
            raise _wrong(f"{key}.{name}", "is for a topic")


def _wrong(key: str, what: str) -> InvalidPipeline:
    return InvalidPipeline(f"{key} {what}", hint=_HINT, key=key)


def _unknown(where: str, key: str, known: list[str]) -> InvalidPipeline:
    path = f"{where}.{key}" if where else key
    near = difflib.get_close_matches(key, known, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Keys are: {', '.join(known)}."
    return InvalidPipeline(f"{path} is not a key of a pipeline", hint=hint, key=path)


class _at:
    """Complaints of the block are about this key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidArgument) and not isinstance(error, InvalidPipeline):
            raise InvalidPipeline(f"{self._key}: {error.message}", hint=error.hint, key=self._key) from error


# Functions as pipelines.


def pipeline(name: str, **keys: Any) -> Callable[[_Declared], _Declared]:
    """Declares a function that takes a DataFrame for each source, by the view's name, and returns one.

        @sparrow.pipeline("fraud", source={"topic": "orders.#", "schema": "amount DOUBLE"},
                          sinks=[{"topic": "alerts"}])
        def fraud(source):
            return source.where("amount > 1000")

    Keys are those of the YAML form. ``sparrow pipeline apply file.py`` applies what a file declares."""

    def declare(function: _Declared) -> _Declared:
        place = f"{function.__module__}:{function.__name__}"
        function.__pipeline__ = parse_pipeline(  # type: ignore[attr-defined]
            {**keys, "name": name, "function": place}
        )
        return function

    return declare
