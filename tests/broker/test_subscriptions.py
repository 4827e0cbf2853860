"""Subscriptions: what they match, how several share one, how they change, pause and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.courier import Courier
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        yield broker


async def drained(subscription: BrokerSubscription) -> list[bytes | None]:
    """Everything that is ready, acked."""
    found: list[bytes | None] = []
    while messages := await subscription.pull(1000):
        found += [message.data for message in messages]
        await subscription.ack(messages, wait=True)
    return found


# Patterns.


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders.*.created", ["orders.us.created"], ["orders.created", "orders.us.items.created"]),
        ("orders.#", ["orders", "orders.us", "orders.us.items.created"], ["inventory.created"]),
        ("orders.*.#", ["orders.us", "orders.us.items"], ["orders"]),
        ("orders.us", ["orders.us"], ["orders", "orders.us.items"]),
        ("#", ["a", "a.b.c"], []),
        ("*", ["a"], ["a.b"]),
    ],
)
async def test_pattern_selects_exactly_the_topics_it_matches(
    broker: Broker, pattern: str, matching: list[str], others: list[str]
) -> None:
    for topic in matching + others:
        await broker.create_topic(topic)
    subscription = await broker.subscribe("s", pattern)
    for topic in matching + others:
        await broker.publish(topic, topic.encode())
    assert sorted(await drained(subscription)) == sorted(topic.encode() for topic in matching)


async def test_topic_created_later_is_read_from_its_first_message(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.#")
    await broker.publish("orders.us", b"first ever")
    await broker.publish("orders.eu.paid", b"another topic")
    assert sorted(await drained(subscription)) == [b"another topic", b"first ever"]


async def test_topic_created_later_is_read_from_its_first_message_after_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.subscribe("s", "orders.#")
        await broker.publish("orders.us", b"before")
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        await broker.publish("orders.eu", b"after")
        assert sorted(await drained(subscription)) == [b"after", b"before"]


async def test_consumer_that_waits_is_woken_by_a_topic_that_did_not_exist(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.#")
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0)
    await broker.publish("orders.new", b"x")
    assert [m.data for m in await asyncio.wait_for(waiting, 5)] == [b"x"]


async def test_topics_and_subscriptions_created_at_the_same_time_find_each_other(broker: Broker) -> None:
    names = range(20)
    made = await asyncio.gather(
        *(broker.subscribe(f"s{n}", f"t{n}.#") for n in names),
        *(broker.create_topic(f"t{n}.x") for n in names),
    )
    for n in names:
        await broker.publish(f"t{n}.x", b"%d" % n)
    assert [await drained(made[n]) for n in names] == [[b"%d" % n] for n in names]


async def test_partitions_added_later_are_read_from_their_first_message(broker: Broker) -> None:
    await broker.create_topic("t", partitions=1)
    subscription = await broker.subscribe("s", "t")
    await broker.update_topic("t", partitions=4)
    for n in range(20):
        await broker.publish("t", b"%d" % n, key=f"k{n}")
    assert {m.partition for m in await subscription.pull(100)} == {0, 1, 2, 3}


async def test_message_that_two_patterns_match_comes_once_to_each_subscription(broker: Broker) -> None:
    broad = await broker.subscribe("broad", "orders.#")
    narrow = await broker.subscribe("narrow", "orders.*")
    await broker.publish("orders.us", b"x")
    assert await drained(broad) == [b"x"]
    assert await drained(narrow) == [b"x"]


async def test_pattern_that_matches_a_topic_in_two_ways_delivers_one_copy(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.*.#")
    await broker.publish("orders.us", b"x")
    await broker.publish("orders.us.paid", b"y")
    assert sorted(await drained(subscription)) == [b"x", b"y"]


# Starting points and fan-out.


async def test_new_subscription_starts_with_what_is_published_after_it(broker: Broker) -> None:
    await broker.publish("t", b"before")
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"after")
    assert await drained(subscription) == [b"after"]


async def test_subscription_from_earliest_gets_everything_kept(broker: Broker) -> None:
    await broker.publish("t", b"before")
    subscription = await broker.subscribe("s", "t", start="earliest")
    await broker.publish("t", b"after")
    assert await drained(subscription) == [b"before", b"after"]


async def test_stop_while_a_subscription_is_being_created_does_not_move_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        await broker.publish_batch("t", [b"a", b"b"])

        async def stopped(self: Courier, facts: Any) -> None:
            raise ConnectionAbortedError("the process ends here")

        with monkeypatch.context() as patch:
            patch.setattr(Courier, "journal", stopped)
            with pytest.raises(ConnectionAbortedError):
                await broker.subscribe("s", "t", start="earliest")
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        assert await drained(await broker.subscription("s")) == [b"a", b"b"]
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        assert await broker._store.documents("subscription-begun") == {}


async def test_subscription_from_a_time_gets_what_was_published_since(broker: Broker) -> None:
    await broker.publish("t", b"before")
    since = (await broker.publish("t", b"at that time")).publish_time_us
    subscription = await broker.subscribe("s", "t", start=since / 1_000_000)
    assert await drained(subscription) == [b"at that time"]


async def test_every_one_of_many_subscriptions_gets_every_message(broker: Broker) -> None:
    await broker.create_topic("t")
    many = [await broker.subscribe(f"s{n}", "t") for n in range(50)]
    await broker.publish_batch("t", [b"a", b"b", b"c"])
    got = await asyncio.gather(*(s.pull(timeout_s=5) for s in many))
    assert [[m.data for m in messages] for messages in got] == [[b"a", b"b", b"c"]] * 50


async def test_ack_of_one_subscription_is_not_an_ack_of_another(broker: Broker) -> None:
    await broker.create_topic("t")
    one, other = await broker.subscribe("one", "t"), await broker.subscribe("other", "t")
    await broker.publish("t", b"x")
    assert await drained(one) == [b"x"]
    assert (await one.lag(), await other.lag()) == (0, 1)
    assert await drained(other) == [b"x"]


# Taking hold of one that exists.


async def test_subscribing_again_with_the_same_settings_takes_hold_of_it(broker: Broker) -> None:
    await broker.create_topic("t")
    await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    await broker.publish("t", b"x", attributes={"env": "prod"})
    again = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    assert await drained(again) == [b"x"]


async def test_subscribing_again_with_other_settings_is_refused_and_changes_nothing(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", ack_deadline_s=20)
    for pattern, options in [("t", {}), ("u", {"ack_deadline_s": 20}), ("t", {"dead_letter_topic": "d"})]:
        with pytest.raises(errors.SubscriptionExists) as refused:
            await broker.subscribe("s", pattern, **options)
        assert refused.value.code == "SUBSCRIPTION_EXISTS"
        assert refused.value.hint
    assert (subscription.pattern, subscription.policy.ack_deadline_s) == ("t", 20)
    assert subscription.policy.dead_letter_topic is None
    with pytest.raises(errors.PreconditionFailed):
        await subscription.dead_letters.list()


async def test_two_programs_that_subscribe_at_once_share_the_subscription(broker: Broker) -> None:
    await broker.create_topic("t")
    one, other = await asyncio.gather(broker.subscribe("s", "t"), broker.subscribe("s", "t"))
    assert one.name == other.name == "s"
    assert len(await broker.subscriptions()) == 1


async def test_subscription_survives_a_restart_with_its_policy_and_position(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", ordering="key", ack_deadline_s=33)
        await broker.publish_batch("t", [b"a", b"b"])
        [first] = await subscription.pull(1)
        await first.ack()
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        assert (subscription.policy.ordering, subscription.policy.ack_deadline_s) == ("key", 33)
        assert await drained(subscription) == [b"b"]


async def test_subscriptions_are_listed_by_name_without_the_ones_behind_the_scenes(broker: Broker) -> None:
    await broker.subscribe("b", "t", dead_letter_topic="d")
    await broker.subscribe("a", "t")
    assert [s.name for s in await broker.subscriptions()] == ["a", "b"]


async def test_what_happens_behind_the_scenes_cannot_be_taken_hold_of(broker: Broker) -> None:
    await broker.subscribe("s", "t", dead_letter_topic="d")
    with pytest.raises(errors.SubscriptionNotFound):
        await broker.subscription("s~dlq")
    with pytest.raises(errors.InvalidName):
        await broker.subscribe("other~dlq", "t")


# Consumers that share a subscription.


async def test_consumers_that_share_a_subscription_share_its_messages(broker: Broker) -> None:
    await broker.create_topic("t")
    members = [await broker.subscribe("s", "t") for _ in range(3)]
    await broker.publish_batch("t", [b"%d" % n for n in range(9)])
    got = [[m.data for m in await member.pull(3)] for member in members]
    assert [len(share) for share in got] == [3, 3, 3]
    assert sorted(data for share in got for data in share) == [b"%d" % n for n in range(9)]


async def test_message_wakes_only_as_many_waiting_consumers_as_can_have_it(broker: Broker) -> None:
    await broker.create_topic("t")
    members = [await broker.subscribe("s", "t") for _ in range(3)]
    waiting = [asyncio.create_task(member.pull(1, timeout_s=0.2)) for member in members]
    await asyncio.sleep(0)
    await broker.publish("t", b"x")
    got = await asyncio.gather(*waiting)
    assert sorted(len(messages) for messages in got) == [0, 0, 1]


async def test_consumer_that_closes_gives_back_what_it_held_without_a_counted_attempt(broker: Broker) -> None:
    await broker.create_topic("t")
    leaving, staying = await broker.subscribe("s", "t"), await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    assert await leaving.pull()
    assert await staying.pull() == []
    await leaving.close()
    [message] = await staying.pull(timeout_s=5)
    assert message.attempt == 1


# Iteration and callbacks.


async def test_iteration_hands_over_message_after_message(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b", b"c"])
    got = []
    async for message in subscription:
        got.append(message.data)
        await message.ack()
        if len(got) == 3:
            break
    assert got == [b"a", b"b", b"c"]
    await subscription.flush()
    assert await subscription.lag() == 0


async def test_callback_that_returns_acks_and_one_that_raises_nacks_with_the_error(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", dead_letter_topic="d", retry={"max_attempts": 2})
    seen: list[tuple[bytes | None, int]] = []
    done = asyncio.Event()

    def handle(message: sparrow.Delivered) -> None:
        seen.append((message.data, message.attempt))
        if len(seen) == 3:
            done.set()
        if message.data == b"bad":
            raise ValueError("cannot read it")

    running = asyncio.create_task(subscription.run(handle))
    await broker.publish_batch("t", [b"good", b"bad"])
    await asyncio.wait_for(done.wait(), 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"good", 1)]
    [letter] = await subscription.dead_letters.list()
    assert (letter.message.data, letter.last_error) == (b"bad", "ValueError: cannot read it")


async def test_async_callbacks_run_side_by_side_up_to_max_in_flight(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    at_work, most, handled = 0, 0, 0
    done = asyncio.Event()

    async def handle(message: sparrow.Delivered) -> None:
        nonlocal at_work, most, handled
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.005)
        at_work -= 1
        handled += 1
        if handled == 20:
            done.set()

    await broker.publish_batch("t", [b"x"] * 20)
    running = asyncio.create_task(subscription.run(handle, max_in_flight=4))
    await asyncio.wait_for(done.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert most == 4
    assert await subscription.lag() == 0


async def test_cancelled_run_finishes_the_callbacks_under_way(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handle(message: sparrow.Delivered) -> None:
        started.set()
        await go_on.wait()

    await broker.publish("t", b"x")
    running = asyncio.create_task(subscription.run(handle))
    await asyncio.wait_for(started.wait(), 5)
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await subscription.lag() == 0


# Pausing.


async def test_paused_subscription_delivers_nothing_and_loses_nothing(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await subscription.pause()
    await broker.publish("t", b"x")
    assert await subscription.pull(timeout_s=0.05) == []
    await subscription.resume()
    assert await drained(subscription) == [b"x"]


async def test_resuming_wakes_consumers_that_wait(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await subscription.pause()
    await broker.publish("t", b"x")
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await subscription.resume()
    assert len(await asyncio.wait_for(waiting, 5)) == 1


async def test_pause_lasts_over_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        await (await broker.subscribe("s", "t")).pause()
        await broker.publish("t", b"x")
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        assert await subscription.pull() == []
        await subscription.resume()
        assert await drained(subscription) == [b"x"]


async def test_messages_held_during_a_pause_can_still_be_acked(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    [message] = await subscription.pull()
    await subscription.pause()
    await message.ack()
    await subscription.flush()
    assert await subscription.lag() == 0


# Changing the policy.


async def test_filter_change_neither_drops_nor_doubles_a_message_that_both_filters_match(
    broker: Broker,
) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    both = {"env": "prod", "tier": "gold"}
    for n in range(10):
        await broker.publish("t", b"%d" % n, attributes=both)
        await broker.publish("t", b"other", attributes={"env": "test", "tier": "iron"})
    acked = await subscription.pull(4)
    await subscription.ack(acked, wait=True)
    await subscription.update(filter='attributes.tier = "gold"')
    for n in range(10, 15):
        await broker.publish("t", b"%d" % n, attributes=both)
    rest = await drained(subscription)
    assert [m.data for m in acked] + rest == [b"%d" % n for n in range(15)]


async def test_filter_change_under_way_neither_drops_nor_doubles_what_is_acked_meanwhile(
    broker: Broker,
) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe(
        "s", "t", filter='attributes.env = "prod"', guarantee="exactly_once"
    )
    for _ in range(10):
        await broker.publish("t", b"x", attributes={"env": "prod", "tier": "gold"})
    confirmed: list[int] = []

    async def consume() -> None:
        for message in await subscription.pull(10):
            try:
                await message.ack()
            except errors.StaleAckId:
                continue
            confirmed.append(message.offset)

    await asyncio.gather(consume(), subscription.update(filter='attributes.tier = "gold"'))
    again = [m.offset for m in await subscription.pull(10)]
    assert not set(confirmed) & set(again), "a message came again after its ack was confirmed"
    assert sorted(confirmed + again) == list(range(10))


async def test_consumer_that_waits_through_a_policy_change_is_served_by_the_new_policy(
    broker: Broker,
) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.01)
    await subscription.update(filter='attributes.env = "test"')
    await broker.publish("t", b"old", attributes={"env": "prod"})
    await broker.publish("t", b"new", attributes={"env": "test"})
    assert [m.data for m in await asyncio.wait_for(waiting, 5)] == [b"new"]


async def test_policy_change_ends_leases_and_their_ack_ids_are_stale(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", guarantee="exactly_once")
    await broker.publish("t", b"x")
    [before] = await subscription.pull()
    await subscription.update(ack_deadline_s=60)
    [after] = await subscription.pull()
    with pytest.raises(errors.StaleAckId):
        await before.ack()
    assert subscription.in_flight == 1
    await after.ack()
    assert await subscription.lag() == 0


async def test_policy_change_keeps_attempts(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    [message] = await subscription.pull()
    await subscription.nack([message], wait=True)
    await subscription.update(ack_deadline_s=60)
    [message] = await subscription.pull(timeout_s=5)
    assert message.attempt == 2


async def test_part_of_a_retry_policy_can_be_changed(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", retry={"min_backoff_s": 2, "multiplier": 3})
    await subscription.update(retry={"multiplier": 5})
    assert (subscription.policy.retry.min_backoff_s, subscription.policy.retry.multiplier) == (2, 5)


# Ending.


async def test_unsubscribed_subscription_is_gone_and_its_name_starts_anew(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"old")
    await subscription.unsubscribe()
    with pytest.raises(errors.SubscriptionNotFound):
        await subscription.pull()
    with pytest.raises(errors.SubscriptionNotFound):
        await broker.subscription("s")
    again = await broker.subscribe("s", "t")
    assert await drained(again) == []


async def test_consumer_that_waits_is_told_that_the_subscription_is_gone(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.01)
    await subscription.unsubscribe()
    with pytest.raises(errors.SubscriptionNotFound):
        await asyncio.wait_for(waiting, 5)


async def test_consumer_that_waits_is_told_that_the_broker_closes(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscribe("s", "t")
        waiting = asyncio.create_task(subscription.pull(timeout_s=30))
        await asyncio.sleep(0.01)
    with pytest.raises(errors.BrokerClosed):
        await asyncio.wait_for(waiting, 5)


# Topics in use.


async def test_topic_that_a_subscription_names_is_not_deleted(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", start="earliest")
    await broker.publish("t", b"x")
    with pytest.raises(errors.TopicInUse) as refused:
        await broker.delete_topic("t")
    assert (refused.value.code, refused.value.details["subscriptions"]) == ("TOPIC_IN_USE", ["s"])
    assert await drained(subscription) == [b"x"]


async def test_dead_letter_topic_of_a_subscription_is_not_deleted(broker: Broker) -> None:
    await broker.create_topic("d")
    await broker.subscribe("s", "t", dead_letter_topic="d")
    with pytest.raises(errors.TopicInUse) as refused:
        await broker.delete_topic("d")
    assert refused.value.details["subscriptions"] == ["s"]
    assert (await broker.topic("d")).name == "d"


async def test_topic_that_only_patterns_match_can_be_deleted(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.#")
    await broker.publish("orders.us", b"gone")
    await broker.publish("orders.eu", b"kept")
    await broker.delete_topic("orders.us")
    assert await drained(subscription) == [b"kept"]


async def test_forced_deletion_of_a_topic_in_use_leaves_its_readers_without_it(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    [held] = await subscription.pull()
    await broker.delete_topic("t", force=True)
    assert await subscription.pull() == []
    assert (await subscription.lag(), subscription.in_flight) == (0, 0)
    with pytest.raises(errors.StaleAckId):
        await held.ack()
    await broker.publish("t", b"of the new topic")
    assert await drained(subscription) == [b"of the new topic"]
