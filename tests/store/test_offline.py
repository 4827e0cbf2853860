"""The offline tools on real data directories: what is found, what is kept, and that nothing is doubled."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pyarrow.parquet as pq
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.errors import (
    CatalogDamaged,
    DataDirectoryLocked,
    DataDirectoryNewer,
    NotADataDirectory,
    NotFound,
    StorageError,
    TopicNotFound,
)
from sparrow.model.message import StreamId, parse_message_id
from sparrow.model.settings import JournalSettings, LakeSettings, Settings
from sparrow.store.offline import access, rebuilding
from sparrow.store.offline.examiner import Examiner
from sparrow.store.offline.inspection import Inspection
from sparrow.store.offline.rebuilding import Rebuilt, plan
from sparrow.store.offline.soundness import examine
from sparrow.store.offline.verification import Verdict, verify

NOW_US = 1_800_000_000_000_000
TOPICS = {"orders": 3, "audit.log": 1, "quiet": 2}
Place = tuple[str, int, int]


class Made(NamedTuple):
    """A directory with two sealed rounds and one unsealed, and all that was published to it."""

    root: Path
    messages: dict[Place, bytes]
    ids: dict[str, int]
    producer_id: int


def settings(root: Path, on_damage: str = "halt") -> Settings:
    """Small row groups; and opening refuses any damage, so that a rebuilt directory must be whole."""
    journal: Any = JournalSettings(on_damage=on_damage)  # type: ignore[arg-type]
    return Settings(data=str(root), lake=LakeSettings(row_group_bytes=65536), journal=journal)


async def publish_round(broker: Broker, name: str, found: dict[Place, bytes]) -> None:
    for topic in ("orders", "audit.log"):
        data = [f"{topic} {name} {number} ".encode() * 40 for number in range(300)]
        receipts = await broker.publish_batch(topic, data, keys=[f"k{number % 40}" for number in range(300)])
        found.update({(topic, r.partition, r.offset): d for r, d in zip(receipts, data, strict=True)})


async def make(root: Path) -> Made:
    messages: dict[Place, bytes] = {}
    broker = await Broker.open(settings(root))
    topics = {name: await broker.create_topic(name, partitions=count) for name, count in TOPICS.items()}
    await broker.create_topic("short-lived")
    await broker.delete_topic("short-lived")
    producer = await broker.producer("till")
    subscription = await broker.subscribe("billing", "audit.log", start="earliest")
    for name in ("first", "second", "third"):
        await publish_round(broker, name, messages)
        data = [f"till {name} {number}".encode() for number in range(7)]
        receipts = await producer.publish_batch("orders", data)
        messages.update({("orders", r.partition, r.offset): d for r, d in zip(receipts, data, strict=True)})
        if name != "third":
            await broker.seal()
    for message in await subscription.pull(max_messages=10, timeout_s=1.0):
        await message.ack()
    await broker.close()
    return Made(root, messages, {name: topic.id for name, topic in topics.items()}, producer.id)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return asyncio.run(make(tmp_path_factory.mktemp("offline") / "data"))


@pytest.fixture
def made(pristine: Made, tmp_path: Path) -> Made:
    """A copy of the directory that a test may harm."""
    shutil.copytree(pristine.root, tmp_path / "data")
    return pristine._replace(root=tmp_path / "data")


# Harm.


def delete_catalog(root: Path) -> None:
    for path in root.glob("catalog.*"):
        path.unlink()


def flip_bits(root: Path, seed: int = 1, count: int = 40) -> None:
    """Enough flips that the catalog cannot be opened."""
    chance = random.Random(seed)
    content = bytearray((root / "catalog.db").read_bytes())
    for _ in range(count):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    (root / "catalog.db").write_bytes(content)


def truncate_catalog(root: Path) -> None:
    content = (root / "catalog.db").read_bytes()
    (root / "catalog.db").write_bytes(content[: len(content) // 3])


def empty_catalog(root: Path) -> None:
    (root / "catalog.db").write_bytes(b"")


HARMS: list[Callable[[Path], None]] = [delete_catalog, flip_bits, truncate_catalog, empty_catalog]


def segments_of(made: Made, topic: str, partition: int) -> list[Path]:
    return sorted((made.root / "topics" / topic / str(partition)).glob("*.parquet"))


def damage_data(path: Path) -> None:
    """Flips a bit in the middle of the first row group's data."""
    column = pq.read_metadata(path).row_group(0).column(3)
    position = column.data_page_offset + column.total_compressed_size // 2
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def damage_footer(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-20])


