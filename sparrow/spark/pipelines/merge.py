"""Merge: small neighbouring segments become larger ones; every message stays where it is.

A topic with little traffic seals a small file each time. Thousands of them make a scan slow and the catalog
long; a few large ones do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparrow.client.blocking import BlockingBroker
from sparrow.kernel.compaction import groups_to_merge
from sparrow.model.rewrite import RewriteKind
from sparrow.spark.pipelines.rewrites import SEGMENT_BYTES, Group, Item, Job, OnProgress, Outcome, opened
from sparrow.store import rewriting
from sparrow.store.rewriting import Written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession,
    where: BlockingBroker | str | Path,
    topic: str,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Merges the segments of a topic into ones of up to ``segment_bytes``; ``where`` is a broker's address,
    a broker, or the data directory of one that is stopped."""
    with opened(where) as broker:
        job = Job(spark, broker, topic, RewriteKind.MERGE, on_progress)
        try:
            _merge(job, segment_bytes)
        finally:
            job.finish()
        return job.outcome


def _merge(job: Job, segment_bytes: int) -> None:
    groups = [
        Group(each.partition, files)
        for each in job.plan.segments.partitions
        for files in groups_to_merge(each.segments, segment_bytes)
    ]
    job.expect(sum(group.size_bytes for group in groups))
    for start in range(0, len(groups), job.wave_size):
        wave = groups[start : start + job.wave_size]
        found = job.run(_work, [job.item(group) for group in wave])
        for group, written in zip(wave, found, strict=True):
            if written is None:
                job.outcome.conflicts += 1
            elif written.draft is not None:
                job.swap(group, written.draft)
            job.done(group.size_bytes)


def _work(item: Item) -> Written:
    return rewriting.merge(item.rewrite, item.draft)
