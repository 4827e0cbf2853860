"""The journal's group commit, on a disk whose syncs and writes wait for a test's word."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparrow.model.errors import BrokerClosed, JournalFrozen, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.topic import Durability
from sparrow.store import batch as batches
from sparrow.store.disk import Disk
from sparrow.store.entry import Header, Kind, Scan, lsn, unpack_file_header
from sparrow.store.hot import HotWindow
from sparrow.store.journal import Journal
from sparrow.store.ports import BatchDraft, Commit, Draft, FactsDraft

A, B = StreamId(1, 0), StreamId(2, 0)
KIB = 1024
PATIENCE_S = 20


class Gate:
    """Lets callers through one at a time, when it is closed."""

    def __init__(self) -> None:
        self._is_closed = False
        self._permits = threading.Semaphore(0)
        self._arrivals = threading.Semaphore(0)
        self.passed = 0

    def close(self) -> None:
        self._is_closed = True

    def let_one_through(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self._is_closed = False
        self._permits.release()

    async def arrival(self) -> None:
        """Returns when somebody stands before the closed gate."""
        assert await asyncio.to_thread(self._arrivals.acquire, timeout=PATIENCE_S), "nobody came"

    def go_through(self) -> None:
        if self._is_closed:
            self._arrivals.release()
            assert self._permits.acquire(timeout=PATIENCE_S), "nobody opened the gate"
        self.passed += 1


class GatedDisk(Disk):
    def __init__(self) -> None:
        self.syncing, self.writing, self.creating = Gate(), Gate(), Gate()

    def sync(self, descriptor: int) -> None:
        self.syncing.go_through()
        super().sync(descriptor)

    def pwritev(self, descriptor: int, pieces: Any, position: int) -> int:
        self.writing.go_through()
        return super().pwritev(descriptor, pieces, position)

    def create(self, path: Path, size: int) -> int:
        self.creating.go_through()
        return super().create(path, size)


class Log:
    """A journal, its disk, and a clock that a test moves."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.disk = GatedDisk()
        self.hot = HotWindow()
        self.now_us = 1_000
        self.new_files: list[int] = []
        self.catalog_version = 1
        for stream in (A, B):
            self.hot.open(stream)
        settings = {
            "file_bytes": 256 * KIB,
            "group_bytes_max": 64 * KIB,
            "pending_bytes_max": 1024 * KIB,
            "sync_interval_s": 3600.0,
        }
        self.journal = Journal(
            disk=self.disk,
            directory=directory,
            hot=self.hot,
            now_us=lambda: self.now_us,
            catalog_version=lambda: self.catalog_version,
            on_new_file=self.new_files.append,
            **(settings | options),  # type: ignore[arg-type]
        )

    async def append(
        self,
        *drafts: Draft,
        durability: Durability = Durability.DURABLE,
        on_commit: Callable[[Commit], None] = lambda commit: None,
    ) -> Commit:
        return await self.journal.append(drafts, durability, on_commit)

    def later(self, *drafts: Draft, **options: Any) -> asyncio.Task[Commit]:
        return asyncio.create_task(self.append(*drafts, **options))

    def end(self, stream: StreamId = A) -> int:
        found = self.hot.get(stream)
        assert found is not None
        return found.end_offset

    def entries(self, number: int = 1) -> list[Header]:
        content = (self.directory / f"{number:010d}.wal").read_bytes()
        found = list(Scan(content, pa.py_buffer(content), number, len(content)))
        assert all(isinstance(item, Header) for item in found)
        return [item for item in found if isinstance(item, Header)]

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in sorted(self.directory.iterdir())}


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    log = Log(tmp_path)
    yield log
    await shut(log)


async def shut(log: Log) -> None:
    for gate in (log.disk.syncing, log.disk.writing, log.disk.creating):
        gate.open()
    await log.journal.close()


def draft(count: int = 1, size: int = 10, stream: StreamId = A) -> BatchDraft:
    body = batches.encode(batches.build([os.urandom(size) for _ in range(count)]))
    return BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns)


async def turns(count: int = 10) -> None:
    """Lets everything run that can run."""
    for _ in range(count):
        await asyncio.sleep(0)


# Group commit.


