"""Sequences at the door (B5): held out of order, stored in order, gaps given up after their time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sparrow.broker.broker import Broker
from sparrow.model.errors import InvalidArgument, SequenceTooOld
from sparrow.model.settings import Settings


async def test_messages_that_arrive_out_of_order_are_stored_in_order(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        producer = await broker.producer("sensor", hold_gaps_s=30)
        order = [0, 3, 2, 1, 4]
        receipts = await asyncio.gather(
            *(producer.publish("readings", b"%d" % number, sequence=number) for number in order)
        )
        assert [message.data for message in await broker.read("readings")] == [b"0", b"1", b"2", b"3", b"4"]
        assert [receipt.offset for receipt in receipts] == order


async def test_batches_are_held_by_their_first_number(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        producer = await broker.producer("sensor", hold_gaps_s=30)
        await producer.publish("readings", b"0", sequence=0)
        await asyncio.gather(
            producer.publish_batch("readings", [b"3", b"4"], sequence=3),
            producer.publish_batch("readings", [b"1", b"2"], sequence=1),
        )
        assert [message.data for message in await broker.read("readings")] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_gap_is_given_up_after_its_time_and_its_number_refused_afterwards(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        producer = await broker.producer("sensor", hold_gaps_s=0.05)
        await producer.publish("readings", b"0", sequence=0)
        await producer.publish("readings", b"2", sequence=2)
        with pytest.raises(SequenceTooOld):
            await producer.publish("readings", b"1", sequence=1)
        assert [message.data for message in await broker.read("readings")] == [b"0", b"2"]


async def test_a_repeat_of_a_stored_or_held_number_is_stored_once(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        producer = await broker.producer("sensor", hold_gaps_s=30)
        first = await producer.publish("readings", b"0", sequence=0)
        again = await producer.publish("readings", b"0", sequence=0)
        held = [asyncio.create_task(producer.publish("readings", b"2", sequence=2)) for _ in range(2)]
        await producer.publish("readings", b"1", sequence=1)
        twice = await asyncio.gather(*held)
        assert (again.offset, again.is_duplicate) == (first.offset, True)
        assert twice[0].offset == twice[1].offset == 2
        assert [message.data for message in await broker.read("readings")] == [b"0", b"1", b"2"]


async def test_order_goes_on_after_a_restart_where_the_log_ends(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        producer = await broker.producer("sensor", hold_gaps_s=30)
        await producer.publish("readings", b"7", sequence=7)
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        producer = await broker.producer("sensor", hold_gaps_s=30)
        await asyncio.gather(
            producer.publish("readings", b"9", sequence=9), producer.publish("readings", b"8", sequence=8)
        )
        assert [message.data for message in await broker.read("readings")] == [b"7", b"8", b"9"]


@pytest.mark.parametrize("hold_gaps_s", [0, -1, 3601, "5"])
async def test_a_time_out_of_range_is_refused_before_the_producer_is_opened(
    tmp_path: Path, hold_gaps_s: float
) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        await broker.producer("sensor")
        with pytest.raises(InvalidArgument, match="hold_gaps_s"):
            await broker.producer("sensor", hold_gaps_s=hold_gaps_s)
        assert (await broker.producer("sensor")).epoch == 1
