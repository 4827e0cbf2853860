"""Moving batches from the journal to the lake while readers look on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sparrow.model.errors import OffsetOutOfRange, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.settings import JournalSettings, LakeSettings
from sparrow.model.topic import Codec, Durability, Topic, TopicPolicy
from sparrow.store import batch as batches
from sparrow.store.disk import Disk
from sparrow.store.local import LocalStore
from sparrow.store.ports import BatchDraft, LogBatch

KIB = 1024


class Ticking:
    """Every look at it is a millisecond later."""

    def __init__(self) -> None:
        self.time_us = 1_000_000

    def now_us(self) -> int:
        self.time_us += 1_000
        return self.time_us


async def open_store(path: Path, disk: Disk | None = None, file_bytes: int = 64 * KIB) -> LocalStore:
    return await LocalStore.open(
        path,
        journal=JournalSettings(file_bytes=file_bytes),
        lake=LakeSettings(row_group_bytes=4 * KIB),
        now_us=Ticking().now_us,
        disk=disk,
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await open_store(tmp_path / "data")
    yield store
    await store.close()


async def topic_of(store: LocalStore, name: str = "orders", partitions: int = 1) -> Topic:
    return await store.create_topic(name, partitions, TopicPolicy(), 1)


async def publish(store: LocalStore, stream: StreamId, count: int, codec: Codec = Codec.NONE) -> None:
    """Messages whose data is their own offset, so that a reader can tell what it got."""
    first = store.bounds(stream).end_offset
    data = [f"{offset:06d}".encode() * 20 for offset in range(first, first + count)]
    body = batches.encode(batches.build(data), codec)
    draft = BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns, body.codec)
    await store.append([draft], Durability.WRITTEN, lambda commit: None)


async def seal(store: LocalStore) -> int:
    await store.rotate()
    return await store.seal([], [])


def check(found: list[LogBatch], offset: int) -> int:
    """That the batches go on from ``offset`` without a hole and hold what belongs there; the new offset."""
    for one in found:
        offsets = one.batch.column("offset").to_pylist()
        assert offsets == list(range(offset, one.end_offset))
        assert one.first_offset == offset
        data = one.batch.column("data").to_pylist()
        assert data == [f"{number:06d}".encode() * 20 for number in offsets]
        offset = one.end_offset
    return offset


async def read_all(store: LocalStore, stream: StreamId, offset: int = 0, max_bytes: int = 3 * KIB) -> int:
    while offset < store.bounds(stream).end_offset:
        offset = check(await store.read(stream, offset, max_bytes), offset)
    return offset


# What sealing does.


async def test_sealing_moves_a_file_into_one_segment_a_stream_and_removes_it(
    store: LocalStore, tmp_path: Path
) -> None:
    topic = await topic_of(store, partitions=3)
    for partition in (0, 2):
        await publish(store, StreamId(topic.id, partition), 10)
        await publish(store, StreamId(topic.id, partition), 5)
    assert await seal(store) == 30
    files = sorted(
        str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*.parquet")
    )
    name = "00000000000000000000.parquet"
    assert files == [f"topics/orders/0/{name}", f"topics/orders/2/{name}"]
    assert not list((tmp_path / "data" / "journal").glob("0000000001.wal"))
    assert [
        (info.stream.partition, info.first_offset, info.end_offset) for info in store.segments(topic)
    ] == [
        (0, 0, 15),
        (2, 0, 15),
    ]


async def test_sealing_with_nothing_finished_does_nothing(store: LocalStore) -> None:
    assert await store.seal([], []) == 0
    topic = await topic_of(store)
    await publish(store, StreamId(topic.id, 0), 1)
    assert await store.seal([], []) == 0


async def test_several_finished_files_become_one_segment(store: LocalStore) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    for _ in range(4):
        await publish(store, stream, 10)
        await store.rotate()
    assert store.state().journal_files == 4
    assert await store.seal([], []) == 40
    assert len(store.segments(topic)) == 1
    assert await read_all(store, stream) == 40


@pytest.mark.parametrize("codec", list(Codec))
async def test_every_codec_is_sealed_into_plain_rows(store: LocalStore, codec: Codec, tmp_path: Path) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 50, codec)
    assert await seal(store) == 50
    assert await read_all(store, stream) == 50
    (path,) = (tmp_path / "data").rglob("*.parquet")
    assert pq.read_table(path)["offset"].to_pylist() == list(range(50))


async def test_publishing_goes_on_while_a_file_is_sealed(tmp_path: Path) -> None:
    disk = SlowRename()
    store = await open_store(tmp_path / "data", disk)
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 10)
    disk.is_armed = True
    sealing = asyncio.create_task(seal(store))
    assert await asyncio.to_thread(disk.reached.wait, 20)
    for _ in range(5):
        await publish(store, stream, 10)
    assert await read_all(store, stream) == 60
    assert not sealing.done()
    disk.may_go_on.set()
    assert await sealing == 10
    assert await read_all(store, stream) == 60
    await store.close()


class SlowRename(Disk):
    """Stops before a segment gets its final name, when armed."""

    def __init__(self) -> None:
        self.is_armed = False
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def rename(self, source: Path, target: Path) -> None:
        if self.is_armed and target.suffix == ".parquet":
            self.reached.set()
            assert self.may_go_on.wait(20)
        super().rename(source, target)


async def test_a_sealed_batch_that_a_reader_holds_stays_whole(store: LocalStore) -> None:
    """The file is gone from the directory; the reader's buffers keep its bytes."""
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 10)
    held = await store.read(stream, 0, 1 << 20)
    await seal(store)
    assert check(held, 0) == 10


