"""Lake and source agree: publish, seal, merge, compact and expire at random, while readers check every row.

One topic is never compacted: each of its rows is there exactly once until it expires. The other is: of what a
compaction saw the newest of each key is there, with messages without a key, and all that is newer; no other
row, none twice, offsets ascending, contents as published. What may go is told by a model that knows nothing
of segments. Three readers look: one that follows the log, a subscription, and one that reads the files of a
layout some steps after it was told of them. The jobs are the functions that Spark's tasks call, and they run
beside the other steps.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.broker.broker import Broker
from sparrow.kernel.compaction import Rules, runs
from sparrow.model.errors import SegmentsChanged
from sparrow.model.rewrite import RewritePlan
from sparrow.model.segment import SegmentFile, TopicSegments
from sparrow.model.settings import Settings
from sparrow.store import rewriting
from sparrow.store.rewriting import Rewrite

PLAIN, STATE = "plain", "state"
PARTITIONS = 2
KEPT = 60
"""Sealed messages of a topic; when there are more, its oldest segments go."""
STEPS = 70
HOLD_S = 600.0

Row = tuple[str | None, bytes | None]


class Model:
    """What was published where, and what may be missing of it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], list[Row]] = {
            (topic, partition): [] for topic in (PLAIN, STATE) for partition in range(PARTITIONS)
        }
        self.gone: dict[tuple[str, int], set[int]] = {place: set() for place in self.rows}
        """Compacted away."""
        self.going: dict[tuple[str, int], set[int]] = {place: set() for place in self.rows}
        """Perhaps compacted away: a job is at it."""
        self.publishing = asyncio.Lock()
        """Held until what is published is known here too."""

    def replaced(self, place: tuple[str, int], end: int) -> set[int]:
        """The offsets below ``end`` that a newer message of their key replaces."""
        rows = self.rows[place][:end]
        newest = {key: offset for offset, (key, _) in enumerate(rows)}
        return {
            offset
            for offset, (key, _) in enumerate(rows)
            if key is not None and newest[key] != offset and offset != end - 1
        }

    def there(self, place: tuple[str, int], start: int, end: int) -> list[tuple[int, Row]]:
        """What can be read from ``start`` to ``end`` when no job is under way."""
        rows, gone = self.rows[place], self.gone[place]
        return [(offset, rows[offset]) for offset in range(start, end) if offset not in gone]


class Follower:
    """Reads on in a partition, or pulls; whatever it does not see must have gone by right."""

    def __init__(self, model: Model, broker: Broker) -> None:
        self._model = model
        self._broker = broker
        self.seen: dict[tuple[str, int], list[int]] = {place: [] for place in model.rows}

    async def see(self, place: tuple[str, int], offset: int, row: Row) -> None:
        async with self._model.publishing:
            seen = self.seen[place]
        after = seen[-1] + 1 if seen else 0
        assert offset >= after, f"{place} offset {offset} comes twice, or late"
        assert self._model.rows[place][offset] == row, f"{place} offset {offset} is another row"
        missing = set(range(after, offset)) - self._model.gone[place] - self._model.going[place]
        if missing:
            start = (await self._broker.bounds(*place)).start_offset
            assert max(missing) < start, f"{place}: {sorted(missing)} were passed over before {offset}"
        seen.append(offset)

    async def read(self, place: tuple[str, int], count: int) -> int:
        start = (await self._broker.bounds(*place)).start_offset
        at = max(start, self.seen[place][-1] + 1 if self.seen[place] else 0)
        found = await self._broker.read(place[0], partition=place[1], offset=at, max_messages=count)
        for message in found:
            await self.see(place, message.offset, (message.key, message.data))
        return len(found)

    async def pull(self, subscription: Any, count: int) -> int:
        found = await subscription.pull(max_messages=count, timeout_s=0)
        for message in found:
            await self.see((message.topic, message.partition), message.offset, (message.key, message.data))
            await message.ack()
        return len(found)


