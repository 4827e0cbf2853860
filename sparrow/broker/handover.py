"""From columns to messages: the one place where a batch becomes Python objects, one a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sparrow.kernel.exchange import Run
from sparrow.model.message import Delivered, Message
from sparrow.store.ports import LogBatch


class BatchRows:
    """The columns of a batch, by name and row; times come as whole microseconds."""

    __slots__ = ("_batch",)

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def value(self, column: str, row: int) -> Any:
        found = self._batch.column(column)
        if found.null_count == len(found):
            return None
        scalar = found[row]
        return scalar.value if isinstance(scalar, pa.TimestampScalar) else scalar.as_py()


def messages(batch: LogBatch, topic: str, limit: int | None = None) -> list[Message]:
    """The messages of a batch, at most ``limit``."""
    rows = batch.batch if limit is None else batch.batch.slice(0, limit)
    source = BatchRows(rows)
    topic_id, partition = batch.stream
    columns = zip(
        rows.column("offset").to_pylist(),
        rows.column("data").to_pylist(),
        _texts(rows.column("key")),
        range(rows.num_rows),
        strict=True,
    )
    return [
        Message(topic, topic_id, partition, offset, data, key, 0, source, row)
        for offset, data, key, row in columns
    ]


def deliveries(
    rows: pa.RecordBatch, run: Run, topic: str, ack_ids: Sequence[str], owner: Any
) -> list[Delivered]:
    """The messages of a leased run; ``owner`` is whom they are settled with."""
    source = BatchRows(rows)
    topic_id, partition = run.stream
    attempts, deadline_us = run.attempts, run.deadline_us
    columns = zip(
        rows.column("offset").to_pylist(),
        rows.column("data").to_pylist(),
        _texts(rows.column("key")),
        ack_ids,
        range(rows.num_rows),
        strict=True,
    )
    return [
        Delivered(
            topic, topic_id, partition, offset, data, key, attempts.get(offset, 1), source, row,
            ack_id, deadline_us, owner,
        )
        for offset, data, key, ack_id, row in columns
    ]  # fmt: skip


def _texts(column: Any) -> Sequence[str | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    found: list[str | None] = column.to_pylist()
    return found
