"""Opening a directory again: after an orderly close, and after a process that just stopped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.kernel.dedupe import ProducerLedger, part, request
from sparrow.model.errors import CatalogDamaged
from sparrow.model.message import StreamId
from sparrow.model.settings import JournalSettings, LakeSettings, Settings
from sparrow.model.topic import Durability, Topic, TopicPolicy
from sparrow.store import batch as batches
from sparrow.store.catalog_tables import ProducerState
from sparrow.store.entry import Header, Scan
from sparrow.store.local import LocalStore
from sparrow.store.ports import BatchDraft, Commit, Draft, FactsDraft, ProducerPart

KIB = 1024


class HandClock:
    def __init__(self, time_us: int = 1_000_000) -> None:
        self.time_us = time_us

    def now_us(self) -> int:
        return self.time_us


async def open_store(path: Path, clock: HandClock | None = None, **settings: int | str) -> LocalStore:
    return await LocalStore.open(
        path,
        journal=msgspec.structs.replace(JournalSettings(file_bytes=64 * KIB), **settings),
        lake=LakeSettings(row_group_bytes=16 * KIB),
        now_us=(clock or HandClock()).now_us,
    )


def draft(
    stream: StreamId, data: Sequence[bytes], sequence: Sequence[int] | None = None, **values: int
) -> BatchDraft:
    body = batches.encode(batches.build(data, sequence=sequence))
    return BatchDraft(
        stream,
        body.buffer,
        body.crc,
        body.record_count,
        body.columns,
        has_sequences=sequence is not None,
        **values,
    )


async def append(store: LocalStore, *drafts: Draft, durability: Durability = Durability.DURABLE) -> Commit:
    return await store.append(drafts, durability, lambda commit: None)


async def make_topic(store: LocalStore, name: str = "orders", partitions: int = 2) -> Topic:
    return await store.create_topic(name, partitions, TopicPolicy(), 1)


async def content(store: LocalStore, stream: StreamId) -> list[bytes]:
    offset, found = store.bounds(stream).start_offset, []
    while offset < store.bounds(stream).end_offset:
        for one in await store.read(stream, offset, 1 << 20):
            assert one.first_offset == offset
            found += one.batch.column("data").to_pylist()
            offset = one.end_offset
    return found


def left_by_a_kill(source: Path, target: Path) -> Path:
    """The directory as a process that is killed now would leave it."""
    shutil.copytree(source, target)
    return target


def entries(path: Path) -> list[Header]:
    raw = path.read_bytes()
    found = Scan(raw, pa.py_buffer(raw), int(path.stem), len(raw))
    return [item for item in found if isinstance(item, Header)]


def journal(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "journal").iterdir())


async def fill(store: LocalStore) -> Topic:
    """Some batches sealed, some finished, some in the open file."""
    topic = await make_topic(store)
    for partition in (0, 1):
        await append(store, draft(StreamId(topic.id, partition), [b"sealed"] * 3))
    await store.rotate()
    await store.seal([], [])
    await append(store, draft(StreamId(topic.id, 0), [b"finished"] * 2))
    await store.rotate()
    await append(store, draft(StreamId(topic.id, 0), [b"open"]))
    await append(store, draft(StreamId(topic.id, 1), [b"open"]), durability=Durability.WRITTEN)
    return topic


ZERO = [b"sealed"] * 3 + [b"finished"] * 2 + [b"open"]
ONE = [b"sealed"] * 3 + [b"open"]


# Coming back.


async def test_after_a_clean_close_everything_is_there(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await fill(store)
    await store.close()
    store = await open_store(tmp_path / "data")
    assert store.topics() == [topic]
    assert await content(store, StreamId(topic.id, 0)) == ZERO
    assert await content(store, StreamId(topic.id, 1)) == ONE
    report = store.recovered.report
    assert (report.messages, report.segments, report.torn_bytes, report.damages) == (4, 2, 0, ())
    await store.close()


async def test_after_a_kill_everything_is_there(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await fill(store)
    left = left_by_a_kill(tmp_path / "data", tmp_path / "left")
    await store.close()
    again = await open_store(left)
    assert again.topics() == [topic]
    assert await content(again, StreamId(topic.id, 0)) == ZERO
    assert await content(again, StreamId(topic.id, 1)) == ONE
    report = again.recovered.report
    assert (report.messages, report.segments, report.torn_bytes, report.damages) == (4, 2, 0, ())
    await again.close()


async def test_a_directory_survives_many_lives(tmp_path: Path) -> None:
    path, expected = tmp_path / "0", []
    for life in range(6):
        store = await open_store(path)
        if not store.topics():
            await make_topic(store)
        stream = StreamId(store.topics()[0].id, 0)
        assert await content(store, stream) == expected
        await append(store, draft(stream, [b"%d" % life]))
        expected.append(b"%d" % life)
        if life % 3 == 2:
            await store.rotate()
            await store.seal([], [])
        path = left_by_a_kill(path, tmp_path / str(life + 1))
        await store.close()
    assert len(expected) == 6


async def test_offsets_go_on_where_they_ended(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await fill(store)
    await store.close()
    store = await open_store(tmp_path / "data")
    commit = await append(store, draft(StreamId(topic.id, 0), [b"next"]))
    assert commit.appended[0].base_offset == len(ZERO)
    await store.close()


async def test_positions_in_the_log_only_ever_grow(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        store = await open_store(tmp_path / "data")
        topic = store.topics()[0] if store.topics() else await make_topic(store)
        seen.append((await append(store, draft(StreamId(topic.id, 0), [b"x"]))).lsn)
        await store.rotate()
        await store.seal([], [])
        await store.close()
    assert seen == sorted(set(seen))


async def test_publish_times_do_not_go_back_over_a_restart(tmp_path: Path) -> None:
    clock = HandClock(5_000_000)
    store = await open_store(tmp_path / "data", clock)
    topic = await make_topic(store)
    stream = StreamId(topic.id, 0)
    await append(store, draft(stream, [b"x"]))
    await store.close()
    store = await open_store(tmp_path / "data", HandClock(1_000_000))
    commit = await append(store, draft(stream, [b"y"]))
    assert commit.appended[0].publish_time_us == 5_000_000
    await store.close()


async def test_publish_times_do_not_go_back_when_all_was_sealed_before_the_restart(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data", HandClock(5_000_000))
    topic = await make_topic(store)
    await append(store, draft(StreamId(topic.id, 0), [b"x"]))
    await store.rotate()
    await store.seal([], [])
    await store.close()
    for _ in range(2):
        store = await open_store(tmp_path / "data", HandClock(1_000_000))
        commit = await append(store, draft(StreamId(topic.id, 0), [b"y"]))
        assert commit.appended[0].publish_time_us >= 5_000_000
        await store.rotate()
        await store.seal([], [])
        await store.close()


async def test_opening_and_closing_alone_adds_no_files(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    await fill(store)
    await store.close()
    before = journal(tmp_path / "data")
    for _ in range(3):
        await (await open_store(tmp_path / "data")).close()
    assert journal(tmp_path / "data") == before


async def test_the_space_that_a_killed_process_had_reserved_is_given_back(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    await append(store, draft(StreamId(topic.id, 0), [b"x"]))
    left = left_by_a_kill(tmp_path / "data", tmp_path / "left")
    await store.close()
    path = left / "journal" / "0000000001.wal"
    assert path.stat().st_size == 64 * KIB
    end = entries(path)[-1].end_position
    again = await open_store(left)
    assert path.stat().st_size == end
    assert again.recovered.report.journal_bytes == end
    await again.close()


# Chains.


async def test_a_chain_over_streams_and_facts_comes_back_whole(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    commit = await append(
        store,
        draft(StreamId(topic.id, 0), [b"a"]),
        FactsDraft(b"fact", 1),
        draft(StreamId(topic.id, 1), [b"b"]),
    )
    left = left_by_a_kill(tmp_path / "data", tmp_path / "left")
    await store.close()
    again = await open_store(left)
    assert await content(again, StreamId(topic.id, 0)) == [b"a"]
    assert await content(again, StreamId(topic.id, 1)) == [b"b"]
    assert again.recovered.facts == [(commit.lsn, b"fact")]
    await again.close()


@pytest.mark.parametrize("kept", [1, 2])
async def test_a_chain_without_its_last_entry_was_never_there(tmp_path: Path, kept: int) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    first, second = StreamId(topic.id, 0), StreamId(topic.id, 1)
    await append(store, draft(first, [b"before"]))
    await append(store, draft(first, [b"a"]), draft(second, [b"b"]), FactsDraft(b"fact", 1))
    left = left_by_a_kill(tmp_path / "data", tmp_path / "left")
    await store.close()
    path = left / "journal" / "0000000001.wal"
    before, *chain = entries(path)
    os.truncate(path, chain[kept].position)
    again = await open_store(left)
    assert await content(again, first) == [b"before"]
    assert await content(again, second) == []
    assert again.recovered.facts == []
    assert path.stat().st_size == before.end_position
    assert again.recovered.report.torn_bytes == chain[kept].position - before.end_position
    assert again.recovered.report.damages == ()
    await append(again, draft(first, [b"after"]), draft(second, [b"after"]))
    assert await content(again, first) == [b"before", b"after"]
    await again.close()


# Facts and producers.


async def test_facts_come_back_in_the_order_of_the_log_over_all_files(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    lsns = []
    for number in range(12):
        lsns.append((await append(store, FactsDraft(b"fact %d" % number, 1))).lsn)
        if number % 5 == 4:
            await store.rotate()
    await store.close()
    store = await open_store(tmp_path / "data")
    assert store.recovered.facts == [(lsn, b"fact %d" % number) for number, lsn in enumerate(lsns)]
    assert len(journal(tmp_path / "data")) == 3
    await store.close()


async def test_facts_of_sealed_files_do_not_come_back(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    await append(store, FactsDraft(b"old", 1))
    await store.rotate()
    await store.seal([], [])
    commit = await append(store, FactsDraft(b"new", 1))
    await store.close()
    store = await open_store(tmp_path / "data")
    assert store.recovered.facts == [(commit.lsn, b"new")]
    await store.close()


async def test_producers_come_back_with_their_sequences_and_places(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    zero, one = StreamId(topic.id, 0), StreamId(topic.id, 1)
    producer, epoch = await store.open_producer("shop")
    whose = {"producer_id": producer, "producer_epoch": epoch}
    first = await append(store, draft(zero, [b"a", b"b"], base_sequence=100, **whose))
    second = await append(
        store,
        draft(zero, [b"c", b"e"], [102, 104], base_sequence=102, **whose),
        draft(one, [b"d"], [103], base_sequence=103, **whose),
    )
    await append(store, draft(one, [b"of nobody"]))
    await store.close()
    store = await open_store(tmp_path / "data")
    (lsn_1, request_1), (lsn_2, request_2) = store.recovered.producers
    assert (lsn_1, lsn_2) == (first.lsn, second.lsn)
    assert request_1[:3] == request_2[:3] == (producer, epoch, topic.id)
    assert request_1.parts == (ProducerPart(0, 0, 1_000_000, range(100, 102)),)
    assert request_2.parts == (
        ProducerPart(0, 2, 1_000_000, (102, 104)),
        ProducerPart(1, 0, 1_000_000, (103,)),
    )
    assert store.recovered.producer_epochs == {producer: epoch}
    await store.close()


async def test_checkpoints_of_producers_come_back_when_their_file_was_sealed(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    producer, _ = await store.open_producer("shop")
    ledger = ProducerLedger(8)
    ledger.apply(0, request([part(0, 0, 5, range(7, 9))]))
    commit = await append(
        store, draft(StreamId(topic.id, 0), [b"a", b"b"], producer_id=producer, base_sequence=7)
    )
    saved = ProducerState(producer, topic.id, commit.lsn, ledger.to_bytes())
    await store.rotate()
    await store.seal([], [saved])
    await store.close()
    store = await open_store(tmp_path / "data")
    assert store.recovered.producers == []
    assert list(store.recovered.producer_checkpoints) == [saved]
    await store.close()


# The catalog.


def keep_catalog(data: Path, aside: Path) -> None:
    aside.mkdir()
    for path in data.glob("catalog*"):
        shutil.copy(path, aside / path.name)


def put_back_catalog(data: Path, aside: Path) -> None:
    for path in data.glob("catalog*"):
        path.unlink()
    for path in aside.iterdir():
        shutil.copy(path, data / path.name)


async def test_a_catalog_older_than_the_journal_says_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    store = await open_store(data)
    topic = await make_topic(store)
    await append(store, draft(StreamId(topic.id, 0), [b"x"]))
    await store.close()
    keep_catalog(data, tmp_path / "older")
    store = await open_store(data)
    await store.update_topic(msgspec.structs.replace(topic, partitions=5))
    await append(store, draft(StreamId(topic.id, 4), [b"x"]))
    await store.close()
    put_back_catalog(data, tmp_path / "older")
    before = journal(data)
    with pytest.raises(CatalogDamaged, match="the journal has seen"):
        await open_store(data)
    assert journal(data) == before


async def test_a_catalog_that_lost_a_topic_nobody_published_to_is_refused_too(tmp_path: Path) -> None:
    data = tmp_path / "data"
    await (await open_store(data)).close()
    keep_catalog(data, tmp_path / "older")
    store = await open_store(data)
    await make_topic(store)
    await store.close()
    put_back_catalog(data, tmp_path / "older")
    with pytest.raises(CatalogDamaged, match="has lost topic 'orders'"):
        await open_store(data)


async def test_a_refused_directory_is_not_left_locked(tmp_path: Path) -> None:
    data = tmp_path / "data"
    await (await open_store(data)).close()
    keep_catalog(data, tmp_path / "older")
    store = await open_store(data)
    topic = await make_topic(store)
    await store.close()
    keep_catalog(data, tmp_path / "right")
    put_back_catalog(data, tmp_path / "older")
    with pytest.raises(CatalogDamaged):
        await open_store(data)
    put_back_catalog(data, tmp_path / "right")
    store = await open_store(data)
    assert store.topics() == [topic]
    await store.close()


async def test_the_batches_of_a_deleted_topic_are_ignored(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    doomed, kept = await make_topic(store, "doomed"), await make_topic(store, "kept")
    await append(store, draft(StreamId(doomed.id, 0), [b"x"] * 5))
    await append(store, draft(StreamId(kept.id, 0), [b"y"]))
    await store.delete_topic(doomed)
    left = left_by_a_kill(tmp_path / "data", tmp_path / "left")
    await store.close()
    again = await open_store(left)
    assert [topic.name for topic in again.topics()] == ["kept"]
    assert (again.recovered.report.messages, again.recovered.report.damages) == (1, ())
    await again.rotate()
    assert await again.seal([], []) == 1
    await again.close()


async def test_a_checkpoint_of_a_deleted_topics_producer_does_not_stop_the_sealing(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    doomed = await make_topic(store, "doomed")
    producer, _ = await store.open_producer("shop")
    commit = await append(store, draft(StreamId(doomed.id, 0), [b"x"], producer_id=producer))
    await store.delete_topic(doomed)
    await store.rotate()
    await store.seal([], [ProducerState(producer, doomed.id, commit.lsn, ProducerLedger(8).to_bytes())])
    assert store.finished_bytes() == 0
    await store.close()
    store = await open_store(tmp_path / "data")
    assert list(store.recovered.producer_checkpoints) == []
    await store.close()


# Leftovers of interrupted steps.


@pytest.mark.parametrize(
    "half", [b"", b"SPRWJRNL", bytes(64 * KIB), b"SPRWJRNL" + b"\xff" * 56 + bytes(4000)]
)
async def test_a_file_that_was_only_half_made_is_removed_and_is_no_loss(tmp_path: Path, half: bytes) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    stream = StreamId(topic.id, 0)
    await append(store, draft(stream, [b"x"]))
    left = left_by_a_kill(tmp_path / "data", tmp_path / "left")
    await store.close()
    (left / "journal" / "0000000002.wal").write_bytes(half)
    again = await open_store(left)
    assert journal(left) == ["0000000001.wal"]
    assert again.recovered.report.damages == ()
    await append(again, draft(stream, [b"y"]))
    await again.close()
    once_more = await open_store(left)
    assert await content(once_more, stream) == [b"x", b"y"]
    assert once_more.recovered.report.damages == ()
    await once_more.close()


async def test_a_journal_file_that_was_sealed_but_not_removed_is_not_read_again(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    stream = StreamId(topic.id, 0)
    await append(store, draft(stream, [b"x"] * 3))
    await store.rotate()
    shutil.copy(tmp_path / "data" / "journal" / "0000000001.wal", tmp_path / "kept.wal")
    await store.seal([], [])
    await store.close()
    shutil.copy(tmp_path / "kept.wal", tmp_path / "data" / "journal" / "0000000001.wal")
    store = await open_store(tmp_path / "data")
    assert await content(store, stream) == [b"x"] * 3
    assert "0000000001.wal" not in journal(tmp_path / "data")
    assert store.recovered.report.removed_files == 1
    await store.close()


async def test_segments_that_the_catalog_does_not_list_are_removed_and_made_again(tmp_path: Path) -> None:
    """As after a crash between the renaming of a segment and the catalog's commit."""
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    stream = StreamId(topic.id, 0)
    await append(store, draft(stream, [b"x"] * 3))
    await store.close()
    partition = tmp_path / "data" / "topics" / "orders" / "0"
    partition.mkdir()
    (partition / "00000000000000000000.parquet").write_bytes(b"not in force")
    (partition / "1-0.parquet.tmp").write_bytes(b"half written")
    store = await open_store(tmp_path / "data")
    assert list(partition.iterdir()) == []
    assert store.recovered.report.removed_files == 2
    await store.rotate()
    assert await store.seal([], []) == 3
    assert await content(store, stream) == [b"x"] * 3
    await store.close()


