"""Staged publishes: committed means all of it once and in order, not committed means none of it."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.errors import (
    InvalidArgument,
    InvalidName,
    PreconditionFailed,
    SparrowError,
    StageIncomplete,
    StageNotFound,
    StagingFull,
    StorageError,
    StorageFull,
    TopicNotFound,
)
from sparrow.model.settings import KIB, MIB, JournalSettings, Settings
from sparrow.model.stage import StagingSettings
from sparrow.store.disk import Disk
from sparrow.store.local import LocalStore
from sparrow.store.stage import list_stages
from sparrow.testing.disk import FaultyDisk, PowerLost

SMALL_CHAINS = 64 * KIB


class HandClock(Clock):
    def __init__(self) -> None:
        self.seconds = 0.0

    def now_us(self) -> int:
        return 1_700_000_000_000_000 + int(self.seconds * 1_000_000)


def table(payloads: Sequence[bytes], keys: Sequence[str | None] | None = None) -> pa.Table:
    columns: dict[str, pa.Array] = {"data": pa.array(payloads, pa.binary())}
    if keys is not None:
        columns["key"] = pa.array(keys, pa.string())
    return pa.table(columns)


def rows(name: str, count: int = 3, size: int = 10) -> list[bytes]:
    return [f"{name}-{place}".encode().ljust(size, b".") for place in range(count)]


@asynccontextmanager
async def opened(
    path: Path, *, disk: Disk | None = None, clock: Clock | None = None, **staging: object
) -> AsyncIterator[Broker]:
    clock = clock or HandClock()
    settings = Settings(
        data=str(path),
        journal=JournalSettings(file_bytes=1 * MIB, group_bytes_max=64 * KIB),
        staging=StagingSettings(**staging),  # type: ignore[arg-type]
    )
    store = await LocalStore.open(
        path, journal=settings.journal, lake=settings.lake, now_us=clock.now_us, disk=disk
    )
    broker = await Broker.open(settings, store=store, clock=clock)
    try:
        yield broker
    finally:
        try:
            await broker.close()
        except (PowerLost, SparrowError):
            assert isinstance(disk, FaultyDisk)


async def contents(broker: Broker, topic: str) -> list[bytes | None]:
    """Every partition's payloads, one partition behind the other."""
    found: list[bytes | None] = []
    for partition in range((await broker.topic(topic)).partitions):
        offset = 0
        while messages := await broker.read(topic, partition=partition, offset=offset):
            found += [message.data for message in messages]
            offset = messages[-1].offset + 1
    return found


async def stage(
    broker: Broker, part: str, payloads: Sequence[bytes], topic: str = "out"
) -> tuple[str, str, int]:
    staged = await broker.stage("t", part, topic, table(payloads))
    return "t", part, staged.messages


