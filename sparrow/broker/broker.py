"""The broker: composes its parts and holds no rule.

Everything here is asyncio and runs on one event loop. ``sparrow.aopen`` gives this object;
``sparrow.open`` gives the same verbs for blocking code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from sparrow.broker import chance, condition, logs
from sparrow.broker.clock import Clock
from sparrow.broker.deadletters import HIDDEN, DeadLetters
from sparrow.broker.feeding import Services
from sparrow.broker.flow import Flow
from sparrow.broker.groups import Groups
from sparrow.broker.ingress import Encoded, Ingress, ProducerId
from sparrow.broker.inorder import InOrder
from sparrow.broker.lags import Lags
from sparrow.broker.maintenance import Maintenance
from sparrow.broker.member import BrokerMember
from sparrow.broker.pages import Pages
from sparrow.broker.positions import Positions
from sparrow.broker.producer import Producer
from sparrow.broker.reading import READ_BYTES, Reading
from sparrow.broker.repeats import Repeats
from sparrow.broker.replays import ReplayJobs
from sparrow.broker.settling import Settling
from sparrow.broker.subscription import BrokerSubscription, DeadLetterBox, Desk
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.broker.tracing import Tracer
from sparrow.kernel.lag import LagReport, TopicLag
from sparrow.kernel.snapshot import Snapshot
from sparrow.kernel.trace import Trace
from sparrow.model.errors import (
    BrokerClosed,
    InvalidArgument,
    InvalidName,
    PreconditionFailed,
    SubscriptionNotFound,
    TopicInUse,
)
from sparrow.model.flow import ANYONE, FlowReport, RateLimit, Sender, parse_sender
from sparrow.model.health import Health
from sparrow.model.message import Message, Receipt, Receipts, StreamId
from sparrow.model.names import parse_producer, parse_subscription
from sparrow.model.settings import Settings
from sparrow.model.subscription import Subscription
from sparrow.model.topic import Topic
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.store.batch import Body
from sparrow.store.local import LocalStore
from sparrow.store.ports import Bounds, RecoveryReport, Store, StoreState


class Broker:
    """An open broker."""

    def __init__(self, store: Store, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self._store = store
        self._clock = clock
        self._log = logs.get("broker")
        self._is_closed = False
        self._topics = Topics(store, settings.topics, clock)
        self._repeats = Repeats(store, settings.dedupe)
        self._repeats.recover(store.recovered)
        self._reading = Reading(store, self._topics)
        self._pages = Pages(store)
        self._settling = Settling(store)
        self._subscriptions = Subscriptions(store, self._topics, clock, chance.session())
        self._lags = Lags(store, self._topics, self._subscriptions, clock)
        self._flow = Flow(store, self._topics, self._subscriptions, self._lags, clock, chance.jitter)
        self._ingress = Ingress(store, self._topics, self._repeats, clock, self._arrived, self._flow)
        self._dead_letters = DeadLetters(
            store, self._topics, self._subscriptions, self._pages, self._settling, clock
        )
        self._replays = ReplayJobs(
            store, self._topics, self._subscriptions, self._dead_letters, self._settling, clock, chance.name
        )
        self._positions = Positions(store, self._topics, self._subscriptions, clock)
        self._maintenance = Maintenance(
            store, self._topics, self._repeats, settings, clock, self._subscriptions
        )
        self._tracer = Tracer(store, self._topics, self._subscriptions, self._pages)
        self._desk = Desk(
            subscriptions=self._subscriptions,
            dead_letters=self._dead_letters,
            replays=self._replays,
            positions=self._positions,
            lags=self._lags,
            groups=Groups(store, self._topics, clock, chance.jitter, chance.session()),
            clock=clock,
            jitter=chance.jitter,
            member=BrokerMember,
        )
        self._consumers = 0
        self._subscriptions.start(
            Services(
                store=store,
                topics=self._topics,
                pages=self._pages,
                settling=self._settling,
                clock=clock,
                jitter=chance.jitter,
                filters=self._subscriptions.filters,
                move_dead_letters=self._dead_letters.move,
            )
        )
        self._topics.on_change = self._changed
        self._topics.on_delete = self._deleted

    @classmethod
    async def open(
        cls, settings: Settings | None = None, *, store: Store | None = None, clock: Clock | None = None
    ) -> Broker:
        """Opens the data directory, recovers, and starts the background work."""
        settings, clock = settings or Settings(), clock or Clock()
        if store is None:
            store = await LocalStore.open(
                Path(settings.data), journal=settings.journal, lake=settings.lake, now_us=clock.now_us
            )
        broker = cls(store, settings, clock)
        await broker._subscriptions.recover(store.recovered)
        await broker._positions.load()
        broker._replays.resume()
        broker._maintenance.start()
        await broker._flow.load()
        broker._lags.start()
        broker._log_recovery(store.recovered.report)
        return broker

    async def close(self) -> None:
        """Finishes what is under way, then closes the store. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            await self._flow.stop()
            await self._lags.stop()
            await self._maintenance.stop()
            await self._replays.stop()
            await self._dead_letters.stop()
            self._subscriptions.stop()
            await self._settling.flush()
            await self._store.close()
            self._log.info("broker-closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._topics)} topics"
        return f"<Broker {self.settings.data!r} {state}>"

    # Topics.

    async def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """A new topic. Options: durability, codec, retention_s, retention_bytes, retention_messages,
        retain_until_acked, dedupe_window_s, flow (a mapping of the fields of FlowPolicy)."""
        self._check_open()
        topic = await self._topics.create(name, partitions, policy)
        self._log.info("topic-created", "", topic=topic.name, partitions=topic.partitions)
        return topic

    async def topic(self, name: str) -> Topic:
        """The topic of this name."""
        return self._topics.get(name)

    async def topics(self) -> list[Topic]:
        """All topics, by name."""
        return list(self._topics)

    async def update_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Changes options of a topic; partitions may grow. ``flow`` may be given in part; ``flow=None``
        takes its limits away."""
        self._check_open()
        return await self._topics.update(name, partitions, policy)

    async def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Deletes a topic and its messages; one that subscriptions name needs ``force``."""
        self._check_open()
        topic = self._topics.get(name)
        users = [user for user in self._subscriptions.users_of(topic) if not user.endswith(HIDDEN)]
        if users and not force:
            raise TopicInUse(f"{name!r} is used by {', '.join(users[:5])}", subscriptions=users)
        await self._topics.delete(topic)
        self._log.info("topic-deleted", "", topic=topic.name)

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
        """Stores one message; the receipt comes when it is as safe as the topic's durability says. Who
        publishes matters where there are limits: ``priority_class`` is critical, normal or bulk."""
        self._check_open()
        sender = parse_sender(publisher, priority_class, token)
        row = admission.check_row(
            data, key, attributes, event_time, priority, ttl_s, deliver_at, idempotency_key, depends_on
        )
        return await self._ingress.publish(topic, row, sender)

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
        self._check_open()
        sender = parse_sender(publisher, priority_class, token)
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
        return await self._ingress.publish_batch(await self._topics.resolve(topic), batch, sender=sender)

    async def publish_table(
        self,
        topic: str,
        table: pa.Table | pa.RecordBatch,
        *,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Receipts:
        """Stores an Arrow table: a column ``data`` and any of the other message columns. A large table
        is stored as several batches, each whole or not at all."""
        self._check_open()
        sender = parse_sender(publisher, priority_class, token)
        if not isinstance(table, pa.Table | pa.RecordBatch):
            raise InvalidArgument(
                f"publish_table takes an Arrow table or record batch, not {type(table).__name__}",
                hint="Convert with pyarrow.Table.from_pandas or polars' to_arrow().",
            )
        chosen = batches.from_table(table)
        admission.check_batch(chosen)
        return await self._ingress.publish_table(await self._topics.resolve(topic), chosen, sender)

    async def publish_encoded(
        self,
        topic: str,
        body: Body,
        *,
        partition: int = -1,
        partitions: int = 0,
        producer: tuple[int, int] | None = None,
        base_sequence: int | None = None,
        sender: Sender = ANYONE,
    ) -> Receipts:
        """Stores a batch that a client encoded as the journal does (docs/format.md §3), its bytes untouched
        when they belong to one partition. ``partitions`` is how many the client counted on."""
        self._check_open()
        found = await self._topics.resolve(topic)
        batch = admission.open_body(body)
        if partitions and partitions != found.partitions:
            raise PreconditionFailed(
                f"{topic!r} has {found.partitions} partitions, not {partitions}",
                hint="Divide the messages anew.",
                partitions=found.partitions,
            )
        if not -1 <= partition < found.partitions:
            raise InvalidArgument(f"{topic!r} has no partition {partition}")
        identity = None if producer is None else ProducerId(*producer)
        encoded = Encoded(body, partition)
        return await self._ingress.publish_batch(
            found, batch, identity, base_sequence, sender, encoded=encoded
        )

    async def producer(
        self,
        name: str,
        *,
        hold_gaps_s: float | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Producer:
        """A producer whose repeats are recognised; an earlier one of the same name is fenced off. With
        ``hold_gaps_s``, sequences that arrive out of order are held and stored in order, and a gap is
        given up after that time. To flow control it is the publisher of its name."""
        self._check_open()
        sender = parse_sender(parse_producer(name), priority_class, token)
        order = (
            None if hold_gaps_s is None else InOrder(self._ingress, self._repeats, self._clock, hold_gaps_s)
        )
        identity = ProducerId(*await self._store.open_producer(parse_producer(name)))
        self._repeats.open_epoch(*identity)
        return Producer(name, identity, self._ingress, self._topics, self._repeats, order, sender)

    async def next_sequence(self, producer_id: int, topic: str) -> int:
        """The sequence that a producer's next new message to a topic has."""
        self._check_open()
        found = await self._topics.resolve(topic)
        return self._repeats.ledger(producer_id, found.id).expected or 0

    # Flow control.

    @property
    def flow_listeners(self) -> list[Callable[[FlowReport], None]]:
        """Whom to tell when a topic begins or ceases to slow its publishers."""
        return self._flow.listeners

    async def set_publisher_limits(self, publisher: str, **limits: Any) -> RateLimit:
        """The quota of a publisher over all topics, from now on and after restarts. Options:
        messages_per_s, bytes_per_s (``None`` is no limit), burst_s; those left out stay."""
        self._check_open()
        return await self._flow.set_limits("publisher", publisher, limits)

    async def set_token_limits(self, token: str, **limits: Any) -> RateLimit:
        """The same for all that is published with a token."""
        self._check_open()
        return await self._flow.set_limits("token", token, limits)

    async def flow(self, topic: str) -> FlowReport:
        """How a topic treats its publishers now, and what became of what they sent."""
        self._check_open()
        return self._flow.report(self._topics.get(topic))

    async def lag(self) -> dict[str, LagReport]:
        """The lag of every subscription, by name."""
        self._check_open()
        return await self._lags.all()

    async def topic_lag(self, topic: str) -> TopicLag:
        """How far the subscriptions of a topic are behind."""
        self._check_open()
        return await self._lags.report_topic(self._topics.get(topic))

    # Subscriptions.

    async def subscribe(
        self, name: str, pattern: str, *, start: str | datetime | float = "latest", **policy: Any
    ) -> BrokerSubscription:
        """Creates the subscription, or takes hold of it when it exists with the same settings. A new one
        starts at "latest", "earliest" or a time. Options are the fields of SubscriptionPolicy: filter,
        ordering, guarantee, ack_deadline_s, retry, dead_letter_topic, …"""
        self._check_open()
        if parse_subscription(name).endswith(HIDDEN):
            raise InvalidName(f"a subscription name must not end in {HIDDEN!r}")
        _, _, chosen = self._subscriptions.check(name, pattern, start, policy)
        await self._dead_letters.prepare(name, chosen, pattern)
        _, is_new = await self._subscriptions.create(name, pattern, start, policy)
        if is_new:
            self._log.info("subscription-created", "", subscription=name, pattern=pattern)
        return self._handle(name)

    async def subscription(self, name: str) -> BrokerSubscription:
        """Takes hold of a subscription that exists."""
        courier = self._subscriptions.get(name)
        if courier.subscription.name.endswith(HIDDEN):
            raise SubscriptionNotFound(f"there is no subscription {name!r}")
        return self._handle(courier.subscription.name)

    async def subscriptions(self) -> list[Subscription]:
        """All subscriptions, by name."""
        found = [courier.subscription for courier in self._subscriptions]
        return [subscription for subscription in found if not subscription.name.endswith(HIDDEN)]

    async def snapshots(self) -> list[Snapshot]:
        """All snapshots that have not expired."""
        return self._positions.snapshots()

    async def delete_snapshot(self, name: str) -> None:
        await self._positions.delete(name)

    async def trace(self, message_id: str) -> list[Trace]:
        """Where is this message? Its state in every subscription that reads its topic."""
        return await self._tracer.trace(message_id)

    async def dead_letters(self, subscription: str) -> DeadLetterBox:
        """What a subscription could not deliver."""
        return (await self.subscription(subscription)).dead_letters

    def _handle(self, name: str) -> BrokerSubscription:
        self._consumers += 1
        return BrokerSubscription(name, f"consumer-{self._consumers}", self._desk)

    # Reading.

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        """The first offset kept and the one after the last."""
        self._check_open()
        return self._reading.bounds(topic, partition)

    async def read(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_messages: int = 1000
    ) -> list[Message]:
        """Messages of a partition from an offset on; empty at the end of the log."""
        self._check_open()
        return await self._reading.messages(topic, partition, offset, max_messages)

    async def read_batches(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_bytes: int = READ_BYTES
    ) -> list[pa.RecordBatch]:
        """The same as Arrow record batches, about ``max_bytes`` of them; the columns are the lake's."""
        self._check_open()
        return await self._reading.batches(topic, partition, offset, max_bytes)

    async def wait_for(self, topic: str, offset: int, *, partition: int = 0, timeout_s: float = 1.0) -> None:
        """Returns when a partition reaches beyond ``offset``, or after ``timeout_s``."""
        self._check_open()
        await self._reading.wait(topic, partition, offset, timeout_s)

    async def offset_at(self, topic: str, moment: datetime | float, *, partition: int = 0) -> int:
        """The first offset published at or after a moment."""
        self._check_open()
        return await self._reading.offset_at(topic, partition, moment)

    # Keeping.

    async def seal(self) -> int:
        """Moves everything published so far into the lake now; the number of messages moved."""
        self._check_open()
        return await self._maintenance.seal()

    async def apply_retention(self) -> int:
        """Drops what the topics' policies no longer keep, now; the number of segments dropped."""
        self._check_open()
        return await self._maintenance.apply_retention()

    def health(self) -> Health:
        return condition.report(self._store.state(), self._maintenance.complaint)

    def state(self) -> StoreState:
        """Sizes, counters and known damage of the store."""
        return self._store.state()

    @property
    def recovery(self) -> RecoveryReport:
        """What opening did and found."""
        return self._store.recovered.report

    async def _changed(self, topic: Topic) -> None:
        """Whoever goes by a topic's options or partitions hears of them."""
        self._flow.topic_changed(topic)
        await self._subscriptions.topic_changed(topic)

    async def _deleted(self, topic: Topic) -> None:
        """Whoever remembers something of a topic forgets it."""
        self._flow.topic_deleted(topic)
        await self._subscriptions.topic_deleted(topic)
        self._repeats.forget_topic(topic.id)
        self._pages.forget_topic(topic.id)

    def _arrived(self, stream: StreamId) -> None:
        """New messages of a stream can be read."""
        self._subscriptions.arrived(stream)
        self._reading.arrived(stream)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BrokerClosed("the broker is closed")

    def _log_recovery(self, report: RecoveryReport) -> None:
        self._log.info(
            "broker-opened", "", messages=report.messages, seconds=round(report.seconds, 3),
            segments=report.segments, torn_bytes=report.torn_bytes,
        )  # fmt: skip
        for damage in report.damages:
            self._log.error("data-damaged", f"{damage.file}: {damage.what}", **_fields(damage))


def _fields(damage: Any) -> dict[str, Any]:
    return {name: getattr(damage, name) for name in damage.__struct_fields__ if name != "what"}
