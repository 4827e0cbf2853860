"""A client's line to its broker: one connection at a time, made anew when it breaks.

Who needs the connection asks for it and waits while it is being made again, with growing, jittered pauses,
until ``reconnect_s`` is used up; then all who wait get ``ConnectionLost``, and the next one who asks begins
anew. Whoever has something to restore on a new connection (publishers, consumers, members) is a ``Guest``.

A command whose reply was lost may have been carried out. It is sent again when that does no harm, and
otherwise ``ConnectionLost`` says so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from sparrow.client.connection import Answer, Connection
from sparrow.client.options import Options, Target
from sparrow.model.errors import BrokerClosed, ConnectionLost, InvalidArgument, SparrowError
from sparrow.wire import heads
from sparrow.wire.heads import Head

_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 1.0
"""How long a topic stays paused when the broker says no more of it."""


class Guest(Protocol):
    """Somebody with state on the connection."""

    def connected(self) -> None:
        """There is a new connection; nothing of the earlier one is known there."""

    def given_up(self, error: SparrowError) -> None:
        """There will be no connection in time; whoever waits is to be told."""

    async def settle(self) -> None:
        """The client closes: what was said and not yet sent goes out."""


class Consumer(Protocol):
    """Somebody whom the broker sends frames to."""

    def delivered(self, head: heads.Deliver, body: memoryview) -> None: ...

    def rebalanced(self, head: heads.Rebalance) -> None: ...

    def ended(self, error: SparrowError) -> None:
        """The broker cannot go on with it."""


class Session:
    """See the module's text."""

    def __init__(self, target: Target, options: Options) -> None:
        self.target = target
        self.options = options
        self.guests: set[Guest] = set()
        self.consumers: dict[int, Consumer] = {}
        """By the number that they have on the present connection."""
        self.flow: dict[str, heads.Flow] = {}
        """What the broker last said of each topic."""
        self._paused: dict[str, dict[Callable[[], None], None]] = {}
        """Who goes on when a topic takes messages again."""
        self.is_closed = False
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None

    @classmethod
    async def open(cls, target: Target, options: Options) -> Session:
        session = cls(target, options)
        session._connecting = asyncio.get_running_loop().create_task(session._connect(options.connect_s))
        await session.connection()
        return session

    async def close(self) -> None:
        """Says goodbye."""
        self.is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with suppress(asyncio.CancelledError, SparrowError):
                await self._connecting
        if self._connection is not None:
            await self._connection.close()
        for guest in list(self.guests):
            guest.given_up(_closed())

    # The connection.

    @property
    def present(self) -> Connection | None:
        """The connection, if there is one that takes commands."""
        found = self._connection
        return found if found is not None and found.is_open and not found.is_draining else None

    @property
    def in_flight_bytes_max(self) -> int:
        """What may be on its way at once without the broker pausing all commands of the connection."""
        found = self._connection
        return (
            8 * 1024 * 1024
            if found is None or found.welcome is None
            else found.welcome.connection_bytes_max // 2
        )

    async def connection(self) -> Connection:
        """The connection, made again if need be."""
        if self.is_closed:
            raise _closed()
        found = self.present
        if found is not None:
            return found
        self.wake()
        assert self._connecting is not None
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if self.is_closed:
                raise _closed() from None
            raise

    def wake(self) -> None:
        """Begins to connect, unless that is under way or not needed."""
        if not self.is_closed and self.present is None and self._connecting is None:
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect(self.options.reconnect_s))
            self._connecting.add_done_callback(look_at)

    async def _connect(self, patience_s: float) -> Connection:
        until_s = time.monotonic() + patience_s
        try:
            made = await self._keep_trying(until_s)
        except SparrowError as error:
            self._connecting = None
            for guest in list(self.guests):
                guest.given_up(error)
            raise
        self._connection, self._connecting = made, None
        self.consumers.clear()
        if not made.is_open:
            self._lost()
        for guest in list(self.guests):
            guest.connected()
        return made

    async def _keep_trying(self, until_s: float) -> Connection:
        pause_s = self.options.backoff_min_s
        if self._connection is not None and self._connection.is_draining:
            await asyncio.wait([self._connection.closed], timeout=max(0.0, until_s - time.monotonic()))
        while True:
            try:
                return await Connection.open(self.target, self.options, self._arrived, self._lost)
            except SparrowError as error:
                rest_s = until_s - time.monotonic()
                if not (error.retryable or isinstance(error, BrokerClosed)) or rest_s <= 0:
                    raise
            await asyncio.sleep(min(rest_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, self.options.backoff_max_s)

    def _lost(self) -> None:
        if self._connection is not None and not self._connection.is_open and self.guests:
            self.wake()

    def _arrived(self, head: Any, body: memoryview) -> None:
        """What the broker sends by itself."""
        if isinstance(head, heads.Deliver):
            consumer = self.consumers.get(head.consumer)
            if consumer is not None:
                consumer.delivered(head, body)
        elif isinstance(head, heads.Rebalance):
            consumer = self.consumers.get(head.consumer)
            if consumer is not None:
                consumer.rebalanced(head)
        elif isinstance(head, heads.WireError):
            consumer = self.consumers.pop(head.details.get("consumer", 0), None)
            if consumer is not None:
                consumer.ended(head.to_exception())
        elif isinstance(head, heads.Flow):
            self.flow[head.topic] = head
            if head.kind != "pause":
                self._end_pause(head.topic)
            elif head.topic not in self._paused:
                self._paused[head.topic] = {}
                patience_s = min(max(head.retry_after_s, _PAUSE_S_MIN), _PAUSE_S_MAX)
                asyncio.get_running_loop().call_later(patience_s, self._end_pause, head.topic)

    # Pauses.

    def is_paused(self, topic: str, go_on: Callable[[], None]) -> bool:
        """Whether a topic has no room for more; then ``go_on`` is called when it may have."""
        waiting = self._paused.get(topic)
        if waiting is None:
            return False
        waiting[go_on] = None
        return True

    def _end_pause(self, topic: str) -> None:
        for go_on in self._paused.pop(topic, ()):
            go_on()

    # Commands.

    async def request(
        self, head: Head, *body: Any, is_safe: bool = True, timeout_s: float | None = None
    ) -> Answer:
        """Sends a command and waits for its reply. ``is_safe`` says that it may be carried out twice."""
        patience_s = timeout_s or self.options.timeout_s
        until_s = time.monotonic() + patience_s + self.options.reconnect_s
        while True:
            connection = await self.connection()
            answer = connection.submit(head, *body)
            try:
                async with asyncio.timeout(patience_s):
                    return await answer
            except TimeoutError:
                raise ConnectionLost(f"{self.target} has not answered within {patience_s:g} s") from None
            except (ConnectionLost, BrokerClosed):
                if self.is_closed:
                    raise _closed() from None
                if not is_safe or time.monotonic() > until_s:
                    raise

    async def call(
        self, verb: str, *, is_safe: bool = False, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """Calls a verb of the broker; what it returned."""
        try:
            answer = await self.request(heads.Call(verb, arguments), is_safe=is_safe, timeout_s=timeout_s)
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(f"{verb} cannot be sent: {error}") from error
        return answer[0].value


def _closed() -> BrokerClosed:
    return BrokerClosed("the broker is closed", hint="Connect again.")


def look_at(task: asyncio.Task[Any]) -> None:
    """Those who wait for the task are told of its failure; when nobody does, that is no fault."""
    if not task.cancelled():
        task.exception()
