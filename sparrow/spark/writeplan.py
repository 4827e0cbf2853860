"""What a write asks for: options and columns, checked when a query is planned, and what travels to its tasks.

Spark makes this anew for every commit, in a process that lives for a moment: nothing is imported here that is
slow.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from sparrow.client.direct import DirectLine
from sparrow.model.errors import InvalidArgument, InvalidOption
from sparrow.model.flow import parse_class
from sparrow.model.names import parse_topic
from sparrow.model.stage import parse_batch, parse_name
from sparrow.model.topic import Codec
from sparrow.spark.options import Where, parse_where

NAMES = (
    "servers", "topic", "token", "applicationId", "batchId", "publisher", "priorityClass", "compression",
    "retryTimeout",
)  # fmt: skip
_OF_SPARK = frozenset({"checkpointlocation", "queryname", "outputmode", "mergeschema"})
"""What Spark itself puts among the options."""
_AS_WRITTEN = {name.lower(): name for name in NAMES}


@dataclass(frozen=True)
class WritePlan:
    """What a write asks for; it travels to the tasks."""

    where: Where
    topic: str | None
    """None: it is in the column ``topic``."""
    columns: tuple[tuple[str, str], ...]
    """Columns of the DataFrame and the message columns that they become."""
    application: str | None = None
    batch: int | None = None
    publisher: str = ""
    priority_class: str = "normal"
    codec: str = "none"
    nonce: str = ""
    """Keeps apart what two drivers stage for the same batch."""

    def line(self) -> DirectLine:
        """A connection to the broker."""
        assert self.where.servers is not None
        return DirectLine(
            self.where.servers,
            token=self.where.token,
            client="spark-sink",
            publisher=self.publisher,
            priority_class=self.priority_class,
            patience_s=self.where.retry_s,
        )


@dataclass
class Staged(WriterCommitMessage):
    """What a task staged."""

    application: str
    batch: int
    transaction: str
    part: str
    partition: int
    messages: int


def transaction_of(plan: WritePlan, application: str, batch: int) -> str:
    """The name that all tasks of one attempt at a batch share."""
    return f"{application[:150]}/{batch}/{plan.nonce}"


def parse_plan(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, is_stream: bool
) -> WritePlan:
    if overwrite:
        raise InvalidOption(
            "a topic cannot be overwritten, only appended to",
            hint='Write with mode("append"), or outputMode("append") or "update".',
            option="mode",
        )
    given = _given(options)
    where = parse_where({name: given[name] for name in ("servers", "token", "retrytimeout") if name in given})
    topic = given.get("topic")
    application = given.get("applicationid")
    with _naming("topic"):
        topic = None if topic is None else parse_topic(topic)
    with _naming("applicationId"):
        application = None if application is None else parse_name("an application", application)
    with _naming("priorityClass"):
        parse_class(given.get("priorityclass", "normal"))
    codec = given.get("compression", "none")
    if codec not in [each.value for each in Codec]:
        raise _wrong("compression", f"is none, lz4 or zstd, not {codec!r}")
    return WritePlan(
        where=where,
        topic=topic,
        columns=_check_columns(schema, has_topic=topic is not None),
        application=application,
        batch=_batch(given, application, is_stream),
        publisher=given.get("publisher", ""),
        priority_class=given.get("priorityclass", "normal"),
        codec=codec,
        nonce=secrets.token_hex(8),
    )


def _given(options: Mapping[str, str]) -> dict[str, str]:
    found = {name.lower(): value for name, value in options.items()}
    for name in found:
        if name == "path":
            raise _wrong(
                "path", "is for reading; a broker writes", "Give servers, and save() without a path."
            )
        if name not in _AS_WRITTEN and name not in _OF_SPARK:
            near = difflib.get_close_matches(name, _AS_WRITTEN, 1)
            hint = f"Did you mean {_AS_WRITTEN[near[0]]}?" if near else f"Options: {', '.join(NAMES)}."
            raise InvalidOption(f"option {name!r} is not known", hint=hint, option=name)
    return found


def _batch(given: Mapping[str, str], application: str | None, is_stream: bool) -> int | None:
    text = given.get("batchid")
    if is_stream:
        if text is not None:
            raise _wrong("batchId", "is for batch writes alone: a stream counts by itself")
        return None
    if (text is None) != (application is None):
        raise _wrong("applicationId", "and batchId go together", "Give both, or neither.")
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise _wrong("batchId", f"is a whole number from 0, not {text!r}")
    return parse_batch(int(text))


_TEXT = (StringType, BinaryType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_NUMBER = (*_WHOLE, FloatType, DoubleType)


def _is_headers(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = {field.name: field.dataType for field in kind.elementType.fields}
    return fields.keys() == {"key", "value"} and all(isinstance(found, _TEXT) for found in fields.values())


def _is_attributes(kind: DataType) -> bool:
    return (
        isinstance(kind, MapType)
        and isinstance(kind.keyType, StringType)
        and isinstance(kind.valueType, StringType)
    )


def _is_texts(kind: DataType) -> bool:
    return isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType)


COLUMNS: dict[str, tuple[str, Any, str]] = {
    "topic": ("topic", StringType, "a string"),
    "data": ("data", _TEXT, "binary or a string"),
    "value": ("data", _TEXT, "binary or a string"),
    "key": ("key", _TEXT, "a string, or binary that is UTF-8"),
    "attributes": ("attributes", _is_attributes, "a map of strings to strings"),
    "headers": ("attributes", _is_headers, "an array of structs of key and value"),
    "event_time": ("event_time", TimestampType, "a timestamp"),
    "priority": ("priority", _WHOLE, "a whole number"),
    "ttl_ms": ("ttl_ms", _WHOLE, "a whole number"),
    "ttl_s": ("ttl_ms", _NUMBER, "a number"),
    "deliver_at": ("deliver_at", TimestampType, "a timestamp"),
    "depends_on": ("depends_on", _is_texts, "an array of strings"),
}
"""Columns that a DataFrame may have: the message column that each becomes, and its type."""


def _check_columns(schema: StructType, *, has_topic: bool) -> tuple[tuple[str, str], ...]:
    """The columns to take; refuses what is missing, of a wrong type or unknown, by its name."""
    taken: dict[str, str] = {}
    for field in schema.fields:
        found = COLUMNS.get(field.name)
        if found is None:
            raise _bad_column(field.name, "is not one of a message", f"Columns are: {', '.join(COLUMNS)}.")
        target, wanted, said = found
        is_right = (
            isinstance(field.dataType, wanted) if isinstance(wanted, type | tuple) else wanted(field.dataType)
        )
        if not is_right:
            raise _bad_column(field.name, f"is {said}, not {field.dataType.simpleString()}")
        if target in taken:
            raise _bad_column(field.name, f"says the same as {taken[target]!r}", "Leave one of them out.")
        taken[target] = field.name
    if "data" not in taken:
        raise _bad_column("data", "is missing", "The payload is in a column data, or value.")
    if "topic" not in taken and not has_topic:
        raise _bad_column("topic", "is missing", "Give the option topic, or a column topic.")
    return tuple((name, target) for target, name in taken.items() if target != "topic" or not has_topic)


def _bad_column(name: str, what: str, hint: str | None = None) -> InvalidArgument:
    said = hint or "Cast it, or leave it out with select."
    return InvalidArgument(f"the column {name!r} {what}", hint=said, column=name)


def _wrong(name: str, what: str, hint: str | None = None) -> InvalidOption:
    return InvalidOption(f"option {name} {what}", hint=hint, option=name)


class _naming:
    """Complaints of the block are about this option."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidArgument) and not isinstance(error, InvalidOption):
            raise _wrong(self._name, f"is wrong: {error.message}", error.hint) from error
