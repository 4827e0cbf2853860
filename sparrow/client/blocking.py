"""The same verbs for blocking code: an event loop in a thread of its own, and callers that wait for it.

What is async in the broker (or, later, in the network client) is blocking here, name for name. Objects that
have async verbs of their own come back wrapped; plain values come back as they are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from sparrow.model.errors import BrokerClosed

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until it is stopped."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparrow-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop and waits for its result."""
        if self._loop.is_closed():
            work.close()
            raise BrokerClosed("the broker is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Blocking:
    """Wraps an object with async verbs. Verbs are looked up once and then kept."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        verb = self._blocking(found)
        self.__dict__[name] = verb
        return verb

    def _blocking(self, verb: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            return wrap(self._thread.run(verb(*arguments, **options)), self._thread)

        call.__name__ = verb.__name__
        call.__doc__ = verb.__doc__
        return call

    def __repr__(self) -> str:
        return repr(self._target)


_WRAPPED: tuple[type, ...] = ()


def wrap(value: Any, thread: LoopThread) -> Any:
    return Blocking(value, thread) if isinstance(value, _WRAPPED) else value


__all__ = ["Blocking", "LoopThread", "Self", "TracebackType", "wrap"]