async def test_while_one_sync_runs_the_next_group_gathers(log: Log) -> None:
    await log.append(draft())
    before = log.journal.syncs
    log.disk.syncing.close()
    first = log.later(draft())
    await log.disk.syncing.arrival()
    others = [log.later(draft(stream=A if number % 2 else B)) for number in range(50)]
    await turns()
    assert not first.done()
    log.disk.syncing.let_one_through()
    await first
    await log.disk.syncing.arrival()
    assert not any(task.done() for task in others)
    log.disk.syncing.let_one_through()
    await asyncio.gather(*others)
    assert log.journal.syncs - before == 2


async def test_a_lone_message_waits_for_no_timer(log: Log) -> None:
    async with asyncio.timeout(5):
        for _ in range(20):
            await log.append(draft())
    assert log.journal.syncs == 20


async def test_a_group_takes_no_more_than_its_bytes(log: Log) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    first = log.later(draft())
    await log.disk.syncing.arrival()
    others = [log.later(draft(size=30 * KIB)) for _ in range(4)]
    await turns()
    before = log.journal.syncs
    log.disk.syncing.open()
    await asyncio.gather(first, *others)
    assert log.journal.syncs - before == 3, "the first, and two groups of two"


async def test_offsets_are_dense_and_follow_the_order_of_arrival(log: Log) -> None:
    tasks = [log.later(draft(count=1 + number % 3)) for number in range(100)]
    commits = await asyncio.gather(*tasks)
    at = 0
    for number, commit in enumerate(commits):
        assert commit.appended[0].base_offset == at
        at += 1 + number % 3
    assert log.end() == at
    assert [commit.lsn for commit in commits] == sorted(commit.lsn for commit in commits)


async def test_a_commit_names_the_place_of_its_last_entry(log: Log) -> None:
    commit = await log.append(draft(), draft(stream=B))
    second = log.entries()[1]
    assert commit.lsn == lsn(1, second.position)
    assert [one.base_offset for one in commit.appended] == [0, 0]


# Durability.


async def test_a_durable_message_is_answered_after_the_sync_and_not_before(log: Log) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    task = log.later(draft())
    await log.disk.syncing.arrival()
    await turns()
    assert not task.done()
    assert log.end() == 1, "and nobody reads it either"
    log.disk.syncing.let_one_through()
    await task
    assert log.end() == 2


async def test_a_written_message_is_answered_without_a_sync_and_is_in_the_file(log: Log) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    commit = await asyncio.wait_for(log.append(draft(count=3), durability=Durability.WRITTEN), PATIENCE_S)
    assert log.journal.syncs == 1
    assert [entry.record_count for entry in log.entries()] == [1, 3]
    assert (commit.appended[0].base_offset, log.end()) == (1, 4)


async def test_a_written_message_waits_for_the_write(log: Log) -> None:
    await log.append(draft())
    log.disk.writing.close()
    task = log.later(draft(), durability=Durability.WRITTEN)
    await log.disk.writing.arrival()
    await turns()
    assert not task.done()
    log.disk.writing.open()
    await task


async def test_a_message_without_durability_is_answered_at_once_but_read_only_when_written(log: Log) -> None:
    await log.append(draft())
    log.disk.writing.close()
    commit = await asyncio.wait_for(log.append(draft(), durability=Durability.NONE), PATIENCE_S)
    assert commit.appended[0].base_offset == 1
    assert log.end() == 1
    await log.disk.writing.arrival()
    committed = asyncio.Event()
    behind = log.later(draft(), durability=Durability.WRITTEN, on_commit=lambda commit: committed.set())
    log.disk.writing.open()
    await committed.wait()
    await behind
    assert log.end() == 3


async def test_what_was_only_written_is_synced_within_the_interval(tmp_path: Path) -> None:
    log = Log(tmp_path, sync_interval_s=0.001)
    await log.append(draft())
    log.disk.syncing.close()
    await log.append(draft(), durability=Durability.WRITTEN)
    await log.disk.syncing.arrival()
    log.disk.syncing.open()
    end = log.journal.files[1].end
    await log.journal.note()
    assert log.entries()[-1].durable_position == end
    await shut(log)


async def test_in_a_mixed_group_all_wait_for_the_sync_and_commit_in_log_order(log: Log) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    blocker = log.later(draft())
    await log.disk.syncing.arrival()
    order: list[str] = []
    modes = [("written", Durability.WRITTEN), ("durable", Durability.DURABLE), ("none", Durability.NONE)]
    tasks = {
        name: log.later(draft(), durability=mode, on_commit=lambda commit, name=name: order.append(name))
        for name, mode in modes
    }
    await turns()
    log.disk.syncing.let_one_through()
    await blocker
    await log.disk.syncing.arrival()
    await turns()
    assert {name: task.done() for name, task in tasks.items()} == {
        "written": False,
        "durable": False,
        "none": True,
    }
    assert order == []
    log.disk.syncing.let_one_through()
    commits = await asyncio.gather(*tasks.values())
    assert order == ["written", "durable", "none"]
    assert [commit.appended[0].base_offset for commit in commits] == [2, 3, 4]