async def test_a_segment_is_checkpointed_with_the_seal(store: LocalStore) -> None:
    topic = await topic_of(store)
    await publish(store, StreamId(topic.id, 0), 10)
    await seal(store)
    state = store.state()
    assert (state.segments, state.lake_bytes > 0) == (1, True)
    assert store.finished_bytes() == 0


async def test_a_seal_that_has_to_wait_takes_only_the_files_that_its_checkpoints_include(
    store: LocalStore,
) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 10)
    await store.rotate()
    async with store._keeping:
        sealing = asyncio.create_task(store.seal([], []))
        await asyncio.sleep(0)
        await publish(store, stream, 5)
        await store.rotate()
    assert await sealing == 10
    assert await store.seal([], []) == 5


async def test_two_seals_at_once_seal_each_file_once(store: LocalStore) -> None:
    topic = await topic_of(store)
    await publish(store, StreamId(topic.id, 0), 10)
    await store.rotate()
    assert sorted(await asyncio.gather(store.seal([], []), store.seal([], []))) == [0, 10]


# Readers.


async def test_a_reader_sees_every_message_once_while_the_topic_is_sealed_rotated_and_dropped(
    tmp_path: Path,
) -> None:
    store = await open_store(tmp_path / "data")
    topic = await topic_of(store)
    other = await topic_of(store, "noise")
    stream = StreamId(topic.id, 0)
    total, done = 3_000, asyncio.Event()
    read_through = 0

    async def write() -> None:
        while (end := store.bounds(stream).end_offset) < total:
            await publish(store, stream, min(1 + end % 37, total - end))
            await publish(store, StreamId(other.id, 0), 1)
        done.set()

    async def keep() -> None:
        while not done.is_set() or store.finished_bytes():
            await store.rotate()
            await store.seal([], [])
            behind = [info for info in store.segments(topic) if info.end_offset <= read_through]
            await store.drop(behind[:2])
            await asyncio.sleep(0)

    async def read(max_bytes: int) -> None:
        nonlocal read_through
        offset = 0
        while offset < total:
            offset = check(await store.read(stream, offset, max_bytes), offset)
            read_through = offset
            await asyncio.sleep(0)
        assert offset == total

    writing = asyncio.gather(write(), keep())
    await asyncio.wait_for(asyncio.gather(writing, read(2 * KIB)), 50)
    assert store.bounds(stream).end_offset == total
    assert store.bounds(stream).start_offset > 0, "something was dropped behind the reader"
    await store.close()


async def test_many_readers_from_many_offsets_agree_while_files_move(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    for _ in range(20):
        await publish(store, stream, 20)

    async def read(start: int, max_bytes: int) -> None:
        for _ in range(3):
            assert await read_all(store, stream, start, max_bytes) >= 400
            await asyncio.sleep(0)

    async def move() -> None:
        for _ in range(5):
            await seal(store)
            await publish(store, stream, 20)

    readers = [read(start, 500 + start * 10) for start in range(0, 400, 41)]
    await asyncio.wait_for(asyncio.gather(move(), *readers), 50)
    await store.close()


@pytest.mark.parametrize("is_whole", [False, True])
async def test_any_offset_can_be_read_on_both_sides_of_the_border(store: LocalStore, is_whole: bool) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    for _ in range(3):
        await publish(store, stream, 7)
        await publish(store, stream, 13)
        await seal(store)
    await publish(store, stream, 9)
    await publish(store, stream, 11)
    for offset in range(80):
        found = await store.read(stream, offset, 1, is_whole=is_whole)
        assert found[0].first_offset <= offset < found[0].end_offset
        if not is_whole:
            check(found, offset)
    assert await store.read(stream, 80, 1) == []


async def test_offsets_outside_the_log_are_refused_with_its_bounds(store: LocalStore) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 10)
    await seal(store)
    await publish(store, stream, 10)
    await seal(store)
    await store.drop(store.segments(topic)[:1])
    for offset in (0, 9, 21, -1):
        with pytest.raises(OffsetOutOfRange) as caught:
            await store.read(stream, offset, 1)
        assert caught.value.details == {"start_offset": 10, "end_offset": 20}
    assert check(await store.read(stream, 10, 1 << 20), 10) == 20


