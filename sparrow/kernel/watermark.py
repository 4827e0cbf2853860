"""A watermark: whether a noisy signal is high, and how firmly to act on it.

It turns on when the signal stayed at or above ``high`` for ``hold_us``, and off when it stayed below
``low`` for ``release_us``. Between the two nothing changes, so noise that is narrower than the band
cannot make it flap, and noise of any kind changes it at most once in that time. One sample never does,
because a stretch needs two ends. One that turns on again soon after it turned off was let go too early:
it takes twice as long to turn off the next time, so what keeps coming back changes it ever more seldom.

``intensity`` says how firmly: 0 while off; while on it follows the place of the signal in the band,
0 at ``low``, 1 at ``high`` and above. It moves no faster than from 0 to 1 in ``ramp_up_us`` and back
in ``ramp_down_us``. A controller that acts by it settles somewhere inside the band, where a switch
would stop and go.
"""

from __future__ import annotations

HOLD_US = 1_000_000
RELAPSE_US = 60_000_000
"""Turning on again within this time counts as coming back; also the longest wait for turning off."""
RAMP_UP_US = 2_000_000
RAMP_DOWN_US = 5_000_000
"""Release more slowly than you seize (queue.md §7.3: reaction in 1 to 10 s, slow release)."""


class Watermark:
    """High or not, of one signal."""

    __slots__ = (
        "_at_us",
        "_hold_us",
        "_ramp_down_us",
        "_ramp_up_us",
        "_release_least_us",
        "_release_us",
        "_released_at_us",
        "_since_us",
        "changes",
        "high",
        "intensity",
        "is_on",
        "low",
    )

    def __init__(
        self,
        low: float,
        high: float,
        *,
        hold_us: int = HOLD_US,
        release_us: int | None = None,
        ramp_up_us: int = RAMP_UP_US,
        ramp_down_us: int = RAMP_DOWN_US,
    ) -> None:
        assert low < high, f"a watermark needs low < high, not {low} and {high}"
        self.low = low
        self.high = high
        self.is_on = False
        self.intensity = 0.0
        self.changes = 0
        """How often it turned on or off."""
        self._hold_us = hold_us
        self._release_us = self._release_least_us = hold_us if release_us is None else release_us
        self._released_at_us: int | None = None
        self._ramp_up_us = max(1, ramp_up_us)
        self._ramp_down_us = max(1, ramp_down_us)
        self._since_us: int | None = None
        self._at_us: int | None = None

    def observe(self, value: float, now_us: int) -> bool:
        """A sample of the signal; whether it turned on or off with it."""
        passed_us = 0 if self._at_us is None else max(0, now_us - self._at_us)
        self._at_us = now_us if self._at_us is None else max(now_us, self._at_us)
        has_turned = self._turn(value, self._at_us)
        self._ramp(value, passed_us)
        return has_turned

    def change(self, low: float, high: float) -> None:
        """Other thresholds from now on; what it is stays until the signal has held."""
        assert low < high, f"a watermark needs low < high, not {low} and {high}"
        self.low = low
        self.high = high
        self._since_us = None

    def _turn(self, value: float, now_us: int) -> bool:
        is_beyond = value < self.low if self.is_on else value >= self.high
        if not is_beyond:
            self._since_us = None
            return False
        if self._since_us is None:
            self._since_us = now_us
            return False
        if now_us - self._since_us < (self._release_us if self.is_on else self._hold_us):
            return False
        self.is_on = not self.is_on
        self.changes += 1
        self._since_us = None
        self._learn(now_us)
        return True

    def _learn(self, now_us: int) -> None:
        """How long to wait before turning off, by whether the last time was too early."""
        if not self.is_on:
            self._released_at_us = now_us
        elif self._released_at_us is not None:
            is_relapse = now_us - self._released_at_us < RELAPSE_US
            longer_us = min(2 * self._release_us, max(RELAPSE_US, self._release_least_us))
            self._release_us = longer_us if is_relapse else self._release_least_us

    def _ramp(self, value: float, passed_us: int) -> None:
        place = (value - self.low) / (self.high - self.low)
        target = min(1.0, max(0.0, place)) if self.is_on else 0.0
        if target > self.intensity:
            self.intensity = min(target, self.intensity + passed_us / self._ramp_up_us)
        else:
            self.intensity = max(target, self.intensity - passed_us / self._ramp_down_us)
