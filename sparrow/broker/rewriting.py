"""Rewriting the lake of a topic: the plan that a job gets, and the swap that it asks for.

The job does the work, elsewhere. Here are the rules that bind it: a topic is compacted only when its policy
says so, what subscriptions need stays where the policy keeps that, and the last message of the sealed log
stays, so that whoever reads on in a gap always finds something behind it. The store checks the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.reading import Reading
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.model.errors import InvalidArgument, PreconditionFailed
from sparrow.model.message import StreamId
from sparrow.model.rewrite import RewriteKind, RewritePlan, Swap
from sparrow.model.segment import TopicSegments
from sparrow.model.settings import LakeSettings
from sparrow.model.topic import Compaction, Topic
from sparrow.store.ports import Store
from sparrow.store.segmentname import parse_name

_NOBODY = 2**62


class Rewriting:
    """See the module's text."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        subscriptions: Subscriptions,
        reading: Reading,
        lake: LakeSettings,
        clock: Clock,
    ) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._reading = reading
        self._lake = lake
        self._clock = clock
        self._log = logs.get("rewriting")
        self._swaps: set[asyncio.Task[Swap]] = set()

    async def stop(self) -> None:
        """A swap under way is finished: half of one could not be taken back."""
        if self._swaps:
            await asyncio.wait(self._swaps)

    def plan(self, name: str, hold_s: float) -> RewritePlan:
        """What a job needs to know, and files that stay for ``hold_s``."""
        topic = self._topics.get(name)
        segments = self._reading.segments(name, hold_s)
        return RewritePlan(
            segments=segments,
            policy=topic.policy,
            kept_from=[self._kept_from(topic, each.partition) for each in segments.partitions],
            now_us=self._clock.now_us(),
            compression=self._lake.compression,
            row_group_bytes=self._lake.row_group_bytes,
            dirty_ratio=_dirty_ratio(segments),
        )

    async def swap(
        self, name: str, partition: int, remove: Sequence[str], drafts: Sequence[str], kind: str
    ) -> Swap:
        """Puts drafts in the place of segments. It goes on to its end when its caller gives up."""
        topic, stream = self._topics.stream(name, partition)
        chosen = _parse_kind(kind)
        is_compacted = chosen is RewriteKind.COMPACT
        if is_compacted and topic.policy.compaction is not Compaction.KEY:
            raise PreconditionFailed(
                f"the topic {name!r} is not compacted", hint="Set its option compaction to key first."
            )
        work = self._store.swap(
            topic,
            partition,
            list(remove),
            list(drafts),
            is_compacted=is_compacted or self._is_compacted(topic, partition, remove),
            kept_from=self._kept_from(topic, stream.partition) if is_compacted else 0,
        )
        task = asyncio.get_running_loop().create_task(_awaited(work))
        self._swaps.add(task)
        task.add_done_callback(self._swaps.discard)
        done = await asyncio.shield(task)
        self._log.info(
            "segments-swapped", chosen.value, topic=name, partition=partition,
            segments=len(remove), messages_before=done.rows_before, messages=done.rows,
            bytes_before=done.bytes_before, bytes=done.bytes,
        )  # fmt: skip
        return done

    def _kept_from(self, topic: Topic, partition: int) -> int:
        stream = StreamId(topic.id, partition)
        (layout,) = [p for p in self._store.layout(topic, 0.0).partitions if p.partition == partition]
        needed = _NOBODY
        if topic.policy.retain_until_acked:
            needed = self._subscriptions.needed_from(topic).get(stream, _NOBODY)
        return min(needed, layout.sealed_end_offset - 1)

    def _is_compacted(self, topic: Topic, partition: int, remove: Sequence[str]) -> bool:
        """What is merged of compacted segments alone is compacted."""
        return all((name := parse_name(each)) is not None and name.is_compacted for each in remove)


def _parse_kind(value: str) -> RewriteKind:
    try:
        return RewriteKind(value)
    except ValueError as error:
        raise InvalidArgument(f"kind is {' or '.join(RewriteKind)}, not {value!r}") from error


def _dirty_ratio(segments: TopicSegments) -> float:
    """The share of the bytes that are in segments which no compaction has made."""
    dirty = whole = 0
    for each in (file for partition in segments.partitions for file in partition.segments):
        name = parse_name(each.file.rpartition("/")[2])
        whole += each.size_bytes
        dirty += 0 if name is not None and name.is_compacted else each.size_bytes
    return dirty / whole if whole else 0.0


async def _awaited(work: Any) -> Swap:
    done: Swap = await work
    return done
