"""One connection of the binary protocol: frames in, commands under way, frames out (docs/protocol.md).

The socket is read into the frame reader's memory and written from the pieces that make a frame, so that a
payload is not copied on its way. A command with a request id is a task of its own; those without one stand
in a line. What is under way is counted in bytes, per connection and over all of them, and reading pauses
while it is too much. Nothing waits here for a client that does not read: deliveries wait by themselves, and
when too much waits for it the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import metadata
from typing import Any

import pyarrow as pa

from sparrow.broker import logs
from sparrow.model.errors import (
    BrokerClosed,
    InvalidArgument,
    PreconditionFailed,
    ProtocolError,
    ResourceExhausted,
    SparrowError,
    Unauthenticated,
    VersionUnsupported,
)
from sparrow.model.flow import ANYONE, Sender, parse_sender
from sparrow.server import calls, coreframes
from sparrow.server.consumers import Consumers
from sparrow.server.coreframes import CoreFrames
from sparrow.server.gate import Gate
from sparrow.server.house import House
from sparrow.server.line import Line
from sparrow.server.notices import Notices
from sparrow.store.batch import Body
from sparrow.wire import heads
from sparrow.wire.core import Status
from sparrow.wire.frame import FRAME_BYTES_MAX, VERSION, Frame, FrameReader, FrameType, pack

MALFORMED_MAX = 16
"""Frames in a row that do not parse, after which a connection is closed."""
HEAD_BYTES_MAX = 4 * 1024 * 1024
"""A head is unpacked into many small objects, so it may not be as large as a frame."""
UNREAD_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may wait for a client that does not read."""
_WRITE_HIGH_BYTES = 2 * 1024 * 1024
_WRITE_LOW_BYTES = 512 * 1024
_COMMAND_BYTES = 2048
"""What a command costs in memory beside its payload."""
_BEAT_S = 1.0
_SILENT_BEATS = 3
_TOPICS_KNOWN_MAX = 10_000
_PLAIN_BYTES = 16 * 1024
_log = logs.get("tcp")
_VERSION = metadata.version("sparrow-broker")

Reply = heads.Head | bytes | tuple[heads.Head, list[Any]] | None
"""A head, the payload of a RESPONSE, a head with a body, or nothing."""
Handler = Callable[[Any, memoryview], Awaitable[Reply]]

_BESIDE = frozenset([FrameType.PUBLISH, FrameType.PUBLISH_BATCH, FrameType.ACK, FrameType.NACK])
"""Commands that need not run alone when they have no request id."""
_QUIET = frozenset([FrameType.SETTLE, FrameType.EXTEND, FrameType.UNSUBSCRIBE])
"""Commands that are answered only when they have a request id."""
_WHILE_DRAINING = frozenset([*_QUIET, FrameType.LEAVE, FrameType.COMMIT, FrameType.CLOSE, FrameType.ACK])
_SEEN_THROUGH = frozenset([FrameType.SUBSCRIBE, FrameType.CALL, FrameType.CONSUME, FrameType.JOIN_GROUP])
"""Commands that change the catalog or a group: they end by themselves, also when nobody waits for them."""


