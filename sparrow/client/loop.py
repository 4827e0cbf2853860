"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import uvloop

from sparrow.model.errors import BrokerClosed

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread until it is stopped.

    What threads want done is put in a line, and the loop is woken once for all that is in it: waking it costs
    more than most of what is asked of it.
    """

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._line: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparrow-loop", daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Calls a plain function on the loop's thread, soon, and after all that was asked before. It must
        not raise."""
        self._line.append(work)
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._work_off)
            except RuntimeError:
                raise BrokerClosed("the broker is closed") from None

    def _work_off(self) -> None:
        self._is_woken = False
        while self._line:
            self._line.popleft()()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop and waits for its result. Ctrl-C cancels it."""
        if self._loop.is_closed():
            work.close()
            raise BrokerClosed("the broker is closed")
        waiting = _Waiting(work, self._loop)
        self.post(waiting.begin)
        try:
            waiting.ended.acquire()
        except KeyboardInterrupt:
            self.post(waiting.cancel)
            raise
        assert waiting.task is not None
        return waiting.task.result()

    def call(self, work: Callable[[], T]) -> T:
        """Calls a plain function on the loop's thread, where nothing changes meanwhile."""

        async def called() -> T:
            return work()

        return self.run(called())

    def obtain(self, work: Callable[[], Any]) -> Any:
        """What a plain function finds: at once when the target is in this process, and awaited on the loop
        when only a broker elsewhere can tell."""

        async def obtained() -> Any:
            found = work()
            return await found if inspect.isawaitable(found) else found

        return self.run(obtained())

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Waiting(Generic[T]):
    """A thread that waits for a coroutine."""

    __slots__ = ("_loop", "_work", "ended", "task")

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self.task: asyncio.Task[T] | None = None
        self.ended = threading.Lock()
        """Held until the end: the cheapest thing that a thread can wait for."""
        self.ended.acquire()

    def begin(self) -> None:
        self.task = self._loop.create_task(self._work)
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        self.ended.release()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
