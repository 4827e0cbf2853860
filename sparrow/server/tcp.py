"""The server of the binary protocol: accepts connections, bounds them, and drains them before a stop.

An address is taken by ``sparrow.server.http.bind`` before the broker is opened; connections are accepted
once ``TcpServer.start`` is called. A stop goes the other way: nobody new is let in, everybody is told, what
is under way is answered, and what is left after ``drain_s`` is cut.
"""

from __future__ import annotations

import asyncio
import socket

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.connection import ConnectionInfo
from sparrow.model.errors import LoadShed, SparrowError, TooManyConnections
from sparrow.model.settings import Address, ServerSettings
from sparrow.server import coreframes
from sparrow.server.connection import Connection
from sparrow.server.house import House, Tenant
from sparrow.server.tls import tls_context

BACKLOG = 4096
"""Connections that the kernel holds until they are accepted."""
_LOOK_S = 1.0
_LOOKS = 10
_CUT_S = 1.0
"""How long a closed connection may take to be gone."""
_log = logs.get("tcp")


class TcpServer:
    """A running server. Made by ``start``, ended by ``close``."""

    def __init__(self, house: House, address: Address) -> None:
        self.address = address
        """The address in use, with the real port when port 0 was asked for."""
        self._house = house
        self._server: asyncio.Server | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._unlooked: list[Tenant] = []
        self._health_at_s = 0.0

    @classmethod
    async def start(
        cls,
        broker: Broker,
        bound: socket.socket,
        settings: ServerSettings | None = None,
        *,
        clock: Clock | None = None,
    ) -> TcpServer:
        """Accept connections on a bound socket."""
        settings = settings or ServerSettings()
        context = tls_context(settings)
        await coreframes.sweep(broker)
        host, port = bound.getsockname()[:2]
        server = cls(House(broker, settings, clock or Clock()), Address(host, port))
        loop = asyncio.get_running_loop()
        server._server = await loop.create_server(server._welcome, sock=bound, ssl=context, backlog=BACKLOG)
        broker.flow_listeners.append(server._house.tell_flow)
        broker.telemetry.doors.append(server)
        server._look()
        return server

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._house.connections)

    @property
    def held_bytes(self) -> int:
        """Memory that connections hold for commands under way and answers that are not read."""
        return self._house.held_bytes

    @property
    def listener(self) -> str:
        return "tcp"

    @property
    def connections_max(self) -> int:
        return self._house.settings.connections_max

    def describe(self) -> list[ConnectionInfo]:
        """The connections, the oldest first."""
        now_s = self._house.clock.monotonic_s()
        found = sorted(self._house.connections, key=lambda connection: connection.made_at_s)
        return [_info(connection, now_s) for connection in found]

    def _welcome(self) -> asyncio.BufferedProtocol:
        if not self._house.broker.steward.takes_connections:
            return _Turned(self._house, LoadShed("memory is nearly used up; nobody new is let in"))
        if len(self._house.connections) >= self._house.settings.connections_max:
            return _Turned(self._house)
        return Connection(self._house)

    def _look(self) -> None:
        """Looks at every connection about once a second, some at a time, so that nobody waits for it."""
        if not self._unlooked:
            self._unlooked = list(self._house.connections)
        count = -(-max(len(self._unlooked), len(self._house.connections)) // _LOOKS)
        now_s = self._house.clock.monotonic_s()
        if now_s >= self._health_at_s:
            self._health_at_s = now_s + _LOOK_S
            self._house.look_at_health()
        for connection in self._unlooked[:count]:
            connection.look(now_s)
        del self._unlooked[:count]
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S / _LOOKS, self._look)

    async def close(self) -> None:
        """Let nobody in, answer what is under way, close every connection. Closing twice is allowed."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        self._house.broker.flow_listeners.remove(self._house.tell_flow)
        self._house.broker.telemetry.doors.remove(self)
        if self._looking is not None:
            self._looking.cancel()
        self._unlooked.clear()
        connections = list(self._house.connections)
        if connections:
            _log.info("connections-draining", "", count=len(connections))
            drains = [asyncio.ensure_future(connection.drain()) for connection in connections]
            await asyncio.wait(drains, timeout=self._house.settings.drain_s + _CUT_S)
            await asyncio.wait([connection.closed for connection in connections], timeout=_CUT_S)
        for connection in list(self._house.connections):
            connection.give_up("the broker stops")
        leftover = list(self._house.leftover)
        if leftover:
            await asyncio.wait(leftover, timeout=_CUT_S)
            for task in leftover:
                task.cancel()


class _Turned(Connection):
    """A connection that is one too many: told so, and closed."""

    def __init__(self, house: House, why: SparrowError | None = None) -> None:
        super().__init__(house)
        most = house.settings.connections_max
        self._why = why or TooManyConnections(f"the broker serves {most} connections already")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._house.forget(self)
        _log.warning("connection-refused", self._why.message, peer=self.peer)
        self.refuse(self._why)


def _info(connection: Tenant, now_s: float) -> ConnectionInfo:
    return ConnectionInfo(
        listener="tcp",
        id=connection.session,
        address=connection.peer,
        age_s=round(now_s - connection.made_at_s, 3),
        silent_s=round(now_s - connection.heard_at_s, 3),
        protocol="sparrow/1" if connection.notices() is not None else "mque/1",
        held_bytes=connection.burden_bytes,
    )
