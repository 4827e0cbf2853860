"""The steward: knows what the broker can still do, and says no for it.

It looks once a second at the memory of the process and every ten seconds at the disk, and has the rules of
kernel/degradation.py decide the level. Maintenance is an operator's decision; it is kept in the catalog and
so lasts over restarts until it is ended. At a normal level a publish costs one look at ``is_refusing``.

A broker that serves nobody but its own program is not watched: whoever opens listeners calls ``start``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.kernel.degradation import GIVEN_UP, Degradation, ServiceLevel, Strain, refusal
from sparrow.model.errors import InvalidArgument, PreconditionFailed
from sparrow.model.flow import Sender
from sparrow.model.monitoring import MonitoringSettings
from sparrow.store import machine
from sparrow.store.machine import Space, Usage
from sparrow.store.ports import Store

LOOK_S = 1.0
SPACE_EVERY = 10
"""Looks between two at the disk."""
RETRY_AFTER_S = 30.0
SHUTDOWN_S = 0.2
"""Before a stop that was asked for, so that whoever asked is answered."""
_KIND, _KEY = "broker", "maintenance"


class Upkeep(msgspec.Struct, frozen=True, kw_only=True):
    """A maintenance that an operator began."""

    reason: str = ""
    retry_after_s: float = RETRY_AFTER_S
    """What publishers are told."""
    since_us: int = 0


class Steward:
    """See the module's text."""

    def __init__(self, store: Store, settings: MonitoringSettings, clock: Clock) -> None:
        self.is_refusing = False
        """Whether some publishes are refused."""
        self.upkeep: Upkeep | None = None
        self.usage = Usage(0, 0, 0)
        self.space = Space(0, 0)
        self.memory_bytes_max = settings.memory_bytes_max
        self.on_shutdown: Callable[[], None] | None = None
        """Stops the process, when it is the broker's own."""
        self._store = store
        self._clock = clock
        self._degradation = Degradation(settings.disk_low_bytes, settings.disk_full_bytes)
        self._task: asyncio.Task[None] | None = None
        self._log = logs.get("steward")

    @property
    def level(self) -> ServiceLevel:
        """What the broker still does."""
        return self._degradation.level

    @property
    def takes_connections(self) -> bool:
        """Whether somebody new is let in."""
        return self.level is not ServiceLevel.EMERGENCY

    def check(self, sender: Sender) -> None:
        """Refuses a publish that the level does not let pass."""
        upkeep = self.upkeep or Upkeep()
        error = refusal(self.level, sender.kind, upkeep.reason, upkeep.retry_after_s)
        if error is not None:
            raise error

    # Life.

    async def load(self) -> None:
        """A maintenance that was begun in an earlier life goes on."""
        raw = (await self._store.documents(_KIND)).get(_KEY)
        if raw is not None:
            self._maintain(msgspec.json.decode(raw, type=Upkeep))
            self._log.warning("maintenance-goes-on", "publishes are refused until it is ended")

    def start(self) -> None:
        """Watch memory and disk from now on."""
        if self._task is None:
            self.memory_bytes_max = self.memory_bytes_max or machine.memory_bytes()
            self._task = asyncio.get_running_loop().create_task(self._look_for_ever(), name="steward")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def shut_down(self) -> None:
        """Stops the broker's process in order, a moment from now: listeners end, then the broker closes."""
        if self.on_shutdown is None:
            raise PreconditionFailed(
                "this broker is part of another program", hint="Whoever opened it closes it."
            )
        self._log.warning("shutdown-asked-for")
        asyncio.get_running_loop().call_later(SHUTDOWN_S, self.on_shutdown)

    # Maintenance.

    async def begin_maintenance(self, reason: str = "", retry_after_s: float = RETRY_AFTER_S) -> Upkeep:
        """From now on publishes are refused, also after a restart; deliveries go on."""
        if not isinstance(reason, str) or len(reason) > 1000:
            raise InvalidArgument("reason is a text of up to 1000 characters")
        if not isinstance(retry_after_s, int | float) or not 0 < retry_after_s < math.inf:
            raise InvalidArgument(f"retry_after_s must be a positive number, not {retry_after_s!r}")
        upkeep = Upkeep(reason=reason, retry_after_s=retry_after_s, since_us=self._clock.now_us())
        await self._store.put_document(_KIND, _KEY, msgspec.json.encode(upkeep))
        self._maintain(upkeep)
        self._log.warning("maintenance-began", reason)
        return upkeep

    async def end_maintenance(self) -> None:
        """Publishes pass again."""
        if self.upkeep is not None:
            await self._store.delete_document(_KIND, _KEY)
            self._maintain(None)
            self._log.info("maintenance-ended")

    def _maintain(self, upkeep: Upkeep | None) -> None:
        self.upkeep = upkeep
        self._degradation.is_maintained = upkeep is not None
        self.is_refusing = bool(GIVEN_UP[self.level])

    # Looking.

    async def _look_for_ever(self) -> None:
        looks = 0
        while True:
            try:
                if looks % SPACE_EVERY == 0:
                    self.space = await self._store.space()
                self.look(self._strain())
            except Exception as error:  # noqa: BLE001 - a task's root: it reports and goes on
                self._log.error("strain-not-observed", repr(error))
            looks += 1
            await asyncio.sleep(LOOK_S)

    def _strain(self) -> Strain:
        self.usage = machine.usage()
        share = self.usage.memory_bytes / self.memory_bytes_max if self.memory_bytes_max else 0.0
        return Strain(share, self.space.free_bytes, self.space.total_bytes)

    def look(self, strain: Strain) -> None:
        """What is left, and what follows from it."""
        before = self.level
        level = self._degradation.observe(strain, int(self._clock.monotonic_s() * 1e6))
        self.is_refusing = bool(GIVEN_UP[level])
        if level is not before:
            tell = self._log.info if level is ServiceLevel.NORMAL else self._log.warning
            tell(
                "service-level-changed", "", before=before.value, level=level.value,
                refuses=list(GIVEN_UP[level]), memory_share=round(strain.memory_share, 3),
                disk_free_bytes=strain.disk_free_bytes,
            )  # fmt: skip
