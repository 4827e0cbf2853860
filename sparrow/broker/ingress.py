"""The way in: a publish form becomes drafts, repeats are recognised, and the log answers with receipts.

A batch stays a batch. It is cut by partition only when its topic has several and its messages have keys,
and looked at message by message only for idempotency keys. A batch that is cut is still stored whole or
not at all: its pieces are one atomic chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sparrow.broker.clock import Clock
from sparrow.broker.flow import Flow, Gate
from sparrow.broker.repeats import Repeats
from sparrow.broker.singles import Singles
from sparrow.broker.steward import Steward
from sparrow.broker.topics import Topics
from sparrow.kernel import dedupe
from sparrow.kernel.dedupe import KeyWindow, Request, Stored
from sparrow.kernel.partition import partitions_of
from sparrow.model.errors import InvalidArgument, SparrowError
from sparrow.model.flow import ANYONE, Sender
from sparrow.model.message import Receipt, Receipts, Run, StreamId
from sparrow.model.topic import Topic
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.store.batch import Body
from sparrow.store.ports import BatchDraft, Commit, Store

_TABLE_WINDOW = 8  # batches of a table on their way at once: enough to keep the disk busy


class ProducerId(NamedTuple):
    """A producer in one of its lives."""

    id: int
    epoch: int


class _Piece(NamedTuple):
    """The part of a batch that goes to one partition; ``rows`` are places in the batch, None for all."""

    partition: int
    batch: pa.RecordBatch
    rows: Sequence[int] | None
    body: Body | None = None
    """Its bytes, when a client sent them as the journal stores them."""


class Encoded(NamedTuple):
    """A batch as a client sent it: the bytes to store, and where to; -1 is for the broker to choose."""

    body: Body
    partition: int


class Ingress:
    """See the module's text."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        repeats: Repeats,
        clock: Clock,
        arrived: Callable[[StreamId], None],
        flow: Flow,
        steward: Steward,
    ) -> None:
        self._store = store
        self._topics = topics
        self._repeats = repeats
        self._steward = steward
        self._clock = clock
        self._arrived = arrived
        self._flow = flow
        self._singles = Singles(store, arrived)
        self._turn = 0

    async def publish(self, topic_name: object, row: admission.Row, sender: Sender = ANYONE) -> Receipt:
        """One message."""
        if self._steward.is_refusing:
            self._steward.check(sender)
        topic = await self._topics.resolve(topic_name)
        if row[7] is not None:
            return (await self.publish_batch(topic, admission.rows_to_batch([row]), sender=sender))[0]
        gate = self._flow.gate(topic, sender)
        if gate is None:
            return await self._singles.add(topic, row)
        if not await gate.admit_one(len(row[0] or b""), row[4], sender):
            return Receipt.dropped(topic.name)
        with gate.storing(1):
            return await self._singles.add(gate.topic, row)

    async def publish_batch(
        self,
        topic: Topic,
        batch: pa.RecordBatch,
        producer: ProducerId | None = None,
        base_sequence: int | None = None,
        sender: Sender = ANYONE,
        *,
        is_admitted: bool = False,
        encoded: Encoded | None = None,
    ) -> Receipts:
        """One batch in publish form, checked already. A producer without a sequence takes the next one."""
        if self._steward.is_refusing:
            self._steward.check(sender)
        has_keys = "idempotency_key" in batch.schema.names
        gate = None if is_admitted else self._flow.gate(topic, sender)
        if producer is not None:
            if has_keys:
                raise InvalidArgument("a producer's sequence and idempotency keys exclude each other")
            return await self._publish_sequence(topic, batch, producer, base_sequence, gate, sender, encoded)
        if has_keys:
            return await self._publish_keyed(topic, batch, gate, sender)
        if gate is None:
            return await self._publish_plain(topic, batch, encoded)
        kept = await gate.admit(batch, sender)
        chosen = batch if kept is None else batch.filter(kept)
        with gate.storing(chosen.num_rows):
            if kept is None:
                return await self._publish_plain(gate.topic, batch, encoded)
            found = Receipts(topic.name, topic.id, [], [])
            if chosen.num_rows:
                found = await self._publish_plain(gate.topic, chosen)
            return found.spread_over(kept.to_pylist() if isinstance(kept, pa.Array) else kept)

    async def _publish_plain(
        self, topic: Topic, batch: pa.RecordBatch, encoded: Encoded | None = None
    ) -> Receipts:
        pieces = self._split(topic, batch, encoded)
        commit = await self._append(topic, [self._draft(topic, piece) for piece in pieces])
        return _receipts(topic, pieces, commit, batch.num_rows)

    async def publish_table(self, topic: Topic, table: pa.Table, sender: Sender = ANYONE) -> Receipts:
        """A table of any size, as many batches, some of them on their way together, in order."""
        pieces, parts = batches.cut(table), []
        for start in range(0, len(pieces), _TABLE_WINDOW):
            window = pieces[start : start + _TABLE_WINDOW]
            some = [self.publish_batch(topic, piece, sender=sender) for piece in window]
            parts += await asyncio.gather(*some)
        return Receipts.join(parts)

    def drafts(self, topic: Topic, batch: pa.RecordBatch, encoded: Encoded | None = None) -> list[BatchDraft]:
        """What a checked batch is in the log, divided by partition."""
        return [self._draft(topic, piece) for piece in self._split(topic, batch, encoded)]

    async def admit_ahead(self, topic: Topic, batch: pa.RecordBatch, sender: Sender) -> None:
        """Passes flow control now for a batch that is published later, with ``is_admitted``."""
        gate = self._flow.gate(topic, sender)
        if gate is not None:
            await gate.admit_whole(batch, sender)

    # A producer's sequence.

    async def _publish_sequence(
        self,
        topic: Topic,
        batch: pa.RecordBatch,
        producer: ProducerId,
        base_sequence: int | None,
        gate: Gate | None,
        sender: Sender,
        encoded: Encoded | None,
    ) -> Receipts:
        repeats, count = self._repeats, batch.num_rows
        repeats.check_epoch(*producer)
        ledger = repeats.ledger(producer.id, topic.id)
        if gate is not None and not ledger.is_behind(base_sequence):
            # Before the sequence is taken, and from there without a pause: so they stay dense.
            await gate.admit_whole(batch, sender)
            topic = gate.topic
            repeats.check_epoch(*producer)
        if base_sequence is None:
            base_sequence = ledger.expected or 0
        mark = (producer.id, topic.id, base_sequence)
        if ledger.is_on_its_way(base_sequence) and mark in repeats.requests_on_their_way:
            await asyncio.shield(repeats.requests_on_their_way[mark])
        known = ledger.find(producer.epoch, base_sequence, count)
        if known is not None:
            return _repeated(topic, known)
        pieces = self._split(topic, batch, encoded)
        drafts = [self._sequenced(topic, piece, producer, base_sequence, len(pieces) > 1) for piece in pieces]
        ledger.reserve(base_sequence, count)
        repeats.requests_on_their_way[mark] = asyncio.get_running_loop().create_future()

        def remember(commit: Commit) -> None:
            stored = _request(pieces, commit, base_sequence)
            repeats.apply_request(commit.lsn, *producer, topic.id, stored)
            repeats.settle_request(mark, stored)

        def forget(error: SparrowError) -> None:
            ledger.abandon()
            repeats.settle_request(mark, error)

        commit = await self._append_to_the_end(topic, drafts, remember, forget)
        return _receipts(topic, pieces, commit, count)

    def _sequenced(
        self, topic: Topic, piece: _Piece, producer: ProducerId, base_sequence: int, is_cut: bool
    ) -> BatchDraft:
        first = base_sequence
        if is_cut:
            assert piece.rows is not None
            sequences = pa.array([base_sequence + row for row in piece.rows], pa.int64())
            piece = piece._replace(batch=_with_sequence(piece.batch, sequences))
            first = base_sequence + piece.rows[0] if piece.rows else base_sequence
        draft = self._draft(topic, piece)
        return draft._replace(
            producer_id=producer.id,
            producer_epoch=producer.epoch,
            base_sequence=first,
            has_sequences=is_cut,
        )

    # Idempotency keys.

    async def _publish_keyed(
        self, topic: Topic, batch: pa.RecordBatch, gate: Gate | None, sender: Sender
    ) -> Receipts:
        repeats = self._repeats
        window = await repeats.window(topic, self._clock.now_us())
        keys = batch.column("idempotency_key").to_pylist()
        if gate is not None:
            now_us = self._clock.now_us()
            fresh_count = sum(_known(window, key, now_us) is None for key in keys)
            if fresh_count:
                await gate.admit_whole(batch, sender, fresh_count)
                topic = gate.topic
        while True:
            now_us = self._clock.now_us()
            known = {row: found for row, key in enumerate(keys) if (found := _known(window, key, now_us))}
            waiting = [
                repeats.keys_on_their_way[topic.id, key]
                for row, key in enumerate(keys)
                if row not in known and (topic.id, key) in repeats.keys_on_their_way
            ]
            if not waiting:
                break
            # Others are storing some of these keys: when they are done, or have failed, look again.
            await asyncio.wait(waiting)
        first = {
            key: row for row, key in reversed(list(enumerate(keys))) if key is not None and row not in known
        }
        fresh = [row for row, key in enumerate(keys) if row not in known and first.get(key, row) == row]
        window.admit(len(first), now_us)
        stored = await self._store_keyed(topic, batch, fresh, first) if fresh else {}
        known.update(
            {row: stored[first[keys[row]]] for row in range(len(keys)) if row not in {*known, *stored}}
        )
        return _keyed_receipts(topic, len(keys), stored, known)

    async def _store_keyed(
        self, topic: Topic, batch: pa.RecordBatch, fresh: list[int], mine: dict[str, int]
    ) -> dict[int, Stored]:
        repeats, loop = self._repeats, asyncio.get_running_loop()
        chosen = batch if len(fresh) == batch.num_rows else batch.take(pa.array(fresh))
        pieces = self._split(topic, chosen)
        for key in mine:
            repeats.keys_on_their_way[topic.id, key] = loop.create_future()
        stored: dict[int, Stored] = {}

        def remember(commit: Commit) -> None:
            stored.update({fresh[row]: place for row, place in _places(pieces, commit)})
            for key, row in mine.items():
                repeats.apply_key(topic.id, key, stored[row])
                repeats.settle_key(topic.id, key, stored[row])

        def forget(error: SparrowError) -> None:
            for key in mine:
                repeats.settle_key(topic.id, key, error)

        drafts = [self._draft(topic, piece) for piece in pieces]
        await self._append_to_the_end(topic, drafts, remember, forget)
        return stored

    # Common to all.

    async def _append(
        self, topic: Topic, drafts: list[BatchDraft], remember: Callable[[Commit], None] | None = None
    ) -> Commit:
        def on_commit(commit: Commit) -> None:
            if remember is not None:
                remember(commit)
            for draft in drafts:
                self._arrived(draft.stream)

        return await self._store.append(drafts, topic.policy.durability, on_commit)

    async def _append_to_the_end(
        self,
        topic: Topic,
        drafts: list[BatchDraft],
        remember: Callable[[Commit], None],
        forget: Callable[[SparrowError], None],
    ) -> Commit:
        """As ``_append``, and a refusal is noted even when the publisher has stopped waiting."""

        async def append() -> Commit:
            try:
                return await self._append(topic, drafts, remember)
            except SparrowError as error:
                forget(error)
                raise

        task = asyncio.get_running_loop().create_task(append())
        task.add_done_callback(_hear)
        return await asyncio.shield(task)

    def _draft(self, topic: Topic, piece: _Piece) -> BatchDraft:
        body = piece.body or batches.encode(piece.batch, topic.policy.codec)
        stream = StreamId(topic.id, piece.partition)
        return BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns, body.codec)

    def _split(self, topic: Topic, batch: pa.RecordBatch, encoded: Encoded | None = None) -> list[_Piece]:
        body = None if encoded is None else encoded.body
        if encoded is not None and encoded.partition >= 0:
            return [_Piece(encoded.partition, batch, None, body)]
        if topic.partitions == 1:
            return [_Piece(0, batch, None, body)]
        self._turn += 1
        without_key = self._turn % topic.partitions
        if "key" not in batch.schema.names:
            return [_Piece(without_key, batch, None, body)]
        rows: dict[int, list[int]] = {}
        keys = batch.column("key").to_pylist()
        for row, partition in enumerate(partitions_of(keys, topic.partitions, without_key)):
            rows.setdefault(partition, []).append(row)
        if len(rows) == 1:
            return [_Piece(next(iter(rows)), batch, None)]
        return [_Piece(partition, batch.take(pa.array(chosen)), chosen) for partition, chosen in rows.items()]


