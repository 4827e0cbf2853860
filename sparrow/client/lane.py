"""Batches of one producer to one topic on their way to the broker, in order, each stored once.

Sequences count messages. Several batches are on their way at once, and three things can happen to one:

* It is stored. Its receipts go to whoever waits.
* It is refused. Those behind it are then refused for the gap: they are *held* until every answer is there,
  numbered anew from the end of what is stored, and sent again in their order.
* The answer is lost with the connection. It is sent again under its old number on the next one, and the
  broker recognises it if it was stored.

The first batch goes alone, because a broker takes the first number it sees of a producer for its start.
When answers are given up (the broker stays away) it is not known how far the numbers got, so the lane ends
there: the producer must be opened anew, which shuts out everything older.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from sparrow.client.connection import Answer
from sparrow.client.session import Session
from sparrow.model.errors import (
    BrokerClosed,
    ConnectionLost,
    PreconditionFailed,
    SequenceGap,
    SparrowError,
)
from sparrow.store.batch import Body
from sparrow.wire import heads

_GAPS_MAX = 3
"""Times that a batch which was sent with nothing before it may be refused for a gap."""


class Progress(enum.Enum):
    """Where a batch is."""

    QUEUED = "queued"
    SENT = "sent"
    LOST = "lost"
    """The answer will not come: to be sent again under the same number."""
    HELD = "held"
    """It was not stored: to be sent again under a new number."""


class Batch:
    """One batch, until its receipts are there."""

    __slots__ = (
        "base",
        "body",
        "gaps",
        "is_fixed",
        "is_repeatable",
        "is_sequenced",
        "on_done",
        "partition",
        "partitions",
        "progress",
    )

    def __init__(
        self,
        body: Body,
        on_done: Callable[[heads.WireReceipts | SparrowError], None],
        *,
        partition: int = -1,
        partitions: int = 0,
        is_sequenced: bool = True,
        is_repeatable: bool = True,
        sequence: int | None = None,
    ) -> None:
        self.body = body
        self.on_done = on_done
        self.partition = partition
        self.partitions = partitions
        self.is_sequenced = is_sequenced
        """Without a number it is recognised by its idempotency keys, if at all."""
        self.is_repeatable = is_repeatable
        self.is_fixed = sequence is not None
        """The program chose the number: a refusal is its business."""
        self.base = sequence or 0
        self.progress = Progress.QUEUED
        self.gaps = 0

    @property
    def is_numbered(self) -> bool:
        """Whether the lane gives it its number."""
        return self.is_sequenced and not self.is_fixed


class Owner(Protocol):
    """What a lane needs of the publisher that it belongs to."""

    session: Session
    in_flight_bytes: int
    identity: tuple[int, int]

    def blocked(self, lane: Lane) -> None:
        """It has more to send than may be on its way at once."""

    def relieved(self, lane: Lane) -> None:
        """An answer came."""

    def forget_partitions(self, topic: str) -> None:
        """The topic has another number of partitions than was counted on."""


class Lane:
    """See the module's text."""

    def __init__(self, topic: str, owner: Owner, start: int, *, is_proven: bool) -> None:
        self.topic = topic
        self._owner = owner
        self._next = self._stored_end = start
        self._is_proven = is_proven
        """Whether the broker knows where this producer stands in the topic."""
        self._is_stalled = False
        self._queue: deque[Batch] = deque()
        self._sent: list[Batch] = []

    @property
    def is_idle(self) -> bool:
        return not self._sent and not self._queue

    @property
    def waiting(self) -> int:
        """Batches that have not been sent."""
        return len(self._queue)

    def add(self, batch: Batch) -> None:
        self._queue.append(batch)
        self.pump()

    def pump(self) -> None:
        """Sends what may be sent."""
        session = self._owner.session
        connection = session.present
        if connection is None:
            session.wake()
            return
        if self._queue and session.is_paused(self.topic, self.pump):
            return
        window = session.options.max_in_flight if self._is_proven else 1
        while self._queue and not self._is_stalled and len(self._sent) < window:
            size = len(self._queue[0].body.buffer)
            used = self._owner.in_flight_bytes
            if used and used + size > session.in_flight_bytes_max:
                self._owner.blocked(self)
                return
            batch = self._queue.popleft()
            if batch.is_numbered:
                batch.base = self._next
                self._next += batch.body.record_count
            self._sent.append(batch)
            self._send(batch)

    def connected(self) -> None:
        """On a new connection: what was not answered goes first, in its order."""
        for batch in self._sent:
            if batch.progress is Progress.LOST:
                self._send(batch)
        self.pump()

    def give_up(self, error: SparrowError) -> None:
        """Tells everybody who waits."""
        batches, self._sent, self._queue = [*self._sent, *self._queue], [], deque()
        for batch in batches:
            batch.on_done(error)

    def _send(self, batch: Batch) -> None:
        connection = self._owner.session.present
        batch.progress = Progress.SENT
        self._owner.in_flight_bytes += len(batch.body.buffer)
        if connection is None:
            self._note(batch, ConnectionLost("the connection is lost"))
            return
        producer = self._owner.identity if batch.is_sequenced else (0, 0)
        body = batch.body
        head = heads.PublishBatch(
            self.topic, batch.partition, body.record_count, body.columns, body.codec, body.crc, *producer,
            batch.base if batch.is_sequenced else 0, batch.partitions,
        )  # fmt: skip
        connection.submit(head, body.buffer).add_done_callback(partial(self._answered, batch))

    def _answered(self, batch: Batch, done: asyncio.Future[Answer]) -> None:
        error = done.exception()
        if error is None:
            self._note(batch, done.result()[0])
        else:
            assert isinstance(error, SparrowError)
            self._note(batch, error)

    def _note(self, batch: Batch, outcome: Any) -> None:
        self._owner.in_flight_bytes -= len(batch.body.buffer)
        if batch not in self._sent:
            return  # It was given up meanwhile.
        if isinstance(outcome, ConnectionLost | BrokerClosed) and batch.is_repeatable:
            batch.progress = Progress.LOST
        elif batch.is_numbered and self._is_to_be_held(batch, outcome):
            batch.progress = Progress.HELD
            self._is_stalled = True
        else:
            self._finish(batch, outcome)
        self._go_on()
        self._owner.relieved(self)

    def _is_to_be_held(self, batch: Batch, outcome: Any) -> bool:
        """Whether it was not stored for a reason that another number, or another division, takes away."""
        if isinstance(outcome, SequenceGap):
            if self._sent[0] is batch:
                batch.gaps += 1
                self._stored_end = int(outcome.details.get("expected", self._stored_end))
            return batch.gaps <= _GAPS_MAX
        if isinstance(outcome, PreconditionFailed) and batch.partitions and "partitions" in outcome.details:
            batch.partition, batch.partitions = -1, 0  # The broker divides it.
            self._owner.forget_partitions(self.topic)
            return True
        return False

    def _finish(self, batch: Batch, outcome: Any) -> None:
        self._sent.remove(batch)
        if isinstance(outcome, heads.WireReceipts):
            if batch.is_sequenced:
                self._is_proven = True
                self._stored_end = max(self._stored_end, batch.base + batch.body.record_count)
                self._next = max(self._next, self._stored_end)
        elif batch.is_numbered:
            self._is_stalled = True
        batch.on_done(outcome)

    def _go_on(self) -> None:
        """When every answer is there: numbers those that were held anew."""
        if self._is_stalled and all(batch.progress is Progress.HELD for batch in self._sent):
            self._queue.extendleft(reversed(self._sent))
            self._sent = []
            self._next = self._stored_end
            self._is_stalled = False
        self.pump()


__all__ = ["Batch", "Lane", "Owner", "Progress"]
