"""The broker's verbs for publishing; the rules are in ingress.py, singles.py and repeats.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sparrow.broker.clock import Clock
from sparrow.broker.ingress import Encoded, Ingress, ProducerId
from sparrow.broker.inorder import InOrder
from sparrow.broker.producer import Producer
from sparrow.broker.repeats import Repeats
from sparrow.broker.topics import Topics
from sparrow.model.errors import InvalidArgument, PreconditionFailed
from sparrow.model.flow import ANYONE, Sender, parse_sender
from sparrow.model.message import Receipt, Receipts
from sparrow.model.names import parse_producer
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.store.batch import Body
from sparrow.store.ports import Store


class PublishVerbs:
    """A part of the broker."""

    _ingress: Ingress
    _topics: Topics
    _repeats: Repeats
    _clock: Clock
    _store: Store

    def _check_open(self) -> None:
        raise NotImplementedError

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
        table: Any,
        *,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Receipts:
        """Stores a table of Arrow, pandas or polars: a column ``data`` and any of the other message columns.
        A large table is stored as several batches, each whole or not at all."""
        self._check_open()
        sender = parse_sender(publisher, priority_class, token)
        chosen = batches.from_table(admission.to_arrow(table))
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