def first_group_of(path: Path) -> range:
    """The offsets that ``damage_data`` makes unreadable; there are more row groups behind them."""
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups > 1
    start = offsets_of(path).start
    return range(start, start + metadata.row_group(0).num_rows)


def offsets_of(path: Path) -> range:
    names = pq.read_metadata(path).metadata
    return range(int(names[b"sparrow.first_offset"]), int(names[b"sparrow.end_offset"]))


# Looking.


def rebuild(root: Path) -> Rebuilt:
    return rebuilding.rebuild(root, now_us=NOW_US)


async def read_all(broker: Broker) -> list[tuple[Place, bytes]]:
    found = []
    for topic in await broker.topics():
        for partition in range(topic.partitions):
            bounds = await broker.bounds(topic.name, partition)
            for message in await broker.read(
                topic.name, partition=partition, offset=bounds.start_offset, max_messages=1_000_000
            ):
                assert message.data is not None
                found.append(((topic.name, partition, message.offset), message.data))
    return found


async def served(root: Path, on_damage: str = "halt") -> list[tuple[Place, bytes]]:
    async with await Broker.open(settings(root, on_damage)) as broker:
        return await read_all(broker)


async def assert_serves_exactly(root: Path, expected: dict[Place, bytes]) -> None:
    found = await served(root)
    assert len(found) == len(dict(found)), "a message is served twice"
    assert dict(found) == expected


def state_of(root: Path) -> dict[str, str]:
    """Every file and its bytes; the lock's content too."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without(messages: dict[Place, bytes], topic: str, partition: int, lost: range) -> dict[Place, bytes]:
    return {
        place: data
        for place, data in messages.items()
        if not (place[:2] == (topic, partition) and place[2] in lost)
    }


# Rebuilding: the catalog alone is lost.


@pytest.mark.parametrize("harm", HARMS)
async def test_after_a_rebuild_every_message_is_served_exactly_once(
    made: Made, harm: Callable[[Path], None]
) -> None:
    harm(made.root)
    rebuilt = rebuild(made.root)
    assert not any(finding.has_offsets for finding in rebuilt.losses)
    await assert_serves_exactly(made.root, made.messages)


@pytest.mark.parametrize("seed", range(12))
async def test_whichever_bits_flip_in_the_catalog_no_message_is_lost(made: Made, seed: int) -> None:
    flip_bits(made.root, seed, count=1 + seed * 30)
    with pytest.raises(CatalogDamaged):
        await Broker.open(settings(made.root))
    rebuild(made.root)
    await assert_serves_exactly(made.root, made.messages)


@pytest.mark.parametrize("harm", HARMS)
async def test_after_a_rebuild_ids_go_on_and_none_comes_again(
    made: Made, harm: Callable[[Path], None]
) -> None:
    harm(made.root)
    rebuild(made.root)
    used = {(made.ids[topic], partition, offset) for topic, partition, offset in made.messages}
    more: dict[Place, bytes] = {}
    async with await Broker.open(settings(made.root)) as broker:
        assert {topic.name: topic.id for topic in await broker.topics()} == made.ids
        taken_by_the_deleted_topic = max(made.ids.values()) + 1
        assert (await broker.create_topic("new")).id > taken_by_the_deleted_topic
        for _ in range(2):
            receipts = await broker.publish_batch("orders", [b"more"] * 50, keys=[f"k{n}" for n in range(50)])
            ids = [tuple(parse_message_id(receipt.message_id)) for receipt in receipts]
            assert not used & set(ids)
            used.update(ids)  # type: ignore[arg-type]
            more.update({("orders", receipt.partition, receipt.offset): b"more" for receipt in receipts})
            await broker.seal()
    await assert_serves_exactly(made.root, made.messages | more)
    for partition in range(3):
        offsets = sorted(o for t, p, o in made.messages | more if (t, p) == ("orders", partition))
        assert offsets == list(range(len(offsets))), "offsets go on without a gap"


async def test_a_producer_that_is_kept_is_recognised_and_one_that_is_lost_is_not_mistaken(
    made: Made, tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(made.root, lost)
    content = bytearray((made.root / "catalog.db").read_bytes())
    content[30] ^= 1  # In SQLite's own header: all rows stay sound.
    (made.root / "catalog.db").write_bytes(content)
    rebuild(made.root)
    async with await Broker.open(settings(made.root)) as broker:
        producer = await broker.producer("till")
        assert producer.id == made.producer_id
        assert await producer.next_sequence("orders") == 21
        repeat = await producer.publish_batch(
            "orders", [f"till third {number}".encode() for number in range(7)], sequence=14
        )
        assert all(receipt.is_duplicate for receipt in repeat)
    delete_catalog(lost)
    rebuild(lost)
    async with await Broker.open(settings(lost)) as broker:
        producer = await broker.producer("till")
        assert producer.id > made.producer_id
        await producer.publish("orders", b"first of its own")
        assert await broker.seal() > 0


async def test_subscriptions_and_their_cursors_survive_damage_elsewhere_in_the_catalog(made: Made) -> None:
    content = bytearray((made.root / "catalog.db").read_bytes())
    content[30] ^= 1
    (made.root / "catalog.db").write_bytes(content)
    rebuilt = rebuild(made.root)
    assert rebuilt.is_whole
    assert (rebuilt.subscriptions, rebuilt.producers) == (1, 1)
    async with await Broker.open(settings(made.root)) as broker:
        subscription = await broker.subscription("billing")
        (message,) = await subscription.pull(max_messages=1, timeout_s=1.0)
        assert message.offset == 10, "the ten that were acked are not delivered again"


def test_the_new_catalog_is_at_least_as_new_as_all_that_was_witnessed(made: Made) -> None:
    before = access.read_catalog(made.root).version
    delete_catalog(made.root)
    rebuilt = rebuild(made.root)
    assert access.read_catalog(made.root).version == rebuilt.version >= before


def test_the_old_catalog_is_kept_under_a_name_with_the_time(made: Made) -> None:
    flip_bits(made.root)
    damaged = (made.root / "catalog.db").read_bytes()
    rebuilt = rebuild(made.root)
    assert rebuilt.old_catalog == "catalog.db.20270115T080000Z.old"
    assert (made.root / rebuilt.old_catalog).read_bytes() == damaged
    assert rebuild(made.root).old_catalog == "catalog.db.20270115T080000Z-2.old"


def test_a_log_that_is_left_without_its_catalog_still_gives_rows(made: Made, tmp_path: Path) -> None:
    """As after a crash: what was committed last lies in SQLite's log alone."""
    from sparrow.store.catalog import Catalog

    with Catalog.open(made.root / "catalog.db") as catalog:
        catalog.put_document("note", "last", b"words")
        shutil.copy(made.root / "catalog.db-wal", tmp_path / "log")
    delete_catalog(made.root)
    shutil.copy(tmp_path / "log", made.root / "catalog.db-wal")
    rebuild(made.root)
    with Catalog.open(made.root / "catalog.db") as catalog:
        assert catalog.documents("note") == {"last": b"words"}


