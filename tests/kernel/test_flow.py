"""Flow control of a topic: the table of modes, and what each policy does with a batch."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest

from sparrow.kernel.flow import (
    PASSED,
    TRANSITIONS,
    WAIT_US_MAX,
    Action,
    Cause,
    Event,
    IllegalMove,
    Mode,
    TopicFlow,
    Verdict,
)
from sparrow.kernel.shedding import PriorityMix, Thin
from sparrow.model.errors import PublishRejected, RateLimited
from sparrow.model.flow import FlowPolicy, Overflow, PublisherClass

SECOND_US = 1_000_000
NORMAL, BULK, CRITICAL = PublisherClass.NORMAL, PublisherClass.BULK, PublisherClass.CRITICAL
HIGH = 1000


def flow_of(overflow: Overflow = Overflow.BLOCK, **options: float) -> TopicFlow:
    policy = FlowPolicy(overflow=overflow, backlog_high=HIGH)
    return TopicFlow("orders", _with(policy, **options), 0)


def _with(policy: FlowPolicy, **options: float) -> FlowPolicy:
    return FlowPolicy(**{name: getattr(policy, name) for name in policy.__struct_fields__} | options)


def held(flow: TopicFlow, backlog: int, seconds: int = 10, start_s: int = 0) -> int:
    """Tell of the same backlog for a while; the time after it."""
    for tick in range(seconds * 10 + 1):
        flow.observe(backlog, 0, start_s * SECOND_US + tick * SECOND_US // 10)
    return (start_s + seconds) * SECOND_US


def at(mode: Mode) -> TopicFlow:
    """A topic brought to a mode by the shortest way."""
    flow = flow_of()
    if mode is not Mode.NORMAL:
        flow.move(Event.ROSE)
    if mode is Mode.THROTTLED:
        flow.move(Event.OVERFLOWED)
    assert flow.mode is mode
    return flow


@pytest.mark.parametrize(("mode", "event"), list(itertools.product(Mode, Event)))
def test_every_pair_moves_by_the_table_or_is_refused(mode: Mode, event: Event) -> None:
    flow = at(mode)
    target = TRANSITIONS.get((mode, event))
    if target is None:
        with pytest.raises(IllegalMove):
            flow.move(event)
        assert flow.mode is mode
    else:
        flow.move(event)
        assert flow.mode is target


# Observing.


def test_one_observation_however_bad_changes_no_mode() -> None:
    flow = flow_of()
    flow.observe(0, 0, 0)
    assert flow.observe(100 * HIGH, 0, 100_000) is Mode.NORMAL
    assert flow.observe(0, 0, 200_000) is Mode.NORMAL


def test_a_backlog_near_the_high_mark_is_watched_and_nobody_is_slowed() -> None:
    flow = flow_of()
    now_us = held(flow, HIGH - 100)
    assert flow.mode is Mode.WARNING
    assert flow.admit(BULK, 10, 10, now_us) is PASSED


def test_a_backlog_that_stays_high_throttles_and_one_that_stays_low_releases() -> None:
    flow = flow_of()
    held(flow, HIGH)
    assert flow.mode is Mode.THROTTLED
    assert flow.intensity == pytest.approx(1, abs=0.01)
    held(flow, HIGH // 2 + 10, start_s=10)
    assert flow.mode is Mode.THROTTLED
    now_us = held(flow, 10, start_s=20)
    assert flow.mode is Mode.NORMAL
    assert flow.mode_changes == 4
    assert flow.admit(BULK, 10, 10, now_us) is PASSED


def test_a_topic_without_limits_passes_everything() -> None:
    flow = TopicFlow("orders", FlowPolicy(), 0)
    now_us = held(flow, 10**9)
    assert flow.mode is Mode.NORMAL
    assert flow.admit(BULK, 10**6, 10**9, now_us) is PASSED


def test_one_old_message_that_is_stuck_slows_nobody() -> None:
    flow = TopicFlow("orders", FlowPolicy(lag_high_s=5), 0)
    for second in range(100):
        flow.admit(NORMAL, 1000, 1000, second * SECOND_US)
        flow.observe(1, second * SECOND_US, second * SECOND_US)
    assert flow.mode is Mode.NORMAL


def test_consumers_that_stand_still_throttle_by_lag() -> None:
    flow = TopicFlow("orders", FlowPolicy(lag_high_s=5), 0)
    for second in range(20):
        flow.observe(1000 * second, second * SECOND_US, second * SECOND_US)
    assert flow.mode is Mode.THROTTLED
    assert flow.signal(20 * SECOND_US).cause is Cause.LAG


# Admitting.


def throttled(overflow: Overflow, backlog: int = HIGH + 100, **options: float) -> tuple[TopicFlow, int]:
    flow = flow_of(overflow, **options)
    now_us = held(flow, backlog)
    assert flow.mode is Mode.THROTTLED
    return flow, now_us


def second_batch(flow: TopicFlow, kind: PublisherClass, now_us: int, waited_us: int = 0) -> Verdict:
    """The first batch takes what the pace has to give; what becomes of the next?"""
    flow.admit(NORMAL, 50, 50, now_us)
    return flow.admit(kind, 50, 50, now_us, waited_us=waited_us)


def test_block_waits_and_says_why() -> None:
    flow, now_us = throttled(Overflow.BLOCK)
    verdict = second_batch(flow, NORMAL, now_us)
    assert verdict.action is Action.WAIT
    assert 0 < verdict.wait_us <= WAIT_US_MAX
    assert verdict.signal is not None
    assert verdict.signal.topic == "orders"
    assert verdict.signal.cause is Cause.BACKLOG
    assert verdict.signal.level == "throttled"
    assert flow.counts.waits == 1


def test_block_rejects_when_the_time_is_up() -> None:
    flow, now_us = throttled(Overflow.BLOCK, block_timeout_s=2.0)
    flow.admit(CRITICAL, 5000, 0, now_us)
    flow.observe(2 * HIGH, 0, now_us)
    verdict = flow.admit(NORMAL, 50, 50, now_us, waited_us=2 * SECOND_US)
    assert verdict.action is Action.REJECT
    assert verdict.signal is not None
    error = verdict.signal.to_error()
    assert isinstance(error, PublishRejected)
    assert error.details["retry_after_s"] > 0
    assert error.details["topic"] == "orders"
    assert flow.counts.rejected == 50


def test_block_never_waits_beyond_its_timeout() -> None:
    flow, now_us = throttled(Overflow.BLOCK, block_timeout_s=2.0)
    flow.admit(NORMAL, 500, 500, now_us)
    assert flow.admit(NORMAL, 50, 50, now_us, waited_us=1_990_000).wait_us <= 10_000


def test_those_who_waited_longest_go_first() -> None:
    flow, now_us = throttled(Overflow.BLOCK)
    flow.admit(NORMAL, 5, 5, now_us)
    young = flow.admit(NORMAL, 5, 5, now_us, waited_us=SECOND_US)
    assert young.action is Action.WAIT
    assert flow.admit(NORMAL, 5, 5, now_us, waited_us=29 * SECOND_US).action is Action.PASS


def test_reject_refuses_at_once() -> None:
    flow, now_us = throttled(Overflow.REJECT)
    assert second_batch(flow, NORMAL, now_us).action is Action.REJECT


def test_drop_newest_takes_and_forgets() -> None:
    flow, now_us = throttled(Overflow.DROP_NEWEST)
    assert second_batch(flow, NORMAL, now_us).action is Action.DROP
    assert flow.counts.dropped == 50
    assert flow.counts.passed == 50


def test_drop_oldest_passes_and_says_what_may_stay() -> None:
    flow, now_us = throttled(Overflow.DROP_OLDEST)
    verdict = flow.admit(NORMAL, 50, 50, now_us)
    assert verdict.action is Action.TRIM
    assert verdict.trim == (HIGH, None)


def test_sample_keeps_a_share_that_falls_and_never_to_nothing() -> None:
    flow, now_us = throttled(Overflow.SAMPLE)
    verdict = flow.admit(NORMAL, 1000, 50, now_us)
    assert verdict.thin is not None
    assert verdict.thin.share == pytest.approx(0.01)
    dropped = 1000 - verdict.thin.mask(1000).true_count
    flow.thinned(dropped)
    assert flow.counts.dropped == dropped
    assert flow.counts.passed == 1000 - dropped


def test_drop_lowest_priority_keeps_the_higher_ones() -> None:
    flow, now_us = throttled(Overflow.DROP_LOWEST_PRIORITY, HIGH)
    held(flow, 900, start_s=10)
    verdict = flow.admit(NORMAL, 100, 50, now_us + 10 * SECOND_US, priorities={5: 50})
    assert verdict.thin is not None
    mask = verdict.thin.mask(100, pa.array([5] * 50 + [None] * 50, pa.int8()))
    assert mask.slice(0, 50).true_count > mask.slice(50).true_count


@pytest.mark.parametrize("overflow", [Overflow.BLOCK, Overflow.REJECT, Overflow.SAMPLE, Overflow.DROP_NEWEST])
def test_critical_publishers_pass_until_the_hard_limit(overflow: Overflow) -> None:
    flow, now_us = throttled(overflow)
    assert second_batch(flow, CRITICAL, now_us).action is Action.PASS
    flow.admit(CRITICAL, HIGH, 0, now_us)
    verdict = flow.admit(CRITICAL, 1, 1, now_us)
    assert verdict.action not in (Action.PASS, Action.THIN)
    assert verdict.signal is not None
    assert verdict.signal.level == "full"


@pytest.mark.parametrize("overflow", [Overflow.SAMPLE, Overflow.DROP_LOWEST_PRIORITY])
def test_bulk_is_shed_before_normal(overflow: Overflow) -> None:
    flow, _ = throttled(overflow)
    now_us = held(flow, 740, start_s=10)
    assert 0.3 < flow.intensity < 0.5
    assert flow.admit(NORMAL, 100, 50, now_us).action is Action.PASS
    assert flow.admit(BULK, 100, 50, now_us).action is Action.THIN


def test_what_passed_between_two_observations_counts_towards_the_hard_limit() -> None:
    flow = flow_of()
    flow.observe(0, 0, 0)
    passed = 0
    while flow.admit(NORMAL, 300, 0, 1000).action is Action.PASS:
        passed += 300
    assert 2 * HIGH <= passed < 2 * HIGH + 300


def test_the_excess_of_a_rate_waits() -> None:
    flow = TopicFlow("orders", FlowPolicy(messages_per_s=10), 0)
    assert flow.admit(NORMAL, 11, 0, 0) is PASSED
    verdict = flow.admit(NORMAL, 1, 0, 0)
    assert verdict.action is Action.WAIT
    assert verdict.signal is not None
    assert verdict.signal.cause is Cause.RATE
    assert flow.admit(NORMAL, 1, 0, verdict.wait_us) is PASSED


def test_the_excess_of_a_rate_is_rejected_when_that_is_the_policy() -> None:
    flow = TopicFlow("orders", FlowPolicy(bytes_per_s=10, overflow=Overflow.REJECT), 0)
    flow.admit(NORMAL, 1, 100, 0)
    verdict = flow.admit(NORMAL, 1, 1, 0)
    assert verdict.signal is not None
    error = verdict.signal.to_error()
    assert isinstance(error, RateLimited)
    assert error.details["retry_after_s"] == pytest.approx(9, abs=0.01)


def test_a_new_policy_counts_at_once_and_without_marks_it_releases() -> None:
    flow, now_us = throttled(Overflow.REJECT)
    flow.change(_with(flow.policy, overflow=Overflow.DROP_OLDEST), now_us)
    assert flow.admit(NORMAL, 50, 50, now_us).action is Action.TRIM
    flow.change(FlowPolicy(), now_us)
    assert flow.mode is Mode.NORMAL
    assert flow.admit(NORMAL, 50, 50, now_us) is PASSED


def test_what_passed_before_there_was_a_limit_does_not_count_against_it() -> None:
    flow = TopicFlow("orders", FlowPolicy(), 0)
    flow.admit(NORMAL, 10**9, 0, 0)
    assert flow.counts.passed == 10**9
    flow.change(FlowPolicy(backlog_high=HIGH), 1)
    assert flow.admit(NORMAL, 1, 1, 2) is PASSED


# Shedding by priority.


def test_a_mix_drops_the_lowest_first_and_a_part_of_the_one_between() -> None:
    mix = PriorityMix()
    mix.note(100, {-5: 20, 9: 30})
    assert mix.thin(0.2, 7) == Thin(1.0, 0, 7)
    assert mix.thin(0.45, 7) == Thin(pytest.approx(0.5), 0, 7)
    assert mix.thin(1.0, 7).share == 0


def test_a_mix_forgets_what_came_long_ago() -> None:
    mix = PriorityMix()
    mix.note(5000, {-100: 5000})
    for _ in range(100):
        mix.note(5000, None)
    assert mix.thin(0.1, 0).priority == 0


def test_numbers_brought_along_decide_instead_of_the_order() -> None:
    thin = Thin(0.5, None, 12345)
    numbers = pa.array([1, 2, 3, 4, 5, 6, 7, 8], pa.uint64())
    first = thin.mask(8, None, numbers).to_pylist()
    assert thin._replace(first_number=0).mask(8, None, numbers).to_pylist() == first
    assert 0 < sum(first) < 8
