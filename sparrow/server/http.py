"""The HTTP API: one application made of route families, and the server that runs it.

Each family is a module of ``sparrow.server.api`` with a ``routes`` function. What holds for all of them: a
request has an id, which is its correlation id in the log and comes back in ``X-Request-Id``; and everything
that goes wrong has one body, ``{"error": {...}}``, with the code, message and hint of the typed error, also
when the request was not HTTP at all.

The server runs inside the broker's event loop and leaves signals to whoever started the process. An
address is taken by ``bind`` before the broker is opened, so that a taken port is found before a long
recovery; connections are accepted only once ``HttpServer.start`` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import re
import secrets
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.connection import ConnectionInfo
from sparrow.model.errors import (
    AddressUnavailable,
    HeadersTooLarge,
    InvalidArgument,
    RequestTimeout,
    SparrowError,
)
from sparrow.model.settings import Address
from sparrow.server import health
from sparrow.server.api import admin, documents, events, log, metrics, pipelines, tokens
from sparrow.server.api import health as checkups
from sparrow.server.api.family import Api, error_response
from sparrow.server.api.guard import guarded
from sparrow.server.api.origins import parse_origins, shared
from sparrow.server.api.routing import App, ASGIApp, Message, Receive, Route, Scope, Send

FAMILIES: Sequence[ModuleType] = (events, pipelines, log, admin, tokens, metrics, checkups)
"""Modules with ``routes(api)``, beside the health probes."""

SHUTDOWN_TIMEOUT_S = 3
"""How long open requests may go on after a stop, before they are cut."""

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""

HEAD_BYTES_MAX = 64 * 1024
"""Bytes of a request's line and headers."""

HEAD_TIMEOUT_S = 10.0
"""How long a connection may take to say what it wants."""

BODY_TIMEOUT_S = 30.0
"""How long the body of a request may take to arrive."""

IDLE_TIMEOUT_S = 60
"""How long a connection is kept that has been answered and asks nothing."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")


def build(broker: Broker, *, clock: Clock | None = None) -> App:
    """The application of a broker, from its route families."""
    ticking = clock or Clock()
    api = Api(broker, ticking, broker.settings, broker.access, asyncio.Event())
    families = [route for family in FAMILIES for route in family.routes(api)]
    told = documents.routes(api, lambda: app.routes)
    app = compose([*health.routes(broker, ticking), *families, *told], ticking, api.closing)
    app.state.access = broker.access
    app.state.broker = broker
    app.state.origins = parse_origins(broker.settings.access.cors_origins)
    app.on_startup += [broker.telemetry.start, broker.steward.start]
    return app


def compose(routes: Sequence[Route], clock: Clock, closing: asyncio.Event | None = None) -> App:
    """An application of these routes; ``closing`` is set when its server stops."""

    app = App(routes, lambda error: error_response(error, clock))
    app.state.closing = closing or asyncio.Event()
    app.state.clock = clock
    return app


# Requests.


def _identify(app: ASGIApp) -> ASGIApp:
    """Give each request an id: the client's own when it is sane, else a new one."""

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        with logs.correlated(request_id):
            await app(scope, receive, send_with_id)

    return middleware


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            return given if _REQUEST_ID.match(given) else secrets.token_hex(8)
    return secrets.token_hex(8)


