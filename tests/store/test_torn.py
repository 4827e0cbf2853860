"""A write that a crash cut short, at every byte: the last batch is there whole or not at all.

Most cases run on the journal and recovery alone, because a whole store for each of some thousand bytes
would take minutes; a few go through the whole store. A write is torn in three ways: the file ends early,
zeros follow (preallocated space), or what the disk held before follows.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from sparrow.model.message import StreamId
from sparrow.model.topic import Durability
from sparrow.store.batch import decode
from sparrow.store.disk import Disk
from sparrow.store.entry import FILE_HEADER_BYTES, Header, Kind, Scan
from sparrow.store.hot import HotWindow
from sparrow.store.journal import Journal
from sparrow.store.journalfile import JournalFile, file_name
from sparrow.store.ports import BatchDraft
from sparrow.store.recovery import Replay, scan_journal
from sparrow.testing.store import append, contents, counting_clock, create_topic, draft, open_store

STREAMS = [StreamId(1, partition) for partition in range(3)]
Log = dict[StreamId, list[bytes]]
Tear = Callable[[bytes, int], bytes]

EARLIER = [
    [draft(STREAMS[0], [b"a0", b"a1"])],
    [draft(STREAMS[0], [b"a2"]), draft(STREAMS[1], [b"b0", b"b1"])],
    [draft(STREAMS[2], [b"c0"])],
]
LAST_BATCH = [draft(STREAMS[0], [b"last-0", b"last-1", b"last-2"])]
LAST_CHAIN = [draft(stream, [b"last-%d" % stream.partition]) for stream in STREAMS]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Memory, where there is some: thousands of journals are synced here, and no power will fail."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


class Bench:
    """A journal directory that is opened without a catalog."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.hot = HotWindow()
        self.files: dict[int, JournalFile] = {}
        self.damages: Sequence[object] = ()

    def recover(self) -> Journal:
        for stream in STREAMS:
            self.hot.open(stream)
        found = [(int(path.stem), path) for path in sorted(self.directory.glob("*.wal"))]
        scan = scan_journal(Disk(), found, 1, 0)
        Replay(scan, self.hot)
        scan.cut()
        for path in scan.removable:
            path.unlink()
        self.damages = scan.damages
        journal = Journal(
            disk=Disk(),
            directory=self.directory,
            hot=self.hot,
            now_us=counting_clock(),
            catalog_version=lambda: 1,
            file_bytes=8192,
            group_bytes_max=4096,
            pending_bytes_max=8192,
            sync_interval_s=1.0,
            on_new_file=lambda number: None,
        )
        lengths = [scan.end_of(file) for file in scan.files]
        journal.adopt(scan.files, scan.last_number, (lengths or [0])[-1], scan.last_time_us)
        self.files = journal.files
        return journal

    def log(self) -> Log:
        found: Log = {}
        for stream, hot in self.hot:
            found[stream] = []
            for place in hot.places_from(0):
                header = self.files[place.file_number].header(place.position)
                assert header.base_offset == len(found[stream]), "offsets are dense"
                body = self.files[place.file_number].body(header)
                found[stream].extend(decode(body, header.columns).column("data").to_pylist())
        return found


async def store(journal: Journal, drafts: Sequence[BatchDraft]) -> None:
    await journal.append(drafts, Durability.DURABLE, lambda commit: None)


async def image_of(directory: Path, last: Sequence[BatchDraft]) -> tuple[bytes, Log, Log, int, int]:
    """A journal file as a kill leaves it: its bytes, the log before and with ``last``, and where that is."""
    bench = Bench(directory)
    journal = bench.recover()
    for drafts in EARLIER:
        await store(journal, drafts)
    before, start = bench.log(), journal.files[1].end
    await store(journal, last)
    after, end = bench.log(), journal.files[1].end
    image = journal.files[1].path.read_bytes()
    await journal.close()
    assert len(image) > end
    return image, before, after, start, end


def cut(image: bytes, position: int) -> bytes:
    return image[:position]


def blank(image: bytes, position: int) -> bytes:
    return image[:position] + bytes(len(image) - position)