async def test_rebuilding_twice_changes_nothing_but_the_version(made: Made) -> None:
    delete_catalog(made.root)
    first = rebuild(made.root)
    second = rebuild(made.root)
    assert second.is_whole
    assert second.topics == first.topics
    assert second.version == first.version + 1
    await assert_serves_exactly(made.root, made.messages)


def test_a_rebuilt_directory_is_whole(made: Made) -> None:
    flip_bits(made.root)
    rebuild(made.root)
    verdict = verify(made.root)
    assert verdict.damages == []


def test_a_dry_run_tells_what_a_rebuild_does_and_changes_nothing(made: Made) -> None:
    delete_catalog(made.root)
    damage_data(segments_of(made, "orders", 1)[0])
    before = state_of(made.root)
    planned = plan(made.root, now_us=NOW_US)
    assert state_of(made.root) == before
    rebuilt = rebuild(made.root)
    fields = ("version", "sealed_through", "topics", "set_aside", "losses", "resealed", "redundant")
    assert [getattr(planned, name) for name in fields] == [getattr(rebuilt, name) for name in fields]


def test_a_rebuild_that_was_interrupted_in_the_swap_loses_no_row(made: Made) -> None:
    """Rows that lay in the old log alone are found by its second name."""
    from sparrow.store.catalog import Catalog

    with Catalog.open(made.root / "catalog.db") as catalog:
        catalog.put_document("note", "last", b"words")
        old = made.root / "catalog.db.20270115T080000Z.old"
        shutil.copy(made.root / "catalog.db-wal", f"{old}-wal")
        shutil.copy(made.root / "catalog.db", f"{old}-copy")
    delete_catalog_files = [made.root / "catalog.clean", made.root / "catalog.db-wal"]
    for path in delete_catalog_files:
        path.unlink(missing_ok=True)
    Path(f"{old}-copy").replace(made.root / "catalog.db")
    old.hardlink_to(made.root / "catalog.db")
    rebuild(made.root)
    with Catalog.open(made.root / "catalog.db") as catalog:
        assert catalog.documents("note") == {"last": b"words"}


