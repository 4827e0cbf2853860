"""Rewritten segments take the place of others: what is checked, what is seen, what a crash leaves."""

from __future__ import annotations

import errno
import itertools
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sparrow.model.errors import DraftRefused, InvalidArgument, SegmentsChanged, SparrowError
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic
from sparrow.store.disk import Disk
from sparrow.store.lake import write_draft
from sparrow.store.local import LocalStore
from sparrow.store.offline.rebuilding import rebuild
from sparrow.store.offline.verification import verify
from sparrow.store.segmentname import SegmentName, parse_name
from sparrow.testing.disk import FaultyDisk
from sparrow.testing.store import Contents, append, contents, create_topic, draft, open_store
from tests.store.test_faults import QUICK_ROTATION, crash_everywhere, tmp_path

__all__ = ["tmp_path"]  # In memory: a crash is tried at every step.

ROWS, FILES = 10, 4


async def make(root: Path, disk: Disk | None = None) -> tuple[LocalStore, Topic]:
    """A topic of one partition with four segments of ten messages and five messages in the journal."""
    store = await open_store(root, disk, journal=QUICK_ROTATION)
    topic = await create_topic(store, "orders")
    stream = StreamId(topic.id, 0)
    for number in range(FILES):
        payloads = [b"%d-%d" % (number, row) for row in range(ROWS)]
        await append(store, draft(stream, payloads, [f"k{number}-{row}" for row in range(ROWS)]))
        await store.rotate()
        await store.seal((), ())
    await append(store, draft(stream, [b"hot"] * 5))
    return store, topic


def table_of(store: LocalStore, topic: Topic, names: list[str]) -> pa.Table:
    directory = store._directory.partition(topic.name, 0)
    return pa.concat_tables([pq.read_table(directory / name) for name in names])


def names_of(store: LocalStore, topic: Topic) -> list[str]:
    return [Path(each.file).name for each in store.layout(topic, 0).partitions[0].segments]


def write(
    store: LocalStore,
    topic: Topic,
    rows: pa.Table,
    span: tuple[int, int],
    name: str = "job-1.parquet.tmp",
    stream: StreamId | None = None,
) -> str:
    directory = store._directory.partition(topic.name, 0)
    write_draft(
        Disk(), directory / name, topic.name, stream or StreamId(topic.id, 0), [rows],
        compression="zstd", row_group_bytes=200, span=span,
    )  # fmt: skip
    return name


async def compact(
    store: LocalStore, topic: Topic, kept: list[int], count: int = FILES, kept_from: int = 1 << 60
) -> None:
    """Only these offsets stay of the first segments."""
    names = names_of(store, topic)[:count]
    rows = table_of(store, topic, names)
    rows = rows.filter(pc.is_in(rows["offset"], pa.array(kept)))
    infos = store.segments(topic)[:count]
    made = write(store, topic, rows, (infos[0].first_offset, infos[-1].end_offset))
    await store.swap(topic, 0, names, [made], is_compacted=True, kept_from=kept_from)


async def merge(store: LocalStore, topic: Topic, first: int, count: int) -> None:
    infos, names = store.segments(topic)[first : first + count], names_of(store, topic)
    made = write(
        store, topic, table_of(store, topic, names[first : first + count]),
        (infos[0].first_offset, infos[-1].end_offset),
    )  # fmt: skip
    await store.swap(topic, 0, names[first : first + count], [made], is_compacted=False, kept_from=0)


def test_a_name_tells_first_offset_round_and_kind() -> None:
    for name in (SegmentName(7), SegmentName(0, 1, True), SegmentName(2**40, 12, False)):
        assert parse_name(str(name)) == name
    assert str(SegmentName(7, 2, True)) == "00000000000000000007-c2.parquet"
    for text in ("7.parquet", "00000000000000000007.parquet.tmp", "00000000000000000007-x1.parquet",
                 "00000000000000000007-c0.parquet", "../00000000000000000007.parquet"):  # fmt: skip
        assert parse_name(text) is None