# Dropping.


async def test_a_dropped_segment_is_gone_from_the_disk_and_the_log_starts_behind_it(
    store: LocalStore, tmp_path: Path
) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    for _ in range(3):
        await publish(store, stream, 10)
        await seal(store)
    await store.drop(store.segments(topic)[:2])
    assert store.bounds(stream) == (20, 30)
    assert [path.name for path in (tmp_path / "data").rglob("*.parquet")] == ["00000000000000000020.parquet"]
    assert store.state().segments == 1


async def test_dropping_the_same_segment_twice_costs_no_other_one(store: LocalStore) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    for _ in range(3):
        await publish(store, stream, 10)
        await seal(store)
    first = store.segments(topic)[:1]
    await asyncio.gather(store.drop(first), store.drop(first))
    assert [info.first_offset for info in store.segments(topic)] == [10, 20]
    assert store.bounds(stream) == (10, 30)


async def test_dropping_everything_sealed_leaves_the_end_in_place(store: LocalStore) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 10)
    await seal(store)
    await store.drop(store.segments(topic))
    assert store.bounds(stream) == (10, 10)
    await publish(store, stream, 5)
    assert check(await store.read(stream, 10, 1 << 20), 10) == 15


async def test_a_read_that_a_drop_overtakes_says_that_the_offset_is_gone(store: LocalStore) -> None:
    topic = await topic_of(store)
    stream = StreamId(topic.id, 0)
    await publish(store, stream, 10)
    await seal(store)
    await publish(store, stream, 10)
    await seal(store)
    outcomes: list[Any] = await asyncio.gather(
        store.drop(store.segments(topic)[:1]), store.read(stream, 3, 1), return_exceptions=True
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], OffsetOutOfRange) or outcomes[1][0].first_offset in (3, 10)


# Topics that go while files move.


async def test_a_topic_deleted_while_a_file_is_sealed_leaves_nothing(tmp_path: Path) -> None:
    disk = SlowRename()
    store = await open_store(tmp_path / "data", disk)
    doomed, kept = await topic_of(store, "doomed"), await topic_of(store, "kept")
    for topic in (doomed, kept):
        await publish(store, StreamId(topic.id, 0), 10)
    disk.is_armed = True
    sealing = asyncio.create_task(seal(store))
    assert await asyncio.to_thread(disk.reached.wait, 20)
    deleting = asyncio.create_task(store.delete_topic(doomed))
    disk.may_go_on.set()
    await asyncio.gather(sealing, deleting)
    assert not (tmp_path / "data" / "topics" / "doomed").exists()
    assert await read_all(store, StreamId(kept.id, 0)) == 10
    with pytest.raises(TopicNotFound):
        await store.read(StreamId(doomed.id, 0), 0, 1)
    await publish(store, StreamId(kept.id, 0), 1)
    assert await seal(store) == 1
    await store.close()


async def test_a_deleted_topics_messages_in_the_journal_are_not_sealed(
    store: LocalStore, tmp_path: Path
) -> None:
    topic = await topic_of(store)
    await publish(store, StreamId(topic.id, 0), 10)
    await store.delete_topic(topic)
    assert await seal(store) == 0
    assert not list((tmp_path / "data").rglob("*.parquet"))
    assert store.finished_bytes() == 0


async def test_a_topic_made_again_is_not_answered_from_the_old_ones_segments(store: LocalStore) -> None:
    old = await topic_of(store)
    await publish(store, StreamId(old.id, 0), 10)
    await seal(store)
    assert await read_all(store, StreamId(old.id, 0)) == 10
    await store.delete_topic(old)
    new = await topic_of(store)
    body = batches.encode(batches.build([b"new"] * 10))
    draft = BatchDraft(StreamId(new.id, 0), body.buffer, body.crc, body.record_count, body.columns)
    await store.append([draft], Durability.DURABLE, lambda commit: None)
    await seal(store)
    found = await store.read(StreamId(new.id, 0), 0, 1 << 20)
    assert found[0].batch.column("data").to_pylist() == [b"new"] * 10