class World:
    """A broker, the model of it, and the steps that are taken."""

    def __init__(self, broker: Broker, chance: random.Random) -> None:
        self.broker = broker
        self.chance = chance
        self.model = Model()
        self.log = Follower(self.model, broker)
        self.subscribed = Follower(self.model, broker)
        self.jobs = 0
        self.moved = asyncio.Condition()
        """Told after every step."""
        self.done = {"publish": 0, "seal": 0, "merge": 0, "compact": 0, "expire": 0}
        self._layouts: list[tuple[TopicSegments, dict[tuple[str, int], list[tuple[int, Row]]]]] = []

    async def publish(self) -> None:
        topic = self.chance.choice([PLAIN, STATE])
        rows: list[Row] = []
        for _ in range(self.chance.randint(1, 12)):
            key = self.chance.choice([None, *(f"k{number}" for number in range(6))])
            is_tombstone = key is not None and self.chance.random() < 0.1
            rows.append((key, None if is_tombstone else self.chance.randbytes(self.chance.randint(1, 40))))
        keys, data = [key for key, _ in rows], [data for _, data in rows]
        async with self.model.publishing:
            receipts = await self.broker.publish_batch(topic, data, keys=keys)
            for receipt, row in zip(receipts, rows, strict=True):
                known = self.model.rows[topic, receipt.partition]
                assert receipt.offset == len(known)
                known.append(row)
        self.done["publish"] += 1

    async def seal(self) -> None:
        await self.broker.seal()
        self.done["seal"] += 1

    async def expire(self) -> None:
        before = [await self.broker.bounds(*place) for place in self.model.rows]
        layout = await self.broker.segments(PLAIN)
        sealed = sum(file.rows for each in layout.partitions for file in each.segments)
        await self.broker.apply_retention()
        for place, was in zip(self.model.rows, before, strict=True):
            now = await self.broker.bounds(*place)
            assert was.start_offset <= now.start_offset <= now.end_offset == len(self.model.rows[place])
            has_moved = now.start_offset > was.start_offset
            assert not (has_moved and place[0] == PLAIN and sealed <= KEPT), "there was not too much"
            self.done["expire"] += has_moved

    async def merge(self) -> None:
        """Some neighbours of a partition become one."""
        topic = self.chance.choice([PLAIN, STATE])
        plan = await self.broker.plan_rewrite(topic)
        for each in plan.segments.partitions:
            for run in runs(each.segments):
                first = self.chance.randrange(len(run))
                files = run[first : first + self.chance.randint(2, 6)]
                if len(files) < 2:
                    continue
                wanted = _rewrite(plan, each.partition, files)
                try:
                    written = await asyncio.to_thread(rewriting.merge, wanted, self._draft())
                    assert written.draft is not None
                    swap = await self.broker.swap_segments(
                        topic, each.partition, wanted.sources, [written.draft], kind="merge"
                    )
                except SegmentsChanged:
                    continue
                assert swap.rows == swap.rows_before
                self.done["merge"] += 1

    async def compact(self) -> None:
        """All of each partition, in groups of neighbours from the front, as the job does."""
        plan = await self.broker.plan_rewrite(STATE)
        for each in plan.segments.partitions:
            if not each.segments:
                continue
            place = (STATE, each.partition)
            self.model.going[place] |= self.model.replaced(place, each.sealed_end_offset)
            try:
                await self._compact(plan, each.partition, each.segments)
            except SegmentsChanged:
                pass  # What comes behind it stays for the next time.
            finally:
                self.model.going[place].clear()

    async def _compact(self, plan: RewritePlan, partition: int, files: list[SegmentFile]) -> None:
        place = (STATE, partition)
        going = set(self.model.going[place])
        root = Path(plan.segments.directory)
        stream = _rewrite(plan, partition, files).stream
        tables = [
            await asyncio.to_thread(rewriting.newest_by_key, root / file.file, stream) for file in files
        ]
        newest = pa.concat_tables(tables).group_by("key").aggregate([("offset", "max")])
        delay_us = round(plan.policy.tombstone_delay_s * 1e6)
        rules = Rules(plan.now_us, delay_us, 0, plan.kept_from[partition])
        for run in runs(files):
            while run:
                size = self.chance.randint(1, len(run))
                group, run = run[:size], run[size:]
                wanted = _rewrite(plan, partition, group)
                offsets = newest["offset_max"].combine_chunks()
                written = await asyncio.to_thread(rewriting.compact, wanted, offsets, rules, self._draft())
                if written.draft is None and written.rows == 0:
                    return  # It would go along with its neighbours; another time.
                if written.draft is not None:
                    await self.broker.swap_segments(
                        STATE, partition, wanted.sources, [written.draft], kind="compact"
                    )
                    self.done["compact"] += 1
                span = range(group[0].first_offset, group[-1].end_offset)
                self.model.gone[place] |= going & set(span)

    def _draft(self) -> str:
        self.jobs += 1
        return f"{rewriting.JOB}-test-{self.jobs}.parquet.tmp"

    # Looking at the files.

    async def note_layout(self) -> None:
        """What the files in force hold by right; they are read later."""
        layout = await self.broker.segments(self.chance.choice([PLAIN, STATE]), hold_s=HOLD_S)
        expected = {
            (layout.topic, each.partition): self.model.there(
                (layout.topic, each.partition), each.start_offset, each.sealed_end_offset
            )
            for each in layout.partitions
        }
        self._layouts.append((layout, expected))

    async def read_layouts(self) -> None:
        for layout, expected in self._layouts:
            for each in layout.partitions:
                paths = [Path(layout.directory) / file.file for file in each.segments]
                found = await asyncio.to_thread(_rows, paths, each.start_offset)
                assert found == expected[layout.topic, each.partition]
        self._layouts.clear()

    async def check_all(self) -> None:
        """Nothing is under way: the log, and the files with the rest behind them, are what the model says."""
        for topic, partition in self.model.rows:
            bounds = await self.broker.bounds(topic, partition)
            expected = self.model.there((topic, partition), *bounds)
            found: list[tuple[int, Row]] = []
            at = bounds.start_offset
            while read := await self.broker.read(topic, partition=partition, offset=at, max_messages=50):
                found += [(message.offset, (message.key, message.data)) for message in read]
                at = found[-1][0] + 1
            assert found == expected
            layout = (await self.broker.segments(topic)).partitions[partition]
            root = Path((await self.broker.segments(topic)).directory)
            sealed = _rows([root / file.file for file in layout.segments], layout.start_offset)
            assert sealed == [row for row in expected if row[0] < layout.sealed_end_offset]


