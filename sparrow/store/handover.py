"""From columns to messages: the one place where a batch becomes Python objects, one a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from sparrow.kernel.exchange import Run
from sparrow.kernel.lease import ack_ids
from sparrow.model.message import Delivered, Message, StreamId
from sparrow.store.ports import LogBatch

Contents = tuple[int, bytes | None, str | None]


class BatchLot:
    """The columns of a batch, by name and row; times come as whole microseconds."""

    __slots__ = ("_batch", "partition", "topic", "topic_id")

    def __init__(self, batch: pa.RecordBatch, topic: str, stream: StreamId) -> None:
        self._batch = batch
        self.topic = topic
        self.topic_id, self.partition = stream

    def value(self, column: str, row: int) -> Any:
        place = self._batch.schema.get_field_index(column)
        if place < 0:
            return None  # What was sent over a wire has only the columns that hold something.
        found = self._batch.column(place)
        if found.null_count == len(found):
            return None
        scalar = found[row]
        return scalar.value if isinstance(scalar, pa.TimestampScalar) else scalar.as_py()


class LeasedLot(BatchLot):
    """A batch of which a consumer holds some messages; ``owner`` is whom they are settled with."""

    __slots__ = ("_run", "lease", "owner", "published_at_us")

    def __init__(self, batch: pa.RecordBatch, topic: str, run: Run, owner: Any, published_at_us: int) -> None:
        super().__init__(batch, topic, run.stream)
        self.published_at_us = published_at_us
        """About when its messages were published: good enough for their lag, and at hand."""
        self._run = run
        self.lease = run.head
        self.owner = owner

    @property
    def deadline_us(self) -> int:
        return self._run.deadline_us

    def attempt(self, offset: int) -> int:
        return self._run.attempts.get(offset, 1)

    def ack_id(self, offset: int) -> str:
        return ack_ids(self._run.head, self._run.start_offset, (offset,))[0]


def messages(batch: LogBatch, topic: str, limit: int | None = None) -> list[Message]:
    """The messages of a batch, at most ``limit``."""
    rows = batch.batch if limit is None else batch.batch.slice(0, limit)
    lot = BatchLot(rows, topic, batch.stream)
    return [Message(lot, row, *values) for row, values in enumerate(contents(rows))]


def deliveries(
    rows: pa.RecordBatch,
    found: Iterable[Contents],
    run: Run,
    topic: str,
    owner: Any,
    published_at_us: int,
) -> list[Delivered]:
    """The messages of a leased run; ``found`` are the contents of the rows."""
    lot = LeasedLot(rows, topic, run, owner, published_at_us)
    return [Delivered(lot, row, *values) for row, values in enumerate(found)]


def contents(rows: pa.RecordBatch) -> Iterable[Contents]:
    """What a message shows without being asked: offset, data and key."""
    offsets, data = rows.column("offset").to_pylist(), rows.column("data").to_pylist()
    place = rows.schema.get_field_index("key")
    keys = [None] * len(offsets) if place < 0 else _texts(rows.column(place))
    return zip(offsets, data, keys, strict=True)


def _texts(column: Any) -> Sequence[str | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    found: list[str | None] = column.to_pylist()
    return found
