"""The catalog on real SQLite files: what it keeps, what it refuses, and that no damage passes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest
from sqlalchemy import Connection, text

from sparrow.model.errors import (
    AlreadyExists,
    CatalogDamaged,
    DataDirectoryLocked,
    DataDirectoryNewer,
    DataDirectoryUnusable,
    InvalidArgument,
    NotFound,
    PreconditionFailed,
    StorageError,
    StorageFull,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)
from sparrow.model.message import StreamId
from sparrow.model.topic import Codec, Topic, TopicPolicy
from sparrow.store.catalog import (
    Catalog,
    CatalogRows,
    CursorCheckpoint,
    Producer,
    ProducerState,
    RowGroup,
    Segment,
    SegmentKey,
    StreamRow,
    SubscriptionRow,
    pack_groups,
    unpack_groups,
)
from sparrow.store.catalog_ledger import Digest, Ledger
from sparrow.store.catalog_salvage import salvage
from sparrow.store.catalog_sqlite import LOG_BYTES_MAX, wal_path
from sparrow.store.catalog_tables import row_crc

POLICY = TopicPolicy(codec=Codec.ZSTD, retention_bytes=1 << 30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    with Catalog.open(path) as catalog:
        yield catalog


def segment(topic_id: int, partition: int, first: int, end: int, groups: int = 2) -> Segment:
    packed = pack_groups(RowGroup(first + i, 7, i * 4096, 4096, 0xFEEDBEEF) for i in range(groups))
    return Segment(
        topic_id, partition, first, end, end - first, 4096 * groups, 1_000, 2_000,
        f"{first:020d}.parquet", 0xDEADBEEF, 512, first % 2 == 0, packed,
    )  # fmt: skip


def everything(catalog: Catalog) -> tuple[Any, ...]:
    """All that a catalog says."""
    return (
        catalog.version,
        catalog.sealed_through,
        catalog.topics(),
        catalog.streams(),
        catalog.segments(),
        catalog.subscriptions(),
        catalog.cursors(),
        catalog.producers(),
        catalog.producer_states(),
        catalog.documents("schema"),
    )


def fill(catalog: Catalog) -> None:
    """Some rows in every table, some of them larger than a page, and some gone again."""
    orders = catalog.create_topic("orders.us", 3, POLICY, 100)
    gone = catalog.create_topic("gone", 2, POLICY, 200)
    billing = catalog.create_subscription("billing", "orders.#", b'{"a":1}', 300)
    producer = catalog.open_producer("shop")
    for number in range(20):
        first = number * 10
        catalog.commit_seal(
            number,
            [segment(orders.id, p, first, first + 10, groups=1 + 40 * p) for p in range(3)],
            {StreamId(gone.id, 0): first},
            [CursorCheckpoint(billing.id, number, b"s" * number)],
            [ProducerState(producer.id, orders.id, number, b"p" * number)],
        )
    for number in range(8):
        catalog.put_document("schema", f"s{number}", os.urandom(900 * number))
    catalog.delete_document("schema", "s3")
    catalog.drop_segments([SegmentKey(orders.id, 0, 0)], {StreamId(orders.id, 0): 10})
    catalog.delete_topic(gone.id)


def copied(source: Path, folder: Path) -> Path:
    """The catalog as a crash would leave it now: its files without an orderly close."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (source, wal_path(source)):
        if file.exists():
            shutil.copy(file, folder / file.name)
    return folder / source.name


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def raw(catalog: Catalog, statement: str) -> None:
    """Reaches through to SQLite, to put it into a state that the world may put it into."""
    catalog._session._connection.exec_driver_sql(statement)


# What it keeps.


