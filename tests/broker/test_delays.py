"""Time: messages that are not to be delivered yet, and messages that are no longer worth delivering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
TOLERANCE_S = 0.1


class SetClock(Clock):
    """The machine's clock, set ahead by as much as a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_us(self) -> int:
        return super().now_us() + int(self.ahead_s * 1_000_000)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def settings(data: Path) -> sparrow.Settings:
    return sparrow.Settings(data=str(data), journal=JournalSettings(file_bytes=MIB))


@pytest.fixture
async def broker(tmp_path: Path, clock: SetClock) -> AsyncIterator[Broker]:
    async with await Broker.open(settings(tmp_path / "data"), clock=clock) as broker:
        await broker.create_topic("t")
        yield broker


async def is_done(subscription: BrokerSubscription) -> bool:
    """Whether nothing is left to do, after everything that is due has been dealt with."""
    for _ in range(100):
        if await subscription.lag() == 0:
            return True
        if await subscription.pull(timeout_s=0.02):
            return False
    return False


def in_s(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


# Not yet.


async def test_delayed_message_is_delivered_at_its_time_and_wakes_who_waits(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    due_at = in_s(0.4)
    await broker.publish("t", b"later", deliver_at=due_at)
    started = time.monotonic()
    due_in_s = (due_at - datetime.now(UTC)).total_seconds()
    [message] = await subscription.pull(timeout_s=30)
    assert abs(time.monotonic() - started - due_in_s) <= TOLERANCE_S
    assert (message.data, message.attempt) == (b"later", 1)


async def test_delayed_message_holds_up_nobody(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"later", deliver_at=in_s(60))
    await broker.publish("t", b"now")
    assert [m.data for m in await subscription.pull(10, timeout_s=5)] == [b"now"]


async def test_delayed_messages_come_in_the_order_of_their_times(broker: Broker, clock: SetClock) -> None:
    subscription = await broker.subscribe("s", "t")
    for seconds in (30, 10, 20):
        await broker.publish("t", b"%d" % seconds, deliver_at=in_s(seconds))
    got = []
    for ahead_s in (5, 15, 25, 35):
        clock.ahead_s = ahead_s
        got.append([m.data for m in await subscription.pull(10)])
    assert got == [[], [b"10"], [b"20"], [b"30"]]


async def test_delay_in_the_past_is_no_delay(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x", deliver_at=in_s(-60))
    assert len(await subscription.pull()) == 1


async def test_delay_survives_a_restart(tmp_path: Path, clock: SetClock) -> None:
    async with await Broker.open(settings(tmp_path), clock=clock) as broker:
        await broker.create_topic("t")
        await broker.subscribe("s", "t")
        await broker.publish("t", b"later", deliver_at=in_s(3600))
        await broker.publish("t", b"now")
    async with await Broker.open(settings(tmp_path), clock=clock) as broker:
        subscription = await broker.subscription("s")
        [now] = await subscription.pull(10)
        await subscription.ack([now], wait=True)
        assert now.data == b"now"
        assert await subscription.pull(timeout_s=0.02) == []
    clock.ahead_s = 3601
    async with await Broker.open(settings(tmp_path), clock=clock) as broker:
        assert [m.data for m in await (await broker.subscription("s")).pull(10)] == [b"later"]


async def test_delay_survives_sealing(broker: Broker, clock: SetClock) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"later", deliver_at=in_s(3600))
    await broker.seal()
    assert await subscription.pull() == []
    clock.ahead_s = 3601
    assert len(await subscription.pull()) == 1


async def test_delayed_message_that_fails_is_retried_like_any_other(broker: Broker, clock: SetClock) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"later", deliver_at=in_s(3600))
    await subscription.pull()
    clock.ahead_s = 3601
    [message] = await subscription.pull()
    await message.nack()
    [message] = await subscription.pull(timeout_s=5)
    assert message.attempt == 2


# No longer.


async def test_message_past_its_time_to_live_is_not_delivered_and_counts_as_done(
    broker: Broker, clock: SetClock
) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"old news", ttl_s=60)
    await broker.publish("t", b"news")
    clock.ahead_s = 61
    [message] = await subscription.pull(10)
    assert message.data == b"news"
    await subscription.ack([message], wait=True)
    assert await is_done(subscription)


async def test_message_within_its_time_to_live_is_delivered(broker: Broker, clock: SetClock) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x", ttl_s=60)
    clock.ahead_s = 59
    assert len(await subscription.pull()) == 1


async def test_message_that_expires_while_it_waits_for_a_retry_is_dropped(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x", ttl_s=0.2)
    [message] = await subscription.pull()
    await message.nack(delay_s=0.1)
    # Its retry would fall due in time, but it fails again and then outlives its time.
    [message] = await subscription.pull(timeout_s=5)
    await message.nack(delay_s=1)
    assert await subscription.pull(timeout_s=0.3) == []
    assert await is_done(subscription)


async def test_message_in_the_hands_of_a_consumer_may_be_acked_after_it_expired(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x", ttl_s=0.1)
    [message] = await subscription.pull()
    await asyncio.sleep(0.15)
    await subscription.ack([message], wait=True)
    assert await subscription.lag() == 0


async def test_expired_message_is_dead_lettered_where_the_policy_says_so(
    broker: Broker, clock: SetClock
) -> None:
    subscription = await broker.subscribe("s", "t", dead_letter_topic="d", expired="dead_letter")
    receipt = await broker.publish("t", b"old news", ttl_s=60)
    clock.ahead_s = 61
    assert await is_done(subscription)
    [letter] = await subscription.dead_letters.list()
    assert (letter.message_id, letter.reason, letter.attempts) == (receipt.message_id, "expired", 0)
    assert letter.message.data == b"old news"


async def test_expired_message_is_dropped_once_over_a_restart(tmp_path: Path, clock: SetClock) -> None:
    async with await Broker.open(settings(tmp_path), clock=clock) as broker:
        await broker.create_topic("t")
        await broker.subscribe("s", "t")
        await broker.publish("t", b"old news", ttl_s=60)
    clock.ahead_s = 61
    async with await Broker.open(settings(tmp_path), clock=clock) as broker:
        subscription = await broker.subscription("s")
        assert await is_done(subscription)


async def test_message_that_expires_before_it_may_be_delivered_is_never_delivered(
    broker: Broker, clock: SetClock
) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x", ttl_s=10, deliver_at=in_s(20))
    clock.ahead_s = 30
    assert await subscription.pull(timeout_s=0.05) == []
    assert await is_done(subscription)
