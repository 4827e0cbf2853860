"""Compacted topics: what stays, and that gaps in the offsets hide nothing and hold nobody up."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.kernel.compaction import Rules, groups_to_compact, groups_to_merge
from sparrow.model.errors import DraftRefused, InvalidArgument, PreconditionFailed, SegmentsChanged
from sparrow.model.segment import SegmentFile
from sparrow.model.settings import KIB, LakeSettings, Settings
from sparrow.store import rewriting
from sparrow.store.rewriting import Rewrite


class Hands(Clock):
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us


@pytest.fixture
def data() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory) / "data"


@asynccontextmanager
async def opened(data: Path, clock: Clock | None = None) -> AsyncIterator[Broker]:
    lake = LakeSettings(row_group_bytes=64 * KIB)
    async with await Broker.open(Settings(data=str(data), lake=lake), clock=clock) as broker:
        yield broker


async def compact(broker: Broker, topic: str = "state") -> int:
    """As the job does it, in one piece a partition; the number of messages that went."""
    plan = await broker.plan_rewrite(topic)
    gone = 0
    for each in plan.segments.partitions:
        if not each.segments:
            continue
        policy = plan.policy
        rules = Rules(
            plan.now_us, round(policy.tombstone_delay_s * 1e6), round(policy.dedupe_window_s * 1e6),
            plan.kept_from[each.partition],
        )  # fmt: skip
        wanted = rewrite(plan, each.partition, each.segments)
        root = Path(plan.segments.directory)
        tables = [rewriting.newest_by_key(root / file.file, wanted.stream) for file in each.segments]
        newest = pa.concat_tables(tables).group_by("key").aggregate([("offset", "max")])
        offsets = newest["offset_max"].combine_chunks()
        written = rewriting.compact(wanted, offsets, rules, "job-0.parquet.tmp")
        if written.draft:
            swap = await broker.swap_segments(
                topic, each.partition, wanted.sources, [written.draft], kind="compact"
            )
            gone += swap.rows_before - swap.rows
    return gone


async def merge(broker: Broker, topic: str = "state") -> None:
    plan = await broker.plan_rewrite(topic)
    for each in plan.segments.partitions:
        if len(each.segments) > 1:
            wanted = rewrite(plan, each.partition, each.segments)
            written = rewriting.merge(wanted, "job-1.parquet.tmp")
            assert written.draft
            await broker.swap_segments(topic, each.partition, wanted.sources, [written.draft], kind="merge")


def rewrite(plan: Any, partition: int, files: list[SegmentFile]) -> Rewrite:
    root = Path(plan.segments.directory)
    return Rewrite(
        plan.segments.topic, plan.segments.topic_id, partition, str((root / files[0].file).parent),
        [Path(file.file).name for file in files], files[0].first_offset, files[-1].end_offset,
        plan.compression, plan.row_group_bytes,
    )  # fmt: skip


async def offsets_of(broker: Broker, topic: str = "state", partition: int = 0) -> list[int]:
    found: list[int] = []
    bounds = await broker.bounds(topic, partition)
    at = bounds.start_offset
    while messages := await broker.read(topic, partition=partition, offset=at, max_messages=7):
        found += [message.offset for message in messages]
        at = found[-1] + 1
    return found


# What stays.


async def test_the_newest_message_of_each_key_stays_in_its_place(data: Path) -> None:
    async with opened(data) as broker:
        await broker.create_topic("state", compaction="key")
        for number in range(5):
            keys = ["a", "b", None, f"only-{number}"]
            await broker.publish_batch("state", [b"%d" % number] * 4, keys=keys)
            await broker.seal()
        await broker.publish("state", b"hot", key="a")
        assert await compact(broker) == 8
        expected = [2, 3, 6, 7, 10, 11, 14, 15, 16, 17, 18, 19, 20]
        assert await offsets_of(broker) == expected
        messages = await broker.read("state", offset=0)
        assert {m.key: m.data for m in messages if m.key and m.offset < 20} == {
            "a": b"4", "b": b"4", **{f"only-{n}": b"%d" % n for n in range(5)}
        }  # fmt: skip
        assert await compact(broker) == 0
        assert await broker.bounds("state") == (0, 21)
    async with opened(data) as broker:
        assert await offsets_of(broker) == expected


async def test_a_tombstone_stays_for_its_delay_and_then_goes(data: Path) -> None:
    clock = Hands()
    async with opened(data, clock) as broker:
        await broker.create_topic("state", compaction="key", tombstone_delay_s=3600, dedupe_window_s=1)
        await broker.publish("state", b"1", key="a")
        await broker.publish("state", None, key="a")
        await broker.publish("state", b"2", key="b")
        await broker.seal()
        assert await compact(broker) == 1
        assert await offsets_of(broker) == [1, 2]
        clock.ahead_us += 3601 * 1_000_000
        assert await compact(broker) == 1
        assert await offsets_of(broker) == [2]
        await broker.publish("state", None, key="b")
        await broker.seal()
        clock.ahead_us += 3601 * 1_000_000
        assert await compact(broker) == 1
        assert await offsets_of(broker) == [3], "the last message stays, a tombstone too"


async def test_what_is_still_to_be_recognised_or_delivered_stays(data: Path) -> None:
    clock = Hands()
    async with opened(data, clock) as broker:
        await broker.create_topic("state", compaction="key", dedupe_window_s=60)
        await broker.publish("state", b"keyed", key="a", idempotency_key="i-1")
        await broker.publish("state", b"later", key="a", deliver_at=clock.now_us() / 1e6 + 3000)
        await broker.publish("state", b"plain", key="a")
        await broker.publish("state", b"newest", key="a")
        await broker.seal()
        assert await compact(broker) == 1
        assert await offsets_of(broker) == [0, 1, 3]
    async with opened(data, clock) as broker:
        again = await broker.publish("state", b"keyed", key="a", idempotency_key="i-1")
        assert (again.offset, again.is_duplicate) == (0, True), "a repeat is recognised after a restart"
        clock.ahead_us += 4000 * 1_000_000
        assert await compact(broker) == 2
        assert await offsets_of(broker) == [3]


async def test_what_a_subscription_needs_stays_where_the_topic_keeps_it(data: Path) -> None:
    async with opened(data) as broker:
        await broker.create_topic("state", compaction="key", retain_until_acked=True)
        subscription = await broker.subscribe("all", "state", start="earliest")
        for number in range(6):
            await broker.publish("state", b"%d" % number, key="a")
        await broker.seal()
        await subscription.ack(await subscription.pull(max_messages=3), wait=True)
        await compact(broker)
        assert await offsets_of(broker) == [3, 4, 5]
        rest = await subscription.pull(max_messages=10)
        assert [message.offset for message in rest] == [3, 4, 5]
        plan = await broker.plan_rewrite("state")
        (file,) = plan.segments.partitions[0].segments
        wanted = rewrite(plan, 0, [file])
        rules = Rules(plan.now_us, 0, 0, 2**62)
        written = rewriting.compact(wanted, pa.array([5]), rules, "greedy-0.parquet.tmp")
        with pytest.raises(DraftRefused, match="must stay"):
            await broker.swap_segments("state", 0, wanted.sources, [written.draft or ""], kind="compact")


async def test_a_job_is_bound_by_the_topics_policy(data: Path) -> None:
    async with opened(data) as broker:
        await broker.create_topic("plain")
        await broker.publish("plain", b"1", key="a")
        await broker.seal()
        with pytest.raises(PreconditionFailed, match="not compacted"):
            await broker.swap_segments("plain", 0, ["x"], ["y.parquet.tmp"], kind="compact")
        with pytest.raises(InvalidArgument, match="kind"):
            await broker.swap_segments("plain", 0, ["x"], ["y.parquet.tmp"], kind="shred")
        with pytest.raises(SegmentsChanged):
            await broker.swap_segments("plain", 0, ["x"], ["y.parquet.tmp"], kind="merge")
        for bad in ({"compaction": "size"}, {"tombstone_delay_s": -1}, {"compaction_dirty_ratio": 2}):
            with pytest.raises(InvalidArgument):
                await broker.update_topic("plain", **bad)


async def test_the_dirty_ratio_tells_when_compaction_is_due(data: Path) -> None:
    async with opened(data) as broker:
        await broker.create_topic("state", compaction="key")
        assert not (await broker.plan_rewrite("state")).is_due
        for _ in range(3):
            await broker.publish_batch("state", [b"x" * 100] * 50, keys=[f"k{i}" for i in range(50)])
            await broker.seal()
        plan = await broker.plan_rewrite("state")
        assert (plan.dirty_ratio, plan.is_due) == (1.0, True)
        assert await compact(broker) == 100
        plan = await broker.plan_rewrite("state")
        assert (plan.dirty_ratio, plan.is_due) == (0.0, False)
        await broker.publish("state", b"x", key="k1")
        await broker.seal()
        await merge(broker)
        assert (await broker.plan_rewrite("state")).dirty_ratio == 1.0, "merged with what was not compacted"


# Delivery across gaps.


async def test_a_message_that_goes_while_a_consumer_waits_for_it_holds_nobody_up(data: Path) -> None:
    async with opened(data) as broker:
        await broker.create_topic("state", compaction="key")
        subscription = await broker.subscribe("all", "state", start="earliest", ack_deadline_s=10)
        for number in range(10):
            await broker.publish("state", b"%d" % number, key="a")
        await broker.seal()
        first = await subscription.pull(max_messages=1)
        assert await compact(broker) == 9
        broker._pages.forget_topic(first[0].topic_id)  # As when others have read much meanwhile.
        await first[0].nack(delay_s=0)
        rest = await subscription.pull(max_messages=10, timeout_s=5)
        assert [message.offset for message in rest] == [9]
        await subscription.ack(rest, wait=True)
        assert await subscription.pull(max_messages=10, timeout_s=0.2) == []
        assert await subscription.lag() == 0


async def test_retention_and_seek_work_on_compacted_segments(data: Path) -> None:
    clock = Hands()
    async with opened(data, clock) as broker:
        await broker.create_topic("state", compaction="key", retention_s=1000)
        for number in range(20):
            await broker.publish("state", b"%d" % number, key=f"k{number % 2}")
        await broker.seal()
        await compact(broker)
        for _ in range(5):
            await broker.publish("state", b"new", key="k2")
        await broker.seal()
        subscription = await broker.subscribe("all", "state")
        await subscription.seek({("state", 0): 7})
        found = await subscription.pull(max_messages=100)
        assert [message.offset for message in found] == [18, 19, 20, 21, 22, 23, 24]
        clock.ahead_us += 2_000_000_000
        await broker.apply_retention()
        assert await broker.bounds("state") == (25, 25)


KEYS = ["a", "b", "c", None]
STEPS = st.one_of(
    st.tuples(
        st.just("publish"),
        st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=9),
    ),
    st.tuples(
        st.sampled_from(["seal", "compact", "merge", "expire", "look", "restart", "forget"]), st.none()
    ),
    st.tuples(st.sampled_from(["ack", "nack", "hold"]), st.integers(1, 9)),
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, max_size=20))
def test_every_message_is_delivered_once_or_was_replaced(steps: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        asyncio.run(_Story(Path(directory) / "data").run(steps))


class _Story:
    """Publishes, seals, rewrites, expires, restarts and consumes, against a list of what was published. After
    every step the lake's files and the log agree, and files that a reader holds are as they were."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.clock = Hands()
        self.looks: list[tuple[list[Path], list[int]]] = []
        self.sent: list[tuple[str | None, bytes | None]] = []
        self.acked: set[int] = set()
        self.held: list[Any] = []

    async def run(self, steps: list[tuple[str, Any]]) -> None:
        manager = opened(self.data, self.clock)
        broker = await manager.__aenter__()
        await broker.create_topic(
            "state", compaction="key", tombstone_delay_s=0, dedupe_window_s=0, retention_s=1000
        )
        subscription = await broker.subscribe("all", "state", start="earliest", ack_deadline_s=600)
        for step, value in steps:
            if step == "publish":
                rows = [(key, None if is_null and key else b"%d" % len(self.sent)) for key, is_null in value]
                await broker.publish_batch("state", [d for _, d in rows], keys=[k for k, _ in rows])
                self.sent += rows
            elif step == "seal":
                await broker.seal()
            elif step == "compact":
                await compact(broker)
            elif step == "merge":
                await merge(broker)
            elif step == "expire":
                self.clock.ahead_us += 1_100_000_000
                await broker.apply_retention()
            elif step == "look":
                files = await self._files(broker, hold_s=80_000)
                self.looks.append((files, _offsets_in(files)))
            elif step == "forget":
                broker._pages.forget_topic((await broker.topic("state")).id)
            elif step == "restart":
                self.held.clear()
                self.looks.clear()
                await manager.__aexit__(None, None, None)
                manager = opened(self.data, self.clock)
                broker = await manager.__aenter__()
                subscription = await broker.subscription("all")
            else:
                await self._consume(subscription, step, value)
            await self._check_log(broker)
        for message in self.held:
            await message.nack(delay_s=0)
        while found := await subscription.pull(max_messages=100, timeout_s=0.05):
            for message in found:
                await self._ack(subscription, message)
        assert await subscription.lag() == 0
        there = set(await offsets_of(broker))
        assert there - self.acked == set(), "all that is there was delivered"
        await manager.__aexit__(None, None, None)

    async def _consume(self, subscription: Any, step: str, count: int) -> None:
        found = await subscription.pull(max_messages=count, timeout_s=0.0)
        offsets = [message.offset for message in found]
        assert offsets == sorted(offsets)
        for message in found:
            assert (message.key, message.data) == self.sent[message.offset]
            assert message.offset not in self.acked, "never after its ack"
            if step == "ack":
                await self._ack(subscription, message)
            elif step == "nack":
                await message.nack(delay_s=0)
            else:
                self.held.append(message)

    async def _ack(self, subscription: Any, message: Any) -> None:
        assert (message.key, message.data) == self.sent[message.offset]
        await subscription.ack([message], wait=True)
        self.acked.add(message.offset)

    async def _check_log(self, broker: Broker) -> None:
        there = await offsets_of(broker)
        start, end = await broker.bounds("state")
        assert end == len(self.sent)
        files = await self._files(broker)
        sealed_end = (await broker.segments("state")).partitions[0].sealed_end_offset
        assert _offsets_in(files) == [offset for offset in there if offset < sealed_end]
        for held, offsets in self.looks:
            assert _offsets_in(held) == offsets, "held files stay as they were"
        for offset, (key, _) in enumerate(self.sent):
            if offset >= start and offset not in there:
                assert key is not None
                later = [n for n in range(offset + 1, len(self.sent)) if self.sent[n][0] == key]
                assert later or self.sent[offset][1] is None, "only what was replaced or deleted is gone"
        newest = {key: number for number, (key, _) in enumerate(self.sent) if key}
        for key, number in newest.items():
            is_deleted = self.sent[number][1] is None
            if number >= start and number not in there:
                assert is_deleted, "the newest of a key stays"
                assert not [n for n in there if self.sent[n][0] == key], "nothing deleted comes back"

    async def _files(self, broker: Broker, hold_s: float = 0.0) -> list[Path]:
        seen = await broker.segments("state", hold_s=hold_s)
        return [Path(seen.directory) / file.file for file in seen.partitions[0].segments]