def test_everything_is_there_again_after_closing_and_opening(path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
        before = everything(catalog)
    with Catalog.open(path) as catalog:
        assert everything(catalog) == before


def test_everything_is_there_again_after_a_crash(path: Path, tmp_path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
        left = copied(path, tmp_path / "crashed")
        before = everything(catalog)
    with Catalog.open(left) as catalog:
        assert everything(catalog) == before


def test_reading_again_returns_the_same(path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
    with Catalog.open(path) as catalog:
        assert everything(catalog) == everything(catalog)


def test_a_closed_catalog_is_one_file_and_its_marker(path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
    assert sorted(file.name for file in path.parent.iterdir()) == ["catalog.clean", "catalog.db"]


def test_closing_twice_is_allowed(catalog: Catalog) -> None:
    catalog.close()
    catalog.close()


def test_a_new_topic_has_a_stream_for_every_partition(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 2, POLICY, 7)
    assert topic == Topic(id=1, name="orders", partitions=2, policy=POLICY, created_at_us=7)
    assert catalog.topics() == [topic]
    assert catalog.streams() == [StreamRow(1, 0, 0, 0), StreamRow(1, 1, 0, 0)]


def test_a_topic_that_grows_gets_more_streams_and_keeps_the_old_ones(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 1, POLICY, 7)
    catalog.commit_seal(0, [segment(topic.id, 0, 0, 5)], {})
    grown = msgspec.structs.replace(topic, partitions=3, policy=TopicPolicy())
    catalog.update_topic(grown)
    assert catalog.topics() == [grown]
    assert [row.sealed_end_offset for row in catalog.streams()] == [5, 0, 0]


def test_a_topic_neither_shrinks_nor_changes_its_name(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 2, POLICY, 7)
    with pytest.raises(InvalidArgument):
        catalog.update_topic(msgspec.structs.replace(topic, partitions=1))
    with pytest.raises(InvalidArgument):
        catalog.update_topic(msgspec.structs.replace(topic, name="other"))
    assert catalog.topics() == [topic]


def test_ids_are_never_given_twice(path: Path) -> None:
    for expected in (1, 2, 3):
        with Catalog.open(path) as catalog:
            topic = catalog.create_topic("orders", 1, POLICY, 0)
            subscription = catalog.create_subscription("billing", "#", b"{}", 0)
            producer = catalog.open_producer("shop")
            assert (topic.id, subscription.id, producer.id) == (expected, expected, expected)
            catalog.delete_topic(topic.id)
            catalog.delete_subscription(subscription.id)
            catalog.delete_producer(producer.id)


def test_deleting_a_topic_removes_all_that_belongs_to_it_and_nothing_else(catalog: Catalog) -> None:
    fill(catalog)
    other = catalog.create_topic("other", 1, POLICY, 0)
    catalog.commit_seal(99, [segment(other.id, 0, 0, 5)], {}, [CursorCheckpoint(1, 1, b"")])
    catalog.delete_topic(1)
    assert catalog.topics() == [other]
    assert {row.topic_id for row in catalog.streams()} == {other.id}
    assert {row.topic_id for row in catalog.segments()} == {other.id}
    assert [row.subscription_id for row in catalog.cursors()] == [1]
    assert catalog.producer_states() == []
    assert len(catalog.producers()) == 1


def test_a_seal_enters_segments_ends_and_checkpoints_at_once(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 3, POLICY, 0)
    subscription = catalog.create_subscription("billing", "orders", b"{}", 0)
    producer = catalog.open_producer("shop")
    segments = [segment(topic.id, 0, 0, 10), segment(topic.id, 1, 5, 9)]
    cursor = CursorCheckpoint(subscription.id, 40, b"cursor")
    state = ProducerState(producer.id, topic.id, 41, b"state")
    version = catalog.version
    catalog.commit_seal(4, segments, {StreamId(topic.id, 2): 7}, [cursor], [state])
    assert catalog.version == version + 1
    assert catalog.sealed_through == 4
    assert catalog.segments() == segments
    assert [row.sealed_end_offset for row in catalog.streams()] == [10, 9, 7]
    assert catalog.cursors() == [cursor]
    assert catalog.producer_states() == [state]


def test_a_checkpoint_replaces_the_older_one_and_the_last_of_a_key_stays(catalog: Catalog) -> None:
    catalog.create_subscription("billing", "orders", b"{}", 0)
    catalog.create_subscription("shipping", "orders", b"{}", 0)
    old, new, newest = (CursorCheckpoint(1, i, b"%d" % i) for i in range(3))
    other = CursorCheckpoint(2, 5, b"other")
    catalog.checkpoint([old])
    catalog.checkpoint([other, new, newest])
    assert catalog.cursors() == [newest, other]


def test_a_checkpoint_of_a_subscription_that_was_deleted_meanwhile_is_passed_over(catalog: Catalog) -> None:
    kept = catalog.create_subscription("billing", "orders", b"{}", 0)
    gone = catalog.create_subscription("shipping", "orders", b"{}", 0)
    catalog.delete_subscription(gone.id)
    mine = CursorCheckpoint(kept.id, 1, b"mine")
    catalog.commit_seal(0, [], {}, [mine, CursorCheckpoint(gone.id, 1, b"gone")])
    assert catalog.cursors() == [mine]


def test_a_sealed_end_never_falls(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 1, POLICY, 0)
    catalog.commit_seal(0, [segment(topic.id, 0, 0, 10)], {StreamId(topic.id, 0): 4})
    assert catalog.streams()[0].sealed_end_offset == 10


def test_dropped_segments_move_the_start_and_replaced_ones_do_not(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 1, POLICY, 0)
    parts = [segment(topic.id, 0, first, first + 10) for first in (0, 10, 20)]
    catalog.commit_seal(0, parts, {})
    catalog.drop_segments([parts[0].key], {StreamId(topic.id, 0): 10})
    merged = segment(topic.id, 0, 10, 30)
    catalog.replace_segments([parts[1].key, parts[2].key], [merged])
    assert catalog.segments() == [merged]
    assert catalog.streams() == [StreamRow(topic.id, 0, 10, 30)]


def test_more_keys_than_fit_one_query_are_dropped_together(catalog: Catalog) -> None:
    topic = catalog.create_topic("orders", 1, POLICY, 0)
    parts = [segment(topic.id, 0, first, first + 1) for first in range(1_000)]
    catalog.commit_seal(0, parts, {})
    catalog.drop_segments([part.key for part in parts[:900]], {})
    assert catalog.segments() == parts[900:]


def test_row_groups_come_back_from_their_packed_form() -> None:
    groups = [RowGroup(-1, 0, 0, 0, 0), RowGroup(2**62, 2**32 - 1, 2**63, 2**64 - 1, 0xFFFFFFFF)]
    assert len(pack_groups(groups)) == 64
    assert unpack_groups(pack_groups(groups)) == groups
    assert segment(1, 0, 0, 10, groups=3).row_groups()[2].byte_start == 8192


def test_a_subscription_can_be_changed_and_takes_its_cursors_with_it(catalog: Catalog) -> None:
    catalog.create_topic("orders", 1, POLICY, 0)
    created = catalog.create_subscription("billing", "orders.#", b"{}", 5)
    paused = SubscriptionRow(created.id, "billing-2", "orders.*", b'{"x":1}', 5, True)
    catalog.update_subscription(paused)
    assert catalog.subscriptions() == [paused]
    catalog.checkpoint([CursorCheckpoint(created.id, 1, b"")])
    catalog.delete_subscription(created.id)
    assert (catalog.subscriptions(), catalog.cursors()) == ([], [])


def test_every_opening_of_a_producer_is_a_new_epoch_also_after_a_crash(path: Path, tmp_path: Path) -> None:
    with Catalog.open(path) as catalog:
        assert catalog.open_producer("shop") == Producer(1, "shop", 0)
        assert catalog.open_producer("till") == Producer(2, "till", 0)
        assert catalog.open_producer("shop") == Producer(1, "shop", 1)
        left = copied(path, tmp_path / "crashed")
    with Catalog.open(left) as catalog:
        assert catalog.open_producer("shop") == Producer(1, "shop", 2)


def test_documents_are_kept_by_kind_and_key(catalog: Catalog) -> None:
    catalog.put_document("schema", "a", b"1")
    catalog.put_document("schema", "a", b"2")
    catalog.put_document("snapshot", "a", b"3")
    assert catalog.documents("schema") == {"a": b"2"}
    assert catalog.delete_document("schema", "a") is True
    assert catalog.delete_document("schema", "a") is False
    assert catalog.documents("schema") == {}
    assert catalog.documents("snapshot") == {"a": b"3"}


def test_the_log_is_moved_into_the_main_file_when_it_is_long(catalog: Catalog, path: Path) -> None:
    for number in range(24):
        catalog.put_document("schema", str(number), bytes(LOG_BYTES_MAX // 8))
    assert wal_path(path).stat().st_size <= LOG_BYTES_MAX + LOG_BYTES_MAX // 4
    assert path.stat().st_size > LOG_BYTES_MAX


# What it refuses, and that a refusal leaves nothing.


def refusals() -> dict[str, tuple[Callable[[Catalog], object], type[Exception]]]:
    return {
        "a topic twice": (lambda c: c.create_topic("orders.us", 1, POLICY, 0), TopicExists),
        "no such topic": (lambda c: c.delete_topic(77), TopicNotFound),
        "update of no topic": (
            lambda c: c.update_topic(msgspec.structs.replace(c.topics()[0], id=77)),
            TopicNotFound,
        ),
        "a subscription twice": (
            lambda c: c.create_subscription("billing", "#", b"", 0),
            SubscriptionExists,
        ),
        "no such subscription": (lambda c: c.delete_subscription(77), SubscriptionNotFound),
        "a journal file twice": (lambda c: c.commit_seal(19, [], {}), PreconditionFailed),
        "a segment twice": (
            lambda c: c.commit_seal(99, [segment(1, 0, 190, 200)], {}),
            PreconditionFailed,
        ),
        "a segment twice at once": (
            lambda c: c.commit_seal(99, [segment(1, 0, 500, 510)] * 2, {}),
            PreconditionFailed,
        ),
        "an empty segment": (
            lambda c: c.commit_seal(99, [segment(1, 0, 500, 500)], {}),
            PreconditionFailed,
        ),
        "a segment of no topic": (
            lambda c: c.commit_seal(99, [segment(77, 0, 0, 5)], {}),
            TopicNotFound,
        ),
        "an end of no topic": (
            lambda c: c.commit_seal(99, [segment(1, 0, 500, 510)], {StreamId(77, 0): 5}),
            TopicNotFound,
        ),
        "a state of no producer": (
            lambda c: c.commit_seal(99, [segment(1, 0, 500, 510)], {}, [], [ProducerState(77, 1, 0, b"")]),
            PreconditionFailed,
        ),
        "no such segment": (
            lambda c: c.drop_segments([SegmentKey(1, 0, 10), SegmentKey(1, 0, 11)], {}),
            NotFound,
        ),
        "a start of no topic": (
            lambda c: c.drop_segments([SegmentKey(1, 0, 10)], {StreamId(77, 0): 1}),
            TopicNotFound,
        ),
        "a replacement that is there": (
            lambda c: c.replace_segments([SegmentKey(1, 0, 10)], [segment(1, 0, 20, 30)]),
            AlreadyExists,
        ),
        "restoring over rows": (
            lambda c: c.restore(CatalogRows(), version=0, sealed_through=0),
            PreconditionFailed,
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_refused_change_leaves_nothing_behind(catalog: Catalog, path: Path, name: str) -> None:
    attempt, error = refusals()[name]
    fill(catalog)
    before = everything(catalog)
    with pytest.raises(error):
        attempt(catalog)
    assert everything(catalog) == before
    catalog.close()
    with Catalog.open(path) as reopened:
        assert everything(reopened) == before


def test_several_changes_in_a_transaction_are_one_version(catalog: Catalog) -> None:
    with catalog.transaction():
        topic = catalog.create_topic("orders", 1, POLICY, 0)
        catalog.commit_seal(3, [segment(topic.id, 0, 0, 5)], {})
        catalog.put_document("schema", "a", b"")
        assert catalog.version == 0
    assert catalog.version == 1
    assert len(catalog.segments()) == 1


def test_a_transaction_that_fails_leaves_nothing(catalog: Catalog) -> None:
    fill(catalog)
    before = everything(catalog)

    def change_and_fail() -> None:
        with catalog.transaction():
            catalog.create_topic("new", 4, POLICY, 0)
            catalog.delete_topic(1)
            catalog.put_document("schema", "s1", b"changed")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_and_fail()
    assert everything(catalog) == before
    assert catalog.create_topic("new", 1, POLICY, 0).id == 3


def test_an_error_that_the_caller_swallows_still_undoes_the_transaction(catalog: Catalog) -> None:
    fill(catalog)
    before = everything(catalog)

    def change_and_swallow() -> None:
        with catalog.transaction():
            catalog.create_topic("new", 4, POLICY, 0)
            with contextlib.suppress(TopicExists):
                catalog.create_topic("orders.us", 4, POLICY, 0)

    with pytest.raises(PreconditionFailed):
        change_and_swallow()
    assert everything(catalog) == before


def test_a_transaction_that_changes_nothing_is_no_version(catalog: Catalog) -> None:
    with catalog.transaction():
        catalog.topics()
    catalog.delete_document("schema", "none")
    catalog.delete_producer(5)
    assert catalog.version == 0


def test_a_second_opener_is_refused(catalog: Catalog, path: Path) -> None:
    with pytest.raises(DataDirectoryLocked):
        Catalog.open(path)
    catalog.create_topic("orders", 1, POLICY, 0)


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryUnusable):
        Catalog.open(tmp_path / "missing" / "catalog.db")
    with pytest.raises(DataDirectoryUnusable):
        Catalog.open(tmp_path)
    with pytest.raises(DataDirectoryUnusable):
        salvage(tmp_path / "missing.db")


def test_a_file_that_is_no_catalog_is_refused(path: Path) -> None:
    path.write_bytes(b"This is not a database. " * 500)
    with pytest.raises(CatalogDamaged):
        Catalog.open(path)
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE notes (text)")
    with pytest.raises(CatalogDamaged, match="schema version"):
        Catalog.open(path)


# Faults of the world.


def test_a_full_disk_changes_nothing_and_the_next_try_succeeds(catalog: Catalog) -> None:
    fill(catalog)
    before = everything(catalog)
    raw(catalog, "PRAGMA max_page_count = 1")
    with pytest.raises(StorageFull):
        catalog.put_document("schema", "large", bytes(1 << 20))
    assert everything(catalog) == before
    raw(catalog, "PRAGMA max_page_count = 1000000")
    catalog.put_document("schema", "large", bytes(1 << 20))
    assert catalog.version == before[0] + 1


def test_a_full_disk_in_a_part_fails_the_whole_transaction(catalog: Catalog) -> None:
    fill(catalog)
    before = everything(catalog)
    raw(catalog, "PRAGMA max_page_count = 1")

    def change_and_fill_up() -> None:
        with catalog.transaction():
            catalog.delete_document("schema", "s1")
            with pytest.raises(StorageFull):
                catalog.put_document("schema", "large", bytes(1 << 20))

    with pytest.raises(PreconditionFailed):
        change_and_fill_up()
    assert everything(catalog) == before


def test_a_read_only_catalog_can_be_read_but_not_changed(catalog: Catalog) -> None:
    fill(catalog)
    before = everything(catalog)
    raw(catalog, "PRAGMA query_only = ON")
    with pytest.raises(DataDirectoryUnusable):
        catalog.delete_topic(1)
    assert everything(catalog) == before
    raw(catalog, "PRAGMA query_only = OFF")
    catalog.delete_topic(1)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Makes every write beyond ``size`` bytes of a file fail, as a broken disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_freezes_the_catalog_until_it_is_opened_again(path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
        before = everything(catalog)
        with file_size_limit(wal_path(path).stat().st_size + 100):
            with pytest.raises(StorageError) as failure:
                catalog.put_document("schema", "large", bytes(1 << 20))
        assert type(failure.value) is StorageError
        assert everything(catalog) == before
        with pytest.raises(StorageError, match="earlier failure"):
            catalog.delete_topic(1)
    assert not path.with_suffix(".clean").exists()
    with Catalog.open(path) as catalog:
        assert everything(catalog) == before
        catalog.delete_topic(1)


# Schema versions.


def add_is_paused(connection: Connection) -> list[str]:
    """A migration step: subscriptions get their last column."""
    connection.execute(text("ALTER TABLE subscriptions ADD COLUMN is_paused SMALLINT NOT NULL DEFAULT 0"))
    return ["subscriptions"]


def break_off(connection: Connection) -> list[str]:
    add_is_paused(connection)
    raise ZeroDivisionError


@pytest.fixture
def older(path: Path) -> Path:
    """A catalog of a version before this one: made by hand, its subscriptions lack a column."""
    with Catalog.open(path) as catalog:
        fill(catalog)
    path.with_suffix(".clean").unlink()
    with contextlib.closing(sqlite3.connect(path)) as hand:
        hand.execute("ALTER TABLE subscriptions DROP COLUMN is_paused")
        row = hand.execute("SELECT * FROM subscriptions").fetchone()[1:]
        crc = row_crc("subscriptions", row)
        hand.execute("UPDATE subscriptions SET crc = ?", [crc])
        query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
        layout = [tuple(line) for line in hand.execute(query)]
        _store_ledger(hand, layout, Digest(1, crc))
        hand.commit()
    return path


def _store_ledger(hand: sqlite3.Connection, layout: list[Any], subscriptions: Digest) -> None:
    (content,) = hand.execute("SELECT content FROM ledger").fetchone()
    ledger = msgspec.msgpack.decode(content, type=Ledger)
    ledger = msgspec.structs.replace(
        ledger,
        layout_crc=google_crc32c.value(msgspec.msgpack.encode(layout)),
        digests=ledger.digests | {"subscriptions": subscriptions},
    )
    content = msgspec.msgpack.encode(ledger)
    hand.execute("UPDATE ledger SET crc = ?, content = ?", [row_crc("ledger", (1, content)), content])


def test_an_older_catalog_is_migrated_and_keeps_its_rows(older: Path) -> None:
    with Catalog.open(older, migrations=[add_is_paused]) as catalog:
        assert catalog.subscriptions() == [SubscriptionRow(1, "billing", "orders.#", b'{"a":1}', 300)]
        assert len(catalog.segments()) == 59
        catalog.create_subscription("new", "#", b"{}", 0, is_paused=True)
        before = everything(catalog)
    with Catalog.open(older, migrations=[add_is_paused]) as catalog:
        assert everything(catalog) == before


def test_a_migration_is_one_version_of_the_catalog(older: Path) -> None:
    before = salvage(older).version
    with Catalog.open(older, migrations=[add_is_paused]) as catalog:
        assert before is not None
        assert catalog.version == before + 1


def test_a_migration_that_fails_leaves_the_older_catalog(older: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Catalog.open(older, migrations=[break_off])
    with Catalog.open(older, migrations=[add_is_paused]) as catalog:
        assert len(catalog.subscriptions()) == 1


def test_a_migration_does_not_make_damage_look_sound(older: Path) -> None:
    with contextlib.closing(sqlite3.connect(older)) as hand:
        hand.execute("UPDATE subscriptions SET pattern = 'payments.#'")
        hand.commit()
    with pytest.raises(CatalogDamaged, match="subscriptions"):
        Catalog.open(older, migrations=[add_is_paused])


def test_a_newer_catalog_is_refused_and_not_changed(path: Path) -> None:
    with Catalog.open(path, migrations=[add_is_paused]) as catalog:
        fill(catalog)
    before = path.read_bytes()
    with pytest.raises(DataDirectoryNewer):
        Catalog.open(path)
    assert path.read_bytes() == before
    assert path.with_suffix(".clean").exists()


# Damage.


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "catalog.db"
    with Catalog.open(path) as catalog:
        fill(catalog)
    return path


def test_every_flipped_bit_of_a_closed_catalog_is_found(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    files = [shutil.copy(file, tmp_path) for file in (sound, sound.with_suffix(".clean"))]
    path, marker = map(Path, files)
    for number in range(300):
        file = marker if number % 10 == 0 else path
        bit = rng.randrange(file.stat().st_size * 8)
        flip(file, bit)
        with pytest.raises(CatalogDamaged):
            Catalog.open(path)
        flip(file, bit)
    Catalog.open(path).close()


def test_a_flipped_bit_after_a_crash_is_found_or_without_effect(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(21)
    with Catalog.open(copied(sound, tmp_path / "crashed")) as catalog:
        expected = everything(catalog)
    found = 0
    for number in range(400):
        path = copied(sound, tmp_path / "crashed")
        # Every other flip hits the first page, which holds the header and the table definitions.
        flip(path, rng.randrange((path.stat().st_size if number % 2 else 4096) * 8))
        try:
            with Catalog.open(path) as catalog:
                assert everything(catalog) == expected
        except CatalogDamaged:
            found += 1
    assert found > 100


def test_a_flipped_bit_in_the_log_is_found_or_leaves_an_earlier_version(path: Path, tmp_path: Path) -> None:
    rng = random.Random(22)
    states: dict[int, tuple[Any, ...]] = {}
    with Catalog.open(path) as catalog:
        for number in range(30):
            catalog.put_document("schema", str(number % 7), bytes(number))
            states[catalog.version] = everything(catalog)
        left = copied(path, tmp_path / "left")
    for _ in range(100):
        crashed = copied(left, tmp_path / "crashed")
        log = wal_path(crashed)
        flip(log, rng.randrange(log.stat().st_size * 8))
        with contextlib.suppress(CatalogDamaged), Catalog.open(crashed) as catalog:
            if catalog.version:
                assert everything(catalog) == states[catalog.version]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE topics SET partitions = 4",
        "UPDATE streams SET start_offset = 11, crc = crc WHERE partition = 1",
        "UPDATE segments SET groups = CAST(groups AS TEXT)",
        "UPDATE cursors SET as_of = as_of + 0.5",
        "DELETE FROM segments WHERE first_offset = 10 AND partition = 2",
        "DELETE FROM producers",
        "DELETE FROM ledger",
        "DELETE FROM schema_version",
        "DROP TABLE documents",
        "CREATE INDEX extra ON segments (rows)",
    ],
)
def test_what_another_program_changed_is_found(sound: Path, tmp_path: Path, damage: str) -> None:
    path = copied(sound, tmp_path / "changed")
    with contextlib.closing(sqlite3.connect(path)) as hand:
        hand.execute(damage)
        hand.commit()
    with pytest.raises(CatalogDamaged):
        Catalog.open(path)


def test_a_lost_or_shortened_file_is_found(sound: Path, tmp_path: Path) -> None:
    path = copied(sound, tmp_path / "short")
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(CatalogDamaged):
        Catalog.open(path)
    path.unlink()
    shutil.copy(sound.with_suffix(".clean"), path.parent)
    with pytest.raises(CatalogDamaged, match="missing"):
        Catalog.open(path)


def test_a_catalog_that_is_opened_and_not_changed_keeps_its_marker(sound: Path) -> None:
    marker = sound.with_suffix(".clean")
    before = marker.stat()
    with Catalog.open(sound) as catalog:
        catalog.topics()
    assert marker.stat() == before


def test_the_marker_is_gone_before_the_first_change(path: Path) -> None:
    Catalog.open(path).close()
    with Catalog.open(path) as catalog:
        with catalog.transaction():
            assert not path.with_suffix(".clean").exists()


# Salvage.


def salvaged(path: Path) -> tuple[Any, ...]:
    """What ``everything`` would say of the salvaged rows."""
    found = salvage(path)
    rows = found.rows
    return (
        found.version,
        found.sealed_through,
        rows.topics,
        rows.streams,
        rows.segments,
        rows.subscriptions,
        rows.cursors,
        rows.producers,
        rows.producer_states,
        {one.key: one.value for one in rows.documents if one.kind == "schema"},
    )


def test_salvage_finds_every_row_of_a_sound_catalog(sound: Path) -> None:
    with Catalog.open(sound) as catalog:
        expected = everything(catalog)
    assert salvaged(sound) == expected
    assert salvage(sound).missing == {}


def test_salvage_finds_what_lies_in_the_log_only(path: Path, tmp_path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
        left = copied(path, tmp_path / "crashed")
        expected = everything(catalog)
    assert left.stat().st_size < wal_path(left).stat().st_size
    assert salvaged(left) == expected


def test_salvage_changes_nothing(path: Path, tmp_path: Path) -> None:
    with Catalog.open(path) as catalog:
        fill(catalog)
        left = copied(path, tmp_path / "crashed")
    before = {file: file.read_bytes() for file in left.parent.iterdir()}
    salvage(left)
    assert {file: file.read_bytes() for file in left.parent.iterdir()} == before


def test_salvage_returns_only_true_rows_and_loses_few(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(23)
    expected = salvage(sound).rows
    for _ in range(200):
        path = copied(sound, tmp_path / "damaged")
        flip(path, rng.randrange(path.stat().st_size * 8))
        found = salvage(path).rows
        for name in ("topics", "streams", "segments", "subscriptions", "cursors", "documents"):
            assert all(row in getattr(expected, name) for row in getattr(found, name))
        assert len(found.segments) > len(expected.segments) - 25


def test_salvage_does_without_the_table_of_contents(sound: Path, tmp_path: Path) -> None:
    path = copied(sound, tmp_path / "headless")
    with path.open("r+b") as file:
        file.write(bytes(4096))
    with pytest.raises(CatalogDamaged):
        Catalog.open(path)
    assert salvaged(path) == salvaged(sound)


def test_a_restored_catalog_says_what_the_lost_one_said(sound: Path, path: Path) -> None:
    found = salvage(sound)
    assert found.version is not None
    assert found.sealed_through is not None
    with Catalog.open(path) as catalog:
        catalog.restore(found.rows, version=found.version, sealed_through=found.sealed_through)
        assert everything(catalog) == salvaged(sound)
    with Catalog.open(path) as catalog:
        assert everything(catalog) == salvaged(sound)
        assert catalog.create_topic("new", 1, POLICY, 0).id == 3


# Crashes.


def _write_until_killed(path: Path, seed: int, reports: Pipe) -> None:
    rng = random.Random(seed)
    reports.send(0)
    catalog = Catalog.open(path)
    while True:
        with catalog.transaction():
            for _ in range(rng.randrange(1, 4)):
                catalog.put_document("schema", str(rng.randrange(50)), rng.randbytes(3_000))
            if rng.random() < 0.2:
                topic = catalog.create_topic(f"topic-{catalog.version}", 4, POLICY, 0)
                parts = [segment(topic.id, p, 0, 10) for p in range(4)]
                catalog.commit_seal(catalog.sealed_through + 1, parts, {})
            if rng.random() < 0.1:
                for topic in catalog.topics()[:3]:
                    catalog.delete_topic(topic.id)
        reports.send(catalog.version)
        if rng.random() < 0.03:
            catalog.close()
            catalog = Catalog.open(path)


def _killed_after(path: Path, seed: int, reports_before: int) -> int:
    """Lets a child write and kills it after so many reports; the last version that it reported."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_write_until_killed, args=(path, seed, there))
    child.start()
    there.close()
    version = 0
    for _ in range(reports_before):
        version = here.recv()
    child.kill()
    child.join()
    with contextlib.suppress(EOFError):
        while True:
            version = here.recv()
    return version


def test_no_commit_is_lost_and_nothing_is_damaged_when_the_process_is_killed(path: Path) -> None:
    rng = random.Random(24)
    version = 0
    for seed in range(40):
        reported = _killed_after(path, seed, 1 if seed < 5 else rng.randrange(1, 60))
        least = max(version, reported)
        with Catalog.open(path) as catalog:
            version = catalog.version
            assert least <= version <= least + 1
            assert everything(catalog) == salvaged(path)


def test_the_catalog_does_without_the_object_relational_mapper() -> None:
    code = "import sys, sparrow.store.catalog; print('sqlalchemy.orm' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
