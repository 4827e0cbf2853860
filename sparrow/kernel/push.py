"""The pace of one webhook receiver: how many requests may be under way now, and when to leave it alone.

Two things are decided here, from nothing but answers and times.

*How many at once.* Concurrency starts small, also after a restart, so that a broker that comes back with a
backlog does not fall upon its receivers. It doubles while all goes well until the first trouble, then grows
by one for every full round. Failures, 429 and answers that take much longer than this receiver needs at its
best shrink it; all that was sent before a cut belongs to that cut.

*Whether at all.* A breaker opens when the receiver fails ``FAILURES_MAX`` times in a row, over more than one
message: one bad message is a matter of the subscription's retries, a bad receiver must not use up the
attempts of the whole backlog. While it is open nothing is leased. Then one request tries; when it fails the
wait doubles, when it succeeds concurrency starts small again. Many refusals (4xx) in a row, without one
success, open it too: a receiver that is set up wrong is alive and refuses everything. ``Retry-After`` makes
everybody wait. 410 means that there is no receiver any more.

Every request carries the *round* in which it started; a breaker that opens or closes begins a new one, and
answers of an older round change nothing but the count of requests under way.
"""

from __future__ import annotations

import enum
import math
from email.utils import parsedate_to_datetime

from sparrow.kernel.breaker import TRANSITIONS, Event, IllegalMove, State
from sparrow.kernel.bucket import Bucket

START = 4
"""Requests under way at once in the beginning."""
FAILURES_MAX = 5
"""Failures in a row, over two messages or more, that open the breaker."""
REJECTIONS_MAX = 20
"""Answers in a row without a success that do so when the receiver is alive."""
WAIT_US = 5_000_000
WAIT_US_MAX = 300_000_000
WAIT_JITTER = 0.2
"""Share of a wait by which it may be longer: receivers that failed together are not tried together."""
FAULT_WAIT_US = 1_000_000
RETRY_AFTER_S_MAX = 3600.0
CUT = 0.5
CUT_WHEN_SLOW = 0.8
SLOW_FACTOR = 4.0
SLOW_US_MIN = 1_000_000
"""An answer within a second is never slow."""
_FLOOR_DRIFT = 0.01
_SMOOTHING = 0.1
_RATE_SPAN_US = 10_000_000
_SECOND_US = 1_000_000


class Answer(enum.StrEnum):
    """What became of a request."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """The receiver is alive and does not want this message: 3xx, 4xx."""
    THROTTLED = "throttled"
    """Too many requests."""
    FAILED = "failed"
    """5xx, no answer in time, a broken connection."""
    UNREACHABLE = "unreachable"
    """There was no connection: the receiver never saw the message."""
    GONE = "gone"
    FAULT = "fault"
    """This machine could not send; no fault of the receiver."""


_TROUBLES = frozenset({Answer.FAILED, Answer.THROTTLED, Answer.UNREACHABLE})


def judge(status: int) -> Answer:
    """What an HTTP status says."""
    if 200 <= status < 300:
        return Answer.ACCEPTED
    if status == 410:
        return Answer.GONE
    if status == 429:
        return Answer.THROTTLED
    if status in (408, 425) or status >= 500:
        return Answer.FAILED
    return Answer.REJECTED


def parse_retry_after(text: str | None, now_us: int) -> float | None:
    """Seconds to wait, from the header's number or date; ``None`` when it says nothing useful."""
    if not text:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:12]), RETRY_AFTER_S_MAX)
    try:
        moment_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
    return min(max(0.0, moment_s - now_us / _SECOND_US), RETRY_AFTER_S_MAX)