async def test_on_commit_runs_before_the_answer_and_when_the_message_can_be_read(log: Log) -> None:
    seen: list[tuple[str, int]] = []

    async def publish() -> None:
        await log.append(draft(), on_commit=lambda commit: seen.append(("committed", log.end())))
        seen.append(("answered", log.end()))

    await publish()
    assert seen == [("committed", 1), ("answered", 1)]


async def test_a_group_is_told_chain_by_chain_in_log_order(log: Log) -> None:
    ends: list[int] = []
    tasks = [log.later(draft(), on_commit=lambda commit: ends.append(log.end())) for _ in range(10)]
    await asyncio.gather(*tasks)
    assert ends == list(range(1, 11))


async def test_a_publisher_that_gives_up_is_stored_all_the_same(log: Log) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    committed: list[Commit] = []
    task = log.later(draft(), on_commit=committed.append)
    await log.disk.syncing.arrival()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    log.disk.syncing.open()
    await log.append(draft())
    assert task.cancelled()
    assert (len(committed), log.end()) == (1, 3)


async def test_a_bug_in_a_listener_freezes_the_journal_and_leaves_nobody_waiting(log: Log) -> None:
    def broken(commit: Commit) -> None:
        raise ZeroDivisionError("a bug")

    await log.append(draft())
    log.disk.syncing.close()
    first = log.later(draft())
    await log.disk.syncing.arrival()
    tasks = [log.later(draft(), on_commit=broken), log.later(draft())]
    await turns()
    log.disk.syncing.open()
    await first
    for outcome in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S):
        assert isinstance(outcome, JournalFrozen)
    with pytest.raises(JournalFrozen):
        await log.append(draft())


# Times.


async def test_publish_times_never_go_back_when_the_clock_does(log: Log) -> None:
    times = []
    for now_us in (5_000, 4_000, 4_500, 6_000):
        log.now_us = now_us
        times.append((await log.append(draft())).appended[0].publish_time_us)
    assert times == [5_000, 5_000, 5_000, 6_000]
    assert [entry.publish_time_us for entry in log.entries()] == times


async def test_times_go_on_from_what_recovery_found(log: Log) -> None:
    log.journal.adopt([], last_number=7, last_length=900, last_time_us=9_000)
    commit = await log.append(draft())
    assert commit.appended[0].publish_time_us == 9_000
    header = unpack_file_header((log.directory / "0000000008.wal").read_bytes()[:64])
    assert header is not None
    assert (header.file_number, header.previous_length) == (8, 900)


async def test_entries_witness_what_was_synced_and_which_catalog_was_known(log: Log) -> None:
    await log.append(draft())
    log.catalog_version = 5
    await log.append(draft())
    first, second = log.entries()
    assert (first.durable_position, first.catalog_version) == (64, 1)
    assert (second.durable_position, second.catalog_version) == (first.end_position, 5)


# Files.


async def test_a_file_is_preallocated_and_cut_when_it_is_finished(log: Log) -> None:
    await log.append(draft(size=1000))
    assert log.sizes() == {"0000000001.wal": 256 * KIB}
    await log.journal.rotate()
    end = log.journal.files[1].end
    assert 1000 < end < 2000
    assert log.sizes() == {"0000000001.wal": end}
    assert [file.number for file in log.journal.finished()] == [1]


async def test_a_full_file_is_followed_by_the_next_and_no_entry_is_split(tmp_path: Path) -> None:
    log = Log(tmp_path, file_bytes=64 * KIB)
    commits = [await log.append(draft(size=20 * KIB)) for _ in range(8)]
    assert log.new_files == [1, 2, 3]
    assert [commit.lsn >> 40 for commit in commits] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert [len(log.entries(number)) for number in (1, 2, 3)] == [3, 3, 2]
    headers = [unpack_file_header((tmp_path / f"{n:010d}.wal").read_bytes()[:64]) for n in (1, 2, 3)]
    lengths = [log.journal.files[number].end for number in (1, 2)]
    assert [header.previous_length for header in headers if header] == [0, *lengths]
    await shut(log)


