"""Messages published one at a time: they share batches, keep their order, and fail together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.errors import BrokerClosed, JournalFrozen, TopicNotFound
from sparrow.model.message import Receipt
from sparrow.model.settings import Settings
from sparrow.store.disk import Disk
from sparrow.store.entry import Header, Kind, Scan
from sparrow.store.local import LocalStore

TASKS = 64


class HeldDisk(Disk):
    """Syncs wait while it is held, and fail when a test says so."""

    def __init__(self) -> None:
        self._may_pass = threading.Event()
        self._may_pass.set()
        self.arrived = threading.Event()
        self.fails = False

    def hold(self) -> None:
        self.arrived.clear()
        self._may_pass.clear()

    def release(self) -> None:
        self._may_pass.set()

    def sync(self, descriptor: int) -> None:
        self.arrived.set()
        assert self._may_pass.wait(20)
        if self.fails:
            raise OSError(5, "Input/output error")
        super().sync(descriptor)


class Bench:
    """A broker on a disk that a test holds."""

    def __init__(self, broker: Broker, disk: HeldDisk, data: Path) -> None:
        self.broker = broker
        self.disk = disk
        self.data = data

    def entries(self) -> list[Header]:
        found: list[Header] = []
        for path in sorted((self.data / "journal").glob("*.wal")):
            raw = path.read_bytes()
            items = Scan(raw, pa.py_buffer(raw), int(path.stem), len(raw))
            found += [item for item in items if isinstance(item, Header) and item.kind == Kind.BATCH]
        return found

    async def until_a_sync_waits(self) -> None:
        assert await asyncio.to_thread(self.disk.arrived.wait, 20)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    disk, settings = HeldDisk(), Settings(data=str(tmp_path / "data"))
    store = await LocalStore.open(
        tmp_path / "data", journal=settings.journal, lake=settings.lake, now_us=lambda: 1, disk=disk
    )
    broker = await Broker.open(settings, store=store)
    yield Bench(broker, disk, tmp_path / "data")
    disk.fails = False
    disk.release()
    await broker.close()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_many_tasks_share_few_log_entries_and_fewer_syncs(bench: Bench) -> None:
    await bench.broker.create_topic("orders")

    async def publish(task: int) -> None:
        for number in range(20):
            await bench.broker.publish("orders", b"%d-%d" % (task, number))

    before = bench.broker.state().syncs
    await asyncio.gather(*(publish(task) for task in range(TASKS)))
    entries = bench.entries()
    assert sum(entry.record_count for entry in entries) == TASKS * 20
    assert len(entries) <= 60, "64 tasks with 20 messages each are some 20 rounds"
    assert bench.broker.state().syncs - before <= 60


async def test_what_gathers_while_one_batch_is_on_its_way_goes_as_the_next(bench: Bench) -> None:
    await bench.broker.publish("orders", b"warm")
    bench.disk.hold()
    first = asyncio.create_task(bench.broker.publish("orders", b"first"))
    await bench.until_a_sync_waits()
    others = [asyncio.create_task(bench.broker.publish("orders", b"%d" % n)) for n in range(TASKS)]
    await turns()
    assert not any(task.done() for task in [first, *others])
    bench.disk.release()
    receipts = await asyncio.gather(first, *others)
    assert [entry.record_count for entry in bench.entries()] == [1, 1, TASKS]
    assert [receipt.offset for receipt in receipts] == list(range(1, TASKS + 2))


async def test_a_lone_message_waits_for_nobody(bench: Bench) -> None:
    async with asyncio.timeout(20):
        receipt = await bench.broker.publish("orders", b"alone")
    assert receipt.offset == 0


async def test_receipts_name_the_place_of_their_own_message(bench: Bench) -> None:
    await bench.broker.create_topic("orders", partitions=4)
    calls = [bench.broker.publish("orders", b"%d" % n, key=f"k{n % 9}") for n in range(200)]
    receipts: list[Receipt] = await asyncio.gather(*calls)
    assert len({receipt.message_id for receipt in receipts}) == 200
    for number, receipt in enumerate(receipts):
        (message,) = await bench.broker.read(
            "orders", partition=receipt.partition, offset=receipt.offset, max_messages=1
        )
        assert (message.data, message.id) == (b"%d" % number, receipt.message_id)


async def test_the_order_of_each_key_is_the_order_of_publishing(bench: Bench) -> None:
    await bench.broker.create_topic("orders", partitions=3)

    async def publish(key: str) -> None:
        for number in range(0, 40, 4):
            await asyncio.gather(
                *(bench.broker.publish("orders", b"%d" % n, key=key) for n in range(number, number + 4))
            )

    await asyncio.gather(*(publish(f"k{n}") for n in range(10)))
    found: dict[str | None, list[int]] = {}
    for partition in range(3):
        for message in await bench.broker.read("orders", partition=partition):
            found.setdefault(message.key, []).append(int(message.data or b""))
    assert found == {f"k{n}": list(range(40)) for n in range(10)}


async def test_large_messages_are_cut_into_batches_in_order(bench: Bench) -> None:
    await bench.broker.publish("orders", b"warm")
    bench.disk.hold()
    first = asyncio.create_task(bench.broker.publish("orders", b"first"))
    await bench.until_a_sync_waits()
    data = [bytes([n]) * 3_000_000 for n in range(8)]
    others = [asyncio.create_task(bench.broker.publish("orders", one)) for one in data]
    await turns()
    bench.disk.release()
    await first
    receipts = await asyncio.gather(*others)
    assert [receipt.offset for receipt in receipts] == list(range(2, 10))
    assert [message.data for message in await bench.broker.read("orders", offset=2)] == data
    assert max(entry.record_count for entry in bench.entries()) <= 4


async def test_topics_of_other_durability_do_not_wait_for_each_others_batches(bench: Bench) -> None:
    await bench.broker.create_topic("safe")
    await bench.broker.create_topic("fast", durability="none")
    await bench.broker.publish("safe", b"warm")
    bench.disk.hold()
    safe = asyncio.create_task(bench.broker.publish("safe", b""))
    await bench.until_a_sync_waits()
    fast = asyncio.create_task(bench.broker.publish("fast", b""))
    await turns()
    bench.disk.release()
    receipts = await asyncio.gather(safe, fast)
    assert [receipt.offset for receipt in receipts] == [1, 0]
    assert [entry.record_count for entry in bench.entries()][:2] == [1, 1]


async def test_an_error_reaches_every_waiter(bench: Bench) -> None:
    await bench.broker.create_topic("orders", partitions=4)
    await bench.broker.publish("orders", b"warm")
    bench.disk.hold()
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(bench.broker.publish("orders", b"", key=f"k{n}")) for n in range(TASKS)
    ]
    await bench.until_a_sync_waits()
    tasks += [asyncio.create_task(bench.broker.publish("orders", b"", key=f"k{n}")) for n in range(TASKS)]
    await turns()
    bench.disk.fails = True
    bench.disk.release()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert len(outcomes) == 2 * TASKS
    assert all(isinstance(outcome, JournalFrozen) for outcome in outcomes)


async def test_messages_that_gather_for_a_topic_that_is_deleted_are_refused(bench: Bench) -> None:
    await bench.broker.create_topic("doomed")
    await bench.broker.create_topic("kept")
    await bench.broker.publish("kept", b"warm")
    bench.disk.hold()
    first = asyncio.create_task(bench.broker.publish("kept", b"first"))
    await bench.until_a_sync_waits()
    doomed = [asyncio.create_task(bench.broker.publish("doomed", b"")) for _ in range(5)]
    kept = [asyncio.create_task(bench.broker.publish("kept", b"")) for _ in range(5)]
    await turns()
    await bench.broker.delete_topic("doomed")
    bench.disk.release()
    await first
    for outcome in await asyncio.gather(*doomed, return_exceptions=True):
        assert isinstance(outcome, TopicNotFound)
    assert [receipt.offset for receipt in await asyncio.gather(*kept)] == [2, 3, 4, 5, 6]


async def test_a_publisher_that_gives_up_does_not_disturb_its_batch(bench: Bench) -> None:
    await bench.broker.publish("orders", b"warm")
    bench.disk.hold()
    tasks = [asyncio.create_task(bench.broker.publish("orders", b"%d" % n)) for n in range(4)]
    await bench.until_a_sync_waits()
    tasks[1].cancel()
    await turns()
    bench.disk.release()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert [outcomes[n].offset for n in (0, 2, 3)] == [1, 3, 4]


async def test_closing_answers_everybody_and_keeps_what_it_receipted(tmp_path: Path) -> None:
    broker = await Broker.open(Settings(data=str(tmp_path / "data")))
    await broker.create_topic("orders")
    tasks = [asyncio.create_task(broker.publish("orders", b"%d" % n)) for n in range(200)]
    await asyncio.sleep(0)
    await broker.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    receipts = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
    assert all(isinstance(outcome, Receipt | BrokerClosed) for outcome in outcomes)
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as again:
        stored = {message.id for message in await again.read("orders")}
    assert {receipt.message_id for receipt in receipts} <= stored