# Rebuilding: segments are lost too.


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("which", [0, 1])
async def test_a_missing_segment_is_a_gap_and_all_else_is_served(
    made: Made, harm: Callable[[Path], None], which: int
) -> None:
    harm(made.root)
    path = segments_of(made, "orders", 0)[which]
    lost = offsets_of(path)
    path.unlink()
    rebuilt = rebuild(made.root)
    gaps = [(f.topic, f.partition, f.start_offset, f.end_offset) for f in rebuilt.losses if f.has_offsets]
    starts_later = ("orders", 0, lost.start, lost.stop) not in gaps
    assert not starts_later or (which == 0 and any("starts at offset" in note.what for note in rebuilt.notes))
    await assert_serves_exactly(made.root, without(made.messages, "orders", 0, lost))


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("damage", [damage_data, damage_footer])
async def test_a_damaged_segment_is_set_aside_and_all_else_is_served(
    made: Made, harm: Callable[[Path], None], damage: Callable[[Path], None]
) -> None:
    harm(made.root)
    path = segments_of(made, "orders", 1)[1]
    lost = first_group_of(path) if damage is damage_data else offsets_of(path)
    damage(path)
    harmed = path.read_bytes()
    rebuilt = rebuild(made.root)
    assert path.exists() == (path.name in {Path(name).name for name in rebuilt.rescued})
    assert path.with_name(f"{path.name}.damaged").read_bytes() == harmed
    (gap,) = [finding for finding in rebuilt.losses if finding.has_offsets]
    assert gap.meaning == f"offsets {lost.start}–{lost.stop - 1} of orders partition 1 cannot be read"  # noqa: RUF001
    await assert_serves_exactly(made.root, without(made.messages, "orders", 1, lost))
    verdict = verify(made.root)
    assert [(f.start_offset, f.end_offset) for f in verdict.damages] == [(lost.start, lost.stop)]


async def test_sound_row_groups_of_a_damaged_segment_are_served_after_any_number_of_rebuilds(
    made: Made,
) -> None:
    path = segments_of(made, "orders", 1)[0]
    lost = first_group_of(path)
    damage_data(path)
    for _ in range(3):
        delete_catalog(made.root)
        rebuild(made.root)
        await assert_serves_exactly(made.root, without(made.messages, "orders", 1, lost))


async def fully_sealed(made: Made) -> None:
    async with await Broker.open(settings(made.root)) as broker:
        await broker.seal()


async def test_the_old_catalog_knows_where_a_stream_ended_whose_last_segment_is_gone(made: Made) -> None:
    await fully_sealed(made)
    path = segments_of(made, "audit.log", 0)[-1]
    lost = offsets_of(path)
    path.unlink()
    flip = bytearray((made.root / "catalog.db").read_bytes())
    flip[30] ^= 1
    (made.root / "catalog.db").write_bytes(flip)
    rebuild(made.root)
    async with await Broker.open(settings(made.root)) as broker:
        receipt = await broker.publish("audit.log", b"next")
        assert receipt.offset == lost.stop


async def test_a_stream_that_nothing_tells_the_end_of_goes_on_far_beyond_it(made: Made) -> None:
    await fully_sealed(made)
    delete_catalog(made.root)
    damage_footer(segments_of(made, "audit.log", 0)[-1])
    rebuilt = rebuild(made.root)
    assert any("no message id comes again" in note.meaning for note in rebuilt.notes)
    async with await Broker.open(settings(made.root)) as broker:
        receipt = await broker.publish("audit.log", b"next")
        assert receipt.offset > 10**12
        read = await broker.read("audit.log", offset=0, max_messages=10_000)
        assert [message.offset for message in read][-1] == receipt.offset


async def test_a_partition_that_never_had_a_message_starts_at_zero(made: Made) -> None:
    delete_catalog(made.root)
    rebuild(made.root)
    async with await Broker.open(settings(made.root)) as broker:
        assert (await broker.publish("quiet", b"first")).offset == 0


async def test_a_topic_whose_own_file_is_lost_too_is_named_by_its_segments(made: Made) -> None:
    delete_catalog(made.root)
    (made.root / "topics" / "orders" / "topic.json").write_bytes(b"{")
    rebuilt = rebuild(made.root)
    assert any("default policy" in finding.meaning for finding in rebuilt.losses)
    await assert_serves_exactly(made.root, made.messages)
    assert access.topic_files(made.root)[1][1] is not None, "its file is written again"


