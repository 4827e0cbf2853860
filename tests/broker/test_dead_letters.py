"""Dead letters: how messages get there, are looked at, come back and are given up."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.kernel.replay import ReplayStatus
from sparrow.model.settings import MIB, JournalSettings, TopicSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
FAST: dict[str, Any] = {"rate_per_s": 100_000}


class SetClock(Clock):
    """The machine's clock, set ahead by as much as a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_us(self) -> int:
        return super().now_us() + int(self.ahead_s * 1_000_000)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def broker(tmp_path: Path, clock: SetClock) -> AsyncIterator[Broker]:
    settings = sparrow.Settings(data=str(tmp_path / "data"), journal=JournalSettings(file_bytes=MIB))
    async with await Broker.open(settings, clock=clock) as broker:
        await broker.create_topic("t")
        yield broker


async def subscribed(broker: Broker, **options: Any) -> BrokerSubscription:
    return await broker.subscribe("s", "t", **{"dead_letter_topic": "d", **options})


async def reject(subscription: BrokerSubscription, reason: str = "bad") -> list[str]:
    """Everything that is ready is refused for good; the ids."""
    ids = []
    timeout_s = 5.0
    while messages := await subscription.pull(1000, timeout_s):
        ids += [m.id for m in messages]
        await subscription.nack(messages, retry=False, reason=reason)
        timeout_s = 0.0
    await subscription.flush()
    return ids


async def buried(broker: Broker, *data: bytes, **options: Any) -> tuple[BrokerSubscription, list[str]]:
    """A subscription with these messages among its dead letters, and their ids."""
    subscription = await subscribed(broker, **options)
    await broker.publish_batch("t", list(data))
    return subscription, await reject(subscription)


async def listed(subscription: BrokerSubscription, **selection: Any) -> list[bytes | None]:
    return [letter.message.data for letter in await subscription.dead_letters.list(**selection)]


async def replayed(subscription: BrokerSubscription, **selection: Any) -> Any:
    """A replay, seen to its end."""
    job = await subscription.dead_letters.replay(**{**FAST, **selection})
    return await subscription.dead_letters.wait(job.replay_id)


# Getting there.


async def test_message_is_dead_lettered_when_its_attempts_are_used_up(broker: Broker) -> None:
    subscription = await subscribed(broker, retry={"max_attempts": 3, "immediate_retries": 9})
    receipt = await broker.publish("t", b"x", key="k", attributes={"a": "1"})
    for attempt in (1, 2, 3):
        [message] = await subscription.pull(timeout_s=5)
        assert message.attempt == attempt
        await subscription.nack([message], reason=f"failure {attempt}", wait=True)
    await subscription.flush()
    assert await subscription.pull() == []
    assert await subscription.lag() == 0
    [letter] = await subscription.dead_letters.list()
    assert (letter.message_id, letter.topic, letter.attempts) == (receipt.message_id, "t", 3)
    assert (letter.reason, letter.last_error) == ("attempts_exhausted", "failure 3")
    assert (letter.message.data, letter.message.key, letter.message.id) == (b"x", "k", receipt.message_id)


async def test_five_attempts_are_made_by_default(broker: Broker) -> None:
    subscription = await subscribed(broker, retry={"immediate_retries": 9})
    await broker.publish("t", b"x")
    attempts = []
    while messages := await subscription.pull(timeout_s=0.1):
        attempts += [m.attempt for m in messages]
        await subscription.nack(messages, wait=True)
    assert attempts == [1, 2, 3, 4, 5]


async def test_timeouts_use_up_attempts_too(broker: Broker) -> None:
    subscription = await subscribed(
        broker, ack_deadline_s=0.05, retry={"max_attempts": 2, "immediate_retries": 9}
    )
    await broker.publish("t", b"x")
    for _ in range(2):
        assert await subscription.pull(timeout_s=5)
    assert await subscription.pull(timeout_s=0.3) == []
    [letter] = await subscription.dead_letters.list()
    assert (letter.attempts, letter.last_error) == (2, "timed out")


