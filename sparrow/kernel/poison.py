"""Poison: messages that fail wherever they go, found before they have used up all their attempts.

The patterns of queue.md §5.4 are rows of one table: which failures count, how many of them, on how
many consumers, within what time. A message that matches a row is dead-lettered at once; that every
row needs a second failure at least is the "after n retries" of the source.

Two things are not poison. A consumer that fails most of what it gets says nothing about a message:
its failures do not count. And when most messages of a subscription fail, that is an outage: nothing
is judged until it is over (§5.4.3). The limit of attempts itself is not a row here; it always holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from sparrow.kernel.cursor import Attempt
from sparrow.kernel.facts import FailureKind

LARGE_BYTES = 1024 * 1024
"""Above this a message counts as large (§5.4)."""
OUTAGE_SAMPLE_MIN = 20
OUTAGE_FAILURE_SHARE = 0.5
PREFIX = "poison:"

_TIMEOUTS = (FailureKind.TIMED_OUT, FailureKind.CONSUMER_GONE)


class Rule(NamedTuple):
    """A pattern of failures."""

    name: str
    kinds: tuple[FailureKind, ...]
    failures_min: int
    consumers_min: int
    window_s: int | None
    needs_same_reason: bool = False
    needs_large: bool = False


RULES = (
    Rule("rapid_cycling", tuple(FailureKind), 3, 1, 30),
    Rule("same_reason", (FailureKind.NACKED,), 2, 2, None, needs_same_reason=True),
    Rule("timeouts_on_several_consumers", _TIMEOUTS, 3, 3, 300),
    Rule("large_message_times_out", _TIMEOUTS, 2, 1, None, needs_large=True),
)


def judge(
    history: Iterable[Attempt],
    now_us: int,
    *,
    is_large: bool = False,
    bad_consumers: Collection[str] = (),
) -> str:
    """The name of the first pattern that a message's failures match, with its prefix; or empty."""
    counted = [attempt for attempt in history if attempt.consumer not in bad_consumers]
    for rule in RULES:
        if (is_large or not rule.needs_large) and _matches(rule, counted, now_us):
            return PREFIX + rule.name
    return ""


def _matches(rule: Rule, history: list[Attempt], now_us: int) -> bool:
    oldest_us = 0 if rule.window_s is None else now_us - rule.window_s * 1_000_000
    recent = [a for a in history if a.kind in rule.kinds and a.at_us >= oldest_us]
    if not rule.needs_same_reason:
        return _is_enough(rule, recent)
    reasons = {attempt.reason for attempt in recent if attempt.reason}
    return any(_is_enough(rule, [a for a in recent if a.reason == text]) for text in reasons)


def _is_enough(rule: Rule, attempts: list[Attempt]) -> bool:
    consumers = {attempt.consumer for attempt in attempts}
    return len(attempts) >= rule.failures_min and len(consumers) >= rule.consumers_min


class OutageGauge:
    """Whether most of a subscription's recent outcomes are failures, over many messages."""

    __slots__ = ("_failures", "_total")

    def __init__(self) -> None:
        self._total: float = 0
        self._failures: float = 0

    def record(self, *, successes: int = 0, failures: int = 0) -> None:
        """Outcomes arrived; the older ones lose weight."""
        self._total += successes + failures
        self._failures += failures
        if self._total > 10 * OUTAGE_SAMPLE_MIN:
            self._total /= 2
            self._failures /= 2

    @property
    def is_outage(self) -> bool:
        return self._total >= OUTAGE_SAMPLE_MIN and self._failures > OUTAGE_FAILURE_SHARE * self._total