async def test_an_entry_larger_than_a_file_gets_a_file_of_its_size(tmp_path: Path) -> None:
    log = Log(tmp_path, file_bytes=16 * KIB)
    await log.append(draft())
    await log.append(draft(size=100 * KIB))
    await log.append(draft())
    assert log.new_files == [1, 2, 3]
    assert log.entries(2)[0].body_length > 100 * KIB
    await shut(log)


async def test_rotating_a_file_of_notes_alone_does_nothing(log: Log) -> None:
    await log.journal.note()
    await log.journal.rotate()
    assert log.journal.finished() == []
    await log.append(draft())
    await log.journal.rotate()
    assert len(log.journal.finished()) == 1


async def test_rotating_while_publishing_goes_on_loses_nothing(log: Log) -> None:
    async def publish(stream: StreamId) -> None:
        for _ in range(30):
            await log.append(draft(stream=stream))

    async def rotate() -> None:
        for _ in range(10):
            await log.journal.rotate()

    await asyncio.gather(publish(A), publish(B), rotate())
    assert (log.end(A), log.end(B)) == (30, 30)
    kept = [entry for number in log.new_files for entry in log.entries(number) if entry.kind == Kind.BATCH]
    assert len(kept) == 60


async def test_a_forgotten_file_is_no_longer_known(log: Log) -> None:
    await log.append(draft())
    await log.journal.rotate()
    log.journal.forget(log.journal.finished()[0])
    assert log.journal.finished() == []


# Chains.


async def test_a_chain_lies_in_one_piece_with_all_but_the_last_continuing(log: Log) -> None:
    await asyncio.gather(
        log.append(draft(), FactsDraft(b"fact", 1), draft(stream=B)), log.append(draft()), log.append(draft())
    )
    entries = log.entries()
    assert [entry.continues for entry in entries] == [True, True, False, False, False]
    assert [entry.kind for entry in entries] == [Kind.BATCH, Kind.FACTS, Kind.BATCH, Kind.BATCH, Kind.BATCH]
    for before, after in itertools.pairwise(entries):
        assert before.end_position == after.position


async def test_a_chain_is_never_split_over_two_files(tmp_path: Path) -> None:
    log = Log(tmp_path, file_bytes=64 * KIB)
    await log.append(draft(size=40 * KIB))
    await log.append(*(draft(size=10 * KIB) for _ in range(4)))
    assert [len(log.entries(number)) for number in (1, 2)] == [1, 4]
    assert [entry.continues for entry in log.entries(2)] == [True, True, True, False]
    await shut(log)


async def test_a_chain_becomes_readable_as_one(log: Log) -> None:
    seen = []
    await log.append(
        draft(count=2), draft(count=3, stream=B), on_commit=lambda c: seen.append((log.end(A), log.end(B)))
    )
    assert seen == [(2, 3)]


# The bound on what may wait.


async def test_a_publisher_waits_when_too_much_is_pending_and_is_admitted_in_order(tmp_path: Path) -> None:
    log = Log(tmp_path, pending_bytes_max=20 * KIB, group_bytes_max=64 * KIB)
    await log.append(draft())
    log.disk.syncing.close()
    tasks = [log.later(draft(size=4 * KIB)) for _ in range(30)]
    await log.disk.syncing.arrival()
    await turns()
    assert log.journal.pending_bytes <= 20 * KIB
    log.disk.syncing.open()
    commits = await asyncio.gather(*tasks)
    assert [commit.appended[0].base_offset for commit in commits] == list(range(1, 31))
    assert log.journal.pending_bytes == 0
    await shut(log)


async def test_a_publisher_that_was_just_served_does_not_pass_those_who_wait(tmp_path: Path) -> None:
    log = Log(tmp_path, pending_bytes_max=10 * KIB)
    await log.append(draft())
    log.disk.syncing.close()
    order: list[str] = []

    async def publish(name: str) -> None:
        await log.append(draft(size=6 * KIB), on_commit=lambda commit: order.append(name))

    async def publish_twice() -> None:
        await publish("second")
        await publish("second again")

    tasks = [asyncio.create_task(publish("first"))]
    await log.disk.syncing.arrival()
    tasks += [asyncio.create_task(publish_twice()), asyncio.create_task(publish("third"))]
    await turns()
    log.disk.syncing.open()
    await asyncio.gather(*tasks)
    assert order == ["first", "second", "third", "second again"]
    await shut(log)


