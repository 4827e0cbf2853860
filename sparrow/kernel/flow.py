"""Flow control of one topic: what becomes of a publish when consumers fall behind.

The shell tells now and then how far the slowest subscription is behind (``observe``), and asks for
every batch what to do with it (``admit``). Neither waits for the other.

Observing. Backlog and age are put on one scale, the *pressure*: 0.5 at the low watermark, 1 at
high, 2 at the hard limit; the worse of the two counts and is the cause. It is smoothed, and modes
follow the smoothed value alone when it has held: normal, warning (watch only), throttled. The table below
is every legal move. What was drained between two observations gives the pace of the consumers.

Admitting. While throttled, ``block``, ``reject`` and ``drop_newest`` let publishers pass at the pace of
the consumers, a little below when the pressure is high and above when it is low, so that it settles
within the band instead of going stop and go. ``sample`` and ``drop_lowest_priority`` drop a share
that grows with the intensity, ``drop_oldest`` passes and names what to give up. Bulk gives way first,
then normal. Critical passes until the hard limit. That one is a bound and no trend: the last
observation plus all that passed since never gets above it by more than one batch.

All state is of one topic and volatile: nobody is slowed for another topic, and a restart begins anew.
Refuses to know: subscriptions, sockets, payloads, clocks. Jitter for those who wait is the shell's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sparrow.kernel.bucket import Bucket
from sparrow.kernel.quota import Quota, class_wait_us
from sparrow.kernel.shedding import PriorityMix, Thin
from sparrow.kernel.trend import Level, Rate
from sparrow.kernel.watermark import Watermark
from sparrow.model.errors import PublishRejected, RateLimited, SparrowError
from sparrow.model.flow import FlowPolicy, Overflow, PublisherClass

PRESSURE_LOW = 0.5
PRESSURE_WARN = 0.75
PRESSURE_HIGH = 1.0
PRESSURE_FULL = 2.0

SMOOTHING_US = 1_000_000
RELEASE_US = 5_000_000
"""How long the pressure must stay low before a mode ends. It costs nobody anything: the intensity
follows the pressure down meanwhile."""
DRAIN_WINDOW_US = 5_000_000
WAIT_US_MIN = 1_000
WAIT_US_MAX = 1_000_000
"""A publisher that waits asks again after this at the latest, so that a release is noticed."""
FULL_WAIT_US_MIN = 50_000
RETRY_AFTER_S_MIN = 0.1
RETRY_AFTER_S_MAX = 60.0
PACE_MIN = 1.0
"""Messages a second that pass while consumers stand still, up to the hard limit."""
PACE_BURST_S = 0.1
CRITICAL_BURSTS_MAX = 10
"""Bursts that critical publishers may take in advance: a second of the pace."""
INTENSITY_LEVEL = 0.75
"""Where publishers pass exactly at the pace of the consumers."""
PACE_SHARE_LEAST = 0.5


class Mode(enum.StrEnum):
    """How a topic treats its publishers."""

    NORMAL = "normal"
    WARNING = "warning"
    """Watched, not slowed."""
    THROTTLED = "throttled"


class Event(enum.StrEnum):
    """What observing found."""

    ROSE = "rose"
    """The pressure stayed above the warning mark."""
    OVERFLOWED = "overflowed"
    """It stayed above the high watermark."""
    RELEASED = "released"
    """It stayed below the low watermark, and the throttle has been ramped down."""
    CALMED = "calmed"
    """It stayed below the low watermark while nobody was slowed."""


TRANSITIONS: dict[tuple[Mode, Event], Mode] = {
    (Mode.NORMAL, Event.ROSE): Mode.WARNING,
    (Mode.WARNING, Event.OVERFLOWED): Mode.THROTTLED,
    (Mode.WARNING, Event.CALMED): Mode.NORMAL,
    (Mode.THROTTLED, Event.OVERFLOWED): Mode.THROTTLED,
    (Mode.THROTTLED, Event.RELEASED): Mode.WARNING,
}
"""Every legal move; a pair that is missing is a bug of the caller."""


class IllegalMove(AssertionError):
    """An event that cannot happen in a mode."""


class Action(enum.StrEnum):
    """What to do with a batch."""

    PASS = "pass"
    WAIT = "wait"
    """Sleep ``wait_us`` and ask again with the same batch and ``waited_us`` raised."""
    REJECT = "reject"
    """Raise ``signal.to_error()``."""
    DROP = "drop"
    """Store nothing, answer as if it had been."""
    THIN = "thin"
    """Store what ``thin`` keeps, and tell ``thinned`` how many were dropped."""
    TRIM = "trim"
    """Store it, and give up old messages until ``trim`` holds."""


class Cause(enum.StrEnum):
    """What a publisher is slowed for."""

    BACKLOG = "backlog"
    LAG = "lag"
    RATE = "rate"


class Signal(NamedTuple):
    """What a publisher is told when it is slowed."""

    topic: str
    cause: Cause
    level: str
    """The topic's mode, or ``full`` at the hard limit."""
    intensity: float
    retry_after_s: float

    def to_error(self) -> SparrowError:
        """The typed error of a rejected publish."""
        if self.cause is Cause.RATE:
            return RateLimited(f"the quota of topic {self.topic} is used up", **self._asdict())
        noun = "messages wait" if self.cause is Cause.BACKLOG else "old messages wait"
        return PublishRejected(f"too many {noun} in topic {self.topic}", **self._asdict())