def _known(window: KeyWindow, key: str | None, now_us: int) -> Stored | None:
    return None if key is None else window.find(key, now_us)


def _hear(task: asyncio.Task[Commit]) -> None:
    """A refusal that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()


def _with_sequence(batch: pa.RecordBatch, sequences: pa.Array) -> pa.RecordBatch:
    columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["sequence"] = sequences
    fields = [field for field in batches.PUBLISH_FIELDS if field.name in columns]
    return pa.RecordBatch.from_arrays([columns[field.name] for field in fields], schema=pa.schema(fields))


def _runs(pieces: Sequence[_Piece], commit: Commit) -> list[Run]:
    return [
        Run(piece.partition, appended.base_offset, piece.batch.num_rows, appended.publish_time_us)
        for piece, appended in zip(pieces, commit.appended, strict=True)
    ]


def _receipts(topic: Topic, pieces: Sequence[_Piece], commit: Commit, count: int) -> Receipts:
    runs = _runs(pieces, commit)
    if len(pieces) == 1:
        return Receipts(topic.name, topic.id, runs)
    rows: list[tuple[int, int]] = [(0, 0)] * count
    for number, piece in enumerate(pieces):
        for within, row in enumerate(piece.rows or ()):
            rows[row] = (number, within)
    return Receipts(topic.name, topic.id, runs, rows)


def _places(pieces: Sequence[_Piece], commit: Commit) -> list[tuple[int, Stored]]:
    found = []
    for piece, run in zip(pieces, _runs(pieces, commit), strict=True):
        rows = range(run.length) if piece.rows is None else piece.rows
        for within, row in enumerate(rows):
            found.append((row, Stored(run.partition, run.base_offset + within, run.publish_time_us)))
    return found


def _request(pieces: Sequence[_Piece], commit: Commit, base_sequence: int) -> Request:
    parts = []
    for piece, run in zip(pieces, _runs(pieces, commit), strict=True):
        sequences: Sequence[int] = range(base_sequence, base_sequence + run.length)
        if piece.rows is not None:
            sequences = [base_sequence + row for row in piece.rows]
        parts.append(dedupe.part(run.partition, run.base_offset, run.publish_time_us, sequences))
    return dedupe.request(parts)


def _repeated(topic: Topic, stored: Request) -> Receipts:
    places = stored.stored()
    return _keyed_receipts(topic, len(places), {}, dict(enumerate(places)))


def _keyed_receipts(
    topic: Topic, count: int, stored: dict[int, Stored], known: dict[int, Stored]
) -> Receipts:
    runs = [Run(place.partition, place.offset, 1, place.publish_time_us) for place in stored.values()]
    numbers = {row: number for number, row in enumerate(stored)}
    rows = [(numbers.get(row, 0), 0) for row in range(count)]
    duplicates = {
        row: Run(place.partition, place.offset, 1, place.publish_time_us, True)
        for row, place in known.items()
    }
    return Receipts(topic.name, topic.id, runs, rows, duplicates)
