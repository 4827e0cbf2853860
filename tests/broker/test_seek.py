"""Seeking and snapshots: the cursor is put elsewhere, and comes back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


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


async def offsets(subscription: BrokerSubscription) -> list[int]:
    """What is delivered and not done, acked."""
    found: list[int] = []
    while messages := await subscription.pull(1000):
        found += [m.offset for m in messages]
        await subscription.ack(messages, wait=True)
    return found


async def ten(broker: Broker) -> BrokerSubscription:
    """A subscription that has acked ten messages."""
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"%d" % n for n in range(10)])
    assert len(await offsets(subscription)) == 10
    return subscription


# Places.


async def test_seek_to_earliest_delivers_everything_again(broker: Broker) -> None:
    subscription = await ten(broker)
    await subscription.seek("earliest")
    assert await subscription.lag() == 10
    assert await offsets(subscription) == list(range(10))


async def test_seek_to_latest_leaves_everything_out(broker: Broker) -> None:
    subscription = await ten(broker)
    await subscription.seek("earliest")
    await subscription.seek("latest")
    assert await offsets(subscription) == []
    await broker.publish("t", b"new")
    assert await offsets(subscription) == [10]


async def test_seek_to_a_time_delivers_what_was_published_since(broker: Broker, clock: SetClock) -> None:
    subscription = await ten(broker)
    clock.ahead_s = 3600
    await broker.publish_batch("t", [b"later"] * 3)
    await offsets(subscription)
    moment = datetime.fromtimestamp(clock.now_us() / 1e6 - 60, UTC)
    await subscription.seek(moment)
    assert await offsets(subscription) == [10, 11, 12]
    await subscription.seek(moment.timestamp())
    assert await offsets(subscription) == [10, 11, 12]


async def test_seek_to_a_time_in_the_sealed_log(broker: Broker, clock: SetClock) -> None:
    subscription = await ten(broker)
    await broker.seal()
    clock.ahead_s = 3600
    await broker.publish_batch("t", [b"later"] * 3)
    await broker.seal()
    await offsets(subscription)
    await subscription.seek(clock.now_us() / 1e6 - 60)
    assert await offsets(subscription) == [10, 11, 12]


async def test_seek_to_a_time_before_everything_is_earliest_and_after_everything_latest(
    broker: Broker,
) -> None:
    subscription = await ten(broker)
    await subscription.seek(0)
    assert len(await offsets(subscription)) == 10
    await subscription.seek(datetime(2100, 1, 1, tzinfo=UTC))
    assert await offsets(subscription) == []


async def test_seek_to_offsets_moves_the_named_partitions_only(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=2)
    subscription = await broker.subscribe("s", "wide")
    await broker.publish_batch("wide", [b"x"] * 20, keys=[f"k{n}" for n in range(20)])
    end = (await broker.bounds("wide", 1)).end_offset
    await offsets(subscription)
    await subscription.seek({("wide", 1): end - 2})
    got = await subscription.pull(100)
    assert [(m.partition, m.offset) for m in got] == [(1, end - 2), (1, end - 1)]


async def test_seek_by_the_name_of_a_topic_moves_its_first_partition(broker: Broker) -> None:
    subscription = await ten(broker)
    await subscription.seek({"t": 8})
    assert await offsets(subscription) == [8, 9]


async def test_seek_moves_every_topic_of_a_pattern(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.#")
    for topic in ("orders.us", "orders.eu"):
        await broker.publish(topic, b"x")
    assert await offsets(subscription) == [0, 0]
    await subscription.seek("earliest")
    assert await offsets(subscription) == [0, 0]


async def test_seek_of_one_subscription_leaves_the_others(broker: Broker) -> None:
    other = await broker.subscribe("other", "t")
    subscription = await ten(broker)
    await offsets(other)
    await subscription.seek("earliest")
    assert (await subscription.lag(), await other.lag()) == (10, 0)


# What a seek does to what was going on.


async def test_seek_is_durable_when_it_returns(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        await (await ten(broker)).seek({"t": 7})
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    async with sparrow.aopen(tmp_path / "crashed", settings=SMALL) as broker:
        assert await offsets(await broker.subscription("s")) == [7, 8, 9]


async def test_seek_ends_leases_and_their_acks_are_refused(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    [held] = await subscription.pull()
    await subscription.seek("earliest")
    with pytest.raises(errors.StaleAckId):
        await held.ack()
    assert await offsets(subscription) == [0]


async def test_seek_starts_the_count_of_attempts_anew(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    for _ in range(2):
        await subscription.nack(await subscription.pull(timeout_s=5), delay_s=0, wait=True)
    await subscription.seek("earliest")
    [message] = await subscription.pull(timeout_s=5)
    assert message.attempt == 1


async def test_seek_wakes_consumers_that_wait(broker: Broker) -> None:
    subscription = await ten(broker)
    waiting = asyncio.create_task(subscription.pull(timeout_s=30))
    await asyncio.sleep(0.01)
    await subscription.seek({"t": 9})
    assert [m.offset for m in await asyncio.wait_for(waiting, 5)] == [9]


async def test_seek_with_an_order_per_key_keeps_the_order(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    await broker.publish_batch("t", [b"%d" % n for n in range(6)], keys=["a"] * 6)
    assert await offsets(subscription) == list(range(6))
    await subscription.seek({"t": 2})
    assert await offsets(subscription) == [2, 3, 4, 5]


# Snapshots.


async def test_snapshot_brings_back_exactly_what_was_not_acked_then(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    await broker.publish_batch("t", [b"x"] * 10)
    messages = await subscription.pull(10)
    await subscription.ack([messages[1], messages[4]])
    await subscription.snapshot("before-deploy")
    await subscription.ack([m for m in messages if m.offset not in (1, 4)], wait=True)
    await broker.publish("t", b"later")
    await subscription.seek("before-deploy")
    assert await offsets(subscription) == [0, 2, 3, 5, 6, 7, 8, 9, 10]


async def test_snapshot_serves_another_subscription_of_the_same_topic(broker: Broker) -> None:
    subscription = await ten(broker)
    await subscription.snapshot("all-done")
    other = await broker.subscribe("other", "t", start="earliest")
    await other.seek("all-done")
    assert await offsets(other) == []


async def test_snapshots_are_listed_by_name_and_survive_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await ten(broker)
        await subscription.snapshot("b")
        await subscription.snapshot("a")
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        assert [s.name for s in await broker.snapshots()] == ["a", "b"]
        subscription = await broker.subscription("s")
        await subscription.seek("earliest")
        await subscription.seek("a")
        assert await offsets(subscription) == []


async def test_expired_snapshot_is_not_listed_and_cannot_be_used(broker: Broker, clock: SetClock) -> None:
    subscription = await ten(broker)
    await subscription.snapshot("short", ttl_s=60)
    await subscription.snapshot("long", ttl_s=600)
    clock.ahead_s = 61
    assert [s.name for s in await broker.snapshots()] == ["long"]
    with pytest.raises(errors.SnapshotNotFound) as refused:
        await subscription.seek("short")
    assert refused.value.code == "SNAPSHOT_NOT_FOUND"
    assert await subscription.lag() == 0


async def test_name_of_a_snapshot_is_free_again_when_it_has_expired(broker: Broker, clock: SetClock) -> None:
    subscription = await ten(broker)
    await subscription.snapshot("daily", ttl_s=60)
    with pytest.raises(errors.AlreadyExists):
        await subscription.snapshot("daily")
    clock.ahead_s = 61
    await subscription.snapshot("daily")


async def test_deleted_snapshot_is_gone(broker: Broker) -> None:
    subscription = await ten(broker)
    await subscription.snapshot("x")
    await broker.delete_snapshot("x")
    assert await broker.snapshots() == []
    for verb in (subscription.seek, broker.delete_snapshot):
        with pytest.raises(errors.SnapshotNotFound):
            await verb("x")


async def test_topic_that_came_after_the_snapshot_keeps_its_position(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.#")
    await broker.publish("orders.us", b"x")
    await subscription.snapshot("early")
    await broker.publish("orders.eu", b"y")
    await offsets(subscription)
    await subscription.seek("early")
    assert [m.topic for m in await subscription.pull()] == ["orders.us"]


# Refused.


@pytest.mark.parametrize("offset", [-1, 11, 10**18])
async def test_seek_out_of_the_log_is_refused_and_the_cursor_stays(broker: Broker, offset: int) -> None:
    subscription = await ten(broker)
    with pytest.raises(errors.OffsetOutOfRange) as refused:
        await subscription.seek({"t": offset})
    assert (refused.value.code, refused.value.status) == ("OFFSET_OUT_OF_RANGE", 416)
    assert refused.value.details == {"start_offset": 0, "end_offset": 10}
    assert refused.value.hint
    assert await subscription.lag() == 0


async def test_seek_below_what_retention_kept_is_refused_and_the_cursor_stays(broker: Broker) -> None:
    await broker.create_topic("short", retention_messages=2)
    subscription = await broker.subscribe("s", "short")
    for size in (3, 2):
        await broker.publish_batch("short", [b"x"] * size)
        await broker.seal()
    assert await broker.apply_retention() == 1
    await offsets(subscription)
    with pytest.raises(errors.OffsetOutOfRange) as refused:
        await subscription.seek({"short": 0})
    assert refused.value.details["start_offset"] == 3
    assert await subscription.lag() == 0
    await subscription.seek("earliest")
    assert await offsets(subscription) == [3, 4]


async def test_seek_over_several_partitions_is_refused_whole(broker: Broker) -> None:
    await broker.create_topic("wide", partitions=2)
    subscription = await broker.subscribe("s", "wide")
    await broker.publish_batch("wide", [b"x"] * 20, keys=[f"k{n}" for n in range(20)])
    await offsets(subscription)
    with pytest.raises(errors.OffsetOutOfRange):
        await subscription.seek({("wide", 0): 0, ("wide", 1): 999})
    assert await subscription.lag() == 0


async def test_seek_in_a_topic_the_subscription_does_not_read_is_refused(broker: Broker) -> None:
    subscription = await ten(broker)
    await broker.create_topic("other")
    with pytest.raises(errors.PreconditionFailed):
        await subscription.seek({"t": 0, "other": 0})
    assert await subscription.lag() == 0


NOWHERE: list[Any] = [
    "no-such-snapshot", None, True, b"earliest", [1], float("nan"), float("inf"), {"nowhere": 0},
    {("t", 5): 0}, {("t", 0, 0): 0}, {"t": "0"}, {"t": None}, datetime(2024, 1, 1),
]  # fmt: skip


async def test_seek_to_nonsense_is_refused_with_a_typed_error(broker: Broker) -> None:
    subscription = await ten(broker)
    for target in NOWHERE:
        with pytest.raises(errors.SparrowError) as refused:
            await subscription.seek(target)
        assert refused.value.code in errors.registry()
        assert refused.value.hint
    assert await subscription.lag() == 0


async def test_bad_name_for_a_snapshot_is_refused(broker: Broker) -> None:
    subscription = await ten(broker)
    name: Any
    for name in ("", "a b", "earliest", "latest", None, "x" * 300):
        with pytest.raises(errors.InvalidArgument):
            await subscription.snapshot(name)
    assert await broker.snapshots() == []


async def test_bad_life_of_a_snapshot_is_refused(broker: Broker) -> None:
    subscription = await ten(broker)
    ttl_s: Any
    for ttl_s in (0, -1, "60", None, float("nan"), float("inf")):
        with pytest.raises(errors.InvalidArgument):
            await subscription.snapshot("x", ttl_s=ttl_s)
    assert await broker.snapshots() == []
