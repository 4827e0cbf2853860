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

from sparrow.broker import chance, condition, logs
from sparrow.broker.access import Access
from sparrow.broker.clock import Clock
from sparrow.broker.deadletters import HIDDEN, DeadLetters, is_unseen
from sparrow.broker.feeding import Services
from sparrow.broker.flow import Flow
from sparrow.broker.groups import Groups
from sparrow.broker.ingress import Ingress
from sparrow.broker.inventory import Inventory
from sparrow.broker.jobs import Jobs
from sparrow.broker.lags import Lags
from sparrow.broker.maintenance import Maintenance
from sparrow.broker.member import BrokerMember
from sparrow.broker.pages import Pages
from sparrow.broker.pipelines import Pipelines
from sparrow.broker.pipelineverbs import PipelineVerbs
from sparrow.broker.positions import Positions
from sparrow.broker.publishverbs import PublishVerbs
from sparrow.broker.push.figures import PushFigures
from sparrow.broker.push.pushers import Pushers
from sparrow.broker.reading import Reading
from sparrow.broker.readverbs import ReadVerbs
from sparrow.broker.repeats import Repeats
from sparrow.broker.replays import ReplayJobs
from sparrow.broker.rewriteverbs import RewriteVerbs
from sparrow.broker.rewriting import Rewriting
from sparrow.broker.schemas import Schemas
from sparrow.broker.schemaverbs import SchemaVerbs
from sparrow.broker.settling import Settling
from sparrow.broker.stageverbs import StageVerbs
from sparrow.broker.staging import Staging
from sparrow.broker.steward import Steward
from sparrow.broker.subscription import BrokerSubscription, DeadLetterBox, Desk
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.telemetry import Telemetry
from sparrow.broker.topics import Topics
from sparrow.broker.tracing import Tracer
from sparrow.kernel.lag import LagReport, TopicLag
from sparrow.kernel.snapshot import Snapshot
from sparrow.kernel.trace import Trace
from sparrow.model.access import AuditEntry, NewToken, TokenInfo
from sparrow.model.errors import (
    BrokerClosed,
    InvalidName,
    SubscriptionNotFound,
    TopicInUse,
)
from sparrow.model.flow import FlowReport, RateLimit
from sparrow.model.health import Health
from sparrow.model.message import StreamId
from sparrow.model.names import is_internal, parse_subscription
from sparrow.model.settings import Settings, parse_tokens
from sparrow.model.subscription import Subscription
from sparrow.model.topic import Topic
from sparrow.store.local import LocalStore
from sparrow.store.ports import RecoveryReport, Store, StoreState


