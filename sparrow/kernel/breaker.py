"""A circuit breaker: stop handing work to something that fails most of it.

Closed: all goes. It opens when more than half of the recent outcomes are failures (queue.md §5.4,
"bad consumer"), out of at least ``SAMPLE_MIN``. Open: nothing goes until it has cooled down. Half
open: one probe goes; its success closes the breaker, its failure opens it again for twice as long.
Outcomes of work given before the breaker opened still arrive and change nothing.

The moves are one table. Time is an argument. The breaker is volatile: after a restart everybody gets
a fresh chance.
"""

from __future__ import annotations

import enum

SAMPLE_MIN = 20
"""Outcomes before a share of failures means anything."""
SAMPLE_MAX = 100
"""Outcomes after which the older half of the weight is forgotten (queue.md §5.1.5)."""
FAILURE_SHARE_MAX = 0.5
COOLDOWN_US = 5_000_000
COOLDOWN_US_MAX = 300_000_000


class State(enum.StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(enum.StrEnum):
    """What a breaker learns."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_TOO_OFTEN = "failed_too_often"
    COOLED_DOWN = "cooled_down"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.SUCCEEDED): State.CLOSED,
    (State.CLOSED, Event.FAILED): State.CLOSED,
    (State.CLOSED, Event.FAILED_TOO_OFTEN): State.OPEN,
    (State.OPEN, Event.SUCCEEDED): State.OPEN,
    (State.OPEN, Event.FAILED): State.OPEN,
    (State.OPEN, Event.COOLED_DOWN): State.HALF_OPEN,
    (State.HALF_OPEN, Event.SUCCEEDED): State.CLOSED,
    (State.HALF_OPEN, Event.FAILED): State.OPEN,
}
"""Every legal move; a pair that is missing is a bug of the caller."""


class IllegalMove(AssertionError):
    """An event that cannot happen in a state."""


class Breaker:
    """The breaker of one consumer."""

    __slots__ = ("_cooldown_us", "_failures", "_probe_until_us", "_reopens_at_us", "_total", "state")

    def __init__(self) -> None:
        self.state = State.CLOSED
        self._cooldown_us = COOLDOWN_US
        self._total: float = 0
        self._failures: float = 0
        self._reopens_at_us = 0
        self._probe_until_us = 0

    def allowance(self, wanted: int, now_us: int) -> int:
        """How much of what is wanted may go."""
        if self.state is State.CLOSED:
            return wanted
        if self.state is State.OPEN:
            if now_us < self._reopens_at_us:
                return 0
            self.move(Event.COOLED_DOWN, now_us)
        if now_us < self._probe_until_us:
            return 0
        return min(wanted, 1)

    def probe_sent(self, now_us: int) -> None:
        """In half open, what was let through is on its way; wait for its outcome."""
        if self.state is State.HALF_OPEN:
            self._probe_until_us = now_us + self._cooldown_us

    def record(self, *, successes: int = 0, failures: int = 0, now_us: int = 0) -> None:
        """Outcomes arrived."""
        if successes:
            self.move(Event.SUCCEEDED, now_us)
        if failures:
            self.move(Event.FAILED, now_us)
        if self.state is not State.CLOSED:
            return
        self._total += successes + failures
        self._failures += failures
        if self._total >= SAMPLE_MIN and self._failures > FAILURE_SHARE_MAX * self._total:
            self.move(Event.FAILED_TOO_OFTEN, now_us)
        elif self._total > SAMPLE_MAX:
            self._failures *= SAMPLE_MAX / 2 / self._total
            self._total = SAMPLE_MAX / 2

    def move(self, event: Event, now_us: int) -> None:
        """Walk the table; an illegal move changes nothing and says so."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalMove(f"a breaker that is {self.state} cannot have {event}")
        before, self.state = self.state, target
        if target is State.OPEN and before is not State.OPEN:
            if before is State.HALF_OPEN:
                self._cooldown_us = min(2 * self._cooldown_us, COOLDOWN_US_MAX)
            self._reopens_at_us = now_us + self._cooldown_us
        elif target is State.CLOSED and before is State.HALF_OPEN:
            self._cooldown_us = COOLDOWN_US
            self._total = self._failures = 0
            self._probe_until_us = 0

    def next_wakeup_us(self) -> int | None:
        """When it will let something through that it does not now."""
        if self.state is State.OPEN:
            return self._reopens_at_us
        return self._probe_until_us if self.state is State.HALF_OPEN else None
