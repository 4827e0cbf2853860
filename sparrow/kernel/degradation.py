"""Degradation: what the broker still does when memory or disk run short, or an operator says so.

=============  =========================================  ==================================================
level          because of                                 what is given up
=============  =========================================  ==================================================
normal                                                    nothing
throttled      memory at 80 %, or little disk left        publishes of class bulk
read_only      hardly any disk left                       all publishes
emergency      memory at 95 %                             all publishes, and new connections
maintenance    an operator                                all publishes
=============  =========================================  ==================================================

Deliveries, settling, dead letters and administration go on at every level. A level must hold for some seconds
before it begins and comes back clearly before it ends (kernel/watermark.py), so nothing flaps; several may
hold at once, and the gravest is in force.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from sparrow.kernel.watermark import Watermark
from sparrow.model.errors import InMaintenance, LoadShed, SparrowError, StorageFull
from sparrow.model.flow import PublisherClass

MEMORY_HIGH, MEMORY_RELEASED = 0.80, 0.75
MEMORY_CRITICAL, MEMORY_RELIEVED = 0.95, 0.90
DISK_LOW_SHARE, DISK_FULL_SHARE = 0.05, 0.02
"""Of the whole disk (queue.md C38: steps at 95 and 98 % used); less counts when the bytes set are less."""
DISK_RELEASED = 2 / 3
"""A level ends when there is half as much again as the floor that began it."""
HOLD_US = 2_000_000
RELEASE_US = 10_000_000


class ServiceLevel(enum.StrEnum):
    """From all to little."""

    NORMAL = "normal"
    THROTTLED = "throttled"
    READ_ONLY = "read_only"
    EMERGENCY = "emergency"
    MAINTENANCE = "maintenance"


GIVEN_UP: dict[ServiceLevel, tuple[str, ...]] = {
    ServiceLevel.NORMAL: (),
    ServiceLevel.THROTTLED: ("publishes of class bulk",),
    ServiceLevel.READ_ONLY: ("all publishes",),
    ServiceLevel.EMERGENCY: ("all publishes", "new connections"),
    ServiceLevel.MAINTENANCE: ("all publishes",),
}


class Strain(NamedTuple):
    """How much is left of what the broker needs."""

    memory_share: float
    """Of the memory that it may use."""
    disk_free_bytes: int
    disk_bytes: int
    """0 when it is not known: then the disk is no reason for anything."""


class Degradation:
    """The levels, and which of them is in force."""

    def __init__(self, disk_low_bytes: int, disk_full_bytes: int) -> None:
        self._low_bytes = disk_low_bytes
        self._full_bytes = disk_full_bytes
        marks = {"hold_us": HOLD_US, "release_us": RELEASE_US}
        self._memory_high = Watermark(MEMORY_RELEASED, MEMORY_HIGH, **marks)
        self._memory_critical = Watermark(MEMORY_RELIEVED, MEMORY_CRITICAL, **marks)
        self._disk_low = Watermark(DISK_RELEASED, 1.0, **marks)
        self._disk_full = Watermark(DISK_RELEASED, 1.0, **marks)
        self.is_maintained = False
        """Whether an operator has the broker in maintenance."""

    @property
    def level(self) -> ServiceLevel:
        """The gravest level that holds."""
        if self.is_maintained:
            return ServiceLevel.MAINTENANCE
        if self._memory_critical.is_on:
            return ServiceLevel.EMERGENCY
        if self._disk_full.is_on:
            return ServiceLevel.READ_ONLY
        is_short = self._memory_high.is_on or self._disk_low.is_on
        return ServiceLevel.THROTTLED if is_short else ServiceLevel.NORMAL

    def observe(self, strain: Strain, now_us: int) -> ServiceLevel:
        """A look at what is left; the level after it."""
        self._memory_high.observe(strain.memory_share, now_us)
        self._memory_critical.observe(strain.memory_share, now_us)
        if strain.disk_bytes:
            low = min(self._low_bytes, DISK_LOW_SHARE * strain.disk_bytes)
            full = min(self._full_bytes, DISK_FULL_SHARE * strain.disk_bytes)
            free = max(1, strain.disk_free_bytes)
            self._disk_low.observe(low / free, now_us)
            self._disk_full.observe(full / free, now_us)
        return self.level


def refusal(
    level: ServiceLevel, kind: PublisherClass, why: str = "", retry_after_s: float = 5.0
) -> SparrowError | None:
    """Why a publish does not pass at a level; ``None`` when it does."""
    if level is ServiceLevel.MAINTENANCE:
        text = "the broker is in maintenance and takes no messages" + (f": {why}" if why else "")
        return InMaintenance(text, retry_after_s=retry_after_s)
    if level is ServiceLevel.READ_ONLY:
        return StorageFull("hardly any disk space is left; the broker only delivers")
    if level is ServiceLevel.EMERGENCY:
        return LoadShed("memory is nearly used up; the broker only delivers", retry_after_s=retry_after_s)
    if level is ServiceLevel.THROTTLED and kind is PublisherClass.BULK:
        return LoadShed("memory or disk run short; publishes of class bulk wait", retry_after_s=retry_after_s)
    return None
