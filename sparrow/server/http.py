"""The HTTP API: one Litestar application made of route families, and the server that runs it.

Each family is a module with a ``routes`` function (``health`` is the first). What holds for all of
them is here: a request has an id, which is its correlation id in the log and comes back in
``X-Request-Id``; and everything that goes wrong has one body, ``{"error": {...}}``, with the code,
message and hint of the typed error.

The server runs inside the broker's event loop and leaves signals to whoever started the process. An
address is taken by ``bind`` before the broker is opened, so that a taken port is found before a long
recovery; connections are accepted only once ``HttpServer.start`` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import uvicorn
from litestar import Litestar, Request, Response
from litestar.datastructures import MutableScopeHeaders
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.model.errors import AddressUnavailable, InvalidArgument, NotFound, SparrowError
from sparrow.model.health import HealthSource
from sparrow.model.settings import Address
from sparrow.server import health

SHUTDOWN_TIMEOUT_S = 3
"""How long open requests may go on after a stop, before they are cut."""

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""

_log = logs.get("http")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")


def build(broker_health: HealthSource, *, clock: Clock | None = None) -> Litestar:
    """The application, from its route families."""
    ticking = clock or Clock()

    def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
        return _error_response(error, ticking)

    return Litestar(
        route_handlers=[health.routes(broker_health, ticking)],
        exception_handlers={Exception: refuse},
        # Off until families need them: each costs memory and start time, and logging is ours.
        openapi_config=None,
        logging_config=None,
        debug=False,
    )


# Requests and errors.


def _identify(app: ASGIApp) -> ASGIApp:
    """Give each request an id: the client's own when it is sane, else a new one."""

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await app(scope, receive, send)
            return
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableScopeHeaders(message)["X-Request-Id"] = request_id
            await send(message)

        with logs.correlated(request_id):
            await app(scope, receive, send_with_id)

    return middleware


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.match(given) else secrets.token_hex(8)


def _error_response(error: Exception, clock: Clock) -> Response[dict[str, Any]]:
    typed, status = _typed(error)
    now = datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
    body = {
        **typed.to_dict(),
        "request_id": logs.correlation_id(),
        "timestamp": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    return Response({"error": body}, status_code=status, media_type="application/json")


def _typed(error: Exception) -> tuple[SparrowError, int]:
    """Any exception as a typed error and the status that carries it."""
    if isinstance(error, SparrowError):
        return error, error.status
    if isinstance(error, HTTPException) and error.status_code < 500:
        kind = NotFound if error.status_code == 404 else InvalidArgument
        return kind(error.detail or "the request is wrong"), error.status_code
    _log.error("request-failed", "a request met a bug", exc_info=error)
    return SparrowError("the broker met an error of its own"), 500


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

    def __init__(self, server: _Uvicorn, serving: asyncio.Task[None], address: Address) -> None:
        self.address = address
        """The address in use, with the real port when port 0 was asked for."""
        self._server = server
        self._serving = serving

    @classmethod
    async def start(cls, app: Litestar, bound: socket.socket) -> HttpServer:
        """Accept connections on a bound socket; returns once the server answers."""
        host, port = bound.getsockname()[:2]
        address = Address(host, port)
        try:
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            raise _unavailable(address, error) from error
        server = _Uvicorn(_config(app))
        serving = asyncio.create_task(server.serve([bound]), name="http server")
        waiting = asyncio.create_task(server.is_answering.wait(), name="http start")
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if serving.done():
            serving.result()
        return cls(server, serving, address)

    async def wait_closed(self) -> None:
        """Wait until the server has ended, by ``close`` or by a fault, which is raised."""
        await asyncio.shield(self._serving)

    async def close(self) -> None:
        """Stop accepting, let open requests finish for a moment, and end."""
        self._server.should_exit = True
        await self._serving


def _config(app: Litestar) -> uvicorn.Config:
    return uvicorn.Config(
        # Outermost, since a path that no route has is refused before any middleware of a route.
        _identify(app),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )


class _Uvicorn(uvicorn.Server):
    """Uvicorn that says when it answers, and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_answering.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
