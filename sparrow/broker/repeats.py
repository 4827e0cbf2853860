"""Keeps the memories that make publishing idempotent: producers' ledgers and topics' key windows.

The rules are in kernel/dedupe.py. Ledgers are rebuilt at the start from checkpoints and the unsealed log.
A topic's key window is filled when the first key arrives after a start, from what the log itself holds, so
topics that use no keys cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from sparrow.kernel import dedupe
from sparrow.kernel.dedupe import KeyWindow, ProducerLedger, Request, Stored
from sparrow.model.errors import ProducerFenced, SparrowError
from sparrow.model.message import StreamId
from sparrow.model.settings import DedupeSettings
from sparrow.model.topic import Topic
from sparrow.store.catalog_tables import ProducerState
from sparrow.store.ports import LogBatch, ProducerBatch, Recovered, Store


class Repeats:
    """The shell around kernel/dedupe."""

    def __init__(self, store: Store, settings: DedupeSettings) -> None:
        self._store = store
        self._settings = settings
        self._ledgers: dict[tuple[int, int], ProducerLedger] = {}
        self._as_of: dict[tuple[int, int], int] = {}
        self._changed: set[tuple[int, int]] = set()
        self._epochs: dict[int, int] = {}
        self._windows: dict[int, KeyWindow] = {}
        self._loading: dict[int, asyncio.Lock] = {}
        self.requests_on_their_way: dict[tuple[int, int, int], asyncio.Future[Request]] = {}
        self.keys_on_their_way: dict[tuple[int, str], asyncio.Future[Stored]] = {}

    # Producers.

    def recover(self, recovered: Recovered) -> None:
        """Rebuilds the ledgers."""
        for saved in recovered.producer_checkpoints:
            key = (saved.producer_id, saved.topic_id)
            limit = self._settings.producer_requests_max
            self._ledgers[key] = ProducerLedger.from_bytes(saved.state, limit)
            self._as_of[key] = saved.as_of
        topics = {topic.id for topic in self._store.topics()}
        for lsn, found in recovered.producers:
            is_new = lsn > self._as_of.get((found.producer_id, found.topic_id), -1)
            if is_new and found.topic_id in topics:
                self._apply(lsn, found)
        self._epochs.update(recovered.producer_epochs)

    def open_epoch(self, producer_id: int, epoch: int) -> None:
        self._epochs[producer_id] = epoch

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """Refuses a producer that another of its name has replaced."""
        current = self._epochs.get(producer_id, epoch)
        if epoch < current:
            raise ProducerFenced(f"epoch {epoch} of this producer has ended; {current} is in force")

    def ledger(self, producer_id: int, topic_id: int) -> ProducerLedger:
        key = (producer_id, topic_id)
        found = self._ledgers.get(key)
        if found is None:
            found = self._ledgers[key] = ProducerLedger(self._settings.producer_requests_max)
        return found

    def apply_request(self, lsn: int, producer_id: int, epoch: int, topic_id: int, stored: Request) -> None:
        """A producer's request is in the log."""
        self.ledger(producer_id, topic_id).apply(epoch, stored)
        self._as_of[producer_id, topic_id] = lsn
        self._changed.add((producer_id, topic_id))

    def _apply(self, lsn: int, found: ProducerBatch) -> None:
        parts = [dedupe.part(p.partition, p.base_offset, p.publish_time_us, p.sequences) for p in found.parts]
        stored = dedupe.request(parts)
        self.apply_request(lsn, found.producer_id, found.producer_epoch, found.topic_id, stored)

    def checkpoints(self) -> list[ProducerState]:
        """The ledgers that changed since the last call."""
        changed, self._changed = self._changed, set()
        return [
            ProducerState(*key, self._as_of[key], self._ledgers[key].to_bytes())
            for key in changed
            if key in self._ledgers
        ]

    def keep_changed(self, states: Iterable[ProducerState]) -> None:
        """A checkpoint could not be stored; it is due again."""
        self._changed.update((state.producer_id, state.topic_id) for state in states)

    def forget_topic(self, topic_id: int) -> None:
        for key in [key for key in self._ledgers if key[1] == topic_id]:
            del self._ledgers[key]
            self._as_of.pop(key, None)
            self._changed.discard(key)
        self._windows.pop(topic_id, None)

    # Idempotency keys.

    async def window(self, topic: Topic, now_us: int) -> KeyWindow:
        """The topic's window, filled from the log when it is asked for the first time."""
        window_us = int(topic.policy.dedupe_window_s * 1_000_000)
        found = self._windows.get(topic.id)
        if found is None:
            async with self._loading.setdefault(topic.id, asyncio.Lock()):
                found = self._windows.get(topic.id)
                if found is None:
                    found = await self._load(topic, window_us, now_us)
                    self._windows[topic.id] = found
            self._loading.pop(topic.id, None)
        found.resize(window_us)
        return found

    def apply_key(self, topic_id: int, key: str, stored: Stored) -> None:
        """A message with this key is in the log; a window that was never asked for will read it there."""
        window = self._windows.get(topic_id)
        if window is not None:
            window.apply(key, stored)

    async def _load(self, topic: Topic, window_us: int, now_us: int) -> KeyWindow:
        window = KeyWindow(window_us, self._settings.keys_max)
        batches = await self._store.idempotency_keys(topic, now_us - window_us)
        rows = sorted(row for batch in batches for row in _keys(batch))
        for publish_time_us, partition, offset, key in rows:
            window.apply(key, Stored(partition, offset, publish_time_us))
        window.expire(now_us)
        return window

    def settle_key(self, topic_id: int, key: str, outcome: Stored | SparrowError) -> None:
        """Tells those who sent the same key meanwhile."""
        future = self.keys_on_their_way.pop((topic_id, key), None)
        if future is not None and not future.done():
            _settle(future, outcome)

    def settle_request(self, key: tuple[int, int, int], outcome: Request | SparrowError) -> None:
        """Tells those who sent the same request meanwhile."""
        future = self.requests_on_their_way.pop(key, None)
        if future is not None and not future.done():
            _settle(future, outcome)


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
        future.exception()  # Often nobody waits; that is no reason to complain.
    else:
        future.set_result(outcome)


def _keys(batch: LogBatch) -> Iterable[tuple[int, int, int, str]]:
    stream: StreamId = batch.stream
    columns = batch.batch
    times = columns.column("publish_time").cast("int64").to_pylist()
    offsets = columns.column("offset").to_pylist()
    keys = columns.column("idempotency_key").to_pylist()
    for time_us, offset, key in zip(times, offsets, keys, strict=True):
        if key is not None:
            yield time_us, stream.partition, offset, key
