"""The catalog: what there is besides messages, and where the sealed ones lie.

Topics, streams, segments, subscriptions, checkpoints of cursors and producers, and small documents,
in one SQLite file. The promises:

- Every mutating method is one durable transaction; ``transaction()`` makes several of them one. An
  error anywhere in it undoes all of it, and what the catalog then says is what is on the disk.
- ``version`` goes up by one with every transaction that changes something. The journal stamps it
  into its entries, so a catalog that has lost commits is found to be older than its journal.
- Damage is found when the catalog is opened: by SQLite's own check of its structure, by a checksum
  in every row, by the ledger's digest of every table, and after an orderly close by a checksum of
  the whole file (see ``catalog_ledger`` and ``catalog_marker``).

A catalog serves one thread at a time and one process at a time; a second process is refused. How a
file is opened, changed and closed is in ``catalog_session``; here is what the rows mean and which
changes are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import structs

from sparrow.model.errors import (
    InvalidArgument,
    NotFound,
    PreconditionFailed,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic, TopicPolicy
from sparrow.store.catalog_ledger import Draft
from sparrow.store.catalog_schema import MIGRATIONS, Migration
from sparrow.store.catalog_session import CatalogSession
from sparrow.store.catalog_tables import (
    CURSORS,
    DOCUMENTS,
    PRODUCER_STATES,
    PRODUCERS,
    SEGMENTS,
    STREAMS,
    SUBSCRIPTIONS,
    TOPICS,
    CatalogRows,
    CursorCheckpoint,
    Document,
    Producer,
    ProducerState,
    Row,
    RowGroup,
    Segment,
    SegmentKey,
    StreamRow,
    SubscriptionRow,
    pack_groups,
    segment_from_row,
    subscription_from_row,
    to_row,
    topic_from_row,
    topic_to_row,
    unpack_groups,
)
from sparrow.store.disk import Disk


class Catalog:
    """An open catalog; ``Catalog.open`` makes one."""

    def __init__(self, session: CatalogSession) -> None:
        self._session = session

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        disk: Disk | None = None,
        migrations: Sequence[Migration] = MIGRATIONS,
    ) -> Catalog:
        """The catalog at ``path``: made, verified or migrated as need be."""
        return cls(CatalogSession(Path(path), disk or Disk(), migrations))

    def close(self) -> None:
        """Leaves one file, and a marker that vouches for it. Closing twice is allowed."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Catalog {self._session.path} version {self.version}>"

    @property
    def version(self) -> int:
        """How many transactions have been committed."""
        return self._session.ledger.version

    @property
    def sealed_through(self) -> int:
        """The last journal file whose messages all lie in segments; -1 when there is none."""
        return self._session.ledger.sealed_through

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes everything within one transaction. Within another one it is a part of that."""
        with self._session.transaction():
            yield

    # Topics and streams.

    def topics(self) -> list[Topic]:
        return [topic_from_row(row) for row in self._session.rows(TOPICS)]

    def streams(self) -> list[StreamRow]:
        return [StreamRow(*row) for row in self._session.rows(STREAMS)]

    def create_topic(self, name: str, partitions: int, policy: TopicPolicy, created_at_us: int) -> Topic:
        """A new topic with an id that none has had, and its empty streams."""
        with self._session.transaction() as change:
            if self._session.rows(TOPICS, TOPICS.c.name == name):
                raise TopicExists(f"the topic {name!r} exists")
            topic = Topic(
                id=change.next_id(TOPICS),
                name=name,
                partitions=partitions,
                policy=policy,
                created_at_us=created_at_us,
            )
            change.insert(TOPICS, [topic_to_row(topic)])
            _add_streams(change, topic, 0)
        return topic

    def update_topic(self, topic: Topic) -> None:
        """Stores a topic's new policy, and adds streams when it has more partitions now."""
        with self._session.transaction() as change:
            before = self._topic(topic.id)
            if topic.name != before.name:
                raise InvalidArgument(f"the topic {before.name!r} cannot be renamed to {topic.name!r}")
            if topic.partitions < before.partitions:
                raise InvalidArgument(
                    f"the topic {topic.name!r} has {before.partitions} partitions and cannot shrink"
                )
            change.put(TOPICS, [topic_to_row(topic)])
            _add_streams(change, topic, before.partitions)

    def delete_topic(self, topic_id: int) -> None:
        """Removes a topic and every row that belongs to it; its id stays taken."""
        with self._session.transaction() as change:
            self._topic(topic_id)
            for table in (SEGMENTS, PRODUCER_STATES, STREAMS):
                change.remove(table, table.c.topic_id == topic_id)
            change.remove(TOPICS, TOPICS.c.id == topic_id)

    def _topic(self, topic_id: int) -> Topic:
        for row in self._session.rows(TOPICS, TOPICS.c.id == topic_id):
            return topic_from_row(row)
        raise TopicNotFound(f"the catalog has no topic with the id {topic_id}")

    def _streams(self, wanted: Iterable[StreamId]) -> dict[StreamId, StreamRow]:
        """The streams asked for; refuses when one of them is not there."""
        wanted = sorted(set(wanted))
        rows = [StreamRow(*row) for row in self._session.rows_with_keys(STREAMS, wanted)]
        found = {row.stream: row for row in rows}
        for stream in wanted:
            if stream not in found:
                raise TopicNotFound(f"the catalog has no stream {_dashed(stream)}")
        return found

    # Segments.

    def segments(self) -> list[Segment]:
        """All segments, by topic, partition and offset."""
        return [segment_from_row(row) for row in self._session.rows(SEGMENTS)]

    def commit_seal(
        self,
        journal_file: int,
        segments: Sequence[Segment],
        stream_ends: Mapping[StreamId, int],
        cursors: Sequence[CursorCheckpoint] = (),
        producers: Sequence[ProducerState] = (),
        documents: Sequence[Document] = (),
    ) -> None:
        """Enters what came of a journal file, which may go once this returns."""
        with self._session.transaction() as change:
            if journal_file <= change.sealed_through:
                raise PreconditionFailed(
                    f"journal file {journal_file} is sealed; the last one is {change.sealed_through}"
                )
            streams = self._streams([*stream_ends, *(segment.stream for segment in segments)])
            ends = _ends_after(streams, segments)
            for stream, end in stream_ends.items():
                ends[stream] = max(end, ends[stream])
            change.insert(SEGMENTS, [to_row(segment) for segment in segments])
            change.put(STREAMS, [_raised(streams[stream], end) for stream, end in ends.items()])
            self.checkpoint(cursors, producers)
            change.put(DOCUMENTS, [to_row(document) for document in documents])
            change.seal(journal_file)

    def drop_segments(self, keys: Sequence[SegmentKey], start_offsets: Mapping[StreamId, int]) -> None:
        """Takes segments out, and says where the log of their streams now starts."""
        with self._session.transaction() as change:
            _remove_segments(change, keys)
            streams = self._streams(start_offsets).values()
            moved = [structs.replace(row, start_offset=start_offsets[row.stream]) for row in streams]
            change.put(STREAMS, [to_row(row) for row in moved])

    def replace_segments(self, old: Sequence[SegmentKey], new: Sequence[Segment]) -> None:
        """Puts the outcome of a compaction or merge in the place of its sources."""
        with self._session.transaction() as change:
            _remove_segments(change, old)
            change.insert(SEGMENTS, [to_row(segment) for segment in new])

    # Subscriptions and cursors.

    def subscriptions(self) -> list[SubscriptionRow]:
        return [subscription_from_row(row) for row in self._session.rows(SUBSCRIPTIONS)]

    def create_subscription(
        self,
        name: str,
        pattern: str,
        policy_json: bytes,
        created_at_us: int,
        *,
        is_paused: bool = False,
    ) -> SubscriptionRow:
        """A new subscription with an id that none has had."""
        with self._session.transaction() as change:
            self._refuse_subscription_name(name)
            new_id = change.next_id(SUBSCRIPTIONS)
            created = SubscriptionRow(new_id, name, pattern, policy_json, created_at_us, is_paused)
            change.insert(SUBSCRIPTIONS, [to_row(created)])
        return created

    def update_subscription(self, subscription: SubscriptionRow) -> None:
        with self._session.transaction() as change:
            before = self._subscription(subscription.id)
            if subscription.name != before.name:
                self._refuse_subscription_name(subscription.name)
            change.put(SUBSCRIPTIONS, [to_row(subscription)])

    def delete_subscription(self, subscription_id: int) -> None:
        """Removes a subscription and its cursors; its id stays taken."""
        with self._session.transaction() as change:
            self._subscription(subscription_id)
            change.remove(CURSORS, CURSORS.c.subscription_id == subscription_id)
            change.remove(SUBSCRIPTIONS, SUBSCRIPTIONS.c.id == subscription_id)

    def _subscription(self, subscription_id: int) -> SubscriptionRow:
        for row in self._session.rows(SUBSCRIPTIONS, SUBSCRIPTIONS.c.id == subscription_id):
            return subscription_from_row(row)
        raise SubscriptionNotFound(f"the catalog has no subscription with the id {subscription_id}")

    def _refuse_subscription_name(self, name: str) -> None:
        if self._session.rows(SUBSCRIPTIONS, SUBSCRIPTIONS.c.name == name):
            raise SubscriptionExists(f"the subscription {name!r} exists")

    def cursors(self) -> list[CursorCheckpoint]:
        return [CursorCheckpoint(*row) for row in self._session.rows(CURSORS)]

    def checkpoint(
        self, cursors: Sequence[CursorCheckpoint], producers: Sequence[ProducerState] = ()
    ) -> None:
        """Stores the newest state of cursors and producers in the place of older ones. A subscription that
        was deleted since its cursor was handed over is passed over."""
        with self._session.transaction() as change:
            ids = sorted({cursor.subscription_id for cursor in cursors})
            known = {row[0] for row in self._session.rows_with_keys(SUBSCRIPTIONS, [(each,) for each in ids])}
            change.put(CURSORS, [to_row(cursor) for cursor in cursors if cursor.subscription_id in known])
            change.put(PRODUCER_STATES, [to_row(state) for state in producers])

    # Producers.

    def producers(self) -> list[Producer]:
        return [Producer(*row) for row in self._session.rows(PRODUCERS)]

    def producer_states(self) -> list[ProducerState]:
        return [ProducerState(*row) for row in self._session.rows(PRODUCER_STATES)]

    def open_producer(self, name: str) -> Producer:
        """The producer of this name in a new epoch, which fences all its earlier ones."""
        with self._session.transaction() as change:
            found = self._session.rows(PRODUCERS, PRODUCERS.c.name == name)
            if found:
                producer = Producer(found[0][0], name, found[0][2] + 1)
            else:
                producer = Producer(change.next_id(PRODUCERS), name, 0)
            change.put(PRODUCERS, [to_row(producer)])
        return producer

    def delete_producer(self, producer_id: int) -> None:
        """Forgets a producer and its states; nothing happens when there is none."""
        with self._session.transaction() as change:
            change.remove(PRODUCER_STATES, PRODUCER_STATES.c.producer_id == producer_id)
            change.remove(PRODUCERS, PRODUCERS.c.id == producer_id)

    # Documents.

    def documents(self, kind: str) -> dict[str, bytes]:
        """The documents of a kind, by key."""
        return {row[1]: row[2] for row in self._session.rows(DOCUMENTS, DOCUMENTS.c.kind == kind)}

    def put_document(self, kind: str, key: str, value: bytes) -> None:
        with self._session.transaction() as change:
            change.put(DOCUMENTS, [(kind, key, value)])

    def delete_document(self, kind: str, key: str) -> bool:
        """True when the document was there."""
        with self._session.transaction() as change:
            return change.remove_keys(DOCUMENTS, [(kind, key)]) > 0

    # Rebuilding.

    def restore(self, rows: CatalogRows, *, version: int, sealed_through: int) -> None:
        """Fills a new catalog with the rows of a lost one, ids and all."""
        with self._session.transaction() as change:
            if self.version:
                raise PreconditionFailed("only a new catalog can be restored")
            for table, values in rows.by_table():
                change.insert(table, values)
            for table, highest in rows.highest_ids():
                change.reserve_id(table, highest)
            change.seal(sealed_through)
            change.version = max(version, change.version)


