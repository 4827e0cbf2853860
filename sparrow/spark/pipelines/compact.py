"""Compact: of each key the newest message stays, in its place and under its offset (kernel/compaction.py).

Two passes. The first reads keys and offsets alone: each task finds the newest offset of every key in its
segment, and Spark the newest of those. The second rewrites: a task gets the offsets that stay, reads only row
groups that hold one of them, and writes a draft. Publishing goes on meanwhile; what is sealed after the plan
was made is for the next run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparrow.client.blocking import BlockingBroker
from sparrow.kernel.compaction import Rules, groups_to_compact
from sparrow.model.errors import PreconditionFailed, SegmentsChanged
from sparrow.model.message import StreamId
from sparrow.model.rewrite import RewriteKind
from sparrow.model.topic import Compaction
from sparrow.spark.pipelines.rewrites import SEGMENT_BYTES, Group, Item, Job, OnProgress, Outcome, opened
from sparrow.store import rewriting
from sparrow.store.rewriting import Written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCANS_MAX = 2000
"""Tasks of the first pass at most."""


def run(
    spark: SparkSession,
    where: BlockingBroker | str | Path,
    topic: str,
    *,
    if_due: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Compacts the sealed segments of a topic; with ``if_due``, only when enough is new. ``where`` is a
    broker's address, a broker, or the data directory of one that is stopped."""
    with opened(where) as broker:
        job = Job(spark, broker, topic, RewriteKind.COMPACT, on_progress)
        if job.plan.policy.compaction is not Compaction.KEY:
            raise PreconditionFailed(
                f"the topic {topic!r} is not compacted", hint="Set its option compaction to key first."
            )
        try:
            if job.outcome.segments_before and (job.plan.is_due or not if_due):
                _Compaction(job, segment_bytes).run()
        finally:
            job.finish()
        return job.outcome


class _Compaction:
    def __init__(self, job: Job, segment_bytes: int) -> None:
        self._job = job
        self._segment_bytes = segment_bytes
        self._places = [
            (each.partition, file) for each in job.plan.segments.partitions for file in each.segments
        ]
        self._numbers = {file.file: number for number, (_, file) in enumerate(self._places)}
        policy = job.plan.policy
        self._delays = (round(policy.tombstone_delay_s * 1e6), round(policy.dedupe_window_s * 1e6))

    def run(self) -> None:
        size = sum(file.size_bytes for _, file in self._places)
        self._job.expect(2 * size)
        newest = self._newest().persist()
        try:
            counts = Counter(
                {row["place"]: row["count"] for row in newest.groupBy("place").count().collect()}
            )
            self._job.done(size)
            self._rewrite(newest, counts)
        finally:
            newest.unpersist()

    def _newest(self) -> DataFrame:
        """Which offsets are the newest of their key, and the number of the segment that holds each."""
        from pyspark.sql import functions as f

        job = self._job
        refs = [(partition, str(job.root / file.file)) for partition, file in self._places]
        scan = _Scan(refs, job.plan.segments.topic_id)
        tasks = min(len(refs), _SCANS_MAX)
        found = job.spark.range(0, len(refs), 1, tasks).mapInArrow(
            scan, "partition int, key string, offset long"
        )
        newest = found.groupBy("partition", "key").agg(f.max("offset").alias("offset"))
        firsts = [(partition, file.first_offset) for partition, file in self._places]
        return newest.select("partition", "offset").mapInArrow(_Placing(firsts), "place int, offset long")

    def _rewrite(self, newest: DataFrame, counts: Counter[int]) -> None:
        job = self._job
        waiting = deque(self._groups(counts))
        stopped: set[int] = set()
        while waiting:
            wave = [waiting.popleft() for _ in range(min(job.wave_size, len(waiting)))]
            offsets = self._offsets(newest, wave)
            items = [
                job.item(group, offsets[number].tobytes(), self._rules(group.partition))
                for number, group in enumerate(wave)
            ]
            again: list[Group] = []
            empty: dict[int, Group] = {}
            for group, written in zip(wave, job.run(_work, items), strict=True):
                if group.partition in empty:
                    again.append(group)  # One before it is not in place, and they go in from the front.
                elif written is not None and written.draft is None and written.rows == 0:
                    empty[group.partition] = group
                else:
                    if group.partition not in stopped and not self._put(group, written):
                        stopped.add(group.partition)
                    job.done(group.size_bytes)
            waiting.extendleft(reversed(again))
            for group in empty.values():
                self._pass_on(group, waiting)

    def _put(self, group: Group, written: Written | None) -> bool:
        """A draft takes its place; False when nothing more of this partition may be changed in this run."""
        if written is None:
            self._job.outcome.conflicts += 1
            return False
        return written.draft is None or self._job.swap(group, written.draft)

    def _pass_on(self, empty: Group, waiting: deque[Group]) -> None:
        """Nothing of a group stays: its offsets go along with those that follow, where there are some."""
        for place, group in enumerate(waiting):
            is_next = group.files[0].first_offset == empty.files[-1].end_offset
            if group.partition == empty.partition and is_next:
                waiting[place] = Group(group.partition, [*empty.files, *group.files])
                return
        self._job.done(empty.size_bytes)

    def _groups(self, counts: Counter[int]) -> list[Group]:
        found = []
        for each in self._job.plan.segments.partitions:
            kept = [counts[self._numbers[file.file]] for file in each.segments]
            groups = groups_to_compact(each.segments, kept, self._segment_bytes)
            found += [Group(each.partition, files) for files in groups]
        return found

    def _rules(self, partition: int) -> Rules:
        return Rules(self._job.plan.now_us, *self._delays, self._job.plan.kept_from[partition])

    def _offsets(self, newest: DataFrame, wave: list[Group]) -> list[np.ndarray[Any, Any]]:
        """The offsets that stay of each group of a wave, in order."""
        from pyspark.sql import functions as f

        numbers = [[self._numbers[file.file] for file in group.files] for group in wave]
        wanted = sorted(number for some in numbers for number in some)
        table = newest.where(f.col("place").isin(wanted)).toArrow()
        places, offsets = table["place"].to_numpy(), table["offset"].to_numpy()
        order = np.lexsort((offsets, places))
        places, offsets = places[order], offsets[order]
        return [
            np.concatenate([offsets[slice(*np.searchsorted(places, [n, n + 1]))] for n in some])
            for some in numbers
        ]