class _Connection(H11Protocol):
    """A connection that must say what it wants in time, and whose nonsense is answered as all errors are."""

    clock: Clock
    _overdue: asyncio.TimerHandle | None = None
    _waited_for: Any = None
    """The request whose body is waited for; none while it is a head."""
    _made_at_s = 0.0
    _heard_at_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made_at_s = self._heard_at_s = self.clock.monotonic_s()
        self._wait(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def describe(self) -> ConnectionInfo:
        """The connection as an operator sees it."""
        now_s, client = self.clock.monotonic_s(), self.client or ("", 0)
        return ConnectionInfo(
            listener="http",
            id=f"{id(self):x}",
            address=f"{client[0]}:{client[1]}",
            age_s=round(now_s - self._made_at_s, 3),
            silent_s=round(now_s - self._heard_at_s, 3),
            protocol="http/1.1",
        )

    def handle_events(self) -> None:
        self._heard_at_s = self.clock.monotonic_s()
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                self._stop_waiting()
            elif self._waited_for is not cycle:
                self._stop_waiting()
                self._wait(BODY_TIMEOUT_S, cycle)
        elif self.timeout_keep_alive_task is None:
            self._wait(HEAD_TIMEOUT_S)

    def _wait(self, timeout_s: float, cycle: Any = None) -> None:
        """For the rest of a head, or of the body of a request."""
        if self._overdue is None and not self.transport.is_closing():
            self._waited_for = cycle
            self._overdue = self.loop.call_later(timeout_s, self._give_up, timeout_s)

    def _stop_waiting(self) -> None:
        self._waited_for = None
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self, timeout_s: float) -> None:
        cycle, self._overdue, self._waited_for = self._waited_for, None, None
        if self.transport.is_closing() or (cycle is not None and not cycle.more_body):
            return
        self._refuse(RequestTimeout(f"no whole request came within {timeout_s:g} s"))
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        cause = sys.exception()
        if getattr(cause, "error_status_hint", 400) == 431:
            self._refuse(HeadersTooLarge(f"the head of the request is over {HEAD_BYTES_MAX} bytes"))
        else:
            self._refuse(InvalidArgument(f"this is not an HTTP request: {cause or msg}"))

    def _refuse(self, error: SparrowError) -> None:
        self._stop_waiting()
        with logs.correlated(secrets.token_hex(8)):
            made = error_response(error, self.clock)
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers += [("content-length", str(len(made.content))), ("x-request-id", logs.correlation_id())]
        events = [
            h11.Response(status_code=made.status_code or 400, headers=headers),
            h11.Data(data=made.content),
            h11.EndOfMessage(),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # An answer is under way already.
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


# The server.


def bind(address: Address) -> socket.socket:
    """A socket that has the address but does not listen yet."""
    try:
        family, kind, protocol, _, target = _resolve(address)
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unavailable(address, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(target)
    except OSError as error:
        bound.close()
        raise _unavailable(address, error) from error
    bound.setblocking(False)
    return bound


def _resolve(address: Address) -> tuple[Any, ...]:
    """The first way to listen there; IPv4 first, since that is what people mean by localhost."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return min(found, key=lambda entry: entry[0] != socket.AF_INET)


def _unavailable(address: Address, error: OSError) -> AddressUnavailable:
    reasons = {
        errno.EADDRINUSE: "another process listens there",
        errno.EACCES: "this user may not listen there",
        errno.EADDRNOTAVAIL: "this machine has no such address",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return AddressUnavailable(f"cannot listen on {address}: {reason}", address=str(address))


class HttpServer:
    """A running server. Made by ``start``, ended by ``close``."""

    def __init__(
        self, server: _Uvicorn, serving: asyncio.Task[None], address: Address, closing: asyncio.Event
    ) -> None:
        self.address = address
        """The address in use, with the real port when port 0 was asked for."""
        self._server = server
        self._serving = serving
        self._closing = closing
        self._doors: list[Any] = []

    @classmethod
    async def start(cls, app: App, bound: socket.socket, context: ssl.SSLContext | None = None) -> HttpServer:
        """Accept connections on a bound socket, with TLS when there is a context; returns once the server
        answers."""
        host, port = bound.getsockname()[:2]
        address = Address(host, port)
        try:
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            raise _unavailable(address, error) from error
        for begin in app.on_startup:
            begun = begin()
            if inspect.isawaitable(begun):
                await begun
        server = _Uvicorn(_config(app), context)
        serving = asyncio.create_task(server.serve([bound]), name="http server")
        waiting = asyncio.create_task(server.is_answering.wait(), name="http start")
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if serving.done():
            serving.result()
        started = cls(server, serving, address, app.state.closing)
        broker = getattr(app.state, "broker", None)
        if broker is not None:
            started._doors = broker.telemetry.doors
            started._doors.append(started)
        return started

    @property
    def listener(self) -> str:
        return "http"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    @property
    def connections_max(self) -> int:
        return 0

    def describe(self) -> list[ConnectionInfo]:
        """The connections that are open."""
        found = [each for each in self._server.server_state.connections if isinstance(each, _Connection)]
        return [each.describe() for each in found]

    async def wait_closed(self) -> None:
        """Wait until the server has ended, by ``close`` or by a fault, which is raised."""
        await asyncio.shield(self._serving)

    async def close(self) -> None:
        """Stop accepting, let open requests finish for a moment, and end."""
        self._closing.set()
        if self in self._doors:
            self._doors.remove(self)
        self._server.should_exit = True
        await self._serving


def _config(app: App) -> uvicorn.Config:
    class Connection(_Connection):
        clock = app.state.clock

    return uvicorn.Config(
        # Outermost, since a path that no route has is refused before any middleware of a route.
        _identify(_guard(app)),
        http=Connection,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )


def _guard(app: App) -> ASGIApp:
    """Nobody gets in unknown, where the application is that of a broker."""
    if not hasattr(app.state, "access"):
        return app
    known = guarded(app, app.state.access, lambda error: error_response(error, app.state.clock))
    return shared(known, getattr(app.state, "origins", frozenset()))


class _Uvicorn(uvicorn.Server):
    """Uvicorn that says when it answers, and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._context = context
        self.is_answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.ssl = self._context
        await super().startup(sockets)
        self.is_answering.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