async def test_files_of_a_topic_that_nothing_names_are_moved_aside_before_a_start_removes_them(
    made: Made,
) -> None:
    delete_catalog(made.root)
    (made.root / "topics" / "orders" / "topic.json").unlink()
    for path in (made.root / "topics" / "orders").glob("*/*.parquet"):
        damage_footer(path)
    rebuild(made.root)
    (await Broker.open(settings(made.root)),)
    assert len(list((made.root / "set-aside" / "orders").glob("*/*.parquet"))) == 6


# Rebuilding: the journal and the lake both hold it.


async def overlapping(root: Path) -> tuple[dict[Place, bytes], Path]:
    """Two journal files, sealed together; and a copy of the directory from before that."""
    messages: dict[Place, bytes] = {}
    before = root.with_name("before")
    for name in ("one", "two"):
        async with await Broker.open(settings(root)) as broker:
            if name == "one":
                for topic in ("orders", "audit.log"):
                    await broker.create_topic(topic, partitions=TOPICS[topic])
            await publish_round(broker, name, messages)
    shutil.copytree(root, before)
    async with await Broker.open(settings(root)) as broker:
        await broker.seal()
    return messages, before


def restore_journal(root: Path, before: Path, *numbers: int) -> None:
    for number in numbers:
        shutil.copy(before / "journal" / f"{number:010d}.wal", root / "journal")