def _rewrite(plan: RewritePlan, partition: int, files: list[SegmentFile]) -> Rewrite:
    root = Path(plan.segments.directory)
    return Rewrite(
        plan.segments.topic, plan.segments.topic_id, partition, str((root / files[0].file).parent),
        [Path(file.file).name for file in files], files[0].first_offset, files[-1].end_offset,
        plan.compression, plan.row_group_bytes,
    )  # fmt: skip


def _rows(paths: list[Path], start: int) -> list[tuple[int, Row]]:
    found: list[tuple[int, Row]] = []
    for path in paths:
        table = pq.ParquetFile(path).read(["offset", "key", "data"])
        found += [
            (offset, (key, data))
            for offset, key, data in zip(*(column.to_pylist() for column in table.columns), strict=True)
            if offset >= start
        ]
    return found


@asynccontextmanager
async def following(world: World) -> AsyncIterator[None]:
    """Two readers go along with the steps, and see the rest in the end."""
    subscription = await world.broker.subscribe("all", "#", start="earliest")
    is_over = False
    dice = random.Random(world.chance.random())

    async def pause(seen: int) -> None:
        """Lets others go on; who has seen everything waits for the next step."""
        async with world.moved:
            if not seen and not is_over:
                await world.moved.wait()

    async def read_on() -> None:
        while True:
            is_last = is_over
            seen = sum([await world.log.read(place, dice.randint(1, 9)) for place in world.model.rows])
            if is_last and not seen:
                return
            await pause(seen)

    async def pull_on() -> None:
        while True:
            is_last = is_over
            seen = await world.subscribed.pull(subscription, dice.randint(1, 30))
            if is_last and not seen and (await subscription.lag()) == 0:
                return
            await pause(seen)

    async with asyncio.TaskGroup() as readers:
        readers.create_task(read_on())
        readers.create_task(pull_on())
        yield
        is_over = True
        async with world.moved:
            world.moved.notify_all()


FIXED = [1, 2]


@pytest.mark.parametrize("seed", [*FIXED, random.SystemRandom().randrange(2**32)], ids=["1", "2", "chance"])
async def test_every_row_is_there_once_whatever_is_sealed_merged_compacted_and_expired(
    tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        await broker.create_topic(PLAIN, partitions=PARTITIONS, retention_messages=KEPT)
        await broker.create_topic(
            STATE, partitions=PARTITIONS, retention_messages=KEPT, compaction="key", dedupe_window_s=0
        )
        world = World(broker, random.Random(seed))
        steps = [world.publish, world.seal, world.expire, world.note_layout, world.read_layouts]
        async with following(world):
            for _ in range(STEPS):
                step = world.chance.choices([*steps, world.merge, world.compact], [10, 5, 1, 2, 2, 2, 2])[0]
                async with asyncio.TaskGroup() as beside:
                    beside.create_task(step())
                    if step in (world.merge, world.compact):
                        for _ in range(world.chance.randint(0, 3)):
                            await world.chance.choice([world.publish, world.seal, world.expire])()
                async with world.moved:
                    world.moved.notify_all()
            for step in (world.seal, world.merge, world.publish, world.compact, world.expire):
                await step()
        await world.read_layouts()
        await world.check_all()
        for follower in (world.log, world.subscribed):
            assert all(len(seen) > 0 for seen in follower.seen.values())
    assert seed not in FIXED or all(world.done.values()), f"each happened: {world.done}"
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        world.broker = broker
        await world.check_all()
