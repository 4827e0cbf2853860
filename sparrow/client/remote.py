"""A broker elsewhere, with the verbs of an embedded one; ``sparrow.aconnect`` gives this object.

What differs from an embedded broker: ``health``, ``state`` and ``recovery`` are awaited, and who publishes is
said once, when connecting, not with every publish.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from sparrow.client import fetching, verbs
from sparrow.client.options import Options, Target, parse_options, parse_url, producer_name
from sparrow.client.pipelines import RemotePipelines
from sparrow.client.publishing import Publisher
from sparrow.client.remoteletters import RemoteDeadLetters
from sparrow.client.remotemember import RemoteMember
from sparrow.client.remotesub import RemoteSubscription
from sparrow.client.schemas import RemoteSchemas
from sparrow.client.session import Session
from sparrow.client.staging import Stager
from sparrow.kernel.lag import LagReport, TopicLag
from sparrow.kernel.snapshot import Snapshot
from sparrow.kernel.trace import Trace
from sparrow.model.access import AuditEntry, NewToken, TokenInfo
from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import FlowReport, RateLimit, parse_sender
from sparrow.model.health import Health
from sparrow.model.message import Message, Receipt, Receipts
from sparrow.model.names import parse_producer
from sparrow.model.rewrite import RewritePlan, Swap
from sparrow.model.segment import BatchPlace, Extent, Measured, TopicSegments
from sparrow.model.stage import Committed, Part, Stage
from sparrow.model.subscription import Subscription
from sparrow.model.topic import Topic
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.store.ports import Bounds, LogBatch, RecoveryReport, StoreState


class RemoteBroker(RemotePipelines, RemoteSchemas):
    """A connection to a broker that makes itself anew when it breaks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._options: Options = session.options
        self._publisher = Publisher(session, producer_name(session.options), is_fresh=True)
        self._stager = Stager(session)
        self._consumers = 0

    @classmethod
    async def open(cls, url: str, **options: Any) -> RemoteBroker:
        """Connects to ``sparrow://host:port``; options are the fields of ``Options``."""
        return cls(await Session.open(parse_url(url), parse_options(options)))

    async def close(self) -> None:
        """Sends what waits to be published, says goodbye and closes. Closing twice is allowed."""
        if not self._session.is_closed:
            for guest in list(self._session.guests):
                await guest.settle()
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        closed = " closed" if self._session.is_closed else ""
        return f"<Broker {str(self._session.target)!r}{closed}>"

    @property
    def target(self) -> Target:
        """Where the broker is."""
        return self._session.target

    async def _call(self, verb: str, result: Any = None, /, **arguments: Any) -> Any:
        return await verbs.call(self._session, verb, result, **arguments)

    # Topics.

    async def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """A new topic. Options: durability, codec, retention_s, retention_bytes, retention_messages,
        retain_until_acked, dedupe_window_s, flow (a mapping of the fields of FlowPolicy)."""
        found: Topic = await self._call("create_topic", Topic, name=name, partitions=partitions, **policy)
        return found

    async def topic(self, name: str) -> Topic:
        """The topic of this name."""
        found: Topic = await self._call("topic", Topic, name=name)
        return found

    async def topics(self) -> list[Topic]:
        """All topics, by name."""
        found: list[Topic] = await self._call("topics", list[Topic])
        return found

    async def update_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Changes options of a topic; partitions may grow. ``flow`` may be given in part; ``flow=None``
        takes its limits away."""
        found: Topic = await self._call("update_topic", Topic, name=name, partitions=partitions, **policy)
        self._publisher.forget_partitions(name)
        return found

    async def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Deletes a topic and its messages; one that subscriptions name needs ``force``."""
        await self._call("delete_topic", name=name, force=force)

    # Publishing.

    async def publish(
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
        """Stores one message; the receipt comes when it is as safe as the topic's durability says. Calls
        that are made at the same time travel together."""
        if publisher is not None or priority_class is not None or token is not None:
            self._check_sender(publisher, priority_class, token)
        row = admission.check_row(
            data, key, attributes, event_time, priority, ttl_s, deliver_at, idempotency_key, depends_on
        )
        return await self._publisher.publish(topic, row)

    async def publish_batch(
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
        self._check_sender(publisher, priority_class, token)
        columns = {
            "key": keys,
            "attributes": attributes,
            "event_time": event_times,
            "priority": priorities,
            "idempotency_key": idempotency_keys,
        }
        given = {name: values for name, values in columns.items() if values is not None}
        batch = admission.values_to_batch(data, given)
        admission.check_batch(batch)
        admission.check_request_size(batch)
        return await self._publisher.publish_batch(topic, batch)

    async def publish_table(
        self,
        topic: str,
        table: Any,
        *,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Receipts:
        """Stores a table of Arrow, pandas or polars: a column ``data`` and any of the other message columns.
        A large table is stored as several batches, each whole or not at all."""
        self._check_sender(publisher, priority_class, token)
        chosen = batches.from_table(admission.to_arrow(table))
        admission.check_batch(chosen)
        return await self._publisher.publish_table(topic, chosen)

    def _check_sender(self, publisher: object, priority_class: object, token: object) -> None:
        """Who publishes is known from the connection; the same said again does no harm."""
        parse_sender(publisher, priority_class, token)
        options = self._options
        said = [
            (publisher, options.publisher),
            (priority_class, options.priority_class),
            (token, options.token),
        ]
        if any(value is not None and value != known for value, known in said):
            raise InvalidArgument(
                "publisher, priority_class and token are those of the connection",
                hint="Give them to sparrow.connect; open a second connection for a second publisher.",
            )

    async def producer(
        self,
        name: str,
        *,
        hold_gaps_s: float | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> RemoteProducer:
        """A producer whose repeats are recognised; an earlier one of the same name is fenced off."""
        self._check_sender(None, priority_class, token)
        if hold_gaps_s is not None:
            raise InvalidArgument(
                "hold_gaps_s is not offered over a network",
                hint="Open the broker in this process, or send sequences in order.",
            )
        producer = RemoteProducer(Publisher(self._session, parse_producer(name), is_fresh=False))
        await producer.publisher.open()
        return producer

    # Staged publishes.

    async def stage(
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
        """Adds a table to a part that a commit will publish. The part counts calls, several for a large
        table; with ``position``, the number of the first, calls are sent again when the connection breaks."""
        self._check_sender(publisher, priority_class, token)
        return await self._stager.stage(transaction, part, topic, admission.to_arrow(table), position)

    async def commit_staged(
        self,
        application: str,
        batch: int,
        parts: Sequence[Part | tuple[str, str, int]],
        *,
        remember_s: float | None = None,
    ) -> Committed:
        """Publishes staged parts, each (transaction, part, messages), in this order, once: when the batch of
        the application, or a newer one, is committed already, they are dropped and the answer says so."""
        found: Committed = await self._call(
            "commit_staged",
            Committed,
            application=application,
            batch=batch,
            parts=[list(part) for part in parts],
            remember_s=remember_s,
        )
        return found

    async def abort_staged(self, transaction: str, parts: Sequence[str] | None = None) -> int:
        """Drops what a transaction staged, or only the named parts of it; how many parts there were."""
        return int(await self._call("abort_staged", int, transaction=transaction, parts=parts))

    async def stages(self) -> list[Stage]:
        """The parts that wait for a commit."""
        found: list[Stage] = await self._call("stages", list[Stage])
        return found

    async def committed_batch(self, application: str) -> int | None:
        """The newest batch that an application committed; None when none is known."""
        found: int | None = await self._call("committed_batch", int | None, application=application)
        return found

    # Flow control.

    async def set_publisher_limits(self, publisher: str, **limits: Any) -> RateLimit:
        """The quota of a publisher over all topics, from now on and after restarts. Options:
        messages_per_s, bytes_per_s (``None`` is no limit), burst_s; those left out stay."""
        found: RateLimit = await self._call("set_publisher_limits", RateLimit, publisher=publisher, **limits)
        return found

    async def set_token_limits(self, token: str, **limits: Any) -> RateLimit:
        """The same for all that is published with a token."""
        found: RateLimit = await self._call("set_token_limits", RateLimit, token=token, **limits)
        return found

    # Tokens.

    async def create_token(
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
        given = {"scopes": scopes, "role": role, "topics": topics, "expires_in_s": expires_in_s}
        found: NewToken = await self._call("create_token", NewToken, name=name, **given)
        return found

    async def tokens(self) -> list[TokenInfo]:
        """All tokens, by name, without their secrets."""
        found: list[TokenInfo] = await self._call("tokens", list[TokenInfo])
        return found

    async def revoke_token(self, name: str) -> TokenInfo:
        """Ends a token, by its name or its id, everywhere and at once."""
        found: TokenInfo = await self._call("revoke_token", TokenInfo, name=name)
        return found

    async def audit_log(self, count: int = 100) -> list[AuditEntry]:
        """What was done by administrators, the newest last."""
        found: list[AuditEntry] = await self._call("audit_log", list[AuditEntry], count=count)
        return found

    # Looking.

    async def flow(self, topic: str) -> FlowReport:
        """How a topic treats its publishers now, and what became of what they sent."""
        found: FlowReport = await self._call("flow", FlowReport, topic=topic)
        return found

    async def lag(self) -> dict[str, LagReport]:
        """The lag of every subscription, by name."""
        found: dict[str, LagReport] = await self._call("lag", dict[str, LagReport])
        return found

    async def topic_lag(self, topic: str) -> TopicLag:
        """How far the subscriptions of a topic are behind."""
        found: TopicLag = await self._call("topic_lag", TopicLag, topic=topic)
        return found

    # Subscriptions.

    async def subscribe(
        self, name: str, pattern: str, *, start: str | datetime | float = "latest", **policy: Any
    ) -> RemoteSubscription:
        """Creates the subscription, or takes hold of it when it exists with the same settings. A new one
        starts at "latest", "earliest" or a time. Options are the fields of SubscriptionPolicy: filter,
        ordering, guarantee, ack_deadline_s, retry, dead_letter_topic, …"""
        found: Subscription = await self._call(
            "subscribe", Subscription, name=name, pattern=pattern, start=verbs.to_position(start), **policy
        )
        return self._handle(found)

    async def subscription(self, name: str) -> RemoteSubscription:
        """Takes hold of a subscription that exists."""
        return self._handle(await self._call("subscription", Subscription, name=name))

    async def subscriptions(self) -> list[Subscription]:
        """All subscriptions, by name."""
        found: list[Subscription] = await self._call("subscriptions", list[Subscription])
        return found

    async def snapshots(self) -> list[Snapshot]:
        """All snapshots that have not expired."""
        found: list[Snapshot] = await self._call("snapshots", list[Snapshot])
        return found

    async def delete_snapshot(self, name: str) -> None:
        await self._call("delete_snapshot", name=name)

    async def trace(self, message_id: str) -> list[Trace]:
        """Where is this message? Its state in every subscription that reads its topic."""
        found: list[Trace] = await self._call("trace", list[Trace], message_id=message_id)
        return found

    async def dead_letters(self, subscription: str) -> RemoteDeadLetters:
        """What a subscription could not deliver."""
        return (await self.subscription(subscription)).dead_letters

    def _handle(self, found: Subscription) -> RemoteSubscription:
        self._consumers += 1
        return RemoteSubscription(found, self._session, f"consumer-{self._consumers}", RemoteMember)

    # Reading.

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        """The first offset kept and the one after the last."""
        found: Bounds = await self._call("bounds", Bounds, topic=topic, partition=partition)
        return found

    async def read(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_messages: int = 1000
    ) -> list[Message]:
        """Messages of a partition from an offset on; empty at the end of the log."""
        return await fetching.read(self._session, topic, partition, offset, max_messages)

    async def read_batches(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_bytes: int = fetching.FETCH_BYTES
    ) -> list[pa.RecordBatch]:
        """The same as Arrow record batches, about ``max_bytes`` of them; the columns are the lake's."""
        _, found = await fetching.fetch(self._session, topic, partition, offset, max_bytes)
        return [batch.batch for batch in found]

    async def fetch(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int = 0,
        max_bytes: int = fetching.FETCH_BYTES,
        columns: Sequence[str] = (),
    ) -> tuple[int, list[LogBatch]]:
        """The same with the offsets that each batch covers, behind the id of the topic they are of; with
        ``columns``, only those and the offset are sent."""
        head, found = await fetching.fetch(
            self._session, topic, partition, offset, max_bytes, columns=columns
        )
        return head.topic_id, found

    async def fetch_table(
        self,
        topic: str,
        *,
        partition: int | None = None,
        start_offset: int | None = None,
        end_offset: int | None = None,
    ) -> pa.Table:
        """The log of a partition, or of all, as one Arrow table: the columns of the lake behind a column
        ``partition``. From the first offset that is kept to the present end, unless others are given."""
        partitions = range((await self.topic(topic)).partitions) if partition is None else [partition]
        parts = []
        for number in partitions:
            start = (await self.bounds(topic, number)).start_offset if start_offset is None else start_offset
            parts.append(await fetching.fetch_table(self._session, topic, [number], start, end_offset))
        return pa.concat_tables(parts)

    async def offset_at(self, topic: str, moment: datetime | float, *, partition: int = 0) -> int:
        """The first offset published at or after a moment."""
        position = verbs.to_position(moment)
        return int(await self._call("offset_at", int, topic=topic, moment=position, partition=partition))

    async def extents(self, patterns: Sequence[str]) -> list[Extent]:
        """The topics that match any of the patterns, and from where to where each partition can be read."""
        found: list[Extent] = await self._call("extents", list[Extent], patterns=patterns)
        return found

    async def segments(self, topic: str, *, hold_s: float = 0.0) -> TopicSegments:
        """The sealed segments of a topic: Parquet files on the broker's machine, all seen at one moment.
        For ``hold_s`` the files stay where they are even when retention drops their segments."""
        found: TopicSegments = await self._call("segments", TopicSegments, topic=topic, hold_s=hold_s)
        return found

    async def measure(
        self, topic: str, stretches: Sequence[Sequence[int]], *, max_bytes: int = 2**62
    ) -> list[Measured]:
        """For each (partition, start_offset, end_offset): up to which offset ``max_bytes`` reach, and how
        many bytes that are as they are stored."""
        found: list[Measured] = await self._call(
            "measure", list[Measured], topic=topic, stretches=stretches, max_bytes=max_bytes
        )
        return found

    async def places(self, topic: str, stretches: Sequence[Sequence[int]]) -> list[list[BatchPlace]]:
        """For each (partition, start_offset, end_offset): where in the journal the batches lie that are not
        sealed; nothing where they are too many to tell."""
        found: list[list[BatchPlace]] = await self._call(
            "places", list[list[BatchPlace]], topic=topic, stretches=stretches
        )
        return found

    # Keeping.

    async def seal(self) -> int:
        """Moves everything published so far into the lake now; the number of messages moved."""
        return int(await self._call("seal", int))

    async def plan_rewrite(self, topic: str, *, hold_s: float = 0.0) -> RewritePlan:
        """What a job that compacts or merges the segments of a topic goes by."""
        found: RewritePlan = await self._call("plan_rewrite", RewritePlan, topic=topic, hold_s=hold_s)
        return found

    async def swap_segments(
        self, topic: str, partition: int, remove: Sequence[str], drafts: Sequence[str], *, kind: str
    ) -> Swap:
        """Puts drafts, files that a job wrote beside the segments, in the place of neighbouring segments."""
        found: Swap = await self._call(
            "swap_segments", Swap, topic=topic, partition=partition, remove=remove, drafts=drafts, kind=kind
        )
        return found

    async def apply_retention(self) -> int:
        """Drops what the topics' policies no longer keep, now; the number of segments dropped."""
        return int(await self._call("apply_retention", int))

    async def health(self) -> Health:
        found: Health = await self._call("health", Health)
        return found

    async def state(self) -> StoreState:
        """Sizes, counters and known damage of the store."""
        found: StoreState = await self._call("state", StoreState)
        return found

    @property
    def recovery(self) -> Awaitable[RecoveryReport]:
        """What opening did and found. Await it."""
        return self._call("recovery", RecoveryReport)


class RemoteProducer:
    """One life of a producer; see ``sparrow.broker.producer.Producer``."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.name = publisher.name

    @property
    def id(self) -> int:
        return self.publisher.identity[0]

    @property
    def epoch(self) -> int:
        return self.publisher.identity[1]

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} id={self.id} epoch={self.epoch}>"

    async def next_sequence(self, topic: str) -> int:
        """The sequence that the next new message to this topic has."""
        return await self.publisher.next_sequence(topic)

    async def publish(
        self, topic: str, data: bytes | None, *, sequence: int | None = None, **values: Any
    ) -> Receipt:
        """One message; takes the same options as the broker's publish."""
        row = admission.check_row(data, **values)
        if values.get("idempotency_key") is not None:
            raise InvalidArgument("a producer's sequence and idempotency keys exclude each other")
        return await self.publisher.publish(topic, row, _check_sequence(sequence))

    async def publish_batch(
        self,
        topic: str,
        data: Sequence[bytes | None],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[dict[str, str] | None] | None = None,
        sequence: int | None = None,
    ) -> Receipts:
        """Many messages, stored whole or not at all; ``sequence`` is that of the first."""
        columns = {"key": keys, "attributes": attributes}
        given = {name: values for name, values in columns.items() if values is not None}
        batch = admission.values_to_batch(data, given)
        admission.check_batch(batch)
        admission.check_request_size(batch)
        return await self.publisher.publish_batch(topic, batch, _check_sequence(sequence))


def _check_sequence(sequence: object) -> int | None:
    if sequence is not None and (type(sequence) is not int or not 0 <= sequence < 2**62):
        raise InvalidArgument(f"a sequence is a whole number from 0, not {sequence!r}")
    return sequence
