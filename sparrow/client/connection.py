"""One TCP connection to a broker: frames in and out, answers to whom they belong, signs of life.

It ends once, whatever the reason: those who wait for answers get ``ConnectionLost``, and whoever made it is
told. It knows nothing of topics and subscriptions; what the broker sends by itself goes to ``on_frame``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from sparrow.client.options import Options, Target
from sparrow.model.errors import ConnectionLost, InvalidArgument, ProtocolError, SparrowError
from sparrow.wire import heads
from sparrow.wire.frame import Frame, FrameReader, FrameType
from sparrow.wire.heads import Head

_REQUESTS = 2**32
_SILENCE = 3
"""Heartbeats without a byte from the broker after which it counts as gone; the broker does the same."""

Answer = tuple[Any, memoryview]
"""Head and body of a reply."""


class Connection(asyncio.BufferedProtocol):
    """See the module's text."""

    def __init__(
        self, target: Target, on_frame: Callable[[Any, memoryview], None], on_lost: Callable[[], None]
    ) -> None:
        self._target = target
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._transport: Any = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._then: dict[int, Callable[[Any], None]] = {}
        self._beat: asyncio.TimerHandle | None = None
        self._has_sent = self._has_received = False
        self._silences = 0
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.problem: SparrowError | None = None
        self.welcome: heads.Welcome | None = None
        self.is_draining = False
        """The broker takes no new commands: it is about to stop."""

    @classmethod
    async def open(
        cls,
        target: Target,
        options: Options,
        on_frame: Callable[[Any, memoryview], None],
        on_lost: Callable[[], None],
    ) -> Connection:
        """Connects and says hello; refusals of the broker are raised as they are."""
        loop = asyncio.get_running_loop()
        context = None
        if target.is_secure:
            context = options.tls or ssl.create_default_context()
        made = cls(target, on_frame, on_lost)
        try:
            async with asyncio.timeout(options.timeout_s):
                await loop.create_connection(lambda: made, target.host, target.port, ssl=context)
                hello = heads.Hello(
                    client=options.client,
                    publisher=options.publisher,
                    priority_class=options.priority_class,
                    token=options.token,
                )
                head, _ = await made.request(hello)
        except (OSError, TimeoutError) as error:
            made.abort()
            raise ConnectionLost(
                f"{target} cannot be reached: {error or 'no answer in time'}",
                hint="Start a broker there with `sparrow up`, or check the address.",
            ) from error
        except BaseException as error:
            made.abort()
            if isinstance(error, ConnectionLost) and made.problem is not None:
                raise made.problem from error
            raise
        if not isinstance(head, heads.Welcome):
            made.abort()
            raise ProtocolError(f"{target} answered HELLO with {type(head).__name__}")
        made._welcomed(head)
        return made

    def _welcomed(self, welcome: heads.Welcome) -> None:
        self.welcome = welcome
        self._beat = self._loop.call_later(welcome.heartbeat_s / 2, self._tick, welcome.heartbeat_s / 2)

    @property
    def is_open(self) -> bool:
        return not self.closed.done()

    # Sending.

    def send(self, head: Head, *body: Any) -> None:
        """A frame that has no reply."""
        self._write(heads.encode(head, None, *body))

    def submit(
        self, head: Head, *body: Any, then: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Answer]:
        """A command; the future is its reply, an ERROR frame its exception. ``then`` is called with the head
        of the reply before any later frame is looked at."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._number = (self._number + 1) % _REQUESTS
        pieces = heads.encode(head, self._number, *body)
        if not self.is_open:
            future.set_exception(self._lost())
            return future
        self._waiting[self._number] = future
        if then is not None:
            self._then[self._number] = then
        self._write(pieces)
        return future

    async def request(self, head: Head, *body: Any) -> Answer:
        """Sends a command and waits for its reply."""
        return await self.submit(head, *body)

    def _write(self, pieces: list[Any]) -> None:
        if self.is_open and self._transport is not None:
            self._has_sent = True
            if len(pieces) > 1 or len(pieces[0]) > 1024:
                self._transport.writelines(pieces)
            else:
                self._transport.write(pieces[0])

    # Receiving: asyncio calls these.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> Any:
        return self._reader.buffer()

    def buffer_updated(self, count: int) -> None:
        self._has_received = True
        try:
            for frame in self._reader.received(count):
                self._dispatch(frame)
        except SparrowError as error:
            # What follows cannot be understood.
            self.problem = error
            self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        self.closed.set_result(None)
        if self._beat is not None:
            self._beat.cancel()
        lost = self._lost(error)
        waiting, self._waiting, self._then = self._waiting, {}, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(lost)
                future.exception()  # Not everybody who asked still listens.
        self._on_lost()

    def _lost(self, error: Exception | None = None) -> ConnectionLost:
        cause = self.problem or error
        reason = f": {cause}" if cause else ""
        return ConnectionLost(f"the connection to {self._target} is lost{reason}")

    def _dispatch(self, frame: Frame) -> None:
        if frame.type == FrameType.RESPONSE:
            head, body = None, frame.payload
        else:
            head, body = heads.decode(frame)
        if frame.request_id is not None:
            self._answer(frame.request_id, head, body)
        elif isinstance(head, heads.WireError) and head.is_fatal:
            self.problem = head.to_exception()
        elif head is not None:
            if isinstance(head, heads.Flow) and head.kind == "draining":
                self.is_draining = True
            self._on_frame(head, body)

    def _answer(self, request_id: int, head: Any, body: memoryview) -> None:
        future, then = self._waiting.pop(request_id, None), self._then.pop(request_id, None)
        if then is not None and not isinstance(head, heads.WireError):
            then(head)
        if future is None or future.done():
            return
        if isinstance(head, heads.WireError):
            future.set_exception(head.to_exception())
        else:
            future.set_result((head, body))

    # Signs of life, and the end.

    def _tick(self, every_s: float) -> None:
        if not self._has_sent or not self._has_received:
            self.submit(heads.Beat()).add_done_callback(_hear)
        self._silences = 0 if self._has_received else self._silences + 1
        self._has_sent = self._has_received = False
        if self._silences > 2 * _SILENCE:
            self.problem = ConnectionLost(f"{self._target} has been silent for too long")
            self.abort()
        elif self.is_open:
            self._beat = self._loop.call_later(every_s, self._tick, every_s)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Says goodbye, so that what is held counts as given back, and closes."""
        if self.is_open:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.request(heads.Close())
            except (SparrowError, TimeoutError):
                pass
            self.abort()

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()
            self.connection_lost(None)


def _hear(done: asyncio.Future[Answer]) -> None:
    """What became of it is no news."""
    if not done.cancelled():
        done.exception()


def refuse(message: str) -> InvalidArgument:
    """What a program asks for and a network cannot do."""
    return InvalidArgument(message, hint="Open the broker in this process, with sparrow.open, for that.")
