"""Groups through the public surface: members share, come, go, stall and return; nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.member import BrokerMember
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.message import Delivered
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
QUICK: dict[str, Any] = {
    "heartbeat_s": 0.1,
    "session_timeout_s": 0.3,
    "stabilisation_s": 0.02,
    "backoff_min_s": 0.01,
    "backoff_max_s": 0.02,
    "drain_timeout_s": 0.3,
    "rebalance_timeout_s": 0.3,
}
PARTITIONED = {**QUICK, "mode": "partitioned"}


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with await open_broker(tmp_path) as broker:
        yield broker


async def open_broker(path: Path) -> Broker:
    import msgspec

    return await Broker.open(msgspec.structs.replace(SMALL, data=str(path / "data")))


async def stable(subscription: BrokerSubscription, within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    while True:
        group = await subscription.group()
        if group.state in ("stable", "empty") and not group.unassigned:
            return
        assert time.monotonic() < until, group
        await asyncio.sleep(0.005)


async def partitioned(
    broker: Broker, partitions: int, members: int, **options: Any
) -> tuple[BrokerSubscription, list[BrokerMember]]:
    await broker.create_topic("t", partitions=partitions)
    subscription = await broker.subscribe("g", "t", group={**PARTITIONED, **options})
    joined = [await subscription.join(f"m{number}") for number in range(members)]
    await stable(subscription)
    return subscription, joined


def places(member: BrokerMember) -> set[int]:
    return {each.partition for each in member.assignment}


def data(messages: list[Delivered]) -> list[bytes | None]:
    return [message.data for message in messages]


async def publish(broker: Broker, count: int, topic: str = "t") -> None:
    await broker.publish_batch(topic, [b"%d" % n for n in range(count)], keys=[f"k{n}" for n in range(count)])


# Shared.


@pytest.mark.parametrize("strategy", ["round_robin", "least_loaded"])
async def test_nine_messages_among_three_members_are_three_each(broker: Broker, strategy: str) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", group={"strategy": strategy})
    members = [await subscription.join(name) for name in ("a", "b", "c")]
    await publish(broker, 9)
    found = [await member.pull(100) for member in members]
    assert [len(messages) for messages in found] == [3, 3, 3]
    assert sorted(d for messages in found for d in data(messages) if d) == [b"%d" % n for n in range(9)]


async def test_members_that_wait_share_what_arrives(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    members = [await subscription.join(name) for name in ("a", "b", "c")]
    pulls = [asyncio.create_task(member.pull(100, timeout_s=5)) for member in members]
    await asyncio.sleep(0.05)
    await publish(broker, 9)
    assert [len(await pull) for pull in pulls] == [3, 3, 3]


async def test_a_full_member_holds_up_nobody(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    small = await subscription.join("small", max_in_flight=1)
    large = await subscription.join("large")
    await publish(broker, 10)
    assert len(await small.pull(100)) == 1
    assert len(await large.pull(100)) == 9
    assert await small.pull(100) == []


async def test_a_member_that_does_not_pull_starves_nobody(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    await subscription.join("idle")
    busy = await subscription.join("busy")
    await publish(broker, 10)
    found: list[Delivered] = []
    began = time.monotonic()
    while len(found) < 10:
        found += await busy.pull(100, timeout_s=5)
    assert time.monotonic() - began < 3


async def test_a_key_sticks_to_one_member_while_it_has_messages_outstanding(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", ordering="key", key_window=5)
    a, b = await subscription.join("a"), await subscription.join("b")
    for number in range(4):
        await broker.publish("t", b"%d" % number, key="k")
    first = await a.pull(1)
    assert data(first) == [b"0"]
    assert await b.pull(10) == []
    assert data(await a.pull(10)) == [b"1", b"2", b"3"]


async def test_what_a_member_left_behind_goes_to_the_others_without_a_counted_attempt(
    broker: Broker,
) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    leaver, stayer = await subscription.join("leaver"), await subscription.join("stayer")
    await publish(broker, 4)
    held = await leaver.pull(100)
    assert held
    await leaver.leave()
    found = await stayer.pull(100, timeout_s=1)
    assert len(found) == 4
    assert {message.attempt for message in found} == {1}


async def test_bytes_are_a_limit_of_a_pull_too(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    await broker.publish_batch("t", [b"x" * 100] * 10)
    assert len(await subscription.pull(100, max_bytes=350)) == 3
    assert len(await subscription.pull(100, max_bytes=1)) == 1
    rest = await subscription.pull(100)
    assert len(rest) == 6
    assert {message.attempt for message in rest} == {1}


# Partitioned.


@pytest.mark.parametrize("strategy", ["sticky", "range", "round_robin"])
@pytest.mark.parametrize("rebalance", ["cooperative", "eager"])
async def test_every_partition_has_one_member(broker: Broker, strategy: str, rebalance: str) -> None:
    subscription, members = await partitioned(broker, 9, 3, strategy=strategy, rebalance=rebalance)
    assert sorted(len(places(member)) for member in members) == [3, 3, 3]
    assert set().union(*map(places, members)) == set(range(9))
    await publish(broker, 300)
    for member in members:
        messages = await member.pull(1000, timeout_s=1)
        assert {message.partition for message in messages} <= places(member)
        await member.ack(messages, wait=True)
    assert await subscription.lag() == 0


async def test_a_partitioned_group_is_for_members_only(broker: Broker) -> None:
    subscription, _ = await partitioned(broker, 2, 1)
    with pytest.raises(errors.PreconditionFailed, match="members"):
        await subscription.pull()


async def test_one_of_ten_leaves_and_its_partitions_move_alone(broker: Broker) -> None:
    subscription, members = await partitioned(broker, 20, 10)
    before = {member.consumer: places(member) for member in members}
    began = time.monotonic()
    await members[3].leave()
    await stable(subscription)
    assert time.monotonic() - began < 5
    after = {m.consumer: places(m) for m in members if m is not members[3]}
    assert set().union(*after.values()) == set(range(20))
    assert all(before[name] <= after[name] for name in after)


async def test_a_moved_partition_waits_until_its_old_owner_has_settled(broker: Broker) -> None:
    subscription, (first,) = await partitioned(broker, 2, 1, drain_timeout_s=30)
    for partition in range(2):
        await publish_to(broker, partition)
    held = await first.pull(100, timeout_s=1)
    assert {message.partition for message in held} == {0, 1}
    second = await subscription.join("second")
    await asyncio.sleep(0.2)
    (moved,) = places(second)
    assert await second.pull(100) == []
    assert [each.partition for each in (await subscription.group()).draining] == [moved]
    await first.ack(held, wait=True)
    await stable(subscription)
    await publish_to(broker, moved)
    assert {message.partition for message in await second.pull(100, timeout_s=1)} == {moved}


async def test_an_owner_that_does_not_let_go_loses_its_leases_in_time(broker: Broker) -> None:
    subscription, (first,) = await partitioned(broker, 2, 1)
    for partition in range(2):
        await publish_to(broker, partition)
    held = await first.pull(100, timeout_s=1)
    second = await subscription.join("second")
    await stable(subscription)
    (moved,) = places(second)
    again = await second.pull(100, timeout_s=1)
    assert {message.partition for message in again} == {moved}
    assert {message.attempt for message in again} == {1}
    with pytest.raises(errors.StaleGeneration):
        await first.ack([message for message in held if message.partition == moved])
    await first.ack([message for message in held if message.partition != moved], wait=True)
    await second.ack(again, wait=True)
    assert await subscription.lag() == 0


async def publish_to(broker: Broker, partition: int, topic: str = "t") -> None:
    """A message with a key that belongs to the partition."""
    from sparrow.kernel.partition import partitions_of

    count = (await broker.topic(topic)).partitions
    key = next(f"k{n}" for n in range(1000) if list(partitions_of([f"k{n}"], count, 0)) == [partition])
    await broker.publish(topic, b"x", key=key)


async def test_a_topic_that_grows_is_shared_anew(broker: Broker) -> None:
    subscription, members = await partitioned(broker, 2, 2)
    await broker.update_topic("t", partitions=6)
    await stable(subscription)
    assert sorted(len(places(member)) for member in members) == [3, 3]


async def test_a_busy_group_loses_and_doubles_nothing_while_members_come_and_go(broker: Broker) -> None:
    subscription, members = await partitioned(broker, 8, 2)
    acked: list[str] = []
    stop = asyncio.Event()

    async def work(member: BrokerMember) -> None:
        while not stop.is_set():
            try:
                messages = await member.pull(20, timeout_s=0.05)
                await member.ack(messages, wait=True)
            except errors.StaleGeneration:
                return
            acked.extend(message.id for message in messages)

    tasks = [asyncio.create_task(work(member)) for member in members]
    for number in range(10):
        await publish(broker, 100)
        if number % 2 == 0:
            extra = await subscription.join(f"extra-{number}")
            tasks.append(asyncio.create_task(work(extra)))
        elif number % 4 == 1:
            await extra.leave()
        await asyncio.sleep(0.05)
    until = time.monotonic() + 20
    while await subscription.lag():
        assert time.monotonic() < until, await subscription.group()
        await asyncio.sleep(0.02)
    stop.set()
    await asyncio.gather(*tasks)
    assert len(acked) == len(set(acked)) == 1000


# Silence, return, fencing.


async def test_a_silent_member_is_removed_and_told_to_join_again(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", group=QUICK)
    silent = await subscription.join("silent", heartbeat="manual")
    await publish(broker, 3)
    held = await silent.pull(100, timeout_s=1)
    other = await subscription.join("other")
    began = time.monotonic()
    found = await other.pull(100, timeout_s=5)
    assert time.monotonic() - began < 2
    assert len(found) == 3
    assert {message.attempt for message in found} == {2}
    assert [member.name for member in await subscription.members()] == ["other"]
    for attempt in (silent.ack(held), silent.pull(), silent.heartbeat(), silent.extend(held, 5)):
        with pytest.raises(errors.StaleGeneration, match="silent"):
            await attempt
    again = await subscription.join("silent")
    assert again.incarnation > silent.incarnation


async def test_a_member_whose_handle_is_dropped_is_removed(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", group=QUICK)
    await subscription.join("dropped")
    gc.collect()
    await asyncio.sleep(0.6)
    assert await subscription.members() == []


async def test_an_automatic_member_stays_while_it_works(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", group=QUICK)
    member = await subscription.join("steady")
    await asyncio.sleep(0.8)
    assert [each.name for each in await subscription.members()] == [member.consumer]
    await publish(broker, 1)
    await member.ack(await member.pull(timeout_s=1), wait=True)


async def test_whoever_returns_within_the_session_keeps_its_partitions(broker: Broker) -> None:
    subscription, (first, second) = await partitioned(broker, 4, 2)
    before, generation = places(first), (await subscription.group()).generation
    again = await subscription.join("m0")
    assert places(again) == before
    assert (await subscription.group()).generation == generation
    with pytest.raises(errors.StaleGeneration, match="another process"):
        await first.pull()
    await publish(broker, 40)
    assert {message.partition for message in await again.pull(100, timeout_s=1)} <= before
    assert second.generation == generation


async def test_what_the_former_process_held_comes_to_the_one_that_returns(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", group=QUICK)
    former = await subscription.join("m")
    await publish(broker, 2)
    held = await former.pull(100, timeout_s=1)
    again = await subscription.join("m")
    found = await again.pull(100, timeout_s=1)
    assert data(found) == data(held)
    assert {message.attempt for message in found} == {2}
    await again.ack(found, wait=True)
    with pytest.raises(errors.StaleGeneration):
        await former.ack(held)


async def test_somebody_elses_messages_cannot_be_settled(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    a, b = await subscription.join("a"), await subscription.join("b")
    await publish(broker, 2)
    mine = await a.pull(1)
    with pytest.raises(errors.InvalidAckId, match="another consumer"):
        await b.ack(mine)
    await a.ack(mine, wait=True)


# Commits.


async def test_commits_are_read_back_with_their_notes_also_after_a_restart(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        subscription, (member,) = await partitioned(broker, 2, 1)
        for partition in (0, 0, 0, 1):
            await publish_to(broker, partition)
        await member.pull(100, timeout_s=1)
        await member.commit("t", 0, 2, metadata="up to here")
        await member.commit("t", 1, 1)
        assert await subscription.lag() == 1
        generation = member.generation
    async with await open_broker(tmp_path) as broker:
        subscription = await broker.subscription("g")
        found = {(c.partition, c.offset, c.metadata, c.member) for c in await subscription.committed()}
        assert found == {(0, 2, "up to here", "m0"), (1, 1, "", "m0")}
        assert await subscription.members() == []
        again = await subscription.join("m0")
        await stable(subscription)
        assert again.generation > generation
        assert len(await again.committed()) == 2
        assert len(await again.pull(100, timeout_s=1)) == 1


async def test_commits_that_cannot_be_are_refused_and_change_nothing(broker: Broker) -> None:
    subscription, (first, second) = await partitioned(broker, 2, 2)
    (mine,) = places(first)
    await publish_to(broker, mine)
    for offset in (-1, 2, "1", True, None):
        with pytest.raises((errors.OffsetOutOfRange, errors.InvalidArgument)):
            await first.commit("t", mine, offset)
    with pytest.raises(errors.InvalidArgument):
        await first.commit("t", mine, 1, metadata="x" * 5000)
    with pytest.raises(errors.StaleGeneration):
        await second.commit("t", mine, 1)
    with pytest.raises(errors.SparrowError):
        await first.commit("t", 9, 1)
    with pytest.raises(errors.TopicNotFound):
        await first.commit("nothing", 0, 1)
    assert await subscription.committed() == []
    assert await subscription.lag() == 1


async def test_a_commit_of_a_former_member_is_refused(broker: Broker) -> None:
    subscription, (first, second) = await partitioned(broker, 2, 2)
    (mine,) = places(first)
    await publish_to(broker, mine)
    await first.leave()
    with pytest.raises(errors.StaleGeneration, match="left"):
        await first.commit("t", mine, 1)
    await stable(subscription)
    await second.commit("t", mine, 1)
    assert await subscription.lag() == 0


# Bad input, changes, looks.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "both"}, "mode"),
        ({"strategy": "sticky"}, "shared"),
        ({"mode": "partitioned", "strategy": "least_loaded"}, "partitioned"),
        ({"session_timeout_s": 1, "heartbeat_s": 10}, "twice"),
        ({"session_timeout_s": 61}, "session_timeout_s"),
        ({"nonsense": 1}, "nonsense"),
        ("shared", "mapping"),
    ],
)
async def test_a_bad_group_is_refused(broker: Broker, options: Any, complaint: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=complaint):
        await broker.subscribe("g", "t", group=options)
    assert await broker.subscriptions() == []


async def test_an_order_over_partitions_and_a_partitioned_group_exclude_each_other(broker: Broker) -> None:
    with pytest.raises(errors.InvalidArgument, match="order"):
        await broker.subscribe("g", "t", ordering="total", group={"mode": "partitioned"})


async def test_bad_members_are_refused(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t")
    for name in ("", "x" * 300, None, 7):
        with pytest.raises(errors.InvalidName):
            await subscription.join(name)  # type: ignore[arg-type]
    for options in ({"max_in_flight": 0}, {"max_in_flight": -1}, {"heartbeat": "sometimes"}):
        with pytest.raises(errors.InvalidArgument):
            await subscription.join("m", **options)
    assert await subscription.members() == []
    with pytest.raises(errors.PreconditionFailed):
        await subscription.rebalance()


async def test_an_operator_can_rebalance(broker: Broker) -> None:
    subscription, _ = await partitioned(broker, 4, 2)
    before = await subscription.group()
    await subscription.rebalance()
    await asyncio.sleep(0.1)
    await stable(subscription)
    after = await subscription.group()
    assert after.generation == before.generation + 1
    assert after.rebalances == before.rebalances + 1


async def test_the_strategy_changes_while_members_work(broker: Broker) -> None:
    subscription, members = await partitioned(broker, 6, 2, strategy="range")
    assert places(members[0]) == {0, 1, 2}
    await subscription.update(group={"strategy": "round_robin"})
    await asyncio.sleep(0.1)
    await stable(subscription)
    assert places(members[0]) == {0, 2, 4}
    await publish(broker, 60)
    for member in members:
        await member.ack(await member.pull(100, timeout_s=1), wait=True)
    assert await subscription.lag() == 0


async def test_the_mode_cannot_change_under_members(broker: Broker) -> None:
    subscription, (member,) = await partitioned(broker, 2, 1)
    with pytest.raises(errors.PreconditionFailed, match="members"):
        await subscription.update(group={"mode": "shared"})
    assert subscription.policy.group.mode == "partitioned"
    await publish(broker, 10)
    assert await member.pull(100, timeout_s=1)
    await member.leave()
    await subscription.update(group={"mode": "shared"})
    assert len(await subscription.pull(100, timeout_s=1)) == 10


async def test_members_are_shown_as_the_group_sees_them(broker: Broker) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("g", "t", group=QUICK)
    member = await subscription.join("m", max_in_flight=7, is_static=True, instance="host-1")
    await publish(broker, 3)
    await member.pull(2)
    await member.heartbeat("fine")
    (info,) = await subscription.members()
    assert (await member.info()).name == "m"
    assert (info.name, info.in_flight, info.max_in_flight) == ("m", 2, 7)
    assert (info.is_static, info.instance, info.status) == (True, "host-1", "fine")
    assert [(each.topic, each.partition) for each in info.assignment] == [("t", 0)]


async def test_a_deleted_subscription_takes_its_group_with_it(broker: Broker) -> None:
    subscription, (member,) = await partitioned(broker, 2, 1)
    await subscription.unsubscribe()
    with pytest.raises(errors.SubscriptionNotFound):
        await member.pull()


async def test_a_hundred_members_rebalance_while_the_rest_goes_on(broker: Broker) -> None:
    """In real time: what stays is never paused; what moves is back within two seconds."""
    subscription, members = await partitioned(
        broker, 200, 100, heartbeat_s=1.0, session_timeout_s=10.0, stabilisation_s=0.2
    )
    kept = {member.consumer: places(member) for member in members[1:]}
    began = time.monotonic()
    await members[0].leave()
    while (await subscription.group()).unassigned or (await subscription.group()).state != "stable":
        assert time.monotonic() - began < 2
        owned = members[1]._runner.owned(members[1].consumer)
        assert {stream.partition for stream in owned} >= kept[members[1].consumer]
        await asyncio.sleep(0.01)
    assert all(kept[member.consumer] <= places(member) for member in members[1:])
