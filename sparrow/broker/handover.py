"""From columns to messages: the one place where a batch becomes Python objects, one a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sparrow.model.message import Message
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


def _texts(column: Any) -> Sequence[str | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    found: list[str | None] = column.to_pylist()
    return found
