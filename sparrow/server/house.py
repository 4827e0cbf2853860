"""What all connections of a server share: the broker, and one bound on the memory they hold."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.flow import FlowReport
from sparrow.model.settings import ServerSettings, parse_tokens
from sparrow.server.notices import Notices

_BURDEN_BYTES_MIN = 512 * 1024
"""A connection that less is held for is not cut for the sake of others."""


class Tenant(Protocol):
    """A connection as far as the house knows it."""

    session: str
    peer: str
    made_at_s: float
    heard_at_s: float

    @property
    def burden_bytes(self) -> int:
        """What is held for it although nothing is done for it: frames half received, answers unread."""

    def look_at_reading(self) -> None: ...

    def look(self, now_s: float) -> None: ...

    def notices(self) -> Notices | None: ...

    def give_up(self, why: str) -> None: ...

    async def drain(self) -> None: ...

    @property
    def closed(self) -> asyncio.Future[None]: ...


class House:
    """See the module's text."""

    def __init__(self, broker: Broker, settings: ServerSettings, clock: Clock) -> None:
        self.broker = broker
        self.settings = settings
        self.clock = clock
        broker.access.add_bootstrap(parse_tokens(settings.tokens))
        self.connections: set[Tenant] = set()
        self.held_bytes = 0
        """Of commands that are not answered, frames half received and answers that are not read."""
        self.command_bytes = 0
        """Of these, the commands: they will be answered, and so make room by themselves."""
        self.leftover: set[asyncio.Task[Any]] = set()
        """Tasks that outlive their connection for a moment."""
        self._status = ""
        self._thirsty: set[Tenant] = set()
        """Tenants that are not read from because all together hold too much."""

    @property
    def is_full(self) -> bool:
        return self.held_bytes > self.settings.total_bytes_max

    def hold_command(self, size: int) -> None:
        """A command begins, or ends."""
        self.command_bytes += size
        self.hold(size)

    def hold(self, size: int) -> None:
        """So much more is held, or less."""
        self.held_bytes += size
        if size < 0 and self._thirsty and not (self.is_full and self.command_bytes):
            thirsty, self._thirsty = self._thirsty, set()
            for connection in thirsty:
                connection.look_at_reading()

    def wait_for_room(self, connection: Tenant) -> None:
        self._thirsty.add(connection)

    def forget(self, connection: Tenant) -> None:
        self.connections.discard(connection)
        self._thirsty.discard(connection)

    def make_room(self) -> None:
        """Too much waits for clients that neither read nor finish what they send: the worst of them goes."""
        if self.is_full:
            worst = max(self.connections, key=lambda connection: connection.burden_bytes, default=None)
            if worst is not None and worst.burden_bytes > _BURDEN_BYTES_MIN:
                worst.give_up("the broker holds too much for clients that do not go on")

    def tell_flow(self, report: FlowReport) -> None:
        """A topic begins or ceases to slow its publishers; those who publish to it are told."""
        for notices in self._notices():
            notices.tell_flow(report)

    def _notices(self) -> list[Notices]:
        found = [connection.notices() for connection in self.connections]
        return [notices for notices in found if notices is not None]

    def look_at_health(self) -> None:
        """Tells everybody when the broker becomes unable to do all it should, and when that is over."""
        status = self.broker.health().status.value
        if status != self._status:
            before, self._status = self._status, status
            if before:
                for notices in self._notices():
                    notices.tell_health(status)

    def see_through(self, work: Any) -> None:
        """Work that nobody waits for and that must not be lost."""
        self.keep(asyncio.get_running_loop().create_task(work))

    def keep(self, task: asyncio.Task[Any]) -> None:
        self.leftover.add(task)
        task.add_done_callback(self.leftover.discard)
