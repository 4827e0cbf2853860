"""Pace: slow and bad members of a group, and how long a lease should last.

A member is compared with the *median of the others*. A mean would be pulled along by the very member
that is judged: of two, one that stands still halves the mean and looks half as bad; of many, one that is
very fast would make all others slow. With fewer than two members, or too few acks, nobody is judged
(queue.md §7.5 gives the thresholds).

The ack rate is counted over the time in which a member held messages, not over all time. A member that
gets little to do is not slow; and one that was given fewer messages because it was slow shows by its
few that it has recovered, where a plain rate would keep it down for ever.

``weight`` says how many messages a member should get, next to 1 for a healthy one: its rate next to
the others' once it is known to be slow, less the share that fails. It is never 0 for a member
that is here: what gets nothing can show nothing.

``ack_deadline_s`` is twice an estimate of the 95th percentile of the processing time, within 5 to 600 s
(queue.md §5.3). The estimator steps up nineteen times as far as down, so it rests where one in twenty
is longer: it grows fast and shrinks slowly. A lease that ran out is longer than anybody knows
and raises it by half.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from sparrow.kernel.lag import Gauge, LagLevel
from sparrow.kernel.trend import SECOND_US, Mean, Slope

WINDOW_US = 60 * SECOND_US
GROWTH_WINDOW_US = 60 * SECOND_US
HOLD_US = 5 * SECOND_US
SAMPLES_MIN = 20
"""Acks and failures, within the window, before a member is judged."""
BUSY_S_MIN = 10.0
"""Seconds of holding that many before one who never acked is judged by it."""
WEIGHT_MIN = 0.05

RATE_LIMITS = (2.0, 4.0)
"""Below 50 % and 25 % of the others' ack rate, as how many times slower."""
LATENCY_LIMITS = (2.0, 5.0)
GROWTH_LIMITS_PER_MINUTE = (100.0, 1000.0)
HEARTBEAT_LIMITS = (2.0, 5.0)
"""Intervals without a heartbeat."""

DEADLINE_S_MIN = 5.0
DEADLINE_S_MAX = 600.0
DEADLINE_FACTOR = 2.0
"""Of the 95th percentile; queue.md §5.3 has 2 to 3 times the average."""
_STEP_UP = 0.19
_STEP_DOWN = 0.01
_TIMEOUT_GROWTH = 1.5

_WORST = (LagLevel.CRITICAL, LagLevel.WARN, LagLevel.OK)


class Deadline:
    """How long a lease should last, from how long processing takes."""

    __slots__ = ("_longest_s", "_shortest_s", "estimate_s")

    def __init__(
        self, initial_s: float, shortest_s: float = DEADLINE_S_MIN, longest_s: float = DEADLINE_S_MAX
    ) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self.estimate_s = self._bounded(initial_s / DEADLINE_FACTOR)
        """About the 95th percentile of the processing time."""

    @property
    def ack_deadline_s(self) -> float:
        """The deadline for leases from now on."""
        return min(self._longest_s, max(self._shortest_s, DEADLINE_FACTOR * self.estimate_s))

    def processed(self, longest_us: int) -> None:
        """A batch was acked; its slowest message took so long from hand-over to ack."""
        is_longer = longest_us > self.estimate_s * SECOND_US
        step = 1.0 + _STEP_UP if is_longer else 1.0 - _STEP_DOWN
        self.estimate_s = self._bounded(self.estimate_s * step)

    def timed_out(self) -> None:
        """A lease ran out."""
        self.estimate_s = self._bounded(self.estimate_s * _TIMEOUT_GROWTH)

    def _bounded(self, estimate_s: float) -> float:
        """Within what the deadline can be, so that coming back from a bound takes no time."""
        low, high = self._shortest_s / DEADLINE_FACTOR, self._longest_s / DEADLINE_FACTOR
        return min(high, max(low, estimate_s))


class MemberPace(NamedTuple):
    """How one member does; ratios are next to the others and ``None`` while nobody can tell."""

    level: LagLevel
    weight: float
    rate_per_s: float | None
    """Acks a second while it held messages."""
    rate_ratio: float | None
    latency_s: float | None
    latency_ratio: float | None
    failure_share: float
    growth_per_minute: float
    """Messages by which what it holds grows in a minute."""
    heartbeat_gap: float
    """Intervals since its last heartbeat."""
    in_flight: int


class _Member:
    __slots__ = (
        "beat_us",
        "failures",
        "gauges",
        "growth",
        "in_flight",
        "latency",
        "rate",
        "rate_at_us",
        "ratio",
    )

    def __init__(self, now_us: int) -> None:
        self.in_flight = 0
        self.beat_us = self.rate_at_us = now_us
        self.rate = Mean(WINDOW_US)
        """Acks by second of holding something."""
        self.latency = Mean(WINDOW_US)
        self.failures = Mean(WINDOW_US)
        self.growth = Slope(GROWTH_WINDOW_US)
        self.ratio: float | None = None
        self.gauges = {
            "rate": Gauge(*RATE_LIMITS, HOLD_US),
            "latency": Gauge(*LATENCY_LIMITS, HOLD_US),
            "growth": Gauge(*GROWTH_LIMITS_PER_MINUTE, HOLD_US),
            "heartbeat": Gauge(*HEARTBEAT_LIMITS, 0),
        }

    @property
    def level(self) -> LagLevel:
        found = {gauge.level for gauge in self.gauges.values()}
        return next(level for level in _WORST if level in found)

    @property
    def is_slow(self) -> bool:
        return self.gauges["rate"].level is not LagLevel.OK

    @property
    def is_known(self) -> bool:
        return self.failures.weight >= SAMPLES_MIN

    def count_busy(self, done: int, now_us: int) -> None:
        """Time in which it held something, and what it got done by then."""
        passed_s = max(0, now_us - self.rate_at_us) / SECOND_US
        self.rate.add(done, passed_s if self.in_flight else 0.0, now_us)
        self.rate_at_us = max(now_us, self.rate_at_us)


