"""What a connection is told without having asked: a congested topic, a broker that is ill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparrow.model.flow import FlowReport
from sparrow.model.health import Status
from sparrow.wire import heads

_TOPICS_MAX = 1000
"""Topics of a connection whose congestion it is told of."""
_KINDS = {"normal": "resume", "throttled": "throttle"}


class Notices:
    """The notices of one connection."""

    __slots__ = ("_send", "_topics")

    def __init__(self, send: Callable[[list[Any]], None]) -> None:
        self._send = send
        self._topics: set[str] = set()

    def published(self, topic: str) -> None:
        """Whoever publishes to a topic is told of its congestion."""
        if len(self._topics) < _TOPICS_MAX:
            self._topics.add(topic)

    def tell_flow(self, report: FlowReport) -> None:
        """A topic begins or ceases to slow its publishers."""
        kind = "pause" if report.is_paused else _KINDS.get(report.mode)
        if kind is not None and report.topic in self._topics:
            frame = heads.Flow(kind, report.topic, report.cause, report.level, report.retry_after_s)
            self._send(heads.encode(frame))

    def tell_health(self, status: str) -> None:
        """The broker cannot do all it should, or can again."""
        kind = "resume" if status == Status.HEALTHY.value else "degraded"
        self._send(heads.encode(heads.Flow(kind, level=status)))
