"""Delivery: pull and long-poll, deadlines, retries and their counts, priority, commits, lag."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
TOLERANCE_S = 0.1
"""Deadlines are honoured to this (features C2)."""


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        yield broker


def crashed(data: Path) -> Path:
    """What a crash at this moment would leave: the files as they are, with the broker still open."""
    left = data.with_name(data.name + "-crashed")
    shutil.copytree(data, left)
    return left


async def one(subscription: BrokerSubscription, timeout_s: float = 5.0) -> sparrow.Delivered:
    [message] = await subscription.pull(1, timeout_s)
    return message


# Pull.


async def test_pull_of_an_empty_subscription_returns_at_once_with_nothing(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    assert await subscription.pull() == []


async def test_pull_returns_no_more_than_was_asked_for_and_in_the_order_of_the_log(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"%d" % n for n in range(10)])
    assert [m.data for m in await subscription.pull(4)] == [b"0", b"1", b"2", b"3"]
    assert [m.data for m in await subscription.pull(100)] == [b"%d" % n for n in range(4, 10)]
    assert await subscription.pull() == []


async def test_message_arrives_as_it_was_published(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    receipt = await broker.publish(
        "t", b"\x00\xff", key="k", attributes={"a": "1"}, priority=3, ttl_s=60, event_time=1_700_000_000.5
    )
    message = await one(subscription)
    assert (message.id, message.topic, message.partition, message.offset) == (receipt.message_id, "t", 0, 0)
    assert (message.data, message.key, message.attributes) == (b"\x00\xff", "k", {"a": "1"})
    assert (message.priority, message.ttl_s, message.attempt) == (3, 60, 1)
    assert message.event_time is not None
    assert message.event_time.timestamp() == 1_700_000_000.5
    assert message.publish_time_us == receipt.publish_time_us


async def test_tombstone_is_delivered_without_data(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", None, key="k")
    message = await one(subscription)
    assert (message.data, message.is_tombstone) == (None, True)


async def test_messages_of_many_batches_and_a_sealed_log_come_in_one_pull(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a"] * 50)
    await broker.seal()
    await broker.publish_batch("t", [b"b"] * 50)
    got: list[int] = []
    while messages := await subscription.pull(30):
        got += [m.offset for m in messages]
        await subscription.ack(messages)
    assert got == list(range(100))


async def test_messages_published_one_by_one_fill_one_pull(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    other = await broker.subscribe("other", "t")
    for n in range(20):
        await broker.publish("t", b"%d" % n)
        await other.ack(await other.pull())  # What others have read does not come in smaller portions.
    assert [m.data for m in await subscription.pull(100)] == [b"%d" % n for n in range(20)]


async def test_every_partition_is_delivered(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=4)
    subscription = await broker.subscribe("s", "wide")
    await broker.publish_batch("wide", [b"x"] * 40, keys=[f"k{n}" for n in range(40)])
    messages = await subscription.pull(100)
    assert len(messages) == 40
    assert {m.partition for m in messages} == {0, 1, 2, 3}


# Long-poll.


async def test_long_poll_is_woken_by_a_publish(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    waiting = asyncio.create_task(subscription.pull(timeout_s=60))
    await asyncio.sleep(0.01)
    started = time.monotonic()
    await broker.publish("t", b"x")
    assert [m.data for m in await waiting] == [b"x"]
    assert time.monotonic() - started < 5


async def test_long_poll_gives_up_after_its_timeout(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    started = time.monotonic()
    assert await subscription.pull(timeout_s=0.1) == []
    assert 0.09 <= time.monotonic() - started < 5


async def test_long_poll_is_woken_by_a_batch_and_by_a_producer(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    producer = await broker.producer("p")
    waiting = asyncio.create_task(subscription.pull(timeout_s=60))
    await asyncio.sleep(0.01)
    await broker.publish_batch("t", [b"a", b"b"])
    assert len(await asyncio.wait_for(waiting, 5)) == 2
    waiting = asyncio.create_task(subscription.pull(timeout_s=60))
    await asyncio.sleep(0.01)
    await producer.publish("t", b"c")
    assert len(await asyncio.wait_for(waiting, 5)) == 1


async def test_cancelled_long_poll_takes_no_message_along(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    waiting = asyncio.create_task(subscription.pull(timeout_s=60))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await broker.publish("t", b"x")
    assert (await one(subscription)).attempt == 1


async def test_delivery_does_not_overtake_the_receipt_of_its_own_publish(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    receipted: set[str] = set()

    async def publish() -> None:
        receipted.add((await broker.publish("t", b"x")).message_id)

    for _ in range(20):
        waiting = asyncio.create_task(subscription.pull(1, timeout_s=30))
        await asyncio.sleep(0)
        publishing = asyncio.create_task(publish())
        [message] = await waiting
        assert message.id in receipted
        await publishing
        await message.ack()


# Deadlines.


async def test_expired_lease_is_redelivered_with_the_next_attempt_at_its_deadline(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.3, retry={"immediate_retries": 5})
    await broker.publish("t", b"x")
    assert (await one(subscription)).attempt == 1
    started = time.monotonic()
    again = await one(subscription)
    assert again.attempt == 2
    assert abs(time.monotonic() - started - 0.3) <= TOLERANCE_S


async def test_message_is_nobody_elses_before_its_deadline(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.4)
    await broker.publish("t", b"x")
    await one(subscription)
    assert await subscription.pull(timeout_s=0.2) == []


async def test_extended_lease_lasts_until_its_new_deadline(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.15)
    await broker.publish("t", b"x")
    message = await one(subscription)
    started = time.monotonic()
    await message.extend(0.4)
    assert (await one(subscription)).attempt == 2
    assert abs(time.monotonic() - started - 0.4) <= TOLERANCE_S


async def test_lease_can_be_shortened_to_nothing(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=600)
    await broker.publish("t", b"x")
    message = await one(subscription)
    await message.extend(0)
    assert (await one(subscription)).attempt == 2


async def test_extending_one_message_leaves_the_deadline_of_the_others(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.2)
    await broker.publish_batch("t", [b"a", b"b"])
    first, _ = await subscription.pull(2)
    await first.extend(60)
    assert [m.data for m in await subscription.pull(2, timeout_s=5)] == [b"b"]
    await first.ack()


async def test_late_ack_is_honoured_while_nobody_else_holds_the_message(broker: Broker) -> None:
    subscription = await broker.subscribe(
        "s", "t", ack_deadline_s=0.05, retry={"immediate_retries": 0, "min_backoff_s": 60}
    )
    await broker.publish("t", b"x")
    message = await one(subscription)
    assert await subscription.pull(timeout_s=0.15) == []
    await subscription.ack([message], wait=True)
    assert await subscription.lag() == 0


async def test_late_ack_is_refused_when_somebody_else_holds_the_message(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.05)
    await broker.publish("t", b"x")
    late = await one(subscription)
    await subscription.update(ack_deadline_s=60)
    await one(subscription)
    with pytest.raises(errors.StaleAckId):
        await late.ack()
    assert await subscription.lag() == 1


# Nacks and backoff.


async def test_nacked_message_comes_back_at_once_the_first_time(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    started = time.monotonic()
    await (await one(subscription)).nack()
    assert (await one(subscription)).attempt == 2
    assert time.monotonic() - started < 0.9


async def test_nack_with_a_delay_comes_back_after_it(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    message = await one(subscription)
    started = time.monotonic()
    await message.nack(delay_s=0.3)
    assert (await one(subscription)).attempt == 2
    assert abs(time.monotonic() - started - 0.3) <= TOLERANCE_S


async def test_nack_delays_its_own_message_only(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b"])
    first, second = await subscription.pull(2)
    await first.nack(delay_s=60)
    await second.nack(delay_s=0)
    assert [m.data for m in await subscription.pull(2, timeout_s=5)] == [b"b"]


async def test_backoff_grows_by_its_factor_between_its_bounds(broker: Broker) -> None:
    retry = {
        "immediate_retries": 0, "min_backoff_s": 0.1, "max_backoff_s": 0.3, "multiplier": 2, "jitter": 0,
    }  # fmt: skip
    subscription = await broker.subscribe("s", "t", retry=retry)
    await broker.publish("t", b"x")
    waits = []
    message = await one(subscription)
    for _ in range(4):
        started = time.monotonic()
        await message.nack()
        message = await one(subscription)
        waits.append(time.monotonic() - started)
    assert all(abs(wait - due) <= TOLERANCE_S for wait, due in zip(waits, [0.1, 0.2, 0.3, 0.3], strict=True))
    assert message.attempt == 5


async def test_without_a_dead_letter_topic_a_message_is_tried_for_ever(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", retry={"immediate_retries": 1000})
    await broker.publish("t", b"x")
    for attempt in range(1, 21):
        message = await one(subscription)
        assert message.attempt == attempt
        await message.nack()


async def test_settling_by_ack_id_is_the_same_as_by_message(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b", b"c"])
    a, b, c = await subscription.pull(3)
    await subscription.ack([a.ack_id])
    await subscription.nack([b.ack_id], delay_s=60)
    await subscription.extend([c.ack_id], 60)
    await subscription.ack(c.ack_id, wait=True)
    assert await subscription.lag() == 1


# What survives.


async def test_attempts_are_counted_over_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", retry={"immediate_retries": 9})
        await broker.publish("t", b"x")
        for _ in range(2):
            await (await one(subscription)).nack(reason="no")
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        assert (await one(await broker.subscription("s"))).attempt == 3


async def test_broker_crash_does_not_count_as_an_attempt(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"x")
        await subscription.nack([await one(subscription)], wait=True)
        assert (await one(subscription)).attempt == 2
        left = crashed(tmp_path / "data")
    async with sparrow.aopen(left, settings=SMALL) as broker:
        assert (await one(await broker.subscription("s"))).attempt == 2


async def test_acked_messages_stay_acked_after_a_crash_and_others_come_again(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish_batch("t", [b"%d" % n for n in range(10)])
        messages = await subscription.pull(10)
        await subscription.ack([m for m in messages if m.offset % 3 == 0], wait=True)
        left = crashed(tmp_path / "data")
    async with sparrow.aopen(left, settings=SMALL) as broker:
        again = await (await broker.subscription("s")).pull(10)
        assert [m.offset for m in again] == [1, 2, 4, 5, 7, 8]


async def test_acks_survive_when_the_log_was_sealed_in_between(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish_batch("t", [b"x"] * 4)
        messages = await subscription.pull(4)
        await subscription.ack([messages[1]], wait=True)
        await broker.seal()
        await subscription.ack([messages[3]], wait=True)
        left = crashed(tmp_path / "data")
    async with sparrow.aopen(left, settings=SMALL) as broker:
        assert [m.offset for m in await (await broker.subscription("s")).pull(10)] == [0, 2]


async def test_wait_for_a_retry_is_not_shortened_by_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"x")
        await (await one(subscription)).nack(delay_s=60)
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        assert await (await broker.subscription("s")).pull(timeout_s=0.05) == []


async def test_retry_that_fell_due_while_the_broker_was_down_is_delivered(tmp_path: Path) -> None:
    class Later(Clock):
        def now_us(self) -> int:
            return super().now_us() + 61_000_000

    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"x")
        await (await one(subscription)).nack(delay_s=60)
        settings = broker.settings
    async with await Broker.open(settings, clock=Later()) as broker:
        assert (await one(await broker.subscription("s"))).attempt == 2


async def test_unconfirmed_acks_are_durable_once_the_broker_has_closed(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"x")
        await (await one(subscription)).ack()
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        assert await (await broker.subscription("s")).lag() == 0


# Priority.


async def test_higher_priority_goes_first_among_the_ready(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    for priority in (0, 5, 1, 9, 5):
        await broker.publish("t", b"%d" % priority, priority=priority)
    got = [(await one(subscription)).data for _ in range(5)]
    assert got == [b"9", b"5", b"5", b"1", b"0"]


async def test_higher_priority_goes_first_within_one_pull(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"0", b"5", b"1", b"9"], priorities=[0, 5, 1, 9])
    assert [m.data for m in await subscription.pull(4)] == [b"9", b"5", b"1", b"0"]


async def test_retried_message_keeps_its_priority(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"low", b"high"], priorities=[0, 7])
    high = await one(subscription)
    await subscription.nack([high], wait=True)
    assert (await one(subscription)).data == b"high"


# Bounds.


async def test_no_more_than_max_in_flight_are_held_over_all_consumers(broker: Broker) -> None:
    one_of, other = [await broker.subscribe("s", "t", max_in_flight=3) for _ in range(2)]
    await broker.publish_batch("t", [b"x"] * 5)
    held = await one_of.pull(2) + await other.pull(2)
    assert (len(held), one_of.in_flight) == (3, 3)
    assert await other.pull() == []
    await held[0].ack()
    assert len(await other.pull(5)) == 1


async def test_read_ahead_of_one_still_delivers_everything(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", read_ahead=1)
    await broker.publish_batch("t", [b"x"] * 7)
    assert [(await one(subscription)).offset for _ in range(7)] == list(range(7))


# Cumulative commits and lag.


async def test_commit_settles_everything_below_an_offset(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"x"] * 10)
    await subscription.pull(3)
    await subscription.commit("t", 0, 6)
    assert (await subscription.lag(), subscription.in_flight) == (4, 0)
    assert [m.offset for m in await subscription.pull(100)] == [6, 7, 8, 9]


async def test_commit_is_durable_when_it_returns(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish_batch("t", [b"x"] * 10)
        await subscription.commit("t", 0, 6)
        left = crashed(tmp_path / "data")
    async with sparrow.aopen(left, settings=SMALL) as broker:
        assert await (await broker.subscription("s")).lag() == 4


async def test_commit_of_one_partition_leaves_the_others(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=2)
    subscription = await broker.subscribe("s", "wide")
    await broker.publish_batch("wide", [b"x"] * 20, keys=[f"k{n}" for n in range(20)])
    end = (await broker.bounds("wide", 1)).end_offset
    await subscription.commit("wide", 1, end)
    assert {m.partition for m in await subscription.pull(100)} == {0}


async def test_commit_that_goes_back_changes_nothing(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"x"] * 4)
    await subscription.commit("t", 0, 3)
    await subscription.commit("t", 0, 1)
    assert await subscription.lag() == 1


async def test_message_held_below_a_commit_cannot_be_acked_again(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    message = await one(subscription)
    await subscription.commit("t", 0, 1)
    with pytest.raises(errors.StaleAckId):
        await message.ack()


async def test_lag_counts_what_is_not_done(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"x"] * 5)
    assert await subscription.lag() == 5
    messages = await subscription.pull(3)
    assert (await subscription.lag(), subscription.in_flight) == (5, 3)
    await subscription.ack(messages[:2], wait=True)
    assert (await subscription.lag(), subscription.in_flight) == (3, 1)


# Retention under a lagging subscription.


async def test_subscription_overtaken_by_retention_goes_on_with_what_is_left(broker: Broker) -> None:
    await broker.create_topic("short", retention_messages=2)
    subscription = await broker.subscribe("s", "short")
    await broker.publish_batch("short", [b"gone"] * 3)
    await broker.seal()
    await broker.publish_batch("short", [b"kept"] * 2)
    await broker.seal()
    assert await broker.apply_retention() == 1
    assert [m.data for m in await subscription.pull(10, timeout_s=5)] == [b"kept", b"kept"]


async def test_topic_that_retains_until_acked_keeps_what_a_subscription_needs(broker: Broker) -> None:
    await broker.create_topic("careful", retention_messages=2, retain_until_acked=True)
    subscription = await broker.subscribe("s", "careful")
    await broker.publish_batch("careful", [b"needed"] * 3)
    await broker.seal()
    await broker.publish_batch("careful", [b"x"] * 2)
    await broker.seal()
    assert await broker.apply_retention() == 0
    messages = await subscription.pull(10)
    assert len(messages) == 5
    await subscription.ack(messages, wait=True)
    assert await broker.apply_retention() == 1
