"""Messages published one at a time, gathered into batches.

While one batch of them is on its way to the log the next ones gather; when it has arrived, all that
gathered go as one batch a partition. So a lone message waits for nothing, and a thousand tasks that each
publish one message share a few batches. Topics with different durability do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sparrow.kernel.partition import partition_of
from sparrow.model.errors import JournalFrozen, SparrowError
from sparrow.model.limits import BATCH_BYTES_MAX
from sparrow.model.message import Receipt, StreamId
from sparrow.model.topic import Durability, Topic
from sparrow.store import batch as batches
from sparrow.store.admission import Row, rows_to_batch
from sparrow.store.ports import BatchDraft, Commit, Store

_ROW_BYTES = 64  # what a message without data costs, roughly; only used to cut batches


class _Gathered:
    """Messages of one stream that will be one batch."""

    __slots__ = ("bytes", "futures", "rows", "stream", "topic")

    def __init__(self, topic: Topic, stream: StreamId) -> None:
        self.topic = topic
        self.stream = stream
        self.rows: list[Row] = []
        self.futures: list[asyncio.Future[Receipt]] = []
        self.bytes = 0


class _Lane:
    """All streams of one durability."""

    def __init__(self, store: Store, arrived: Callable[[StreamId], None], durability: Durability) -> None:
        self._store = store
        self._arrived = arrived
        self._durability = durability
        self._open: dict[StreamId, _Gathered] = {}
        self._gathered: list[_Gathered] = []
        self._runner: asyncio.Task[None] | None = None
        self._turn = 0

    def add(self, topic: Topic, row: Row) -> asyncio.Future[Receipt]:
        key = row[1]
        if topic.partitions == 1:
            partition = 0
        else:
            partition = self._turn % topic.partitions if key is None else partition_of(key, topic.partitions)
        stream = StreamId(topic.id, partition)
        gathered = self._open.get(stream)
        if gathered is None or gathered.bytes > BATCH_BYTES_MAX:
            gathered = self._open[stream] = _Gathered(topic, stream)
            self._gathered.append(gathered)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        gathered.rows.append(row)
        gathered.futures.append(future)
        gathered.bytes += _ROW_BYTES + len(row[0] or b"")
        if self._runner is None:
            self._runner = loop.create_task(self._run())
        return future

    async def _run(self) -> None:
        try:
            while self._gathered:
                group, self._gathered, self._open = self._gathered, [], {}
                self._turn += 1
                if len(group) == 1:
                    await self._store_one(group[0])
                else:
                    await asyncio.gather(*(self._store_one(gathered) for gathered in group))
        finally:
            self._runner = None

    async def _store_one(self, gathered: _Gathered) -> None:
        try:
            topic, stream = gathered.topic, gathered.stream
            body = batches.encode(rows_to_batch(gathered.rows), topic.policy.codec)
            draft = BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns, body.codec)

            def on_commit(commit: Commit) -> None:
                _answer(gathered, commit)  # First: no delivery may overtake the receipt of its own publish.
                self._arrived(stream)

            # A receipt that waits for nothing comes with the answer; the others came with the commit.
            _answer(gathered, await self._store.append([draft], self._durability, on_commit))
        except SparrowError as error:
            _refuse(gathered.futures, error)
        except asyncio.CancelledError:
            _refuse(gathered.futures, JournalFrozen("the broker stopped before the message was stored"))
            raise
        except Exception as error:  # noqa: BLE001 - the waiting publishers must hear of a bug too
            _refuse(gathered.futures, SparrowError(f"publishing failed: {error!r}"))


def _answer(gathered: _Gathered, commit: Commit) -> None:
    topic, partition = gathered.topic.name, gathered.stream.partition
    base, time_us = commit.appended[0]
    prefix = f"{gathered.stream.topic_id}-{partition}-"
    for offset, future in enumerate(gathered.futures, base):
        if not future.done():
            future.set_result(Receipt(topic, partition, offset, f"{prefix}{offset}", time_us))


def _refuse(futures: list[asyncio.Future[Receipt]], error: SparrowError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


class Singles:
    """The gatherer, one lane for each durability."""

    def __init__(self, store: Store, arrived: Callable[[StreamId], None]) -> None:
        self._lanes = {durability: _Lane(store, arrived, durability) for durability in Durability}

    def add(self, topic: Topic, row: Row) -> asyncio.Future[Receipt]:
        """The receipt that the message will get."""
        return self._lanes[topic.policy.durability].add(topic, row)
