"""Judgement: what becomes of messages whose hand-over failed, and who may be handed more.

A failed message is tried again after a wait, or it is dead: rejected by its consumer, out of
attempts, past its time to live, or poison. Messages that failed together and fare alike share one
fact. A dropped expired message gets ``MessagesExpired`` instead.

The breakers of consumers and the outage gauge work only under ``poison_rules``; they are volatile.
"""

from __future__ import annotations

from typing import NamedTuple

from pyroaring import BitMap64

from sparrow.kernel import deadletter, poison
from sparrow.kernel.backoff import wait_us
from sparrow.kernel.breaker import Breaker, State
from sparrow.kernel.cursor import Attempt
from sparrow.kernel.facts import (
    REASON_LENGTH_MAX,
    AttemptsFailed,
    Fact,
    FailureKind,
    MessagesExpired,
)
from sparrow.kernel.offsets import pack, to_list
from sparrow.kernel.schedule import NEVER_US
from sparrow.kernel.track import Track
from sparrow.model.subscription import Expired, SubscriptionPolicy


class Mishap(NamedTuple):
    """How some hand-overs failed."""

    kind: FailureKind
    consumer: str
    at_us: int
    jitter: float = 0.0
    reason: str = ""
    delay_us: int | None = None
    """A wait that the consumer asked for, instead of the backoff."""
    is_rejected: bool = False
    """The consumer asked for no further try."""

    @property
    def entry(self) -> Attempt:
        return Attempt(self.kind, self.at_us, self.consumer, storable(self.reason))


def storable(reason: str) -> str:
    """As much of a consumer's text as is kept; what is not Unicode proper becomes a question mark."""
    return reason[:REASON_LENGTH_MAX].encode(errors="replace").decode()


class Judge:
    """The judge of one subscription."""

    __slots__ = ("_breakers", "_gauge", "_policy", "_subscription_id")

    def __init__(self, subscription_id: int, policy: SubscriptionPolicy) -> None:
        self._subscription_id = subscription_id
        self._policy = policy
        self._breakers: dict[str, Breaker] = {}
        self._gauge = poison.OutageGauge()

    # Consumers.

    def allowance(self, consumer: str, wanted: int, now_us: int) -> int:
        """How many messages a consumer may get."""
        breaker = self._breakers.get(consumer)
        return wanted if breaker is None else breaker.allowance(wanted, now_us)

    def handed_over(self, consumer: str, now_us: int) -> None:
        """The consumer got something."""
        breaker = self._breakers.get(consumer)
        if breaker is not None:
            breaker.probe_sent(now_us)

    def succeeded(self, consumer: str, count: int) -> None:
        """The consumer acked."""
        if self._policy.poison_rules and consumer:
            self._gauge.record(successes=count)
            self._breaker(consumer).record(successes=count)

    def forget(self, consumer: str) -> None:
        """The consumer left."""
        self._breakers.pop(consumer, None)

    def state(self, consumer: str) -> State:
        """The state of a consumer's breaker."""
        breaker = self._breakers.get(consumer)
        return State.CLOSED if breaker is None else breaker.state

    def next_wakeup_us(self) -> int:
        times = [breaker.next_wakeup_us() for breaker in self._breakers.values()]
        return min((at_us for at_us in times if at_us is not None), default=NEVER_US)

    def _breaker(self, consumer: str) -> Breaker:
        return self._breakers.setdefault(consumer, Breaker())

    # Messages.

    def failed(self, track: Track, offsets: BitMap64, mishap: Mishap) -> list[Fact]:
        """The facts about messages whose hand-over failed."""
        if self._policy.poison_rules:
            self._gauge.record(failures=len(offsets))
            self._breaker(mishap.consumer).record(failures=len(offsets), now_us=mishap.at_us)
        facts: list[Fact] = []
        overdue = self._overdue(track, offsets, mishap.at_us)
        if overdue and self._policy.expired is Expired.DROP:
            offsets = offsets - overdue
            name = self._subscription_id, *track.stream
            facts.append(MessagesExpired(*name, *pack(overdue), mishap.at_us))
            overdue = BitMap64()
        for (attempt, verdict), alike in self._sort(track, offsets, overdue, mishap).items():
            facts.append(self._fact(track, alike, attempt, verdict, mishap))
        return facts

    def _sort(
        self, track: Track, offsets: BitMap64, overdue: BitMap64, mishap: Mishap
    ) -> dict[tuple[int, str], BitMap64]:
        """Messages that fare alike: by number of the attempt and verdict."""
        known = (track.cursor.failed & offsets) | overdue
        fresh = offsets - known
        sorted_out: dict[tuple[int, str], BitMap64] = {}
        if fresh:
            sorted_out[1, self._verdict(track, fresh.min(), 1, mishap)] = fresh
        for offset in to_list(known):
            attempt = track.cursor.attempt(offset)
            if offset in overdue:
                verdict = deadletter.EXPIRED
            else:
                verdict = self._verdict(track, offset, attempt, mishap)
            sorted_out.setdefault((attempt, verdict), BitMap64()).add(offset)
        return sorted_out

    def _verdict(self, track: Track, offset: int, attempt: int, mishap: Mishap) -> str:
        """Why the message is dead, or nothing. No poison rule applies to a first failure."""
        if self._policy.dead_letter_topic is None:
            return ""
        if mishap.is_rejected:
            return deadletter.REJECTED
        limit = self._policy.attempts_max
        if limit is not None and attempt >= limit:
            return deadletter.EXHAUSTED
        if attempt == 1 or not self._policy.poison_rules or self._gauge.is_outage:
            return ""
        bad = {name for name, b in self._breakers.items() if b.state is not State.CLOSED}
        history = (*track.cursor.failure(offset).history, mishap.entry)
        return poison.judge(history, mishap.at_us, is_large=track.is_large(offset), bad_consumers=bad)

    def _fact(
        self, track: Track, offsets: BitMap64, attempt: int, verdict: str, mishap: Mishap
    ) -> AttemptsFailed:
        due_at_us = mishap.at_us
        if not verdict:
            delay_us = mishap.delay_us
            if delay_us is None:
                delay_us = wait_us(self._policy.retry, attempt, mishap.jitter)
            due_at_us += delay_us
        return AttemptsFailed(
            self._subscription_id,
            *track.stream,
            *pack(offsets),
            attempt,
            mishap.kind,
            mishap.at_us,
            due_at_us,
            mishap.consumer,
            storable(mishap.reason),
            verdict,
        )

    def _overdue(self, track: Track, offsets: BitMap64, now_us: int) -> BitMap64:
        if not track.expires:
            return BitMap64()
        mortal = BitMap64(track.expires) & offsets
        return BitMap64(o for o in to_list(mortal) if track.expires_at_us(o) <= now_us)
