"""The consumers of one connection: credit, deliveries that are pushed, settling by ranges, group members.

A consumer is one task that pulls what its credit allows and sends it: one DELIVER for each lease and page,
its messages as one Arrow batch that nobody here looks into. It waits while it has no credit, while the client
reads too slowly, and for messages; one consumer that waits holds up nobody else.

A member of a group is a consumer with a seat. Frames of its client are its signs of life; a new generation is
taken up for it in the moment in which it is told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.courier import Portion
from sparrow.broker.member import BrokerMember
from sparrow.broker.subscription import BrokerSubscription
from sparrow.kernel.exchange import Refusal
from sparrow.kernel.lease import AckNames, name_offsets, parse_ack_ids
from sparrow.model.errors import (
    BrokerClosed,
    InvalidAckId,
    InvalidArgument,
    PreconditionFailed,
    SparrowError,
    StaleGeneration,
    SubscriptionNotFound,
)
from sparrow.server.gate import Gate
from sparrow.wire import heads
from sparrow.wire.heads import (
    ACK,
    NACK,
    RETURN,
    Commit,
    Consume,
    Credit,
    Deliver,
    Extend,
    JoinGroup,
    Rebalance,
    Settle,
)

PULL_MESSAGES = 4096
PULL_BYTES = 2 * 1024 * 1024
"""What is pulled at once: enough to make the cost of a pull small, little enough to stay fair."""
DELIVER_BYTES_MAX = 8 * 1024 * 1024
"""Rows above this, which many attributes can make, are sent as several frames."""
SETTLE_MAX = 131_072
"""Messages that one frame may settle."""
REFUSED_MAX = 10_000
"""Refusals that one reply tells of."""
CONSUMERS_MAX = 1000
"""Consumers of one connection."""
CREDIT_MAX = 2**53
_PULL_S = 30.0
_RETRY_S = 1.0
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_log = logs.get("tcp")


class Outlet(Protocol):
    """A connection as far as its consumers know it."""

    def send(self, pieces: list[Any]) -> None:
        """Hands a frame to the network."""

    async def writable(self) -> None:
        """Returns while the client keeps up with reading."""


class Consumer:
    """One consumer; see the module's text."""

    def __init__(self, number: int, handle: BrokerSubscription, outlet: Outlet) -> None:
        self.number = number
        self.handle = handle
        self._outlet = outlet
        self._messages = 0
        self._bytes = 0
        self._message_bytes = 1024.0
        """About the size of one message, so that not much more is leased than may be sent."""
        self._credit_came: asyncio.Future[None] | None = None
        self._is_stopped = False
        self._looks: list[asyncio.Future[None]] = []
        """Those who want to know that what was ready has been sent."""
        self._patient: asyncio.Task[list[Portion]] | None = None
        """A pull that waits for messages."""
        self._pushing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Consumer {self.number} of {self.handle.name!r}, credit {self._messages}>"

    def start(self) -> None:
        self._pushing = asyncio.get_running_loop().create_task(self._push(), name=f"push {self.number}")

    def add_credit(self, messages: int, size: int) -> None:
        """The client can take so much more; less than nothing takes credit away."""
        self._messages = max(-CREDIT_MAX, min(CREDIT_MAX, self._messages + messages))
        self._bytes = max(-CREDIT_MAX, min(CREDIT_MAX, self._bytes + size))
        came = self._credit_came
        if self._messages > 0 and self._bytes > 0 and came is not None and not came.done():
            came.set_result(None)

    def look_now(self) -> asyncio.Future[None]:
        """Resolved when what was ready has been sent, as far as the credit goes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._looks.append(future)
        if self._is_stopped or (self._pushing is not None and self._pushing.done()):
            self._looked(self._looks)
        if self._credit_came is not None and not self._credit_came.done():
            self._credit_came.set_result(None)
        if self._patient is not None:
            self._patient.cancel()
        return future

    def _looked(self, looks: list[asyncio.Future[None]]) -> None:
        for future in looks:
            if not future.done():
                future.set_result(None)
        looks.clear()

    def stop(self) -> None:
        """Nothing more is sent. What is held stays held."""
        if self._pushing is not None:
            self._pushing.cancel()
            self._pushing = None
        self._is_stopped = True
        self._looked(self._looks)

    def let_go(self, *, is_graceful: bool) -> None:
        """The consumer ends; what it held is ready for others."""
        self.stop()
        with contextlib.suppress(SubscriptionNotFound):
            self.handle.abandon(is_graceful=is_graceful)

    # Pushing.

    async def _push(self) -> None:
        while True:
            try:
                await self._has_credit()
                await self._outlet.writable()
                wanted = int(min(self._messages, PULL_MESSAGES, PULL_BYTES / self._message_bytes + 1))
                size = min(self._bytes, PULL_BYTES)
                for portion in await self._pull(wanted, size):
                    await self._outlet.writable()
                    self._deliver(portion)
            except (SubscriptionNotFound, BrokerClosed, PreconditionFailed) as error:
                self._tell_end(error)
                return
            except StaleGeneration:
                self.tell_removal()
                return
            except SparrowError as error:
                _log.warning("delivery-failed", str(error), subscription=self.handle.name)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - the root of a task
                _log.error("delivery-failed", "a delivery met a bug", exc_info=error)
                self._tell_end(SparrowError("the broker met an error of its own"))
                return

    async def _pull(self, wanted: int, size: int) -> list[Portion]:
        """What is ready, else what comes in a while; nothing when somebody wants another look."""
        if self._looks:
            looks, self._looks = self._looks, []
            try:
                found = await self.handle.pull_portions(wanted, 0.0, max_bytes=size)
            except BaseException:
                self._looks += looks
                raise
            if found:
                self._looks += looks
                return found
            self._looked(looks)
            if self._looks:
                return []
        pull = self.handle.pull_portions(wanted, _PULL_S, max_bytes=size)
        self._patient = asyncio.get_running_loop().create_task(pull)
        try:
            return await self._patient
        except asyncio.CancelledError:
            if not self._looks or self._pushing is None:
                raise
            return []
        finally:
            self._patient = None

    async def _has_credit(self) -> None:
        while self._messages <= 0 or self._bytes <= 0:
            self._looked(self._looks)
            self._credit_came = asyncio.get_running_loop().create_future()
            await self._credit_came

    def _deliver(self, portion: Portion) -> None:
        run = portion.run
        held = portion.rows.select(portion.page.held)
        for rows in [held] if portion.page.size_bytes <= DELIVER_BYTES_MAX else _cut(held):
            count = rows.num_rows
            size = rows.column("data").total_values_length
            self._messages -= count
            self._bytes -= size
            self._message_bytes += (max(1.0, size / count) - self._message_bytes) / 4
            head = Deliver(
                self.number,
                portion.topic,
                run.stream.topic_id,
                run.stream.partition,
                run.head,
                run.start_offset,
                run.deadline_us,
                _attempts(run.attempts, rows) if run.attempts else {},
            )
            body = rows.serialize()
            self._outlet.send(heads.encode(head, None, _schema(rows), body, _END_OF_STREAM))

    def _tell_end(self, error: SparrowError) -> None:
        """The consumer cannot go on by itself."""
        self._looked(self._looks)
        error.details["consumer"] = self.number
        self._outlet.send(heads.encode(heads.error(error)))

    def tell_removal(self) -> None:
        """The member is one no longer."""

    # Settling.

    async def settle(self, head: Settle) -> list[Any]:
        """What could not be settled."""
        names, refused = _names(head.leases)
        if head.wait and not head.leases:
            await self.handle.flush()
            return []
        if head.kind == ACK:
            found = await self.handle.ack_names(names, wait=head.wait)
        elif head.kind == NACK:
            found = await self.handle.nack_names(
                names, delay_s=head.delay_s, reason=head.reason, retry=head.retry, wait=head.wait
            )
        elif head.kind == RETURN:
            self.handle.return_names(names)
            found = []
        else:
            raise InvalidArgument(f"messages are settled by 1 (ack), 2 (nack) or 3 (return), not {head.kind}")
        return [*refused, *_refused(found)][:REFUSED_MAX]

    def extend(self, head: Extend) -> list[Any]:
        """What could not be extended."""
        names, refused = _names(head.leases)
        found = self.handle.extend_names(names, head.seconds)
        return [*refused, *_refused(found)][:REFUSED_MAX]

    async def commit(self, head: Commit) -> None:
        if head.metadata:
            raise InvalidArgument("only a member of a group can commit metadata")
        await self.handle.commit(head.topic, head.partition, head.offset)

    async def leave(self) -> None:
        """Ends with a goodbye."""
        self.stop()
        await self.handle.close()


class Member(Consumer):
    """A consumer with a seat in a group."""

    handle: BrokerMember

    def __init__(self, number: int, handle: BrokerMember, outlet: Outlet) -> None:
        super().__init__(number, handle, outlet)
        self.is_removed = False
        self._told = self._state()
        handle.on_generation = self.beat

    def _state(self) -> tuple[int, list[tuple[str, int]]]:
        return self.handle.generation, [(each.topic, each.partition) for each in self.handle.assignment]

    def to_result(self) -> dict[str, Any]:
        """What the client is told when it has joined."""
        generation, assignment = self._told
        return {
            "consumer": self.number,
            "incarnation": self.handle.incarnation,
            "generation": generation,
            "assignment": assignment,
        }

    def beat(self, status: str = "") -> None:
        """Its client lives. It takes up what has changed, and tells of it."""
        if self.is_removed:
            return
        try:
            self.handle.beat(status)
            self.look()
        except StaleGeneration:
            self.tell_removal()
        except SubscriptionNotFound as error:
            self.is_removed = True
            self.stop()
            self._tell_end(error)

    def look(self) -> None:
        """Tells of a change of its share."""
        state = self._state()
        if state != self._told:
            self._told = state
            self._outlet.send(heads.encode(Rebalance(self.number, *state)))

    def tell_removal(self) -> None:
        if not self.is_removed:
            self.is_removed = True
            self.stop()
            generation, _ = self._told
            self._outlet.send(heads.encode(Rebalance(self.number, generation, [], must_rejoin=True)))

    async def commit(self, head: Commit) -> None:
        await self.handle.commit(head.topic, head.partition, head.offset, metadata=head.metadata)

    async def leave(self) -> None:
        self.stop()
        self.is_removed = True
        with contextlib.suppress(StaleGeneration):
            await self.handle.leave()


class Consumers:
    """All consumers of one connection, by their number."""

    def __init__(self, broker: Broker, outlet: Outlet, gate: Gate) -> None:
        self._broker = broker
        self._gate = gate
        self._outlet = outlet
        self._by_number: dict[int, Consumer] = {}
        self._members: list[Member] = []
        self._last = 0
        self._is_over = False

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def has_members(self) -> bool:
        return bool(self._members)

    def get(self, number: int) -> Consumer:
        found = self._by_number.get(number)
        if found is None:
            raise InvalidArgument(f"this connection has no consumer {number}")
        return found

    async def consume(self, head: Consume) -> dict[str, Any]:
        await self._gate.check_subscription(head.subscription)
        handle = await self._broker.subscription(head.subscription)
        consumer = Consumer(self._next(), handle, self._outlet)
        self._keep(consumer, head.credit_messages, head.credit_bytes)
        return {"consumer": consumer.number}

    async def join(self, head: JoinGroup) -> dict[str, Any]:
        await self._gate.check_subscription(head.subscription)
        number = self._next()
        handle = await self._broker.subscription(head.subscription)
        seat = await handle.join(
            head.member,
            max_in_flight=head.max_in_flight,
            is_static=head.is_static,
            instance=head.instance,
            heartbeat="manual",
        )
        member = Member(number, seat, self._outlet)
        self._members.append(member)
        self._keep(member, head.credit_messages, head.credit_bytes)
        return member.to_result()

    def _next(self) -> int:
        if len(self._by_number) >= CONSUMERS_MAX:
            raise InvalidArgument(f"a connection may have {CONSUMERS_MAX} consumers")
        self._last += 1
        return self._last

    def _keep(self, consumer: Consumer, messages: int, size: int) -> None:
        if self._is_over:  # The connection ended while the broker was asked.
            consumer.let_go(is_graceful=False)
            return
        self._by_number[consumer.number] = consumer
        consumer.add_credit(messages, size)
        # After the reply, so that no delivery comes before its consumer is known.
        asyncio.get_running_loop().call_soon(self._start, consumer)

    def _start(self, consumer: Consumer) -> None:
        if consumer.number in self._by_number:
            consumer.start()

    def credit(self, head: Credit) -> None:
        """More credit; for a consumer that has just ended it means nothing."""
        found = self._by_number.get(head.consumer)
        if found is not None:
            found.add_credit(head.messages, head.bytes)

    async def look_for(self, number: int) -> None:
        """Returns when what was ready for a consumer has been sent."""
        await self.get(number).look_now()

    def unsubscribe(self, number: int, *, is_graceful: bool) -> None:
        self._drop(number).let_go(is_graceful=is_graceful)

    async def leave(self, number: int) -> None:
        await self._drop(number).leave()

    def _drop(self, number: int) -> Consumer:
        consumer = self.get(number)
        del self._by_number[number]
        if isinstance(consumer, Member):
            self._members.remove(consumer)
        return consumer

    def beat(self, status: str = "") -> None:
        """The client lives."""
        for member in self._members:
            member.beat(status)

    def look(self) -> None:
        """Tells members what has changed without their doing."""
        for member in self._members:
            if not member.is_removed:
                with contextlib.suppress(SparrowError):
                    member.look()

    def stop(self) -> None:
        """No more deliveries."""
        for consumer in self._by_number.values():
            consumer.stop()

    def let_go(self, *, is_graceful: bool) -> None:
        """The connection ends."""
        for consumer in self._by_number.values():
            consumer.let_go(is_graceful=is_graceful)
        self._by_number.clear()
        self._members.clear()
        self._is_over = True


# From rows to frames.


def _cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows in portions that fit into a frame."""
    if rows.num_rows > 1 and rows.nbytes > DELIVER_BYTES_MAX:
        half = rows.num_rows // 2
        yield from _cut(rows.slice(0, half))
        yield from _cut(rows.slice(half))
    else:
        yield rows