def _offsets_in(files: list[Path]) -> list[int]:
    return [offset for file in files for offset in pq.read_table(file)["offset"].to_pylist()]


# Which segments go together.


def file(first: int, end: int, size: int = 100) -> SegmentFile:
    return SegmentFile(f"{first}", first, end, end - first, size, 0, 0)


def test_only_small_neighbours_are_merged_and_only_when_it_is_worth_it() -> None:
    files = [file(0, 10), file(10, 20), file(25, 30), file(30, 40, 90), file(40, 50, 500), file(50, 60, 20)]
    assert [[f.first_offset for f in g] for g in groups_to_merge(files, 300)] == [[0, 10], [25, 30]]
    assert groups_to_merge([file(0, 10, 290), file(10, 20, 5)], 300) == []
    assert groups_to_merge([], 300) == []


def test_segments_of_which_nothing_stays_go_along_with_a_neighbour() -> None:
    files = [file(0, 10), file(10, 20), file(20, 30), file(30, 40), file(45, 50)]
    groups = groups_to_compact(files, [0, 0, 10, 10, 0], 100)
    assert [[f.first_offset for f in g] for g in groups] == [[0, 10, 20], [30], [45]]
    groups = groups_to_compact(files[:4], [10, 10, 0, 0], 100)
    assert [[f.first_offset for f in g] for g in groups] == [[0], [10, 20, 30]]
