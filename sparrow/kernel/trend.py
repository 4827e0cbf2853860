"""Trends: what a stream of numbers has been lately, at constant cost.

All of them forget with time and not with the count of samples: a number that is one window old
weighs 1/e of a fresh one. So it does not matter whether a shell tells of every batch or sums them up
every second. Time is an argument; a time that runs backwards counts as no time at all.

- ``Mean``: the mean of values that come with a weight, such as the waits of a batch
- ``Rate``: how many a second; right from the start, when the window is not yet filled
- ``Level``: a smoothed signal that is sampled now and then, such as a depth
- ``Slope``: by how much a signal rises in a second, by least squares over the window
"""

from __future__ import annotations

import math
from collections import deque

SECOND_US = 1_000_000
SLOPE_SAMPLES_MAX = 32
_WARM_US = SECOND_US // 10
"""A rate over less time than this is not told apart from one over exactly this."""


class Mean:
    """The weighted mean over a window."""

    __slots__ = ("_at_us", "_total", "_weight", "_window_us")

    def __init__(self, window_us: int) -> None:
        self._window_us = window_us
        self._total = 0.0
        self._weight = 0.0
        self._at_us = 0

    def add(self, total: float, weight: float, now_us: int) -> None:
        """Values that sum up to ``total``, ``weight`` of them."""
        kept = math.exp(-max(0, now_us - self._at_us) / self._window_us)
        self._total = self._total * kept + total
        self._weight = self._weight * kept + weight
        self._at_us = max(now_us, self._at_us)

    @property
    def value(self) -> float | None:
        """The mean; ``None`` when nothing was told, or too long ago to mean anything."""
        return self._total / self._weight if self._weight > 1e-9 else None

    @property
    def weight(self) -> float:
        """How much it rests on."""
        return self._weight


class Rate:
    """How many a second over a window."""

    __slots__ = ("_at_us", "_since_us", "_sum", "_window_us")

    def __init__(self, window_us: int, now_us: int) -> None:
        self._window_us = window_us
        self._sum = 0.0
        self._since_us = self._at_us = now_us

    def add(self, count: float, now_us: int) -> None:
        """So many more."""
        self._sum = self._sum * self._kept(now_us) + count
        self._at_us = max(now_us, self._at_us)

    def per_s(self, now_us: int) -> float:
        """The rate now; it falls by itself when nothing is told."""
        lived_us = max(now_us - self._since_us, _WARM_US)
        horizon_s = self._window_us * -math.expm1(-lived_us / self._window_us) / SECOND_US
        return self._sum * self._kept(now_us) / horizon_s

    def _kept(self, now_us: int) -> float:
        return math.exp(-max(0, now_us - self._at_us) / self._window_us)


class Level:
    """A smoothed signal."""

    __slots__ = ("_at_us", "_window_us", "value")

    def __init__(self, window_us: int) -> None:
        self._window_us = window_us
        self._at_us: int | None = None
        self.value = 0.0

    def observe(self, value: float, now_us: int) -> float:
        """A sample; the smoothed value after it."""
        if self._at_us is None:
            self._at_us, self.value = now_us, value
            return value
        passed_us = max(0, now_us - self._at_us)
        self.value += -math.expm1(-passed_us / self._window_us) * (value - self.value)
        self._at_us = max(now_us, self._at_us)
        return self.value


class Slope:
    """The rise of a signal in a second, over the last window."""

    __slots__ = ("_samples", "_window_us")

    def __init__(self, window_us: int) -> None:
        self._window_us = window_us
        self._samples: deque[tuple[int, float]] = deque()

    def observe(self, value: float, now_us: int) -> None:
        """A sample; those that come too close upon each other are left out."""
        samples = self._samples
        if samples and now_us - samples[-1][0] < self._window_us // SLOPE_SAMPLES_MAX:
            return
        samples.append((now_us, value))
        while samples[0][0] < now_us - self._window_us:
            samples.popleft()

    def per_s(self) -> float:
        """The slope of the line through the samples; 0 with fewer than three."""
        count = len(self._samples)
        if count < 3:
            return 0.0
        start_us = self._samples[0][0]
        times = [(at_us - start_us) / SECOND_US for at_us, _ in self._samples]
        mean_s = sum(times) / count
        mean = sum(value for _, value in self._samples) / count
        spread = sum((t - mean_s) ** 2 for t in times)
        pairs = zip(times, self._samples, strict=True)
        return sum((t - mean_s) * (value - mean) for t, (_, value) in pairs) / spread