def _add_streams(change: Draft, topic: Topic, first: int) -> None:
    added = [StreamRow(topic.id, partition) for partition in range(first, topic.partitions)]
    change.insert(STREAMS, [to_row(stream) for stream in added])


def _ends_after(streams: Mapping[StreamId, StreamRow], segments: Sequence[Segment]) -> dict[StreamId, int]:
    """Where each stream's sealed part ends with these segments; refuses one that overlaps."""
    ends = {stream: row.sealed_end_offset for stream, row in streams.items()}
    for segment in segments:
        end = ends[segment.stream]
        if not end <= segment.first_offset < segment.end_offset:
            raise PreconditionFailed(
                f"segment {_dashed(segment.key)} up to {segment.end_offset}"
                f" does not follow the sealed end {end} of its stream"
            )
        ends[segment.stream] = segment.end_offset
    return ends


def _raised(row: StreamRow, end: int) -> Row:
    return to_row(structs.replace(row, sealed_end_offset=end))


def _remove_segments(change: Draft, keys: Sequence[SegmentKey]) -> None:
    there = change.crcs(SEGMENTS, keys)
    for key in keys:
        if key not in there:
            raise NotFound(f"the catalog has no segment {_dashed(key)}")
    change.remove_keys(SEGMENTS, keys)


def _dashed(numbers: Iterable[int]) -> str:
    return "-".join(map(str, numbers))


__all__ = [
    "Catalog",
    "CatalogRows",
    "CursorCheckpoint",
    "Document",
    "Producer",
    "ProducerState",
    "RowGroup",
    "Segment",
    "SegmentKey",
    "StreamRow",
    "SubscriptionRow",
    "pack_groups",
    "unpack_groups",
]
