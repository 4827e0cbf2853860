"""Order: per key, per publisher, total; strict and with a window; and messages that depend on others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        yield broker


async def texts(subscription: BrokerSubscription, timeout_s: float = 0.0) -> list[str]:
    return [(m.data or b"").decode() for m in await subscription.pull(100, timeout_s)]


async def acked(subscription: BrokerSubscription) -> list[str]:
    """Everything, in the order of delivery, each acked before the next is asked for."""
    found = []
    while messages := await subscription.pull(100, 0.05):
        found += [(m.data or b"").decode() for m in messages]
        await subscription.ack(messages, wait=True)
    return found


async def publish(broker: Broker, *names: str) -> None:
    """Messages named by their key and number: a1 has the key a."""
    await broker.publish_batch("t", [n.encode() for n in names], keys=[n[0] for n in names])


# Per key.


async def test_next_message_of_a_key_waits_for_the_ack_of_the_one_before(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    await publish(broker, "a1", "a2", "b1", "a3", "b2")
    first = await subscription.pull(100)
    assert sorted((m.data or b"").decode() for m in first) == ["a1", "b1"]
    assert await subscription.pull(100) == []
    await subscription.ack([m for m in first if m.data == b"a1"], wait=True)
    assert await texts(subscription) == ["a2"]


async def test_each_key_is_delivered_in_the_order_of_the_log(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    names = [f"{'abc'[n % 3]}{n}" for n in range(60)]
    await publish(broker, *names)
    got = await acked(subscription)
    for key in "abc":
        assert [n for n in got if n[0] == key] == [n for n in names if n[0] == key]


async def test_nack_pauses_its_own_key_only(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    await publish(broker, "a1", "a2", "b1", "b2")
    for message in await subscription.pull(100):
        await (message.nack(delay_s=60) if message.key == "a" else message.ack())
    await subscription.flush()
    assert await acked(subscription) == ["b2"]


async def test_failed_message_comes_again_before_the_later_ones_of_its_key(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    await publish(broker, "a1", "a2")
    [message] = await subscription.pull()
    await message.nack()
    assert await acked(subscription) == ["a1", "a2"]


async def test_dead_lettering_lets_the_key_go_on(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key", dead_letter_topic="d")
    await publish(broker, "a1", "a2")
    [message] = await subscription.pull()
    await message.nack(retry=False)
    await subscription.flush()
    assert await texts(subscription, 5) == ["a2"]


async def test_messages_without_a_key_wait_for_nobody(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    await broker.publish_batch("t", [b"x"] * 5)
    assert len(await subscription.pull(100)) == 5


async def test_order_of_a_key_holds_over_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", ordering="key")
        await publish(broker, "a1", "a2", "a3")
        await subscription.nack(await subscription.pull(1), delay_s=0, wait=True)
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        assert await acked(await broker.subscription("s")) == ["a1", "a2", "a3"]


async def test_consumers_that_share_a_subscription_never_hold_one_key_at_once(broker: Broker) -> None:
    members = [await broker.subscribe("s", "t", ordering="key") for _ in range(2)]
    await publish(broker, "a1", "a2", "a3")
    assert await texts(members[0]) == ["a1"]
    assert await texts(members[1]) == []


# With a window.


async def test_window_lets_several_of_a_key_out_to_one_consumer_in_order(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key", key_window=3)
    await publish(broker, "a1", "a2", "a3", "a4")
    assert await texts(subscription) == ["a1", "a2", "a3"]
    assert await texts(subscription) == []


async def test_with_a_window_the_key_sticks_to_its_consumer(broker: Broker) -> None:
    one, other = [await broker.subscribe("s", "t", ordering="key", key_window=3) for _ in range(2)]
    await publish(broker, "a1", "a2", "b1")
    [message] = await one.pull(1)
    assert message.data == b"a1"
    assert await texts(other) == ["b1"]
    assert await texts(one) == ["a2"]


async def test_failure_within_a_window_redelivers_it_and_the_later_ones_of_its_key(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key", key_window=4)
    await publish(broker, "a1", "a2", "a3", "a4")
    messages = await subscription.pull(100)
    await messages[0].ack()
    await subscription.nack([messages[1]], wait=True)
    again = await subscription.pull(100, 5)
    assert [(m.data, m.attempt) for m in again] == [(b"a2", 2), (b"a3", 1), (b"a4", 1)]


async def test_message_recalled_from_a_window_cannot_be_acked_by_its_old_lease(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key", key_window=2, guarantee="exactly_once")
    await publish(broker, "a1", "a2")
    first, second = await subscription.pull(100)
    await first.nack(delay_s=60)
    with pytest.raises(sparrow.errors.StaleAckId):
        await second.ack()


# Per publisher.


async def test_next_message_of_a_publisher_waits_for_the_ack_of_the_one_before(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=3)
    subscription = await broker.subscribe("s", "wide", ordering="publisher")
    ann, bob = await broker.producer("ann"), await broker.producer("bob")
    for n in range(4):
        await ann.publish("wide", b"a%d" % n, key=f"k{n}")
        await bob.publish("wide", b"b%d" % n, key=f"k{n}")
    first = await subscription.pull(100)
    assert sorted(m.data for m in first) == [b"a0", b"b0"]
    await subscription.ack(first, wait=True)
    got = await acked(subscription)
    for name in "ab":
        assert [n for n in got if n[0] == name] == [f"{name}{n}" for n in range(1, 4)]


# Total.


async def test_total_order_hands_over_one_message_at_a_time_by_publish_time(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=3)
    subscription = await broker.subscribe("s", "wide", ordering="total")
    for n in range(9):
        await broker.publish("wide", b"%d" % n, key=f"k{n}")
    held = await subscription.pull(100)
    assert len(held) == 1
    assert await subscription.pull(100) == []
    await subscription.ack(held, wait=True)
    assert [(held[0].data or b"").decode(), *await acked(subscription)] == [str(n) for n in range(9)]


async def test_total_order_over_several_topics(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "log.#", ordering="total")
    for n in range(8):
        await broker.publish(f"log.{n % 3}", b"%d" % n)
    assert await acked(subscription) == [str(n) for n in range(8)]


async def test_total_order_with_a_window_keeps_the_order_within_one_pull(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=3)
    subscription = await broker.subscribe("s", "wide", ordering="total", key_window=100)
    for n in range(9):
        await broker.publish("wide", b"%d" % n, key=f"k{n}")
    assert await texts(subscription) == [str(n) for n in range(9)]


async def test_total_order_goes_on_after_a_restart_where_it_stopped(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("wide", partitions=3)
        subscription = await broker.subscribe("s", "wide", ordering="total")
        for n in range(6):
            await broker.publish("wide", b"%d" % n, key=f"k{n}")
        for _ in range(3):
            await subscription.ack(await subscription.pull(), wait=True)
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        assert await acked(await broker.subscription("s")) == ["3", "4", "5"]


# Dependencies.


async def test_message_waits_until_what_it_depends_on_is_acked(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    cause = await broker.publish("t", b"cause")
    await broker.publish("t", b"effect", depends_on=[cause.message_id])
    await broker.publish("t", b"other")
    first, other = await subscription.pull(100)
    assert (first.data, other.data) == (b"cause", b"other")
    await other.ack()
    assert await subscription.pull() == []
    await first.ack()
    assert await texts(subscription, 5) == ["effect"]


async def test_message_waits_for_every_message_it_depends_on_over_several_topics(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "#")
    one, two = await broker.publish("a", b"1"), await broker.publish("b", b"2")
    await broker.publish("t", b"both", depends_on=[one.message_id, two.message_id])
    causes = await subscription.pull(100)
    causes += await subscription.pull(100)
    assert sorted(m.data for m in causes) == [b"1", b"2"]
    await subscription.ack(causes[:1], wait=True)
    assert await subscription.pull() == []
    await subscription.ack(causes[1:], wait=True)
    assert await texts(subscription, 5) == ["both"]


async def test_message_the_subscription_does_not_read_is_not_waited_for(broker: Broker) -> None:
    await broker.create_topic("elsewhere")
    elsewhere = await broker.publish("elsewhere", b"x")
    filtered = await broker.subscribe("filtered", "t", filter='attributes.env = "prod"')
    subscription = await broker.subscribe("s", "t")
    out = await broker.publish("t", b"filtered out")
    await broker.publish("t", b"y", depends_on=[elsewhere.message_id, out.message_id])
    await broker.publish("t", b"z", attributes={"env": "prod"}, depends_on=[out.message_id])
    assert await acked(subscription) == ["filtered out", "y", "z"]
    assert await texts(filtered, 1) == ["z"]


async def test_dependency_that_was_acked_before_is_met(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    cause = await broker.publish("t", b"cause")
    await acked(subscription)
    await broker.publish("t", b"effect", depends_on=[cause.message_id])
    assert await texts(subscription, 5) == ["effect"]


async def test_dependencies_hold_over_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        await broker.subscribe("s", "t")
        cause = await broker.publish("t", b"cause")
        await broker.publish("t", b"effect", depends_on=[cause.message_id])
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        assert await texts(subscription) == ["cause"]
        assert await texts(subscription) == []


async def test_dead_lettered_dependency_no_longer_holds_anyone_up(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", dead_letter_topic="d")
    cause = await broker.publish("t", b"cause")
    await broker.publish("t", b"effect", depends_on=[cause.message_id])
    [message] = await subscription.pull()
    await message.nack(retry=False)
    assert await texts(subscription, 5) == ["effect"]
