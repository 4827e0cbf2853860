"""The store on a disk that fails: what freezes, what is refused, what goes on, and that nothing is lost.

Faults come from ``sparrow.testing.disk``. A crash is power loss before the n-th call to the disk, for every
n until the operation passes; the directory is then opened as the machine would find it.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.errors import JournalFrozen, SparrowError, StorageError, StorageFull
from sparrow.model.health import Status
from sparrow.model.message import StreamId
from sparrow.model.settings import JournalSettings, Settings
from sparrow.store.entry import Scan
from sparrow.store.journalfile import file_name
from sparrow.store.local import LocalStore
from sparrow.testing.disk import FaultyDisk, PowerLost
from sparrow.testing.store import JOURNAL, Contents, append, contents, create_topic, draft, open_store

ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
QUICK_ROTATION = msgspec.structs.replace(JOURNAL, file_bytes=4096)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Memory, where there is some: these tests bring their own faults and need no real disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


def some(text: str, count: int = 5) -> list[bytes]:
    return [f"{text}-{number}".encode() for number in range(count)]


async def open_broker(data: Path, disk: FaultyDisk, journal: JournalSettings = JOURNAL) -> Broker:
    store = await open_store(data, disk, journal=journal)
    return await Broker.open(Settings(data=str(data), journal=journal), store=store)


async def payloads(broker: Broker, topic: str) -> list[bytes | None]:
    return [message.data for message in await broker.read(topic)]


# A write or a sync fails.


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", ["pwritev", "sync"])
async def test_a_failed_write_or_sync_freezes_the_journal_and_is_never_tried_again(
    tmp_path: Path, operation: str, error: int
) -> None:
    disk = FaultyDisk()
    broker = await open_broker(tmp_path / "data", disk)
    await broker.publish_batch("orders", some("kept"))
    disk.fail(operation, error=error)
    with pytest.raises(JournalFrozen):
        await broker.publish_batch("orders", some("doubtful"))
    calls = disk.calls.copy()
    for _ in range(3):
        with pytest.raises(JournalFrozen) as refused:
            await broker.publish("orders", b"refused")
        assert refused.value.code == "JOURNAL_FROZEN"
        assert refused.value.hint
    assert disk.calls == calls, "a frozen journal leaves the disk alone"
    assert await payloads(broker, "orders") == some("kept")
    assert broker.health().status is Status.CRITICAL
    assert not broker.health().is_ready
    await broker.close()

    again = await open_broker(tmp_path / "data", FaultyDisk())
    found = await payloads(again, "orders")
    assert found in (some("kept"), some("kept") + some("doubtful"))
    receipt = await again.publish("orders", b"next")
    assert receipt.offset == len(found)
    assert again.health().status is Status.HEALTHY
    await again.close()


async def test_what_a_failed_sync_left_in_doubt_is_whole_or_gone_after_power_loss(tmp_path: Path) -> None:
    for seed in range(12):
        data = tmp_path / f"data-{seed}"
        disk = FaultyDisk(data, seed)
        broker = await open_broker(data, disk)
        await broker.publish_batch("orders", some("kept"))
        disk.fail("sync")
        with pytest.raises(JournalFrozen):
            await broker.publish_batch("orders", some("doubtful"))
        disk.crash(tmp_path / f"found-{seed}")
        await _abandon(broker.close)
        again = await open_broker(tmp_path / f"found-{seed}", FaultyDisk())
        assert await payloads(again, "orders") in (some("kept"), some("kept") + some("doubtful"))
        assert again.recovery.damages == ()
        await again.close()


async def test_all_who_wait_are_told_when_the_journal_freezes(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal = msgspec.structs.replace(JOURNAL, pending_bytes_max=4096, group_bytes_max=1024)
    broker = await open_broker(tmp_path / "data", disk, journal)
    await broker.publish("orders", b"kept")
    disk.fail("sync")
    work = [broker.publish_batch("orders", [b"%d" % number * 500]) for number in range(20)]
    found = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 10)
    assert {type(one) for one in found} == {JournalFrozen}
    await broker.close()


async def test_all_who_wait_are_told_when_the_disk_layer_itself_breaks(tmp_path: Path) -> None:
    disk = FaultyDisk()
    broker = await open_broker(tmp_path / "data", disk)
    await broker.publish("orders", b"kept")
    disk.stop_at(1)
    work = [broker.publish_batch("orders", some(f"lost-{number}")) for number in range(5)]
    found = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 10)
    assert {type(one) for one in found} == {JournalFrozen}
    await asyncio.wait_for(_abandon(broker.close), 10)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", ["truncate", "sync"])
async def test_a_journal_file_that_cannot_be_finished_freezes_the_journal(
    tmp_path: Path, operation: str, error: int
) -> None:
    disk = FaultyDisk()
    store = await open_store(tmp_path / "data", disk)
    topic = await create_topic(store, "orders")
    await append(store, draft(StreamId(topic.id, 0), some("kept")))
    disk.fail(operation, error=error)
    await store.rotate()
    with pytest.raises(JournalFrozen):
        await append(store, draft(StreamId(topic.id, 0), some("refused")))
    before = await contents(store)
    await store.close()
    again = await open_store(tmp_path / "data")
    assert await contents(again) == before
    await again.close()


async def test_short_writes_are_continued(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=3)
    disk.write_short()
    broker = await open_broker(tmp_path / "data", disk, QUICK_ROTATION)
    sent = [some(f"batch-{number}", 30) for number in range(20)]
    for batch in sent:
        await broker.publish_batch("orders", batch)
    await broker.close()
    again = await open_broker(tmp_path / "data", FaultyDisk())
    assert await payloads(again, "orders") == [payload for batch in sent for payload in batch]
    assert again.recovery.damages == ()
    await again.close()


# The disk is full.


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_refuses_publishes_changes_nothing_and_passes(tmp_path: Path, error: int) -> None:
    disk = FaultyDisk()
    broker = await open_broker(tmp_path / "data", disk, QUICK_ROTATION)
    producer = await broker.producer("shop")
    await broker.create_topic("orders")
    await producer.publish_batch("orders", some("first"))
    disk.fail("reserve", error=error, times=None)
    large = [b"x" * 4000]
    for sequence in (5, 5):
        with pytest.raises(StorageFull) as refused:
            await producer.publish_batch("orders", large, sequence=sequence)
        assert refused.value.code == "STORAGE_FULL"
        assert refused.value.hint
    assert broker.health().status is Status.CRITICAL
    assert await payloads(broker, "orders") == some("first")
    disk.heal()
    receipts = await producer.publish_batch("orders", large, sequence=5)
    assert [(one.offset, one.is_duplicate) for one in receipts] == [(5, False)]
    again = await producer.publish_batch("orders", large, sequence=5)
    assert [(one.offset, one.is_duplicate) for one in again] == [(5, True)]
    assert (await producer.publish("orders", b"last", sequence=6)).offset == 6
    assert broker.health().status is Status.HEALTHY
    await broker.close()
    reopened = await open_broker(tmp_path / "data", FaultyDisk())
    assert await payloads(reopened, "orders") == [*some("first"), *large, b"last"]
    assert reopened.recovery.damages == ()
    await reopened.close()


async def test_no_message_passes_an_earlier_one_of_its_producer_that_a_full_disk_refused(
    tmp_path: Path,
) -> None:
    """Also not one that waited for room while the earlier one was refused."""
    disk = FaultyDisk()
    journal = msgspec.structs.replace(QUICK_ROTATION, pending_bytes_max=8192, group_bytes_max=2048)
    broker = await open_broker(tmp_path / "data", disk, journal)
    await broker.create_topic("orders")
    producer = await broker.producer("shop")
    await producer.publish("orders", b"first", sequence=0)
    disk.fail("reserve", error=errno.ENOSPC)  # once: there is space again for whoever comes next
    work = [producer.publish("orders", b"%d" % n * 1500, sequence=n) for n in range(1, 20)]
    found = await asyncio.gather(*work, return_exceptions=True)
    refused = [number for number, one in enumerate(found, 1) if isinstance(one, SparrowError)]
    assert refused, "some must have met the full disk"
    for number in refused:
        await producer.publish("orders", b"%d" % number * 1500, sequence=number)
    read = [message.sequence for message in await broker.read("orders")]
    assert read == list(range(20)), "every sequence once, in order"
    await broker.close()


async def test_a_topic_that_finds_no_space_is_not_half_made(tmp_path: Path) -> None:
    for operation in ("pwritev", "sync", "rename", "sync_directory"):
        disk = FaultyDisk()
        broker = await open_broker(tmp_path / operation, disk)
        disk.fail(operation, error=errno.ENOSPC)
        with pytest.raises(StorageFull):
            await broker.create_topic("orders")
        assert await broker.topics() == []
        await broker.create_topic("orders", partitions=2)
        await broker.publish("orders", b"kept")
        await broker.close()
        again = await open_broker(tmp_path / operation, FaultyDisk())
        assert [(topic.name, topic.partitions) for topic in await again.topics()] == [("orders", 2)]
        await again.close()


async def test_a_topic_whose_change_finds_no_space_stays_as_it_was(tmp_path: Path) -> None:
    disk = FaultyDisk()
    broker = await open_broker(tmp_path / "data", disk)
    before = await broker.create_topic("orders")
    disk.fail("pwritev", error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        await broker.update_topic("orders", partitions=3, retention_s=5)
    assert await broker.topics() == [before]
    await broker.close()
    again = await open_broker(tmp_path / "data", FaultyDisk())
    assert await again.topics() == [before]
    assert (await again.update_topic("orders", partitions=3)).partitions == 3
    await again.close()


SEAL_STEPS = ["sync", "rename", "sync_directory", "reserve", "remove"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", SEAL_STEPS)
async def test_a_seal_that_fails_at_any_step_is_tried_again_and_nothing_is_lost(
    tmp_path: Path, step: str, error: int
) -> None:
    """``reserve`` is the note that follows the catalog's commit: it may need a new journal file."""
    disk = FaultyDisk()
    store = await open_store(tmp_path / "data", disk)
    topic = await create_topic(store, "orders", 2)
    streams = [StreamId(topic.id, partition) for partition in range(2)]
    for number in range(3):
        await append(store, *(draft(stream, some(f"batch-{number}")) for stream in streams))
        await store.rotate()
    disk.fail(step, error=error)
    with suppress(SparrowError, OSError):
        await store.seal((), ())
    disk.heal()
    expected = {stream: list(enumerate(_joined("batch", 3))) for stream in streams}
    assert await contents(store) == expected
    is_frozen = not store.state().is_writable and error == errno.EIO
    if not is_frozen:
        await append(store, *(draft(stream, [b"later"]) for stream in streams))
        expected = {stream: [*rows, (15, b"later")] for stream, rows in expected.items()}
        await store.rotate()
    for _ in range(2):
        with suppress(JournalFrozen):
            await store.seal((), ())
        assert await contents(store) == expected
    await store.close()
    again = await open_store(tmp_path / "data")
    assert await contents(again) == expected
    assert again.recovered.report.damages == ()
    await again.close()