def garbage(image: bytes, position: int) -> bytes:
    return image[:position] + random.Random(position).randbytes(len(image) - position)


@pytest.mark.parametrize("tear", [cut, blank, garbage])
@pytest.mark.parametrize("last", [LAST_BATCH, LAST_CHAIN], ids=["batch", "chain"])
async def test_a_write_torn_at_any_byte_is_there_whole_or_not_at_all(
    tmp_path: Path, last: list[BatchDraft], tear: Tear
) -> None:
    image, before, after, start, end = await image_of(tmp_path / "made", last)
    there = 0
    for position in range(start, end + 1):
        torn = tear(image, position)
        bench = Bench(tmp_path / "torn")
        (bench.directory / file_name(1)).write_bytes(torn)
        journal = bench.recover()
        assert bench.damages == [], f"a torn write is no damage, at byte {position}"
        is_whole = torn[:end] == image[:end]
        assert bench.log() == (after if is_whole else before) or bench.log() == after, f"at byte {position}"
        assert bench.log() == before or torn[start : end - 8] == image[start : end - 8], (
            "only padding may lack"
        )
        there += bench.log() == after
        await _goes_on_densely(bench, journal, position)
        shutil.rmtree(bench.directory)
    assert 1 <= there <= 9, "the whole write and at most its padding"


async def _goes_on_densely(bench: Bench, journal: Journal, position: int) -> None:
    expected = bench.log()
    await store(journal, [draft(stream, [b"next"]) for stream in STREAMS])
    for stream in STREAMS:
        expected[stream] = [*expected[stream], b"next"]
    assert bench.log() == expected, f"at byte {position}"
    await journal.close()
    again = Bench.__new__(Bench)
    again.directory, again.hot = bench.directory, HotWindow()
    await again.recover().close()
    assert again.damages == []
    assert again.log() == expected, f"after one more start, at byte {position}"


@pytest.mark.parametrize("tear", [cut, blank, garbage])
async def test_a_file_torn_at_any_byte_of_its_own_header_is_no_obstacle(tmp_path: Path, tear: Tear) -> None:
    image, *_ = await image_of(tmp_path / "made", LAST_BATCH)
    fresh = image[:FILE_HEADER_BYTES].ljust(len(image), b"\0")
    for position in range(FILE_HEADER_BYTES):
        bench = Bench(tmp_path / "torn")
        (bench.directory / file_name(1)).write_bytes(tear(fresh, position))
        journal = bench.recover()
        assert bench.damages == []
        await _goes_on_densely(bench, journal, position)
        shutil.rmtree(bench.directory)


async def test_a_whole_store_opens_after_a_torn_write_and_goes_on_densely(tmp_path: Path) -> None:
    made = await open_store(tmp_path / "made")
    topic = await create_topic(made, "orders", 3)
    streams = [StreamId(topic.id, partition) for partition in range(3)]
    await append(made, *(draft(stream, [b"first"]) for stream in streams))
    before = await contents(made)
    await append(made, *(draft(stream, [b"second", b"third"]) for stream in streams))
    after = await contents(made)
    shutil.copytree(tmp_path / "made", tmp_path / "killed")
    await made.close()
    wal = tmp_path / "killed" / "journal" / file_name(1)
    image = wal.read_bytes()
    chain = _batches(image)[3:]
    for position in range(chain[0].position, chain[-1].end_position + 1, 97):
        shutil.copytree(tmp_path / "killed", tmp_path / "torn")
        (tmp_path / "torn" / "journal" / file_name(1)).write_bytes(blank(image, position))
        found = await open_store(tmp_path / "torn")
        read = await contents(found)
        assert read in (before, after)
        assert found.recovered.report.damages == ()
        commit = await append(found, *(draft(stream, [b"next"]) for stream in streams))
        assert [one.base_offset for one in commit.appended] == [len(read[stream]) for stream in streams]
        await found.close()
        shutil.rmtree(tmp_path / "torn")


def _batches(image: bytes) -> list[Header]:
    items = Scan(image, pa.py_buffer(image), 1, len(image))
    return [item for item in items if isinstance(item, Header) and item.kind == Kind.BATCH]