class Trim(NamedTuple):
    """How much of what waits may stay; ``None`` is no bound."""

    keep_newest: int | None
    keep_younger_us: int | None


class Verdict(NamedTuple):
    """What becomes of a batch."""

    action: Action
    wait_us: int = 0
    signal: Signal | None = None
    thin: Thin | None = None
    trim: Trim | None = None


PASSED = Verdict(Action.PASS)


@dataclass(slots=True)
class FlowCounts:
    """Messages by what became of them; a batch that waited is counted once, at its end."""

    passed: int = 0
    rejected: int = 0
    dropped: int = 0
    waits: int = 0
    """How often a batch was told to wait."""
    trims: int = 0
    """How often old messages were given up for new ones."""


class TopicFlow:
    """The flow control of one topic; see the module's text."""

    __slots__ = (
        "_backlog",
        "_backlog_top",
        "_by_overflow",
        "_cause",
        "_drain",
        "_is_unlimited",
        "_mix",
        "_number",
        "_pace",
        "_policy",
        "_quota",
        "_since",
        "_smoothed",
        "_throttle",
        "_top",
        "_warning",
        "counts",
        "mode",
        "mode_changes",
        "topic",
    )

    def __init__(self, topic: str, policy: FlowPolicy, now_us: int) -> None:
        self.topic = topic
        self.mode = Mode.NORMAL
        self.mode_changes = 0
        self.counts = FlowCounts()
        self._cause = Cause.BACKLOG
        self._backlog = 0
        self._since = 0
        self._number = 0
        self._smoothed = Level(SMOOTHING_US)
        self._warning = Watermark(PRESSURE_LOW, PRESSURE_WARN, release_us=RELEASE_US)
        self._throttle = Watermark(PRESSURE_LOW, PRESSURE_HIGH, release_us=RELEASE_US)
        self._drain = Rate(DRAIN_WINDOW_US, now_us)
        self._pace = Bucket(PACE_MIN, 1.0, now_us)
        self._mix = PriorityMix()
        self._quota = Quota(policy.topic_rate, now_us)
        self._by_overflow: dict[Overflow, Callable[[_Asked], Verdict]] = {
            Overflow.BLOCK: self._block,
            Overflow.REJECT: self._reject,
            Overflow.DROP_NEWEST: self._drop_newest,
            Overflow.DROP_OLDEST: self._drop_oldest,
            Overflow.DROP_LOWEST_PRIORITY: self._drop_lowest,
            Overflow.SAMPLE: self._sample,
        }
        self._adopt(policy)

    @property
    def policy(self) -> FlowPolicy:
        """The policy in force."""
        return self._policy

    @property
    def intensity(self) -> float:
        """How firmly publishers are slowed, from 0 to 1."""
        return self._throttle.intensity

    @property
    def pressure(self) -> float:
        """Smoothed: 0.5 at the low watermark, 1 at high, 2 at the hard limit."""
        return self._smoothed.value

    @property
    def is_full(self) -> bool:
        """Whether the hard limit is reached."""
        return self._backlog + self._since >= self._top or self._smoothed.value >= PRESSURE_FULL

    def drain_per_s(self, now_us: int) -> float:
        """Messages a second that the slowest subscription gets done."""
        return self._drain.per_s(now_us)

    def change(self, policy: FlowPolicy, now_us: int) -> None:
        """Another policy from now on. A topic whose watermarks are gone is released at once."""
        if not self._policy.has_watermarks:
            self._since = 0  # Nobody may have observed until now, and the hard limit counts by it.
        self._adopt(policy)
        self._quota.change(policy.topic_rate, now_us)
        if not policy.has_watermarks:
            self._release()

    def signal(self, now_us: int) -> Signal:
        """What a publisher would be told now, for heartbeats and dashboards."""
        return self._signal(self._cause, self._pace.wait_us(now_us))

    # Observing.

    def observe(self, backlog: int, oldest_age_us: int, now_us: int) -> Mode:
        """How far the slowest subscription that counts is behind; the mode from now on.

        Without any subscription tell 0 and 0, and tell it: what passed is counted until you do.
        """
        self._drain.add(max(0, self._backlog + self._since - backlog), now_us)
        self._backlog, self._since = backlog, 0
        policy = self._policy
        if not policy.has_watermarks:
            return self.mode
        by_backlog = _pressure(backlog, policy.backlog_marks)
        by_lag = self._lag_pressure(backlog, oldest_age_us, now_us)
        self._cause = Cause.LAG if by_lag > by_backlog else Cause.BACKLOG
        self._judge(self._smoothed.observe(max(by_backlog, by_lag), now_us), now_us)
        self._set_pace(now_us)
        return self.mode

    def _lag_pressure(self, backlog: int, oldest_age_us: int, now_us: int) -> float:
        """The lag that counts is what a message published now will wait, at the consumers' pace.

        The age of the oldest shows the same only when it is too late to act; and one message that
        is stuck grows old without anybody being slow. So age is the evidence: a wait that is more
        than twice the age is not believed.
        """
        marks = self._policy.lag_marks_us
        self._top = self._backlog_top
        if marks is None:
            return 0.0
        drain = max(PACE_MIN, self._drain.per_s(now_us))
        if 2 * oldest_age_us >= marks[1]:
            self._top = min(self._top, max(1.0, drain * marks[2] / 1e6))
        return _pressure(min(backlog / drain * 1e6, 2.0 * oldest_age_us), marks)

    def move(self, event: Event) -> None:
        """Walk the table; an illegal move changes nothing and says so."""
        target = TRANSITIONS.get((self.mode, event))
        if target is None:
            raise IllegalMove(f"a topic that is {self.mode} cannot have {event}")
        self.mode_changes += target is not self.mode
        self.mode = target

    def _judge(self, pressure: float, now_us: int) -> None:
        self._warning.observe(pressure, now_us)
        self._throttle.observe(pressure, now_us)
        if self._warning.is_on and self.mode is Mode.NORMAL:
            self.move(Event.ROSE)
        if self._throttle.is_on and self.mode is not Mode.THROTTLED:
            self.move(Event.OVERFLOWED)
        if self.mode is Mode.THROTTLED and not self._throttle.is_on and self._throttle.intensity == 0:
            self.move(Event.RELEASED)
        if self.mode is Mode.WARNING and not self._warning.is_on:
            self.move(Event.CALMED)

    def _set_pace(self, now_us: int) -> None:
        """The consumers' pace times a factor: 1/2 at full intensity, 1 at the level one, and from
        there without bound as the intensity falls to 0, so that a release is no jump."""
        intensity = max(self._throttle.intensity, 0.01)
        slope = (1.0 - PACE_SHARE_LEAST) * INTENSITY_LEVEL / (1.0 - INTENSITY_LEVEL)
        factor = PACE_SHARE_LEAST + slope * (1.0 - intensity) / intensity
        pace = max(PACE_MIN, self._drain.per_s(now_us) * factor)
        self._pace.change(pace, max(1.0, pace * PACE_BURST_S), now_us)

    def _adopt(self, policy: FlowPolicy) -> None:
        self._policy = policy
        rates = (policy.messages_per_s, policy.bytes_per_s)
        self._is_unlimited = not policy.has_watermarks and rates == (None, None)
        marks = policy.backlog_marks
        self._top = self._backlog_top = marks[2] if marks is not None else float("inf")

    def _release(self) -> None:
        if self.mode is Mode.THROTTLED:
            self.move(Event.RELEASED)
        if self.mode is Mode.WARNING:
            self.move(Event.CALMED)
        self._smoothed = Level(SMOOTHING_US)
        self._warning = Watermark(PRESSURE_LOW, PRESSURE_WARN, release_us=RELEASE_US)
        self._throttle = Watermark(PRESSURE_LOW, PRESSURE_HIGH, release_us=RELEASE_US)
        self._since = 0

    # Admitting.

    def admit(
        self,
        kind: PublisherClass,
        count: int,
        size: int,
        now_us: int,
        *,
        waited_us: int = 0,
        priorities: Mapping[int, int] | None = None,
    ) -> Verdict:
        """What becomes of a batch of ``count`` messages and ``size`` bytes.

        ``waited_us`` is how long it has waited already, ``priorities`` how many messages have which
        priority (needed under ``drop_lowest_priority`` only; those not named have the default).
        """
        if self._is_unlimited:
            self._since += count
            self.counts.passed += count
            return PASSED
        asked = _Asked(kind, count, size, now_us, waited_us, self._seniority(waited_us))
        wait_us = self._quota.wait_us(kind, now_us, asked.seniority)
        if wait_us:
            return self._hold_back(asked, wait_us, Cause.RATE)
        if self._policy.overflow is Overflow.DROP_LOWEST_PRIORITY and waited_us == 0:
            self._mix.note(count, priorities)
        if self.mode is not Mode.THROTTLED and not self.is_full:
            return self._pass(asked, PASSED)
        return self._by_overflow[self._policy.overflow](asked)

    def _seniority(self, waited_us: int) -> float:
        timeout_us = self._policy.block_timeout_s * 1e6
        return min(1.0, waited_us / timeout_us) if waited_us < timeout_us else 1.0

    def thinned(self, dropped: int) -> None:
        """Of the last batch that was to be thinned so many messages were dropped."""
        self.counts.passed -= dropped
        self.counts.dropped += dropped
        self._since = max(0, self._since - dropped)

    def _block(self, asked: _Asked) -> Verdict:
        wait_us = self._pace_wait_us(asked)
        return self._hold_back(asked, wait_us, self._cause) if wait_us else self._pass(asked, PASSED)

    _reject = _block

    def _drop_newest(self, asked: _Asked) -> Verdict:
        if self._pace_wait_us(asked):
            return self._drop(asked)
        return self._pass(asked, PASSED)

    def _drop_oldest(self, asked: _Asked) -> Verdict:
        backlog, lag_us = self._policy.backlog_marks, self._policy.lag_marks_us
        self.counts.trims += 1
        trim = Trim(int(backlog[1]) if backlog else None, int(lag_us[1]) if lag_us else None)
        return self._pass(asked, Verdict(Action.TRIM, signal=self._signal(self._cause), trim=trim))

    def _sample(self, asked: _Asked) -> Verdict:
        shed = min(_shed(asked.kind, self.intensity), 1.0 - self._policy.sample_share_min)
        return self._thin(asked, shed, Thin(1.0 - shed, None, self._number))

    def _drop_lowest(self, asked: _Asked) -> Verdict:
        shed = _shed(asked.kind, self.intensity)
        return self._thin(asked, shed, self._mix.thin(shed, self._number))

    def _thin(self, asked: _Asked, shed: float, thin: Thin) -> Verdict:
        if self.is_full:
            return self._drop(asked)
        if shed <= 0.0:
            return self._pass(asked, PASSED)
        return self._pass(asked, Verdict(Action.THIN, signal=self._signal(self._cause), thin=thin))

    def _pace_wait_us(self, asked: _Asked) -> int:
        if self.is_full:
            return self._full_wait_us(asked.now_us)
        if asked.kind is PublisherClass.CRITICAL:
            return 0
        return class_wait_us(self._pace, asked.kind, asked.now_us, asked.seniority)

    def _full_wait_us(self, now_us: int) -> int:
        """Until consumers have made room, at their pace."""
        excess = max(0.0, self._backlog + self._since - self._top) + 1
        wait_us = int(excess / max(PACE_MIN, self._drain.per_s(now_us)) * 1e6)
        return max(FULL_WAIT_US_MIN, wait_us)

    def _hold_back(self, asked: _Asked, wait_us: int, cause: Cause) -> Verdict:
        """Wait, or be rejected when that is the policy or the time is up."""
        signal = self._signal(cause, wait_us)
        left_us = round(self._policy.block_timeout_s * 1e6) - asked.waited_us
        if self._policy.overflow is Overflow.REJECT or left_us <= 0:
            self.counts.rejected += asked.messages
            self._number += asked.messages
            return Verdict(Action.REJECT, signal=signal)
        self.counts.waits += 1
        wait_us = min(max(wait_us, WAIT_US_MIN), WAIT_US_MAX, left_us)
        return Verdict(Action.WAIT, wait_us, signal)

    def _drop(self, asked: _Asked) -> Verdict:
        self.counts.dropped += asked.messages
        self._number += asked.messages
        return Verdict(Action.DROP, signal=self._signal(self._cause))

    def _pass(self, asked: _Asked, verdict: Verdict) -> Verdict:
        self._quota.spend(asked.messages, asked.size, asked.now_us)
        if self.mode is Mode.THROTTLED:
            self._spend_pace(asked)
        self._since += asked.messages
        self._number += asked.messages
        self.counts.passed += asked.messages
        return verdict

    def _spend_pace(self, asked: _Asked) -> None:
        """Critical ones do not wait, so what they may owe is bounded: others must not pay for minutes."""
        tokens = asked.messages
        if asked.kind is PublisherClass.CRITICAL:
            room = self._pace.level(asked.now_us) + CRITICAL_BURSTS_MAX * self._pace.burst
            tokens = min(tokens, max(0, int(room)))
        self._pace.spend(tokens, asked.now_us)

    def _signal(self, cause: Cause, wait_us: int = 0) -> Signal:
        level = "full" if cause is not Cause.RATE and self.is_full else self.mode.value
        retry_after_s = min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, wait_us / 1e6))
        return Signal(self.topic, cause, level, round(self.intensity, 3), retry_after_s)


class _Asked(NamedTuple):
    """A batch that asks to pass."""

    kind: PublisherClass
    messages: int
    size: int
    now_us: int
    waited_us: int
    seniority: float
    """The share of its time that it has waited."""


def _pressure(value: float, marks: tuple[float, float, float] | None) -> float:
    """A value on the common scale: straight lines through the three marks."""
    if marks is None:
        return 0.0
    low, high, top = marks
    if value < low:
        return PRESSURE_LOW * value / low
    if value < high:
        return PRESSURE_LOW + (PRESSURE_HIGH - PRESSURE_LOW) * (value - low) / (high - low)
    return PRESSURE_HIGH + (PRESSURE_FULL - PRESSURE_HIGH) * (value - high) / (top - high)


def _shed(kind: PublisherClass, intensity: float) -> float:
    """The share to drop: bulk is gone before normal is touched."""
    if kind is PublisherClass.CRITICAL:
        return 0.0
    doubled = 2.0 * intensity
    return min(1.0, doubled) if kind is PublisherClass.BULK else max(0.0, doubled - 1.0)