async def test_publishing_goes_on_while_sealing_fails(tmp_path: Path) -> None:
    disk = FaultyDisk()
    broker = await open_broker(tmp_path / "data", disk, QUICK_ROTATION)
    await broker.publish_batch("orders", some("first"))
    disk.fail("rename", error=errno.ENOSPC, times=None)
    sent = [some(f"batch-{number}", 20) for number in range(15)]
    for batch in sent:
        await broker.publish_batch("orders", batch)
    with pytest.raises(OSError):
        await broker.seal()
    assert broker.health().is_ready
    receipt = await broker.publish("orders", b"last")
    assert receipt.offset == 5 + 15 * 20
    disk.heal()
    await broker.seal()
    expected = [*some("first"), *(payload for batch in sent for payload in batch), b"last"]
    assert await payloads(broker, "orders") == expected
    await broker.close()


# Power is lost between any two steps.

Work = Callable[[LocalStore], Awaitable[None]]


async def _abandon(close: Callable[[], Awaitable[None]]) -> None:
    """Frees what a stopped store holds; its directory has been copied before."""
    with suppress(PowerLost, SparrowError, OSError):
        await close()


async def crash_everywhere(
    tmp_path: Path, base: Path, work: Work, check: Callable[[LocalStore, bool], Awaitable[None]]
) -> int:
    """Runs the work on a copy of ``base`` with power loss before every call to the disk, and opens what
    is found; the number of calls that the work makes. ``check`` is told whether the work had finished."""
    for call in itertools.count(1):
        data, found = tmp_path / "data", tmp_path / "found"
        shutil.copytree(base, data)
        disk = FaultyDisk(data, seed=call)
        store = await open_store(data, disk, journal=QUICK_ROTATION)
        disk.stop_at(call)
        is_done = False
        with suppress(PowerLost, SparrowError):
            await work(store)
            is_done = True
        has_stopped = disk.has_stopped
        disk.crash(found)
        await asyncio.wait_for(_abandon(store.close), 10)
        for _ in range(2):  # What the first start leaves, the second must be content with.
            again = await open_store(found, journal=QUICK_ROTATION)
            assert again.recovered.report.damages == (), f"before call {call}"
            await check(again, is_done)
            await again.close()
        shutil.rmtree(data)
        shutil.rmtree(found)
        if not has_stopped:
            return call - 1
    raise AssertionError


