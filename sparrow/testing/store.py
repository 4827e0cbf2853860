"""The embedded store without a broker around it: small files, a clock that counts, and nothing in the
background, so that a test decides when each step happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from sparrow.model.message import StreamId
from sparrow.model.settings import KIB, MIB, JournalSettings, LakeSettings
from sparrow.model.topic import Durability, Topic, TopicPolicy
from sparrow.store import batch as batches
from sparrow.store.disk import Disk
from sparrow.store.local import LocalStore
from sparrow.store.ports import BatchDraft, Commit

JOURNAL = JournalSettings(file_bytes=1 * MIB, group_bytes_max=256 * KIB)
LAKE = LakeSettings(row_group_bytes=64 * KIB)

Contents = dict[StreamId, list[tuple[int, bytes]]]
"""Offsets and payloads of every stream."""


def counting_clock(start_us: int = 1_700_000_000_000_000) -> Callable[[], int]:
    """A clock that goes on by a millisecond at every look."""
    return itertools.count(start_us, 1000).__next__


async def open_store(
    root: Path,
    disk: Disk | None = None,
    *,
    journal: JournalSettings = JOURNAL,
    lake: LakeSettings = LAKE,
    now_us: Callable[[], int] | None = None,
) -> LocalStore:
    """The store of a directory, recovered."""
    return await LocalStore.open(
        root, journal=journal, lake=lake, now_us=now_us or counting_clock(), disk=disk
    )


async def create_topic(store: LocalStore, name: str, partitions: int = 1, **policy: object) -> Topic:
    return await store.create_topic(name, partitions, TopicPolicy(**policy), 0)  # type: ignore[arg-type]


def draft(stream: StreamId, payloads: Sequence[bytes], keys: Sequence[str] | None = None) -> BatchDraft:
    """A batch of these payloads, with idempotency keys if they are given."""
    body = batches.encode(batches.build(payloads, idempotency_key=keys))
    return BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns, body.codec)


async def append(store: LocalStore, *drafts: BatchDraft) -> Commit:
    """Stores the drafts as one atomic chain, durably."""
    return await store.append(drafts, Durability.DURABLE, lambda commit: None)


async def contents(store: LocalStore) -> Contents:
    """Everything that can be read, stream by stream; raises where a read meets damage."""
    found: Contents = {}
    for topic in store.topics():
        for partition in range(topic.partitions):
            stream = StreamId(topic.id, partition)
            found[stream] = await _read(store, stream)
    return found


async def _read(store: LocalStore, stream: StreamId) -> list[tuple[int, bytes]]:
    offset, end = store.bounds(stream)
    rows: list[tuple[int, bytes]] = []
    while offset < end:
        read = await store.read(stream, offset, 1 * MIB)
        if not read:
            break
        for one in read:
            offsets, payloads = one.batch.column("offset"), one.batch.column("data")
            rows.extend(zip(offsets.to_pylist(), payloads.to_pylist(), strict=True))
            offset = one.end_offset
    return rows