class GroupPace:
    """The members of one group. A name that was not heard of joins by being told of."""

    __slots__ = ("_beat_us", "_members")

    def __init__(self, heartbeat_interval_s: float = 30.0) -> None:
        self._beat_us = heartbeat_interval_s * SECOND_US
        self._members: dict[str, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def joined(self, member: str, now_us: int) -> None:
        """A member is here."""
        self._member(member, now_us)

    def left(self, member: str) -> None:
        """A member is gone, and with it all that was known of it."""
        self._members.pop(member, None)

    # Feeding, by the batch.

    def heartbeat(self, member: str, now_us: int) -> None:
        """A sign of life; an ack is one too."""
        self._member(member, now_us).beat_us = now_us

    def handed_over(self, member: str, count: int, now_us: int) -> None:
        """It got messages."""
        found = self._member(member, now_us)
        found.count_busy(0, now_us)
        found.in_flight += count

    def acked(self, member: str, count: int, handed_over_sum_us: int, now_us: int) -> None:
        """It acked messages; ``handed_over_sum_us`` is the sum of their hand-over times."""
        found = self._settled(member, count, count, now_us)
        found.latency.add(max(0, count * now_us - handed_over_sum_us), count, now_us)
        found.failures.add(0, count, now_us)
        found.beat_us = now_us

    def failed(self, member: str, count: int, now_us: int) -> None:
        """It nacked messages or let them time out."""
        self._settled(member, 0, count, now_us).failures.add(count, count, now_us)

    def returned(self, member: str, count: int, now_us: int) -> None:
        """Messages were taken from it through no fault of its own."""
        self._settled(member, 0, count, now_us)

    def _settled(self, member: str, done: int, count: int, now_us: int) -> _Member:
        found = self._member(member, now_us)
        found.count_busy(done, now_us)
        found.in_flight = max(0, found.in_flight - count)
        return found

    def _member(self, name: str, now_us: int) -> _Member:
        found = self._members.get(name)
        if found is None:
            found = self._members[name] = _Member(now_us)
        return found

    # Judging.

    def observe(self, now_us: int) -> dict[str, LagLevel]:
        """Judge everybody, every second or so; the level of each."""
        for member in self._members.values():
            member.count_busy(0, now_us)
            member.growth.observe(member.in_flight, now_us)
        for member in self._members.values():
            self._judge(member, now_us)
        return {name: member.level for name, member in self._members.items()}

    def weight(self, member: str) -> float:
        """How much it should get, from just above 0 to 1."""
        found = self._members.get(member)
        if found is None:
            return 1.0
        speed = found.ratio if found.is_slow and found.ratio is not None else 1.0
        return min(1.0, max(WEIGHT_MIN, speed * (1.0 - _failure_share(found))))

    def look(self, member: str, now_us: int) -> MemberPace | None:
        """How a member does, as of the last ``observe``; ``None`` when it is not here."""
        found = self._members.get(member)
        if found is None:
            return None
        latency_us = found.latency.value
        return MemberPace(
            level=found.level,
            weight=self.weight(member),
            rate_per_s=_rate(found),
            rate_ratio=found.ratio,
            latency_s=None if latency_us is None else latency_us / SECOND_US,
            latency_ratio=self._ratio(found, _latency),
            failure_share=_failure_share(found),
            growth_per_minute=60.0 * found.growth.per_s(),
            heartbeat_gap=self._gap(found, now_us),
            in_flight=found.in_flight,
        )

    def _judge(self, member: _Member, now_us: int) -> None:
        member.ratio = self._ratio(member, _rate)
        slowness = 0.0 if member.ratio is None else 1.0 / max(member.ratio, 1e-6)
        gauges = member.gauges
        gauges["rate"].observe(slowness, now_us)
        gauges["latency"].observe(self._ratio(member, _latency) or 0.0, now_us)
        gauges["growth"].observe(60.0 * member.growth.per_s(), now_us)
        gauges["heartbeat"].observe(self._gap(member, now_us), now_us)

    def _ratio(self, member: _Member, measure: Callable[[_Member], float | None]) -> float | None:
        """Next to the median of the others; ``None`` while it or they are not known."""
        mine = measure(member)
        others = [measure(other) for other in self._members.values() if other is not member]
        known = [value for value in others if value is not None]
        if mine is None or not known:
            return None
        median = statistics.median(known)
        return mine / median if median > 0 else None

    def _gap(self, member: _Member, now_us: int) -> float:
        return max(0.0, now_us - member.beat_us) / self._beat_us


def _rate(member: _Member) -> float | None:
    """Acks a second of holding something; one that holds much and acks nothing is known too."""
    stands_still = member.in_flight >= SAMPLES_MIN and member.rate.weight >= BUSY_S_MIN
    is_known = member.is_known or stands_still
    return member.rate.value if is_known else None


def _latency(member: _Member) -> float | None:
    return member.latency.value if member.latency.weight >= SAMPLES_MIN else None


def _failure_share(member: _Member) -> float:
    return (member.failures.value or 0.0) if member.is_known else 0.0
