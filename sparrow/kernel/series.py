"""Time series: what numbers were lately, in a bounded number of bytes.

A series has two rings: samples as they came, a raw interval apart, for about an hour; and for a day the mean,
least and most of every minute. Places in a ring go by time, so a series needs no time column, and a time
without a sample is a hole. Samples are floats of 32 bits: seven digits are enough to draw a line.

``SeriesSet`` holds many of them by metric and label and bounds their number: whoever comes when it is full
has no series. Names of things that are gone leave with ``keep``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from typing import NamedTuple

RAW_SPAN_S = 3600
MINUTE_S = 60
MINUTES = 24 * 60
HOLE = math.nan

Key = tuple[str, str]
"""The metric, and whose it is: a topic, a subscription, or nothing for the broker as a whole."""


class Point(NamedTuple):
    """A value at a time; ``least`` and ``most`` are those of the span that it stands for."""

    at_s: int
    value: float
    least: float
    most: float


class Ring:
    """The values of the last ticks; one that was told nothing is a hole."""

    __slots__ = ("_last", "_values")

    def __init__(self, size: int) -> None:
        self._values = array("f", [HOLE]) * size
        self._last = -1

    @property
    def nbytes(self) -> int:
        return len(self._values) * self._values.itemsize

    def put(self, tick: int, value: float) -> None:
        """The value of a tick; one that is older than the newest is too late and left out."""
        size = len(self._values)
        if self._last >= 0:
            if tick < self._last:
                return
            for missed in range(max(self._last + 1, tick - size + 1), tick):
                self._values[missed % size] = HOLE
        self._values[tick % size] = value
        self._last = tick

    def get(self, tick: int) -> float:
        """The value of a tick, or a hole."""
        if not max(0, self._last - len(self._values) + 1) <= tick <= self._last:
            return HOLE
        return self._values[tick % len(self._values)]


class Series:
    """One number over time."""

    __slots__ = ("_count", "_least", "_mean", "_minute", "_most", "_raw", "_raw_s", "_sum", "_top", "_under")

    def __init__(self, raw_s: int) -> None:
        self._raw_s = raw_s
        self._raw = Ring(max(1, RAW_SPAN_S // raw_s))
        self._mean, self._least, self._most = Ring(MINUTES), Ring(MINUTES), Ring(MINUTES)
        self._minute = -1
        self._sum = 0.0
        self._count = 0
        self._under = self._top = 0.0

    @property
    def nbytes(self) -> int:
        """What its samples take."""
        return sum(ring.nbytes for ring in (self._raw, self._mean, self._least, self._most))

    def add(self, value: float, now_s: float) -> None:
        """A sample."""
        self._raw.put(int(now_s) // self._raw_s, value)
        minute = int(now_s) // MINUTE_S
        if minute != self._minute:
            self._close_minute()
            self._minute, self._sum, self._count = minute, 0.0, 0
            self._under = self._top = value
        self._sum += value
        self._count += 1
        self._under, self._top = min(self._under, value), max(self._top, value)

    def _close_minute(self) -> None:
        if self._count:
            self._mean.put(self._minute, self._sum / self._count)
            self._least.put(self._minute, self._under)
            self._most.put(self._minute, self._top)

    def points(self, duration_s: int, now_s: float, count_max: int) -> list[Point]:
        """The last ``duration_s``, as samples where those reach so far, else by the minute; neighbours are
        put together when there are more than ``count_max``."""
        found = (
            self._samples(duration_s, now_s) if duration_s <= RAW_SPAN_S else self._minutes(duration_s, now_s)
        )
        together = -(-len(found) // count_max)
        if together <= 1:
            return found
        parts = [found[start : start + together] for start in range(0, len(found), together)]
        return [_merged(part) for part in parts]

    def _samples(self, duration_s: int, now_s: float) -> list[Point]:
        last = int(now_s) // self._raw_s
        ticks = range(max(0, last - duration_s // self._raw_s), last + 1)
        pairs = [(tick * self._raw_s, self._raw.get(tick)) for tick in ticks]
        return [Point(at_s, value, value, value) for at_s, value in pairs if not math.isnan(value)]

    def _minutes(self, duration_s: int, now_s: float) -> list[Point]:
        last = int(now_s) // MINUTE_S
        found = []
        for minute in range(max(0, last - duration_s // MINUTE_S), last + 1):
            mean = self._mean.get(minute)
            if not math.isnan(mean):
                point = Point(minute * MINUTE_S, mean, self._least.get(minute), self._most.get(minute))
                found.append(point)
        if self._count:
            found.append(Point(self._minute * MINUTE_S, self._sum / self._count, self._under, self._top))
        return found


class SeriesSet:
    """Many series, up to a number."""

    def __init__(self, raw_s: int, series_max: int) -> None:
        self.raw_s = raw_s
        self._series_max = series_max
        self._series: dict[Key, Series] = {}

    def __len__(self) -> int:
        return len(self._series)

    @property
    def nbytes(self) -> int:
        """What all samples take."""
        return sum(series.nbytes for series in self._series.values())

    def add(self, key: Key, value: float, now_s: float) -> None:
        """A sample; of a series that is one too many nothing is kept."""
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= self._series_max:
                return
            series = self._series[key] = Series(self.raw_s)
        series.add(value, now_s)

    def keep(self, metric: str, labels: Collection[str]) -> None:
        """Of a metric only these remain: the others are of things that are gone."""
        for key in [key for key in self._series if key[0] == metric and key[1] not in labels]:
            del self._series[key]

    def names(self) -> list[Key]:
        """What there is, in order."""
        return sorted(self._series)

    def points(self, key: Key, duration_s: int, now_s: float, count_max: int = 300) -> list[Point]:
        """The last of one series; none when there is no such series."""
        series = self._series.get(key)
        return [] if series is None else series.points(duration_s, now_s, count_max)


def _merged(part: list[Point]) -> Point:
    mean = sum(point.value for point in part) / len(part)
    return Point(part[0].at_s, mean, min(p.least for p in part), max(p.most for p in part))