@pytest.mark.parametrize("numbers", [(1, 2), (2,), (1,)])
async def test_sealed_journal_files_that_were_not_removed_yet_double_nothing(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    messages, before = await overlapping(tmp_path / "data")
    restore_journal(tmp_path / "data", before, *numbers)
    delete_catalog(tmp_path / "data")
    rebuild(tmp_path / "data")
    await assert_serves_exactly(tmp_path / "data", messages)
    await assert_serves_exactly(tmp_path / "data", messages)


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_segments_of_an_interrupted_seal_yield_to_the_journal(tmp_path: Path, keep: int) -> None:
    messages, before = await overlapping(tmp_path / "data")
    made = sorted((tmp_path / "data" / "topics").rglob("*.parquet"))
    for path in made[:keep]:
        target = before / path.relative_to(tmp_path / "data")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    delete_catalog(before)
    rebuilt = rebuild(before)
    assert len(rebuilt.redundant) == keep
    assert rebuilt.sealed_through == 0
    await assert_serves_exactly(before, messages)


async def test_a_damaged_segment_is_made_again_from_a_journal_file_that_is_still_there(
    tmp_path: Path,
) -> None:
    root = tmp_path / "data"
    messages, before = await overlapping(root)
    restore_journal(root, before, 1, 2)
    path = root / "topics" / "audit.log" / "0" / f"{0:020d}.parquet"
    damage_data(path)
    delete_catalog(root)
    rebuilt = rebuild(root)
    assert not any(finding.has_offsets for finding in rebuilt.losses)
    await assert_serves_exactly(root, messages)


async def test_what_only_a_half_removed_journal_holds_is_sealed_anew(tmp_path: Path) -> None:
    """File 1 is gone and file 2 is not: one stream needs its segment, the other one's is damaged."""
    root = tmp_path / "data"
    messages, before = await overlapping(root)
    restore_journal(root, before, 2)
    damage_footer(root / "topics" / "audit.log" / "0" / f"{0:020d}.parquet")
    delete_catalog(root)
    rebuilt = rebuild(root)
    assert rebuilt.resealed == [f"topics/audit.log/0/{300:020d}.parquet"]
    expected = without(messages, "audit.log", 0, range(300))
    await assert_serves_exactly(root, expected)
    assert [p.name for p in (root / "journal").glob("*.wal")] != ["0000000002.wal"]


async def test_a_damaged_journal_batch_is_served_from_its_segment(tmp_path: Path) -> None:
    root = tmp_path / "data"
    messages, before = await overlapping(root)
    restore_journal(root, before, 1, 2)
    wal = root / "journal" / "0000000001.wal"
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.write_bytes(content)
    delete_catalog(root)
    rebuild(root)
    await assert_serves_exactly(root, messages)
    assert (root / "journal" / "0000000001.damaged").exists()


async def test_without_any_journal_file_the_numbers_of_new_ones_go_on(made: Made) -> None:
    await fully_sealed(made)
    last = max(number for number, _ in access.journal_files(made.root))
    for _, path in access.journal_files(made.root):
        path.unlink()
    flip = bytearray((made.root / "catalog.db").read_bytes())
    flip[30] ^= 1
    (made.root / "catalog.db").write_bytes(flip)
    rebuild(made.root)
    async with await Broker.open(settings(made.root)) as broker:
        await broker.publish("quiet", b"x")
    assert [number for number, _ in access.journal_files(made.root)] == [last + 1]


async def test_segments_that_hold_the_same_offsets_are_served_once(made: Made) -> None:
    """As a merge leaves them whose sources were not removed yet."""
    delete_catalog(made.root)
    first, _ = segments_of(made, "audit.log", 0)
    table = pq.read_table(first)
    rows = table.num_rows
    names = dict(pq.read_metadata(first).metadata)
    names[b"sparrow.first_offset"] = str(rows // 2).encode()
    part = table.slice(rows // 2).replace_schema_metadata(None)
    double = first.with_name(f"{rows // 2:020d}.parquet")
    with pq.ParquetWriter(double, part.schema, write_page_checksum=True) as writer:
        writer.write_table(part)
        writer.add_key_value_metadata({k.decode(): v.decode() for k, v in names.items() if b"sparrow" in k})
    rebuilt = rebuild(made.root)
    assert rebuilt.doubled == [f"{double.relative_to(made.root)}.doubled"]
    await assert_serves_exactly(made.root, made.messages)


# Verification.


def test_a_whole_directory_is_found_whole_and_is_not_changed(made: Made) -> None:
    before = state_of(made.root)
    verdict = verify(made.root)
    assert verdict.is_whole
    assert (verdict.damages, verdict.notes) == ([], [])
    assert verdict.topics == 3
    assert verdict.segments == len(list(made.root.rglob("*.parquet")))
    assert state_of(made.root) == before


def test_a_catalog_with_a_log_is_read_without_touching_it(made: Made, tmp_path: Path) -> None:
    from sparrow.store.catalog import Catalog

    with Catalog.open(made.root / "catalog.db") as catalog:
        catalog.put_document("note", "last", b"words")
        crashed = tmp_path / "crashed"
        shutil.copytree(made.root, crashed)
    before = state_of(crashed)
    assert (crashed / "catalog.db-wal").stat().st_size
    verdict = verify(crashed)
    assert verdict.is_whole
    Inspection(crashed).summary()
    assert state_of(crashed) == before


def only(verdict: Verdict) -> Any:
    (finding,) = verdict.damages
    return finding


def test_a_flipped_bit_in_a_segment_is_found_with_its_offsets(made: Made) -> None:
    path = segments_of(made, "orders", 1)[0]
    lost = first_group_of(path)
    damage_data(path)
    finding = only(verify(made.root))
    assert finding.file == f"topics/orders/1/{path.name}"
    assert finding.position
    assert (finding.start_offset, finding.end_offset) == (lost.start, lost.stop)
    assert finding.meaning.endswith("of orders partition 1 cannot be read")


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_in_a_segment_is_found(made: Made, seed: int) -> None:
    chance = random.Random(seed)
    path = chance.choice(sorted(made.root.rglob("*.parquet")))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    assert only(verify(made.root)).file == str(path.relative_to(made.root))


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_in_a_journal_entry_is_found(made: Made, seed: int) -> None:
    chance = random.Random(seed)
    _, path = access.journal_files(made.root)[0]
    content = bytearray(path.read_bytes())
    entries = [entry for entry in Inspection(made.root).entries() if entry.kind == "batch"]
    entry = chance.choice(entries)
    content[chance.randrange(entry.position, entry.end_position - 8)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    verdict = verify(made.root)
    named = [(f.topic, f.partition, f.start_offset, f.end_offset) for f in verdict.damages if f.has_offsets]
    assert not verdict.is_whole
    assert not named or (entry.topic, entry.partition, entry.base_offset, entry.end_offset) in named


def test_a_damaged_batch_body_is_named_once_with_its_offsets(made: Made) -> None:
    _, path = access.journal_files(made.root)[0]
    entry = next(entry for entry in Inspection(made.root).entries() if entry.kind == "batch")
    content = bytearray(path.read_bytes())
    content[entry.position + 500] ^= 1
    path.write_bytes(content)
    finding = only(verify(made.root))
    assert (finding.start_offset, finding.end_offset) == (entry.base_offset, entry.end_offset)
    assert finding.position == entry.position


def test_a_missing_segment_and_a_missing_journal_file_are_found(made: Made) -> None:
    path = segments_of(made, "orders", 0)[0]
    lost = offsets_of(path)
    path.unlink()
    _, wal = access.journal_files(made.root)[0]
    wal.unlink()
    findings = {finding.file: finding for finding in verify(made.root).damages}
    assert findings[f"topics/orders/0/{path.name}"].end_offset == lost.stop
    assert findings[f"journal/{wal.name}"].what == "the journal file is missing"


@pytest.mark.parametrize("harm", HARMS)
def test_a_lost_catalog_is_found_and_the_bytes_are_checked_without_it(
    made: Made, harm: Callable[[Path], None]
) -> None:
    harm(made.root)
    path = segments_of(made, "orders", 0)[0]
    damage_data(path)
    files = [finding.file for finding in verify(made.root).damages]
    assert files == ["catalog.db", f"topics/orders/0/{path.name}"]


def test_a_catalog_from_a_backup_is_found_to_be_too_old(made: Made, tmp_path: Path) -> None:
    async def go_on() -> None:
        async with await Broker.open(settings(made.root)) as broker:
            await broker.create_topic("later")
            await broker.publish("later", b"x")

    for name in ("catalog.db", "catalog.clean"):
        shutil.copy(made.root / name, tmp_path / name)
    asyncio.run(go_on())
    for name in ("catalog.db", "catalog.clean"):
        shutil.copy(tmp_path / name, made.root / name)
    whats = [finding.what for finding in verify(made.root).damages]
    assert any("the journal has seen" in what for what in whats)
    assert any("lost topic 'later'" in what for what in whats)
    rebuild(made.root)
    assert verify(made.root).is_whole


def test_a_torn_tail_is_a_note_and_no_damage(made: Made) -> None:
    _, path = access.journal_files(made.root)[-1]
    with path.open("ab") as file:
        file.write(b"SPRW" + b"torn" * 50)
    verdict = verify(made.root)
    assert verdict.is_whole
    assert verdict.torn_bytes
    assert any("torn" in note.what for note in verdict.notes)


def test_strangers_are_named_and_are_no_damage(made: Made) -> None:
    strangers = ["holiday.jpg", "journal/notes.txt", "topics/orders/0/readme.md", "topics/orders/0/x.tmp"]
    for name in strangers:
        (made.root / name).write_bytes(b"?")
    shutil.copy(segments_of(made, "orders", 0)[0], made.root / "topics/orders/0/00000000000000000005.parquet")
    verdict = verify(made.root)
    assert verdict.is_whole
    named = {note.file for note in verdict.notes}
    assert {*strangers, "topics/orders/0/00000000000000000005.parquet"} <= named


def test_a_fast_verification_sees_a_cut_segment_and_reads_no_row_group(made: Made) -> None:
    damage_data(segments_of(made, "orders", 1)[0])
    assert verify(made.root, is_fast=True).is_whole
    damage_footer(segments_of(made, "orders", 1)[1])
    assert only(verify(made.root, is_fast=True)).topic == "orders"


def test_progress_ends_at_the_total_and_never_goes_back(made: Made) -> None:
    seen: list[tuple[int, int]] = []
    verify(made.root, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_segment_passes_its_own_checks_without_a_catalog(made: Made) -> None:
    path = segments_of(made, "orders", 1)[0]
    segment, holes = examine(path, StreamId(made.ids["orders"], 1), "orders", lambda count: None)
    assert (segment.first_offset, segment.end_offset) == (offsets_of(path).start, offsets_of(path).stop)
    assert holes == []


def test_a_file_over_which_the_parquet_library_dies_is_damaged_and_the_next_one_is_read(made: Made) -> None:
    path, sound = segments_of(made, "orders", 1)
    stream = StreamId(made.ids["orders"], 1)
    content = path.read_bytes()
    footer = pq.read_metadata(path).serialized_size
    with Examiner() as examiner:
        for position in range(len(content) - 8 - footer, len(content) - 8):
            flipped = bytearray(content)
            flipped[position] ^= 0x10
            path.write_bytes(flipped)
            if "library stops" in examiner.examine(path, "orders", stream).complaint:
                break
        else:
            pytest.skip("this version of the library survives every one of them")
        assert examiner.examine(sound, "orders", stream).segment is not None


def test_no_file_is_blamed_for_a_reading_process_that_was_killed(made: Made) -> None:
    path = segments_of(made, "orders", 1)[0]
    stream = StreamId(made.ids["orders"], 1)
    with Examiner() as examiner:
        assert examiner.examine(path, "orders", stream).segment is not None
        (child,) = [c for c in psutil.Process().children() if any("examiner" in w for w in c.cmdline())]
        child.kill()
        child.wait()
        assert examiner.examine(path, "orders", stream).segment is not None


def test_no_file_is_blamed_for_a_reading_process_that_does_not_start(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_catalog(made.root)
    before = state_of(made.root)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match="does not start"):
        rebuild(made.root)
    after = state_of(made.root)
    assert {name: after[name] for name in before if name != "lock"} == {
        name: before[name] for name in before if name != "lock"
    }


# Inspection.


def test_a_summary_tells_topics_journal_and_segments(made: Made) -> None:
    summary = Inspection(made.root).summary()
    assert summary.format == 1
    assert summary.catalog.state == "closed in order"
    ends = {(row.topic, row.partition): row.end_offset for row in summary.partitions}
    for (topic, partition), end in ends.items():
        assert end == len([place for place in made.messages if place[:2] == (topic, partition)])
    assert sum(row.rows for row in summary.segments) + sum(row.messages for row in summary.journal) == len(
        made.messages
    )


@pytest.mark.parametrize("harm", [None, *HARMS])
def test_messages_are_shown_from_any_offset_with_or_without_a_catalog(
    made: Made, harm: Callable[[Path], None] | None
) -> None:
    if harm:
        harm(made.root)
    expected = sorted(o for t, p, o in made.messages if (t, p) == ("audit.log", 0))
    page = Inspection(made.root).messages("audit.log", 0, 250, 10_000)
    assert [message.offset for message in page.messages] == expected[250:]
    assert all(m.data == made.messages["audit.log", 0, m.offset] for m in page.messages)
    assert page.messages[0].id == f"{made.ids['audit.log']}-0-250"


def test_damage_among_messages_is_named_and_passed_over(made: Made) -> None:
    path = segments_of(made, "audit.log", 0)[0]
    damage_data(path)
    page = Inspection(made.root).messages("audit.log", 0, 0, 10_000)
    assert page.damages[0].start_offset == 0
    assert page.messages[0].offset == page.damages[0].end_offset


def test_entries_are_listed_one_by_one_with_facts_decoded(made: Made) -> None:
    entries = list(Inspection(made.root).entries())
    assert {entry.kind for entry in entries} == {"batch", "facts", "note"}
    assert all(entry.is_crc_right for entry in entries)
    facts = [fact["fact"] for entry in entries for fact in entry.facts]
    assert "MessagesAcked" in facts
    assert any(entry.producer_id == made.producer_id and entry.base_sequence == 14 for entry in entries)


def test_an_entry_with_a_damaged_body_is_shown_as_such(made: Made) -> None:
    number, path = access.journal_files(made.root)[0]
    entry = next(entry for entry in Inspection(made.root).entries() if entry.kind == "batch")
    content = bytearray(path.read_bytes())
    content[entry.position + 500] ^= 1
    path.write_bytes(content)
    shown = {found.position: found for found in Inspection(made.root).entries(number)}
    assert not shown[entry.position].is_crc_right
    assert shown[entry.position].base_offset == entry.base_offset


def test_what_is_not_there_is_refused_with_what_there_is(made: Made) -> None:
    inspection = Inspection(made.root)
    with pytest.raises(TopicNotFound, match=r"audit\.log"):
        inspection.summary("oders")
    with pytest.raises(NotFound, match="0 to 2"):
        inspection.messages("orders", 3, 0, 1)
    with pytest.raises(NotFound, match="Files there"):
        list(inspection.entries(99))


# The way in.


@pytest.fixture(params=["inspect", "verify", "plan", "rebuild"])
def tool(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    def inspect(root: Path) -> object:
        with access.looking(root):
            return Inspection(root).summary()

    tools: dict[str, Callable[[Path], object]] = {
        "inspect": inspect,
        "verify": verify,
        "plan": lambda root: plan(root, now_us=NOW_US),
        "rebuild": rebuild,
    }
    return tools[request.param]


async def test_a_directory_that_a_broker_has_open_is_refused(
    made: Made, tool: Callable[[Path], object]
) -> None:
    async with await Broker.open(settings(made.root)):
        before = state_of(made.root)
        with pytest.raises(DataDirectoryLocked):
            tool(made.root)
        assert state_of(made.root) == before


async def test_a_broker_does_not_start_while_somebody_looks(made: Made) -> None:
    with access.looking(made.root), access.looking(made.root):
        with pytest.raises(DataDirectoryLocked):
            await Broker.open(settings(made.root))
    await (await Broker.open(settings(made.root))).close()


def test_a_directory_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, tool: Callable[[Path], object]
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotADataDirectory):
            tool(root)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_directory_of_a_newer_version_is_refused_and_left_alone(
    made: Made, tool: Callable[[Path], object]
) -> None:
    (made.root / "sparrow.json").write_bytes(msgspec.json.encode({"format": 2, "created_at_us": 1}))
    before = state_of(made.root)
    with pytest.raises(DataDirectoryNewer):
        tool(made.root)
    assert state_of(made.root) == before