class Endpoint:
    """The receiver of one subscription's webhooks."""

    __slots__ = (
        "_accepted_at_us", "_bucket", "_cut_at_us", "_failing", "_failing_messages", "_floor_us",
        "_full_at_us",
        "_is_probing", "_limit", "_not_before_us", "_opened_by_rejections", "_rate", "_reopens_at_us",
        "_slow_start_until", "_unaccepted", "_wait_us", "_wait_us_base", "_wait_us_max", "accepted", "failed",
        "in_flight", "is_gone", "latency_us", "limit_max", "round", "state",
    )  # fmt: skip

    def __init__(
        self,
        limit_max: int,
        rate_per_s: float | None,
        now_us: int,
        *,
        wait_us: int = WAIT_US,
        wait_us_max: int = WAIT_US_MAX,
    ) -> None:
        self.state = State.CLOSED
        self.round = 0
        self.in_flight = 0
        self.is_gone = False
        self.limit_max = limit_max
        self.accepted = 0
        self.failed = 0
        self.latency_us: float | None = None
        """About how long an accepted request takes."""
        self._floor_us: float | None = None
        """About how long it takes at best."""
        self._bucket: Bucket | None = None
        self._rate = 0.0
        self._accepted_at_us = now_us
        self._failing_messages: set[str] = set()
        self._full_at_us = 0
        """When as many were under way as may."""
        self._not_before_us = 0
        self._reopens_at_us = 0
        self._is_probing = False
        self._opened_by_rejections = False
        self._wait_us_base = self._wait_us = wait_us
        self._wait_us_max = wait_us_max
        self._begin(now_us, limit_max)
        self.change(limit_max, rate_per_s, now_us)

    def _begin(self, now_us: int, slow_start_until: float) -> None:
        """A fresh start: small, and nothing held against the receiver."""
        self._limit = float(min(START, self.limit_max))
        self._slow_start_until = slow_start_until
        self._cut_at_us = now_us
        self._failing = self._unaccepted = 0
        self._failing_messages.clear()

    def change(self, limit_max: int, rate_per_s: float | None, now_us: int) -> None:
        """From now on other bounds."""
        self.limit_max = limit_max
        self._limit = min(self._limit, float(limit_max))
        self._slow_start_until = min(self._slow_start_until, float(limit_max))
        self._bucket = None if rate_per_s is None else Bucket(rate_per_s, max(1.0, rate_per_s / 10), now_us)

    @property
    def concurrency(self) -> int:
        """How many requests may be under way at once, while any may."""
        return int(self._limit)

    # Sending.

    def allowance(self, now_us: int) -> int:
        """How many requests may start now."""
        if self.is_gone or now_us < self._not_before_us:
            return 0
        if self.state is State.OPEN:
            if now_us < self._reopens_at_us:
                return 0
            self._move(Event.COOLED_DOWN)
        room = self.limit_max - self.in_flight
        if self.state is State.HALF_OPEN:
            room = min(room, 0 if self._is_probing else 1)
        else:
            room = min(room, int(self._limit) - self.in_flight)
        if room > 0 and self._bucket is not None:
            room = 0 if self._bucket.wait_us(now_us) else min(room, max(1, int(self._bucket.level(now_us))))
        return max(0, room)

    def next_wakeup_us(self, now_us: int) -> int | None:
        """When more may be allowed than now without any answer; ``None`` is never."""
        if self.is_gone:
            return None
        times = [self._not_before_us]
        if self.state is State.OPEN:
            times.append(self._reopens_at_us)
        if self._bucket is not None:
            times.append(now_us + self._bucket.wait_us(now_us))
        return max(times) if max(times) > now_us else None

    def started(self, count: int, now_us: int) -> int:
        """So many requests are on their way; the round that they belong to."""
        self.in_flight += count
        if self.in_flight >= int(self._limit):
            self._full_at_us = now_us
        self._is_probing = self._is_probing or self.state is State.HALF_OPEN
        if self._bucket is not None:
            self._bucket.spend(count, now_us)
        return self.round

    def is_probe(self, round: int) -> bool:
        """Whether a request of this round is the one that tries whether the receiver is back."""
        return self.state is State.HALF_OPEN and round == self.round

    # Answers.

    def finished(
        self,
        answer: Answer,
        message: str,
        *,
        round: int,
        started_at_us: int,
        now_us: int,
        jitter: float = 0.0,
        retry_after_s: float | None = None,
    ) -> None:
        """A request came to its end."""
        self.in_flight -= 1
        assert self.in_flight >= 0, "more requests came to an end than were started"
        if retry_after_s is not None and answer is not Answer.ACCEPTED:
            wait_us = round_up(min(retry_after_s, RETRY_AFTER_S_MAX))
            self._not_before_us = max(self._not_before_us, now_us + wait_us)
        if answer is Answer.ACCEPTED:
            self._count_accepted(now_us)
        elif answer is not Answer.FAULT:
            self.failed += 1
        if answer is Answer.GONE:
            self.is_gone = True
        if answer is Answer.FAULT:
            self._not_before_us = max(self._not_before_us, now_us + FAULT_WAIT_US)
        if round != self.round:
            return
        if self.state is State.HALF_OPEN:
            self._is_probing = False
            self._judge_probe(answer, now_us, jitter)
        elif answer is Answer.ACCEPTED:
            self._failing = self._unaccepted = 0
            self._failing_messages.clear()
            self._adapt(started_at_us, now_us)
        elif answer in _TROUBLES or answer is Answer.REJECTED:
            self._count_failure(answer, message, started_at_us, now_us, jitter)

    def never_sent(self, count: int, round: int) -> None:
        """Requests that were counted as started were not made after all."""
        self.in_flight -= count
        if round == self.round:
            self._is_probing = False

    def revive(self, now_us: int) -> None:
        """The receiver is to be tried again, whatever was known of it."""
        self.is_gone = False
        self._not_before_us = 0
        self._wait_us = self._wait_us_base
        self._is_probing = False
        self.state = State.CLOSED
        self.round += 1
        self._begin(now_us, self.limit_max)

    def _count_accepted(self, now_us: int) -> None:
        self.accepted += 1
        self._rate = self._decayed(now_us) + _SECOND_US / _RATE_SPAN_US
        self._accepted_at_us = now_us

    def _decayed(self, now_us: int) -> float:
        return self._rate * math.exp(-max(0, now_us - self._accepted_at_us) / _RATE_SPAN_US)

    def accepted_per_s(self, now_us: int) -> float:
        """Over the last seconds."""
        return self._decayed(now_us)

    def _adapt(self, started_at_us: int, now_us: int) -> None:
        """More at once after a good answer, less after a slow one; no more where less was enough."""
        taken_us = max(1, now_us - started_at_us)
        smoothed = self.latency_us
        self.latency_us = taken_us if smoothed is None else smoothed + _SMOOTHING * (taken_us - smoothed)
        floor = self._floor_us
        if floor is None or taken_us < floor:
            floor = float(taken_us)
        self._floor_us = floor + _FLOOR_DRIFT * (taken_us - floor)
        if taken_us > max(SLOW_US_MIN, SLOW_FACTOR * floor):
            self._cut(CUT_WHEN_SLOW, started_at_us, now_us)
        elif self._full_at_us >= started_at_us:
            step = 1.0 if self._limit < self._slow_start_until else 1.0 / self._limit
            self._limit = min(float(self.limit_max), self._limit + step)

    def _cut(self, factor: float, started_at_us: int, now_us: int) -> None:
        if started_at_us >= self._cut_at_us:
            self._limit = max(1.0, self._limit * factor)
            self._slow_start_until = self._limit
            self._cut_at_us = now_us

    def _count_failure(
        self, answer: Answer, message: str, started_at_us: int, now_us: int, jitter: float
    ) -> None:
        self._unaccepted += 1
        if len(self._failing_messages) < 2:
            self._failing_messages.add(message)
        if answer is Answer.REJECTED:
            self._failing = 0
        else:
            self._failing += 1
            self._cut(CUT, started_at_us, now_us)
        if len(self._failing_messages) < 2:
            return
        if self._failing >= FAILURES_MAX or self._unaccepted >= REJECTIONS_MAX:
            self._opened_by_rejections = self._failing < FAILURES_MAX
            self._move(Event.FAILED_TOO_OFTEN)
            self._wait(now_us, jitter)

    def _judge_probe(self, answer: Answer, now_us: int, jitter: float) -> None:
        is_back = answer is Answer.ACCEPTED or (answer is Answer.REJECTED and not self._opened_by_rejections)
        if is_back:
            self._move(Event.SUCCEEDED)
            self._wait_us = self._wait_us_base
            self._begin(now_us, self.limit_max / 2)
        elif answer is not Answer.FAULT:
            self._move(Event.FAILED)
            self._wait_us = min(2 * self._wait_us, self._wait_us_max)
            self._wait(now_us, jitter)

    def _wait(self, now_us: int, jitter: float) -> None:
        self._reopens_at_us = now_us + round_up(self._wait_us / _SECOND_US * (1.0 + WAIT_JITTER * jitter))

    def _move(self, event: Event) -> None:
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalMove(f"a breaker that is {self.state} cannot have {event}")
        self.state = target
        self.round += 1


def round_up(seconds: float) -> int:
    """Whole microseconds, no less than asked for."""
    return math.ceil(seconds * _SECOND_US)
