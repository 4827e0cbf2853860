"""A token bucket: how much may go now, and how long to wait for more.

It fills at ``rate`` tokens a second up to ``burst``. Whoever comes while it holds anything at all is
served whole, however much they take: the bucket goes into debt and later ones wait until it is paid. So a
batch larger than the burst passes, large and small ones wait equally long, and over any time
no more is granted than ``burst + rate * time + the largest batch``.

Tokens are counted in whole trillionths. A rate is a whole number of millionths a second, so what
accrues in a microsecond is whole too: no fraction is ever lost, however often the bucket is asked.

``reserve`` keeps the upper part for others: with a reserve of half the burst one is served only
while the bucket is more than half full. A time that runs backwards accrues nothing.
"""

from __future__ import annotations

_TOKEN = 10**12
_MICRO = 10**6
WAIT_US_MAX = 3600 * _MICRO
"""The longest wait that is ever named; a rate close to nothing would mean years."""


class Bucket:
    """The tokens of one limit."""

    __slots__ = ("_at_us", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now_us: int) -> None:
        self._rate = _to_rate(rate)
        self._burst = self._level = _to_burst(burst)
        self._at_us = now_us

    @property
    def burst(self) -> float:
        """Tokens it holds when full."""
        return self._burst / _TOKEN

    def level(self, now_us: int) -> float:
        """Tokens it holds; negative while in debt."""
        self._accrue(now_us)
        return self._level / _TOKEN

    def is_full(self, now_us: int) -> bool:
        """Whether it has been left alone long enough to be as good as new."""
        self._accrue(now_us)
        return self._level == self._burst

    def wait_us(self, now_us: int, reserve: float = 0.0) -> int:
        """How long until one is served who leaves ``reserve`` tokens to others; 0 is now."""
        self._accrue(now_us)
        missing = min(round(reserve * _TOKEN), self._burst - 1) - self._level + 1
        if missing <= 0:
            return 0
        return min(-(-missing // self._rate), WAIT_US_MAX)

    def spend(self, tokens: int, now_us: int) -> None:
        """Take tokens whether they are there or not."""
        assert tokens >= 0, f"cannot take {tokens} tokens"
        self._accrue(now_us)
        self._level -= tokens * _TOKEN

    def take(self, tokens: int, now_us: int, reserve: float = 0.0) -> int:
        """Take tokens and return 0, or take none and return how long to wait before asking again."""
        if tokens == 0:
            return 0
        wait_us = self.wait_us(now_us, reserve)
        if wait_us == 0:
            self.spend(tokens, now_us)
        return wait_us

    def change(self, rate: float, burst: float, now_us: int) -> None:
        """From now on another rate and burst; what accrued until now did so at the old ones."""
        self._accrue(now_us)
        self._rate = _to_rate(rate)
        self._burst = _to_burst(burst)
        self._level = min(self._level, self._burst)

    def _accrue(self, now_us: int) -> None:
        passed_us = now_us - self._at_us
        if passed_us > 0:
            self._level = min(self._burst, self._level + passed_us * self._rate)
            self._at_us = now_us


def _to_rate(rate: float) -> int:
    """Trillionths in a microsecond, which are millionths in a second; never nothing."""
    return max(1, round(rate * _MICRO))


def _to_burst(burst: float) -> int:
    return max(1, round(burst * _TOKEN))
