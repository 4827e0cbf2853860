"""Publishers of a simulated broker: they send, lose replies, send again, and remember what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from sparrow.broker.broker import Broker
from sparrow.model.errors import SparrowError, StorageFull
from sparrow.model.message import Receipt, StreamId, parse_message_id
from sparrow.testing.simloop import ask, is_stopping
from sparrow.testing.simmodel import Broken, Place, Record, World
from sparrow.testing.simplan import KEYS, Plan

Send = Callable[[], Coroutine[Any, Any, Sequence[Receipt]]]


class Request:
    """What was sent with a key or a sequence, until its receipts are known."""

    def __init__(self, records: list[Record], sequence: int = 0) -> None:
        self.records = records
        self.sequence = sequence
        self.is_answered = False


class Publisher:
    """One publisher; its memory outlives the brokers."""

    def __init__(self, number: int, world: World, plan: Plan) -> None:
        self.name = f"p{number}"
        self._world = world
        self._plan = plan
        self._dice: Random = plan.dice(f"publisher {number}")
        self._request: Request | None = None
        self._sequences: dict[str, int] = {}
        self._mode = self._dice.choice(("single", "batch", "keyed", "producer", "producer"))

    async def run(self, broker: Broker) -> None:
        """Publishes for as long as the broker lives."""
        producer = await broker.producer(self.name) if self._mode == "producer" else broker
        while True:
            await asyncio.sleep(self._dice.uniform(0.0, 0.4))
            try:
                await getattr(self, f"_publish_{self._mode}")(producer)
            except SparrowError as error:
                self._world.note(self.name, "refused", type(error).__name__)
                await asyncio.sleep(self._dice.uniform(0.0, 2.0))

    # Ways to publish.

    async def _publish_single(self, broker: Broker) -> None:
        record = self._new_record()
        values = _values(record)

        async def send() -> Sequence[Receipt]:
            return [await broker.publish(record.topic, record.data, **values)]

        await self._send([record], send)

    async def _publish_batch(self, broker: Broker) -> None:
        records = self._new_batch()
        await self._send(records, lambda: broker.publish_batch(records[0].topic, **_columns(records)))

    async def _publish_keyed(self, broker: Broker) -> None:
        """Sends until a receipt says that it is there, and now and then once more."""
        request = self._request
        if request is None or (request.is_answered and self._dice.random() < 0.8):
            request = self._request = Request(self._new_batch())
        records = request.records
        keys = [f"i{record.data.decode()}" for record in records]
        columns = _columns(records)
        await self._send(
            records,
            lambda: broker.publish_batch(records[0].topic, **columns, idempotency_keys=keys),
            request,
        )

    async def _publish_producer(self, producer: Any) -> None:
        request = self._request
        if request is None or (request.is_answered and self._dice.random() < 0.8):
            records = self._new_batch()
            for record in records:
                record.producer = self.name
            sequence = self._sequences.get(records[0].topic, 0)
            self._sequences[records[0].topic] = sequence + len(records)
            request = self._request = Request(records, sequence)
        records, sequence = request.records, request.sequence
        columns = {k: v for k, v in _columns(records).items() if k in ("data", "keys", "attributes")}
        await self._send(
            records,
            lambda: producer.publish_batch(records[0].topic, **columns, sequence=sequence),
            request,
        )

    async def _send(self, records: list[Record], send: Send, request: Request | None = None) -> None:
        self._world.note(self.name, "sends", *records)
        task = ask(send(), self._dice)
        try:
            receipts = await task
        except asyncio.CancelledError:
            if is_stopping():
                raise
            self._world.note(self.name, "never hears of", *records)
            return
        except StorageFull:
            for record in records:
                record.is_refused = request is None
            raise
        self._receipted(records, receipts)
        if request is not None:
            request.is_answered = True

    def _receipted(self, records: list[Record], receipts: Sequence[Receipt]) -> None:
        self._world.note(self.name, "has", *(receipt.message_id for receipt in receipts))
        if len(receipts) != len(records):
            raise Broken(f"{len(records)} messages got {len(receipts)} receipts")
        for record, receipt in zip(records, receipts, strict=True):
            place = Place(
                StreamId(parse_message_id(receipt.message_id).topic_id, receipt.partition), receipt.offset
            )
            self._world.learn(record, place, receipt.publish_time_us, by=self.name)

    # What to publish.

    def _new_record(self, topic: str | None = None) -> Record:
        dice = self._dice
        options = self._plan.message_options(dice)
        delay_s = options.pop("deliver_in_s", None)
        if delay_s is not None:
            options["deliver_at"] = round(self._world.clock.now_us() / 1_000_000 + delay_s, 3)
        if dice.random() < 0.04 and self._world.places:
            options["depends_on"] = [dice.choice(list(self._world.places))]
        topic = topic or dice.choice(sorted(self._world.topics))
        return self._world.new_record(topic, dice.choice(KEYS), dice.choice("aabc"), options)

    def _new_batch(self) -> list[Record]:
        first = self._new_record()
        more = [self._new_record(first.topic) for _ in range(self._dice.choice((0, 1, 2, 4)))]
        for record in [first, *more]:
            kept = ("priority",) if self._mode != "producer" else ()
            record.options = {name: record.options[name] for name in kept if name in record.options}
        return [first, *more]


def _values(record: Record) -> dict[str, Any]:
    return {"key": record.key, "attributes": record.attributes, **record.options}


def _columns(records: list[Record]) -> dict[str, Any]:
    return {
        "data": [record.data for record in records],
        "keys": [record.key for record in records],
        "attributes": [record.attributes for record in records],
        "priorities": [record.options.get("priority") for record in records],
    }
