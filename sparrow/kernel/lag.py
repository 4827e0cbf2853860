"""Lag: how far behind a topic, a subscription or a consumer is, and where it is heading.

The shell feeds a meter by the batch, with counts and sums of times by the broker's clock, and tells it
every second or so how many messages wait and how old the oldest is (``observe``). Levels are judged
there and only there: a value must stay beyond its limit for ``hold_s`` and come back clearly below
before its level changes (queue.md §7.2 gives the windows and limits).

Two of them need their meaning stated. End to end is the mean of what was acked lately or the age of the
oldest that was not, whichever is more: when nothing is acked any more, a mean says nothing.
Throughput is compared with its own baseline, learnt over half an hour while there was work; without
work nobody is slow.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sparrow.kernel.trend import SECOND_US, Level, Mean, Rate, Slope
from sparrow.kernel.watermark import Watermark
from sparrow.model.flow import LagLimits

END_TO_END_US = 30 * SECOND_US
ASSIGNMENT_US = 10 * SECOND_US
PROCESSING_US = 60 * SECOND_US
DEPTH_US = 5 * SECOND_US
THROUGHPUT_US = 120 * SECOND_US
BASELINE_US = 1800 * SECOND_US
FLOW_US = 30 * SECOND_US
"""The window of rates in and out, from which the time to catch up is estimated."""
BASELINE_MIN_S = 120.0
"""Seconds of work before a baseline means anything: one window of the throughput."""
USUAL_SHARE = 0.75
UNUSUAL_WEIGHT = 0.1
"""What a second counts for in the baseline while throughput is below its usual share."""
RELEASE_SHARE = 0.8
"""A level ends when its value is below this share of its limit."""


class LagLevel(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    CRITICAL = "critical"


_WORST = (LagLevel.CRITICAL, LagLevel.WARN, LagLevel.OK)


class Gauge:
    """A value with a limit to warn at and a critical one, each of which must hold."""

    __slots__ = ("_critical", "_warn")

    def __init__(self, warn: float, critical: float, hold_us: int) -> None:
        self._warn = Watermark(RELEASE_SHARE * warn, warn, hold_us=hold_us)
        self._critical = Watermark(RELEASE_SHARE * critical, critical, hold_us=hold_us)

    @property
    def level(self) -> LagLevel:
        """The level that has held."""
        if self._critical.is_on:
            return LagLevel.CRITICAL
        return LagLevel.WARN if self._warn.is_on else LagLevel.OK

    def observe(self, value: float, now_us: int) -> LagLevel:
        """A sample; the level after it."""
        self._warn.observe(value, now_us)
        self._critical.observe(value, now_us)
        return self.level

    def change(self, warn: float, critical: float) -> None:
        """Other limits; the level stays until the value has held against them."""
        self._warn.change(RELEASE_SHARE * warn, warn)
        self._critical.change(RELEASE_SHARE * critical, critical)


class PartitionLag(NamedTuple):
    """How far a subscription is behind in one partition."""

    topic: str
    partition: int
    messages: int
    oldest_offset: int | None
    """The oldest message that is not done; ``None`` when all are."""


class LagReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about the lag of one thing, for people and for JSON."""

    level: LagLevel
    """The worst of ``levels``."""
    levels: dict[str, LagLevel]
    """By metric: end_to_end, assignment, processing, depth, throughput."""
    is_healthy: bool
    """Whether the oldest message is younger than the health limit."""
    depth: int
    oldest_age_s: float
    end_to_end_s: float | None
    """Mean from publish to ack; ``None`` when nothing was acked."""
    assignment_s: float | None
    """Mean from publish to hand-over."""
    processing_s: float | None
    """Mean from hand-over to ack."""
    published_per_s: float
    acked_per_s: float
    baseline_per_s: float | None
    """What it gets done when it works; ``None`` until it is known."""
    trend_per_s: float
    """Messages by which the depth grows in a second; negative when it shrinks."""
    catch_up_s: float | None
    """When nothing will be left, at these rates; ``None`` when never."""


class TopicLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far the subscriptions of one topic are behind; depth and age are counted in this topic only."""

    topic: str
    level: LagLevel
    """The worst of its subscriptions."""
    depth: int
    """Messages that the slowest has not acked."""
    oldest_age_s: float
    slowest: str | None
    subscriptions: dict[str, LagReport]
    """By name; one that reads several topics is reported whole."""


def worst(levels: Iterable[LagLevel]) -> LagLevel:
    """The worst of some levels; ok when there is none."""
    found = set(levels)
    return next((level for level in _WORST if level in found), LagLevel.OK)


class LagMeter:
    """The lag of one topic, subscription or consumer."""

    __slots__ = (
        "_acked",
        "_assignment",
        "_baseline",
        "_depth",
        "_end_to_end",
        "_gauges",
        "_last_us",
        "_limits",
        "_oldest_age_us",
        "_processing",
        "_published",
        "_smooth_depth",
        "_throughput",
        "_trend",
    )

    def __init__(self, limits: LagLimits, now_us: int) -> None:
        self._limits = limits
        self._end_to_end = Mean(END_TO_END_US)
        self._assignment = Mean(ASSIGNMENT_US)
        self._processing = Mean(PROCESSING_US)
        self._published = Rate(FLOW_US, now_us)
        self._acked = Rate(FLOW_US, now_us)
        self._throughput = Rate(THROUGHPUT_US, now_us)
        self._baseline = Mean(BASELINE_US)
        self._smooth_depth = Level(DEPTH_US)
        self._trend = Slope(FLOW_US)
        self._depth = 0
        self._oldest_age_us = 0
        self._last_us = now_us
        hold_us = round(limits.hold_s * SECOND_US)
        self._gauges = {name: Gauge(*pair, hold_us) for name, pair in _pairs(limits).items()}

    @property
    def limits(self) -> LagLimits:
        """The limits in force."""
        return self._limits

    @property
    def oldest_age_us(self) -> int:
        """Of the last observation."""
        return self._oldest_age_us

    @property
    def level(self) -> LagLevel:
        """The worst level of all metrics."""
        return worst(gauge.level for gauge in self._gauges.values())

    def change(self, limits: LagLimits) -> None:
        """Other limits from now on. A changed ``hold_s`` begins every level anew."""
        pairs = _pairs(limits)
        if limits.hold_s != self._limits.hold_s:
            hold_us = round(limits.hold_s * SECOND_US)
            self._gauges = {name: Gauge(*pair, hold_us) for name, pair in pairs.items()}
        for name, pair in pairs.items():
            self._gauges[name].change(*pair)
        self._limits = limits

    # Feeding, by the batch.

    def published(self, count: int, now_us: int) -> None:
        """Messages came in."""
        self._published.add(count, now_us)

    def handed_over(self, count: int, published_sum_us: int, now_us: int) -> None:
        """Messages went to a consumer; ``published_sum_us`` is the sum of their publish times."""
        self._assignment.add(max(0, count * now_us - published_sum_us), count, now_us)

    def acked(self, count: int, published_sum_us: int, handed_over_sum_us: int, now_us: int) -> None:
        """Messages were acked; the sums are of their publish times and their hand-overs."""
        self._end_to_end.add(max(0, count * now_us - published_sum_us), count, now_us)
        self._processing.add(max(0, count * now_us - handed_over_sum_us), count, now_us)
        self._acked.add(count, now_us)
        self._throughput.add(count, now_us)

    def observe(self, depth: int, oldest_age_us: int, now_us: int) -> LagLevel:
        """How many messages wait and how old the oldest is; the worst level after it."""
        passed_s = max(0, now_us - self._last_us) / SECOND_US
        self._last_us = max(now_us, self._last_us)
        was_busy = self._depth > 0 and depth > 0
        self._depth, self._oldest_age_us = depth, oldest_age_us
        self._trend.observe(depth, now_us)
        values = {
            "end_to_end": max(self._end_to_end.value or 0.0, oldest_age_us) / SECOND_US,
            "assignment": (self._assignment.value or 0.0) / SECOND_US,
            "processing": (self._processing.value or 0.0) / SECOND_US,
            "depth": self._smooth_depth.observe(depth, now_us),
            "throughput": self._slowness(now_us) if was_busy else 0.0,
        }
        for name, value in values.items():
            self._gauges[name].observe(value, now_us)
        if was_busy:
            self._learn(passed_s, now_us)
        return self.level

    def _learn(self, passed_s: float, now_us: int) -> None:
        """What it gets done; when that is little, only slowly, or it would become the baseline before
        anybody was told."""
        per_s, baseline = self._throughput.per_s(now_us), self._known_baseline()
        is_usual = baseline is None or per_s >= USUAL_SHARE * baseline
        weight = passed_s if is_usual else passed_s * UNUSUAL_WEIGHT
        self._baseline.add(per_s * weight, weight, now_us)

    def _slowness(self, now_us: int) -> float:
        """How many times slower than its baseline; 0 while that is not known."""
        baseline = self._known_baseline()
        if baseline is None:
            return 0.0
        return baseline / max(self._throughput.per_s(now_us), baseline / 1000, 1e-9)

    def _known_baseline(self) -> float | None:
        return self._baseline.value if self._baseline.weight >= BASELINE_MIN_S else None

    # Looking.

    def report(self, now_us: int) -> LagReport:
        """All of it, as of the last observation."""
        published, acked = self._published.per_s(now_us), self._acked.per_s(now_us)
        return LagReport(
            level=self.level,
            levels={name: gauge.level for name, gauge in self._gauges.items()},
            is_healthy=self._oldest_age_us < self._limits.unhealthy_age_s * SECOND_US,
            depth=self._depth,
            oldest_age_s=self._oldest_age_us / SECOND_US,
            end_to_end_s=_seconds(self._end_to_end.value),
            assignment_s=_seconds(self._assignment.value),
            processing_s=_seconds(self._processing.value),
            published_per_s=published,
            acked_per_s=acked,
            baseline_per_s=self._known_baseline(),
            trend_per_s=self._trend.per_s(),
            catch_up_s=_catch_up_s(self._depth, published, acked),
        )


def _pairs(limits: LagLimits) -> dict[str, tuple[float, float]]:
    """Where to warn and what is critical, by metric; throughput as how many times slower."""
    return {
        "end_to_end": (limits.end_to_end_warn_s, limits.end_to_end_critical_s),
        "assignment": (limits.assignment_warn_s, limits.assignment_critical_s),
        "processing": (limits.processing_warn_s, limits.processing_critical_s),
        "depth": (limits.depth_warn, limits.depth_critical),
        "throughput": (1 / limits.throughput_warn_share, 1 / limits.throughput_critical_share),
    }


def _seconds(value_us: float | None) -> float | None:
    return None if value_us is None else value_us / SECOND_US


def _catch_up_s(depth: int, published_per_s: float, acked_per_s: float) -> float | None:
    if depth == 0:
        return 0.0
    gain = acked_per_s - published_per_s
    return depth / gain if gain > 1e-3 * acked_per_s and gain > 0 else None