async def test_one_message_larger_than_the_bound_still_passes(tmp_path: Path) -> None:
    log = Log(tmp_path, pending_bytes_max=4 * KIB)
    await asyncio.wait_for(asyncio.gather(*(log.append(draft(size=10 * KIB)) for _ in range(3))), PATIENCE_S)
    assert log.end() == 3
    await shut(log)


class FailingDisk(GatedDisk):
    """Its sync fails when a test says so."""

    fails = False

    def sync(self, descriptor: int) -> None:
        self.syncing.go_through()
        if self.fails:
            raise OSError(5, "Input/output error")


async def test_a_frozen_journal_leaves_no_publisher_waiting_for_room(tmp_path: Path) -> None:
    log = Log(tmp_path, pending_bytes_max=10 * KIB)
    log.disk = log.journal._disk = FailingDisk()
    await log.append(draft())
    log.disk.syncing.close()
    tasks = [log.later(draft(size=6 * KIB)) for _ in range(10)]
    await log.disk.syncing.arrival()
    await turns()
    log.disk.fails = True
    log.disk.syncing.open()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(outcome, JournalFrozen) for outcome in outcomes)
    assert log.end() == 1
    await shut(log)


# Topics that go.


async def test_a_message_whose_topic_is_deleted_while_it_waits_is_refused_and_the_others_pass(
    log: Log,
) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    first = log.later(draft())
    await log.disk.syncing.arrival()
    doomed, other = log.later(draft(stream=B)), log.later(draft())
    await turns()
    log.hot.forget_topic(B.topic_id)
    log.disk.syncing.open()
    await asyncio.gather(first, other)
    with pytest.raises(TopicNotFound):
        await doomed
    assert log.end() == 3


async def test_a_topic_deleted_while_a_new_file_is_made_does_not_stop_the_journal(log: Log) -> None:
    log.disk.creating.close()
    doomed, other = log.later(draft(stream=B)), log.later(draft())
    await log.disk.creating.arrival()
    log.hot.forget_topic(B.topic_id)
    log.disk.creating.open()
    with pytest.raises(TopicNotFound):
        await asyncio.wait_for(doomed, PATIENCE_S)
    assert (await asyncio.wait_for(other, PATIENCE_S)).appended[0].base_offset == 0
    assert log.journal.pending_bytes == 0


async def test_publishers_behind_messages_of_a_deleted_topic_do_not_wait_for_ever(tmp_path: Path) -> None:
    log = Log(tmp_path, pending_bytes_max=10 * KIB)
    await log.append(draft())
    log.disk.syncing.close()
    first = log.later(draft())
    await log.disk.syncing.arrival()
    doomed = log.later(draft(size=9 * KIB, stream=B))
    behind = log.later(draft(size=9 * KIB))
    await turns()
    log.hot.forget_topic(B.topic_id)
    log.disk.syncing.open()
    await first
    with pytest.raises(TopicNotFound):
        await doomed
    await asyncio.wait_for(behind, PATIENCE_S)
    await shut(log)


# The end.


async def test_closing_leaves_a_note_that_witnesses_everything(log: Log) -> None:
    await log.append(draft())
    await log.append(draft(), durability=Durability.WRITTEN)
    log.catalog_version = 8
    await log.journal.close()
    *_, last, note = log.entries()
    assert note.kind == Kind.NOTE
    assert note.catalog_version == 8
    assert note.end_position == log.sizes()["0000000001.wal"]
    assert last.kind == Kind.BATCH


async def test_closing_writes_what_is_pending_first(log: Log) -> None:
    await log.append(draft())
    log.disk.syncing.close()
    tasks = [log.later(draft()) for _ in range(5)]
    await log.disk.syncing.arrival()
    closing = asyncio.create_task(log.journal.close())
    await turns()
    assert not closing.done()
    log.disk.syncing.open()
    await asyncio.gather(closing, *tasks)
    assert [entry.kind for entry in log.entries()] == [Kind.BATCH] * 6 + [Kind.NOTE]


async def test_a_closed_journal_refuses_with_the_type(log: Log) -> None:
    await log.append(draft())
    await log.journal.close()
    with pytest.raises(BrokerClosed):
        await log.append(draft())


async def test_closing_an_unused_journal_makes_no_file(log: Log) -> None:
    await log.journal.close()
    assert log.sizes() == {}
