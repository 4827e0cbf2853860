"""What consumers hold and how they are, over all subscriptions: for operators, never on a message's way."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.deadletters import is_unseen
from sparrow.broker.groups import GroupRunner
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel.vitals import ConsumerLevel, consumer_level
from sparrow.model.errors import MemberNotFound
from sparrow.model.group import MemberInfo
from sparrow.model.message import MessageId
from sparrow.model.topic import Topic

FAILED_S = 600.0
"""How long a member that failed is shown."""
FULL_SHARE = 0.9
"""Of what it may hold, from which on a consumer counts as full."""
FAILURE_SHARE = 0.5
"""Nacks among what it settles, from which on a consumer counts as impaired."""


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A message in the hands of a consumer."""

    message_id: str
    subscription: str
    topic: str
    partition: int
    offset: int
    consumer: str
    assigned_at_us: int
    ack_deadline_us: int
    retry_count: int


class ConsumerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a group, by its signs of life and its work."""

    consumer: str
    group: str
    level: str
    """healthy, warning, suspicious or failed."""
    silent_s: float
    missed_heartbeats: int
    heartbeat_s: float
    session_timeout_s: float
    in_flight: int = 0
    max_in_flight: int = 0
    pace: str = "ok"
    """How it does next to the others: ok, warn or critical."""
    acks_per_s: float | None = None
    ack_latency_s: float | None = None
    failure_share: float = 0.0
    impairments: tuple[str, ...] = ()
    """What is wrong although it lives."""


class Inventory:
    """See the module's text."""

    def __init__(self, topics: Topics, subscriptions: Subscriptions, clock: Clock) -> None:
        self._topics = topics
        self._subscriptions = subscriptions
        self._clock = clock

    def pending(self, subscription: str | None, offset: int, limit: int) -> tuple[list[Pending], int]:
        """Messages in the hands of consumers, a page of them, and how many there are."""
        couriers = self._chosen(subscription)
        found: list[Pending] = []
        total = 0
        for courier in couriers:
            for held in courier.delivery.held():
                count = len(held.offsets)
                wanted = range(max(0, offset - total), min(count, offset + limit - total))
                total += count
                topic = self._topics.find(held.stream.topic_id)
                cursor = courier.delivery.cursor(held.stream)
                for place in wanted:
                    at = held.offsets[place]
                    found.append(
                        Pending(
                            message_id=str(MessageId(*held.stream, at)),
                            subscription=courier.subscription.name,
                            topic="" if topic is None else topic.name,
                            partition=held.stream.partition,
                            offset=at,
                            consumer=held.consumer,
                            assigned_at_us=held.taken_at_us,
                            ack_deadline_us=held.deadline_us,
                            retry_count=cursor.attempt(at) - 1,
                        )
                    )
        return found, total

    def held_by_consumer(self, subscription: str) -> dict[str, int]:
        """How many messages each consumer of a subscription holds."""
        found: dict[str, int] = {}
        for held in self._subscriptions.get(subscription).delivery.held():
            found[held.consumer] = found.get(held.consumer, 0) + len(held.offsets)
        return found

    def floors(self, subscription: str, topic: Topic) -> dict[int, int]:
        """Below which offset everything is done, by partition."""
        delivery = self._subscriptions.get(subscription).delivery
        known = set(delivery.streams)
        return {
            stream.partition: delivery.cursor(stream).floor for stream in topic.streams if stream in known
        }

    def consumers(self, group: str | None = None) -> list[ConsumerHealth]:
        """How the members of all groups are, or of one; the worst first."""
        order = (ConsumerLevel.FAILED, ConsumerLevel.SUSPICIOUS, ConsumerLevel.WARNING, ConsumerLevel.HEALTHY)
        found = [each for courier in self._chosen(group) for each in self._members(courier)]
        return sorted(found, key=lambda each: (order.index(each.level), each.group, each.consumer))

    def evict(self, group: str, member: str) -> None:
        """Sends a member of a group away."""
        (courier,) = self._chosen(group)
        if not isinstance(courier.group, GroupRunner):
            raise MemberNotFound(f"{group!r} has no member {member!r}")
        courier.group.evict(member)

    def _chosen(self, name: str | None) -> list[Courier]:
        if name is not None:
            return [self._subscriptions.get(name)]
        return [courier for courier in self._subscriptions if not is_unseen(courier.subscription.name)]

    def _members(self, courier: Courier) -> Iterator[ConsumerHealth]:
        runner = courier.group
        if not isinstance(runner, GroupRunner):
            return
        policy, name, now_us = runner.policy, courier.subscription.name, self._clock.now_us()
        for member in runner.members():
            yield ConsumerHealth(
                consumer=member.name,
                group=name,
                level=consumer_level(member.silent_s, policy.heartbeat_s, policy.session_timeout_s),
                silent_s=round(member.silent_s, 3),
                missed_heartbeats=int(member.silent_s / policy.heartbeat_s),
                heartbeat_s=policy.heartbeat_s,
                session_timeout_s=policy.session_timeout_s,
                in_flight=member.in_flight,
                max_in_flight=member.max_in_flight,
                pace=member.pace,
                acks_per_s=member.acks_per_s,
                ack_latency_s=member.ack_latency_s,
                failure_share=member.failure_share,
                impairments=tuple(_impairments(member)),
            )
        for failed, at_us in runner.failed.items():
            gone_s = (now_us - at_us) / 1e6
            if gone_s < FAILED_S:
                silent_s = gone_s + policy.session_timeout_s
                yield ConsumerHealth(
                    consumer=failed,
                    group=name,
                    level=ConsumerLevel.FAILED,
                    silent_s=round(silent_s, 3),
                    missed_heartbeats=int(silent_s / policy.heartbeat_s),
                    heartbeat_s=policy.heartbeat_s,
                    session_timeout_s=policy.session_timeout_s,
                    impairments=("it fell silent or its connection broke; what it held went to others",),
                )


def _impairments(member: MemberInfo) -> Iterator[str]:
    if member.pace != "ok":
        yield "slower than the others of its group"
    if member.failure_share >= FAILURE_SHARE:
        yield "nacks at least half of what it gets"
    if member.in_flight >= FULL_SHARE * member.max_in_flight:
        yield "holds nearly as much as it may"