async def make_base(base: Path) -> tuple[list[StreamId], Contents]:
    """Two topics with sealed messages, finished journal files and a current one."""
    store = await open_store(base, journal=QUICK_ROTATION)
    topics = [await create_topic(store, name, 2) for name in ("orders", "bills")]
    streams = [StreamId(topic.id, partition) for topic in topics for partition in range(2)]
    for number in range(3):
        await append(store, *(draft(stream, some(f"sealed-{number}")) for stream in streams))
        await store.rotate()
        await store.seal((), ())
    for number in range(3):
        await append(store, *(draft(stream, some(f"hot-{number}")) for stream in streams))
        await store.rotate()
    before = await contents(store)
    await store.close()
    return streams, before


async def test_power_loss_between_any_two_steps_of_sealing_loses_nothing(tmp_path: Path) -> None:
    _, before = await make_base(tmp_path / "base")

    async def work(store: LocalStore) -> None:
        while store.finished_bytes():
            await store.seal((), ())

    async def check(store: LocalStore, is_done: bool) -> None:
        assert await contents(store) == before
        await work(store)
        assert await contents(store) == before
        assert not list((tmp_path / "found").rglob("*.tmp")), "no half-written file is left"

    assert await crash_everywhere(tmp_path, tmp_path / "base", work, check) > 12


