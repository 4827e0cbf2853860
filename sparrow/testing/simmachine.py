"""A simulated machine: one broker after the other on one disk, in one virtual time.

Each life of the broker is the real thing: ``Broker`` on a ``LocalStore``, with real journal files, real
segments and a real SQLite catalog. What differs is the loop beneath it, the clock, the dice and the disk.
A life ends by a close in order, by a kill, which keeps all written bytes, or by power loss, which keeps
what was synced. SQLite syncs every commit itself, so the catalog comes out of both as it is.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy.util import LRUCache

from sparrow.broker.broker import Broker
from sparrow.model.settings import JournalSettings, LakeSettings, MaintenanceSettings, Settings
from sparrow.store import catalog_sqlite
from sparrow.store.local import LocalStore
from sparrow.testing.disk import PowerLost
from sparrow.testing.simclock import SimClock
from sparrow.testing.simdisk import SimDisk
from sparrow.testing.simloop import Crashed, SimLoop

_STATEMENTS: Any = LRUCache(1000)
_DOWN_S = 5.0
"""A machine is down for up to so long."""


@contextmanager
def shared_statements() -> Iterator[None]:
    """While this lasts, catalogs share what SQLAlchemy compiles; each for itself would cost a tenth more."""
    before = catalog_sqlite.create_engine  # type: ignore[attr-defined]

    def create_engine(*arguments: Any, **options: Any) -> Any:
        engine = before(*arguments, **options)
        engine._compiled_cache = _STATEMENTS
        return engine

    catalog_sqlite.create_engine = create_engine  # type: ignore[attr-defined]
    try:
        yield
    finally:
        catalog_sqlite.create_engine = before  # type: ignore[attr-defined]


class Machine:
    """Starts and stops brokers; ``broker`` is the one that lives now."""

    def __init__(self, directory: Path, dice: Random, *, rotate_after_s: float, file_bytes: int) -> None:
        self.clock = SimClock()
        self.store_class = LocalStore
        self.broker_class = Broker
        self._dice = dice
        self._directory = directory
        self._number = 0
        self._file_bytes = file_bytes
        self._rotate_after_s = rotate_after_s
        self._store: LocalStore | None = None
        self._broker: Broker | None = None
        self._now_s = 0.0
        root = directory / "0"
        self.disk = SimDisk(root, dice.getrandbits(32))
        self.root = root
        self.loop = self._new_loop()

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "no broker is alive"
        return self._broker

    @property
    def life(self) -> int:
        return self._number

    def settings(self) -> Settings:
        """Small files, so that rotation and sealing happen within a few dozen messages."""
        return Settings(
            data=str(self.root),
            journal=JournalSettings(
                file_bytes=self._file_bytes, rotate_after_s=self._rotate_after_s, sync_interval_s=0.2
            ),
            lake=LakeSettings(compression="none"),
            maintenance=MaintenanceSettings(retention_interval_s=20.0),
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs in this life; ``Crashed`` when the life ended meanwhile."""
        try:
            return self.loop.run_until_complete(self.loop.create_task(work))
        except PowerLost as lost:
            raise Crashed("the power was lost") from lost

    async def open(self) -> Broker:
        settings = self.settings()
        self._store = await self.store_class.open(
            self.root,
            journal=settings.journal,
            lake=settings.lake,
            now_us=self.clock.now_us,
            disk=self.disk,
        )
        self._broker = await self.broker_class.open(settings, store=self._store, clock=self.clock)
        return self._broker

    async def close(self) -> None:
        """In order; the next life finds the directory as it was left."""
        await self.broker.close()

    # Ends of a life.

    def kill(self) -> None:
        """The process is gone, the machine goes on."""
        self._number += 1
        root = self._directory / str(self._number)
        disk = self.disk.survive(root, self._dice.getrandbits(32))
        self._bury(root, disk)

    def lose_power(self) -> None:
        """What was not synced may be gone."""
        self._number += 1
        root = self._directory / str(self._number)
        self.disk.crash(root)
        self._bury(root, SimDisk(root, self._dice.getrandbits(32)))

    def _bury(self, root: Path, disk: SimDisk) -> None:
        self._now_s = self.loop.now_s + self._dice.uniform(0.0, _DOWN_S)
        self.end()
        self.root, self.disk = root, disk
        self.loop = self._new_loop()

    def end(self) -> None:
        """Frees what the life held."""
        self.disk.stop_at(0)
        self.loop.abandon()
        if self._store is not None:
            with suppress(Exception):
                catalog_sqlite.disconnect(self._store._catalog._session._connection)
            self._store._directory.close()
        self._store = self._broker = None
        self.disk.close_all()
        shutil.rmtree(self.root, ignore_errors=True)

    def _new_loop(self) -> SimLoop:
        loop = SimLoop(Random(self._dice.getrandbits(64)), self._now_s)
        loop.is_dead = lambda: self.disk.has_stopped
        self.clock.loop = loop
        asyncio.set_event_loop(None)
        return loop
