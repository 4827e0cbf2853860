"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from sparrow.model.errors import BrokerClosed

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread until it is stopped."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparrow-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop and waits for its result. Ctrl-C cancels it."""
        if self._loop.is_closed():
            work.close()
            raise BrokerClosed("the broker is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def call(self, work: Callable[[], T]) -> T:
        """Calls a plain function on the loop's thread, where nothing changes meanwhile."""

        async def called() -> T:
            return work()

        return self.run(called())

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
