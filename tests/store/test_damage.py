"""Damage at rest: flipped bits, missing and cut files. All of it is found, none of it is served.

The flips are spread over journal, lake and catalog of two directories with the same content: one closed in
order, one left by a kill. Each flip is judged by opening the directory and reading everything. It must be
*found*: the directory is refused with a typed error, or opening or reading reports damage, or a torn tail
was cut. Whatever is served must be exactly what was stored, and only what the damaged unit held may be
missing: one journal entry, one row group, or one segment when its footer is hit.

A flip may pass unseen where the byte carries no content. These are all such bytes, and nothing else is:

* journal: the zeros that fill an entry up to a multiple of 8;
* catalog of a killed directory: bytes that SQLite does not use (a free page, the gap in a page, a frame of
  its log that is older than the last checkpoint), and frames that a newer one of the same page covers;
  after an orderly close the clean marker vouches for these too.

One thing cannot be told apart from a write that a crash tore: a flip in what was written after the last
entry that bears witness. It is cut and reported as torn bytes, never served.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.errors import (
    CatalogDamaged,
    DataDamaged,
    DataDirectoryUnusable,
    SparrowError,
    StorageError,
)
from sparrow.model.message import StreamId
from sparrow.model.settings import MIB, Settings
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.entry import FILE_HEADER_BYTES, Header, Scan
from sparrow.store.journalfile import file_name
from sparrow.store.local import LocalStore
from sparrow.testing.store import JOURNAL, open_store

SMALL = msgspec.structs.replace(JOURNAL, file_bytes=32 * 1024)
FLIPS = int(os.environ.get("SPARROW_FLIPS", "1000"))
SEED = int(os.environ.get("SPARROW_FLIP_SEED", "20240229"))

SCHEMA = TABLE_SCHEMA
Rows = dict[StreamId, pa.Table]


class Served(NamedTuple):
    """What a directory gives when it is opened and read to the end."""

    rows: Rows
    catalog: object
    is_reported: bool
    refusal: SparrowError | None


class Sample(NamedTuple):
    """A directory, its true content, and where its journal entries lie."""

    root: Path
    truth: Served
    entries: dict[str, list[Header]]


@pytest.fixture(scope="module")
def workshop() -> Iterator[Path]:
    """Memory, where there is some: no power fails here, and a thousand directories are copied."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def samples(workshop: Path) -> dict[str, Sample]:
    """The same content, closed in order and left by a kill."""
    return asyncio.run(_samples(workshop))


async def _samples(workshop: Path) -> dict[str, Sample]:
    live = workshop / "live"
    store = await open_store(live, journal=SMALL)
    # The broker thinks that files are large, so that it seals only when it is told to.
    broker = await Broker.open(Settings(data=str(live)), store=store)
    await _fill(broker)
    shutil.copytree(live, workshop / "killed")
    await broker.close()
    live.rename(workshop / "closed")
    return {name: await _sample(workshop / name, workshop) for name in ("closed", "killed")}


