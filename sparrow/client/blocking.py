"""The same verbs for blocking code: an event loop in a thread of its own, and callers that wait for it.

What is async in a broker and in a network client is blocking here, name for name, so a program
changes between the two by adding or dropping ``await``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from sparrow.client.loop import LoopThread
from sparrow.client.pipelines import BlockingPipelines
from sparrow.client.schemas import BlockingSchemas
from sparrow.client.subscription import BlockingDeadLetters, BlockingSubscription
from sparrow.kernel.lag import LagReport, TopicLag
from sparrow.kernel.snapshot import Snapshot
from sparrow.kernel.trace import Trace
from sparrow.model.access import AuditEntry, NewToken, TokenInfo
from sparrow.model.flow import FlowReport, RateLimit
from sparrow.model.health import Health
from sparrow.model.message import Message, Receipt, Receipts
from sparrow.model.rewrite import RewritePlan, Swap
from sparrow.model.segment import BatchPlace, Extent, Measured, TopicSegments
from sparrow.model.stage import Committed, Part, Stage
from sparrow.model.subscription import Subscription
from sparrow.model.topic import Topic
from sparrow.store.ports import Bounds, RecoveryReport, StoreState

T = TypeVar("T")


class BlockingBroker(BlockingPipelines, BlockingSchemas):
    """A broker for blocking code; threads may share it."""

    def __init__(self, open_target: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._thread = LoopThread()
        try:
            self._target = self._thread.run(open_target())
        except BaseException:
            self._thread.stop()
            raise

    def close(self) -> None:
        """Finishes what is under way and closes. Closing twice is allowed."""
        if self._thread._loop.is_closed():
            return
        try:
            self._thread.run(self._target.close())
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._target)

    # Topics.

    def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """A new topic. Options: durability, codec, retention_s, retention_bytes, retention_messages,
        retain_until_acked, dedupe_window_s."""
        return self._run(self._target.create_topic(name, partitions=partitions, **policy))

    def topic(self, name: str) -> Topic:
        """The topic of this name."""
        return self._run(self._target.topic(name))

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        return self._run(self._target.topics())

    def update_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Changes options of a topic; partitions may grow."""
        return self._run(self._target.update_topic(name, partitions=partitions, **policy))

    def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Deletes a topic and its messages; one that subscriptions name needs ``force``."""
        self._run(self._target.delete_topic(name, force=force))

    # Publishing.

    def publish(
        self,
        topic: str,
        data: bytes | None,
        *,
        key: str | None = None,
        attributes: dict[str, str] | None = None,
        event_time: datetime | float | None = None,
        priority: int | None = None,
        ttl_s: float | None = None,
        deliver_at: datetime | float | None = None,
        idempotency_key: str | None = None,
        depends_on: Sequence[str] | None = None,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Receipt:
        """Stores one message; the receipt comes when it is as safe as the topic's durability says."""
        return self._run(
            self._target.publish(
                topic,
                data,
                key=key,
                attributes=attributes,
                event_time=event_time,
                priority=priority,
                ttl_s=ttl_s,
                deliver_at=deliver_at,
                idempotency_key=idempotency_key,
                depends_on=depends_on,
                publisher=publisher,
                priority_class=priority_class,
                token=token,
            )
        )

    def publish_batch(
        self,
        topic: str,
        data: Sequence[bytes | None],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[dict[str, str] | None] | None = None,
        event_times: Sequence[datetime | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        idempotency_keys: Sequence[str | None] | None = None,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Receipts:
        """Stores many messages, all or none; costs per batch, not per message."""
        return self._run(
            self._target.publish_batch(
                topic,
                data,
                keys=keys,
                attributes=attributes,
                event_times=event_times,
                priorities=priorities,
                idempotency_keys=idempotency_keys,
                publisher=publisher,
                priority_class=priority_class,
                token=token,
            )
        )

    def publish_table(
        self,
        topic: str,
        table: pa.Table | pa.RecordBatch,
        *,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Receipts:
        """Stores an Arrow table with a column ``data`` and any of the other message columns."""
        return self._run(
            self._target.publish_table(
                topic, table, publisher=publisher, priority_class=priority_class, token=token
            )
        )

    def producer(
        self,
        name: str,
        *,
        hold_gaps_s: float | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> BlockingProducer:
        """A producer whose repeats are recognised; an earlier one of the same name is fenced off. With
        ``hold_gaps_s``, sequences that arrive out of order are held and stored in order, and a gap is
        given up after that time."""
        found = self._target.producer(
            name, hold_gaps_s=hold_gaps_s, priority_class=priority_class, token=token
        )
        return BlockingProducer(self._run(found), self._thread)

    # Staged publishes.

    def stage(
        self,
        transaction: str,
        part: str,
        topic: str,
        table: Any,
        *,
        position: int | None = None,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Stage:
        """Adds an Arrow table to a part that a commit will publish; with ``position``, the number of its
        first call, a repeat is recognised."""
        return self._run(
            self._target.stage(
                transaction,
                part,
                topic,
                table,
                position=position,
                publisher=publisher,
                priority_class=priority_class,
                token=token,
            )
        )

    def commit_staged(
        self,
        application: str,
        batch: int,
        parts: Sequence[Part | tuple[str, str, int]],
        *,
        remember_s: float | None = None,
    ) -> Committed:
        """Publishes staged parts, each (transaction, part, messages), in this order, once for each
        application and batch."""
        return self._run(self._target.commit_staged(application, batch, parts, remember_s=remember_s))

    def abort_staged(self, transaction: str, parts: Sequence[str] | None = None) -> int:
        """Drops what a transaction staged, or only the named parts of it; how many parts there were."""
        return self._run(self._target.abort_staged(transaction, parts))

    def stages(self) -> list[Stage]:
        """The parts that wait for a commit."""
        return self._run(self._target.stages())

    def committed_batch(self, application: str) -> int | None:
        """The newest batch that an application committed; None when none is known."""
        return self._run(self._target.committed_batch(application))

    # Flow control.

    def set_publisher_limits(self, publisher: str, **limits: Any) -> RateLimit:
        """The quota of a publisher over all topics: messages_per_s, bytes_per_s, burst_s."""
        return self._run(self._target.set_publisher_limits(publisher, **limits))

    def set_token_limits(self, token: str, **limits: Any) -> RateLimit:
        """The same for all that is published with a token."""
        return self._run(self._target.set_token_limits(token, **limits))

    def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[str] | None = None,
        role: str | None = None,
        topics: str = "#",
        expires_in_s: float | None = None,
    ) -> NewToken:
        """A new token with scopes like "publish:orders.#", or with a role on the topics of a pattern:
        read-only, publisher, subscriber or admin. Its text is told this once. From the first token on, every
        listener wants one."""
        return self._run(
            self._target.create_token(
                name, scopes=scopes, role=role, topics=topics, expires_in_s=expires_in_s
            )
        )

    def tokens(self) -> list[TokenInfo]:
        """All tokens, by name, without their secrets."""
        return self._run(self._target.tokens())

    def revoke_token(self, name: str) -> TokenInfo:
        """Ends a token, by its name or its id, everywhere and at once."""
        return self._run(self._target.revoke_token(name))

    def audit_log(self, count: int = 100) -> list[AuditEntry]:
        """What was done by administrators, the newest last."""
        return self._run(self._target.audit_log(count))

    def flow(self, topic: str) -> FlowReport:
        """How a topic treats its publishers now, and what became of what they sent."""
        return self._run(self._target.flow(topic))

    def lag(self) -> dict[str, LagReport]:
        """The lag of every subscription, by name."""
        return self._run(self._target.lag())

    def topic_lag(self, topic: str) -> TopicLag:
        """How far the subscriptions of a topic are behind."""
        return self._run(self._target.topic_lag(topic))

    # Subscriptions.

    def subscribe(
        self, name: str, pattern: str, *, start: str | datetime | float = "latest", **policy: Any
    ) -> BlockingSubscription:
        """Creates the subscription, or takes hold of it when it exists with the same settings."""
        found = self._run(self._target.subscribe(name, pattern, start=start, **policy))
        return BlockingSubscription(found, self._thread)

    def subscription(self, name: str) -> BlockingSubscription:
        """Takes hold of a subscription that exists."""
        return BlockingSubscription(self._run(self._target.subscription(name)), self._thread)

    def subscriptions(self) -> list[Subscription]:
        """All subscriptions, by name."""
        return self._run(self._target.subscriptions())

    def snapshots(self) -> list[Snapshot]:
        """All snapshots that have not expired."""
        return self._run(self._target.snapshots())

    def delete_snapshot(self, name: str) -> None:
        self._run(self._target.delete_snapshot(name))

    def trace(self, message_id: str) -> list[Trace]:
        """Where is this message? Its state in every subscription that reads its topic."""
        return self._run(self._target.trace(message_id))

    def dead_letters(self, subscription: str) -> BlockingDeadLetters:
        """What a subscription could not deliver."""
        return BlockingSubscription(
            self._run(self._target.subscription(subscription)), self._thread
        ).dead_letters

    # Reading.

    def bounds(self, topic: str, partition: int = 0) -> Bounds:
        """The first offset kept and the one after the last."""
        return self._run(self._target.bounds(topic, partition))

    def read(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_messages: int = 1000
    ) -> list[Message]:
        """Messages of a partition from an offset on; empty at the end of the log."""
        return self._run(
            self._target.read(topic, partition=partition, offset=offset, max_messages=max_messages)
        )

    def read_batches(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_bytes: int = 4 * 1024 * 1024
    ) -> list[pa.RecordBatch]:
        """The same as Arrow record batches, about ``max_bytes`` of them."""
        return self._run(
            self._target.read_batches(topic, partition=partition, offset=offset, max_bytes=max_bytes)
        )

    def offset_at(self, topic: str, moment: datetime | float, *, partition: int = 0) -> int:
        """The first offset published at or after a moment."""
        return self._run(self._target.offset_at(topic, moment, partition=partition))

    def extents(self, patterns: Sequence[str]) -> list[Extent]:
        """The topics that match any of the patterns, and from where to where each partition can be read."""
        return self._run(self._target.extents(patterns))

    def segments(self, topic: str, *, hold_s: float = 0.0) -> TopicSegments:
        """The sealed segments of a topic: Parquet files, their offsets and times, all seen at one moment.
        For ``hold_s`` the files stay where they are even when retention drops their segments."""
        return self._run(self._target.segments(topic, hold_s=hold_s))

    def measure(
        self, topic: str, stretches: Sequence[Sequence[int]], *, max_bytes: int = 2**62
    ) -> list[Measured]:
        """For each (partition, start_offset, end_offset): up to which offset ``max_bytes`` reach, and how
        many bytes that are as they are stored."""
        return self._run(self._target.measure(topic, stretches, max_bytes=max_bytes))

    def places(self, topic: str, stretches: Sequence[Sequence[int]]) -> list[list[BatchPlace]]:
        """For each (partition, start_offset, end_offset): where in the journal the batches lie that are not
        sealed; nothing where they are too many to tell."""
        return self._run(self._target.places(topic, stretches))

    # Keeping.

    def seal(self) -> int:
        """Moves everything published so far into the lake now; the number of messages moved."""
        return self._run(self._target.seal())

    def plan_rewrite(self, topic: str, *, hold_s: float = 0.0) -> RewritePlan:
        """What a job that compacts or merges the segments of a topic goes by."""
        return self._run(self._target.plan_rewrite(topic, hold_s=hold_s))

    def swap_segments(
        self, topic: str, partition: int, remove: Sequence[str], drafts: Sequence[str], *, kind: str
    ) -> Swap:
        """Puts drafts, files that a job wrote beside the segments, in the place of neighbouring segments."""
        return self._run(self._target.swap_segments(topic, partition, remove, drafts, kind=kind))

    def apply_retention(self) -> int:
        """Drops what the topics' policies no longer keep, now; the number of segments dropped."""
        return self._run(self._target.apply_retention())

    def health(self) -> Health:
        found: Health = self._thread.obtain(lambda: self._target.health())
        return found

    def state(self) -> StoreState:
        """Sizes, counters and known damage of the store."""
        found: StoreState = self._thread.obtain(lambda: self._target.state())
        return found

    @property
    def recovery(self) -> RecoveryReport:
        """What opening did and found."""
        found: RecoveryReport = self._thread.obtain(lambda: self._target.recovery)
        return found

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)


class BlockingClient(BlockingBroker):
    """A broker elsewhere for blocking code; see ``sparrow.client.remote.RemoteBroker``."""

    def fetch_table(
        self,
        topic: str,
        *,
        partition: int | None = None,
        start_offset: int | None = None,
        end_offset: int | None = None,
    ) -> pa.Table:
        """The log of a partition, or of all, as one Arrow table: the columns of the lake behind a column
        ``partition``."""
        return self._run(
            self._target.fetch_table(
                topic, partition=partition, start_offset=start_offset, end_offset=end_offset
            )
        )


class BlockingProducer:
    """See ``sparrow.broker.producer.Producer``."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread

    def __repr__(self) -> str:
        return repr(self._target)

    @property
    def name(self) -> str:
        return str(self._target.name)

    @property
    def id(self) -> int:
        return int(self._target.id)

    @property
    def epoch(self) -> int:
        return int(self._target.epoch)

    def next_sequence(self, topic: str) -> int:
        """The sequence that the next new message to this topic has."""
        return int(self._thread.run(self._target.next_sequence(topic)))

    def publish(
        self, topic: str, data: bytes | None, *, sequence: int | None = None, **values: Any
    ) -> Receipt:
        """One message; takes the same options as the broker's publish."""
        found: Receipt = self._thread.run(self._target.publish(topic, data, sequence=sequence, **values))
        return found

    def publish_batch(
        self,
        topic: str,
        data: Sequence[bytes | None],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[dict[str, str] | None] | None = None,
        sequence: int | None = None,
    ) -> Receipts:
        """Many messages, stored whole or not at all; ``sequence`` is that of the first."""
        return self._thread.run(
            self._target.publish_batch(topic, data, keys=keys, attributes=attributes, sequence=sequence)
        )
