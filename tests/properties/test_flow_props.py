"""A topic with publishers and consumers in virtual time: flow control closes the loop.

Publishers send five times what the consumer gets done, for a minute, under each policy. Every
number below is in virtual time; nothing sleeps.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.kernel.flow import Action, Mode, TopicFlow, Verdict
from sparrow.model.flow import FlowPolicy, Overflow, PublisherClass

SECOND_US = 1_000_000
STEP_US = 10_000
OBSERVE_US = 100_000
HIGH = 10_000
TOP = 2 * HIGH
BATCH = 100


@dataclass
class Publisher:
    """Sends batches at a steady rate and, when told to wait, waits."""

    kind: PublisherClass
    rate: float
    next_us: int = 0
    waited_us: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    """Messages that passed, by second."""
    shed: int = 0
    rejected: int = 0

    def send(self, loop: Loop, now_us: int) -> None:
        verdict = loop.flow.admit(self.kind, BATCH, BATCH * 100, now_us, waited_us=self.waited_us)
        if verdict.action is Action.WAIT:
            self.waited_us += verdict.wait_us
            self.next_us = now_us + verdict.wait_us
            return
        self.next_us = max(self.next_us + round(BATCH / self.rate * SECOND_US), now_us + 1)
        self.waited_us = 0
        stored = self.stored(loop, verdict)
        loop.publish(stored, now_us)
        self.sent[now_us // SECOND_US] += stored

    def stored(self, loop: Loop, verdict: Verdict) -> int:
        action = verdict.action
        if action is Action.REJECT:
            self.rejected += BATCH
            return 0
        if action is Action.DROP:
            self.shed += BATCH
            return 0
        if action is Action.THIN:
            assert verdict.thin is not None
            kept = verdict.thin.mask(BATCH).true_count
            loop.flow.thinned(BATCH - kept)
            self.shed += BATCH - kept
            return int(kept)
        if action is Action.TRIM:
            assert verdict.trim is not None
            assert verdict.trim.keep_newest is not None
            loop.trim_to(verdict.trim.keep_newest - BATCH)
        return BATCH


@dataclass
class Loop:
    """One topic, its flow control, and a consumer that gets ``drain(second)`` messages a second done."""

    flow: TopicFlow
    publishers: list[Publisher]
    drain: Callable[[int], float]
    observe_us: int = OBSERVE_US
    queue: list[tuple[int, int]] = field(default_factory=list)
    backlog: int = 0
    backlog_max: int = 0
    trimmed: int = 0
    owed: float = 0.0
    modes: list[tuple[int, Mode]] = field(default_factory=list)

    def publish(self, count: int, now_us: int) -> None:
        if count:
            self.queue.append((now_us, count))
            self.backlog += count
            self.backlog_max = max(self.backlog_max, self.backlog)

    def take(self, count: int) -> None:
        self.backlog -= count
        while count:
            at_us, first = self.queue[0]
            taken = min(first, count)
            count -= taken
            if taken == first:
                self.queue.pop(0)
            else:
                self.queue[0] = (at_us, first - taken)

    def trim_to(self, keep: int) -> None:
        if self.backlog > keep:
            self.trimmed += self.backlog - keep
            self.take(self.backlog - keep)

    def run(self, start_s: int, end_s: int) -> Loop:
        due = [(publisher.next_us, place) for place, publisher in enumerate(self.publishers)]
        heapq.heapify(due)
        for now_us in range(start_s * SECOND_US, end_s * SECOND_US, STEP_US):
            while due[0][0] <= now_us:
                at_us, place = heapq.heappop(due)
                publisher = self.publishers[place]
                publisher.next_us = max(at_us, now_us)
                publisher.send(self, now_us)
                heapq.heappush(due, (publisher.next_us, place))
            self.owed += self.drain(now_us // SECOND_US) * STEP_US / SECOND_US
            done = min(int(self.owed), self.backlog)
            self.owed = min(self.owed - done, 1.0) if done == self.backlog else self.owed - done
            self.take(done)
            if now_us % self.observe_us == 0:
                age_us = now_us - self.queue[0][0] if self.queue else 0
                mode = self.flow.observe(self.backlog, age_us, now_us)
                if not self.modes or self.modes[-1][1] is not mode:
                    self.modes.append((now_us, mode))
        return self

    def rate(self, start_s: int, end_s: int, kind: PublisherClass | None = None) -> float:
        chosen = [p for p in self.publishers if kind in (None, p.kind)]
        total = sum(p.sent[second] for p in chosen for second in range(start_s, end_s))
        return total / (end_s - start_s)


def loop_of(
    policy: FlowPolicy,
    kinds: list[PublisherClass] | None = None,
    drain: Callable[[int], float] = lambda _: 1000,
    total: float = 5000,
) -> Loop:
    kinds = kinds or [PublisherClass.NORMAL] * 5
    publishers = [Publisher(kind, total / len(kinds)) for kind in kinds]
    return Loop(TopicFlow("orders", policy, 0), publishers, drain)


PACED = [Overflow.BLOCK, Overflow.REJECT, Overflow.DROP_NEWEST]
THINNED = [Overflow.SAMPLE, Overflow.DROP_LOWEST_PRIORITY]


@pytest.mark.parametrize("overflow", list(Overflow))
def test_the_backlog_stays_bounded_and_the_mode_does_not_flap(overflow: Overflow) -> None:
    loop = loop_of(FlowPolicy(overflow=overflow, backlog_high=HIGH)).run(0, 60)
    assert loop.backlog_max <= TOP + BATCH
    assert [mode for _, mode in loop.modes] == [Mode.NORMAL, Mode.WARNING, Mode.THROTTLED]


@pytest.mark.parametrize("overflow", PACED + THINNED)
def test_publishers_come_down_to_the_pace_of_the_consumers(overflow: Overflow) -> None:
    loop = loop_of(FlowPolicy(overflow=overflow, backlog_high=HIGH)).run(0, 60)
    assert loop.rate(40, 60) == pytest.approx(1000, rel=0.1)
    assert HIGH / 2 < loop.backlog < HIGH


@pytest.mark.parametrize("overflow", PACED + THINNED)
def test_the_same_holds_for_the_lag(overflow: Overflow) -> None:
    loop = loop_of(FlowPolicy(overflow=overflow, lag_high_s=5)).run(0, 60)
    assert loop.rate(40, 60) == pytest.approx(1000, rel=0.1)
    assert loop.backlog_max <= 3 * 5 * 1000
    assert len(loop.modes) == 3


def test_publishers_that_block_pass_evenly_and_not_stop_and_go() -> None:
    loop = loop_of(FlowPolicy(backlog_high=HIGH)).run(0, 60)
    seconds = [loop.rate(second, second + 1) for second in range(40, 60)]
    assert min(seconds) > 700
    assert max(seconds) < 1300
    each = [sum(p.sent[second] for second in range(30, 60)) for p in loop.publishers]
    assert min(each) > 0.7 * max(each)
    assert sum(p.rejected for p in loop.publishers) == 0


def test_drop_oldest_slows_nobody() -> None:
    loop = loop_of(FlowPolicy(overflow=Overflow.DROP_OLDEST, backlog_high=HIGH)).run(0, 60)
    assert loop.rate(10, 60) == pytest.approx(5000, rel=0.01)
    assert loop.backlog <= HIGH
    assert loop.trimmed > 0


@pytest.mark.parametrize("overflow", list(Overflow))
def test_the_throttle_is_released_by_itself_when_consumers_speed_up(overflow: Overflow) -> None:
    policy = FlowPolicy(overflow=overflow, backlog_high=HIGH)
    loop = loop_of(policy, drain=lambda second: 1000 if second < 60 else 20_000).run(0, 90)
    assert loop.flow.mode is Mode.NORMAL
    assert loop.rate(80, 90) == pytest.approx(5000, rel=0.02)
    assert loop.flow.mode_changes == 4


@pytest.mark.parametrize("overflow", [Overflow.BLOCK, Overflow.REJECT, Overflow.SAMPLE])
def test_critical_publishers_are_slowed_last_and_bulk_first(overflow: Overflow) -> None:
    critical, normal, bulk = PublisherClass.CRITICAL, PublisherClass.NORMAL, PublisherClass.BULK
    kinds = [critical] + [normal] * 4 + [bulk] * 5
    loop = loop_of(FlowPolicy(overflow=overflow, backlog_high=HIGH), kinds).run(0, 60)
    wanted = {critical: 500, normal: 2000, bulk: 2500}
    share = {kind: loop.rate(30, 60, kind) / rate for kind, rate in wanted.items()}
    assert share[critical] == pytest.approx(1, abs=0.02)
    assert share[normal] > 0.15
    assert share[bulk] < 0.05


def test_consumers_that_stop_altogether_end_in_rejections_and_a_bounded_backlog() -> None:
    loop = loop_of(FlowPolicy(backlog_high=HIGH, block_timeout_s=5), drain=lambda _: 0).run(0, 60)
    assert loop.backlog_max <= TOP + BATCH
    assert loop.flow.counts.rejected > 0


def test_a_consumer_that_keeps_up_slows_nobody() -> None:
    loop = loop_of(FlowPolicy(backlog_high=HIGH), drain=lambda _: 6000).run(0, 30)
    assert loop.modes == [(0, Mode.NORMAL)]
    assert loop.rate(0, 30) == pytest.approx(5000, rel=0.01)


def test_another_topic_is_not_slowed() -> None:
    congested = loop_of(FlowPolicy(backlog_high=HIGH)).run(0, 30)
    healthy = loop_of(FlowPolicy(backlog_high=HIGH), drain=lambda _: 9000).run(0, 30)
    assert congested.flow.mode is Mode.THROTTLED
    assert healthy.flow.counts.waits == 0


@settings(max_examples=10, deadline=None)
@given(
    overflow=st.sampled_from(PACED + THINNED),
    high=st.integers(500, 20_000),
    factor=st.floats(1.5, 10),
    publishers=st.integers(1, 20),
    observe_us=st.sampled_from([100_000, 500_000, 1_000_000]),
)
def test_whatever_the_numbers_it_is_bounded_and_does_not_flap(
    overflow: Overflow, high: int, factor: float, publishers: int, observe_us: int
) -> None:
    kinds = [PublisherClass.NORMAL] * publishers
    policy = FlowPolicy(overflow=overflow, backlog_high=high)
    loop = loop_of(policy, kinds, total=1000 * factor)
    loop.observe_us = observe_us
    loop.run(0, 60)
    assert loop.backlog_max <= 2 * high + BATCH
    assert loop.flow.mode_changes <= 8
    counts = loop.flow.counts
    assert counts.passed == sum(sum(p.sent.values()) for p in loop.publishers)


@settings(max_examples=10, deadline=None)
@given(drains=st.lists(st.floats(0, 8000), min_size=6, max_size=6))
def test_consumers_of_changing_speed_never_let_it_flap(drains: list[float]) -> None:
    loop = loop_of(FlowPolicy(backlog_high=HIGH), drain=lambda second: drains[second // 10]).run(0, 60)
    assert loop.backlog_max <= TOP + BATCH
    assert loop.flow.mode_changes <= 2 * 2 * len(drains)
    counts = loop.flow.counts
    assert counts.passed == sum(sum(p.sent.values()) for p in loop.publishers)