_schemas: dict[tuple[str, ...], pa.Buffer] = {}


def _schema(rows: pa.RecordBatch) -> pa.Buffer:
    """The schema message that opens the IPC stream."""
    names = tuple(rows.schema.names)
    found = _schemas.get(names)
    if found is None:
        found = _schemas[names] = rows.schema.serialize()
    return found


def _attempts(attempts: dict[int, int], rows: pa.RecordBatch) -> dict[int, int]:
    """Those of a run that these rows are about."""
    offsets = rows.column("offset")
    first, last = offsets[0].as_py(), offsets[len(offsets) - 1].as_py()
    return {offset: attempt for offset, attempt in attempts.items() if first <= offset <= last}


# From ranges to names.


def _names(leases: Sequence[tuple[str, list[int]]]) -> tuple[AckNames, list[Any]]:
    """What is to be settled, and leases that are none."""
    groups: list[Any] = []
    refused: list[Any] = []
    total = 0
    for lease, ranges in leases:
        offsets = _offsets(ranges, SETTLE_MAX - total)
        total += len(offsets)
        try:
            groups += name_offsets({lease: offsets}).groups
        except InvalidAckId as error:
            refused.append([lease[:100], offsets[0], error.code, error.message])
    return AckNames(groups, []), refused


def _offsets(ranges: list[int], most: int) -> Any:
    starts, ends = ranges[::2], ranges[1::2]
    if not starts or len(starts) != len(ends):
        raise InvalidArgument("offsets are ranges: start, end, start, end …")
    total = 0
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start < end < 2**63:
            raise InvalidArgument(f"from {start} to {end} is not a range of offsets")
        total += end - start
    if total > most:
        raise InvalidArgument(f"one frame may settle {SETTLE_MAX} messages")
    if len(starts) == 1:
        return range(starts[0], ends[0])
    return [offset for start, end in zip(starts, ends, strict=True) for offset in range(start, end)]


def _refused(found: Sequence[Refusal]) -> Iterator[list[Any]]:
    for ack_id, error in found[:REFUSED_MAX]:
        lease = ack_id.partition(".")[0]
        groups = parse_ack_ids([ack_id]).groups
        offset = groups[0].offsets[0] if groups else -1
        yield [lease, offset, error.code, error.message]