async def test_rejected_message_is_dead_lettered_at_once(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"x")
    [letter] = await subscription.dead_letters.list()
    assert (letter.message_id, letter.reason, letter.attempts) == (ids[0], "rejected", 1)


async def test_dead_letter_topic_is_an_ordinary_topic_with_all_that_is_known_as_attributes(
    broker: Broker,
) -> None:
    subscription = await subscribed(broker)
    receipt = await broker.publish("t", b"x", attributes={"env": "prod"})
    await reject(subscription, reason="no such customer")
    [copy] = await broker.read("d")
    attributes = copy.attributes
    assert attributes["env"] == "prod"
    assert attributes["dlq_message_id"] == receipt.message_id
    assert (attributes["dlq_topic"], attributes["dlq_subscription"]) == ("t", "s")
    assert (attributes["dlq_reason"], attributes["dlq_attempts"]) == ("rejected", "1")
    assert attributes["dlq_last_error"] == "no such customer"
    assert attributes["dlq_publish_time_us"] == str(receipt.publish_time_us)
    assert attributes["dlq_last_consumer"] == subscription.consumer
    assert {"dlq_at_us", "dlq_first_failed_at_us", "dlq_last_failed_at_us", "dlq_history"} <= set(attributes)


async def test_dead_letter_topic_can_be_subscribed_to(broker: Broker) -> None:
    watch = await broker.subscribe("watch", "d")
    await buried(broker, b"x")
    assert [m.data for m in await watch.pull(timeout_s=5)] == [b"x"]


async def test_subscriptions_that_share_a_dead_letter_topic_see_their_own_letters_only(
    broker: Broker,
) -> None:
    one = await broker.subscribe("one", "t", dead_letter_topic="d")
    other = await broker.subscribe("other", "t", dead_letter_topic="d")
    await broker.publish("t", b"x")
    await reject(one)
    assert (len(await listed(one)), len(await listed(other))) == (1, 0)
    await reject(other)
    assert await other.dead_letters.purge() == 1
    assert (len(await listed(one)), len(await listed(other))) == (1, 0)


async def test_many_messages_are_dead_lettered_together(broker: Broker) -> None:
    subscription, ids = await buried(broker, *[b"%d" % n for n in range(250)])
    assert await subscription.lag() == 0
    assert [letter.message_id for letter in await subscription.dead_letters.list(limit=1000)] == ids


