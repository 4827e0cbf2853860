"""Where subscriptions stand: seeking, snapshots, cumulative commits, lag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel.cursor import Cursor
from sparrow.kernel.exchange import total
from sparrow.kernel.lag import PartitionLag
from sparrow.kernel.snapshot import Snapshot, expired, find, take
from sparrow.model.errors import AlreadyExists, InvalidArgument, OffsetOutOfRange
from sparrow.model.message import StreamId
from sparrow.model.names import parse_subscription
from sparrow.store.ports import Store

_KIND = "snapshot"


class Positions:
    """The shell around cursors as a whole."""

    def __init__(self, store: Store, topics: Topics, subscriptions: Subscriptions, clock: Clock) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._clock = clock
        self._snapshots: dict[str, Snapshot] = {}

    async def load(self) -> None:
        for name, raw in (await self._store.documents(_KIND)).items():
            self._snapshots[name] = msgspec.msgpack.decode(raw, type=Snapshot)

    # Seeking.

    async def seek(self, courier: Courier, target: Any) -> None:
        """Replaces the cursor; durable when this returns."""
        await courier.flush()
        await courier.journal(courier.delivery.seek(await self._resolve(courier, target)))

    async def _resolve(self, courier: Courier, target: Any) -> Mapping[StreamId, int | Cursor]:
        if isinstance(target, Mapping):
            return {self._place(key): self._checked(self._place(key), at) for key, at in target.items()}
        if isinstance(target, str) and target not in ("earliest", "latest"):
            saved = self.get(target)
            return {s: c for s, c in saved.positions().items() if s in courier.streams}
        return {
            stream: await self._subscriptions.position(stream, target) for stream in courier.delivery.streams
        }

    def _place(self, key: Any) -> StreamId:
        topic, partition = key if isinstance(key, tuple) and len(key) == 2 else (key, 0)
        return self._topics.stream(topic, partition)[1]

    def _checked(self, stream: StreamId, offset: Any) -> int:
        bounds = self._store.bounds(stream)
        if not isinstance(offset, int) or not bounds.start_offset <= offset <= bounds.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset!r} is not between {bounds.start_offset} and {bounds.end_offset}",
                start_offset=bounds.start_offset,
                end_offset=bounds.end_offset,
            )
        return offset

    def stream(self, topic: str, partition: int) -> StreamId:
        """The partition of a topic; refuses what does not exist."""
        return self._topics.stream(topic, partition)[1]

    async def commit(self, courier: Courier, topic: str, partition: int, offset: int) -> None:
        """Everything below the offset is done."""
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise InvalidArgument(f"an offset is a whole number, not {offset!r}")
        stream = self._topics.stream(topic, partition)[1]
        end = self._store.bounds(stream).end_offset
        decided = courier.delivery.commit(stream, offset, end)
        if courier.watch is not None:
            courier.watch.committed(stream, offset, self._clock.now_us())
        await courier.settle(decided, is_confirmed=True)

    # Snapshots.

    async def save(self, courier: Courier, name: str, ttl_s: float) -> Snapshot:
        """A snapshot of this name; one that exists is refused."""
        name = parse_subscription(name)
        if name in ("earliest", "latest"):
            raise InvalidArgument(f"{name!r} is a position, not a name for a snapshot")
        if not isinstance(ttl_s, int | float):
            raise InvalidArgument(f"ttl_s must be a number of seconds, not {ttl_s!r}")
        await self.expire()
        if name in self._snapshots:
            raise AlreadyExists(
                f"the snapshot {name!r} exists", hint="Pick another name, or delete_snapshot first."
            )
        delivery = courier.delivery
        cursors = {stream: delivery.cursor(stream) for stream in delivery.streams}
        snapshot = take(name, delivery.subscription_id, cursors, self._clock.now_us(), ttl_s)
        await self._store.put_document(_KIND, name, msgspec.msgpack.encode(snapshot))
        self._snapshots[name] = snapshot
        return snapshot

    def get(self, name: str) -> Snapshot:
        return find(self._snapshots.values(), name, self._clock.now_us())

    def snapshots(self) -> list[Snapshot]:
        now_us = self._clock.now_us()
        live = [saved for saved in self._snapshots.values() if not saved.is_expired(now_us)]
        return sorted(live, key=lambda saved: saved.name)

    async def delete(self, name: str) -> None:
        self.get(name)
        del self._snapshots[name]
        await self._store.delete_document(_KIND, name)

    async def expire(self) -> int:
        """Forgets snapshots whose time has passed."""
        old = expired(self._snapshots.values(), self._clock.now_us())
        for snapshot in old:
            del self._snapshots[snapshot.name]
            await self._store.delete_document(_KIND, snapshot.name)
        return len(old)

    # Lag.

    def lag(self, courier: Courier) -> int:
        """Messages that are not done yet, over all streams; what the filter will pass over is included
        until it has been read."""
        return total(courier.delivery.lag(self._ends(courier)))

    def partition_lags(self, courier: Courier) -> list[PartitionLag]:
        """The same by partition, with the names of the topics."""
        found = []
        for lag in courier.delivery.lag(self._ends(courier)):
            topic = self._topics.find(lag.stream.topic_id)
            if topic is not None:
                found.append(PartitionLag(topic.name, lag.stream.partition, lag.messages, lag.oldest_offset))
        return sorted(found)

    def _ends(self, courier: Courier) -> dict[StreamId, int]:
        return {stream: self._store.bounds(stream).end_offset for stream in courier.delivery.streams}
