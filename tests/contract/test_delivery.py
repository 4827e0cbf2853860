"""Subscriptions, settling and dead letters, on every surface."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparrow import Delivered, errors

from .conftest import told

QUICK = {"min_backoff_s": 0.0, "max_backoff_s": 0.0, "jitter": 0.0}


def datas(messages: list[Delivered]) -> list[bytes | None]:
    return [message.data for message in messages]


async def test_acked_message_is_done(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b", b"c"])
    messages = await subscription.pull(timeout_s=5)
    assert datas(messages) == [b"a", b"b", b"c"]
    assert await told(subscription.in_flight) == 3
    await messages[0].ack()
    await subscription.ack(messages[1:], wait=True)
    await subscription.flush()
    assert await subscription.lag() == 0
    assert await subscription.pull() == []


async def test_pull_takes_what_is_ready_at_once_and_not_more_than_asked(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    assert await subscription.pull() == []
    await broker.publish_batch("t", [b"%d" % n for n in range(10)])
    assert datas(await subscription.pull(3)) == [b"0", b"1", b"2"]
    assert datas(await subscription.pull(4)) == [b"3", b"4", b"5", b"6"]
    assert len(await subscription.pull(100)) == 3
    assert await subscription.pull(100) == []


async def test_pull_is_bounded_in_bytes(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [bytes(600), bytes(600), bytes(600)])
    assert len(await subscription.pull(10, 5, max_bytes=1300)) == 2
    assert len(await subscription.pull(10, 5, max_bytes=1)) == 1


async def test_waiting_pull_is_woken_by_a_publish(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.02)
    await broker.publish("t", b"x")
    assert datas(await asyncio.wait_for(waiting, 5)) == [b"x"]


async def test_nacked_message_comes_again_with_the_next_attempt(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", retry=QUICK)
    await broker.publish("t", b"x")
    [message] = await subscription.pull(timeout_s=5)
    await message.nack(reason="not yet")
    [again] = await subscription.pull(timeout_s=5)
    assert (again.id, again.attempt) == (message.id, 2)
    await again.nack(delay_s=60)
    await subscription.flush()
    assert await subscription.pull(timeout_s=0.1) == []
    [trace] = await broker.trace(message.id)
    assert (trace.state, trace.attempts, trace.subscription) == ("scheduled", 2, "s")
    assert [attempt.reason for attempt in trace.history][:1] == ["not yet"]


async def test_expired_lease_is_redelivered_and_an_extended_one_is_not(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.4, retry=QUICK)
    await broker.publish_batch("t", [b"a", b"b"])
    a, b = await subscription.pull(timeout_s=5)
    await b.extend(60)
    [again] = await subscription.pull(timeout_s=10)
    assert (again.data, again.attempt) == (b"a", 2)
    await subscription.ack([again, b], wait=True)
    assert await subscription.lag() == 0
    assert a.ack_id != again.ack_id


async def test_ack_ids_settle_from_elsewhere(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b"])
    ids = [message.ack_id for message in await subscription.pull(timeout_s=5)]
    other = await broker.subscription("s")
    await other.ack(ids, wait=True)
    assert await subscription.lag() == 0


async def test_stale_and_invalid_ack_ids_are_told_apart(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", guarantee="exactly_once")
    await broker.publish_batch("t", [b"a", b"b"])
    a, b = await subscription.pull(timeout_s=5)
    await subscription.ack([a])
    with pytest.raises(errors.StaleAckId) as stale:
        await subscription.ack([a, b])
    assert stale.value.details["refused"] == [a.ack_id]
    with pytest.raises(errors.InvalidAckId) as invalid:
        await subscription.ack(["rubbish"])
    assert invalid.value.details["refused"] == ["rubbish"]
    assert await subscription.lag() == 0, "what could be settled was"


async def test_refusal_that_nobody_waited_for_is_told_at_the_latest_by_flush(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.1, retry=QUICK)
    other = await broker.subscription("s")
    await broker.publish("t", b"a")
    [late] = await subscription.pull(timeout_s=5)
    [taken] = await other.pull(timeout_s=5)
    assert taken.id == late.id

    async def ack_late() -> None:
        await late.ack()
        await subscription.flush()

    with pytest.raises(errors.StaleAckId):
        await ack_late()


async def test_close_gives_back_what_is_held_without_a_counted_attempt(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b"])
    assert len(await subscription.pull(1, timeout_s=5)) == 1
    await subscription.close()
    other = await broker.subscription("s")
    found: list[Delivered] = []
    while len(found) < 2:
        found += await other.pull(10, timeout_s=5)
    assert [(m.data, m.attempt) for m in found] == [(b"a", 1), (b"b", 1)]


async def test_two_holds_share_a_subscription(broker: Any) -> None:
    await broker.create_topic("t")
    one = await broker.subscribe("s", "t")
    two = await broker.subscription("s")
    await broker.publish_batch("t", [b"%d" % n for n in range(10)])
    first = await one.pull(5, timeout_s=5)
    second = await two.pull(100, timeout_s=5)
    assert sorted(datas(first + second)) == [b"%d" % n for n in range(10)]
    assert len(second) == 5


async def test_messages_that_nobody_pulls_are_not_hoarded(broker: Any) -> None:
    """A program that pulled in a hurry and stopped must not keep messages from the others."""
    await broker.create_topic("t")
    hasty = await broker.subscribe("s", "t", ack_deadline_s=600)
    await broker.publish_batch("t", [b"%d" % n for n in range(1000)])
    for _ in range(10):
        await hasty.ack(await hasty.pull(20, timeout_s=5))
    other = await broker.subscription("s")
    found: list[Delivered] = []
    while len(found) < 800:
        some = await other.pull(1000, timeout_s=5)
        assert some
        found += some
    assert {message.attempt for message in found} == {1}


async def test_filter_lets_through_what_it_says(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    await broker.publish_batch(
        "t", [b"a", b"b", b"c"], attributes=[{"env": "prod"}, {"env": "test"}, {"env": "prod"}]
    )
    assert datas(await subscription.pull(timeout_s=5)) == [b"a", b"c"]
    with pytest.raises(errors.InvalidFilter):
        await broker.subscribe("bad", "t", filter="(")


async def test_pattern_reads_topics_that_come_later(broker: Any) -> None:
    subscription = await broker.subscribe("s", "orders.#")
    await broker.create_topic("orders.us")
    await broker.create_topic("bills.us")
    await broker.publish("bills.us", b"no")
    await broker.publish("orders.us", b"yes")
    assert [(m.topic, m.data) for m in await subscription.pull(timeout_s=5)] == [("orders.us", b"yes")]


async def test_ordering_by_key_waits_for_the_ack(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", ordering="key")
    await broker.publish_batch("t", [b"a1", b"b1", b"a2", b"b2"], keys=["a", "b", "a", "b"])
    first = await subscription.pull(timeout_s=5)
    assert datas(first) == [b"a1", b"b1"]
    assert await subscription.pull() == []
    await subscription.ack(first[:1], wait=True)
    assert datas(await subscription.pull(timeout_s=5)) == [b"a2"]


async def test_at_most_once_is_done_when_handed_over(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", guarantee="at_most_once")
    await broker.publish_batch("t", [b"a", b"b"])
    assert datas(await subscription.pull(timeout_s=5)) == [b"a", b"b"]
    assert await subscription.lag() == 0


async def test_failed_message_becomes_a_dead_letter_and_is_replayed(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe(
        "s", "t", dead_letter_topic="dead", retry={**QUICK, "max_attempts": 2}
    )
    await broker.publish("t", b"x", key="k", attributes={"a": "1"})
    for _ in range(2):
        [message] = await subscription.pull(timeout_s=5)
        await message.nack(reason="broken")
    await subscription.flush()
    letters = await broker.dead_letters("s")
    [letter] = await letters.list()
    assert (letter.message_id, letter.topic, letter.attempts) == (message.id, "t", 2)
    assert (letter.last_error, letter.is_loop) == ("broken", False)
    assert (letter.message.data, letter.message.key, letter.message.attributes["a"]) == (b"x", "k", "1")
    assert (await letters.get(message.id)).dead_at_us == letter.dead_at_us
    statistics = await letters.statistics()
    assert (statistics.messages, statistics.by_topic) == (1, {"t": 1})
    assert (await letters.replay(dry_run=True)).total == 1
    job = await letters.replay(rate_per_s=1000)
    assert (await letters.wait(job.replay_id)).status == "completed"
    assert [one.replay_id for one in await letters.replays()] == [job.replay_id]
    [again] = await subscription.pull(timeout_s=5)
    assert (again.id, again.attempt) == (message.id, 1)
    await again.nack(retry=False)
    await subscription.flush()
    assert await letters.purge(dry_run=True) == 1
    assert await letters.purge() == 1
    assert await letters.list() == []
    with pytest.raises(errors.MessageNotFound):
        await letters.get(message.id)


async def test_seek_and_snapshot_move_the_cursor(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b", b"c", b"d"])
    await subscription.ack(await subscription.pull(2, timeout_s=5))
    await subscription.snapshot("half")
    assert [snapshot.name for snapshot in await broker.snapshots()] == ["half"]
    await subscription.seek("latest")
    assert await subscription.lag() == 0
    await subscription.seek("half")
    assert datas(await subscription.pull(timeout_s=5)) == [b"c", b"d"]
    await subscription.seek("earliest")
    assert await subscription.lag() == 4
    await subscription.seek({("t", 0): 3})
    assert datas(await subscription.pull(timeout_s=5)) == [b"d"]
    await subscription.seek(0.0)
    assert await subscription.lag() == 4
    await broker.delete_snapshot("half")
    with pytest.raises(errors.SnapshotNotFound):
        await subscription.seek("half")


async def test_commit_is_a_cumulative_ack(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b", b"c"])
    await subscription.commit("t", 0, 2)
    assert await subscription.lag() == 1
    assert datas(await subscription.pull(timeout_s=5)) == [b"c"]


async def test_pause_update_and_unsubscribe(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await subscription.pause()
    await broker.publish("t", b"x", attributes={"env": "test"})
    assert await subscription.pull(timeout_s=0.05) == []
    assert [one.is_paused for one in await broker.subscriptions()] == [True]
    await subscription.resume()
    assert len(await subscription.pull(timeout_s=5)) == 1
    await subscription.update(filter='attributes.env = "prod"')
    assert (subscription.policy.filter, subscription.pattern) == ('attributes.env = "prod"', "t")
    assert await subscription.pull(timeout_s=0.05) == []
    with pytest.raises(errors.SubscriptionExists):
        await broker.subscribe("s", "other")
    await subscription.unsubscribe()
    assert await broker.subscriptions() == []
    with pytest.raises(errors.SubscriptionNotFound):
        await broker.subscription("s")


async def test_subscription_that_goes_away_ends_a_waiting_pull(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.05)
    await (await broker.subscription("s")).unsubscribe()
    with pytest.raises(errors.SubscriptionNotFound):
        await asyncio.wait_for(waiting, 10)


async def test_run_acks_what_returns_and_nacks_what_raises(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", retry=QUICK)
    await broker.publish_batch("t", [b"a", b"b", b"c"])
    seen: list[tuple[bytes | None, int]] = []
    done = asyncio.Event()

    async def handle(message: Delivered) -> None:
        seen.append((message.data, message.attempt))
        if len(seen) == 4:
            done.set()
        if message.data == b"b" and message.attempt == 1:
            raise ValueError("once")

    running = asyncio.create_task(subscription.run(handle))
    await asyncio.wait_for(done.wait(), 10)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(seen) == [(b"a", 1), (b"b", 1), (b"b", 2), (b"c", 1)]
    assert await subscription.lag() == 0


async def test_iteration_gives_every_message(broker: Any) -> None:
    await broker.create_topic("t", partitions=2)
    subscription = await broker.subscribe("s", "t")
    for n in range(5):
        await broker.publish_batch("t", [b"%d" % (100 * n + k) for k in range(100)])
    found: list[bytes | None] = []
    async for message in subscription:
        found.append(message.data)
        await message.ack()
        if len(found) == 500:
            break
    await subscription.flush()
    assert sorted(map(int, found)) == list(range(500))  # type: ignore[arg-type]
    assert await subscription.lag() == 0


async def test_deliver_at_delays(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    receipt = await broker.publish("t", b"first")
    await broker.publish("t", b"later", deliver_at=receipt.publish_time_us / 1e6 + 0.6)
    assert datas(await subscription.pull(timeout_s=5)) == [b"first"]
    assert await subscription.pull(timeout_s=0.05) == []
    assert datas(await subscription.pull(timeout_s=5)) == [b"later"]


async def test_figures_can_be_asked_for(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"a", b"b"])
    assert (await subscription.lag_report()).depth == 2
    assert set(await broker.lag()) == {"s"}
    assert (await broker.topic_lag("t")).slowest == "s"
    assert (await broker.flow("t")).mode == "normal"
    assert (await broker.set_publisher_limits("me", messages_per_s=5)).messages_per_s == 5
    assert await told(subscription.sample_share) == 1.0
    assert (await told(broker.health())).is_ready
    assert (await told(broker.state())).is_writable
    assert (await told(broker.recovery)).messages == 0
    assert await broker.seal() >= 2
    assert await broker.apply_retention() == 0
    assert isinstance(await subscription.consumer_lag(), dict)
