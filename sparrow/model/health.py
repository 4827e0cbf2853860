"""How a broker says whether it is well.

A health report is a value: one overall status, the checks it was drawn from, and what to do about
them. Whoever runs a broker implements ``HealthSource``; the HTTP probes, the dashboard and the CLI
only read it. Drawing up a report takes no I/O, so a probe can never hang on the disk that it is
asking about.

Degraded still serves, critical does not: a balancer should send work to a broker that is ready and
a person should look at one that is not healthy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol

import msgspec


class Status(enum.StrEnum):
    """The state of one check, or of the whole."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Works, with less room or speed than it should have."""
    CRITICAL = "critical"
    """Refuses work it was made for."""
    UNKNOWN = "unknown"
    """Cannot be told yet, as during recovery."""


_BEST_TO_WORST = (Status.HEALTHY, Status.DEGRADED, Status.UNKNOWN, Status.CRITICAL)


class Check(msgspec.Struct, frozen=True):
    """One thing looked at."""

    name: str
    status: Status
    message: str = ""


class Health(msgspec.Struct, frozen=True):
    """One report. ``recommendations`` are sentences that say what a person can do."""

    status: Status
    checks: tuple[Check, ...] = ()
    recommendations: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether work should be sent here."""
        return self.status in (Status.HEALTHY, Status.DEGRADED)


class HealthSource(Protocol):
    """Whatever can report its health at once."""

    def health(self) -> Health:
        """The report of this moment."""


def overall(checks: Iterable[Check]) -> Status:
    """The worst status among the checks; without any, nothing is known."""
    found = [check.status for check in checks]
    return max(found, key=_BEST_TO_WORST.index, default=Status.UNKNOWN)
