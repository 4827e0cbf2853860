"""The options of the source: read, checked and named in every complaint, before any work starts.

Names are those of Spark's Kafka source wherever the meaning is the same, so that a query moves by changing
its format and its address. Spark hands options over in lower case; complaints write them as people do.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sparrow.client.options import parse_url
from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import InvalidArgument, InvalidOption
from sparrow.model.message import to_us
from sparrow.model.names import parse_subscription, parse_topic

EARLIEST, LATEST = -2, -1
"""Offsets that stand for the first message that is kept and for the end of the log, as with Kafka."""

Positions = dict[tuple[str, int], int]
"""Offsets by topic and partition."""

_SIZES = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}
_DURATIONS = {"": 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_CONNECTION = ("servers", "path", "token", "retryTimeout")
_CHOICE = ("subscribe", "subscribePattern", "columns", "filter", "includeHeaders", "failOnDataLoss")
_TASKS = ("minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition", "localFiles", "epochs")
_START = ("startingOffsets", "startingTimestamp")
_BATCH = ("endingOffsets", "endingTimestamp")
_STREAM = (
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger", "subscription",
)  # fmt: skip
NAMES = (*_CONNECTION, *_CHOICE, *_TASKS, *_START, *_BATCH, *_STREAM)
_AS_WRITTEN = {name.lower(): name for name in NAMES}


@dataclass(frozen=True)
class Moment:
    """A point in time to begin or end at."""

    time_us: int


Edge = int | Positions | Moment
"""Where to begin or to end: EARLIEST, LATEST, offsets, or a time."""


@dataclass(frozen=True)
class Where:
    """Which log: a broker, or the directory of one that is stopped."""

    servers: str | None
    path: str | None
    token: str = ""
    retry_s: float = 30.0


@dataclass(frozen=True)
class ReadOptions:
    """What a read asks for."""

    where: Where
    patterns: tuple[str, ...]
    is_pattern: bool
    start: Edge | None = None
    end: Edge = LATEST
    columns: tuple[str, ...] = ()
    filter: str | None = None
    has_headers: bool = False
    is_loss_fatal: bool = True
    tasks_min: int = 0
    task_rows_max: int | None = None
    task_bytes_max: int = 64 * 2**20
    reads_local_files: bool = True
    trigger_rows_max: int | None = None
    trigger_rows_min: int | None = None
    trigger_delay_s: float = 15 * 60.0
    trigger_bytes_max: int | None = None
    subscription: str | None = None
    epochs: tuple[tuple[str, int], ...] = ()
    """The ids that topics are expected to have: offsets of a topic mean nothing in one made anew."""


def parse_options(given: Mapping[str, str], *, is_stream: bool | None = None) -> ReadOptions:
    """The options of a read; what it is read as is not known when Spark first asks for the schema."""
    options = _Given(given)
    if is_stream is not None:
        options.refuse(_BATCH if is_stream else _STREAM, "a batch" if is_stream else "a stream")
    patterns, is_pattern = _patterns(options)
    text = options.text("filter")
    if text is not None:
        from sparrow.kernel.filter import parse_filter

        with _named("filter"):
            parse_filter(text)
    subscription = options.text("subscription")
    where = parse_where(options)
    if subscription is not None:
        with _named("subscription"):
            parse_subscription(subscription)
        if where.path is not None:
            raise _wrong("subscription", "needs a broker: a path has nobody to commit to", "Give servers.")
    rows_min, rows_max = options.count("minOffsetsPerTrigger"), options.count("maxOffsetsPerTrigger")
    if rows_min and rows_max and rows_min > rows_max:
        raise _wrong("minOffsetsPerTrigger", f"{rows_min} is more than maxOffsetsPerTrigger, {rows_max}")
    return ReadOptions(
        where=where,
        patterns=patterns,
        is_pattern=is_pattern,
        start=_edge(options, "starting"),
        end=_edge(options, "ending", LATEST) or 0,
        columns=_columns(options),
        filter=text,
        has_headers=options.truth("includeHeaders", False),
        is_loss_fatal=options.truth("failOnDataLoss", True),
        tasks_min=options.count("minPartitions") or 0,
        task_rows_max=options.count("maxRecordsPerPartition"),
        task_bytes_max=options.size("maxBytesPerPartition") or ReadOptions.task_bytes_max,
        reads_local_files=options.truth("localFiles", True),
        trigger_rows_max=rows_max,
        trigger_rows_min=rows_min,
        trigger_delay_s=options.seconds("maxTriggerDelay", ReadOptions.trigger_delay_s),
        trigger_bytes_max=options.size("maxBytesPerTrigger"),
        subscription=subscription,
        epochs=_epochs(options),
    )


def parse_where(given: Mapping[str, str]) -> Where:
    """Which broker or directory; for the sink too."""
    options = given if isinstance(given, _Given) else _Given(given, check=False)
    servers, path = options.text("servers"), options.text("path")
    if (servers is None) == (path is None):
        said = "are both given" if servers else "are both missing"
        raise _wrong(
            "servers", f"and path {said}", "Give servers, like 127.0.0.1:9092, or the path of a directory."
        )
    if servers is not None:
        if "," in servers:
            raise _wrong("servers", f"{servers!r} names several brokers", "A topic lives on one: give that.")
        servers = servers if "://" in servers else f"sparrow://{servers}"
        with _named("servers"):
            parse_url(servers)
    if path is not None and re.match(r"[a-z0-9]{2,}://", path):
        raise _wrong("path", f"{path!r} is not a directory of this machine")
    return Where(servers, path, options.text("token") or "", options.seconds("retryTimeout", Where.retry_s))


def _patterns(options: _Given) -> tuple[tuple[str, ...], bool]:
    topics, pattern = options.text("subscribe"), options.text("subscribePattern")
    if (topics is None) == (pattern is None):
        said = "are both given" if topics else "are both missing"
        raise _wrong(
            "subscribe", f"and subscribePattern {said}", "Name topics, or give a pattern like orders.#"
        )
    if pattern is not None:
        with _named("subscribePattern"):
            return (parse_pattern(pattern).text,), True
    names = [name.strip() for name in (topics or "").split(",")]
    with _named("subscribe"):
        return tuple(sorted({parse_topic(name) for name in names})), False


def _columns(options: _Given) -> tuple[str, ...]:
    text = options.text("columns")
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise _wrong("columns", f"{text!r} has an empty or a repeated name")
    return names


def _epochs(options: _Given) -> tuple[tuple[str, int], ...]:
    text = options.text("epochs")
    try:
        given = json.loads(text or "{}")
        return tuple((str(topic), int(number)) for topic, number in given.items())
    except (ValueError, TypeError, AttributeError):
        raise _wrong("epochs", f"{text!r} is not a JSON object of topic ids") from None


def _edge(options: _Given, which: str, default: int | None = None) -> Edge | None:
    offsets, moment = f"{which}Offsets", f"{which}Timestamp"
    text, time = options.text(offsets), options.text(moment)
    if text is not None and time is not None:
        raise _wrong(offsets, f"and {moment} exclude each other")
    if time is not None:
        return _moment(moment, time)
    if text is None:
        return default
    if text.lower() in ("earliest", "latest"):
        return EARLIEST if text.lower() == "earliest" else LATEST
    return _positions(offsets, text)


def _moment(name: str, text: str) -> Moment:
    if re.fullmatch(r"\d{1,15}", text):
        return Moment(int(text) * 1000)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise _wrong(
            name,
            f"{text!r} is not a time",
            "Write 2026-01-31T12:00:00Z, or milliseconds since 1970; times without a zone are UTC.",
        ) from None
    return Moment(to_us(found if found.tzinfo else found.replace(tzinfo=UTC)))


def _positions(name: str, text: str) -> Positions:
    hint = 'Offsets look like {"orders": {"0": 23, "1": -2}}; -2 is earliest, -1 latest.'
    try:
        given = json.loads(text)
    except ValueError:
        raise _wrong(name, f"{text[:100]!r} is not earliest, latest or JSON", hint) from None
    if not isinstance(given, dict) or not given:
        raise _wrong(name, f"{text[:100]!r} names no topic", hint)
    found: Positions = {}
    for topic, partitions in given.items():
        if not isinstance(partitions, dict):
            raise _wrong(name, f"{topic!r} has no partitions", hint)
        for partition, offset in partitions.items():
            is_whole = type(offset) is int and offset >= EARLIEST
            if not re.fullmatch(r"\d{1,9}", partition) or not is_whole:
                raise _wrong(name, f"{topic!r} has {partition!r}: {offset!r}", hint)
            found[topic, int(partition)] = offset
    return found


class _Given(dict[str, str]):
    """Options as Spark has them, asked for by the names that people write."""

    def __init__(self, given: Mapping[str, str], *, check: bool = True) -> None:
        super().__init__({name.lower(): value for name, value in given.items()})
        for name in self if check else ():
            if name not in _AS_WRITTEN:
                near = difflib.get_close_matches(name, _AS_WRITTEN, 1)
                hint = f"Did you mean {_AS_WRITTEN[near[0]]}?" if near else f"Options: {', '.join(NAMES)}."
                raise InvalidOption(f"option {name!r} is not known", hint=hint, option=name)

    def refuse(self, names: tuple[str, ...], what: str) -> None:
        for name in names:
            if name.lower() in self:
                raise _wrong(name, f"is for {what} alone", "Leave it out.")

    def text(self, name: str) -> str | None:
        found = self.get(name.lower())
        if found is not None and not str(found).strip():
            raise _wrong(name, "is empty", "Give a value, or leave it out.")
        return None if found is None else str(found).strip()

    def truth(self, name: str, default: bool) -> bool:
        found = (self.text(name) or str(default)).lower()
        if found not in ("true", "false"):
            raise _wrong(name, f"is true or false, not {found!r}")
        return found == "true"

    def count(self, name: str) -> int | None:
        found = self.text(name)
        if found is None:
            return None
        if not re.fullmatch(r"\d{1,18}", found) or int(found) < 1:
            raise _wrong(name, f"is a whole number from 1, not {found!r}")
        return int(found)

    def size(self, name: str) -> int | None:
        found = self.text(name)
        if found is None:
            return None
        match = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", found.lower())
        if match is None or match[2] not in _SIZES or int(match[1]) < 1:
            raise _wrong(name, f"is a number of bytes like 67108864 or 64m, not {found!r}")
        return int(match[1]) * _SIZES[match[2]]

    def seconds(self, name: str, default: float) -> float:
        found = self.text(name)
        if found is None:
            return default
        match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)\s*([a-z]*)", found.lower())
        if match is None or match[2] not in _DURATIONS:
            raise _wrong(name, f"is a duration like 30s or 15m, not {found!r}")
        return float(match[1]) * _DURATIONS[match[2]]


def _wrong(name: str, what: str, hint: str | None = None) -> InvalidOption:
    return InvalidOption(f"option {name} {what}", hint=hint, option=name)


class _named:
    """Complaints of the block are about this option."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidArgument) and not isinstance(error, InvalidOption):
            raise InvalidOption(
                f"option {self._name}: {error.message} [{error.code}]", hint=error.hint, option=self._name
            ) from error
