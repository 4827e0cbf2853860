"""Settings of the broker's eye on itself: what it measures, and when it counts as unwell."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MIB = 1024 * 1024


class MonitoringSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics, health, and what is given up when memory or disk run short."""

    interval_s: Annotated[
        int, Meta(ge=1, le=60, description="Time between two looks at all figures; also of the raw series.")
    ] = 5
    labels_max: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Topics and subscriptions with a label of their own in /metrics; the others are one.",
        ),
    ] = 1000
    series_max: Annotated[
        int, Meta(ge=0, le=100_000, description="Series kept in memory for a day, about 20 KB each.")
    ] = 500
    memory_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 50,
            description="Memory that the broker may use; 0 is what the machine or its container has.",
        ),
    ] = 0
    disk_low_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 50,
            description="Free disk below which publishers of class bulk are refused, or 5 % if that is less.",
        ),
    ] = 1024 * MIB
    disk_full_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 50,
            description="Free disk below which all publishes are refused, or 2 % if that is less.",
        ),
    ] = 256 * MIB
    pending_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000_000,
            description="Messages that consumers hold unsettled above which health says so.",
        ),
    ] = 100_000
    lag_age_s_max: Annotated[
        float,
        Meta(ge=1.0, le=1e9, description="Age of the oldest message not acked above which health says so."),
    ] = 300.0
