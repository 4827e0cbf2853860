"""A direct line to a broker: one blocking socket, no event loop and nothing that is slow to import.

It is for processes that live for a moment, such as the one that Spark starts to commit a micro-batch. Several
commands may be on their way at once. When the connection breaks it is made again, with growing pauses until
the patience is used up, and every command without an answer is sent again in its order: so only commands may
be given to it that can be carried out twice.
"""

from __future__ import annotations

import random
import socket
import time
from types import TracebackType
from typing import Any, Self

from sparrow.client.options import parse_url
from sparrow.model.errors import BrokerClosed, ConnectionLost, SparrowError
from sparrow.wire import heads
from sparrow.wire.frame import FrameReader, FrameType

_CONNECT_S = 5.0
_SEND_S = 120.0
"""A broker that has too much to do does not read for a while; one that does not for so long is gone."""
_PAUSE_S = (0.05, 2.0)


class DirectLine:
    """See the module's text. One thread uses it."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        client: str = "",
        publisher: str = "",
        priority_class: str = "normal",
        patience_s: float = 30.0,
    ) -> None:
        self._target = parse_url(url)
        self._hello = heads.Hello(
            client=client, publisher=publisher, priority_class=priority_class, token=token
        )
        self._patience_s = patience_s
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._beat_s = 10.0
        self._next_id = 0
        self._unanswered: dict[int, tuple[heads.Head, tuple[Any, ...]]] = {}
        self._answers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the next command makes a new one. What is without an answer is given up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._unanswered.clear()
        self._answers.clear()

    def call(self, verb: str, **arguments: Any) -> Any:
        """Calls a verb of the broker; what it returned."""
        return self.request(heads.Call(verb, arguments)).value

    def request(self, head: heads.Head, *body: Any) -> Any:
        """Sends a command and waits for its answer; one that is refused for now is sent again after a while,
        until the patience is used up."""
        until_s = time.monotonic() + self._patience_s
        pause_s, longest_s = _PAUSE_S
        while True:
            try:
                return self.answer(self.submit(head, *body))
            except SparrowError as error:
                wait_s = max(pause_s, float(error.details.get("retry_after_s") or 0.0))
                is_over = time.monotonic() + wait_s > until_s
                if not error.retryable or isinstance(error, ConnectionLost) or is_over:
                    raise
            time.sleep(wait_s)
            pause_s = min(longest_s, 2 * pause_s)

    def submit(self, head: heads.Head, *body: Any) -> int:
        """Sends a command; its number, which is good for one ``answer``."""
        self._next_id += 1
        number = self._next_id
        self._unanswered[number] = (head, body)
        if self._socket is None:
            self._mend(None)
        else:
            try:
                self._send(number)
            except OSError as error:
                self._mend(error)
        return number

    def answer(self, number: int) -> Any:
        """Waits for the answer to a command: its head, or the error that it carries."""
        while number not in self._answers:
            try:
                self._receive()
            except OSError as error:
                self._mend(error)
        found = self._answers.pop(number)
        if isinstance(found, heads.WireError):
            raise found.to_exception()
        return found

    # The socket.

    def _send(self, number: int) -> None:
        assert self._socket is not None
        head, body = self._unanswered[number]
        self._socket.settimeout(_SEND_S)
        for piece in heads.encode(head, number, *body):
            self._socket.sendall(piece)

    def _receive(self) -> None:
        """Reads what comes; says something when nothing came for a while, so as not to be taken for dead."""
        if self._socket is None:
            raise ConnectionResetError("not connected")
        try:
            self._socket.settimeout(self._beat_s)
            count = self._socket.recv_into(self._reader.buffer())
        except TimeoutError:
            for piece in heads.encode(heads.Beat()):
                self._socket.sendall(piece)
            return
        if not count:
            raise ConnectionResetError("the broker closed the connection")
        for frame in self._reader.received(count):
            if frame.type == FrameType.RESPONSE:
                continue
            head, _ = heads.decode(frame)
            if frame.request_id in self._unanswered:
                if isinstance(head, heads.WireError) and head.code == BrokerClosed.code:
                    raise ConnectionResetError("the broker is about to stop")
                del self._unanswered[frame.request_id]
                self._answers[frame.request_id] = head
            elif isinstance(head, heads.WireError) and head.is_fatal:
                raise ConnectionResetError(head.message)

    def _mend(self, error: OSError | None) -> None:
        """Connects, and sends again what has no answer."""
        until_s = time.monotonic() + self._patience_s
        pause_s, longest_s = _PAUSE_S
        while True:
            self._drop()
            try:
                self._connect()
                for number in list(self._unanswered):
                    self._send(number)
            except OSError as problem:
                error = problem
            except SparrowError as problem:
                if not (problem.retryable or isinstance(problem, BrokerClosed)):
                    raise
                error = OSError(str(problem))
            else:
                return
            if time.monotonic() + pause_s > until_s:
                self._drop()
                raise ConnectionLost(f"{self._target} cannot be reached: {error}")
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(longest_s, 2 * pause_s)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._reader = FrameReader()

    def _connect(self) -> None:
        made = socket.create_connection((self._target.host, self._target.port), _CONNECT_S)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._target.is_secure:
                import ssl

                made = ssl.create_default_context().wrap_socket(made, server_hostname=self._target.host)
            for piece in heads.encode(self._hello, 0):
                made.sendall(piece)
            welcome = self._welcome(made)
        except BaseException:
            made.close()
            raise
        self._beat_s = max(0.05, welcome.heartbeat_s / 2)
        self._socket = made

    def _welcome(self, made: socket.socket) -> heads.Welcome:
        while True:
            count = made.recv_into(self._reader.buffer())
            if not count:
                raise ConnectionResetError("the broker closed the connection")
            for frame in self._reader.received(count):
                head, _ = heads.decode(frame)
                if isinstance(head, heads.WireError):
                    raise head.to_exception()
                if isinstance(head, heads.Welcome):
                    return head
