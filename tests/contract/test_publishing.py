"""Publishing, on every surface."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from sparrow import errors
from sparrow.kernel.partition import partition_of


async def test_topic_is_created_listed_changed_and_deleted(broker: Any) -> None:
    made = await broker.create_topic("orders.us", partitions=2, retention_s=60.0, codec="lz4")
    assert (made.name, made.partitions, made.policy.retention_s) == ("orders.us", 2, 60.0)
    assert await broker.topic("orders.us") == made
    assert [topic.name for topic in await broker.topics()] == ["orders.us"]
    assert (await broker.update_topic("orders.us", partitions=3)).partitions == 3
    await broker.delete_topic("orders.us")
    assert await broker.topics() == []


async def test_receipt_says_where_the_message_lies(broker: Any) -> None:
    await broker.create_topic("t")
    first = await broker.publish("t", b"a")
    second = await broker.publish("t", b"b")
    assert (first.topic, first.partition, first.offset, second.offset) == ("t", 0, 0, 1)
    assert not first.is_duplicate
    [a, b] = await broker.read("t")
    assert [(m.id, m.data) for m in (a, b)] == [(first.message_id, b"a"), (second.message_id, b"b")]
    assert a.publish_time_us == first.publish_time_us


async def test_every_value_of_a_message_arrives(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t")
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    await broker.publish(
        "t", b"x", key="k", attributes={"a": "1", "ü": ""}, event_time=moment, priority=7, ttl_s=1.5
    )
    [message] = await subscription.pull(timeout_s=5)
    assert (message.topic, message.key, message.data, message.attempt) == ("t", "k", b"x", 1)
    assert message.attributes == {"a": "1", "ü": ""}
    assert (message.event_time, message.priority, message.ttl_s) == (moment, 7, 1.5)
    assert (message.deliver_at, message.idempotency_key, message.is_tombstone) == (None, None, False)


async def test_tombstone_is_a_message_without_data(broker: Any) -> None:
    await broker.create_topic("t")
    await broker.publish("t", None, key="k")
    await broker.publish("t", b"", key="k")
    assert [(m.data, m.is_tombstone) for m in await broker.read("t")] == [(None, True), (b"", False)]


async def test_batch_has_one_receipt_a_message_in_order(broker: Any) -> None:
    await broker.create_topic("t")
    receipts = await broker.publish_batch("t", [b"%d" % n for n in range(500)])
    assert [receipt.offset for receipt in receipts] == list(range(500))
    assert len(receipts) == 500
    assert [m.data for m in await broker.read("t", offset=498)] == [b"498", b"499"]


async def test_keys_of_a_batch_decide_about_partitions(broker: Any) -> None:
    await broker.create_topic("t", partitions=4)
    keys = [f"k{n}" for n in range(40)]
    receipts = await broker.publish_batch("t", [key.encode() for key in keys], keys=keys)
    assert [receipt.partition for receipt in receipts] == [partition_of(key, 4) for key in keys]
    for receipt, key in zip(receipts, keys, strict=True):
        found = await broker.read("t", partition=receipt.partition, offset=receipt.offset, max_messages=1)
        assert [(m.key, m.data) for m in found] == [(key, key.encode())]


async def test_single_messages_of_many_tasks_go_where_their_keys_belong(broker: Any, surface: str) -> None:
    await broker.create_topic("t", partitions=3)
    keys = [f"k{n % 17}" for n in range(400)]
    receipts = await asyncio.gather(*(broker.publish("t", b"%d" % n, key=key) for n, key in enumerate(keys)))
    assert [receipt.partition for receipt in receipts] == [partition_of(key, 3) for key in keys]
    assert len({receipt.message_id for receipt in receipts}) == 400
    for partition in range(3):
        numbers = [int(m.data) for m in await broker.read("t", partition=partition)]
        # Requests on several connections arrive in any order.
        assert surface == "http" or numbers == sorted(numbers), "the order of the calls is kept"


async def test_repeated_idempotency_key_returns_the_first_receipt(broker: Any) -> None:
    await broker.create_topic("t")
    first = await broker.publish("t", b"a", idempotency_key="once")
    again = await broker.publish("t", b"a", idempotency_key="once")
    assert (again.message_id, again.is_duplicate, first.is_duplicate) == (first.message_id, True, False)
    receipts = await broker.publish_batch("t", [b"a", b"b"], idempotency_keys=["once", "other"])
    assert [receipt.is_duplicate for receipt in receipts] == [True, False]
    assert set(receipts.duplicates) == {0}
    assert (await broker.bounds("t")).end_offset == 2


async def test_table_is_published_and_read_as_arrow(broker: Any) -> None:
    await broker.create_topic("t")
    table = pa.table({"data": [b"a", b"b", None], "key": ["x", None, "y"], "priority": [1, None, 3]})
    receipts = await broker.publish_table("t", table)
    assert [receipt.offset for receipt in receipts] == [0, 1, 2]
    found = pa.Table.from_batches(await broker.read_batches("t"))
    assert found.column("data").to_pylist() == [b"a", b"b", None]
    assert found.column("priority").to_pylist() == [1, None, 3]
    assert found.column("offset").to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("library", ["pandas", "polars"])
async def test_table_of_another_library_is_published(broker: Any, library: str) -> None:
    await broker.create_topic("t")
    columns = {"data": [b"a", b"b"], "key": ["x", None]}
    receipts = await broker.publish_table("t", pytest.importorskip(library).DataFrame(columns))
    assert [receipt.offset for receipt in receipts] == [0, 1]
    found = pa.Table.from_batches(await broker.read_batches("t"))
    assert found.select(["data", "key"]).to_pydict() == columns


async def test_largest_message_fits(broker: Any) -> None:
    await broker.create_topic("t")
    data = bytes(10 * 1024 * 1024)
    await broker.publish("t", data, key="k", attributes={"a": "b"})
    [message] = await broker.read("t")
    assert message.data == data
    with pytest.raises(errors.MessageTooLarge):
        await broker.publish("t", data + b"x")


async def test_producer_recognises_its_repeats_and_fences_the_one_before(broker: Any) -> None:
    await broker.create_topic("t")
    producer = await broker.producer("p")
    receipts = await producer.publish_batch("t", [b"a", b"b"], sequence=0)
    again = await producer.publish_batch("t", [b"a", b"b"], sequence=0)
    assert [r.message_id for r in again] == [r.message_id for r in receipts]
    assert all(receipt.is_duplicate for receipt in again)
    assert (await producer.publish("t", b"c")).offset == 2
    assert await producer.next_sequence("t") == 3
    with pytest.raises(errors.SequenceGap):
        await producer.publish("t", b"x", sequence=10)
    newer = await broker.producer("p")
    assert (newer.id, newer.epoch) == (producer.id, producer.epoch + 1)
    with pytest.raises(errors.ProducerFenced):
        await producer.publish("t", b"late")
    assert (await newer.publish("t", b"d")).offset == 3


async def test_what_may_not_be_published_is_refused_with_a_typed_error(broker: Any) -> None:
    await broker.create_topic("t")
    with pytest.raises(errors.InvalidArgument):
        await broker.publish("t", "text")
    with pytest.raises(errors.InvalidArgument):
        await broker.publish_batch("t", [])
    with pytest.raises(errors.InvalidArgument):
        await broker.publish("t", b"x", key="")
    with pytest.raises(errors.InvalidName):
        await broker.publish("no such name!", b"x")
    with pytest.raises(errors.TopicExists):
        await broker.create_topic("t")
    with pytest.raises(errors.InvalidArgument):
        await broker.create_topic("u", colour="red")
    with pytest.raises(errors.TopicNotFound):
        await broker.topic("nowhere")
    assert (await broker.bounds("t")).end_offset == 0


async def test_a_refused_publish_does_not_hold_up_the_next(broker: Any) -> None:
    """Flow control refuses some of many publishes; the others are stored, once each."""
    await broker.create_topic("t", flow={"overflow": "reject", "messages_per_s": 50.0, "burst_s": 1.0})
    outcomes = await asyncio.gather(
        *(broker.publish_batch("t", [b"%d" % n] * 10) for n in range(12)), return_exceptions=True
    )
    stored = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert stored
    assert refused
    assert all(isinstance(error, errors.ResourceExhausted) for error in refused)
    offsets = sorted(receipt.offset for receipts in stored for receipt in receipts)
    assert offsets == list(range(10 * len(stored)))
    assert (await broker.bounds("t")).end_offset == 10 * len(stored)


async def test_offset_at_finds_a_moment(broker: Any) -> None:
    await broker.create_topic("t")
    await broker.publish("t", b"a")
    second = await broker.publish("t", b"b")
    moment = datetime.fromtimestamp(second.publish_time_us / 1e6, UTC)
    assert await broker.offset_at("t", 0.0) == 0
    assert await broker.offset_at("t", moment) in (0, 1)
    with pytest.raises(errors.OffsetOutOfRange):
        await broker.read("t", offset=99)