async def _fill(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.create_topic("bills", partitions=1, codec="lz4")
    producer = await broker.producer("shop")
    chance = random.Random(7)
    for number in range(30):
        keys = [f"k{chance.randrange(50)}" for _ in range(12)]
        data = [chance.randbytes(chance.randrange(300)) for _ in keys]
        await producer.publish_batch("orders", data, keys=keys, attributes=[{"n": key} for key in keys])
        await broker.publish_batch("bills", data, idempotency_keys=[f"{number}-{at}" for at in range(12)])
        await broker.publish("orders", b"single %d" % number, key="one", priority=number)
        if number in (6, 12, 18):
            await broker.seal()


async def _sample(root: Path, workshop: Path) -> Sample:
    shutil.copytree(root, workshop / "look")
    truth = await serve(workshop / "look")
    shutil.rmtree(workshop / "look")
    assert truth.refusal is None
    assert not truth.is_reported, "or every flip would seem to be found"
    assert sum(table.num_rows for table in truth.rows.values()) == 30 * 25
    entries = {}
    for path in sorted((root / "journal").glob("*.wal")):
        raw = path.read_bytes()
        found = Scan(raw, pa.py_buffer(raw), int(path.stem), len(raw))
        entries[path.name] = [item for item in found if isinstance(item, Header)]
    return Sample(root, truth, entries)


async def serve(root: Path, on_damage: str = "skip") -> Served:
    """Opens and reads everything, stepping over damage as a reader would."""
    journal = msgspec.structs.replace(SMALL, on_damage=on_damage)
    try:
        store = await open_store(root, journal=journal)
    except SparrowError as error:
        return Served({}, None, True, error)
    report = store.recovered.report
    is_reported = bool(report.damages or report.torn_bytes)
    rows: Rows = {}
    try:
        for topic in store.topics():
            for partition in range(topic.partitions):
                stream = StreamId(topic.id, partition)
                rows[stream], has_met_damage = await _read(store, stream)
                is_reported |= has_met_damage
        return Served(rows, _catalog(store), is_reported, None)
    finally:
        await store.close()


async def _read(store: LocalStore, stream: StreamId) -> tuple[pa.Table, bool]:
    offset, end = store.bounds(stream)
    found: list[pa.RecordBatch] = []
    has_met_damage = False
    while offset < end:
        try:
            read = await store.read(stream, offset, MIB)
        except DataDamaged as error:
            has_met_damage = True
            offset = max(offset + 1, error.details["end_offset"])
            continue
        if not read:
            break
        found += [one.batch for one in read]
        offset = read[-1].end_offset
    return pa.Table.from_batches(found, SCHEMA), has_met_damage


def _catalog(store: LocalStore) -> object:
    recovered = store.recovered
    segments = [store.segments(topic) for topic in store.topics()]
    return (store.topics(), segments, recovered.producer_epochs, recovered.producer_checkpoints)


# A thousand flips.


class Target(NamedTuple):
    """A byte to be hit."""

    path: Path
    position: int
    bit: int


def _targets(sample: Sample, kind: str, count: int, chance: random.Random) -> Iterator[Target]:
    files = sorted(path for path in sample.root.rglob("*") if path.is_file() and kind_of(path) == kind)
    sizes = [path.stat().st_size for path in files]
    for _ in range(count):
        # Half by size, half file by file, so that small files are hit too.
        weights = sizes if chance.random() < 0.5 else [min(size, 1) for size in sizes]
        (path,) = chance.choices(files, weights)
        used = _used(sample, path)
        is_in_use = chance.random() < 0.9
        position = chance.randrange(used) if is_in_use else chance.randrange(path.stat().st_size)
        yield Target(path.relative_to(sample.root), position, chance.randrange(8))


def kind_of(path: Path) -> str:
    if path.name.startswith("catalog"):
        return "catalog"
    return {".wal": "journal", ".parquet": "lake"}.get(path.suffix, "other")


def _used(sample: Sample, path: Path) -> int:
    """Where a preallocated file's content ends."""
    entries = sample.entries.get(path.name)
    return entries[-1].end_position if entries else path.stat().st_size


@pytest.mark.parametrize("name", ["closed", "killed"])
@pytest.mark.parametrize(("kind", "share"), [("journal", 0.2), ("lake", 0.2), ("catalog", 0.1)])
async def test_every_flipped_bit_is_found_or_carried_no_content_and_nothing_altered_is_served(
    samples: dict[str, Sample], workshop: Path, name: str, kind: str, share: float
) -> None:
    sample, judge = samples[name], JUDGES[kind]
    unseen = 0
    for target in _targets(sample, kind, round(FLIPS * share), random.Random(f"{SEED} {name} {kind}")):
        copy = workshop / "flipped"
        _copy(sample.root, copy, target.path)
        _flip(copy / target.path, target)
        served = await serve(copy)
        shutil.rmtree(copy)
        complaint = judge(sample, target, served)
        assert complaint is None, f"{name} {target}: {complaint} (seed {SEED})"
        unseen += not served.is_reported
    print(f"{name} {kind}: {unseen} of {round(FLIPS * share)} flips hit bytes without content")


def _copy(source: Path, target: Path, changed: Path) -> None:
    """Segments are never written again, so all but the changed one can be shared."""

    def copy(one: str, other: str) -> None:
        is_shared = one.endswith(".parquet") and not one.endswith(str(changed))
        (os.link if is_shared else shutil.copyfile)(one, other)

    shutil.copytree(source, target, copy_function=copy)


def _flip(path: Path, target: Target) -> None:
    with path.open("r+b") as file:
        file.seek(target.position)
        (byte,) = file.read(1)
        file.seek(target.position)
        file.write(bytes([byte ^ 1 << target.bit]))


def _altered_or_invented(sample: Sample, served: Served) -> str | None:
    for stream, table in served.rows.items():
        if not table.equals(_true_rows(sample, stream, table)):
            return f"{stream} serves what was not stored"
    return None


def _true_rows(sample: Sample, stream: StreamId, table: pa.Table) -> pa.Table:
    truth = sample.truth.rows[stream]
    offsets = table["offset"]
    if len(offsets) and offsets[-1].as_py() >= truth.num_rows:
        return truth
    return truth.take(offsets) if table.num_rows != truth.num_rows else truth


def _missing(sample: Sample, served: Served) -> set[tuple[StreamId, int]]:
    return {
        (stream, offset)
        for stream, table in sample.truth.rows.items()
        for offset in set(range(table.num_rows)) - set(served.rows[stream]["offset"].to_pylist())
    }


def judge_journal(sample: Sample, target: Target, served: Served) -> str | None:
    if served.refusal is not None:
        return f"the policy is skip, but it was refused: {served.refusal}"
    entries = sample.entries[target.path.name]
    hit = [one for one in entries if one.position <= target.position < one.end_position]
    may_lack = {
        (StreamId(one.topic_id, one.partition), offset)
        for one in [*hit, *_unwitnessed(sample, target)]
        for offset in range(one.base_offset, one.end_offset)
    }
    missing = _missing(sample, served)
    if missing - may_lack:
        return f"{len(missing - may_lack)} messages are missing that were not hit"
    is_padding = bool(hit) and target.position >= hit[0].body_position + hit[0].body_length
    if not served.is_reported and not is_padding:
        return "the flip was not found"
    if is_padding and missing:
        return "padding was hit, and messages are missing"
    return _altered_or_invented(sample, served)


def _unwitnessed(sample: Sample, target: Target) -> list[Header]:
    """Entries of the last file that nothing later vouches for; only a kill leaves such batches."""
    last = max(sample.entries)
    if target.path.name != last:
        return []
    witness = max((one.durable_position for one in sample.entries[last]), default=0)
    start = min(target.position, max(witness, FILE_HEADER_BYTES))
    return [one for one in sample.entries[last] if one.position >= max(start, witness)]


def judge_lake(sample: Sample, target: Target, served: Served) -> str | None:
    if served.refusal is not None:
        return f"the policy is skip, but it was refused: {served.refusal}"
    if not served.is_reported:
        return "the flip was not found"
    first = int(target.path.stem)
    missing = _missing(sample, served)
    topics = {topic.name: topic.id for topic in sample.truth.catalog[0]}  # type: ignore[index]
    stream = StreamId(topics[target.path.parts[1]], int(target.path.parts[2]))
    segments = [one for listed in sample.truth.catalog[1] for one in listed]  # type: ignore[index]
    (segment,) = [one for one in segments if one.stream == stream and one.first_offset == first]
    may_lack = {(stream, offset) for offset in range(first, segment.end_offset)}
    if not missing or missing - may_lack:
        return f"{len(missing)} messages are missing, {len(missing - may_lack)} of other segments"
    return _altered_or_invented(sample, served)


def judge_catalog(sample: Sample, target: Target, served: Served) -> str | None:
    """Found, or the directory is what it was in every respect."""
    if served.refusal is not None:
        is_typed = isinstance(served.refusal, StorageError)
        return None if is_typed else f"refused with {served.refusal!r}"
    if sample.root.name == "closed":
        return "the clean marker vouches for every byte, and the flip was not found"
    if served.is_reported and not sample.truth.is_reported:
        return _altered_or_invented(sample, served)
    if served.catalog != sample.truth.catalog:
        return "the catalog says something else"
    if _missing(sample, served):
        return "messages are missing"
    return _altered_or_invented(sample, served)


Judge = Callable[[Sample, Target, Served], str | None]
JUDGES: dict[str, Judge] = {"journal": judge_journal, "lake": judge_lake, "catalog": judge_catalog}


# Files that are missing or cut.


@pytest.fixture
def damaged(samples: dict[str, Sample], workshop: Path) -> Iterator[tuple[Sample, Path]]:
    """A copy of the closed directory to be damaged."""
    copy = workshop / "damaged"
    shutil.copytree(samples["closed"].root, copy)
    yield samples["closed"], copy
    shutil.rmtree(copy)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("how", ["missing", "empty", "headless"])
async def test_a_missing_or_emptied_journal_file_is_found_and_the_others_are_served(
    damaged: tuple[Sample, Path], place: str, how: str
) -> None:
    sample, root = damaged
    files = sorted((root / "journal").glob("*.wal"))
    assert len(files) >= 3
    gone = {"first": files[0], "middle": files[len(files) // 2], "last": files[-1]}[place]
    if how == "missing":
        gone.unlink()
    else:
        gone.write_bytes(b"" if how == "empty" else bytes(gone.stat().st_size))
    shutil.copytree(root, root.with_name("halting"))
    served = await serve(root)
    assert served.refusal is None
    assert served.is_reported
    lost = {
        (StreamId(one.topic_id, one.partition), offset)
        for one in sample.entries[gone.name]
        for offset in range(one.base_offset, one.end_offset)
    }
    assert _missing(sample, served) == lost
    assert _altered_or_invented(sample, served) is None
    halted = await serve(root.with_name("halting"), on_damage="halt")
    assert isinstance(halted.refusal, DataDamaged)
    assert (await serve(root.with_name("halting"), on_damage="halt")).refusal is not None, (
        "nothing was changed"
    )
    shutil.rmtree(root.with_name("halting"))


@pytest.mark.parametrize("how", ["missing", "cut", "empty", "longer"])
async def test_a_missing_or_cut_segment_is_found_and_the_others_are_served(
    damaged: tuple[Sample, Path], how: str
) -> None:
    sample, root = damaged
    gone = sorted((root / "topics").rglob("*.parquet"))[1]
    raw = gone.read_bytes()
    gone.unlink()
    if how != "missing":
        gone.write_bytes({"cut": raw[:-1], "empty": b"", "longer": raw + b"\0"}[how])
    shutil.copytree(root, root.with_name("halting"))
    served = await serve(root)
    assert served.refusal is None
    assert served.is_reported
    missing = _missing(sample, served)
    assert missing
    assert {stream for stream, _ in missing} == {next(iter(missing))[0]}
    assert _altered_or_invented(sample, served) is None
    halted = await serve(root.with_name("halting"), on_damage="halt")
    assert isinstance(halted.refusal, DataDamaged)
    shutil.rmtree(root.with_name("halting"))


@pytest.mark.parametrize("name", ["closed", "killed"])
@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "older"])
async def test_a_lost_catalog_is_refused_and_named(
    samples: dict[str, Sample], workshop: Path, name: str, how: str
) -> None:
    root = workshop / "damaged"
    shutil.copytree(samples[name].root, root)
    for path in root.glob("catalog.*"):
        if how == "missing" and path.suffix != ".clean":
            path.unlink()
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "garbage":
            path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
        elif how == "older":
            path.unlink()
    if how == "older":
        await (await open_store(workshop / "older")).close()
        for path in (workshop / "older").glob("catalog.*"):
            shutil.copyfile(path, root / path.name)
        shutil.rmtree(workshop / "older")
    before = _listing(root)
    for _ in range(2):
        served = await serve(root)
        assert isinstance(served.refusal, CatalogDamaged), served.refusal
    kept = {path: size for path, size in before.items() if not path.startswith("catalog")}
    assert kept.items() <= _listing(root).items(), "messages are left alone"
    shutil.rmtree(root)


def _listing(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": "one"}', b'{"format": 0}', b"[]"])
async def test_a_damaged_directory_marker_is_refused_and_left_as_it_is(
    damaged: tuple[Sample, Path], content: bytes
) -> None:
    _, root = damaged
    (root / "sparrow.json").write_bytes(content)
    before = _listing(root)
    served = await serve(root)
    assert isinstance(served.refusal, DataDirectoryUnusable)
    assert "sparrow.json" in served.refusal.message
    assert _listing(root) == before


async def test_damage_found_while_sealing_is_left_out_reported_and_its_file_kept(
    damaged: tuple[Sample, Path],
) -> None:
    sample, root = damaged
    name, entries = next((name, found) for name, found in sample.entries.items() if len(found) > 4)
    hit = entries[2]
    store = await open_store(root, journal=SMALL)
    _flip(root / "journal" / name, Target(Path(name), hit.body_position + 9, 3))
    while store.finished_bytes():
        await store.seal((), ())
    assert [damage.position for damage in store.state().damages] == [hit.position]
    assert (root / "journal" / name).with_suffix(".damaged").exists()
    rows = {stream: (await _read(store, stream))[0] for stream in sample.truth.rows}
    served = Served(rows, None, True, None)
    lost = {
        (StreamId(hit.topic_id, hit.partition), offset) for offset in range(hit.base_offset, hit.end_offset)
    }
    assert _missing(sample, served) == lost
    assert _altered_or_invented(sample, served) is None
    await store.close()
    assert file_name(1) not in os.listdir(root / "journal")
