"""The messages that a subscription is sent: credit, the buffer they wait in, and the number that it has on
the present connection.

Credit follows demand. A pull asks for as many messages as it wants. A program that pulls again and again is
read ahead for: about a tenth of a second of what it got through lately, at least one pull, at most the
``prefetch`` options. When it stops pulling for a moment, the credit is taken back and what waits in the
buffer is given back, so that other consumers get it at once and no attempt is counted. So messages grow old
in the hands of the program and not here. Under *at most once* nothing can be given back, and nothing is read
ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sparrow.client.buffer import Buffer, Parcel
from sparrow.client.connection import Connection
from sparrow.client.session import Session
from sparrow.client.settling import Place, Settling, to_ranges
from sparrow.model.errors import BrokerClosed, ConnectionLost, SparrowError
from sparrow.model.message import Delivered
from sparrow.model.subscription import Guarantee, SubscriptionPolicy
from sparrow.wire import heads

_AHEAD_S = 0.1
_IDLE_S = 0.25
"""Without a pull for so long, a program does not wait for more."""

Opening = Callable[[Connection, Callable[[Any], None]], Awaitable[Any]]
"""Asks the broker for a consumer; the second argument is called with the reply's head at once."""


class Supply:
    """See the module's text."""

    def __init__(self, session: Session, opening: Opening) -> None:
        self.session = session
        self._opening = opening
        self._loop = asyncio.get_running_loop()
        self.policy = SubscriptionPolicy()
        self.settling = Settling(self._place, self.opened)
        self._buffer = Buffer()
        self._number: int | None = None
        self._connection: Connection | None = None
        self._task: asyncio.Task[Place] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._problem: SparrowError | None = None
        """Why the consumer ended; told to the next pull."""
        self._credit = self._credit_bytes = 0
        """What the broker may still send."""
        self._waiting: set[asyncio.Future[None]] = set()
        self._pulls = 0
        self._rate_per_s = 0.0
        self._last_s = 0.0
        """When the last pull ended."""
        self._idle: asyncio.TimerHandle | None = None
        self.is_lasting = False
        """Whether it is opened again on a new connection though nobody asks."""
        self.on_rebalance: Callable[[heads.Rebalance], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._place() is not None

    @property
    def buffered(self) -> int:
        """Messages that wait for the program."""
        return self._buffer.messages

    def has_some(self) -> bool:
        """Whether messages wait for the program."""
        return self._buffer.messages > 0

    # Its number on the connection.

    def _place(self) -> Place | None:
        connection = self._connection
        if self._number is None or connection is None or connection is not self.session.present:
            return None
        return connection, self._number

    async def opened(self) -> Place:
        """The consumer on the present connection; opened when there is none."""
        found = self._place()
        if found is not None:
            return found
        if self._task is None:
            self._task = self._loop.create_task(self._open())
            self._task.add_done_callback(self._open_ended)
        return await asyncio.shield(self._task)

    def _open_ended(self, task: asyncio.Task[Place]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # Told to those who wait; with nobody there it is no news.

    async def _open(self) -> Place:
        while True:
            connection = await self.session.connection()
            self.session.guests.add(self)
            self._forget()

            def made(head: Any, connection: Connection = connection) -> None:
                self._connection, self._number = connection, int(head.value["consumer"])
                self.session.consumers[self._number] = self

            try:
                await self._opening(connection, made)
            except (ConnectionLost, BrokerClosed):
                if self.session.is_closed:
                    raise
                continue
            found = self._place()
            if found is not None:
                self.settling.send()
                self._wake()
                return found

    def _forget(self) -> None:
        """Nothing of an earlier connection is good any more."""
        self._number = None
        self._credit = self._credit_bytes = 0
        self._buffer.clear()
        self._problem = None

    def connected(self) -> None:
        """A new connection: who waits, has something to settle or is a member is there again at once."""
        if self._pulls or self.is_lasting or self.settling.is_used:
            self._reopening = self._loop.create_task(self._reopen())

    async def _reopen(self) -> None:
        try:
            await self.opened()
        except SparrowError as error:
            self.ended(error)

    def given_up(self, error: SparrowError) -> None:
        self._forget()
        self._problem = error
        self._wake()

    async def settle(self) -> None:
        if self.settling.is_used:
            await self.settling.flush()

    def ended(self, error: SparrowError) -> None:
        self._number = None
        self._problem = error
        self._wake()

    def delivered(self, head: heads.Deliver, body: memoryview) -> None:
        if head.consumer != self._number:
            return
        parcel = Parcel(head, body)
        self._credit -= parcel.count
        self._credit_bytes -= parcel.bytes
        self._buffer.add(parcel)
        if not self._pulls:
            self._watch_idleness()
        self._wake()

    def rebalanced(self, head: heads.Rebalance) -> None:
        if head.consumer == self._number and self.on_rebalance is not None:
            self.on_rebalance(head)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    # Pulling.

    async def pull(
        self, max_messages: int, timeout_s: float, max_bytes: int | None, owner: Any
    ) -> list[Delivered]:
        """Messages out of the buffer, waiting for the first."""
        self.settling.send()
        await self.settling.keep_pace()
        self._pulls += 1
        try:
            found = self._take(max_messages, max_bytes, owner)
            if not found:
                await self._obtain(max_messages, timeout_s)
                found = self._take(max_messages, max_bytes, owner)
            self._measure(len(found))
            if found and self.policy.guarantee is not Guarantee.AT_MOST_ONCE:
                self._read_ahead(max_messages)
            return found
        finally:
            self._pulls -= 1
            self._last_s = time.monotonic()
            self._watch_idleness()

    def _take(self, max_messages: int, max_bytes: int | None, owner: Any) -> list[Delivered]:
        if not self._buffer.messages:
            return []
        lifetime_s = self.policy.ack_deadline_s
        if lifetime_s and not self.policy.adaptive_deadline and not self._is_at_most_once:
            self._buffer.drop_older(time.monotonic() - lifetime_s)
        return self._buffer.take(max_messages, max_bytes, owner)

    @property
    def _is_at_most_once(self) -> bool:
        return self.policy.guarantee is Guarantee.AT_MOST_ONCE

    async def _obtain(self, max_messages: int, timeout_s: float) -> None:
        """Returns when there is something in the buffer, or nothing in time."""
        until_s = self._loop.time() + timeout_s
        is_first = True
        while True:
            self._tell_problem()
            connection, number = await self.opened()
            if self.has_some():
                return
            rest_s = until_s - self._loop.time()
            if rest_s <= 0:
                # With a timeout of 0 the only look: the answer comes when the broker has looked.
                if is_first:
                    await self._look(connection, number, max_messages)
                return
            is_first = False
            self._grant(max(0, max_messages - self._credit))
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.add(future)
            alarm = self._loop.call_later(rest_s, _set, future)
            try:
                await future
            finally:
                alarm.cancel()
                self._waiting.discard(future)
            if self.has_some():
                return

    async def _look(self, connection: Connection, number: int, max_messages: int) -> None:
        more, size = max(0, max_messages - self._credit), self._bytes_wanted()
        self._credit += more
        self._credit_bytes += size
        try:
            await connection.submit(heads.Credit(number, more, size))
        except ConnectionLost:
            self._tell_problem()

    def _tell_problem(self) -> None:
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _grant(self, messages: int) -> None:
        place, size = self._place(), self._bytes_wanted()
        if place is None or (messages <= 0 and size <= 0):
            return
        self._credit += messages
        self._credit_bytes += size
        place[0].send(heads.Credit(place[1], messages, size))

    def _bytes_wanted(self) -> int:
        held = self._credit_bytes + self._buffer.bytes
        most = self.session.options.prefetch_bytes
        return most - held if held < most // 2 else 0

    def _measure(self, count: int) -> None:
        """How fast the program gets through messages, from pull to pull."""
        passed_s = time.monotonic() - self._last_s
        if passed_s > _IDLE_S or not count:
            self._rate_per_s = 0.0
        else:
            now_per_s = count / max(passed_s, 1e-4)
            self._rate_per_s = now_per_s if not self._rate_per_s else (self._rate_per_s + now_per_s) / 2

    def _read_ahead(self, max_messages: int) -> None:
        if not self._rate_per_s:
            return
        ahead = max(max_messages, int(self._rate_per_s * _AHEAD_S))
        target = min(ahead, self.session.options.prefetch_messages)
        held = self._credit + self._buffer.messages
        if held <= target // 2:
            self._grant(target - held)

    # Idleness.

    def _watch_idleness(self) -> None:
        if self._idle is None and (self._credit > 0 or self._buffer.messages):
            self._idle = self._loop.call_later(self._idle_s, self._look_for_idleness)

    @property
    def _idle_s(self) -> float:
        deadline_s = self.policy.ack_deadline_s
        return min(_IDLE_S, deadline_s / 4) if deadline_s else _IDLE_S

    def _look_for_idleness(self) -> None:
        self._idle = None
        if self._pulls:
            return  # Its end sets the timer again.
        rest_s = self._idle_s - (time.monotonic() - self._last_s)
        if rest_s > 0:
            self._idle = self._loop.call_later(rest_s, self._look_for_idleness)
        else:
            self._give_back()

    def _give_back(self) -> None:
        """Takes the credit back, and returns what nobody asked for."""
        place = self._place()
        if place is None or self._is_at_most_once:
            return
        if self._credit > 0 or self._credit_bytes > 0:
            place[0].send(heads.Credit(place[1], -max(0, self._credit), -max(0, self._credit_bytes)))
            self._credit, self._credit_bytes = min(0, self._credit), min(0, self._credit_bytes)
        held: dict[str, list[int]] = {}
        for parcel in self._buffer.clear():
            held.setdefault(parcel.head.lease, []).extend(parcel.offsets())
        if held:
            self.settling.settle(heads.Settle(place[1], heads.RETURN, to_ranges(held)))

    async def quiet(self) -> None:
        """Takes the credit back and forgets what waits here: the leases are about to end. Returns when
        everything that was on its way has come."""
        place = self._place()
        if place is not None:
            taken, size = max(0, self._credit), max(0, self._credit_bytes)
            self._credit -= taken
            self._credit_bytes -= size
            with contextlib.suppress(ConnectionLost):
                await place[0].submit(heads.Credit(place[1], -taken, -size))
        self._buffer.clear()

    # The end.

    async def close(self, *, is_graceful: bool = True, leave: bool = False) -> None:
        """Lets go of everything that is held."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self.is_lasting = False
        self.session.guests.discard(self)
        place = self._place()
        number, self._number = self._number, None
        if number is not None:
            self.session.consumers.pop(number, None)
        self._forget()
        if place is not None:
            head = heads.Leave(place[1]) if leave else heads.Unsubscribe(place[1], is_graceful)
            with contextlib.suppress(ConnectionLost):  # Then the broker hands it back by itself.
                await place[0].submit(head)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
