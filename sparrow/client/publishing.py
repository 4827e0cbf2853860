"""Publishing from a client: single messages are gathered into batches, batches go out in order.

A message waits for company only while others of its topic are on their way: the first of a quiet topic goes
out at once, and under load a batch is what came in during ``linger_s`` or one trip, or as much as
``batch_messages`` and ``batch_bytes`` allow.

Everything is published under a producer's name, so that what is sent again after a broken connection is
recognised (lane.py). Messages with an idempotency key are recognised by that and have no number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sparrow.client import receipts
from sparrow.client.lane import Batch, Lane
from sparrow.client.session import Session, look_at
from sparrow.kernel.partition import partition_of
from sparrow.model.errors import InvalidArgument, NotFound, SparrowError
from sparrow.model.message import Receipt, Receipts
from sparrow.model.names import parse_topic
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.wire.heads import WireReceipts

_KEY, _IDEMPOTENCY_KEY = 1, 7
"""Places in a row."""
_ROW_BYTES = 64
"""What a message costs beside its data, about."""
_SPLIT_MIN = 16
"""Messages a partition from which on a batch is divided here and not by the broker."""


class Publisher:
    """Publishes under one producer's name."""

    def __init__(self, session: Session, name: str, *, is_fresh: bool) -> None:
        self.session = session
        self.name = name
        self.identity = (0, 0)
        self.in_flight_bytes = 0
        self.pending_bytes = 0
        self._is_fresh = is_fresh
        """Nobody has used the name before: every topic begins at 0."""
        self._gatherings: dict[str, Gathering] = {}
        self._blocked: dict[Lane, None] = {}
        self._room: asyncio.Future[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        session.guests.add(self)

    # Guest of the session.

    def connected(self) -> None:
        for gathering in list(self._gatherings.values()):
            gathering.connected()

    def given_up(self, error: SparrowError) -> None:
        """How far the numbers got is not known: the name is opened anew, and older batches are shut out."""
        gatherings, self._gatherings = self._gatherings, {}
        self._blocked.clear()
        self._opening, self._is_fresh = None, False
        for gathering in gatherings.values():
            gathering.give_up(error)

    async def settle(self) -> None:
        await self.flush()

    # Owner of lanes.

    def blocked(self, lane: Lane) -> None:
        self._blocked[lane] = None

    def relieved(self, lane: Lane) -> None:
        blocked, self._blocked = self._blocked, {}
        for each in blocked:
            each.pump()

    async def open(self) -> None:
        """Has an identity; opens one when there is none."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(look_at)
        opening = self._opening
        try:
            await asyncio.shield(opening)
        except SparrowError:
            if self._opening is opening:
                self._opening = None
            raise

    async def _open(self) -> None:
        options = self.session.options
        found = await self.session.call(
            "producer", is_safe=True, name=self.name, priority_class=options.priority_class
        )
        self.identity = (int(found[0]), int(found[1]))

    async def lane(self, topic: str) -> Lane:
        """A lane that begins where the broker stands."""
        await self.open()
        if self._is_fresh:
            return Lane(topic, self, 0, is_proven=False)
        start = await self.next_sequence(topic)
        return Lane(topic, self, start, is_proven=start > 0)

    async def next_sequence(self, topic: str) -> int:
        await self.open()
        found = await self.session.call(
            "next_sequence", is_safe=True, producer_id=self.identity[0], topic=topic
        )
        return int(found)

    # Publishing.

    async def publish(self, topic: str, row: admission.Row, sequence: int | None = None) -> Receipt:
        """One message."""
        if sequence is not None:
            return (await self.publish_batch(topic, admission.rows_to_batch([row]), sequence))[0]
        if self.pending_bytes > self.session.options.pending_bytes_max:
            await self._wait_for_room()
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._gathering(topic).add(row, future)
        return await future

    async def publish_batch(self, topic: str, batch: pa.RecordBatch, sequence: int | None = None) -> Receipts:
        """A checked batch in publish form, stored whole or not at all."""
        if self.pending_bytes > self.session.options.pending_bytes_max:
            await self._wait_for_room()
        names = batch.schema.names
        keys = batch.column("idempotency_key") if "idempotency_key" in names else None
        body = batches.encode(batch, self.session.options.codec)
        future: asyncio.Future[Receipts] = asyncio.get_running_loop().create_future()

        def done(outcome: WireReceipts | SparrowError) -> None:
            self.returned(len(body.buffer))
            if future.done():
                return
            if isinstance(outcome, SparrowError):
                future.set_exception(outcome)
            else:
                future.set_result(receipts.to_receipts(outcome))

        self.taken(len(body.buffer))
        sent = Batch(
            body,
            done,
            is_sequenced=keys is None,
            is_repeatable=keys is None or not keys.null_count,
            sequence=sequence,
        )
        self._gathering(topic).send(sent)
        return await future

    async def publish_table(self, topic: str, table: pa.Table) -> Receipts:
        """A checked table of any size, as several batches in order."""
        pieces = batches.cut(table)
        tasks = [asyncio.ensure_future(self.publish_batch(topic, piece)) for piece in pieces]
        try:
            return Receipts.join(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def flush(self) -> None:
        """Returns when everything that was given has an answer."""
        while self.pending_bytes:
            for gathering in list(self._gatherings.values()):
                gathering.flush()
            await self._wait_for_room(is_whole=True)

    def forget_partitions(self, topic: str) -> None:
        """The number of a topic's partitions has changed."""
        found = self._gatherings.get(topic)
        if found is not None:
            found.forget_count()

    def _gathering(self, topic: str) -> Gathering:
        found = self._gatherings.get(topic)
        if found is None:
            found = self._gatherings[parse_topic(topic)] = Gathering(topic, self)
        return found

    # What waits.

    def taken(self, size: int) -> None:
        self.pending_bytes += size

    def returned(self, size: int) -> None:
        self.pending_bytes -= size
        room = self._room
        if room is not None and self.pending_bytes <= self.session.options.pending_bytes_max // 2:
            self._room = None
            room.set_result(None)

    async def _wait_for_room(self, *, is_whole: bool = False) -> None:
        while self.pending_bytes > (0 if is_whole else self.session.options.pending_bytes_max):
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            if is_whole:
                await asyncio.wait([self._room], timeout=0.01)
            else:
                await asyncio.shield(self._room)


class Gathering:
    """The messages of one topic that wait for company, and the lane they leave by."""

    def __init__(self, topic: str, publisher: Publisher) -> None:
        self.topic = topic
        self._publisher = publisher
        self._options = publisher.session.options
        self._loop = asyncio.get_running_loop()
        self._rows: list[admission.Row] = []
        self._futures: list[asyncio.Future[Receipt]] = []
        self._size = 0
        self._timer: Any = None
        self._partitions: int | None = None
        """How many the topic has; None when that is not known, 0 when it cannot be."""
        self._lane: Lane | None = None
        self._early: list[Batch] = []
        """Given before there was a lane."""
        self._preparing: asyncio.Task[None] | None = None

    @property
    def _is_quiet(self) -> bool:
        return self._lane is not None and self._lane.is_idle

    def add(self, row: admission.Row, future: asyncio.Future[Receipt]) -> None:
        size = len(row[0] or b"") + _ROW_BYTES
        if self._rows and self._size + size > self._options.batch_bytes:
            self.flush()
        self._rows.append(row)
        self._futures.append(future)
        self._size += size
        self._publisher.taken(size)
        if self._size >= self._options.batch_bytes or len(self._rows) >= self._options.batch_messages:
            self.flush()
        elif self._timer is None:
            # At the end of this turn of the loop, with all who publish in it, or after a while.
            if self._is_quiet or self._lane is None:
                self._timer = self._loop.call_soon(self.flush)
            else:
                self._timer = self._loop.call_later(self._options.linger_s, self.flush)

    def send(self, batch: Batch) -> None:
        """A batch of its own; singles that came before go before."""
        self.flush()
        if self._lane is not None:
            self._lane.add(batch)
        else:
            self._early.append(batch)
            self._prepare()

    def flush(self) -> None:
        """Makes batches of what has gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._rows:
            return
        needs_count = self._partitions is None and any(row[_KEY] is not None for row in self._rows)
        if self._lane is None or needs_count:
            self._prepare()
            return
        rows, futures, size = self._rows, self._futures, self._size
        self._rows, self._futures, self._size = [], [], 0
        groups = self._groups(rows)
        # The size is given back when the last group is answered, in equal parts for simplicity.
        shares = [size // len(groups)] * len(groups)
        shares[0] += size - sum(shares)
        for (key, places), share in zip(groups.items(), shares, strict=True):
            chosen = [rows[place] for place in places] if len(groups) > 1 else rows
            heard = [futures[place] for place in places] if len(groups) > 1 else futures
            self._ship(chosen, heard, share, *key)

    def _groups(self, rows: list[admission.Row]) -> dict[tuple[int, bool], Sequence[int]]:
        """Places of messages by partition, and by whether they have an idempotency key."""
        partitions = self._partitions or 0
        is_split = partitions > 1 and len(rows) >= _SPLIT_MIN * partitions
        if not is_split and not any(row[_IDEMPOTENCY_KEY] is not None for row in rows):
            return {(-1, False): range(len(rows))}
        groups: dict[tuple[int, bool], list[int]] = {}
        for place, row in enumerate(rows):
            key = row[_KEY]
            partition = partition_of(key, partitions) if is_split and key is not None else -1
            groups.setdefault((partition, row[_IDEMPOTENCY_KEY] is not None), []).append(place)
        return dict(groups)

    def _ship(
        self,
        rows: list[admission.Row],
        futures: list[asyncio.Future[Receipt]],
        size: int,
        partition: int,
        has_keys: bool,
    ) -> None:
        def done(outcome: WireReceipts | SparrowError) -> None:
            self._publisher.returned(size)
            _tell(futures, outcome)
            if self._is_quiet:
                self.flush()

        try:
            body = batches.encode(admission.rows_to_batch(rows), self._options.codec)
        except InvalidArgument as error:
            done(error)
            return
        partitions = self._partitions or 0
        assert self._lane is not None
        self._lane.add(
            Batch(
                body,
                done,
                partition=partition,
                partitions=partitions if partition >= 0 else 0,
                is_sequenced=not has_keys,
            )
        )

    # The lane, and what must be known of the topic.

    def connected(self) -> None:
        if self._lane is not None:
            self._lane.connected()

    def give_up(self, error: SparrowError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._preparing is not None:
            self._preparing.cancel()
        if self._lane is not None:
            self._lane.give_up(error)
        early, self._early = self._early, []
        for batch in early:
            batch.on_done(error)
        futures, size = self._futures, self._size
        self._rows, self._futures, self._size = [], [], 0
        self._publisher.returned(size)
        _tell(futures, error)

    def _prepare(self) -> None:
        if self._preparing is None:
            self._preparing = self._loop.create_task(self._prepared())

    async def _prepared(self) -> None:
        try:
            if any(row[_KEY] is not None for row in self._rows):
                self._partitions = await self._count()
            if self._lane is None:
                self._lane = await self._publisher.lane(self.topic)
        except SparrowError as error:
            self._preparing = None
            self.give_up(error)
            return
        self._preparing = None
        early, self._early = self._early, []
        self.flush()
        for batch in early:
            self._lane.add(batch)

    async def _count(self) -> int:
        try:
            topic = await self._publisher.session.call("topic", is_safe=True, name=self.topic)
        except NotFound:
            return 0  # The broker may make the topic when the first message comes.
        return int(topic["partitions"])

    def forget_count(self) -> None:
        """The topic has another number of partitions by now."""
        self._partitions = None


def _tell(futures: list[asyncio.Future[Receipt]], outcome: WireReceipts | SparrowError) -> None:
    if isinstance(outcome, SparrowError):
        for future in futures:
            if not future.done():
                future.set_exception(outcome)
        return
    for future, receipt in zip(futures, receipts.each(outcome), strict=True):
        if not future.done():
            future.set_result(receipt)