async def test_staged_messages_are_seen_only_after_the_commit(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        first = await stage(broker, "a", rows("a"))
        second = await stage(broker, "b", rows("b"))
        assert await contents(broker, "out") == []
        committed = await broker.commit_staged("etl", 0, [second, first])
        assert (committed.messages, committed.is_repeat) == (6, False)
        assert await contents(broker, "out") == rows("b") + rows("a")
        assert await broker.stages() == []
        assert list_stages(tmp_path / "data") == []
        assert await broker.committed_batch("etl") == 0


async def test_a_repeated_or_older_batch_is_answered_and_not_published(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        await broker.commit_staged("etl", 5, [await stage(broker, "a", rows("a"))])
        again = await broker.commit_staged("etl", 5, [await stage(broker, "b", rows("b"))])
        older = await broker.commit_staged("etl", 4, [await stage(broker, "c", rows("c"))])
        assert again.is_repeat
        assert older.is_repeat
        assert await contents(broker, "out") == rows("a")
        assert await broker.stages() == []
        other = await broker.commit_staged("other", 0, [await stage(broker, "d", rows("d"))])
        assert not other.is_repeat


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_what_is_committed_is_known_after_a_restart(tmp_path: Path, is_sealed: bool) -> None:
    async with opened(tmp_path / "data") as broker:
        await broker.commit_staged("etl", 5, [await stage(broker, "a", rows("a"))])
        if is_sealed:
            await broker.seal()
    for _ in range(2):
        async with opened(tmp_path / "data") as broker:
            again = await broker.commit_staged("etl", 5, [await stage(broker, "b", rows("b"))])
            assert again.is_repeat
            assert await contents(broker, "out") == rows("a")


async def test_a_stage_survives_a_restart_between_stage_and_commit(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        part = await stage(broker, "a", rows("a"))
    async with opened(tmp_path / "data") as broker:
        await broker.commit_staged("etl", 0, [part])
        assert await contents(broker, "out") == rows("a")


async def test_two_commits_of_one_batch_at_once_publish_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        parts = [await stage(broker, name, rows(name)) for name in "abcd"]
        async with asyncio.TaskGroup() as tasks:
            tries = [tasks.create_task(broker.commit_staged("etl", 0, [part])) for part in parts]
        assert sorted(each.result().is_repeat for each in tries) == [False, True, True, True]
        assert await contents(broker, "out") == rows("a")


async def test_one_commit_may_write_to_many_topics(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        for topic in ("left", "right", "left"):
            await broker.stage("t", "a", topic, table(rows(topic)))
        await broker.commit_staged("etl", 0, [("t", "a", 9)])
        assert await contents(broker, "left") == rows("left") * 2
        assert await contents(broker, "right") == rows("right")


async def test_messages_with_keys_go_to_the_partition_of_their_key_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        await broker.create_topic("out", partitions=4)
        keys = [f"k{place % 7}" for place in range(50)]
        payloads = [f"{key}:{place}".encode() for place, key in enumerate(keys)]
        await broker.stage("t", "a", "out", table(payloads, keys))
        await broker.commit_staged("etl", 0, [("t", "a", 50)])
        receipts = await broker.publish_batch("out", [b"x"] * 7, keys=[f"k{n}" for n in range(7)])
        home = {f"k{n}": receipts[n].partition for n in range(7)}
        for key, partition in home.items():
            found = [m.data for m in await broker.read("out", partition=partition) if m.key == key]
            assert found[:-1] == [p for p, k in zip(payloads, keys, strict=True) if k == key]


async def test_subscriptions_get_committed_messages(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        await broker.create_topic("out")
        reader = await broker.subscribe("reader", "out")
        pulling = asyncio.create_task(reader.pull(max_messages=10, timeout_s=30.0))
        part = await stage(broker, "a", rows("a"))
        await broker.commit_staged("etl", 0, [part])
        assert [message.data for message in await pulling] == rows("a")


async def test_a_repeated_call_is_recognised_and_a_missing_one_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        await broker.stage("t", "a", "out", table(rows("a")), position=0)
        await broker.stage("t", "a", "out", table(rows("b")), position=1)
        again = await broker.stage("t", "a", "out", table(rows("a")), position=0)
        assert (again.calls, again.messages) == (2, 6)
        with pytest.raises(StageIncomplete):
            await broker.stage("t", "a", "out", table(rows("c")), position=3)
        await broker.commit_staged("etl", 0, [("t", "a", 6)])
        assert await contents(broker, "out") == rows("a") + rows("b")


async def test_a_part_that_is_missing_or_incomplete_is_refused_and_nothing_published(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        part = await stage(broker, "a", rows("a"))
        with pytest.raises(StageNotFound):
            await broker.commit_staged("etl", 0, [part, ("t", "b", 3)])
        with pytest.raises(StageIncomplete):
            await broker.commit_staged("etl", 0, [("t", "a", 4)])
        assert await contents(broker, "out") == []
        assert await broker.committed_batch("etl") is None
        await broker.commit_staged("etl", 0, [part])
        assert await contents(broker, "out") == rows("a")


async def test_aborted_parts_are_gone(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        part = await stage(broker, "a", rows("a"))
        await stage(broker, "b", rows("b"))
        await broker.stage("u", "a", "out", table(rows("c")))
        assert await broker.abort_staged("t", ["b"]) == 1
        assert await broker.abort_staged("t") == 1
        with pytest.raises(StageNotFound):
            await broker.commit_staged("etl", 0, [part])
        assert [each.transaction for each in await broker.stages()] == ["u"]


async def test_parts_that_nobody_commits_are_swept(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened(tmp_path / "data", clock=clock, keep_s=100.0) as broker:
        await stage(broker, "old", rows("a"))
        clock.seconds = 60
        await stage(broker, "new", rows("b"))
        clock.seconds = 101
        assert await broker._staging.sweep() == 1
        assert [each.part for each in await broker.stages()] == ["new"]
        assert len(list_stages(tmp_path / "data")) == 1


async def test_an_application_is_forgotten_after_its_time(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened(tmp_path / "data", clock=clock) as broker:
        await broker.commit_staged("job", 0, [await stage(broker, "a", rows("a"))], remember_s=50)
        await broker.commit_staged("query", 0, [await stage(broker, "b", rows("b"))])
        await broker.seal()
        clock.seconds = 51
        await broker._staging.sweep()
        assert await broker.committed_batch("job") is None
        assert await broker.committed_batch("query") == 0
    async with opened(tmp_path / "data", clock=clock) as broker:
        assert await broker.committed_batch("job") is None


async def test_staging_is_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path / "data", bytes_max=1 * MIB) as broker:
        await stage(broker, "a", [b"x" * 600 * KIB])
        with pytest.raises(StagingFull):
            await stage(broker, "b", [b"x" * 600 * KIB])
        await broker.abort_staged("t")
        await stage(broker, "b", [b"x" * 600 * KIB])


async def test_bad_requests_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        with pytest.raises(InvalidName):
            await broker.stage("", "a", "out", table(rows("a")))
        with pytest.raises(InvalidName):
            await broker.stage("t", "a\n", "out", table(rows("a")))
        with pytest.raises(InvalidArgument):
            await broker.stage("t", "a", "out", [b"x"])
        keyed = table(rows("a")).append_column("idempotency_key", pa.array(["1", "2", "3"]))
        with pytest.raises(InvalidArgument):
            await broker.stage("t", "a", "out", keyed)
        for batch in (-1, 1.5, True, "1"):
            with pytest.raises(InvalidArgument):
                await broker.commit_staged("etl", batch, [])  # type: ignore[arg-type]
        for parts in ("abc", [("t", "a")], [("t", "a", -1)], [("t", "a", 1), ("t", "a", 1)], 7):
            with pytest.raises(InvalidArgument):
                await broker.commit_staged("etl", 0, parts)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await broker.commit_staged("etl", 0, [], remember_s=-1)


async def test_a_topic_that_was_deleted_or_divided_anew_fails_the_commit(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        await broker.create_topic("out", partitions=2)
        await broker.stage("t", "a", "out", table(rows("a"), ["x", "y", "z"]))
        await broker.update_topic("out", partitions=3)
        with pytest.raises(PreconditionFailed):
            await broker.commit_staged("etl", 0, [("t", "a", 3)])
        await broker.delete_topic("out")
        with pytest.raises(TopicNotFound):
            await broker.commit_staged("etl", 0, [("t", "a", 3)])
        assert await broker.committed_batch("etl") is None


async def test_a_commit_goes_on_when_its_caller_gives_up(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as broker:
        part = await stage(broker, "a", rows("a"))
        task = asyncio.create_task(broker.commit_staged("etl", 0, [part]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        again = await broker.commit_staged("etl", 0, [part])
        assert again.is_repeat
        assert await contents(broker, "out") == rows("a")


# Commits that do not fit one chain.


async def big(broker: Broker) -> list[tuple[str, str, int]]:
    """Two parts of ten calls each, about five chains."""
    parts = []
    for part in "ab":
        for call in range(10):
            await broker.stage("t", part, "out", table(rows(f"{part}{call}", 10, 1600)), position=call)
        parts.append(("t", part, 100))
    return parts


BIG = [row for part in "ab" for call in range(10) for row in rows(f"{part}{call}", 10, 1600)]


async def test_a_large_commit_is_published_whole_and_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "data", chain_bytes_max=SMALL_CHAINS) as broker:
        committed = await broker.commit_staged("etl", 0, await big(broker))
        assert committed.messages == 200
        assert await contents(broker, "out") == BIG
        assert list_stages(tmp_path / "data") == []
        assert (await broker.commit_staged("etl", 0, [])).is_repeat


async def test_a_large_commit_that_met_a_full_disk_is_finished_by_a_repeat(tmp_path: Path) -> None:
    for call in itertools.count(1):
        data = tmp_path / str(call)
        disk = FaultyDisk()
        async with opened(data, disk=disk, chain_bytes_max=SMALL_CHAINS) as broker:
            # A file that is nearly full: a chain of the commit is the first that needs a new one.
            await broker.publish_batch("fill", [b"x" * (1 * MIB - 200 * KIB)])
            parts = await big(broker)
            disk.fail("reserve", at=call, error=errno.ENOSPC)
            try:
                await broker.commit_staged("etl", 0, parts)
            except StorageFull:
                seen = await contents(broker, "out")
                assert seen == BIG[: len(seen)]
            else:
                break
            is_known = await broker.committed_batch("etl") == 0
            assert is_known or not seen
            again = await broker.commit_staged("etl", 0, parts)
            assert again.is_repeat == is_known
            assert await contents(broker, "out") == BIG
    assert call > 1, "the disk must have been full once"


async def test_power_lost_at_any_call_leaves_all_or_nothing(tmp_path: Path) -> None:
    """The disk stops before its n-th call, for every n until the commit gets through. What the next broker
    finds is everything in order, or nothing and the batch is not known."""
    outcomes = set()
    for call in range(1, 100):
        root = tmp_path / f"{call}-before"
        root.mkdir()
        disk = FaultyDisk(root / "data", seed=call)
        is_through = False
        async with opened(root / "data", disk=disk, chain_bytes_max=SMALL_CHAINS) as broker:
            await broker.create_topic("out")
            parts = await big(broker)
            disk.stop_at(call)
            try:
                await broker.commit_staged("etl", 0, parts)
                is_through = not disk.has_stopped
            except (PowerLost, SparrowError):
                pass
            disk.crash(tmp_path / f"{call}-after")
        async with opened(tmp_path / f"{call}-after", chain_bytes_max=SMALL_CHAINS) as broker:
            found = await contents(broker, "out")
            is_known = await broker.committed_batch("etl") == 0
            assert found == (BIG if is_known else []), f"power lost before call {call}"
            outcomes.add(is_known)
            if is_known:
                assert (await broker.commit_staged("etl", 0, parts)).is_repeat
                assert await contents(broker, "out") == BIG
        if is_through:
            break
    assert outcomes == {False, True}
    assert is_through, "the commit must get through in the end"


async def test_power_lost_during_a_small_commit_leaves_all_or_nothing(tmp_path: Path) -> None:
    outcomes = set()
    for call, seed in itertools.product(range(1, 5), range(4)):
        root = tmp_path / f"{call}-{seed}"
        root.mkdir()
        disk = FaultyDisk(root / "data", seed=seed)
        async with opened(root / "data", disk=disk) as broker:
            await broker.create_topic("out", partitions=2)
            await broker.publish("warm", b"up")
            parts = []
            for part in "ab":
                await broker.stage("t", part, "out", table(rows(part, 20), [f"k{n}" for n in range(20)]))
                parts.append(("t", part, 20))
            disk.stop_at(call)
            with_error = False
            try:
                await broker.commit_staged("etl", 0, parts)
            except (PowerLost, SparrowError):
                with_error = True
            disk.crash(root / "after")
        async with opened(root / "after") as broker:
            found = await contents(broker, "out")
            is_known = await broker.committed_batch("etl") == 0
            assert is_known or with_error
            assert sorted(found, key=str) == (
                sorted(rows("a", 20) + rows("b", 20), key=str) if is_known else []
            )
            outcomes.add(is_known)
    assert outcomes == {False, True}


async def test_a_frozen_journal_refuses_commits_and_the_next_broker_decides(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with opened(tmp_path / "data", disk=disk, chain_bytes_max=SMALL_CHAINS) as broker:
        await broker.publish("warm", b"up")
        parts = await big(broker)
        disk.fail("pwritev", at=3, error=errno.EIO)
        with pytest.raises(StorageError):
            await broker.commit_staged("etl", 0, parts)
        with pytest.raises(StorageError):
            await broker.commit_staged("etl", 0, parts)
    async with opened(tmp_path / "data", chain_bytes_max=SMALL_CHAINS) as broker:
        assert await contents(broker, "out") == BIG
        assert await broker.stages() == []


async def test_an_unfinished_commit_outlives_the_sealing_of_its_decision(tmp_path: Path) -> None:
    """The decision is sealed away while most of the batch is not in the log: the catalog remembers it."""
    disk = FaultyDisk()
    async with opened(tmp_path / "data", disk=disk, chain_bytes_max=SMALL_CHAINS) as broker:
        await broker.publish_batch("fill", [b"x" * (1 * MIB - 200 * KIB)])
        parts = await big(broker)
        disk.fail("reserve", at=1, error=errno.ENOSPC, times=None)
        with pytest.raises(StorageFull):
            await broker.commit_staged("etl", 0, parts)
        seen = await contents(broker, "out")
        assert 0 < len(seen) < len(BIG)
        await broker.seal()
        disk.heal()
    async with opened(tmp_path / "data", chain_bytes_max=SMALL_CHAINS) as broker:
        assert await contents(broker, "out") == BIG
        assert (await broker.commit_staged("etl", 0, parts)).is_repeat


async def test_messages_of_a_topic_deleted_on_the_way_go_with_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with opened(tmp_path / "data", disk=disk, chain_bytes_max=SMALL_CHAINS) as broker:
        await broker.publish("warm", b"up")
        for call in range(10):
            topic = "out" if call % 2 else "gone"
            await broker.stage("t", "a", topic, table(rows(str(call), 10, 1600)), position=call)
        disk.fail("pwritev", at=2, error=errno.EIO)
        with pytest.raises(StorageError):
            await broker.commit_staged("etl", 0, [("t", "a", 100)])
    broken = Settings(data=str(tmp_path / "data"))
    store = await LocalStore.open(
        tmp_path / "data", journal=broken.journal, lake=broken.lake, now_us=HandClock().now_us
    )
    gone = next(topic for topic in store.topics() if topic.name == "gone")
    await store.delete_topic(gone)
    await store.close()
    async with opened(tmp_path / "data", chain_bytes_max=SMALL_CHAINS) as broker:
        expected = [row for call in range(1, 10, 2) for row in rows(str(call), 10, 1600)]
        assert await contents(broker, "out") == expected
