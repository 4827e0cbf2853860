"""What the broker needs of a store, and nothing about how it is done.

The embedded store (local.py) keeps a journal, a lake and a catalog in one directory; a cluster's store
keeps the log in Kafka and the catalog in PostgreSQL. The broker sees the types below only, so nothing
above this file may assume files.

The rules every store keeps:

* ``append`` stores a chain whole or not at all, and calls ``on_commit`` on the event loop, in the order
  of the log, before the caller is answered. State that is built from the log changes there and only
  there, so live state and recovered state cannot differ.
* offsets of a stream are given without a gap; compaction and damage leave gaps, behind which there is always
  something to read. A message is readable only once its publisher could have its receipt.
* after a failed write nothing more is accepted; reading goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from sparrow.model.message import StreamId
from sparrow.model.rewrite import Swap
from sparrow.model.segment import BatchPlace, Measured, SegmentInfo, TopicSegments
from sparrow.model.stage import Stage
from sparrow.model.topic import Durability, Topic, TopicPolicy
from sparrow.store.machine import Space

if TYPE_CHECKING:  # They bring SQLAlchemy along, which clients do without.
    from sparrow.store.catalog_tables import CursorCheckpoint, Document, ProducerState, SubscriptionRow


class BatchDraft(NamedTuple):
    """A batch that wants to be appended: the encoded publish form and whose it is."""

    stream: StreamId
    body: Any
    body_crc: int
    record_count: int
    columns: int
    codec: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    base_sequence: int = 0
    has_sequences: bool = False


class FactsDraft(NamedTuple):
    """Facts that want to be appended, encoded."""

    body: bytes
    record_count: int


Draft = BatchDraft | FactsDraft


class StagedEntry(NamedTuple):
    """A batch that waits for a commit."""

    draft: BatchDraft
    partitions: int
    """How many its topic had when its messages were divided by key; 0 when that does not matter."""


class Appended(NamedTuple):
    """Where a draft went. Facts have no offset: theirs is 0."""

    base_offset: int
    publish_time_us: int


class Commit(NamedTuple):
    """A chain that is in the log as its durability promises."""

    lsn: int
    appended: tuple[Appended, ...]


OnCommit = Callable[[Commit], None]


class Bounds(NamedTuple):
    """The offsets that can be read: from ``start_offset`` up to, not including, ``end_offset``."""

    start_offset: int
    end_offset: int


class LogBatch(NamedTuple):
    """Messages as read: the table form. Offsets ascend; a hole is a gap that was reported."""

    stream: StreamId
    first_offset: int
    end_offset: int
    batch: pa.RecordBatch


class ProducerBatch(NamedTuple):
    """What recovery tells of a chain that a producer appended to one topic."""

    producer_id: int
    producer_epoch: int
    topic_id: int
    parts: tuple[ProducerPart, ...]


class ProducerPart(NamedTuple):
    """The part of a producer's request that went to one partition."""

    partition: int
    base_offset: int
    publish_time_us: int
    sequences: tuple[int, ...] | range


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was found broken."""

    file: str
    what: str
    position: int = 0
    end_position: int = 0
    topic_id: int = 0
    partition: int = 0
    start_offset: int = 0
    end_offset: int = 0


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What opening the store did and found."""

    seconds: float = 0.0
    journal_files: int = 0
    journal_bytes: int = 0
    entries: int = 0
    messages: int = 0
    torn_bytes: int = 0
    segments: int = 0
    removed_files: int = 0
    damages: tuple[Damage, ...] = ()


class Recovered(NamedTuple):
    """The part of the log that the catalog's checkpoints may not include, in log order."""

    facts: Sequence[tuple[int, bytes]]
    producers: Sequence[tuple[int, ProducerBatch]]
    cursor_checkpoints: Sequence[CursorCheckpoint]
    producer_checkpoints: Sequence[ProducerState]
    producer_epochs: dict[int, int]
    report: RecoveryReport


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """A store's own view of its health and size."""

    is_writable: bool
    complaint: str | None
    journal_bytes: int
    journal_files: int
    lake_bytes: int
    segments: int
    pending_bytes: int
    syncs: int
    sync_seconds: float
    damages: tuple[Damage, ...]
    sync_buckets: tuple[int, ...] = ()
    """How many syncs took up to each of the bounds in synctimes.py, and how many longer."""
    written_bytes: int = 0
    """Into the journal, since the store was opened."""
    unsealed_bytes: int = 0
    """Of journal files that are finished and not in the lake yet."""


