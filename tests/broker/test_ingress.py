"""The way in: batches, tables, idempotency keys and producers, through restarts and sealing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.kernel.partition import partition_of
from sparrow.model.errors import (
    DedupeWindowFull,
    InvalidArgument,
    ProducerFenced,
    SequenceGap,
    SequenceTooOld,
)
from sparrow.model.limits import BATCH_BYTES_MAX
from sparrow.model.message import Message, Receipt
from sparrow.model.settings import DedupeSettings, Settings


class HandClock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def now_us(self) -> int:
        return int(self.seconds * 1_000_000)

    def monotonic_s(self) -> float:
        return self.seconds


async def open_broker(path: Path, clock: Clock | None = None, **dedupe: int) -> Broker:
    return await Broker.open(Settings(data=str(path / "data"), dedupe=DedupeSettings(**dedupe)), clock=clock)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with await open_broker(tmp_path) as broker:
        yield broker


async def nothing(broker: Broker, path: Path) -> Broker:
    return broker


async def restarted(broker: Broker, path: Path) -> Broker:
    await broker.close()
    return await open_broker(path)


async def sealed(broker: Broker, path: Path) -> Broker:
    await broker.seal()
    return broker


async def sealed_and_restarted(broker: Broker, path: Path) -> Broker:
    await broker.seal()
    return await restarted(broker, path)


async def restarted_and_sealed(broker: Broker, path: Path) -> Broker:
    return await sealed(await restarted(broker, path), path)


Interlude = Callable[[Broker, Path], Awaitable[Broker]]
between = pytest.mark.parametrize(
    "interlude", [nothing, restarted, sealed, sealed_and_restarted, restarted_and_sealed]
)


async def everything(broker: Broker, topic: str) -> list[Message]:
    partitions = (await broker.topic(topic)).partitions
    return [m for p in range(partitions) for m in await broker.read(topic, partition=p, max_messages=100_000)]


def place(receipt: Receipt) -> tuple[int, int, str, int]:
    return receipt.partition, receipt.offset, receipt.message_id, receipt.publish_time_us


# Batches.


async def test_a_message_is_stored_with_all_its_values(broker: Broker) -> None:
    moment = datetime(2024, 5, 6, 7, 8, 9, 10, UTC)
    receipt = await broker.publish(
        "orders",
        b"data",
        key="k",
        attributes={"env": "prod"},
        event_time=moment,
        priority=3,
        ttl_s=1.5,
        deliver_at=moment,
        idempotency_key="i",
    )
    (message,) = await broker.read("orders")
    assert (message.data, message.key, message.attributes) == (b"data", "k", {"env": "prod"})
    assert (message.event_time, message.deliver_at, message.priority) == (moment, moment, 3)
    assert (message.ttl_s, message.idempotency_key, message.id) == (1.5, "i", receipt.message_id)
    assert message.publish_time_us == receipt.publish_time_us


async def test_a_batch_is_split_by_key_keeps_the_order_of_each_key_and_receipts_match_rows(
    broker: Broker,
) -> None:
    await broker.create_topic("orders", partitions=4)
    keys = [f"k-{number % 13}" for number in range(200)]
    data = [f"{number}".encode() for number in range(200)]
    receipts = await broker.publish_batch("orders", data, keys=keys)
    assert [receipt.partition for receipt in receipts] == [partition_of(key, 4) for key in keys]
    by_id = {message.id: message for message in await everything(broker, "orders")}
    assert [by_id[receipt.message_id].data for receipt in receipts] == data
    for partition in range(4):
        read = [int(message.data or b"") for message in await broker.read("orders", partition=partition)]
        assert read == sorted(read), "the order of the batch is kept in every partition"


async def test_a_batch_that_is_split_is_one_atomic_chain(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=4)
    receipts = await broker.publish_batch("orders", [b"x"] * 40, keys=[f"k-{n}" for n in range(40)])
    assert len({receipt.publish_time_us for receipt in receipts}) == 1
    assert broker.state().syncs == 1


async def test_messages_without_a_key_in_a_keyed_batch_go_together(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=8)
    receipts = await broker.publish_batch("orders", [b"x"] * 6, keys=["a", None, "b", None, None, "c"])
    assert len({receipts[row].partition for row in (1, 3, 4)}) == 1


async def test_a_keyless_batch_goes_whole_to_one_partition_and_batches_take_turns(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    homes = []
    for _ in range(6):
        receipts = await broker.publish_batch("orders", [b"x"] * 10)
        assert len({receipt.partition for receipt in receipts}) == 1
        offsets = [receipt.offset for receipt in receipts]
        assert offsets == list(range(offsets[0], offsets[0] + 10))
        homes.append(receipts[0].partition)
    assert homes[:3] == homes[3:]
    assert set(homes) == {0, 1, 2}


async def test_the_columns_of_a_batch_belong_to_their_messages(broker: Broker) -> None:
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    await broker.create_topic("orders", partitions=4)
    receipts = await broker.publish_batch(
        "orders",
        [b"a", None, b"c"],
        keys=["x", "y", "z"],
        attributes=[{"n": "1"}, None, {"n": "3"}],
        event_times=[None, moment, None],
        priorities=[1, None, -1],
    )
    by_id = {message.id: message for message in await everything(broker, "orders")}
    first, second, third = (by_id[receipt.message_id] for receipt in receipts)
    assert (first.attributes, first.priority, first.event_time) == ({"n": "1"}, 1, None)
    assert (second.is_tombstone, second.attributes, second.event_time) == (True, {}, moment)
    assert (third.data, third.key, third.priority) == (b"c", "z", -1)


async def test_times_of_a_batch_are_read_as_those_of_a_single_message(broker: Broker) -> None:
    await broker.publish("orders", b"", event_time=1.5)
    await broker.publish_batch("orders", [b""], event_times=[1.5])
    one, other = await broker.read("orders")
    assert one.event_time == other.event_time
    with pytest.raises(InvalidArgument, match="no time zone"):
        await broker.publish_batch("orders", [b""], event_times=[datetime(2024, 1, 1)])


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
async def test_every_codec_and_durability_gives_the_messages_back(broker: Broker, codec: str) -> None:
    for durability in ("durable", "written", "none"):
        name = f"{codec}.{durability}"
        await broker.create_topic(name, codec=codec, durability=durability)
        await broker.publish_batch(name, [b"abc" * 100] * 50)
        await broker.publish(name, b"one")
    await broker.publish("last", b"durable, so all before it is written")
    for durability in ("durable", "written", "none"):
        found = [message.data for message in await broker.read(f"{codec}.{durability}")]
        assert found == [b"abc" * 100] * 50 + [b"one"]


# Tables.


async def test_an_arrow_table_is_published_by_its_columns(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    table = pa.table(
        {
            "key": ["a", "b", None],
            "data": pa.array([b"1", b"2", b"3"], pa.large_binary()),
            "priority": pa.array([1, None, 3], pa.int32()),
            "attributes": pa.array([[("e", "p")], None, []], pa.map_(pa.string(), pa.string())),
        }
    )
    receipts = await broker.publish_table("orders", table)
    by_id = {message.id: message for message in await everything(broker, "orders")}
    first, second, third = (by_id[receipt.message_id] for receipt in receipts)
    assert (first.key, first.data, first.priority, first.attributes) == ("a", b"1", 1, {"e": "p"})
    assert (second.key, second.priority, second.attributes) == ("b", 0, {})
    assert (third.key, third.data, third.priority) == (None, b"3", 3)


async def test_a_chunked_table_and_a_record_batch_are_taken_in_order(broker: Broker) -> None:
    chunked = pa.table({"data": pa.chunked_array([[b"1", b"2"], [b"3"], [b"4"]])})
    receipts = await broker.publish_table("orders", chunked)
    assert [receipt.offset for receipt in receipts] == [0, 1, 2, 3]
    await broker.publish_table("orders", pa.record_batch({"data": [b"5"]}))
    assert [message.data for message in await broker.read("orders")] == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_big_table_is_split_and_its_receipts_are_those_of_its_rows(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2, durability="written")
    count, size = 300, 100_000
    assert count * size > 3 * BATCH_BYTES_MAX
    data = [number.to_bytes(4, "big") * (size // 4) for number in range(count)]
    receipts = await broker.publish_table("orders", pa.table({"data": data}))
    assert len(receipts) == count
    batches = [b for p in (0, 1) for b in await broker.read_batches("orders", partition=p, max_bytes=1 << 30)]
    assert len(batches) >= 4
    assert max(batch.nbytes for batch in batches) < BATCH_BYTES_MAX * 1.1
    for row in (0, 1, 99, 150, 299):
        receipt = receipts[row]
        (message,) = await broker.read(
            "orders", partition=receipt.partition, offset=receipt.offset, max_messages=1
        )
        assert message.data == data[row]


# Idempotency keys.


async def test_a_repeated_key_returns_the_first_receipt_and_stores_nothing(broker: Broker) -> None:
    first = await broker.publish("orders", b"1", idempotency_key="i")
    again = await broker.publish("orders", b"2", idempotency_key="i")
    assert place(again) == place(first)
    assert (first.is_duplicate, again.is_duplicate) == (False, True)
    assert [message.data for message in await broker.read("orders")] == [b"1"]


async def test_a_key_counts_for_its_topic_only(broker: Broker) -> None:
    assert not (await broker.publish("a", b"", idempotency_key="i")).is_duplicate
    assert not (await broker.publish("b", b"", idempotency_key="i")).is_duplicate


async def test_repeats_inside_a_batch_share_the_first_ones_receipt(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=4)
    receipts = await broker.publish_batch(
        "orders",
        [b"1", b"2", b"3", b"4", b"5"],
        keys=["a", "b", "c", "d", "e"],
        idempotency_keys=["i", "j", "i", None, "i"],
    )
    assert [receipt.is_duplicate for receipt in receipts] == [False, False, True, False, True]
    assert place(receipts[0]) == place(receipts[2]) == place(receipts[4])
    assert sorted(message.data or b"" for message in await everything(broker, "orders")) == [b"1", b"2", b"4"]


async def test_repeats_across_batches_store_only_what_is_new(broker: Broker) -> None:
    first = await broker.publish_batch("orders", [b"1", b"2"], idempotency_keys=["i", "j"])
    second = await broker.publish_batch("orders", [b"3", b"4", b"5"], idempotency_keys=["j", "k", None])
    assert [receipt.is_duplicate for receipt in second] == [True, False, False]
    assert place(second[0]) == place(first[1])
    assert [receipt.offset for receipt in second] == [1, 2, 3]
    assert [message.data for message in await broker.read("orders")] == [b"1", b"2", b"4", b"5"]


async def test_a_batch_of_repeats_alone_writes_nothing(broker: Broker) -> None:
    await broker.publish_batch("orders", [b"1", b"2"], idempotency_keys=["i", "j"])
    before = broker.state().syncs
    again = await broker.publish_batch("orders", [b"2", b"1"], idempotency_keys=["j", "i"])
    assert [receipt.offset for receipt in again] == [1, 0]
    assert broker.state().syncs == before


async def test_the_same_key_in_flight_many_times_is_stored_once(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=4)
    calls = [broker.publish("orders", b"%d" % n, key=f"k{n}", idempotency_key="i") for n in range(20)]
    receipts = await asyncio.gather(*calls)
    assert sum(not receipt.is_duplicate for receipt in receipts) == 1
    assert len({place(receipt) for receipt in receipts}) == 1
    assert len(await everything(broker, "orders")) == 1


async def test_overlapping_batches_in_flight_store_each_key_once(broker: Broker) -> None:
    batches = [[f"i{n}" for n in range(start, start + 10)] for start in (0, 5, 3, 8)]
    calls = [broker.publish_batch("orders", [b"x"] * 10, idempotency_keys=keys) for keys in batches]
    results = await asyncio.gather(*calls)
    places: dict[str, set[Any]] = {}
    for keys, receipts in zip(batches, results, strict=True):
        for key, receipt in zip(keys, receipts, strict=True):
            places.setdefault(key, set()).add(place(receipt))
    assert all(len(found) == 1 for found in places.values())
    assert len(await broker.read("orders")) == len(places) == 18


@between
async def test_a_repeated_key_is_known_whatever_happened_meanwhile(
    tmp_path: Path, interlude: Interlude
) -> None:
    broker = await open_broker(tmp_path)
    await broker.create_topic("orders", partitions=3)
    keys = [f"k{n}" for n in range(30)]
    ids = [f"i{n}" if n % 3 else None for n in range(30)]
    first = await broker.publish_batch("orders", [b"x"] * 30, keys=keys, idempotency_keys=ids)
    broker = await interlude(broker, tmp_path)
    again = await broker.publish_batch("orders", [b"y"] * 30, keys=keys, idempotency_keys=ids)
    for row in range(30):
        assert again[row].is_duplicate == (ids[row] is not None)
        assert (place(again[row]) == place(first[row])) == (ids[row] is not None)
    assert len(await everything(broker, "orders")) == 40
    await broker.close()


async def test_a_key_is_forgotten_when_its_window_has_passed(tmp_path: Path) -> None:
    clock = HandClock()
    broker = await open_broker(tmp_path, clock)
    await broker.create_topic("orders", dedupe_window_s=10)
    first = await broker.publish("orders", b"", idempotency_key="i")
    clock.seconds += 9.999
    assert (await broker.publish("orders", b"", idempotency_key="i")).is_duplicate
    clock.seconds += 0.002
    later = await broker.publish("orders", b"", idempotency_key="i")
    assert (later.is_duplicate, later.offset) == (False, first.offset + 1)
    await broker.close()


async def test_the_window_counts_from_the_message_also_after_a_restart(tmp_path: Path) -> None:
    clock = HandClock()
    broker = await open_broker(tmp_path, clock)
    await broker.create_topic("orders", dedupe_window_s=10)
    await broker.publish("orders", b"", idempotency_key="old")
    clock.seconds += 6
    await broker.publish("orders", b"", idempotency_key="new")
    await broker.seal()
    await broker.close()
    clock.seconds += 5
    broker = await open_broker(tmp_path, clock)
    assert not (await broker.publish("orders", b"", idempotency_key="old")).is_duplicate
    assert (await broker.publish("orders", b"", idempotency_key="new")).is_duplicate
    await broker.close()


async def test_a_changed_window_counts_at_once(tmp_path: Path) -> None:
    clock = HandClock()
    async with await open_broker(tmp_path, clock) as broker:
        await broker.create_topic("orders", dedupe_window_s=100)
        await broker.publish("orders", b"", idempotency_key="i")
        clock.seconds += 50
        await broker.update_topic("orders", dedupe_window_s=10)
        assert not (await broker.publish("orders", b"", idempotency_key="i")).is_duplicate


async def test_a_full_window_refuses_new_keys_and_still_knows_the_old(tmp_path: Path) -> None:
    async with await open_broker(tmp_path, keys_max=3) as broker:
        await broker.publish_batch("orders", [b"x"] * 3, idempotency_keys=["a", "b", "c"])
        with pytest.raises(DedupeWindowFull):
            await broker.publish_batch("orders", [b"x"] * 2, idempotency_keys=["c", "d"])
        assert (await broker.publish("orders", b"x", idempotency_key="a")).is_duplicate
        await broker.publish("orders", b"without a key")
        assert len(await broker.read("orders")) == 4


# Producers.


async def test_a_producer_counts_its_messages_by_topic(broker: Broker) -> None:
    producer = await broker.producer("shop")
    assert await producer.next_sequence("a") == 0
    await producer.publish_batch("a", [b"1", b"2", b"3"])
    await producer.publish("a", b"4")
    assert await producer.next_sequence("a") == 4
    assert await producer.next_sequence("b") == 0
    found = await broker.read("a")
    assert [message.sequence for message in found] == [0, 1, 2, 3]
    assert {message.producer_id for message in found} == {producer.id}


async def test_a_producer_may_start_at_its_own_position(broker: Broker) -> None:
    producer = await broker.producer("shop")
    await producer.publish_batch("a", [b"1", b"2"], sequence=4711)
    assert await producer.next_sequence("a") == 4713
    assert [message.sequence for message in await broker.read("a")] == [4711, 4712]


@between
async def test_a_repeated_request_returns_the_first_receipts_whatever_happened_meanwhile(
    tmp_path: Path, interlude: Interlude
) -> None:
    broker = await open_broker(tmp_path)
    await broker.create_topic("orders", partitions=3)
    producer = await broker.producer("shop")
    keys = [f"k{n % 7}" for n in range(20)]
    first = await producer.publish_batch("orders", [b"x"] * 20, keys=keys, sequence=100)
    single = await producer.publish("orders", b"y", key="z", sequence=120)
    broker = await interlude(broker, tmp_path)
    producer = await broker.producer("shop")
    assert await producer.next_sequence("orders") == 121
    again = await producer.publish_batch("orders", [b"x"] * 20, keys=keys, sequence=100)
    assert [place(receipt) for receipt in again] == [place(receipt) for receipt in first]
    assert all(receipt.is_duplicate for receipt in again)
    assert place(await producer.publish("orders", b"y", key="z", sequence=120)) == place(single)
    await producer.publish("orders", b"new", sequence=121)
    assert len(await everything(broker, "orders")) == 22
    await broker.close()


async def test_sequences_of_a_split_batch_are_kept_with_their_messages(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=4)
    producer = await broker.producer("shop")
    data = [b"%d" % number for number in range(50, 90)]
    await producer.publish_batch("orders", data, keys=[f"k{n}" for n in range(40)], sequence=50)
    await broker.seal()
    for message in await everything(broker, "orders"):
        assert message.sequence == int(message.data or b"")


async def test_a_gap_is_refused_and_changes_nothing(broker: Broker) -> None:
    producer = await broker.producer("shop")
    await producer.publish("orders", b"", sequence=0)
    with pytest.raises(SequenceGap) as caught:
        await producer.publish("orders", b"", sequence=2)
    assert caught.value.details == {"expected": 1}
    await producer.publish("orders", b"", sequence=1)
    assert len(await broker.read("orders")) == 2


async def test_a_request_that_only_overlaps_is_refused(broker: Broker) -> None:
    producer = await broker.producer("shop")
    await producer.publish_batch("orders", [b""] * 5, sequence=0)
    with pytest.raises(SequenceTooOld):
        await producer.publish_batch("orders", [b""] * 5, sequence=3)
    with pytest.raises(SequenceTooOld):
        await producer.publish_batch("orders", [b""] * 4, sequence=0)


async def test_only_the_latest_requests_are_remembered(tmp_path: Path) -> None:
    async with await open_broker(tmp_path, producer_requests_max=3) as broker:
        producer = await broker.producer("shop")
        for sequence in range(5):
            await producer.publish("orders", b"", sequence=sequence)
        assert (await producer.publish("orders", b"", sequence=2)).is_duplicate
        with pytest.raises(SequenceTooOld):
            await producer.publish("orders", b"", sequence=1)


@pytest.mark.parametrize("interlude", [nothing, restarted])
async def test_a_producer_whose_name_was_opened_again_is_fenced(tmp_path: Path, interlude: Interlude) -> None:
    broker = await open_broker(tmp_path)
    old = await broker.producer("shop")
    await old.publish("orders", b"1")
    broker = await interlude(broker, tmp_path)
    new = await broker.producer("shop")
    assert (new.id, new.epoch > old.epoch) == (old.id, True)
    if interlude is nothing:
        with pytest.raises(ProducerFenced):
            await old.publish("orders", b"2")
    await new.publish("orders", b"3")
    assert [message.data for message in await broker.read("orders")] == [b"1", b"3"]
    await broker.close()


async def test_producers_of_other_names_do_not_meet(broker: Broker) -> None:
    one, other = await broker.producer("one"), await broker.producer("other")
    assert one.id != other.id
    await one.publish("orders", b"", sequence=0)
    assert not (await other.publish("orders", b"", sequence=0)).is_duplicate
    assert repr(one) == f"<Producer 'one' id={one.id} epoch={one.epoch}>"


async def test_two_tasks_share_a_producer(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    producer = await broker.producer("shop")

    async def publish(name: str) -> None:
        for number in range(30):
            await producer.publish("orders", b"%d" % number, key=name)

    await asyncio.gather(publish("a"), publish("b"))
    found = await everything(broker, "orders")
    assert sorted(message.sequence or 0 for message in found) == list(range(60))
    for name in ("a", "b"):
        own = [message for message in found if message.key == name]
        assert [int(message.data or b"") for message in own] == list(range(30))


async def test_the_same_request_in_flight_twice_is_stored_once(broker: Broker) -> None:
    producer = await broker.producer("shop")
    calls = [producer.publish_batch("orders", [b"x"] * 3, sequence=0) for _ in range(5)]
    results = await asyncio.gather(*calls)
    assert len({tuple(place(receipt) for receipt in receipts) for receipts in results}) == 1
    assert sum(not receipts[0].is_duplicate for receipts in results) == 1
    assert len(await broker.read("orders")) == 3


async def test_a_request_in_flight_is_not_repeated_by_one_of_another_length(broker: Broker) -> None:
    producer = await broker.producer("shop")
    first, second = await asyncio.gather(
        producer.publish_batch("orders", [b"x"] * 3, sequence=0),
        producer.publish_batch("orders", [b"x"] * 2, sequence=0),
        return_exceptions=True,
    )
    assert len(first) == 3
    assert isinstance(second, SequenceTooOld)


async def test_requests_in_flight_one_after_the_other_are_all_new(broker: Broker) -> None:
    producer = await broker.producer("shop")
    calls = [producer.publish("orders", b"%d" % n, sequence=n) for n in range(50)]
    receipts = await asyncio.gather(*calls)
    assert [receipt.offset for receipt in receipts] == list(range(50))
    assert not any(receipt.is_duplicate for receipt in receipts)


async def test_a_producer_that_gives_up_waiting_can_ask_again(broker: Broker) -> None:
    await broker.create_topic("orders")
    producer = await broker.producer("shop")
    task = asyncio.create_task(producer.publish("orders", b"x", sequence=0))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    receipt = await asyncio.wait_for(producer.publish("orders", b"x", sequence=0), 20)
    assert receipt.offset == 0
    assert len(await broker.read("orders")) == 1


async def test_sequences_and_idempotency_keys_exclude_each_other(broker: Broker) -> None:
    producer = await broker.producer("shop")
    with pytest.raises(InvalidArgument, match="exclude each other"):
        await producer.publish("orders", b"", idempotency_key="i")


@pytest.mark.parametrize("sequence", [-1, 1.5, "1"])
async def test_a_sequence_is_a_whole_number_from_zero(broker: Broker, sequence: Any) -> None:
    producer = await broker.producer("shop")
    with pytest.raises(InvalidArgument, match="a sequence is a whole number"):
        await producer.publish("orders", b"", sequence=sequence)
