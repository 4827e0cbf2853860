"""Time and chance as a seed decides them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from sparrow.broker import chance
from sparrow.broker.clock import Clock
from sparrow.testing.simloop import SimLoop

START_US = 1_767_225_600_000_000
"""The first of January 2026."""


class SimClock(Clock):
    """The clocks of one simulated machine. Wall time follows the loop and may be set, also backwards."""

    def __init__(self) -> None:
        self.loop: SimLoop | None = None
        self.skew_us = 0
        self.latest_us = START_US
        """The latest wall time that anybody has seen."""

    def now_us(self) -> int:
        found = START_US + int(self._now_s() * 1_000_000) + self.skew_us
        self.latest_us = max(self.latest_us, found)
        return found

    def monotonic_s(self) -> float:
        return self._now_s()

    def jump(self, seconds: float) -> None:
        """Somebody sets the clock."""
        self.skew_us += int(seconds * 1_000_000)

    def _now_s(self) -> float:
        return self.loop.now_s if self.loop is not None else 0.0


@contextmanager
def seeded_chance(dice: Random) -> Iterator[None]:
    """While this lasts, the broker throws these dice and no others."""
    before = chance.jitter, chance.session, chance.name
    chance.jitter = dice.random
    chance.session = lambda: dice.getrandbits(32)
    chance.name = lambda: f"{dice.getrandbits(64):016x}"
    try:
        yield
    finally:
        chance.jitter, chance.session, chance.name = before
