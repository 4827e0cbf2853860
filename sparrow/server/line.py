"""Commands without a request id: begun in the order in which they came, and answered in it.

Publishes and settlements run beside each other, because each of them waits for the disk. Everything else runs
alone: what was sent before it is done when it begins, and what was sent after it waits. So a client that
pipelines SUBSCRIBE and PUBLISH, and reads answers later, gets what it means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

Work = Callable[[], Awaitable[list[Any]]]
"""Does a command and returns the pieces of its answer; raises nothing."""


class _Place:
    """One command in the line."""

    __slots__ = ("answer", "is_alone", "work")

    def __init__(self, work: Work, is_alone: bool) -> None:
        self.work = work
        self.is_alone = is_alone
        self.answer: list[Any] | None = None


class Line:
    """The line of one connection."""

    __slots__ = ("_is_alone", "_places", "_running", "_send", "_spawn", "_waiting")

    def __init__(
        self,
        send: Callable[[list[Any]], None],
        spawn: Callable[[Any], asyncio.Task[None]],
    ) -> None:
        self._send = send
        self._spawn = spawn
        self._places: deque[_Place] = deque()
        """All that are not answered."""
        self._waiting: deque[_Place] = deque()
        """Of these, those that have not begun."""
        self._running = 0
        self._is_alone = False

    def add(self, work: Work, *, is_alone: bool) -> None:
        """The next command."""
        place = _Place(work, is_alone)
        self._places.append(place)
        self._waiting.append(place)
        self._begin()

    def _begin(self) -> None:
        while self._waiting:
            place = self._waiting[0]
            if self._is_alone or (place.is_alone and self._running):
                return
            self._waiting.popleft()
            self._running += 1
            self._is_alone = place.is_alone
            self._spawn(self._run(place))

    async def _run(self, place: _Place) -> None:
        place.answer = await place.work()
        self._running -= 1
        self._is_alone = False
        while self._places and self._places[0].answer is not None:
            answer = self._places.popleft().answer
            if answer:
                self._send(answer)
        self._begin()
