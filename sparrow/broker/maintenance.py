"""Work that the broker does by itself: sealing finished journal files, and dropping what is too old.

A fault here never stops publishing or delivery. It is logged, shown in the health report, and tried again
with growing patience; each try starts from the beginning, because every step can be repeated safely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.repeats import Repeats
from sparrow.broker.staging import Staging
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel.retention import expired_segments
from sparrow.model.errors import SparrowError
from sparrow.model.settings import Settings
from sparrow.store.ports import Store

_PATIENCE_S = (1.0, 60.0)


class Maintenance:
    """Two endless tasks."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        repeats: Repeats,
        settings: Settings,
        clock: Clock,
        subscriptions: Subscriptions,
        staging: Staging,
    ) -> None:
        self._store = store
        self._topics = topics
        self._repeats = repeats
        self._settings = settings
        self._clock = clock
        self._subscriptions = subscriptions
        self._staging = staging
        self._log = logs.get("maintenance")
        self._tasks: list[asyncio.Task[None]] = []
        self._sealing = asyncio.Lock()
        self.complaint: str | None = None
        self.sealed_messages = 0
        self.sealed_seconds = 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._seal_for_ever()), loop.create_task(self._drop_for_ever())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.is_calm = False
        async with self._sealing:
            pass  # A seal under way is finished by its own shielded task.

    async def seal(self) -> int:
        """Moves everything that is in the journal now to the lake; the number of messages moved."""
        await self._store.rotate()
        total = 0
        while self._store.finished_bytes():
            self._store.is_calm = False
            total += await self._seal_whole()
        return total

    async def apply_retention(self) -> int:
        """Drops what the policies no longer keep; the number of segments dropped."""
        dropped = 0
        for topic in list(self._topics):
            segments = self._store.segments(topic)
            doomed = expired_segments(
                segments, topic.policy, self._clock.now_us(), self._subscriptions.needed_from(topic)
            )
            if doomed:
                await self._store.drop(doomed)
                dropped += len(doomed)
                self._log.info("segments-dropped", "retention", topic=topic.name, segments=len(doomed))
        await self._store.release()
        return dropped

    async def _seal_whole(self) -> int:
        """A seal goes on to its end when its caller gives up: half of one could not be done again."""
        task = asyncio.get_running_loop().create_task(self._seal_once())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _seal_once(self) -> int:
        async with self._sealing:
            if not self._store.finished_bytes():
                return 0  # Another seal was faster. Checkpoints taken now would be stored by nobody.
            start_s = self._clock.monotonic_s()
            producers, cursors = self._repeats.checkpoints(), self._subscriptions.checkpoints()
            documents = self._staging.checkpoints()
            try:
                count = await self._store.seal(cursors, producers, documents)
            except BaseException:
                self._staging.keep_changed(documents)
                self._repeats.keep_changed(producers)
                self._subscriptions.keep_changed(cursors)
                raise
            seconds = self._clock.monotonic_s() - start_s
            self.sealed_messages += count
            self.sealed_seconds += seconds
            self._log.info("journal-sealed", "", messages=count, seconds=round(seconds, 3))
            return count

    async def _seal_for_ever(self) -> None:
        settings = self._settings.journal
        while True:
            await self._store.wait_for_finished(settings.file_bytes // 2, settings.rotate_after_s)
            await self._patiently(self._seal_due)

    async def _seal_due(self) -> None:
        while self._store.finished_bytes():
            self._store.is_calm = True
            await self._seal_whole()

    async def _drop_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.maintenance.retention_interval_s)
            await self._patiently(self.apply_retention)

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        wait_s, longest_s = _PATIENCE_S
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - a task's root: it reports and goes on
                self.complaint = str(error) if isinstance(error, SparrowError | OSError) else repr(error)
                self._log.error("maintenance-failed", self.complaint, retry_in_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, longest_s)
            else:
                self.complaint = None
                return