class Connection(asyncio.BufferedProtocol):
    """See the module's text."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._broker = house.broker
        self._transport: Any = None
        self._reader = FrameReader()
        self.session = secrets.token_hex(8)
        self.peer = ""
        self.made_at_s = self.heard_at_s = house.clock.monotonic_s()
        self._beat_at_s = 0.0
        self._sender: Sender = ANYONE
        self._has_greeted = False
        self._has_said_goodbye = False
        self._is_draining = False
        self._is_lost = False
        self._is_deaf = False
        """After a fault that closes the connection: whatever else arrives is not looked at."""
        self._malformed = 0
        self._notices = Notices(self.send)
        self._tasks: dict[asyncio.Task[Any], tuple[int, int]] = {}
        """Commands under way, with the types and sizes of their frames."""
        self._held_bytes = 0
        self.unread_bytes = 0
        self._reserved_bytes = 0
        self._is_paused = False
        self._readable: asyncio.Future[None] | None = None
        """Resolved when the client has read enough; none while it keeps up."""
        self._fetching = asyncio.Lock()
        self._known_topics: set[str] = set()
        self._first_publishes: dict[str, asyncio.Future[None]] = {}
        self._gate = Gate(self._broker)
        self.consumers = Consumers(self._broker, self, self._gate)
        self.core = CoreFrames(self._broker, self, house.clock, self.session, self._gate)
        self._line = Line(self.send, self._spawn_in_line)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handlers: dict[int, Handler] = {
            FrameType.HELLO: self._hello,
            FrameType.CALL: self._call,
            FrameType.PUBLISH_BATCH: self._publish_batch,
            FrameType.CONSUME: self._consume,
            FrameType.JOIN_GROUP: self._join,
            FrameType.SETTLE: self._settle,
            FrameType.EXTEND: self._extend,
            FrameType.UNSUBSCRIBE: self._unsubscribe,
            FrameType.LEAVE: self._leave,
            FrameType.COMMIT: self._commit,
            FrameType.FETCH: self._fetch,
            FrameType.CLOSE: self._close,
        }

    def __repr__(self) -> str:
        return f"<Connection {self.session} from {self.peer}>"

    # The transport.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES, low=_WRITE_LOW_BYTES)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "")
        self._house.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.heard_at_s = self._house.clock.monotonic_s()
        try:
            frames = self._reader.received(nbytes)
        except ProtocolError as error:
            _log.warning("framing-broken", error.message, peer=self.peer, session=self.session)
            self.refuse(error)
            return
        self._count_reserved()
        for frame in frames:
            self._receive(frame)
        if frames and self.consumers.has_members and self.heard_at_s >= self._beat_at_s:
            self._beat_at_s = self.heard_at_s + _BEAT_S
            self.consumers.beat()
        self.look_at_reading()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._readable is None:
            self._readable = asyncio.get_running_loop().create_future()
        self._count_unread()

    def resume_writing(self) -> None:
        readable, self._readable = self._readable, None
        if readable is not None and not readable.done():
            readable.set_result(None)
        self._count_unread()

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._house.hold(-self.burden_bytes)
        self.unread_bytes = self._reserved_bytes = 0
        is_graceful = self._has_said_goodbye or self._is_draining
        self.consumers.let_go(is_graceful=is_graceful)
        for handle in self.core.let_go(is_graceful=is_graceful):
            self._house.see_through(coreframes.unsubscribe(handle))
        for task, (kind, _) in list(self._tasks.items()):
            if kind not in _SEEN_THROUGH:
                task.cancel()
            else:
                self._house.keep(task)
        if self._readable is not None:
            self._readable.cancel()
        self._house.forget(self)
        if not self.closed.done():
            self.closed.set_result(None)
        _log.debug("connection-closed", "", peer=self.peer, session=self.session)

    # Writing.

    def send(self, pieces: list[Any]) -> None:
        """Hands a frame to the network; large pieces are not copied."""
        if self._is_lost:
            return
        if len(pieces) <= 2:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)
        if self._readable is not None:
            self._count_unread()
            if self.unread_bytes > UNREAD_BYTES_MAX:
                self.give_up("the client does not read")
            else:
                self._house.make_room()

    async def writable(self) -> None:
        """Returns while the client keeps up with reading."""
        while self._readable is not None:
            await asyncio.shield(self._readable)

    def _count_unread(self) -> None:
        if not self._is_lost:
            unread = self._transport.get_write_buffer_size()
            self._house.hold(unread - self.unread_bytes)
            self.unread_bytes = unread

    def _count_reserved(self) -> None:
        reserved = self._reader.reserved_bytes
        if reserved != self._reserved_bytes:
            self._house.hold(reserved - self._reserved_bytes)
            self._reserved_bytes = reserved

    @property
    def burden_bytes(self) -> int:
        """What is held although nothing is done: a frame half received, answers that are not read."""
        return self.unread_bytes + self._reserved_bytes

    def give_up(self, why: str) -> None:
        """Ends the connection at once; what waits for the client is dropped."""
        if not self._is_lost:
            _log.warning("connection-cut", why, peer=self.peer, session=self.session)
            self._transport.abort()
            self.connection_lost(None)

    def refuse(self, error: SparrowError, request_id: int | None = None) -> None:
        """Says why, and closes."""
        self._is_deaf = True
        self.send(heads.encode(heads.error(error, is_fatal=True), request_id))
        self._transport.close()

    # Reading.

    def look_at_reading(self) -> None:
        """Pauses reading while too much is under way, and goes on when it is not."""
        if self._is_lost:
            return
        is_own = self._held_bytes > self._house.settings.connection_bytes_max
        is_shared = False
        if self._house.is_full and (self._held_bytes or self._reserved_bytes):
            # Commands under way make room by themselves; if there are none, nothing else would.
            is_shared = self._house.command_bytes > 0
            if is_shared:
                self._house.wait_for_room(self)
            else:
                self._house.make_room()
        if self._transport.is_closing():
            return
        if (is_own or is_shared) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        elif self._is_paused and not (is_own or is_shared):
            self._is_paused = False
            self.heard_at_s = self._house.clock.monotonic_s()
            self._transport.resume_reading()

    def _receive(self, frame: Frame) -> None:
        if self._is_deaf:
            return
        kind = frame.type
        try:
            if coreframes.is_core(kind):
                self._check_core(frame)
                self._begin(frame, self.core.parse(frame, self._sender))
            else:
                head, body = heads.decode(frame, HEAD_BYTES_MAX)
                self._receive_extended(frame, head, body)
        except InvalidArgument as error:
            self._complain(frame, error)
        except SparrowError as error:
            self._answer_at_once(frame, error)
        else:
            self._malformed = 0

    def _receive_extended(self, frame: Frame, head: Any, body: memoryview) -> None:
        kind = frame.type
        if kind == FrameType.HEARTBEAT:
            self._heartbeat(frame, head)
            return
        if not self._has_greeted and kind != FrameType.HELLO:
            raise PreconditionFailed("the first frame is HELLO", hint="Say HELLO, or use core frames only.")
        if self._is_draining and kind not in _WHILE_DRAINING:
            raise BrokerClosed("the broker is about to stop", hint="Connect again in a moment.")
        if kind == FrameType.CREDIT:
            self.consumers.credit(head)
            if frame.request_id is not None:
                self._begin(frame, partial(self._look, head))
            return
        handler = self._handlers.get(kind)
        if handler is None:
            raise InvalidArgument(f"frames of type {kind} are sent by the broker only")
        if kind == FrameType.PUBLISH_BATCH:
            # Also those without a payload to speak of: what comes first is stored first.
            self._begin(frame, partial(self._in_order, head.topic, partial(handler, head, body)))
        else:
            self._begin(frame, partial(handler, head, body))

    def _check_core(self, frame: Frame) -> None:
        self._gate.check_alive()
        if self._is_draining and frame.type not in _WHILE_DRAINING:
            raise BrokerClosed("the broker is about to stop", hint="Connect again in a moment.")

    def _heartbeat(self, frame: Frame, head: heads.Beat) -> None:
        if self.consumers.has_members:
            self.consumers.beat(head.status)

        async def beat() -> Reply:
            return bytes([Status.DONE])

        self._begin(frame, beat)

    def _complain(self, frame: Frame, error: InvalidArgument) -> None:
        self._malformed += 1
        if self._malformed < MALFORMED_MAX:
            self._answer_at_once(frame, error)
            return
        _log.warning(
            "frames-malformed",
            f"{MALFORMED_MAX} frames in a row do not parse",
            peer=self.peer,
            session=self.session,
            last=error.message,
        )
        self.refuse(error, frame.request_id)

    def _answer_at_once(self, frame: Frame, error: SparrowError) -> None:
        """A frame that is refused before anything is done for it; answered in its turn."""

        async def refuse() -> Reply:
            if coreframes.is_core(frame.type):
                return coreframes.refusal(frame.type, coreframes.status_of(error))
            return heads.error(error)

        self._begin(frame, refuse, is_refused=True)

    # Commands.

    def _begin(self, frame: Frame, work: Callable[[], Awaitable[Reply]], *, is_refused: bool = False) -> None:
        """Starts a command: at once, or in its turn when it has no request id."""
        kind, number = frame.type, frame.request_id
        size = len(frame.payload) + _COMMAND_BYTES
        self._held_bytes += size
        self._house.hold_command(size)
        if number is None and kind not in _QUIET:
            is_alone = kind not in _BESIDE and not is_refused
            self._line.add(partial(self._do_in_line, kind, size, work), is_alone=is_alone)
            return
        self._spawn(self._do_and_send(kind, number, work), kind, size)

    def _spawn(self, work: Any, kind: int, size: int) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = (kind, size)
        task.add_done_callback(self._done)
        return task

    def _spawn_in_line(self, work: Any) -> asyncio.Task[None]:
        return self._spawn(work, FrameType.CALL, 0)

    def _done(self, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before it begins runs none of its code.
        self._let_go(self._tasks.pop(task)[1])
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("command-failed", "a command met a bug", exc_info=error)

    def _let_go(self, size: int) -> None:
        self._held_bytes -= size
        self._house.hold_command(-size)
        if self._is_paused:
            self.look_at_reading()

    async def _do_and_send(self, kind: int, number: int | None, work: Callable[[], Awaitable[Reply]]) -> None:
        pieces = await self._do(kind, number, work)
        if pieces and number is not None:
            self.send(pieces)

    async def _do_in_line(self, kind: int, size: int, work: Callable[[], Awaitable[Reply]]) -> list[Any]:
        try:
            return await self._do(kind, None, work)
        finally:
            self._let_go(size)

    async def _do(self, kind: int, number: int | None, work: Callable[[], Awaitable[Reply]]) -> list[Any]:
        """Carries a command out; the pieces of its answer."""
        reply: Reply
        try:
            reply = await work()
        except SparrowError as error:
            reply = self._failed(kind, error)
        except Exception as error:  # noqa: BLE001 - the root of a command
            _log.error("command-failed", "a command met a bug", exc_info=error, type=kind)
            reply = self._failed(kind, SparrowError("the broker met an error of its own"))
        try:
            return _encode(reply, number)
        except (ProtocolError, TypeError, ValueError, OverflowError) as error:
            why = ResourceExhausted(f"the answer does not fit into a frame: {error}", hint="Ask for less.")
            return _encode(heads.error(why), number)

    def _failed(self, kind: int, error: SparrowError) -> Reply:
        if coreframes.is_core(kind):
            return coreframes.refusal(kind, coreframes.status_of(error))
        return heads.error(error)

    async def _in_order(self, topic: str, work: Callable[[], Awaitable[Reply]]) -> Reply:
        """Publishes enter the broker in the order in which they came. They do so by themselves once their
        topic exists; until the first one has found or made it, later ones stand behind it."""
        if topic in self._known_topics:
            return await work()
        first = self._first_publishes.get(topic)
        if first is not None:
            await asyncio.shield(first)
            return await work()
        first = self._first_publishes[topic] = asyncio.get_running_loop().create_future()
        try:
            reply = await work()
            if len(self._known_topics) >= _TOPICS_KNOWN_MAX:
                self._known_topics.clear()
            self._known_topics.add(topic)
            return reply
        finally:
            del self._first_publishes[topic]
            first.set_result(None)

    # Extended frames.

    async def _hello(self, head: heads.Hello, body: memoryview) -> Reply:
        if self._has_greeted:
            raise PreconditionFailed("HELLO was said before")
        try:
            if VERSION not in head.versions:
                raise VersionUnsupported("no version is spoken by both ends", versions=[VERSION])
            token = self._gate.enter(head.token)
            self._sender = parse_sender(head.publisher or None, head.priority_class, token)
        except SparrowError as error:
            _log.warning("client-refused", error.message, peer=self.peer, client=head.client[:100])
            asyncio.get_running_loop().call_soon(self._close_softly)
            self._is_deaf = True
            return heads.error(error, is_fatal=True)
        self._has_greeted = True
        _log.debug("client-greeted", "", peer=self.peer, session=self.session, client=head.client[:100])
        settings = self._house.settings
        return heads.Welcome(
            VERSION,
            f"sparrow {_VERSION}",
            self.session,
            FRAME_BYTES_MAX,
            settings.connection_bytes_max,
            settings.heartbeat_s,
        )

    async def _call(self, head: heads.Call, body: memoryview) -> Reply:
        if head.verb == "stage":
            return heads.Result(await self._gate.stage(head.arguments, body, self._sender))
        return heads.Result(await self._gate.call(head.verb, head.arguments))

    def notices(self) -> Notices | None:
        """Whom to tell what nobody asked for; none before HELLO and after the end."""
        return self._notices if self._has_greeted and not self._is_lost else None

    async def _publish_batch(self, head: heads.PublishBatch, body: memoryview) -> Reply:
        self._gate.check_publish(head.topic)
        self._notices.published(head.topic)
        producer = (head.producer_id, head.producer_epoch) if head.producer_id else None
        found = await self._broker.publish_encoded(
            head.topic,
            Body(pa.py_buffer(body), head.crc, head.record_count, head.columns, head.codec),
            partition=head.partition,
            partitions=head.partitions,
            producer=producer,
            base_sequence=head.base_sequence if producer and head.base_sequence >= 0 else None,
            sender=self._sender,
        )
        runs, rows = found.in_runs()
        return heads.WireReceipts(
            found.topic,
            found.topic_id,
            [heads.WireRun(*run) for run in runs],
            None if rows is None else [*rows],
        )

    async def _consume(self, head: heads.Consume, body: memoryview) -> Reply:
        return heads.Result(await self.consumers.consume(head))

    async def _look(self, head: heads.Credit) -> Reply:
        await self.consumers.look_for(head.consumer)
        return heads.Result()

    async def _join(self, head: heads.JoinGroup, body: memoryview) -> Reply:
        return heads.Result(await self.consumers.join(head))

    async def _settle(self, head: heads.Settle, body: memoryview) -> Reply:
        return heads.Result(await self.consumers.get(head.consumer).settle(head))

    async def _extend(self, head: heads.Extend, body: memoryview) -> Reply:
        return heads.Result(self.consumers.get(head.consumer).extend(head))

    async def _unsubscribe(self, head: heads.Unsubscribe, body: memoryview) -> Reply:
        self.consumers.unsubscribe(head.consumer, is_graceful=head.is_graceful)
        return heads.Result()

    async def _leave(self, head: heads.Leave, body: memoryview) -> Reply:
        await self.consumers.leave(head.consumer)
        return heads.Result()

    async def _commit(self, head: heads.Commit, body: memoryview) -> Reply:
        await self.consumers.get(head.consumer).commit(head)
        return heads.Result()

    async def _fetch(self, head: heads.Fetch, body: memoryview) -> Reply:
        self._gate.check_read(head.topic)
        # One at a time, and only while the client reads: each may be as large as a frame.
        async with self._fetching:
            await self.writable()
            return await calls.fetch(self._broker, head)

    async def _close(self, head: heads.Close, body: memoryview) -> Reply:
        """Goodbye: what was asked before is answered first."""
        self._has_said_goodbye = True
        self._is_draining = True
        self.consumers.stop()
        self.core.stop()
        await self._until_idle(self._house.settings.drain_s)
        asyncio.get_running_loop().call_soon(self._close_softly)
        return heads.Result()

    # The end.

    async def _until_idle(self, timeout_s: float) -> None:
        """Returns when no other command is under way, or after a time."""
        current = asyncio.current_task()
        for task, (kind, _) in list(self._tasks.items()):
            if kind == FrameType.FETCH:  # It may wait for messages; whoever leaves does not.
                task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while others := [task for task in self._tasks if task is not current]:
                    await asyncio.wait(others)

    def _close_softly(self) -> None:
        """Closes once everything is written."""
        if not self._is_lost:
            self._is_deaf = True
            self._transport.close()

    async def drain(self) -> None:
        """The broker stops: answers what is under way, and closes."""
        if not self._is_draining:
            self._is_draining = True
            self.consumers.stop()
            self.core.stop()
            self.send(heads.encode(heads.Flow("draining")))
        await self._until_idle(self._house.settings.drain_s)
        self._close_softly()

    def look(self, now_s: float) -> None:
        """Once a second: is the client alive, does it read, what has changed for its members."""
        if self._is_lost:
            return
        if self.unread_bytes:
            self._count_unread()
        silent_s = now_s - self.heard_at_s
        is_heard = not self._is_paused or self._is_deaf
        if is_heard and silent_s > _SILENT_BEATS * self._house.settings.heartbeat_s:
            self.give_up(f"the client was silent for {silent_s:.0f} s")
            return
        if silent_s > _BEAT_S:
            self._reader.relax()
        if self._has_greeted and not self._gate.is_alive:
            self.refuse(Unauthenticated("the token is no longer good, or one is wanted now"))
            return
        self.consumers.look()
        self.core.forget()


def _encode(reply: Reply, number: int | None) -> list[Any]:
    if reply is None:
        return []
    if isinstance(reply, bytes):
        return pack(FrameType.RESPONSE, [reply], number)
    if isinstance(reply, tuple):
        head, body = reply
        return heads.encode(head, number, *body)
    return heads.encode(reply, number)
