"""Lag as subscriptions show it, and sampling for those that agreed to miss something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.kernel.lag import LagLevel
from sparrow.kernel.sampling import kept
from sparrow.model.errors import InvalidArgument, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.settings import Settings
from sparrow.model.subscription import SubscriptionPolicy

SECOND_US = 1_000_000


class HandClock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def now_us(self) -> int:
        return round(self.seconds * SECOND_US)

    def monotonic_s(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def broker(tmp_path: Path, clock: HandClock) -> AsyncIterator[Broker]:
    async with await Broker.open(Settings(data=str(tmp_path / "data")), clock=clock) as broker:
        yield broker


async def work(subscription: BrokerSubscription, clock: HandClock, count: int, seconds: float) -> None:
    """Takes some messages and acks them after some time."""
    found = await subscription.pull(count)
    clock.seconds += seconds
    await subscription.ack(found, wait=True)


async def test_the_report_tells_the_stages_of_the_way(broker: Broker, clock: HandClock) -> None:
    slow = await broker.subscribe("slow", "orders")
    await broker.publish_batch("orders", [b"x"] * 100)
    clock.seconds += 2.0
    await work(slow, clock, 40, 3.0)
    report = await slow.lag_report()
    assert (report.depth, await slow.lag()) == (60, 60)
    assert report.oldest_age_s == pytest.approx(5.0)
    assert report.assignment_s == pytest.approx(2.0)
    assert report.processing_s == pytest.approx(3.0)
    assert report.end_to_end_s == pytest.approx(5.0)
    assert report.acked_per_s > 0
    assert msgspec.json.decode(msgspec.json.encode(report))["depth"] == 60


async def test_a_subscription_that_is_done_has_no_lag(broker: Broker, clock: HandClock) -> None:
    quick = await broker.subscribe("quick", "orders")
    assert (await quick.lag_report()).end_to_end_s is None
    await broker.publish_batch("orders", [b"x"] * 10)
    await work(quick, clock, 10, 0.1)
    report = await quick.lag_report()
    assert (report.depth, report.oldest_age_s, report.catch_up_s) == (0, 0.0, 0.0)
    assert (report.level, report.is_healthy) == (LagLevel.OK, True)


async def test_rates_give_trend_and_time_to_catch_up(broker: Broker, clock: HandClock) -> None:
    slow = await broker.subscribe("slow", "orders")
    await slow.lag_report()
    for _ in range(30):
        await broker.publish_batch("orders", [b"x"] * 20)
        await work(slow, clock, 10, 1.0)
        report = await slow.lag_report()
    assert report.published_per_s == pytest.approx(20, rel=0.15)
    assert report.acked_per_s == pytest.approx(10, rel=0.15)
    assert report.trend_per_s == pytest.approx(10, rel=0.15)
    assert report.catch_up_s is None
    for _ in range(30):
        await work(slow, clock, 10, 1.0)
        report = await slow.lag_report()
        if report.depth == 0:
            break
    assert report.trend_per_s < 0
    assert report.catch_up_s is not None


async def test_levels_warn_when_a_value_has_held(broker: Broker, clock: HandClock) -> None:
    slow = await broker.subscribe("slow", "orders", lag={"depth_warn": 10, "depth_critical": 100})
    await broker.publish_batch("orders", [b"x"] * 50)
    assert (await slow.lag_report()).level is LagLevel.OK, "one look is not enough"
    for _ in range(10):
        clock.seconds += 1.0
        report = await slow.lag_report()
    assert report.levels["depth"] is LagLevel.WARN
    await slow.update(lag={"depth_critical": 20})
    for _ in range(10):
        clock.seconds += 1.0
        report = await slow.lag_report()
    assert (report.level, report.levels["depth"]) == (LagLevel.CRITICAL, LagLevel.CRITICAL)
    clock.seconds += 300.0
    assert not (await slow.lag_report()).is_healthy


async def test_other_limits_end_no_lease(broker: Broker, clock: HandClock) -> None:
    slow = await broker.subscribe("slow", "orders")
    await broker.publish_batch("orders", [b"x"] * 5)
    found = await slow.pull(5)
    await slow.update(lag={"depth_warn": 10}, sample={"lag_high_s": 60.0})
    await slow.ack(found, wait=True)
    assert await slow.lag() == 0
    assert slow.policy.lag is not None
    assert slow.policy.lag.depth_warn == 10


async def test_limits_and_sampling_survive_a_restart(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path / "data"))
    async with await Broker.open(settings) as broker:
        slow = await broker.subscribe("slow", "orders", sample={"lag_high_s": 60.0})
        await slow.update(lag={"depth_warn": 10})
        before = slow.policy
    async with await Broker.open(settings) as broker:
        assert (await broker.subscription("slow")).policy == before


def test_a_policy_that_was_stored_before_there_was_lag_is_read() -> None:
    policy = msgspec.json.decode(b'{"filter":"","ack_deadline_s":5.0}', type=SubscriptionPolicy)
    assert (policy.sample, policy.lag) == (None, None)


@pytest.mark.parametrize(
    "options",
    [
        {"lag": {"depth_warn": 100, "depth_critical": 10}},
        {"lag": {"depth_warn": -1}},
        {"lag": {"depth": 1}},
        {"lag": 5},
        {"sample": {"lag_high_s": -1.0}},
        {"sample": {"lag_high_s": 5.0, "lag_low_s": 6.0}},
        {"sample": {"share_min": 2.0}},
        {"sample": True},
    ],
)
async def test_bad_limits_are_refused_and_change_nothing(broker: Broker, options: dict[str, Any]) -> None:
    slow = await broker.subscribe("slow", "orders", lag={"depth_warn": 10})
    before = slow.policy
    with pytest.raises(InvalidArgument):
        await slow.update(**options)
    with pytest.raises(InvalidArgument):
        await broker.subscribe("other", "orders", **options)
    assert slow.policy == before
    assert [subscription.name for subscription in await broker.subscriptions()] == ["slow"]


async def test_each_consumer_has_its_own_figures(broker: Broker, clock: HandClock) -> None:
    quick = await broker.subscribe("shared", "orders")
    slow = await broker.subscription("shared")
    await broker.publish_batch("orders", [b"x"] * 100)
    held = await slow.pull(10)
    await work(quick, clock, 50, 1.0)
    clock.seconds += 4.0
    await slow.ack(held[:4], wait=True)
    reports = await quick.consumer_lag()
    assert reports[quick.consumer].processing_s == pytest.approx(1.0)
    assert reports[slow.consumer].processing_s == pytest.approx(5.0)
    assert (reports[quick.consumer].depth, reports[slow.consumer].depth) == (0, 6)
    assert reports[slow.consumer].oldest_age_s == pytest.approx(5.0)


async def test_a_topic_is_as_far_behind_as_its_slowest_subscription(broker: Broker, clock: HandClock) -> None:
    quick, slow = await broker.subscribe("quick", "orders"), await broker.subscribe("slow", "#")
    await broker.publish_batch("orders", [b"x"] * 10)
    await broker.publish_batch("other", [b"x"] * 99)
    clock.seconds += 7.0
    await work(quick, clock, 10, 0.0)
    found = await broker.topic_lag("orders")
    assert (found.depth, found.slowest, found.oldest_age_s) == (10, "slow", pytest.approx(7.0))
    assert found.subscriptions["slow"].depth == 109
    assert (await slow.lag_report()).depth == 109
    assert sorted(await broker.lag()) == ["quick", "slow"]
    with pytest.raises(TopicNotFound):
        await broker.topic_lag("nowhere")


async def test_a_commit_counts_as_acks(broker: Broker, clock: HandClock) -> None:
    reader = await broker.subscribe("reader", "orders")
    await broker.publish_batch("orders", [b"x"] * 10)
    await reader.pull(10)
    clock.seconds += 2.0
    await reader.commit("orders", 0, 10)
    report = await reader.lag_report()
    assert report.end_to_end_s == pytest.approx(2.0)
    assert report.acked_per_s > 0


async def test_at_most_once_is_done_when_it_is_handed_over(broker: Broker, clock: HandClock) -> None:
    reader = await broker.subscribe("reader", "orders", guarantee="at_most_once")
    await broker.publish_batch("orders", [b"x"] * 10)
    clock.seconds += 2.0
    await reader.pull(10)
    report = await reader.lag_report()
    assert (report.end_to_end_s, report.processing_s) == (pytest.approx(2.0), 0.0)


async def test_lag_that_lies_in_the_lake_has_an_age_too(broker: Broker, clock: HandClock) -> None:
    slow = await broker.subscribe("slow", "orders")
    await broker.publish_batch("orders", [b"x"] * 10)
    clock.seconds += 9.0
    await broker.publish_batch("orders", [b"x"] * 10)
    await broker.seal()
    assert (await slow.lag_report()).oldest_age_s == pytest.approx(9.0)
    await work(slow, clock, 10, 1.0)
    assert (await slow.lag_report()).oldest_age_s == pytest.approx(1.0)


async def test_dead_letters_that_wait_are_nobodys_lag(broker: Broker) -> None:
    worker = await broker.subscribe("worker", "orders", dead_letter_topic="dead", retry={"max_attempts": 1})
    await broker.publish("orders", b"x")
    [message] = await worker.pull(1)
    await message.nack()
    await worker.flush()
    assert sorted(await broker.lag()) == ["worker"]
    assert (await broker.topic_lag("dead")).slowest is None


# Sampling.


async def test_a_subscription_that_agreed_gets_a_sample_while_it_lags(
    broker: Broker, clock: HandClock
) -> None:
    slow = await broker.subscribe("slow", "orders", sample={"lag_high_s": 10.0, "share_min": 0.25})
    whole = await broker.subscribe("whole", "orders")
    await broker.publish_batch("orders", [b"x"] * 2000)
    assert slow.sample_share == 1.0
    for _ in range(60):
        clock.seconds += 1.0
        await slow.lag_report()
    assert slow.sample_share == pytest.approx(0.25, abs=0.02)
    found = await slow.pull(2000)
    topic = await broker.topic("orders")
    expected = kept(StreamId(topic.id, 0), 0, 2000, slow.sample_share)
    assert [message.offset for message in found] == list(expected), "the same ones on every run"
    assert 400 < len(found) < 600
    await slow.ack(found, wait=True)
    assert await slow.lag() == 0, "what it misses counts as done"
    assert len(await whole.pull(5000)) == 2000
    for _ in range(120):
        clock.seconds += 1.0
        await slow.lag_report()
    assert slow.sample_share == 1.0
    await broker.publish_batch("orders", [b"x"] * 100)
    assert len(await slow.pull(2000)) == 100


async def test_the_broker_looks_by_itself(tmp_path: Path) -> None:
    """Once a second, without anybody asking."""
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        slow = await broker.subscribe("slow", "orders", lag={"depth_warn": 5, "hold_s": 0.5})
        await broker.publish_batch("orders", [b"x"] * 50)
        await asyncio.sleep(3.3)
        watch = broker._subscriptions.get("slow").watch
        assert watch is not None
        assert watch.meter is not None
        assert watch.meter.level is LagLevel.WARN
        assert await slow.lag() == 50