class _Scan:
    """The first pass, in a worker: the newest offset of each key in some segments."""

    def __init__(self, refs: list[tuple[int, str]], topic_id: int) -> None:
        self._refs = refs
        self._topic_id = topic_id

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                partition, path = self._refs[number]
                try:
                    found = rewriting.newest_by_key(Path(path), StreamId(self._topic_id, partition))
                except SegmentsChanged:
                    continue  # Retention took it; the second pass leaves its neighbours alone.
                for rows in found.to_batches(max_chunksize=100_000):
                    numbers = pa.repeat(pa.scalar(partition, pa.int32()), rows.num_rows)
                    columns = [numbers, rows.column("key"), rows.column("offset")]
                    yield pa.RecordBatch.from_arrays(columns, ["partition", "key", "offset"])


class _Placing:
    """In a worker: which segment holds an offset."""

    def __init__(self, firsts: list[tuple[int, int]]) -> None:
        self._firsts: dict[int, tuple[list[int], list[int]]] = {}
        for number, (partition, first) in enumerate(firsts):
            numbers, offsets = self._firsts.setdefault(partition, ([], []))
            numbers.append(number)
            offsets.append(first)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            partitions = batch.column("partition").to_numpy()
            offsets = batch.column("offset").to_numpy()
            places = np.zeros(len(offsets), np.int32)
            for partition in np.unique(partitions):
                numbers, firsts = self._firsts[int(partition)]
                mine = partitions == partition
                places[mine] = np.asarray(numbers)[np.searchsorted(firsts, offsets[mine], "right") - 1]
            yield pa.RecordBatch.from_arrays([pa.array(places), pa.array(offsets)], ["place", "offset"])


def _work(item: Item) -> Written:
    assert item.rules is not None
    newest = pa.array(np.frombuffer(item.offsets, np.int64))
    return rewriting.compact(item.rewrite, newest, item.rules, item.draft)
