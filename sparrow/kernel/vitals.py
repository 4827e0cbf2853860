"""How well the broker is, by what it needs: a score from weighted dimensions (queue.md §9.4).

A dimension is fine, strained or failed, and takes none, half or all of its weight from a score of 100. A
broker with 80 and more is healthy, one with 50 and more degraded, below that critical; and one that cannot
write is critical whatever the rest says. A single strained dimension of little weight is shown and does not
change the whole: many messages in flight, say, are a busy day and no illness.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sparrow.model.health import Status

HEALTHY_SCORE, DEGRADED_SCORE = 80.0, 50.0
STRAINED_SHARE = 0.8
"""Of its limit, from which on a dimension is strained."""


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the broker needs, or that tells how it does."""

    name: str
    status: Status
    value: float
    limit: float
    weight: int
    message: str = ""
    advice: str = ""
    """What to do about it; empty when there is nothing to do."""


class BrokerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The broker as a whole."""

    status: Status
    score: float
    """From 0 to 100."""
    level: str
    """What it still does: normal, throttled, read_only, emergency or maintenance."""
    given_up: tuple[str, ...]
    uptime_s: float
    tasks: int
    """Asyncio tasks that are under way."""
    dimensions: tuple[Dimension, ...]
    recommendations: tuple[str, ...]


def most(name: str, value: float, limit: float, weight: int, message: str, advice: str) -> Dimension:
    """A dimension that must stay below a limit."""
    status = Status.HEALTHY
    if limit > 0 and value > limit:
        status = Status.CRITICAL
    elif limit > 0 and value > STRAINED_SHARE * limit:
        status = Status.DEGRADED
    return _dimension(name, status, value, limit, weight, message, advice)


def least(name: str, value: float, limit: float, weight: int, message: str, advice: str) -> Dimension:
    """A dimension that must stay above a limit; strained below twice that."""
    status = Status.HEALTHY
    if value < limit:
        status = Status.CRITICAL
    elif value < 2 * limit:
        status = Status.DEGRADED
    return _dimension(name, status, value, limit, weight, message, advice)


def sound(name: str, status: Status, weight: int, message: str, advice: str) -> Dimension:
    """A dimension that is judged elsewhere."""
    return _dimension(name, status, 0.0, 0.0, weight, message, advice)


def _dimension(
    name: str, status: Status, value: float, limit: float, weight: int, message: str, advice: str
) -> Dimension:
    return Dimension(
        name=name,
        status=status,
        value=round(value, 4),
        limit=round(limit, 4),
        weight=weight,
        message=message,
        advice="" if status is Status.HEALTHY else advice,
    )


def score(dimensions: Sequence[Dimension]) -> float:
    """What is left of 100."""
    whole = sum(each.weight for each in dimensions)
    lost = sum(each.weight * _loss(each.status) for each in dimensions)
    return round(100.0 * (1 - lost / whole), 1) if whole else 100.0


def judge(dimensions: Sequence[Dimension], *, can_write: bool) -> Status:
    """The status of the whole."""
    if not can_write:
        return Status.CRITICAL
    found = score(dimensions)
    if found >= HEALTHY_SCORE:
        return Status.HEALTHY
    return Status.DEGRADED if found >= DEGRADED_SCORE else Status.CRITICAL


def _loss(status: Status) -> float:
    return {Status.HEALTHY: 0.0, Status.DEGRADED: 0.5}.get(status, 1.0)


class ConsumerLevel:
    """How a consumer is by its signs of life (queue.md §9.3)."""

    HEALTHY = "healthy"
    WARNING = "warning"
    SUSPICIOUS = "suspicious"
    FAILED = "failed"


def consumer_level(silent_s: float, heartbeat_s: float, session_timeout_s: float) -> str:
    """One heartbeat missed is a warning, two are suspicious, a session without a word has failed."""
    if silent_s >= session_timeout_s:
        return ConsumerLevel.FAILED
    if silent_s >= 2 * heartbeat_s:
        return ConsumerLevel.SUSPICIOUS
    return ConsumerLevel.WARNING if silent_s > heartbeat_s else ConsumerLevel.HEALTHY