async def test_dead_letter_is_there_or_the_message_is_never_neither_after_a_crash(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription, ids = await buried(broker, b"x")
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    async with sparrow.aopen(tmp_path / "crashed", settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        assert [letter.message_id for letter in await subscription.dead_letters.list()] == ids
        assert await subscription.lag() == 0


async def test_verdict_that_a_crash_left_unfinished_is_carried_out_at_the_next_start(tmp_path: Path) -> None:
    no_topics = sparrow.Settings(topics=TopicSettings(auto_create=False))
    async with sparrow.aopen(tmp_path, settings=no_topics) as broker:
        await broker.create_topic("t")
        subscription = await subscribed(broker)
        await broker.publish("t", b"x")
        await reject(subscription)
        assert await listed(subscription) == []
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        await subscription.flush()
        assert await listed(subscription) == [b"x"]


# Nothing is lost.


async def test_missing_dead_letter_topic_loses_nothing(tmp_path: Path, clock: SetClock) -> None:
    settings = sparrow.Settings(
        data=str(tmp_path), journal=JournalSettings(file_bytes=MIB), topics=TopicSettings(auto_create=False)
    )
    async with await Broker.open(settings, clock=clock) as broker:
        await broker.create_topic("t")
        subscription = await subscribed(broker)
        receipt = await broker.publish("t", b"x")
        await reject(subscription)
        assert await subscription.lag() == 1
        [found] = await broker.trace(receipt.message_id)
        assert found.state == "dead_letter_due"
        await broker.create_topic("d")
        clock.ahead_s = 60
        # Whatever happens next in the subscription is the occasion to try again.
        await broker.publish("t", b"next")
        await subscription.ack(await subscription.pull(timeout_s=5), wait=True)
        await subscription.flush()
        assert await listed(subscription) == [b"x"]
        assert await subscription.lag() == 0


async def test_full_broker_that_has_no_room_for_a_dead_letter_topic_loses_nothing(
    tmp_path: Path, clock: SetClock
) -> None:
    settings = sparrow.Settings(data=str(tmp_path), topics=TopicSettings(count_max=2))
    async with await Broker.open(settings, clock=clock) as broker:
        await broker.create_topic("t")
        await broker.create_topic("other")
        subscription = await subscribed(broker)
        await broker.publish("t", b"x")
        await reject(subscription)
        assert (await subscription.lag(), await listed(subscription)) == (1, [])
        await broker.delete_topic("other")
        clock.ahead_s = 60
        await broker.publish("t", b"next")
        await subscription.ack(await subscription.pull(timeout_s=5), wait=True)
        await subscription.flush()
        assert await listed(subscription) == [b"x"]


async def test_message_that_waits_for_its_dead_letter_topic_is_not_delivered_meanwhile(
    tmp_path: Path,
) -> None:
    settings = sparrow.Settings(topics=TopicSettings(auto_create=False))
    async with sparrow.aopen(tmp_path, settings=settings) as broker:
        await broker.create_topic("t")
        subscription = await subscribed(broker)
        await broker.publish("t", b"x")
        await reject(subscription)
        assert await subscription.pull(timeout_s=0.05) == []


async def test_message_with_as_many_attributes_as_allowed_is_still_found_among_the_dead_letters(
    broker: Broker,
) -> None:
    from sparrow.model.limits import ATTRIBUTES_MAX

    subscription = await subscribed(broker)
    await broker.publish("t", b"x", attributes={f"a{n}": "v" for n in range(ATTRIBUTES_MAX)})
    await reject(subscription)
    assert await listed(subscription) == [b"x"]


# Looking.


async def test_dead_letters_are_listed_oldest_first_up_to_the_limit(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"a", b"b", b"c")
    assert await listed(subscription, limit=2) == [b"a", b"b"]


async def test_dead_letters_are_selected_by_id_time_reason_and_filter(
    broker: Broker, clock: SetClock
) -> None:
    subscription = await subscribed(broker, expired="dead_letter")
    first = await broker.publish("t", b"early", attributes={"env": "prod"})
    await reject(subscription)
    clock.ahead_s = 3600
    noon_us = clock.now_us() - 60_000_000
    await broker.publish("t", b"late", attributes={"env": "test"})
    await reject(subscription)
    assert await listed(subscription, ids=[first.message_id]) == [b"early"]
    assert await listed(subscription, start_at_us=noon_us) == [b"late"]
    assert await listed(subscription, end_at_us=noon_us) == [b"early"]
    assert await listed(subscription, reason="rejected") == [b"early", b"late"]
    assert await listed(subscription, reason="expired") == []
    assert await listed(subscription, filter='attributes.env = "prod"') == [b"early"]
    assert await listed(subscription, filter='attributes.env = "prod"', start_at_us=noon_us) == []


async def test_one_dead_letter_is_found_by_the_id_of_its_message(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"a", b"b")
    assert (await subscription.dead_letters.get(ids[1])).message.data == b"b"
    with pytest.raises(errors.MessageNotFound):
        await subscription.dead_letters.get("1-0-99")


async def test_looking_changes_nothing(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"a")
    for _ in range(3):
        assert await listed(subscription) == [b"a"]
        await subscription.dead_letters.get(ids[0])
        await subscription.dead_letters.statistics()


async def test_statistics_count_by_topic_and_reason(broker: Broker, clock: SetClock) -> None:
    subscription = await broker.subscribe("s", "in.#", dead_letter_topic="d")
    started_us = clock.now_us()
    for topic, size in (("in.a", 2), ("in.b", 1)):
        await broker.publish_batch(topic, [b"1234"] * size)
    await reject(subscription)
    found = await subscription.dead_letters.statistics()
    assert (found.messages, found.bytes, found.loops) == (3, 12, 0)
    assert found.by_topic == {"in.a": 2, "in.b": 1}
    assert found.by_reason == {"rejected": 3}
    assert found.by_subscription == {"s": 3}
    assert started_us <= found.oldest_at_us <= found.newest_at_us <= clock.now_us()


async def test_broker_gives_the_dead_letters_of_a_subscription_by_its_name(broker: Broker) -> None:
    await buried(broker, b"a")
    letters = await (await broker.dead_letters("s")).list()
    assert [letter.message.data for letter in letters] == [b"a"]


# Replaying.


async def test_replayed_message_comes_again_under_its_id_from_attempt_one(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"x")
    job = await replayed(subscription)
    assert (job.status, job.total, job.replayed, job.progress()) == (ReplayStatus.COMPLETED, 1, 1, 1.0)
    [message] = await subscription.pull(timeout_s=5)
    assert (message.id, message.data, message.attempt) == (ids[0], b"x", 1)
    await subscription.ack([message], wait=True)
    assert await subscription.lag() == 0
    assert await listed(subscription) == []


async def test_replay_concerns_its_own_subscription_only(broker: Broker) -> None:
    other = await broker.subscribe("other", "t")
    subscription, _ = await buried(broker, b"x")
    await other.ack(await other.pull(), wait=True)
    await replayed(subscription)
    assert await other.pull() == []
    assert len(await subscription.pull()) == 1


async def test_replay_takes_what_is_selected_and_leaves_the_rest(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"a", b"b", b"c")
    await replayed(subscription, ids=[ids[0], ids[2]])
    assert await reject(subscription) == [ids[0], ids[2]]
    await subscription.dead_letters.purge(ids=[ids[0], ids[2]])
    assert await listed(subscription) == [b"b"]


async def test_replay_by_time_range(broker: Broker, clock: SetClock) -> None:
    subscription, _ = await buried(broker, b"yesterday")
    clock.ahead_s = 86_400
    today_us = clock.now_us() - 3_600_000_000
    await broker.publish("t", b"today")
    await reject(subscription)
    await replayed(subscription, start_at_us=today_us)
    assert [m.data for m in await subscription.pull()] == [b"today"]


async def test_replay_by_filter(broker: Broker) -> None:
    subscription = await subscribed(broker)
    await broker.publish("t", b"a", attributes={"env": "prod"})
    await broker.publish("t", b"b", attributes={"env": "test"})
    await reject(subscription)
    await replayed(subscription, filter='attributes.env = "prod"')
    assert [m.data for m in await subscription.pull()] == [b"a"]


async def test_dry_run_counts_and_changes_nothing(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"a", b"b")
    plan = await subscription.dead_letters.replay(dry_run=True, ids=ids[:1], rate_per_s=10)
    assert (plan.total, sum(plan.by_reason.values()), plan.estimated_s) == (1, 1, 0.1)
    assert await subscription.pull() == []
    assert await subscription.dead_letters.replays() == []
    assert await listed(subscription) == [b"a", b"b"]


async def test_replay_in_the_order_of_the_log_under_an_order_per_key(broker: Broker) -> None:
    subscription = await subscribed(broker, ordering="key")
    await broker.publish_batch("t", [b"1", b"2", b"3"], keys=["k"] * 3)
    for _ in range(3):
        await reject(subscription)
    await replayed(subscription)
    got = []
    while messages := await subscription.pull(timeout_s=0.05):
        got += [m.data for m in messages]
        await subscription.ack(messages, wait=True)
    assert got == [b"1", b"2", b"3"]


async def test_replay_wakes_consumers_that_wait(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"x")
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.01)
    await subscription.dead_letters.replay(**FAST)
    assert [m.id for m in await asyncio.wait_for(waiting, 5)] == ids


async def test_replay_keeps_to_its_rate(broker: Broker) -> None:
    subscription, _ = await buried(broker, *[b"x"] * 6)
    started = time.monotonic()
    job = await subscription.dead_letters.replay(rate_per_s=20)
    first = await subscription.pull(100, timeout_s=5)
    assert len(first) <= 2, "all at once is no rate"
    await subscription.dead_letters.wait(job.replay_id)
    assert 0.2 <= time.monotonic() - started < 2


async def test_aborted_replay_stops_at_once_and_what_is_left_stays_dead(broker: Broker) -> None:
    subscription, _ = await buried(broker, *[b"x"] * 10)
    job = await subscription.dead_letters.replay(rate_per_s=0.5)
    assert len(await subscription.pull(100, timeout_s=5)) == 1
    started = time.monotonic()
    job = await subscription.dead_letters.abort(job.replay_id)
    assert time.monotonic() - started < 1
    assert (job.status, job.replayed) == (ReplayStatus.ABORTED, 1)
    assert len(await listed(subscription)) == 9
    assert await subscription.pull() == []


async def test_replay_that_a_crash_interrupted_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription, ids = await buried(broker, *[b"%d" % n for n in range(8)])
        job = await subscription.dead_letters.replay(rate_per_s=10)
        before = await subscription.pull(100, timeout_s=5)
        await subscription.ack(before, wait=True)
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")
        await subscription.dead_letters.abort(job.replay_id)
    async with sparrow.aopen(tmp_path / "crashed", settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        [found] = await subscription.dead_letters.replays()
        assert (found.replay_id, found.status) == (job.replay_id, ReplayStatus.RUNNING)
        found = await subscription.dead_letters.wait(job.replay_id)
        assert (found.status, found.replayed) == (ReplayStatus.COMPLETED, 8)
        after = await subscription.pull(100, timeout_s=5)
        assert [m.id for m in before] + [m.id for m in after] == ids
        assert await listed(subscription) == []


async def test_what_dies_after_a_replay_began_is_not_part_of_it(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"a", b"b")
    job = await subscription.dead_letters.replay(rate_per_s=4)
    await broker.publish("t", b"later")
    await reject(subscription)
    job = await subscription.dead_letters.wait(job.replay_id)
    assert job.total == 2
    assert b"later" in await listed(subscription)


async def test_original_gone_by_retention_is_stored_again_under_its_id_for_that_subscription_only(
    broker: Broker,
) -> None:
    await broker.create_topic("short", retention_messages=2)
    other = await broker.subscribe("other", "short")
    subscription = await broker.subscribe("s", "short", dead_letter_topic="d")
    receipt = await broker.publish("short", b"precious", key="k", attributes={"a": "1"})
    await reject(subscription)
    await other.ack(await other.pull(), wait=True)
    await broker.seal()
    await broker.publish_batch("short", [b"newer"] * 2)
    await broker.seal()
    assert await broker.apply_retention() == 1
    for reader in (subscription, other):
        await reader.ack(await reader.pull(), wait=True)
    job = await replayed(subscription)
    assert (job.replayed, job.failed) == (1, 0)
    [message] = await subscription.pull(timeout_s=5)
    assert (message.id, message.data, message.key) == (receipt.message_id, b"precious", "k")
    assert message.attributes["a"] == "1"
    assert not [name for name in message.attributes if name.startswith("dlq_")]
    assert await other.pull() == []
    assert await other.lag() == 0
    await subscription.ack([message], wait=True)
    assert await subscription.lag() == 0


async def test_message_stored_again_that_dies_again_keeps_its_first_id_and_counts_its_rounds(
    broker: Broker,
) -> None:
    await broker.create_topic("short", retention_messages=2)
    subscription = await broker.subscribe("s", "short", dead_letter_topic="d")
    receipt = await broker.publish("short", b"precious")
    await reject(subscription)
    await broker.seal()
    await broker.publish_batch("short", [b"newer"] * 2)
    await broker.seal()
    assert await broker.apply_retention() == 1
    await subscription.ack(await subscription.pull(), wait=True)
    await replayed(subscription)
    assert await reject(subscription) == [receipt.message_id]
    [letter] = await subscription.dead_letters.list()
    assert letter.message_id == receipt.message_id
    assert letter.message.attributes.get("dlq_round", "0") == "1"


# The loop guard.


async def circled(broker: Broker, times: int) -> tuple[BrokerSubscription, str]:
    """A message that has died, been replayed and died again so many times."""
    subscription, [message_id] = await buried(broker, b"x")
    for _ in range(times):
        await replayed(subscription, ids=[message_id])
        assert await reject(subscription) == [message_id]
    return subscription, message_id


async def test_message_that_dies_after_every_replay_is_marked_and_passed_over(broker: Broker) -> None:
    subscription, message_id = await circled(broker, 3)
    letter = await subscription.dead_letters.get(message_id)
    assert letter.is_loop
    job = await replayed(subscription)
    assert (job.total, job.replayed) == (0, 0)
    assert await subscription.pull() == []
    assert (await subscription.dead_letters.statistics()).loops == 1


async def test_message_that_loops_is_listed_and_can_be_replayed_by_name(broker: Broker) -> None:
    subscription, message_id = await circled(broker, 3)
    [letter] = await subscription.dead_letters.list()
    assert (letter.message_id, letter.is_loop) == (message_id, True)
    await replayed(subscription, ids=[message_id])
    assert [m.id for m in await subscription.pull()] == [message_id]


async def test_message_that_dies_twice_is_not_yet_a_loop(broker: Broker) -> None:
    subscription, message_id = await circled(broker, 1)
    assert not (await subscription.dead_letters.get(message_id)).is_loop
    assert (await replayed(subscription)).replayed == 1


async def test_dead_letter_topic_that_the_subscription_reads_is_refused(broker: Broker) -> None:
    for pattern, wanted in (("t", "t"), ("orders.#", "orders.dead"), ("#", "d")):
        with pytest.raises(errors.InvalidArgument):
            await broker.subscribe("s", pattern, dead_letter_topic=wanted)
    assert await broker.subscriptions() == []


# Giving up.


async def test_purged_letters_are_gone_for_good(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"a", b"b", b"c")
    assert await subscription.dead_letters.purge(ids=ids[:1]) == 1
    assert await listed(subscription) == [b"b", b"c"]
    assert await subscription.dead_letters.purge() == 2
    assert await listed(subscription) == []
    assert (await replayed(subscription)).total == 0
    assert await subscription.lag() == 0


async def test_letters_that_a_replay_still_has_to_come_to_are_not_purged(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"a", b"b", b"c")
    job = await subscription.dead_letters.replay(ids=ids[1:], rate_per_s=0.01)
    with pytest.raises(errors.PreconditionFailed, match="under way"):
        await subscription.dead_letters.purge()
    assert await subscription.dead_letters.purge(ids=ids[:1]) == 1
    await subscription.dead_letters.abort(job.replay_id)
    assert await subscription.dead_letters.purge() >= 1
    assert await listed(subscription) == []


async def test_dry_run_of_a_purge_only_counts(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"a", b"b")
    assert await subscription.dead_letters.purge(dry_run=True) == 2
    assert await listed(subscription) == [b"a", b"b"]


async def test_purge_is_durable_when_it_returns(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription, _ = await buried(broker, b"a")
        await subscription.dead_letters.purge()
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    async with sparrow.aopen(tmp_path / "crashed", settings=SMALL) as broker:
        assert await listed(await broker.subscription("s")) == []


async def test_purge_by_reason_spares_letters_that_loop_for_another_reason(broker: Broker) -> None:
    subscription, _ = await circled(broker, 3)
    assert await subscription.dead_letters.purge(reason="expired") == 0
    assert await subscription.dead_letters.purge(reason="rejected") == 1


# Changing and ending.


async def test_dead_letter_topic_is_not_changed_while_letters_lie_in_the_old_one(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"x")
    with pytest.raises(errors.PreconditionFailed):
        await subscription.update(dead_letter_topic="elsewhere")
    assert subscription.policy.dead_letter_topic == "d"
    await subscription.dead_letters.purge()
    await subscription.update(dead_letter_topic="elsewhere")
    await broker.publish("t", b"y")
    await reject(subscription)
    assert await listed(subscription) == [b"y"]


async def test_letters_stay_at_hand_when_the_dead_letter_topic_is_taken_away(broker: Broker) -> None:
    subscription, ids = await buried(broker, b"x")
    await subscription.update(dead_letter_topic=None, retry={"max_attempts": None})
    assert await listed(subscription) == [b"x"]
    with pytest.raises(errors.PreconditionFailed):
        await subscription.update(dead_letter_topic="elsewhere")
    await replayed(subscription)
    assert [m.id for m in await subscription.pull()] == ids
    await subscription.update(dead_letter_topic="elsewhere")


async def test_dead_letter_topic_given_later_serves_from_then_on(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    with pytest.raises(errors.PreconditionFailed):
        await subscription.dead_letters.list()
    await subscription.update(dead_letter_topic="d")
    await broker.publish("t", b"x")
    await reject(subscription)
    assert await listed(subscription) == [b"x"]


async def test_policy_change_while_letters_are_moved_makes_one_copy_of_each(broker: Broker) -> None:
    subscription = await subscribed(broker)
    await broker.publish_batch("t", [b"%d" % n for n in range(150)])
    messages = await subscription.pull(1000)
    await subscription.nack(messages, retry=False)
    await asyncio.gather(*(subscription.update(ack_deadline_s=20 + n) for n in range(3)))
    await subscription.flush()
    assert await subscription.lag() == 0
    assert sorted(await listed(subscription, limit=1000)) == sorted(b"%d" % n for n in range(150))


async def test_unsubscribing_leaves_the_copies_in_the_dead_letter_topic(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"x")
    await subscription.unsubscribe()
    assert [m.data for m in await broker.read("d")] == [b"x"]
    again = await subscribed(broker)
    assert await listed(again) == []


# Poison.


async def test_message_that_fails_three_times_in_a_moment_is_poison(broker: Broker) -> None:
    subscription = await subscribed(broker, poison_rules=True, retry={"immediate_retries": 9})
    await broker.publish("t", b"x")
    for _ in range(3):
        await subscription.nack(await subscription.pull(timeout_s=5), wait=True)
    await subscription.flush()
    [letter] = await subscription.dead_letters.list()
    assert (letter.reason, letter.attempts) == ("poison:rapid_cycling", 3)


async def test_same_error_from_two_consumers_is_poison(broker: Broker) -> None:
    members = [await subscribed(broker, poison_rules=True, retry={"immediate_retries": 9}) for _ in range(2)]
    await broker.publish("t", b"x")
    for member in members:
        await member.nack(await member.pull(timeout_s=5), reason="cannot parse", wait=True)
    await members[0].flush()
    [letter] = await members[0].dead_letters.list()
    assert letter.reason == "poison:same_reason"


# Refused.


async def test_bad_selection_is_refused_and_nothing_happens(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"x")
    bad: list[dict[str, Any]] = [
        {"ids": ["x"]},
        {"ids": "1-0-0"},
        {"filter": "attributes.env ="},
        {"start_at_us": 2, "end_at_us": 1},
        {"start_at_us": "now"},
        {"nonsense": 1},
    ]
    box = subscription.dead_letters
    for selection in bad:
        for verb in (box.list, box.replay, box.purge):
            with pytest.raises(errors.SparrowError) as refused:
                await verb(**selection)
            assert refused.value.code in errors.registry()
            assert refused.value.hint
    assert await listed(subscription) == [b"x"]
    assert await box.replays() == []


async def test_bad_rate_and_limit_are_refused(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"x")
    rate: Any
    for rate in (0, -1, float("nan"), "fast", None, 10**9):
        with pytest.raises(errors.InvalidArgument):
            await subscription.dead_letters.replay(rate_per_s=rate)
    limit: Any
    for limit in (0, -1, "x", None):
        with pytest.raises(errors.InvalidArgument):
            await subscription.dead_letters.list(limit=limit)
    assert await subscription.dead_letters.replays() == []


async def test_unknown_replay_is_refused(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"x")
    for verb in (subscription.dead_letters.wait, subscription.dead_letters.abort):
        with pytest.raises(errors.ReplayNotFound):
            await verb("nonsense")


async def test_replay_that_has_ended_cannot_be_aborted(broker: Broker) -> None:
    subscription, _ = await buried(broker, b"x")
    job = await replayed(subscription)
    with pytest.raises(errors.PreconditionFailed):
        await subscription.dead_letters.abort(job.replay_id)
