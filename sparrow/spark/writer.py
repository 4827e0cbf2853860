"""A task's part of a write: Arrow batches become message columns, and go to the broker's stage.

The batch is the unit. Small ones are gathered, large ones cut, each is divided by the partitions of its keys
here and not in the broker, and several are on their way at once. Every attempt has a part of its own, so what
an attempt that died left behind never counts.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from sparrow.client import staging
from sparrow.client.direct import DirectLine
from sparrow.model.errors import (
    InvalidArgument,
    NotFound,
    PreconditionFailed,
    ResourceExhausted,
    SparrowError,
)
from sparrow.model.topic import Codec
from sparrow.spark.writeplan import Staged, WritePlan, transaction_of
from sparrow.store import batch as batches

_GATHER_BYTES = 2 * 1024 * 1024
"""Rows are gathered up to this before they are sent: fewer, larger batches in the log."""
_WINDOW = 4
"""Calls on their way at once."""

_lines: dict[tuple[int, WritePlan], DirectLine] = {}


def streaming_identity() -> tuple[str, int]:
    """The query and the micro-batch that this task works for."""
    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if query is None or batch is None:
        raise PreconditionFailed("this task does not know its query and batch", hint="Run it by writeStream.")
    return query, int(batch)


def write_part(plan: WritePlan, application: str, batch: int, iterator: Iterator[pa.RecordBatch]) -> Staged:
    """Stages the rows of one task."""
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    attempt = 0 if context is None else context.attemptNumber()
    part = _Part(
        plan, transaction_of(plan, application, batch), f"{partition}-{attempt}-{secrets.token_hex(6)}"
    )
    try:
        for rows in iterator:
            part.add(rows)
        messages = part.finish()
    except BaseException:
        part.abandon()
        raise
    return Staged(application, batch, part.transaction, part.name, partition, messages)


def _line(plan: WritePlan) -> DirectLine:
    """The connection of this process; Spark uses its Python workers again."""
    key = (
        os.getpid(),
        WritePlan(plan.where, None, (), publisher=plan.publisher, priority_class=plan.priority_class),
    )
    found = _lines.get(key)
    if found is None:
        found = _lines[key] = plan.line()
    return found


class _Sent(NamedTuple):
    """A call on its way."""

    number: int
    head: Any
    body: Any


class _Part:
    """One part, until all its calls are answered."""

    def __init__(self, plan: WritePlan, transaction: str, name: str) -> None:
        self.transaction = transaction
        self.name = name
        self._plan = plan
        self._codec = Codec(plan.codec)
        self._line = _line(plan)
        self._gathered: list[pa.Table] = []
        self._gathered_bytes = 0
        self._position = 0
        self._messages = 0
        self._on_their_way: deque[_Sent] = deque()
        self._partitions: dict[str, int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        self._gathered.append(to_messages(rows, self._plan.columns))
        self._gathered_bytes += rows.nbytes
        if self._gathered_bytes >= _GATHER_BYTES:
            self._flush()

    def finish(self) -> int:
        """Waits until the broker has it all; the number of messages."""
        self._flush()
        while self._on_their_way:
            self._hear()
        return self._messages

    def abandon(self) -> None:
        """Nobody will commit it; the broker sweeps it later when it cannot be told now."""
        self._line.close()
        with suppress(SparrowError):
            if self._position:
                self._line.call("abort_staged", transaction=self.transaction, parts=[self.name])

    def _flush(self) -> None:
        if not self._gathered:
            return
        gathered, self._gathered, self._gathered_bytes = pa.concat_tables(self._gathered), [], 0
        for topic, table in _by_topic(gathered, self._plan.topic):
            chosen = batches.from_table(table)
            partitions = self._count(topic) if "key" in chosen.schema.names else 0
            for batch in batches.cut(chosen):
                for piece in staging.divide(batch, partitions):
                    self._send(topic, piece)

    def _send(self, topic: str, piece: staging.Piece) -> None:
        if len(self._on_their_way) >= _WINDOW:
            self._hear()
        head, body = staging.command(self.transaction, self.name, topic, piece, self._position, self._codec)
        self._on_their_way.append(_Sent(self._line.submit(head, body), head, body))
        self._position += 1
        self._messages += piece.batch.num_rows

    def _hear(self) -> None:
        """Waits for the oldest answer. When the broker has no room for now, those behind it are refused for
        the gap: then all are sent again, one after the other."""
        oldest = self._on_their_way.popleft()
        try:
            self._line.answer(oldest.number)
        except ResourceExhausted:
            again = [oldest, *self._on_their_way]
            for sent in self._on_their_way:
                with suppress(SparrowError):
                    self._line.answer(sent.number)
            self._on_their_way.clear()
            for sent in again:
                self._line.request(sent.head, sent.body)

    def _count(self, topic: str) -> int:
        found = self._partitions.get(topic)
        if found is None:
            try:
                found = int(self._line.call("topic", name=topic)["partitions"])
            except NotFound:
                return 0  # The broker may make the topic when the first message comes.
            self._partitions[topic] = found
        return found


def _by_topic(table: pa.Table, topic: str | None) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each topic, in their order."""
    if topic is not None:
        yield topic, table
        return
    names = table.column("topic")
    if names.null_count:
        raise InvalidArgument("the column 'topic' is null in a row", hint="Every row needs a topic.")
    rows = table.drop_columns(["topic"])
    distinct = pc.unique(names).to_pylist()
    for name in distinct:
        yield name, rows if len(distinct) == 1 else rows.filter(pc.equal(names, name))


def to_messages(rows: pa.RecordBatch, columns: tuple[tuple[str, str], ...]) -> pa.Table:
    """Rows of a DataFrame as message columns."""
    found = {}
    for name, target in columns:
        try:
            found[target] = _convert(rows.column(name), name)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidArgument(f"the column {name!r} cannot be written: {error}", column=name) from error
    return pa.table(found)


def _convert(column: Any, name: str) -> Any:
    if name in ("data", "value"):
        return column.cast(pa.binary())
    if name in ("key", "topic"):
        return column.cast(pa.string())
    if name == "headers":
        return _attributes(column)
    if name == "priority":
        return column.cast(pa.int8())
    if name == "ttl_s":
        return pc.round(pc.multiply(column.cast(pa.float64()), 1000.0)).cast(pa.int64())
    return column


def _attributes(headers: Any) -> Any:
    """Headers in the shape of Spark's Kafka source as a map."""
    whole = pa.concat_arrays([headers, headers.slice(0, 0)])  # without the offset of a slice
    pairs = whole.values
    keys, items = pairs.field("key").cast(pa.string()), pairs.field("value").cast(pa.string())
    offsets = pa.array(whole.offsets.to_numpy(), pa.int32())
    mask = whole.is_null() if whole.null_count else None
    return pa.MapArray.from_arrays(offsets, keys, items, mask=mask)