async def test_a_segment_that_was_dropped_but_not_removed_goes_at_the_next_start(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    stream = StreamId(topic.id, 0)
    await append(store, draft(stream, [b"x"] * 3))
    await store.rotate()
    await store.seal([], [])
    path = tmp_path / "data" / "topics" / "orders" / "0" / "00000000000000000000.parquet"
    shutil.copy(path, tmp_path / "kept")
    await store.drop(store.segments(topic))
    await store.close()
    shutil.copy(tmp_path / "kept", path)
    store = await open_store(tmp_path / "data")
    assert not path.exists()
    assert store.bounds(stream) == (3, 3)
    await store.close()


async def test_the_directory_of_a_deleted_topic_goes_at_the_next_start(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await make_topic(store)
    shutil.copytree(tmp_path / "data" / "topics" / "orders", tmp_path / "kept")
    await store.delete_topic(topic)
    await store.close()
    shutil.copytree(tmp_path / "kept", tmp_path / "data" / "topics" / "orders")
    store = await open_store(tmp_path / "data")
    assert list((tmp_path / "data" / "topics").iterdir()) == []
    await store.close()


async def test_a_stranger_in_a_partitions_directory_is_left_alone(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    await fill(store)
    await store.close()
    stranger = tmp_path / "data" / "topics" / "orders" / "0" / "notes.txt"
    stranger.write_text("mine")
    await (await open_store(tmp_path / "data")).close()
    assert stranger.read_text() == "mine"


async def test_offsets_of_a_damaged_batch_stay_taken_when_its_header_is_whole(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path / "data"))
    async with await Broker.open(settings) as broker:
        await broker.publish_batch("orders", [b"kept"] * 3)
        await broker.publish_batch("orders", [b"lost" * 50] * 4)
    wal = next((tmp_path / "data" / "journal").glob("*.wal"))
    content = bytearray(wal.read_bytes())
    content[content.index(b"lostlost") + 10] ^= 1
    wal.write_bytes(content)
    async with await Broker.open(settings) as broker:
        assert any(d.start_offset == 3 and d.end_offset == 7 for d in broker.recovery.damages)
        receipt = await broker.publish("orders", b"next")
        assert receipt.offset == 7
        messages = await broker.read("orders", max_messages=100)
        assert [(m.offset, m.data) for m in messages] == [
            (0, b"kept"),
            (1, b"kept"),
            (2, b"kept"),
            (7, b"next"),
        ]