class Log(Protocol):
    """The messages."""

    async def append(self, chain: Sequence[Draft], durability: Durability, on_commit: OnCommit) -> Commit: ...

    def bounds(self, stream: StreamId) -> Bounds: ...

    async def read(
        self, stream: StreamId, offset: int, max_bytes: int, *, is_whole: bool = False
    ) -> list[LogBatch]: ...

    async def offset_at(self, stream: StreamId, time_us: int) -> int: ...

    def measure(self, stream: StreamId, start_offset: int, end_offset: int, max_bytes: int) -> Measured: ...

    def places(self, stream: StreamId, start_offset: int, end_offset: int) -> list[BatchPlace]: ...

    async def idempotency_keys(self, topic: Topic, since_us: int) -> list[LogBatch]: ...


class Catalog(Protocol):
    """The nouns, and what is known about the log."""

    def topics(self) -> list[Topic]: ...

    async def create_topic(self, name: str, partitions: int, policy: TopicPolicy, now_us: int) -> Topic: ...

    async def update_topic(self, topic: Topic) -> None: ...

    async def delete_topic(self, topic: Topic) -> None: ...

    def subscriptions(self) -> list[SubscriptionRow]: ...

    async def create_subscription(self, row: SubscriptionRow) -> SubscriptionRow: ...

    async def update_subscription(self, row: SubscriptionRow) -> None: ...

    async def delete_subscription(self, subscription_id: int) -> None: ...

    async def open_producer(self, name: str) -> tuple[int, int]: ...

    async def put_document(self, kind: str, key: str, value: bytes) -> None: ...

    async def delete_document(self, kind: str, key: str) -> None: ...

    async def documents(self, kind: str) -> dict[str, bytes]: ...


class Audit(Protocol):
    """What administrators did: lines that are added and read back, never changed."""

    async def note_audit(self, line: bytes) -> None: ...

    async def audit_lines(self, count: int) -> list[bytes]: ...


class Stages(Protocol):
    """Parts that wait for a commit. Each has a number, unlike that of any other part."""

    def __iter__(self) -> Iterator[tuple[int, Stage]]: ...

    def __len__(self) -> int: ...

    def find(self, transaction: str, part: str) -> int | None: ...

    def get(self, number: int) -> Stage | None: ...

    size_bytes: int
    """What all parts hold."""

    def reserve_numbers(self, through: int) -> None:
        """Numbers up to this one are taken."""

    def open_part(self, transaction: str, part: str) -> int:
        """The number of a part, new or not."""

    async def write(self, number: int, drafts: Sequence[BatchDraft], partitions: int, now_us: int) -> Stage:
        """Adds one call, whole or not at all; when that fails the part is gone."""

    async def sync(self, numbers: Iterable[int]) -> None:
        """What these parts hold is on the disk when this returns."""

    async def read(self, number: int) -> list[StagedEntry]: ...

    async def drop(self, numbers: Iterable[int]) -> None: ...


class Keeping(Protocol):
    """Work on the log in the background."""

    def finished_bytes(self) -> int: ...

    async def rotate(self) -> None: ...

    async def wait_for_finished(self, bytes_min: int, timeout_s: float) -> None: ...

    is_calm: bool
    """Whether nobody waits for a seal: it then leaves the processor to others, unless it falls behind."""

    async def seal(
        self,
        cursors: Iterable[CursorCheckpoint],
        producers: Iterable[ProducerState],
        documents: Iterable[Document] = (),
    ) -> int: ...

    def segments(self, topic: Topic) -> list[SegmentInfo]: ...

    def layout(self, topic: Topic, hold_s: float) -> TopicSegments:
        """The segments in force, as files; for ``hold_s`` the files can be read whatever retention does."""
        ...

    async def release(self) -> None:
        """Files that are out of force and no longer held go."""
        ...

    async def drop(self, segments: Sequence[SegmentInfo]) -> None: ...

    async def swap(
        self,
        topic: Topic,
        partition: int,
        remove: Sequence[str],
        drafts: Sequence[str],
        *,
        is_compacted: bool,
        kept_from: int,
    ) -> Swap:
        """Puts drafts, which were written beside the segments, in the place of neighbouring segments. Each
        row of a draft must be one of theirs, and from ``kept_from`` on all must be there."""
        ...


class Store(Log, Catalog, Audit, Keeping, Protocol):
    """All of it, and its life."""

    stages: Stages

    @property
    def recovered(self) -> Recovered: ...

    def state(self) -> StoreState: ...

    async def space(self) -> Space: ...

    async def close(self) -> None: ...
