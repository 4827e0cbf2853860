"""An event loop whose time is a number: nothing waits, and one seed gives one order of events.

Time stands still while there is work and jumps to the next timer when there is none. What the broker
gives to a thread runs here, between two callbacks, after a delay that the dice choose: so two jobs of
two threads finish in an order that varies with the seed and with nothing else. Jobs of one executor keep
their order, as a thread would.

``crash_at`` and ``is_dead`` stop the loop between two callbacks, that is at any ``await`` of anybody, with
``Crashed``; ``abandon`` then ends every task without running it on.

Hashes of futures and tasks are counted, not addresses, because the order of a set must not vary between
two processes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from random import Random
from typing import Any

_STEPS_MAX = 100_000
_LATENCY_S = ((0.0, 0.0005), (0.0005, 0.004), (0.004, 0.05))
"""How long a job takes: at once, as a fast disk, as a slow one; the dice choose one of them each time."""


_GIVEN_UP = 0.05
_HEARING = 20
"""Steps within which somebody who cares about a task hears of its end."""
CLIENT = "client"
"""Name of the tasks that are requests of clients: whose client is gone fails unheard."""


class Crashed(Exception):
    """The process or the machine has stopped."""


class Stalled(AssertionError):
    """Nothing can ever happen again, though somebody waits; or it goes on for ever."""


class SimFuture(asyncio.Future[Any]):
    """A future whose place in a set does not depend on where it lies in memory."""

    def __init__(self, number: int, loop: SimLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    """A task, likewise."""

    def __init__(self, number: int, coroutine: Any, loop: SimLoop, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """See the module's text."""

    def __init__(self, dice: Random, start_s: float = 0.0) -> None:
        super().__init__()
        self.now_s = start_s
        self.steps = 0
        self.crash_at: int | None = None
        """The step before which everything stops."""
        self.is_dead: Callable[[], bool] = lambda: False
        """Whether the machine has stopped under the process."""
        self._dice = dice
        self._numbers = itertools.count(1)
        self._free_at: dict[int, float] = {}
        self._executors: dict[int, object] = {}
        self._alive: dict[SimTask, None] = {}
        self._failed: list[tuple[int, SimTask]] = []
        self._ready: Any
        self._scheduled: list[asyncio.TimerHandle]
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda loop, context: None)

    # Time.

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        """One callback; or, when there is none, the jump to the next timer."""
        self.steps += 1
        if (self.crash_at is not None and self.steps >= self.crash_at) or self.is_dead():
            raise Crashed("the process stopped")
        if self.steps > _STEPS_MAX:
            raise Stalled(f"still busy after {self.steps} steps")
        self._take_due()
        if self._ready:
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()
        elif self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        elif not self._stopping:  # type: ignore[attr-defined]
            raise Stalled("everybody waits and nothing is due")

    def _take_due(self) -> None:
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0].when() <= self.now_s):
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(handle)

    # Futures and tasks.

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(next(self._numbers), self)

    def _make_task(
        self, loop: Any, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
    ) -> SimTask:
        task = SimTask(next(self._numbers), coroutine, self, **options)
        self._alive[task] = None
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Future[Any]) -> None:
        assert isinstance(task, SimTask)
        del self._alive[task]
        if not task.cancelled() and task._exception is not None:
            self._failed.append((self.steps, task))

    def unheard(self) -> list[str]:
        """Tasks of the broker that failed without anybody asking why."""
        return [
            f"{task.get_coro().__qualname__} failed unheard: {task._exception!r}"  # type: ignore[union-attr]
            for step, task in self._failed
            if task._log_traceback and task.get_name() != CLIENT and step < self.steps - _HEARING
        ]

    # Threads.

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """The work runs later, whole, on this thread; its result arrives later still."""
        future = self.create_future()
        self._executors[id(executor)] = executor  # kept, so that its identity is not given again
        low, high = self._dice.choice(_LATENCY_S)
        start = max(self.now_s, self._free_at.get(id(executor), 0.0)) + self._dice.uniform(low, high)
        end = start + self._dice.uniform(low, high)
        self._free_at[id(executor)] = end
        self.call_at(start, self._work, future, end, work, arguments)
        return future

    def _work(
        self, future: asyncio.Future[Any], end: float, work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        if future.cancelled():
            return
        try:
            found = work(*arguments)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, as an executor does
            self.call_at(end, _settle, future, None, error)
        else:
            self.call_at(end, _settle, future, found, None)

    # The end.

    def abandon(self) -> None:
        """Ends every task where it stands; nothing of them runs on, and nobody hears of it."""
        self._ready.clear()
        self._scheduled.clear()
        for _, task in self._failed:
            task._log_traceback = False
        for task in list(self._alive):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what they were about to await
                coroutine.close()
        self._alive.clear()
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    # What a loop without sockets leaves out.

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

    def _process_events(self, events: object) -> None:
        """There are none."""


def ask(request: Coroutine[Any, Any, Any], dice: Random) -> asyncio.Task[Any]:
    """A client's request under way; now and then the client gives it up."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(request, name=CLIENT)
    if dice.random() < _GIVEN_UP:
        loop.call_later(dice.uniform(0.0, 0.08), task.cancel)
    return task


def is_stopping() -> bool:
    """Whether the running task itself was cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _settle(future: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(found)
