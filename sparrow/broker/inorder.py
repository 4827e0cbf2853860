"""Holds what a producer sends out of order until the numbers before it have come, or been given up.

The rules are in kernel/sequence.py. A held message has no receipt yet: its publisher waits, and sends it
again after a crash.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pyarrow as pa

from sparrow.broker.clock import Clock
from sparrow.broker.ingress import Ingress, ProducerId
from sparrow.broker.repeats import Repeats
from sparrow.kernel.sequence import NEVER_US, SequenceLimits, Sequencer
from sparrow.model.errors import InvalidArgument, SparrowError
from sparrow.model.flow import ANYONE, Sender
from sparrow.model.message import Receipts
from sparrow.model.topic import Topic


class _Held(NamedTuple):
    topic: Topic
    batch: pa.RecordBatch
    producer: ProducerId
    sequence: int
    future: asyncio.Future[Receipts]


class InOrder:
    """The sequencer of one producer, over its topics."""

    def __init__(self, ingress: Ingress, repeats: Repeats, clock: Clock, gap_timeout_s: float) -> None:
        if not isinstance(gap_timeout_s, int | float) or not 0 < gap_timeout_s <= 3600:
            raise InvalidArgument(f"hold_gaps_s must be above 0 to 3600, not {gap_timeout_s!r}")
        self._ingress = ingress
        self._repeats = repeats
        self._clock = clock
        limits = SequenceLimits(gap_timeout_us=int(gap_timeout_s * 1_000_000))
        self._sequencer: Sequencer[_Held] = Sequencer(limits)
        self._waiting: dict[tuple[int, int], _Held] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(
        self,
        topic: Topic,
        batch: pa.RecordBatch,
        producer: ProducerId,
        sequence: int,
        sender: Sender = ANYONE,
    ) -> Receipts:
        """Stores the batch when its turn comes. What waits for flow control has not arrived."""
        if not self._repeats.ledger(producer.id, topic.id).is_behind(sequence):
            await self._ingress.admit_ahead(topic, batch, sender)
        ledger = self._repeats.ledger(producer.id, topic.id)
        if ledger.expected is not None:
            self._sequencer.restore(topic.id, ledger.expected - 1)
        mark = (topic.id, sequence)
        if mark in self._waiting:
            return await asyncio.shield(self._waiting[mark].future)
        held = _Held(topic, batch, producer, sequence, asyncio.get_running_loop().create_future())
        found = self._sequencer.offer(topic.id, sequence, held, self._clock.now_us(), batch.num_rows)
        if found.is_repeat:
            return await self._ingress.publish_batch(topic, batch, producer, sequence, is_admitted=True)
        self._waiting[mark] = held
        self._release(found.released)
        self._set_timer()
        return await asyncio.shield(held.future)

    def _release(self, released: list[_Held]) -> None:
        """Starts them in order; the journal keeps that order."""
        for held in released:
            task = asyncio.get_running_loop().create_task(self._store(held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _store(self, held: _Held) -> None:
        ledger = self._repeats.ledger(held.producer.id, held.topic.id)
        if ledger.expected is not None:
            ledger.skip_to(held.sequence)
        try:
            receipts = await self._ingress.publish_batch(
                held.topic, held.batch, held.producer, held.sequence, is_admitted=True
            )
        except SparrowError as error:
            if not held.future.done():
                held.future.set_exception(error)
                held.future.exception()
        else:
            if not held.future.done():
                held.future.set_result(receipts)
        finally:
            self._waiting.pop((held.topic.id, held.sequence), None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_us = self._sequencer.next_wakeup_us()
        if at_us < NEVER_US:
            wait_s = max(0.0, (at_us - self._clock.now_us()) / 1_000_000)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        for _, found in self._sequencer.expire(self._clock.now_us()):
            self._release(found.released)
        self._set_timer()
