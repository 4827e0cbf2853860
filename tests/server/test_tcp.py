"""The binary protocol over real sockets: greeting, calls, publishing, consuming, settling."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sparrow.model import errors
from sparrow.wire import heads
from sparrow.wire.frame import FrameType

from .wireclient import Client, connected, publish_batch, serving


async def test_hello_is_answered_with_the_limits_in_force(tmp_path: Path) -> None:
    async with serving(tmp_path, heartbeat_s=7.0) as (_, server):
        client = await Client.connect(server.address)
        welcome = await client.hello(client="test")
        assert (welcome.version, welcome.heartbeat_s) == (1, 7.0)
        assert welcome.frame_bytes_max == 16 * 1024 * 1024
        await client.close()


async def test_messages_travel_from_a_batch_to_a_delivery_and_are_acked_by_a_range(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_broker, server), connected(server) as client:
        await client.call("create_topic", name="orders")
        made = await client.call("subscribe", name="billing", pattern="orders")
        assert made["name"] == "billing"
        head, body = publish_batch("orders", [b"a", b"b", None], key=["k", None, "k"])
        receipts = await client.ask(head, body)
        assert receipts.runs[0][:3] == (0, 0, 3)
        consumer = (await client.ask(heads.Consume("billing", 100, 1 << 20))).value["consumer"]
        deliver, rows = await client.deliver()
        assert deliver.consumer == consumer
        assert rows.column("data").to_pylist() == [b"a", b"b", None]
        assert rows.column("key").to_pylist() == ["k", None, "k"]
        assert "priority" not in rows.schema.names
        settle = heads.Settle(consumer, heads.ACK, [(deliver.lease, [0, 3])], wait=True)
        assert (await client.ask(settle)).value == []
        assert await client.call("subscription.lag", subscription="billing") == 0


async def test_what_is_published_while_a_consumer_waits_is_pushed_to_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        await client.ask(heads.Consume("s", 10, 1 << 20))
        head, body = publish_batch("t", [b"x"])
        await client.ask(head, body)
        _, rows = await client.deliver()
        assert rows.column("data").to_pylist() == [b"x"]


async def test_a_consumer_gets_no_more_than_its_credit(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        head, body = publish_batch("t", [b"12345"] * 100)
        await client.ask(head, body)
        consumer = (await client.ask(heads.Consume("s", 3, 1 << 20))).value["consumer"]
        _, rows = await client.deliver()
        assert rows.num_rows == 3
        await asyncio.sleep(0.05)
        assert (await broker.subscription("s")).in_flight == 3
        client.send(heads.Credit(consumer, 5, 0))
        _, rows = await client.deliver()
        assert rows.num_rows == 5


async def test_credit_of_bytes_bounds_a_delivery_by_its_data(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        head, body = publish_batch("t", [b"12345"] * 100)
        await client.ask(head, body)
        await client.ask(heads.Consume("s", 100, 12))
        _, rows = await client.deliver()
        assert rows.num_rows == 2
        _, rows = await client.deliver()
        assert rows.num_rows == 1
        await asyncio.sleep(0.05)
        assert (await broker.subscription("s")).in_flight == 3


async def test_a_nack_brings_a_message_back_with_the_next_attempt(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        head, body = publish_batch("t", [b"a", b"b"])
        await client.ask(head, body)
        consumer = (await client.ask(heads.Consume("s", 100, 1 << 20))).value["consumer"]
        deliver, _ = await client.deliver()
        client.send(heads.Settle(consumer, heads.NACK, [(deliver.lease, [1, 2])], delay_s=0.0, reason="no"))
        again, rows = await client.deliver()
        assert rows.column("offset").to_pylist() == [1]
        assert again.attempts == {1: 2}


async def test_an_extended_lease_outlives_its_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t", ack_deadline_s=0.2, guarantee="exactly_once")
        head, body = publish_batch("t", [b"a"])
        await client.ask(head, body)
        consumer = (await client.ask(heads.Consume("s", 1, 1 << 20))).value["consumer"]
        deliver, _ = await client.deliver()
        assert (await client.ask(heads.Extend(consumer, [(deliver.lease, [0, 1])], 30.0))).value == []
        await asyncio.sleep(0.4)
        settle = heads.Settle(consumer, heads.ACK, [(deliver.lease, [0, 1])], wait=True)
        assert (await client.ask(settle)).value == []


async def test_what_cannot_be_settled_is_named_with_lease_offset_and_code(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        head, body = publish_batch("t", [b"a", b"b"])
        await client.ask(head, body)
        consumer = (await client.ask(heads.Consume("s", 100, 1 << 20))).value["consumer"]
        deliver, _ = await client.deliver()
        ack = heads.Settle(consumer, heads.ACK, [(deliver.lease, [0, 1])], wait=True)
        assert (await client.ask(ack)).value == []
        found = (
            await client.ask(
                heads.Settle(consumer, heads.ACK, [(deliver.lease, [0, 2]), ("nonsense", [4, 5])], wait=True)
            )
        ).value
        assert [refused[:3] for refused in found] == [
            ["nonsense", 4, "INVALID_ACK_ID"],
            [deliver.lease, 0, "STALE_ACK_ID"],
        ]


@pytest.mark.parametrize("ranges", [[], [1], [2, 1], [-1, 3], [0, 2**40]])
async def test_ranges_that_are_none_are_refused(tmp_path: Path, ranges: list[int]) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        consumer = (await client.ask(heads.Consume("s", 100, 1 << 20))).value["consumer"]
        with pytest.raises(errors.InvalidArgument):
            await client.ask(heads.Settle(consumer, heads.ACK, [("x", ranges)]))


async def test_batches_of_a_connection_are_stored_in_the_order_in_which_they_were_sent(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        for number in range(200):
            head, body = publish_batch("t", [str(number).encode()])
            client.send(head, number + 1000, body)
        for number in range(200):
            await client.until(lambda frame, n=number: frame.request_id == n + 1000)
        found = await broker.read("t", max_messages=1000)
        assert [message.data for message in found] == [str(n).encode() for n in range(200)]


async def test_commands_without_a_request_id_are_answered_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        head, body = publish_batch("t", [b"x"])
        client.send(head, None, body)
        client.send(heads.Call("topics"))
        client.send(heads.Call("nonsense"))
        client.send(heads.Beat())
        kinds = [(await client.until(lambda frame: frame.request_id is None)).type for _ in range(4)]
        assert kinds == [FrameType.RECEIPTS, FrameType.RESULT, FrameType.ERROR, FrameType.RESPONSE]


async def test_a_damaged_batch_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_broker, server), connected(server) as client:
        await client.call("create_topic", name="t")
        head, body = publish_batch("t", [b"hello"])
        with pytest.raises(errors.InvalidArgument, match="crc32c"):
            await client.ask(head, bytes(body)[:-1] + b"\x01")
        assert await client.call("bounds", topic="t") == [0, 0]


async def test_a_batch_that_counts_on_other_partitions_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("create_topic", name="t", partitions=4)
        head, body = publish_batch("t", [b"x"], 1, partitions=2)
        with pytest.raises(errors.PreconditionFailed):
            await client.ask(head, body)


async def test_a_keyed_batch_without_partition_is_divided_and_its_receipts_keep_their_order(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await client.call("create_topic", name="t", partitions=4)
        data = [str(n).encode() for n in range(20)]
        head, body = publish_batch("t", data, key=[f"k{n}" for n in range(20)])
        receipts = await client.ask(head, body)
        assert receipts.rows is not None
        for row, (run, place) in enumerate(receipts.rows):
            partition, base, *_ = receipts.runs[run]
            (message,) = await broker.read("t", partition=partition, offset=base + place, max_messages=1)
            assert message.data == data[row]


async def test_a_repeated_sequence_is_answered_with_the_first_receipt(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        number, epoch = await client.call("producer", name="p")
        head, body = publish_batch("t", [b"a", b"b"], producer_id=number, producer_epoch=epoch)
        first = await client.ask(head, body)
        second = await client.ask(head, body)
        assert not first.runs[0].is_duplicate
        assert second.runs[0][:3] == first.runs[0][:3]
        assert second.runs[0].is_duplicate
        assert await client.call("next_sequence", producer_id=number, topic="t") == 2


async def test_fetch_reads_raw_batches_and_waits_at_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        head, body = publish_batch("t", [b"a", b"b"])
        receipts = await client.ask(head, body)
        fetched = await client.ask(heads.Fetch("t", 0, 1, 1 << 20))
        assert (fetched.topic_id, fetched.start_offset, fetched.end_offset) == (receipts.topic_id, 0, 2)
        assert [batch[:2] for batch in fetched.batches] == [(1, 2)]
        client.send(heads.Fetch("t", 0, 2, 1 << 20, 5.0), 77)
        await asyncio.sleep(0.05)
        await client.ask(head, body)
        later = client.opened(await client.until(lambda frame: frame.request_id == 77))
        assert [batch[:2] for batch in later.batches] == [(2, 4)]


async def test_commit_of_a_consumer_acks_everything_below(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        head, body = publish_batch("t", [b"a", b"b", b"c"])
        await client.ask(head, body)
        consumer = (await client.ask(heads.Consume("s", 0, 0))).value["consumer"]
        await client.ask(heads.Commit(consumer, "t", 0, 2))
        assert await client.call("subscription.lag", subscription="s") == 1


async def test_a_consumer_whose_subscription_is_deleted_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        consumer = (await client.ask(heads.Consume("s", 10, 1 << 20))).value["consumer"]
        await asyncio.sleep(0.02)
        await client.call("subscription.unsubscribe", subscription="s")
        error = await client.next_head(FrameType.ERROR)
        assert (error.code, error.details["consumer"]) == ("SUBSCRIPTION_NOT_FOUND", consumer)


async def test_messages_with_many_attributes_are_delivered_in_frames_that_fit(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        heavy = {f"name{n}": "v" * 1000 for n in range(80)}
        for _ in range(4):
            await broker.publish_batch("t", [b"x"] * 100, attributes=[heavy] * 100)
        await client.ask(heads.Consume("s", 400, 1 << 30))
        total = 0
        while total < 400:
            total += (await client.deliver())[1].num_rows
        assert total == 400


# Goodbye.


async def _held_by(client: Client) -> Any:
    await client.call("subscribe", name="s", pattern="t")
    head, body = publish_batch("t", [b"a"])
    await client.ask(head, body)
    consumer = (await client.ask(heads.Consume("s", 1, 1 << 20))).value["consumer"]
    await client.deliver()
    return consumer


async def test_a_connection_that_breaks_gives_back_what_it_held_as_failed_attempts(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        client = await Client.connect(server.address)
        await client.hello()
        await _held_by(client)
        client.abort()
        (message,) = await (await broker.subscription("s")).pull(timeout_s=5.0)
        assert message.attempt == 2


async def test_a_connection_that_says_goodbye_gives_back_without_counting(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        client = await Client.connect(server.address)
        await client.hello()
        await _held_by(client)
        await client.ask(heads.Close())
        assert await client.ended()
        (message,) = await (await broker.subscription("s")).pull(timeout_s=5.0)
        assert message.attempt == 1
        await client.close()


async def test_unsubscribe_ends_a_consumer_and_gives_back_what_it_held(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        consumer = await _held_by(client)
        await client.ask(heads.Unsubscribe(consumer))
        (message,) = await (await broker.subscription("s")).pull(timeout_s=5.0)
        assert message.attempt == 1
        with pytest.raises(errors.InvalidArgument):
            await client.ask(heads.Unsubscribe(consumer))
