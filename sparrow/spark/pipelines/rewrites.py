"""What the jobs that rewrite the lake have in common: the broker they ask, the waves they work in, the sum.

The driver plans from the segments in force. A task gets references, file names and offsets, and moves the
bytes itself; it returns a few numbers. Work goes in waves of a few drafts a core: after each wave the broker
swaps its drafts in, from the front of each partition, so that a job that is stopped has done whole pieces,
and the disk holds little twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec

from sparrow.client.blocking import BlockingBroker, BlockingClient
from sparrow.kernel.compaction import Rules
from sparrow.model.errors import NotADataDirectory, SegmentsChanged
from sparrow.model.rewrite import SEGMENT_BYTES as SEGMENT_BYTES
from sparrow.model.rewrite import RewriteKind, RewritePlan, Swap
from sparrow.model.segment import SegmentFile
from sparrow.store.rewriting import JOB, Rewrite, Written, discard_drafts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""
_DRAFTS_A_CORE = 2


class Outcome(msgspec.Struct, kw_only=True):
    """What a job did."""

    topic: str
    segments_before: int = 0
    segments: int = 0
    messages_before: int = 0
    messages: int = 0
    bytes_before: int = 0
    bytes: int = 0
    swaps: int = 0
    conflicts: int = 0
    """Swaps that came too late: retention or another job had changed the segments."""
    seconds: float = 0.0

    def add(self, sources: int, swap: Swap) -> None:
        """A swap was made; what stays as it is counts from the start."""
        self.swaps += 1
        self.segments += len(swap.files) - sources
        self.messages += swap.rows - swap.rows_before
        self.bytes += swap.bytes - swap.bytes_before


class Group(NamedTuple):
    """Neighbouring segments that become one."""

    partition: int
    files: list[SegmentFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def names(self) -> list[str]:
        return [file.file.rpartition("/")[2] for file in self.files]


class Item(NamedTuple):
    """What a task gets: references only."""

    rewrite: Rewrite
    draft: str
    offsets: bytes = b""
    """Of messages that are the newest of a key, as little-endian int64."""
    rules: Rules | None = None


class Job:
    """A run of one kind of rewrite over one topic."""

    def __init__(
        self,
        spark: SparkSession,
        broker: BlockingBroker,
        topic: str,
        kind: RewriteKind,
        on_progress: OnProgress | None,
    ) -> None:
        self.spark = spark
        self.topic = topic
        self._broker = broker
        self._kind = kind
        self._on_progress = on_progress or _ignore
        self._name = f"{JOB}-{uuid4().hex[:12]}"
        self._count = 0
        self._started_s = perf_counter()
        self.plan: RewritePlan = broker.plan_rewrite(topic)
        self.root = Path(self.plan.segments.directory)
        files = [file for each in self.plan.segments.partitions for file in each.segments]
        self.total = self._left = 0
        self.outcome = Outcome(
            topic=topic,
            segments_before=len(files),
            segments=len(files),
            messages_before=sum(file.rows for file in files),
            messages=sum(file.rows for file in files),
            bytes_before=sum(file.size_bytes for file in files),
            bytes=sum(file.size_bytes for file in files),
        )

    @property
    def wave_size(self) -> int:
        return max(1, int(self.spark.sparkContext.defaultParallelism) * _DRAFTS_A_CORE)

    def expect(self, size_bytes: int) -> None:
        """So much is to be done in all."""
        self.total = self._left = size_bytes
        self.done(0)

    def done(self, size_bytes: int) -> None:
        self._left = max(0, self._left - size_bytes)
        self._on_progress(self.total - self._left, self.total)

    def item(self, group: Group, offsets: bytes = b"", rules: Rules | None = None) -> Item:
        self._count += 1
        files = group.files
        directory = (self.root / files[0].file).parent
        rewrite = Rewrite(
            self.topic,
            self.plan.segments.topic_id,
            group.partition,
            str(directory),
            group.names,
            files[0].first_offset,
            files[-1].end_offset,
            self.plan.compression,
            self.plan.row_group_bytes,
        )
        return Item(rewrite, f"{self._name}-{self._count}", offsets, rules)

    def run(self, work: Callable[[Item], Written], items: Sequence[Item]) -> list[Written | None]:
        """The drafts of a wave; None for one whose segments are gone."""
        context = self.spark.sparkContext
        task = _Task(work)
        found: list[Written | None] = context.parallelize(items, len(items)).map(task).collect()
        return found

    def swap(self, group: Group, draft: str) -> bool:
        """Asks the broker to put a draft in place; False when the segments have changed meanwhile."""
        try:
            swap = self._broker.swap_segments(
                self.topic, group.partition, group.names, [draft], kind=self._kind.value
            )
        except SegmentsChanged:
            self.outcome.conflicts += 1
            return False
        self.outcome.add(len(group.files), swap)
        return True

    def finish(self) -> Outcome:
        """Drafts that were not put in place go, whatever happened."""
        for each in self.plan.segments.partitions:
            if each.segments:
                discard_drafts((self.root / each.segments[0].file).parent, self._name)
        self.outcome.seconds = perf_counter() - self._started_s
        return self.outcome


class _Task:
    """Runs in a worker of Spark. A task that is tried again writes another file."""

    def __init__(self, work: Callable[[Item], Written]) -> None:
        self._work = work

    def __call__(self, item: Item) -> Written | None:
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = 0 if context is None else context.taskAttemptId()
        try:
            return self._work(item._replace(draft=f"{item.draft}-{attempt}.parquet.tmp"))
        except SegmentsChanged:
            return None


@contextmanager
def opened(where: BlockingBroker | str | Path) -> Iterator[BlockingBroker]:
    """A broker: given, at an address, or on a data directory that no broker has open."""
    if isinstance(where, BlockingBroker):
        yield where
        return
    with _open(where) as broker:
        yield broker


def _open(where: str | Path) -> BlockingBroker:
    from sparrow.broker.broker import Broker
    from sparrow.client.remote import RemoteBroker
    from sparrow.model.settings import Settings

    if isinstance(where, str) and "://" in where:
        return BlockingClient(lambda: RemoteBroker.open(where))
    if not Path(where).is_dir():
        raise NotADataDirectory(f"there is no directory {where}")
    return BlockingBroker(lambda: Broker.open(Settings(data=str(where))))


def _ignore(done: int, total: int) -> Any:
    """Nobody watches."""
