"""Holds: files of dropped segments that readers outside the broker may still need.

Whoever reads segment files by themselves (Spark's Parquet reader, DuckDB) asks for a hold when they take the
list. Retention goes on as ever: what it drops is out of force at once and in nobody's list any more. Only the
file stays until the holds of its topic end. Holds live in memory: a start of the broker removes every file
that is not in force.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Holds:
    """Until when each topic's files are held, and the files that wait for it."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._until_us: dict[int, int] = {}
        self._waiting: dict[Path, int] = {}
        """Files that are out of force, and whose topic they belong to."""

    def hold(self, topic_id: int, seconds: float) -> None:
        """Files that are in force now can be read for so long, whatever happens to their segments."""
        if seconds > 0:
            until_us = self._now_us() + round(seconds * 1_000_000)
            self._until_us[topic_id] = max(self._until_us.get(topic_id, 0), until_us)

    def keep(self, topic_id: int, path: Path) -> bool:
        """A file is out of force from now on; whether it has to wait until it is due."""
        if self._is_held(topic_id):
            self._waiting[path] = topic_id
        return path in self._waiting

    def due(self) -> list[Path]:
        """Files whose wait is over."""
        found = [path for path, topic_id in self._waiting.items() if not self._is_held(topic_id)]
        for path in found:
            del self._waiting[path]
        return found

    def forget_topic(self, topic_id: int) -> None:
        """The topic's directory goes as a whole, and another topic may take its paths."""
        self._until_us.pop(topic_id, None)
        for path in [path for path, owner in self._waiting.items() if owner == topic_id]:
            del self._waiting[path]

    def _is_held(self, topic_id: int) -> bool:
        until_us = self._until_us.get(topic_id)
        if until_us is None:
            return False
        if until_us > self._now_us():
            return True
        del self._until_us[topic_id]
        return False
