"""Core frames (docs/protocol.md §3.1): publish, subscribe and ack for clients written in an afternoon.

Fixed layouts, one message a frame, a status instead of a typed error. A subscription without a group is a
durable one behind the scenes, named after its connection and deleted with it; those that a crash left over
are deleted when the server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model import errors
from sparrow.model.errors import InvalidArgument, SparrowError
from sparrow.model.flow import Sender
from sparrow.model.message import Delivered
from sparrow.server.consumers import Outlet
from sparrow.server.gate import Gate
from sparrow.wire import core
from sparrow.wire.core import KEY_HEADER, NackAction, Status
from sparrow.wire.frame import Frame, FrameType, pack

TEMPORARY = re.compile(r"connection~[0-9a-f]{16}~\d+\Z")
"""Names of subscriptions that live as long as their connection."""
SUBSCRIPTIONS_MAX = 100
"""Core subscriptions of one connection."""
_PULL_S = 30.0
_RETRY_S = 1.0
_KEPT_US = 60 * 1_000_000
"""How long after its deadline a delivery is remembered, so that a late ACK is told from a wrong one."""
_NACK_REASONS = {1: "processing error", 2: "poison message", 3: "timeout"}
_log = logs.get("tcp")

_STATUS: tuple[tuple[type[SparrowError], Status], ...] = (
    (errors.MessageTooLarge, Status.TOO_LARGE),
    (errors.InvalidPattern, Status.NOT_FOUND),
    (errors.InvalidArgument, Status.INVALID),
    (errors.NotFound, Status.NOT_FOUND),
    (errors.AlreadyExists, Status.EXHAUSTED),
    (errors.PreconditionFailed, Status.EXHAUSTED),
    (errors.StaleAckId, Status.EXHAUSTED),
    (errors.ResourceExhausted, Status.EXHAUSTED),
    (errors.Unauthenticated, Status.UNAUTHORIZED),
    (errors.PermissionDenied, Status.UNAUTHORIZED),
    (errors.StorageError, Status.UNAVAILABLE),
    (errors.BrokerClosed, Status.UNAVAILABLE),
)


def status_of(error: SparrowError) -> Status:
    """The status that says best what an error says."""
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return Status.OTHER


def refusal(kind: int, status: Status) -> bytes:
    """The payload of the RESPONSE to a command that was refused."""
    if kind == FrameType.PUBLISH:
        return core.publish_response(status)
    if kind == FrameType.SUBSCRIBE:
        return core.subscribe_response(status)
    if kind == FrameType.NACK:
        return bytes([status, 0])
    return bytes([status])


async def sweep(broker: Broker) -> None:
    """Deletes subscriptions of connections that ended with a crash of the broker."""
    for subscription in await broker.subscriptions():
        if TEMPORARY.match(subscription.name):
            await (await broker.subscription(subscription.name)).unsubscribe()


class CoreSubscription:
    """One subscription of a connection, its messages sent one a frame."""

    def __init__(
        self, handle: BrokerSubscription, frame: core.Subscribe, outlet: Outlet, clock: Clock
    ) -> None:
        self.handle = handle
        self._outlet = outlet
        self._clock = clock
        self._room_max = frame.max_in_flight
        self._is_auto_ack = frame.is_auto_ack
        self.held: dict[str, Delivered] = {}
        self._settled = asyncio.Event()
        self._pushing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._pushing = asyncio.get_running_loop().create_task(self._push(), name="push core")

    def stop(self) -> None:
        if self._pushing is not None:
            self._pushing.cancel()
            self._pushing = None

    def take(self, message_id: str) -> Delivered | None:
        """The delivery of this id, which is held no longer."""
        found = self.held.pop(message_id, None)
        self._settled.set()
        return found

    def forget(self) -> None:
        """Deliveries whose deadline has passed make room for others, and are forgotten after a while."""
        now_us = self._clock.now_us()
        if any(message.deadline_us <= now_us for message in self.held.values()):
            self._settled.set()
        gone = [name for name, m in self.held.items() if m.deadline_us + _KEPT_US <= now_us]
        for name in gone:
            del self.held[name]

    def _room(self) -> int:
        if len(self.held) < self._room_max:
            return self._room_max - len(self.held)
        now_us = self._clock.now_us()
        return self._room_max - sum(message.deadline_us > now_us for message in self.held.values())

    async def _push(self) -> None:
        while True:
            try:
                while (room := self._room()) <= 0:
                    self._settled.clear()
                    await self._settled.wait()
                await self._outlet.writable()
                for message in await self.handle.pull(min(room, 100), _PULL_S):
                    await self._deliver(message)
            except (errors.SubscriptionNotFound, errors.BrokerClosed, errors.PreconditionFailed):
                return
            except SparrowError as error:
                _log.warning("delivery-failed", str(error), subscription=self.handle.name)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - the root of a task
                _log.error("delivery-failed", "a delivery met a bug", exc_info=error)
                return

    async def _deliver(self, message: Delivered) -> None:
        headers = message.attributes
        if message.key is not None:
            headers[KEY_HEADER] = message.key
        name = message.id
        deadline_ns = 0 if self._is_auto_ack else message.deadline_us * 1000
        payload = core.delivery(
            core.Delivery(self.handle.name, name, message.topic, headers, message.data or b"", deadline_ns)
        )
        self._outlet.send(pack(FrameType.DELIVERY, [payload]))
        if self._is_auto_ack:
            await self.handle.ack([message])
        else:
            self.held[name] = message


class CoreFrames:
    """The core commands of one connection."""

    def __init__(self, broker: Broker, outlet: Outlet, clock: Clock, session: str, gate: Gate) -> None:
        self._broker = broker
        self._gate = gate
        self._outlet = outlet
        self._clock = clock
        self._session = session
        self._subscriptions: list[CoreSubscription] = []
        self._last = 0
        self._is_over = False

    def __len__(self) -> int:
        return len(self._subscriptions)

    def parse(self, frame: Frame, sender: Sender) -> Callable[[], Awaitable[bytes | None]]:
        """What a frame asks for, ready to be done; refuses a payload that does not parse."""
        payload = frame.payload
        match frame.type:
            case FrameType.PUBLISH:
                publish = core.parse_publish(payload)
                return lambda: self._publish(publish, sender)
            case FrameType.SUBSCRIBE:
                subscribe = core.parse_subscribe(payload)
                return lambda: self._subscribe(subscribe)
            case FrameType.ACK:
                ack = core.parse_ack(payload)
                return lambda: self._ack(ack)
            case FrameType.NACK:
                nack = core.parse_nack(payload)
                return lambda: self._nack(nack)
        raise InvalidArgument(f"frames of type {frame.type} are not known here")

    async def _publish(self, frame: core.Publish, sender: Sender) -> bytes | None:
        headers = dict(frame.headers)
        key = headers.pop(KEY_HEADER, None)
        try:
            self._gate.check_publish(frame.topic)
            receipt = await self._broker.publish(
                frame.topic,
                frame.data,
                key=key,
                attributes=headers,
                ttl_s=frame.ttl_s or None,
                publisher=sender.name,
                priority_class=sender.kind.value,
                token=sender.token,
            )
        except SparrowError as error:
            return core.publish_response(status_of(error)) if frame.requires_ack else None
        if not frame.requires_ack:
            return None
        return core.publish_response(Status.DONE, receipt.message_id, receipt.publish_time_us * 1000)

    async def _subscribe(self, frame: core.Subscribe) -> bytes:
        try:
            if not frame.max_in_flight:
                raise InvalidArgument("max in flight is at least 1")
            if len(self._subscriptions) >= SUBSCRIPTIONS_MAX:
                raise errors.ResourceExhausted(f"a connection may have {SUBSCRIPTIONS_MAX} subscriptions")
            self._gate.check_subscribe(frame.pattern)
            handle = await self._open(frame)
        except errors.InvalidName:
            return core.subscribe_response(Status.EXHAUSTED)
        except SparrowError as error:
            return core.subscribe_response(status_of(error))
        if self._is_over:  # The connection ended meanwhile.
            if TEMPORARY.match(handle.name):
                await handle.unsubscribe()
            return b""
        found = CoreSubscription(handle, frame, self._outlet, self._clock)
        self._subscriptions.append(found)
        asyncio.get_running_loop().call_soon(self._start, found)
        return core.subscribe_response(Status.DONE, handle.name)

    def _start(self, subscription: CoreSubscription) -> None:
        if subscription in self._subscriptions:
            subscription.start()

    async def _open(self, frame: core.Subscribe) -> BrokerSubscription:
        if not frame.group:
            self._last += 1
            return await self._broker.subscribe(f"connection~{self._session}~{self._last}", frame.pattern)
        try:
            return await self._broker.subscribe(frame.group, frame.pattern)
        except errors.SubscriptionExists:
            # With options of its own: fine, as long as it is about the same messages.
            handle = await self._broker.subscription(frame.group)
            if handle.pattern != frame.pattern:
                raise
            return handle

    def _take(self, message_id: str) -> tuple[CoreSubscription, Delivered] | None:
        """The delivery that an id means: of the first subscription that holds it."""
        for subscription in self._subscriptions:
            message = subscription.take(message_id)
            if message is not None:
                return subscription, message
        return None

    async def _ack(self, frame: core.Ack) -> bytes:
        found = self._take(frame.message_id)
        if found is None:
            return bytes([Status.NOT_FOUND])
        subscription, message = found
        try:
            await subscription.handle.ack([message])
        except SparrowError as error:
            return bytes([status_of(error)])
        return bytes([Status.DONE])

    async def _nack(self, frame: core.Nack) -> bytes:
        found = self._take(frame.message_id)
        if found is None:
            return bytes([Status.NOT_FOUND, 0])
        subscription, message = found
        policy = subscription.handle.policy
        is_last = policy.attempts_max is not None and message.attempt >= policy.attempts_max
        reason = _NACK_REASONS.get(frame.reason, f"reason {frame.reason}")
        try:
            await subscription.handle.nack([message], reason=reason, retry=frame.is_retry)
        except SparrowError as error:
            return bytes([status_of(error), 0])
        if frame.is_retry and not is_last:
            return core.nack_response(Status.DONE, NackAction.REQUEUED)
        has_place = policy.dead_letter_topic is not None
        return core.nack_response(Status.DONE, NackAction.DEAD_LETTER if has_place else NackAction.DROPPED)

    def forget(self) -> None:
        """Looks for deliveries whose time has passed."""
        for subscription in self._subscriptions:
            subscription.forget()

    def stop(self) -> None:
        """No more deliveries."""
        for subscription in self._subscriptions:
            subscription.stop()

    def let_go(self, *, is_graceful: bool) -> list[BrokerSubscription]:
        """The connection ends; returns the subscriptions that are to be deleted with it."""
        temporary: list[BrokerSubscription] = []
        for subscription in self._subscriptions:
            subscription.stop()
            handle = subscription.handle
            if TEMPORARY.match(handle.name):
                temporary.append(handle)
            else:
                with contextlib.suppress(errors.SubscriptionNotFound):
                    handle.abandon(is_graceful=is_graceful)
        self._subscriptions.clear()
        self._is_over = True
        return temporary


async def unsubscribe(handle: BrokerSubscription) -> None:
    """Deletes a subscription whose connection has ended."""
    try:
        await handle.unsubscribe()
    except (errors.SubscriptionNotFound, errors.BrokerClosed):
        return
    except SparrowError as error:
        _log.warning("subscription-left-over", error.message, subscription=handle.name)


def is_core(kind: int) -> bool:
    """Whether frames of this type have a fixed layout and are answered by RESPONSE."""
    return kind in _CORE


_CORE: frozenset[Any] = frozenset([FrameType.PUBLISH, FrameType.SUBSCRIBE, FrameType.ACK, FrameType.NACK])
