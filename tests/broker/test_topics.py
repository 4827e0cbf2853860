"""Topics: made, changed, deleted, made on first use; on a real broker and a real directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.kernel.partition import partition_of
from sparrow.model.errors import InvalidArgument, ResourceExhausted, TopicExists, TopicNotFound
from sparrow.model.settings import Settings, TopicSettings
from sparrow.model.topic import Codec, Durability, TopicPolicy


class HandClock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now_us(self) -> int:
        return int(self.seconds * 1_000_000)

    def monotonic_s(self) -> float:
        return self.seconds


async def open_broker(path: Path, clock: Clock | None = None, **topics: Any) -> Broker:
    settings = Settings(data=str(path / "data"), topics=TopicSettings(**topics))
    return await Broker.open(settings, clock=clock)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with await open_broker(tmp_path) as broker:
        yield broker


async def test_a_new_topic_has_its_options_and_an_id(broker: Broker) -> None:
    topic = await broker.create_topic(
        "orders.us", partitions=3, durability="written", codec="zstd", retention_s=None
    )
    assert (topic.name, topic.partitions, topic.id >= 1) == ("orders.us", 3, True)
    assert topic.policy == TopicPolicy(durability=Durability.WRITTEN, codec=Codec.ZSTD, retention_s=None)
    assert await broker.topic("orders.us") == topic


async def test_a_topic_without_a_count_gets_the_default(tmp_path: Path) -> None:
    async with await open_broker(tmp_path, partitions_default=5) as broker:
        assert (await broker.create_topic("a")).partitions == 5


async def test_topics_are_listed_by_name(broker: Broker) -> None:
    for name in ("b", "a.z", "c", "a"):
        await broker.create_topic(name)
    assert [topic.name for topic in await broker.topics()] == ["a", "a.z", "b", "c"]


async def test_a_name_that_is_taken_is_refused_and_the_topic_unchanged(broker: Broker) -> None:
    before = await broker.create_topic("orders", partitions=2)
    with pytest.raises(TopicExists):
        await broker.create_topic("orders", partitions=3)
    assert await broker.topic("orders") == before


async def test_of_two_who_create_a_name_at_once_one_wins(broker: Broker) -> None:
    outcomes = await asyncio.gather(
        *(broker.create_topic("orders") for _ in range(5)), return_exceptions=True
    )
    assert sum(isinstance(outcome, TopicExists) for outcome in outcomes) == 4
    assert len(await broker.topics()) == 1


async def test_topics_are_there_after_a_restart(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        made = [await broker.create_topic(name, partitions=2) for name in ("a", "b")]
    async with await open_broker(tmp_path) as broker:
        assert await broker.topics() == made


async def test_an_unknown_topic_is_not_found_by_any_verb(tmp_path: Path) -> None:
    async with await open_broker(tmp_path, auto_create=False) as broker:
        for call in (
            broker.topic("x"),
            broker.update_topic("x", retention_s=1),
            broker.delete_topic("x"),
            broker.bounds("x"),
            broker.read("x"),
            broker.read_batches("x"),
            broker.offset_at("x", 0),
            broker.publish("x", b""),
            broker.publish_batch("x", [b""]),
        ):
            with pytest.raises(TopicNotFound, match="there is no topic 'x'"):
                await call
        assert await broker.topics() == []


# Changing.


async def test_an_update_changes_what_it_names_and_keeps_the_rest(broker: Broker) -> None:
    before = await broker.create_topic("orders", retention_bytes=1000, codec="lz4")
    after = await broker.update_topic("orders", retention_bytes=None, dedupe_window_s=5)
    assert after.policy == TopicPolicy(codec=Codec.LZ4, dedupe_window_s=5)
    assert (after.id, after.partitions, after.created_at_us) == (
        before.id,
        before.partitions,
        before.created_at_us,
    )


async def test_an_update_is_there_after_a_restart(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        await broker.create_topic("orders")
        after = await broker.update_topic("orders", partitions=4, retention_messages=7)
    async with await open_broker(tmp_path) as broker:
        assert await broker.topic("orders") == after


async def test_a_refused_update_changes_nothing(broker: Broker) -> None:
    before = await broker.create_topic("orders", partitions=2)
    for options in ({"partitions": 1}, {"partitions": 4, "codec": "gzip"}, {"retention_s": 0}, {"colour": 1}):
        with pytest.raises(InvalidArgument):
            await broker.update_topic("orders", **options)
    assert await broker.topic("orders") == before


async def test_growing_partitions_keeps_old_messages_and_uses_the_new_ones(broker: Broker) -> None:
    keys = [f"k-{number}" for number in range(64)]
    await broker.create_topic("orders", partitions=2)
    await broker.publish_batch("orders", [b"old"] * 64, keys=keys)
    await broker.update_topic("orders", partitions=4)
    receipts = await broker.publish_batch("orders", [b"new"] * 64, keys=keys)
    assert [receipt.partition for receipt in receipts] == [partition_of(key, 4) for key in keys]
    assert {receipt.partition for receipt in receipts} == {0, 1, 2, 3}
    found = [
        message.data for partition in range(4) for message in await broker.read("orders", partition=partition)
    ]
    assert (found.count(b"old"), found.count(b"new")) == (64, 64)


async def test_a_partition_that_does_not_exist_is_refused_with_the_range(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    for partition in (2, -1, "0", 0.0):
        with pytest.raises(InvalidArgument, match="partitions 0 to 1"):
            await broker.read("orders", partition=partition)


# Deleting.


async def test_a_deleted_topic_is_gone_with_its_messages_and_files(broker: Broker, tmp_path: Path) -> None:
    await broker.create_topic("orders")
    await broker.publish("orders", b"sealed")
    await broker.seal()
    await broker.publish("orders", b"hot")
    await broker.delete_topic("orders")
    assert await broker.topics() == []
    assert not (tmp_path / "data" / "topics" / "orders").exists()
    with pytest.raises(TopicNotFound):
        await broker.read("orders")


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seals", [False, True])
async def test_a_name_made_again_has_a_new_id_and_none_of_the_old_messages(
    tmp_path: Path, restarts: bool, seals: bool
) -> None:
    broker = await open_broker(tmp_path)
    old = await broker.create_topic("orders")
    producer = await broker.producer("shop")
    await broker.publish_batch("orders", [b"old"] * 5, idempotency_keys=[f"i{n}" for n in range(5)])
    await producer.publish("orders", b"old", sequence=0)
    if seals:
        await broker.seal()
        assert len(await broker.read("orders")) == 6
    await broker.delete_topic("orders")
    if restarts:
        await broker.close()
        broker = await open_broker(tmp_path)
        producer = await broker.producer("shop")
    new = await broker.create_topic("orders")
    assert new.id > old.id
    assert await broker.bounds("orders") == (0, 0)
    receipts = await broker.publish_batch("orders", [b"new"] * 2, idempotency_keys=["i0", "i1"])
    assert [(receipt.offset, receipt.is_duplicate) for receipt in receipts] == [(0, False), (1, False)]
    assert not (await producer.publish("orders", b"new", sequence=0)).is_duplicate
    assert [message.data for message in await broker.read("orders")] == [b"new"] * 3
    assert await broker.seal() == 3
    assert [message.data for message in await broker.read("orders")] == [b"new"] * 3
    await broker.close()
    async with await open_broker(tmp_path) as broker:
        assert [message.id for message in await broker.read("orders")] == [
            f"{new.id}-0-{n}" for n in range(3)
        ]


async def test_publishing_while_a_topic_is_deleted_ends_in_a_whole_new_topic_or_a_refusal(
    broker: Broker, tmp_path: Path
) -> None:
    old = await broker.create_topic("orders")
    await broker.publish("orders", b"old")
    deleting = asyncio.create_task(broker.delete_topic("orders"))
    await asyncio.sleep(0)
    receipt = await broker.publish("orders", b"new")
    await deleting
    new = await broker.topic("orders")
    assert new.id != old.id
    assert receipt.message_id == f"{new.id}-0-0"
    assert (tmp_path / "data" / "topics" / "orders" / "topic.json").exists()
    assert [message.data for message in await broker.read("orders")] == [b"new"]


async def test_a_deletion_with_publishes_under_way_leaves_a_broker_that_seals(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.create_topic("other")
    producer = await broker.producer("shop")
    publishes = [asyncio.create_task(producer.publish("orders", b"x", key=f"k{n}")) for n in range(20)]
    await asyncio.sleep(0)
    await broker.delete_topic("orders")
    for outcome in await asyncio.gather(*publishes, return_exceptions=True):
        assert not isinstance(outcome, BaseException) or isinstance(outcome, TopicNotFound)
    await broker.publish("other", b"y")
    assert await broker.seal() >= 1
    assert broker.health().is_ready


async def test_a_deleted_topics_producer_does_not_stop_sealing_after_a_restart(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        producer = await broker.producer("shop")
        await producer.publish("doomed", b"x")
        await producer.publish("kept", b"x")
        await broker.delete_topic("doomed")
    async with await open_broker(tmp_path) as broker:
        assert await broker.seal() == 1


async def test_a_caller_that_gives_up_leaves_no_half_made_topic(broker: Broker) -> None:
    for call in (broker.create_topic("orders", partitions=2), broker.publish("fresh", b"x")):
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    await broker.publish("orders", b"x")
    await broker.publish("fresh", b"x")
    assert (await broker.topic("orders")).partitions == 2


async def test_a_caller_that_gives_up_leaves_no_half_deleted_topic(broker: Broker) -> None:
    old = await broker.create_topic("orders")
    task = asyncio.create_task(broker.delete_topic("orders"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    new = await broker.create_topic("orders")
    assert new.id != old.id
    await broker.publish("orders", b"x")


# First use.


async def test_publishing_to_an_unknown_topic_makes_it_with_the_defaults(tmp_path: Path) -> None:
    async with await open_broker(tmp_path, partitions_default=2) as broker:
        await broker.publish("fresh", b"x", key="k")
        topic = await broker.topic("fresh")
        assert (topic.partitions, topic.policy) == (2, TopicPolicy())


async def test_many_first_publishes_at_once_make_one_topic(broker: Broker) -> None:
    receipts = await asyncio.gather(*(broker.publish("fresh", b"x") for _ in range(50)))
    assert sorted(receipt.offset for receipt in receipts) == list(range(50))
    assert len({receipt.message_id.split("-")[0] for receipt in receipts}) == 1


async def test_reading_an_unknown_topic_does_not_make_it(broker: Broker) -> None:
    with pytest.raises(TopicNotFound):
        await broker.read("fresh")
    assert await broker.topics() == []


async def test_first_use_is_limited_in_rate_and_recovers_with_time(tmp_path: Path) -> None:
    clock = HandClock()
    async with await open_broker(tmp_path, clock, auto_create_per_s=2.0) as broker:
        await broker.publish("a", b"")
        await broker.publish("b", b"")
        with pytest.raises(ResourceExhausted, match="too fast") as caught:
            await broker.publish("c", b"")
        assert caught.value.details["retry_after_s"] == pytest.approx(0.5)
        await broker.create_topic("by.hand")
        clock.seconds += 0.5
        await broker.publish("c", b"")
        with pytest.raises(ResourceExhausted):
            await broker.publish("d", b"")
        clock.seconds += 3600
        for name in ("d", "e"):
            await broker.publish(name, b"")
        with pytest.raises(ResourceExhausted):
            await broker.publish("f", b"")


async def test_the_number_of_topics_is_capped_by_hand_and_on_first_use(tmp_path: Path) -> None:
    async with await open_broker(tmp_path, count_max=2) as broker:
        await broker.create_topic("a")
        await broker.publish("b", b"")
        for call in (broker.create_topic("c"), broker.publish("c", b"")):
            with pytest.raises(ResourceExhausted, match="count_max"):
                await call
        await broker.publish("b", b"existing topics go on")
        await broker.delete_topic("a")
        await broker.create_topic("c")
