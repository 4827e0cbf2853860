"""Staging from a client: tables become batches as the journal stores them, divided by key here, and several
are on their way at once.

Every batch is a call with a number. One whose answer was lost is sent again under its number, and the broker
recognises it; so a part holds each batch once, in order, however often the connection breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sparrow.client import verbs
from sparrow.client.session import Session
from sparrow.kernel.partition import partitions_of
from sparrow.model.errors import NotFound, PreconditionFailed, StageIncomplete
from sparrow.model.stage import Stage
from sparrow.model.topic import Codec
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.wire import heads

_WINDOW = 4
"""Calls on their way at once: enough to keep the network and the broker busy."""


class Piece(NamedTuple):
    """A batch of one call; -1 leaves the partition to the broker."""

    batch: pa.RecordBatch
    partition: int = -1
    partitions: int = 0
    """How many the topic has; 0 when that does not matter."""


def divide(batch: pa.RecordBatch, partitions: int) -> list[Piece]:
    """A batch by the partitions that its keys belong to. Messages without a key go where the broker says."""
    if partitions < 2 or "key" not in batch.schema.names:
        return [Piece(batch)]
    rows: dict[int, list[int]] = {}
    for row, partition in enumerate(partitions_of(batch.column("key").to_pylist(), partitions, -1)):
        rows.setdefault(partition, []).append(row)
    if len(rows) == 1:
        return [Piece(batch, next(iter(rows)), partitions)]
    return [Piece(batch.take(pa.array(chosen)), number, partitions) for number, chosen in rows.items()]


def command(
    transaction: str, part: str, topic: str, piece: Piece, position: int | None, codec: Codec
) -> tuple[heads.Call, Any]:
    """The call that stages a piece, and its body."""
    body = batches.encode(piece.batch, codec)
    arguments: dict[str, Any] = {
        "transaction": transaction,
        "part": part,
        "topic": topic,
        "position": position,
        "partition": piece.partition,
        "partitions": piece.partitions,
        "record_count": body.record_count,
        "columns": body.columns,
        "codec": body.codec,
        "crc": body.crc,
    }
    return heads.Call("stage", arguments), body.buffer


class Stager:
    """Stages over a session; remembers how topics are divided."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._partitions: dict[str, int] = {}

    async def stage(
        self, transaction: str, part: str, topic: str, table: pa.Table | pa.RecordBatch, position: int | None
    ) -> Stage:
        """Adds a table to a part; see ``Broker.stage``."""
        chosen = batches.from_table(table)
        admission.check_batch(chosen)
        partitions = await self._count(topic) if "key" in chosen.schema.names else 0
        pieces = [piece for batch in batches.cut(chosen) for piece in divide(batch, partitions)]
        found: Stage | None = None
        try:
            for start in range(0, len(pieces), _WINDOW):
                at = None if position is None else position + start
                found = await self._send(transaction, part, topic, pieces[start : start + _WINDOW], at)
        except PreconditionFailed:
            self._partitions.pop(topic, None)
            raise
        assert found is not None, "a table that was checked has a batch"
        return found

    async def _send(
        self, transaction: str, part: str, topic: str, pieces: Sequence[Piece], position: int | None
    ) -> Stage:
        """Some pieces, all on their way at once if they have numbers; one that overtook others goes again."""
        if position is None:
            sent = [await self._call(transaction, part, topic, piece, None) for piece in pieces]
            return sent[-1]
        outcomes = await asyncio.gather(
            *(self._call(transaction, part, topic, piece, position + at) for at, piece in enumerate(pieces)),
            return_exceptions=True,
        )
        found: Stage | None = None
        for at, outcome in enumerate(outcomes):
            if isinstance(outcome, StageIncomplete) and at:
                found = await self._call(transaction, part, topic, pieces[at], position + at)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                found = outcome
        assert found is not None
        return found

    async def _call(
        self, transaction: str, part: str, topic: str, piece: Piece, position: int | None
    ) -> Stage:
        sent, body = command(transaction, part, topic, piece, position, self._session.options.codec)
        head, _ = await self._session.request(sent, body, is_safe=position is not None)
        found: Stage = verbs.parse("stage", head.value, Stage)
        return found

    async def _count(self, topic: str) -> int:
        found = self._partitions.get(topic)
        if found is None:
            try:
                found = int((await self._session.call("topic", is_safe=True, name=topic))["partitions"])
            except NotFound:
                return 0  # The broker may make the topic when the first message comes.
            self._partitions[topic] = found
        return found
