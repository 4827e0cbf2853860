"""The subscriptions of a broker: created, found, changed, removed, and attached to the topics they match.

A subscription is attached to a stream by a fact, so its cursor exists from a definite point of the log on.
A pattern that matches a topic created later starts at that topic's first message. A stop between creating
a topic or a subscription and attaching it is mended at the next start, by the positions that were noted for
a subscription or by the times of their creation.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.feeding import Services
from sparrow.broker.topics import Topics
from sparrow.kernel import facts
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.facts import Fact
from sparrow.kernel.filter import parse_filter
from sparrow.kernel.filterset import FilterSet
from sparrow.kernel.lease import SESSION_MAX
from sparrow.kernel.pattern import Pattern, parse_pattern
from sparrow.kernel.router import Router
from sparrow.model.errors import BrokerClosed, InvalidArgument, SubscriptionExists, SubscriptionNotFound
from sparrow.model.message import StreamId, to_us
from sparrow.model.names import is_internal, parse_subscription
from sparrow.model.subscription import Subscription, SubscriptionPolicy, parse_policy
from sparrow.model.topic import Topic
from sparrow.store.catalog_tables import CursorCheckpoint, SubscriptionRow
from sparrow.store.ports import Recovered, Store

Start = Callable[[StreamId], Any]
_BEGUN = "subscription-begun"
"""Where a subscription that is being created is to start, until that is in the journal."""
_WAKE_AT_ONCE = 256
WATCH_OPTIONS = frozenset({"lag", "push", "sample"})
"""Options that no decision of the delivery kernel reads: a change of them ends no lease."""


class Subscriptions:
    """The registry, and the map from streams to those who read them."""

    def __init__(self, store: Store, topics: Topics, clock: Clock, session: int) -> None:
        self._store = store
        self._topics = topics
        self._clock = clock
        self._session = session
        self._services: Services | None = None
        self._by_name: dict[str, Courier] = {}
        self._by_id: dict[int, Courier] = {}
        self._readers: dict[StreamId, dict[int, Courier]] = {}
        self._filters: dict[int, FilterSet] = {}
        self._filtered: dict[int, set[int]] = {}
        self._router = Router()
        self._creating = asyncio.Lock()
        self._is_stopped = False

    def start(self, services: Services) -> None:
        self._services = services

    def __iter__(self) -> Iterator[Courier]:
        return iter(sorted(self._by_name.values(), key=lambda courier: courier.subscription.name))

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: object) -> Courier:
        """The courier of this subscription."""
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise SubscriptionNotFound(f"there is no subscription {parse_subscription(name)!r}")
        return found

    def peek(self, name: str) -> Courier | None:
        return self._by_name.get(name)

    def find(self, subscription_id: int) -> Courier | None:
        return self._by_id.get(subscription_id)

    def arrived(self, stream: StreamId) -> None:
        """New messages of a stream can be read: consumers that wait for them are woken."""
        waiting = [c for c in self._readers.get(stream, {}).values() if c.is_waited_for]
        if waiting:
            asyncio.get_running_loop().call_soon(self._wake, waiting)

    def _wake(self, waiting: list[Courier]) -> None:
        """Some at a time, and after the publisher was answered: a wide fan-out holds up nobody else."""
        for courier in waiting[:_WAKE_AT_ONCE]:
            courier.wake()
        if len(waiting) > _WAKE_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake, waiting[_WAKE_AT_ONCE:])

    def stop(self) -> None:
        self._is_stopped = True
        for courier in self._by_id.values():
            courier.stop()

    def _check_open(self) -> None:
        if self._is_stopped:
            raise BrokerClosed("the broker is closed")

    def readers(self, stream: StreamId) -> list[Courier]:
        return list(self._readers.get(stream, {}).values())

    def filters(self, topic_id: int) -> FilterSet:
        """The filters of all subscriptions that read a topic."""
        found = self._filters.get(topic_id)
        if found is None:
            found = self._filters[topic_id] = FilterSet()
        return found

    # Starting.

    async def recover(self, recovered: Recovered, elsewhere: Callable[[Fact], None]) -> None:
        """Rebuilds every subscription from its checkpoint and the facts after it. Facts of no subscription
        go elsewhere."""
        for row in self._store.subscriptions():
            self._keep(self._courier(_from_row(row)))
        for saved in recovered.cursor_checkpoints:
            courier = self._by_id.get(saved.subscription_id)
            if courier is not None:
                courier.delivery.restore(saved.state)
                courier.as_of = saved.as_of
        for lsn, body in recovered.facts:
            self._replay(lsn, facts.decode(body), elsewhere)
        for courier in self._by_id.values():
            self._track_streams(courier)
        begun = await self._store.documents(_BEGUN)
        for courier in list(self._by_id.values()):
            await self._mend(courier, _positions_from(begun.get(courier.subscription.name)))
        for name in begun:
            await self._store.delete_document(_BEGUN, name)

    def _replay(self, lsn: int, found: list[Fact], elsewhere: Callable[[Fact], None]) -> None:
        for fact in found:
            if not fact.subscription_id:
                elsewhere(fact)
                continue
            courier = self._by_id.get(fact.subscription_id)
            if courier is not None and lsn > courier.as_of:
                courier.delivery.apply(fact)
                courier.is_dirty = True
        for subscription_id in {fact.subscription_id for fact in found}:
            courier = self._by_id.get(subscription_id)
            if courier is not None:
                courier.as_of = max(courier.as_of, lsn)

    async def _mend(self, courier: Courier, begun: dict[StreamId, int]) -> None:
        """Attaches what a crash left unattached, and lets go of topics that were deleted."""
        subscription = courier.subscription
        gone = [s for s in courier.delivery.streams if self._topics.find(s.topic_id) is None]
        missing = [f for stream in gone for f in courier.delivery.detach(stream)]
        for topic in self._matching(parse_pattern(subscription.pattern)):
            for stream in topic.streams:
                if stream not in courier.streams:
                    start = begun.get(stream, 0)
                    if stream not in begun and topic.created_at_us < subscription.created_at_us:
                        start = await self._store.offset_at(stream, subscription.created_at_us)
                    missing += courier.delivery.attach(stream, start)
        if missing:
            await courier.journal(missing)
            self._track_streams(courier)

    # Life of a subscription.

    async def create(
        self, name: object, pattern: object, start: object, options: dict[str, Any]
    ) -> tuple[Courier, bool]:
        """A new subscription; the one that exists, when it is the same. True when it is new."""
        async with self._creating:
            name, parsed, policy = self.check(name, pattern, start, options)
            existing = self._by_name.get(name)
            if existing is not None:
                return existing, False
            positions = await self._positions(parsed, start)
            now_us = self._clock.now_us()
            is_noted = start != "latest" and bool(positions)
            if is_noted:
                await self._store.put_document(_BEGUN, name, _positions_to(positions))
            row = SubscriptionRow(0, name, str(parsed), msgspec.json.encode(policy), now_us)
            created = await self._store.create_subscription(row)
            courier = self._courier(_from_row(created))
            self._keep(courier)
            for topic in self._matching(parsed):  # A topic may have been created meanwhile.
                for stream in topic.streams:
                    positions.setdefault(stream, 0)
            attached = [f for stream, at in positions.items() for f in courier.delivery.attach(stream, at)]
            if attached:
                await courier.journal(attached)
            self._track_streams(courier)
            if is_noted:
                await self._store.delete_document(_BEGUN, name)
            return courier, True

    def check(
        self, name: object, pattern: object, start: object, options: dict[str, Any]
    ) -> tuple[str, Pattern, SubscriptionPolicy]:
        """What is asked for, in its parts; refuses it before anything has changed."""
        name, parsed = parse_subscription(name), parse_pattern(pattern)
        policy = parse_policy(options)
        parse_filter(policy.filter)
        if start not in ("earliest", "latest"):
            _moment_us(start)
        existing = self._by_name.get(name)
        if existing is not None:
            held = existing.subscription
            if held.pattern != str(parsed) or held.policy != policy:
                raise SubscriptionExists(f"the subscription {name!r} exists with other settings")
        return name, parsed, policy

    async def update(self, name: object, options: dict[str, Any]) -> Courier:
        """Changes the policy. What is not acked is judged anew; leases end."""
        self._check_open()
        before = self.get(name)
        policy = parse_policy(options, before.subscription.policy)
        parse_filter(policy.filter)
        changed = msgspec.structs.replace(before.subscription, policy=policy)
        if options and set(options) <= WATCH_OPTIONS:
            await self._store.update_subscription(_to_row(changed))
            before.subscription = changed
            return before
        if before.group is not None:
            before.group.check_policy(policy.group)
        await before.flush()
        return await self._replace(before, changed)

    async def pause(self, name: object, is_paused: bool) -> Courier:
        """Stops or resumes deliveries; nothing is lost meanwhile."""
        self._check_open()
        courier = self.get(name)
        changed = msgspec.structs.replace(courier.subscription, is_paused=is_paused)
        await self._store.update_subscription(_to_row(changed))
        courier.subscription = changed
        courier.delivery.is_paused = is_paused
        courier.wake()
        return courier

    async def _replace(self, before: Courier, changed: Subscription) -> Courier:
        await self._store.update_subscription(_to_row(changed))
        self._forget(before)
        # Ack ids of the leases that end here must not name new ones.
        self._session = (self._session + 1) & SESSION_MAX
        courier = self._courier(changed)
        courier.delivery.restore(before.delivery.checkpoint())
        courier.as_of, courier.is_dirty = before.as_of, True
        self._keep(courier)
        self._track_streams(courier)
        before.successor, courier.is_moving = courier, before.is_moving
        courier.unconfirmed, courier.watch = before.unconfirmed, before.watch
        if before.group is not None:
            before.group.moved(courier)
        before.stop()
        assert self._services is not None
        self._services.move_dead_letters(courier)
        return courier

    async def delete(self, name: object) -> None:
        """The subscription and its cursor go; messages stay."""
        self._check_open()
        courier = self.get(name)
        self._forget(courier)
        courier.stop()
        await self._store.delete_subscription(courier.subscription.id)

    # Topics that come, grow and go.

    async def topic_changed(self, topic: Topic) -> None:
        """A topic was created or got more partitions: those who match read it from the start."""
        matched = [self._by_id[subscription_id] for subscription_id in self._router.match(topic.name)]
        if is_internal(topic.name):
            matched = [courier for courier in matched if courier.subscription.pattern == topic.name]
        attached = {
            courier: [f for stream in topic.streams for f in courier.delivery.attach(stream, 0)]
            for courier in matched
        }
        await asyncio.gather(*(courier.journal(found) for courier, found in attached.items() if found))
        for courier in matched:
            if not courier.is_stopped:
                self._track_streams(courier)
                courier.wake()

    async def topic_deleted(self, topic: Topic) -> None:
        for courier in {c.subscription.id: c for s in topic.streams for c in self.readers(s)}.values():
            detached = [f for stream in topic.streams for f in courier.delivery.detach(stream)]
            await courier.journal(detached)
            self._track_streams(courier)
        self._filters.pop(topic.id, None)

    def users_of(self, topic: Topic) -> list[str]:
        """Subscriptions that read the topic by its own name, or use it for dead letters."""
        return [
            courier.subscription.name
            for courier in self
            if topic.name in (courier.subscription.pattern, courier.subscription.policy.dead_letter_topic)
        ]

    # Positions.

    async def _positions(self, pattern: Pattern, start: object) -> dict[StreamId, int]:
        streams = [stream for topic in self._matching(pattern) for stream in topic.streams]
        return {stream: await self.position(stream, start) for stream in streams}

    async def position(self, stream: StreamId, start: object) -> int:
        """The offset that "earliest", "latest" or a time means in a stream."""
        bounds = self._store.bounds(stream)
        if start == "latest":
            return bounds.end_offset
        if start == "earliest":
            return bounds.start_offset
        return await self._store.offset_at(stream, _moment_us(start))

    def _matching(self, pattern: Pattern) -> list[Topic]:
        found = [topic for topic in self._topics if pattern.matches(topic.name)]
        return [topic for topic in found if not is_internal(topic.name) or topic.name == str(pattern)]

    # For the keeping of the log.

    def checkpoints(self) -> list[CursorCheckpoint]:
        """The subscriptions that changed since their last checkpoint."""
        found = []
        for courier in self._by_id.values():
            if courier.is_dirty:
                courier.is_dirty = False
                found.append(
                    CursorCheckpoint(courier.subscription.id, courier.as_of, courier.delivery.checkpoint())
                )
        return found

    def keep_changed(self, checkpoints: list[CursorCheckpoint]) -> None:
        """A checkpoint could not be stored; it is due again."""
        for saved in checkpoints:
            courier = self._by_id.get(saved.subscription_id)
            if courier is not None:
                courier.is_dirty = True

    def needed_from(self, topic: Topic) -> Mapping[StreamId, int]:
        """The lowest offset of each stream that some subscription has not acked."""
        needed: dict[StreamId, int] = {}
        for stream in topic.streams:
            floors = [courier.delivery.cursor(stream).floor for courier in self.readers(stream)]
            if floors:
                needed[stream] = min(floors)
        return needed

    # Bookkeeping.

    def _courier(self, subscription: Subscription) -> Courier:
        assert self._services is not None
        delivery = Delivery(subscription.id, subscription.policy, session=self._session)
        delivery.is_paused = subscription.is_paused
        return Courier(subscription, delivery, parse_filter(subscription.policy.filter), self._services)

    def _keep(self, courier: Courier) -> None:
        subscription = courier.subscription
        self._by_name[subscription.name] = courier
        self._by_id[subscription.id] = courier
        self._router.add(parse_pattern(subscription.pattern), subscription.id)

    def _forget(self, courier: Courier) -> None:
        subscription = courier.subscription
        del self._by_name[subscription.name]
        del self._by_id[subscription.id]
        self._router.remove(parse_pattern(subscription.pattern), subscription.id)
        self._filter_topics(courier, set())
        for stream in courier.streams:
            self._readers.get(stream, {}).pop(subscription.id, None)

    def _track_streams(self, courier: Courier) -> None:
        """Makes the map from streams to readers say what the kernel says."""
        now = set(courier.delivery.streams)
        known = courier.subscription.id
        for stream in courier.streams | now:
            if stream in now:
                self._readers.setdefault(stream, {})[known] = courier
            else:
                self._readers.get(stream, {}).pop(known, None)
        is_changed, courier.streams = courier.streams != now, now
        if is_changed and courier.group is not None:
            courier.group.streams_changed()
        self._filter_topics(courier, {stream.topic_id for stream in now})

    def _filter_topics(self, courier: Courier, topics: set[int]) -> None:
        if courier.filter is None:
            return
        held = self._filtered.setdefault(courier.subscription.id, set())
        for topic_id in topics - held:
            self.filters(topic_id).add(courier.filter)
        for topic_id in held - topics:
            if topic_id in self._filters:
                self._filters[topic_id].remove(courier.filter)
        self._filtered[courier.subscription.id] = topics
        if not topics:
            del self._filtered[courier.subscription.id]


def _positions_to(positions: dict[StreamId, int]) -> bytes:
    return msgspec.json.encode([(*stream, offset) for stream, offset in positions.items()])


def _positions_from(document: bytes | None) -> dict[StreamId, int]:
    rows = [] if document is None else msgspec.json.decode(document, type=list[tuple[int, int, int]])
    return {StreamId(topic_id, partition): offset for topic_id, partition, offset in rows}


def _moment_us(start: object) -> int:
    if isinstance(start, str) or start is None or (isinstance(start, float) and not math.isfinite(start)):
        raise InvalidArgument(f"a position is 'earliest', 'latest' or a time, not {start!r}")
    return to_us(start)


def _from_row(row: SubscriptionRow) -> Subscription:
    return Subscription(
        id=row.id,
        name=row.name,
        pattern=row.pattern,
        policy=msgspec.json.decode(row.policy_json, type=SubscriptionPolicy),
        created_at_us=row.created_at_us,
        is_paused=row.is_paused,
    )


def _to_row(subscription: Subscription) -> SubscriptionRow:
    return SubscriptionRow(
        subscription.id,
        subscription.name,
        subscription.pattern,
        msgspec.json.encode(subscription.policy),
        subscription.created_at_us,
        subscription.is_paused,
    )