class Broker(PublishVerbs, ReadVerbs, StageVerbs, RewriteVerbs, PipelineVerbs, SchemaVerbs):
    """An open broker."""

    def __init__(self, store: Store, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self._store = store
        self._clock = clock
        self._log = logs.get("broker")
        self._is_closed = False
        self.access = Access(store, clock, parse_tokens(settings.server.tokens))
        self.steward = Steward(store, settings.monitoring, clock)
        self._topics = Topics(store, settings.topics, clock)
        self._schemas = Schemas(store, self._topics)
        self._repeats = Repeats(store, settings.dedupe)
        self._repeats.recover(store.recovered)
        self._reading = Reading(store, self._topics)
        self._pages = Pages(store)
        self._settling = Settling(store)
        self._subscriptions = Subscriptions(store, self._topics, clock, chance.session())
        self._lags = Lags(store, self._topics, self._subscriptions, clock)
        self._flow = Flow(store, self._topics, self._subscriptions, self._lags, clock, chance.jitter)
        self._ingress = Ingress(
            store, self._topics, self._repeats, clock, self._arrived, self._flow, self.steward
        )
        self._dead_letters = DeadLetters(
            store, self._topics, self._subscriptions, self._pages, self._settling, clock
        )
        self._replays = ReplayJobs(
            store, self._topics, self._subscriptions, self._dead_letters, self._settling, clock, chance.name
        )
        self._positions = Positions(store, self._topics, self._subscriptions, clock)
        self._staging = Staging(store, self._topics, self._ingress, settings.staging, clock, self._arrived)
        self._maintenance = Maintenance(
            store, self._topics, self._repeats, settings, clock, self._subscriptions, self._staging
        )
        self._rewriting = Rewriting(
            store, self._topics, self._subscriptions, self._reading, settings.lake, clock
        )
        self._tracer = Tracer(store, self._topics, self._subscriptions, self._pages)
        self._pushers = Pushers(
            store, self._subscriptions, settings.push, clock, chance.jitter, chance.key, self._hold
        )
        self._pipelines = Pipelines(
            store, self._topics, self._subscriptions, self._positions, clock,
            self.subscribe, self.subscription,
            Jobs(self._topics, self._rewriting.plan, settings.pipelines, clock),
        )  # fmt: skip
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
            push=self._pushers,
            pipelines=self._pipelines,
        )
        self._consumers = 0
        self.inventory = Inventory(self._topics, self._subscriptions, clock)
        self.telemetry = Telemetry(
            store, self._topics, self._subscriptions, self._lags, self._flow, self._maintenance,
            self.steward, settings.monitoring, clock,
        )  # fmt: skip
        self.telemetry.sources.append(self._pipelines.figures)
        self.telemetry.sources.append(PushFigures(self._pushers, self._subscriptions))
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
        await broker._staging.load()
        await broker._subscriptions.recover(store.recovered, broker._staging.replay)
        await broker._staging.start()
        await broker._positions.load()
        broker._replays.resume()
        broker._maintenance.start()
        await broker._flow.load()
        await broker._schemas.load()
        await broker.access.load()
        await broker.steward.load()
        broker._lags.start()
        await broker._pipelines.load()
        await broker._pushers.start()
        broker._log_recovery(store.recovered.report)
        return broker

    async def close(self) -> None:
        """Finishes what is under way, then closes the store. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            await self._pushers.stop()
            await self._pipelines.stop()
            await self.telemetry.stop()
            await self.steward.stop()
            await self._flow.stop()
            await self._lags.stop()
            await self._staging.stop()
            await self._rewriting.stop()
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
        retain_until_acked, dedupe_window_s, compaction, flow (a mapping of the fields of FlowPolicy)…"""
        self._check_open()
        topic = await self._topics.create(name, partitions, policy)
        self._log.info("topic-created", "", topic=topic.name, partitions=topic.partitions)
        return topic

    async def topic(self, name: str) -> Topic:
        """The topic of this name."""
        return self._topics.get(name)

    async def topics(self) -> list[Topic]:
        """All topics, by name."""
        return [topic for topic in self._topics if not is_internal(topic.name)]

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
        self._pushers.check(chosen.push)
        await self._dead_letters.prepare(name, chosen, pattern)
        courier, is_new = await self._subscriptions.create(name, pattern, start, policy)
        await self._pushers.changed(courier.subscription)
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
        return [subscription for subscription in found if not is_unseen(subscription.name)]

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
        return self._hold(name, f"consumer-{self._consumers}")

    def _hold(self, name: str, consumer: str) -> BrokerSubscription:
        return BrokerSubscription(name, consumer, self._desk)

    # Tokens; whoever holds the broker itself may do everything.

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
        self._check_open()
        return await self.access.create_token(
            name, scopes=scopes, role=role, topics=topics, expires_in_s=expires_in_s
        )

    async def tokens(self) -> list[TokenInfo]:
        """All tokens, by name, without their secrets."""
        return self.access.tokens()

    async def revoke_token(self, name: str) -> TokenInfo:
        """Ends a token, by its name or its id, everywhere and at once."""
        self._check_open()
        return await self.access.revoke_token(name)

    async def audit_log(self, count: int = 100) -> list[AuditEntry]:
        """What was done by administrators, the newest last."""
        return await self.access.audit_log(count)

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
        return condition.report(self._store.state(), self._maintenance.complaint, self.steward.level)

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
        await self._schemas.topic_deleted(topic)
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