async def test_a_merge_keeps_every_message_and_leaves_one_file(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    before = await contents(store)
    await merge(store, topic, 1, 3)
    assert await contents(store) == before
    assert [(i.first_offset, i.end_offset, i.rows) for i in store.segments(topic)] == [
        (0, 10, 10),
        (10, 40, 30),
    ]
    assert names_of(store, topic) == [str(SegmentName(0)), str(SegmentName(10, 1))]
    files = sorted(path.name for path in (tmp_path / "data/topics/orders/0").iterdir())
    assert files == names_of(store, topic)
    await merge(store, topic, 0, 2)
    assert names_of(store, topic) == [str(SegmentName(0, 2))], "a round above both"
    await store.close()
    again = await open_store(tmp_path / "data", journal=QUICK_ROTATION)
    assert await contents(again) == before
    assert again.recovered.report.removed_files == 0
    await again.close()


async def test_reading_from_any_offset_of_a_compacted_segment_finds_the_next_message(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    kept = [3, 11, 12, 27]
    await compact(store, topic, kept, count=3)
    stream = StreamId(topic.id, 0)
    expected = [*kept, *range(30, 45)]
    for is_whole, start in itertools.product((False, True), range(45)):
        found, offset = [], start
        while read := await store.read(stream, offset, 1, is_whole=is_whole):
            for batch in read:
                offsets = batch.batch.column("offset").to_pylist()
                assert offsets, "no empty batch"
                found += [each for each in offsets if each >= offset]
                offset = batch.end_offset
        assert found == [each for each in expected if each >= start]
        assert offset == store.bounds(stream).end_offset == 45
    await store.close()


async def test_bounds_times_and_sizes_are_those_of_the_whole_stretch(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    stream = StreamId(topic.id, 0)
    before = store.segments(topic)
    await compact(store, topic, [15, 39])
    (info,) = store.segments(topic)
    assert (info.first_offset, info.end_offset, info.rows) == (0, 40, 2)
    assert store.bounds(stream) == (0, 45)
    assert await store.offset_at(stream, 0) == 0
    assert await store.offset_at(stream, before[1].last_time_us + 1) == 39
    assert await store.offset_at(stream, before[3].last_time_us) == 39
    assert store.measure(stream, 0, 45, 1 << 40).end_offset == 45
    keys = await store.idempotency_keys(topic, 0)
    assert [key for each in keys for key in each.batch.column("idempotency_key").to_pylist()] == [
        "k1-5",
        "k3-9",
    ]
    await store.close()


async def test_a_swap_is_refused_unless_every_row_is_one_of_those_that_go(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    before = await contents(store)
    names = names_of(store, topic)
    rows = table_of(store, topic, names[:2])
    span = (0, 20)

    async def refused(rows: pa.Table, span: tuple[int, int], what: str, **others: object) -> None:
        options = {"is_compacted": False, "kept_from": 0} | others
        stream = options.pop("stream", None)
        made = write(store, topic, rows, span, stream=stream)  # type: ignore[arg-type]
        with pytest.raises(DraftRefused, match=what):
            await store.swap(topic, 0, names[:2], [made], **options)  # type: ignore[arg-type]
        assert names_of(store, topic) == names
        assert await contents(store) == before

    changed = rows.set_column(3, rows.schema.field("data"), pa.array([b"x"] * 20, pa.binary()))
    await refused(changed, span, "not those of the segments")
    await refused(rows.slice(0, 19), span, "where 20 must stay")
    await refused(rows.slice(1), span, "where 20 must stay")
    await refused(rows.slice(0, 10), (0, 10), "cover 0 to 10, not 0 to 20")
    await refused(
        rows.filter(pc.less(rows["offset"], 12)), span, "where 5 must stay", kept_from=15, is_compacted=True
    )
    await refused(rows, span, "another topic", stream=StreamId(topic.id + 1, 0))
    invented = pa.concat_tables(
        [rows, rows.slice(19).set_column(0, rows.schema.field("offset"), pa.array([25]))]
    )
    await refused(invented, (0, 26), "cover 0 to 26")
    shuffled = rows.take([*range(10, 20), *range(10)])
    with pytest.raises(AssertionError):
        write(store, topic, shuffled, span)
    directory = tmp_path / "data/topics/orders/0"
    (directory / "job-2.parquet.tmp").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DraftRefused, match="cannot be read"):
        await store.swap(topic, 0, names[:2], ["job-2.parquet.tmp"], is_compacted=False, kept_from=0)
    with pytest.raises(DraftRefused, match="cannot be read"):
        await store.swap(topic, 0, names[:2], ["job-3.parquet.tmp"], is_compacted=False, kept_from=0)
    await store.close()


async def test_names_that_are_no_drafts_or_no_neighbours_are_refused(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    names = names_of(store, topic)
    for bad in ("../x.parquet.tmp", "/etc/passwd", names[0], "", "a/b.parquet.tmp"):
        with pytest.raises(InvalidArgument):
            await store.swap(topic, 0, names[:2], [bad], is_compacted=False, kept_from=0)
    made = write(store, topic, table_of(store, topic, names[:2]), (0, 20))
    with pytest.raises(InvalidArgument, match="neighbours"):
        await store.swap(topic, 0, [names[0], names[2]], [made], is_compacted=False, kept_from=0)
    with pytest.raises(SegmentsChanged):
        await store.swap(topic, 0, [names[0], "gone.parquet"], [made], is_compacted=False, kept_from=0)
    await store.close()


async def test_what_retention_dropped_meanwhile_is_not_swapped_and_a_swapped_one_not_dropped(
    tmp_path: Path,
) -> None:
    store, topic = await make(tmp_path / "data")
    names, infos = names_of(store, topic), store.segments(topic)
    made = write(store, topic, table_of(store, topic, names[:2]), (0, 20))
    await store.drop(infos[:1])
    with pytest.raises(SegmentsChanged):
        await store.swap(topic, 0, names[:2], [made], is_compacted=False, kept_from=0)
    before = await contents(store)
    await merge(store, topic, 0, 2)
    await store.drop(infos[1:2])  # Decided on before the merge: it holds more by now.
    assert await contents(store) == before
    await store.close()


async def test_a_reader_is_served_across_a_swap_and_a_held_file_stays(tmp_path: Path) -> None:
    now = [1_000_000]
    store = await open_store(tmp_path / "data", journal=QUICK_ROTATION, now_us=lambda: now[0])
    topic = await create_topic(store, "orders")
    stream = StreamId(topic.id, 0)
    for number in range(2):
        await append(store, draft(stream, [b"%d" % number] * 5))
        await store.rotate()
        await store.seal((), ())
    held = store.layout(topic, 60.0).partitions[0].segments
    reading = [store.read(stream, offset, 1) for offset in range(10)]
    await merge(store, topic, 0, 2)
    for offset, work in enumerate(reading):
        assert (await work)[0].batch.column("offset")[0].as_py() == offset
    paths = [tmp_path / "data" / each.file for each in held]
    assert all(path.exists() for path in paths)
    await store.release()
    assert all(path.exists() for path in paths)
    now[0] += 61_000_000
    await store.release()
    assert not any(path.exists() for path in paths)
    await store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("step", ["sync", "rename", "sync_directory", "reserve", "remove"])
async def test_a_swap_that_fails_at_any_step_loses_nothing(tmp_path: Path, step: str, error: int) -> None:
    disk = FaultyDisk()
    store, topic = await make(tmp_path / "data", disk)
    before = await contents(store)
    disk.fail(step, error=error)
    with suppress(SparrowError, OSError):
        await merge(store, topic, 0, 3)
    disk.heal()
    assert await contents(store) == before
    with suppress(SparrowError, OSError):
        await merge(store, topic, 0, 2)
    assert await contents(store) == before
    await store.close()
    again = await open_store(tmp_path / "data", journal=QUICK_ROTATION)
    assert await contents(again) == before
    assert again.recovered.report.damages == ()
    files = sorted(path.name for path in (tmp_path / "data/topics/orders/0").iterdir())
    assert files == names_of(again, topic), "nothing is left over"
    await again.close()


async def test_power_loss_between_any_two_steps_of_a_swap_leaves_one_side_whole(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "base")
    before = await contents(store)
    await store.close()
    stream = StreamId(topic.id, 0)
    kept = [0, 9, 17]
    after = {stream: [row for row in before[stream] if row[0] in kept or row[0] >= 20]}
    outcomes = set()

    async def work(store: LocalStore) -> None:
        await compact(store, topic, kept, count=2)

    async def check(store: LocalStore, is_done: bool) -> None:
        found: Contents = await contents(store)
        assert found == after if is_done else found in (before, after)
        outcomes.add(found == after)
        files = sorted(path.name for path in (tmp_path / "found/topics/orders/0").iterdir())
        assert files == names_of(store, topic), "nothing is left over"

    assert await crash_everywhere(tmp_path, tmp_path / "base", work, check) >= 6
    assert outcomes == {True, False}


async def test_the_losing_side_is_kept_when_the_winning_file_is_missing(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    directory = tmp_path / "data/topics/orders/0"
    saved = [directory / name for name in names_of(store, topic)[:2]]
    for path in saved:
        shutil.copy(path, path.with_suffix(".saved"))
    await merge(store, topic, 0, 2)
    (directory / str(SegmentName(0, 1))).unlink()
    for path in saved:
        path.with_suffix(".saved").rename(path)
    await store.close()
    again = await open_store(tmp_path / "data", journal=QUICK_ROTATION)
    assert len(again.recovered.report.damages) == 1
    assert all(path.exists() for path in saved), "they may be all that is left"
    await again.close()


# Offline.


async def test_a_compacted_directory_is_found_whole(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    await compact(store, topic, [5, 6, 25, 39])
    await store.close()
    verdict = verify(tmp_path / "data")
    assert (verdict.damages, verdict.notes) == ([], [])
    assert not verify(tmp_path / "data", is_fast=True).damages


@pytest.mark.parametrize("is_catalog_lost", [True, False])
@pytest.mark.parametrize("leftover", [False, True])
async def test_a_rebuilt_catalog_serves_the_rewritten_side(
    tmp_path: Path, is_catalog_lost: bool, leftover: bool
) -> None:
    store, topic = await make(tmp_path / "data")
    directory = tmp_path / "data/topics/orders/0"
    saved = [(path, path.read_bytes()) for path in sorted(directory.iterdir())]
    await compact(store, topic, [5, 25, 29], count=3)
    expected = await contents(store)
    await store.close()
    if leftover:
        for path, content in saved[:2]:
            path.write_bytes(content)
    if is_catalog_lost:
        for path in (tmp_path / "data").glob("catalog.*"):
            path.unlink()
    report = rebuild(tmp_path / "data", now_us=1)
    assert [loss for loss in report.losses if loss.topic] == []
    again = await open_store(tmp_path / "data", journal=QUICK_ROTATION)
    assert await contents(again) == expected
    assert again.bounds(StreamId(topic.id, 0)) == (0, 45)
    await again.close()
    assert verify(tmp_path / "data").damages == []


async def test_a_damaged_row_group_of_a_compacted_segment_costs_no_other(tmp_path: Path) -> None:
    store, topic = await make(tmp_path / "data")
    kept = list(range(2, 38, 3))
    await compact(store, topic, kept)
    stream = StreamId(topic.id, 0)
    segment = store._index.of(stream)[0]
    groups = segment.row_groups()
    assert len(groups) > 2
    await store.close()
    path = tmp_path / "data/topics/orders/0" / segment.file_name
    raw = bytearray(path.read_bytes())
    raw[groups[1].byte_start + groups[1].byte_length // 2] ^= 1
    path.write_bytes(bytes(raw))
    for path in (tmp_path / "data").glob("catalog.*"):
        path.unlink()
    report = rebuild(tmp_path / "data", now_us=1)
    gaps = [(loss.start_offset, loss.end_offset) for loss in report.losses if loss.topic]
    assert gaps == [(groups[1].first_offset, groups[2].first_offset)], "the gaps of compaction are none"
    again = await open_store(tmp_path / "data", journal=QUICK_ROTATION)
    found = [offset for offset, _ in (await contents(again))[stream]]
    lost = range(groups[1].first_offset, groups[2].first_offset)
    assert found == [*(each for each in kept if each not in lost), *range(40, 45)]
    await again.close()
