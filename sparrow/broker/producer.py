"""A named producer: publishes with sequences, so that a repeat is recognised, also across crashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparrow.broker.ingress import Ingress, ProducerId
from sparrow.broker.inorder import InOrder
from sparrow.broker.repeats import Repeats
from sparrow.broker.topics import Topics
from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import ANYONE, Sender
from sparrow.model.message import Receipt, Receipts
from sparrow.store import admission


class Producer:
    """One life of a producer. Opening the name again fences this one.

    Sequences count messages, per topic. One that jumps ahead is refused, or held if the producer was opened
    with ``hold_gaps_s``. Without an explicit ``sequence`` the next one is taken, so two
    tasks may share a producer; with one, a source can use its own positions and repeat what it is unsure of.
    """

    def __init__(
        self,
        name: str,
        identity: ProducerId,
        ingress: Ingress,
        topics: Topics,
        repeats: Repeats,
        order: InOrder | None = None,
        sender: Sender = ANYONE,
    ) -> None:
        self.name = name
        self._identity = identity
        self._ingress = ingress
        self._topics = topics
        self._repeats = repeats
        self._order = order
        self._sender = sender

    @property
    def id(self) -> int:
        return self._identity.id

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} id={self.id} epoch={self.epoch}>"

    async def next_sequence(self, topic: str) -> int:
        """The sequence that the next new message to this topic has."""
        found = await self._topics.resolve(topic)
        return self._repeats.ledger(self.id, found.id).expected or 0

    async def publish(
        self, topic: str, data: bytes | None, *, sequence: int | None = None, **values: Any
    ) -> Receipt:
        """One message; takes the same options as the broker's publish."""
        row = admission.check_row(data, **values)
        receipts = await self._publish(topic, admission.rows_to_batch([row]), sequence)
        return receipts[0]

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
        return await self._publish(topic, batch, sequence)

    async def _publish(self, topic: str, batch: Any, sequence: int | None) -> Receipts:
        if sequence is not None and (type(sequence) is not int or not 0 <= sequence < 2**62):
            raise InvalidArgument(f"a sequence is a whole number from 0, not {sequence!r}")
        found = await self._topics.resolve(topic)
        if self._order is not None and sequence is not None:
            return await self._order.publish(found, batch, self._identity, sequence, self._sender)
        return await self._ingress.publish_batch(found, batch, self._identity, sequence, self._sender)