async def test_power_loss_between_any_two_steps_of_publishing_keeps_what_was_receipted(
    tmp_path: Path,
) -> None:
    streams, before = await make_base(tmp_path / "base")
    receipted: list[int] = []

    async def work(store: LocalStore) -> None:
        receipted.clear()
        for number in range(5):
            await append(store, *(draft(stream, [b"%d" % number * 700]) for stream in streams[:2]))
            receipted.append(number)

    async def check(store: LocalStore, is_done: bool) -> None:
        found = await contents(store)
        for stream in streams:
            new = [payload[:1] for _, payload in found[stream][len(before[stream]) :]]
            assert found[stream][: len(before[stream])] == before[stream]
            assert [offset for offset, _ in found[stream]] == list(range(len(found[stream])))
            if stream in streams[:2]:
                assert len(receipted) <= len(new) <= len(receipted) + 1
                assert new == [b"%d" % number for number in range(len(new))]
        assert len(found[streams[0]]) == len(found[streams[1]]), "a chain is there whole or not at all"

    assert await crash_everywhere(tmp_path, tmp_path / "base", work, check) > 10


async def test_power_loss_between_any_two_steps_of_dropping_leaves_whole_segments(tmp_path: Path) -> None:
    streams, before = await make_base(tmp_path / "base")

    async def work(store: LocalStore) -> None:
        (topic,) = [topic for topic in store.topics() if topic.name == "orders"]
        await store.drop([one for one in store.segments(topic) if one.first_offset < 10])

    async def check(store: LocalStore, is_done: bool) -> None:
        found = await contents(store)
        for stream in streams:
            is_dropped = stream in streams[:2] and found[stream][0][0] == 10
            assert found[stream] == before[stream][10 if is_dropped else 0 :]
            assert is_dropped or not is_done or stream in streams[2:]
            files = (tmp_path / "found" / "topics").glob(f"*/{stream.partition}/*.parquet")
            listed = sum(len(store.segments(topic)) for topic in store.topics())
            assert len(list(files)) <= listed
        assert len({len(found[stream]) for stream in streams[:2]}) == 1, "one step in the catalog"

    assert await crash_everywhere(tmp_path, tmp_path / "base", work, check) >= 4


