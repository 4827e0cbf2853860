"""Reading a partition's log from a broker elsewhere, by the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sparrow.client.session import Session
from sparrow.model.errors import InvalidArgument
from sparrow.model.message import Message, StreamId
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.handover import messages
from sparrow.store.ports import LogBatch
from sparrow.wire import heads

FETCH_BYTES = 4 * 1024 * 1024
_PARTITION = pa.field("partition", pa.int32(), nullable=False)
WITH_PARTITION = pa.schema([_PARTITION, *TABLE_SCHEMA])


async def fetch(
    session: Session,
    topic: str,
    partition: int,
    offset: int,
    max_bytes: int = FETCH_BYTES,
    wait_s: float = 0.0,
    columns: Sequence[str] = (),
) -> tuple[heads.Fetched, list[LogBatch]]:
    """Batches of the table form from an offset on; with ``columns``, only those and the offset."""
    for name, value in (("partition", partition), ("offset", offset), ("max_bytes", max_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
            raise InvalidArgument(f"{name} is a whole number, not {value!r}")
    timeout_s = session.options.timeout_s + wait_s
    head, body = await session.request(
        heads.Fetch(topic, partition, offset, max_bytes, wait_s, list(columns)), timeout_s=timeout_s
    )
    schema = pa.schema([field for field in TABLE_SCHEMA if field.name in columns or field.name == "offset"])
    schema = schema if columns else TABLE_SCHEMA
    found, place = [], 0
    stream = StreamId(head.topic_id, partition)
    for first, end, length in head.batches:
        rows = pa.ipc.open_stream(pa.py_buffer(body[place : place + length])).read_next_batch()
        place += length
        found.append(LogBatch(stream, first, end, _to_table_form(rows, schema)))
    return head, found


def _to_table_form(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """With every column of the schema; those that hold nothing were not sent."""
    names = rows.schema.names
    columns = [
        rows.column(field.name) if field.name in names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


async def read(session: Session, topic: str, partition: int, offset: int, max_messages: int) -> list[Message]:
    """Messages from an offset on, across as many fetches as it takes."""
    if not isinstance(max_messages, int) or max_messages < 1:
        raise InvalidArgument(f"max_messages must be at least 1, not {max_messages!r}")
    found: list[Message] = []
    while len(found) < max_messages:
        _, some = await fetch(session, topic, partition, offset)
        for batch in some:
            found += messages(batch, topic, max_messages - len(found))
        if not some:
            break
        offset = some[-1].end_offset
    return found[:max_messages]


async def fetch_table(
    session: Session, topic: str, partitions: list[int], start_offset: int, end_offset: int | None
) -> pa.Table:
    """The log of some partitions as one table, its first column the partition."""
    found: list[Any] = []
    for partition in partitions:
        head, some = await fetch(session, topic, partition, start_offset)
        end = head.end_offset if end_offset is None else min(end_offset, head.end_offset)
        while some and some[0].first_offset < end:
            found += [_numbered(batch.batch, partition, end) for batch in some if batch.first_offset < end]
            if some[-1].end_offset >= end:
                break
            _, some = await fetch(session, topic, partition, some[-1].end_offset)
    return pa.Table.from_batches(found, WITH_PARTITION)


def _numbered(rows: pa.RecordBatch, partition: int, end: int) -> pa.RecordBatch:
    offsets = rows.column("offset")
    over = (
        sum(offset >= end for offset in offsets.to_pylist())
        if offsets[len(offsets) - 1].as_py() >= end
        else 0
    )
    kept = rows.slice(0, rows.num_rows - over)
    numbers = pa.repeat(pa.scalar(partition, pa.int32()), kept.num_rows)
    return pa.RecordBatch.from_arrays([numbers, *kept.columns], schema=WITH_PARTITION)
