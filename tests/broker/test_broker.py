"""The broker as a whole: its life, its health, and what it says after its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.model.errors import BrokerClosed, DataDirectoryLocked
from sparrow.model.health import Status
from sparrow.model.settings import Settings


async def open_broker(path: Path) -> Broker:
    return await Broker.open(Settings(data=str(path / "data")))


# Life.


async def test_a_broker_makes_its_directory_and_keeps_it(tmp_path: Path) -> None:
    async with await open_broker(tmp_path / "deep" / "er") as broker:
        await broker.publish("orders", b"x")
    async with await open_broker(tmp_path / "deep" / "er") as broker:
        assert [message.data for message in await broker.read("orders")] == [b"x"]


async def test_a_directory_that_is_open_cannot_be_opened_again_until_it_is_closed(tmp_path: Path) -> None:
    broker = await open_broker(tmp_path)
    with pytest.raises(DataDirectoryLocked):
        await open_broker(tmp_path)
    await broker.close()
    await (await open_broker(tmp_path)).close()


async def test_closing_twice_is_allowed(tmp_path: Path) -> None:
    broker = await open_broker(tmp_path)
    await broker.close()
    await broker.close()


async def test_leaving_the_block_closes_also_after_an_error(tmp_path: Path) -> None:
    async def fail() -> None:
        async with await open_broker(tmp_path) as broker:
            await broker.publish("orders", b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with await open_broker(tmp_path) as broker:
        assert (await broker.bounds("orders")).end_offset == 1


async def test_a_broker_leaves_no_task_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with await open_broker(tmp_path) as broker:
        await broker.publish("orders", b"x")
        await broker.seal()
    assert asyncio.all_tasks() == before


async def test_aopen_gives_the_same_broker(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data") as broker:
        receipt = await broker.publish("orders", b"x")
        assert receipt.offset == 0
    with pytest.raises(BrokerClosed):
        await broker.publish("orders", b"x")


def test_open_gives_the_same_verbs_to_blocking_code(tmp_path: Path) -> None:
    with sparrow.open(tmp_path / "data") as broker:
        broker.create_topic("orders", partitions=2)
        receipts = broker.publish_batch("orders", [b"a", b"b"], keys=["x", "x"])
        found = broker.read("orders", partition=receipts[0].partition)
        assert [message.data for message in found] == [b"a", b"b"]
        assert broker.seal() == 2
    with pytest.raises(BrokerClosed):
        broker.publish("orders", b"c")


# After the end.


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("create_topic", ("x",)),
        ("update_topic", ("orders",)),
        ("delete_topic", ("orders",)),
        ("publish", ("orders", b"")),
        ("publish_batch", ("orders", [b""])),
        ("publish_table", ("orders", pa.table({"data": [b""]}))),
        ("producer", ("shop",)),
        ("seal", ()),
        ("apply_retention", ()),
        ("read", ("orders",)),
        ("read_batches", ("orders",)),
        ("offset_at", ("orders", 0)),
        ("bounds", ("orders",)),
    ],
)
async def test_a_closed_broker_refuses_every_verb_with_the_type(
    tmp_path: Path, verb: str, arguments: tuple[Any, ...]
) -> None:
    broker = await open_broker(tmp_path)
    await broker.publish("orders", b"sealed")
    await broker.seal()
    await broker.close()
    with pytest.raises(BrokerClosed):
        await getattr(broker, verb)(*arguments)


async def test_a_producer_of_a_closed_broker_is_refused_with_the_type(tmp_path: Path) -> None:
    broker = await open_broker(tmp_path)
    await broker.create_topic("orders")
    producer = await broker.producer("shop")
    await broker.close()
    with pytest.raises(BrokerClosed):
        await producer.publish("orders", b"x")


# What it says of itself.


async def test_a_broker_prints_its_directory_and_state(tmp_path: Path) -> None:
    broker = await open_broker(tmp_path)
    path = str(tmp_path / "data")
    assert repr(broker) == f"<Broker {path!r} 0 topics>"
    await broker.create_topic("orders")
    assert repr(broker) == f"<Broker {path!r} 1 topics>"
    await broker.close()
    assert repr(broker) == f"<Broker {path!r} closed>"


async def test_a_broker_that_is_well_says_so(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        await broker.publish("orders", b"x")
        health = broker.health()
        assert (health.status, health.is_ready, health.recommendations) == (Status.HEALTHY, True, ())
        assert {"journal", "data", "maintenance"} <= {check.name for check in health.checks}
        assert all(check.status is Status.HEALTHY for check in health.checks)


async def test_a_closed_broker_is_not_ready(tmp_path: Path) -> None:
    broker = await open_broker(tmp_path)
    await broker.close()
    assert not broker.health().is_ready


async def test_the_state_counts_what_is_kept(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        await broker.publish_batch("orders", [b"x" * 100] * 10)
        hot = broker.state()
        assert (hot.is_writable, hot.complaint, hot.journal_files, hot.segments) == (True, None, 1, 0)
        assert hot.journal_bytes > 1000
        assert hot.syncs >= 1
        await broker.seal()
        cold = broker.state()
        assert (cold.segments, cold.lake_bytes > 0) == (1, True)
        assert cold.pending_bytes == 0
        assert cold.damages == ()


async def test_a_new_directory_was_recovered_from_nothing(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        report = broker.recovery
        assert (report.journal_files, report.messages, report.segments, report.damages) == (0, 0, 0, ())


async def test_the_recovery_says_what_it_found(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        await broker.publish_batch("orders", [b"x"] * 10)
        await broker.seal()
        await broker.publish_batch("orders", [b"x"] * 5)
    async with await open_broker(tmp_path) as broker:
        report = broker.recovery
        assert (report.messages, report.segments, report.torn_bytes, report.damages) == (5, 1, 0, ())
        assert report.entries >= 2
        assert report.seconds > 0