async def test_power_loss_between_any_two_steps_of_deleting_a_topic_leaves_it_whole_or_gone(
    tmp_path: Path,
) -> None:
    streams, before = await make_base(tmp_path / "base")

    async def work(store: LocalStore) -> None:
        (topic,) = [topic for topic in store.topics() if topic.name == "orders"]
        await store.delete_topic(topic)
        await append(store, draft(streams[2], [b"after"]))
        again = await create_topic(store, "orders", 1)
        await append(store, draft(StreamId(again.id, 0), [b"anew"]))

    async def check(store: LocalStore, is_done: bool) -> None:
        found = await contents(store)
        assert found[streams[2]][: len(before[streams[2]])] == before[streams[2]]
        assert found[streams[3]] == before[streams[3]]
        if streams[0] in found:
            assert not is_done
            assert {stream: found[stream] for stream in streams[:2]} == {s: before[s] for s in streams[:2]}
        new = [rows for stream, rows in found.items() if stream not in streams]
        assert new in ([], [[]], [[(0, b"anew")]])
        assert new == [[(0, b"anew")]] or not is_done
        names = sorted(path.name for path in (tmp_path / "found" / "topics").iterdir())
        assert names in (["bills"], ["bills", "orders"])

    assert await crash_everywhere(tmp_path, tmp_path / "base", work, check) >= 8


async def test_power_loss_between_any_two_steps_of_the_first_opening_leaves_a_directory_that_opens(
    tmp_path: Path,
) -> None:
    for call in itertools.count(1):
        data, found = tmp_path / f"data-{call}", tmp_path / f"found-{call}"
        disk = FaultyDisk(data, seed=call)
        disk.stop_at(call)
        store = None
        with suppress(PowerLost, SparrowError):
            store = await open_store(data, disk)
            topic = await create_topic(store, "orders")
            await append(store, draft(StreamId(topic.id, 0), some("first")))
        has_stopped = disk.has_stopped
        disk.crash(found)
        if store is not None:
            await asyncio.wait_for(_abandon(store.close), 10)
        again = await open_store(found)
        assert again.recovered.report.damages == ()
        assert len(again.topics()) <= 1
        if not again.topics():
            await create_topic(again, "orders")
        await append(again, draft(StreamId(again.topics()[0].id, 0), some("next")))
        await again.close()
        if not has_stopped:
            break
    assert call > 8


async def test_power_loss_between_any_two_steps_of_recovery_loses_nothing(tmp_path: Path) -> None:
    """A torn tail and a half-made file have to go; losing power while they go is no harm."""
    streams, before = await make_base(tmp_path / "base")
    store = await open_store(tmp_path / "base", journal=QUICK_ROTATION)
    await append(store, draft(streams[0], [b"kept"]))
    before = await contents(store)
    shutil.copytree(tmp_path / "base", tmp_path / "killed")
    await store.close()
    newest = sorted((tmp_path / "killed" / "journal").glob("*.wal"))[-1]
    raw = newest.read_bytes()
    last = list(Scan(raw, pa.py_buffer(raw), int(newest.stem), len(raw)))[-1]
    newest.write_bytes(raw[: last.end_position] + b"SPRW torn" + bytes(500))
    (newest.parent / file_name(int(newest.stem) + 1)).write_bytes(b"")
    for call in itertools.count(1):
        data, found = tmp_path / f"data-{call}", tmp_path / f"found-{call}"
        shutil.copytree(tmp_path / "killed", data)
        disk = FaultyDisk(data, seed=call)
        disk.stop_at(call)
        opened = None
        with suppress(PowerLost):
            opened = await open_store(data, disk, journal=QUICK_ROTATION)
        has_stopped = disk.has_stopped
        disk.crash(found)
        if opened is not None:
            await _abandon(opened.close)
        again = await open_store(found, journal=QUICK_ROTATION)
        assert await contents(again) == before
        assert again.recovered.report.damages == ()
        await again.close()
        if not has_stopped:
            break
    assert call > 3


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", ["truncate", "sync"])
async def test_a_disk_that_fails_while_recovery_cuts_gives_a_typed_error(
    tmp_path: Path, operation: str, error: int
) -> None:
    store = await open_store(tmp_path / "data")
    topic = await create_topic(store, "orders")
    await append(store, draft(StreamId(topic.id, 0), some("kept")))
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    await store.close()
    disk = FaultyDisk()
    disk.fail(operation, error=error)
    with pytest.raises(StorageError) as refused:
        await open_store(tmp_path / "killed", disk)
    assert refused.value.hint
    assert isinstance(refused.value, StorageFull) == (error in (errno.ENOSPC, errno.EDQUOT))
    again = await open_store(tmp_path / "killed")
    assert list((await contents(again)).values()) == [list(enumerate(some("kept")))]
    await again.close()


def _joined(text: str, count: int) -> list[bytes]:
    return [payload for number in range(count) for payload in some(f"{text}-{number}")]


# Races that only a crash test would meet by chance.


async def test_a_publish_that_was_cancelled_and_then_refused_can_be_sent_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    broker = await open_broker(tmp_path / "data", disk, QUICK_ROTATION)
    await broker.create_topic("orders")
    producer = await broker.producer("shop")
    await producer.publish("orders", b"first", sequence=0)
    disk.fail("reserve", error=errno.ENOSPC)
    work = asyncio.create_task(producer.publish("orders", b"x" * 4000, sequence=1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    work.cancel()
    with suppress(asyncio.CancelledError, StorageFull):
        await work
    with suppress(StorageFull):  # whoever comes next may meet the refusal of the first
        await broker.publish("orders", b"y" * 4000)
    try:
        receipt = await asyncio.wait_for(producer.publish("orders", b"x" * 4000, sequence=1), 2)
        assert not receipt.is_duplicate
    finally:
        await broker.close()


async def test_keys_that_are_sealed_while_the_window_is_loaded_are_not_missed(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await create_topic(store, "orders")
    stream = StreamId(topic.id, 0)
    for key in ("first", "second"):
        await append(store, draft(stream, [b"x"], [key]))
        await store.rotate()
        if key == "first":
            await store.seal((), ())
    gate = threading.Event()
    store._reader._thread.submit(gate.wait)  # The only way to hold a read up at a known place.
    loading = asyncio.create_task(store.idempotency_keys(topic, 0))
    await asyncio.sleep(0)
    await store.seal((), ())
    gate.set()
    keys = [key for found in await loading for key in found.batch.column("idempotency_key").to_pylist()]
    assert sorted(keys) == ["first", "second"]
    await store.close()
