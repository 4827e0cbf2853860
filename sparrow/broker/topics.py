"""The topics of a broker: created, found, changed, deleted; created on first use when that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from sparrow.broker.clock import Clock
from sparrow.model.errors import InvalidArgument, ResourceExhausted, TopicExists, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.model.names import parse_topic
from sparrow.model.settings import TopicSettings
from sparrow.model.topic import Topic, TopicPolicy, parse_partitions, parse_policy
from sparrow.store.ports import Store

OnChange = Callable[[Topic], Awaitable[None]]


async def _nobody(topic: Topic) -> None:
    """Nobody wants to know."""


class Topics:
    """The registry. Names are resolved here and nowhere else."""

    def __init__(self, store: Store, settings: TopicSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._by_name = {topic.name: topic for topic in store.topics()}
        self._by_id = {topic.id: topic for topic in store.topics()}
        self._creating: dict[str, asyncio.Future[Topic]] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._changes: set[asyncio.Task[None]] = set()
        self.on_change: OnChange = _nobody
        """Told of every topic that is new or has more partitions, before anyone may use it."""
        self.on_delete: OnChange = _nobody
        """Told of every topic that is gone."""
        self._allowance = settings.auto_create_per_s
        self._allowance_at = clock.monotonic_s()

    def __iter__(self) -> Any:
        return iter(sorted(self._by_name.values(), key=lambda topic: topic.name))

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: object) -> Topic:
        """The topic of this name."""
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise TopicNotFound(f"there is no topic {parse_topic(name)!r}")
        return found

    def find(self, topic_id: int) -> Topic | None:
        return self._by_id.get(topic_id)

    def stream(self, name: object, partition: object) -> tuple[Topic, StreamId]:
        """A topic and one of its partitions."""
        topic = self.get(name)
        if not isinstance(partition, int) or not 0 <= partition < topic.partitions:
            raise InvalidArgument(
                f"{topic.name!r} has partitions 0 to {topic.partitions - 1}, not {partition!r}"
            )
        return topic, StreamId(topic.id, partition)

    async def create(self, name: object, partitions: object | None, options: dict[str, Any]) -> Topic:
        """A new topic; a name that is taken is refused."""
        name = parse_topic(name)
        count = parse_partitions(self._settings.partitions_default if partitions is None else partitions)
        policy = parse_policy(options)
        await self._until_gone(name)
        if name in self._by_name or name in self._creating:
            raise TopicExists(f"the topic {name!r} exists")
        return await self._create(name, count, policy)

    async def resolve(self, name: object) -> Topic:
        """The topic to publish to; made on first use when the settings allow it."""
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        name = parse_topic(name)
        if name in self._leaving:
            await self._until_gone(name)
            return await self.resolve(name)
        if name in self._creating:
            return await asyncio.shield(self._creating[name])
        if not self._settings.auto_create:
            raise TopicNotFound(f"there is no topic {name!r}")
        self._spend_allowance()
        return await self._create(name, self._settings.partitions_default, TopicPolicy())

    async def _create(self, name: str, partitions: int, policy: TopicPolicy) -> Topic:
        if len(self._by_name) + len(self._creating) >= self._settings.count_max:
            raise ResourceExhausted(
                f"there are {len(self._by_name)} topics; topics.count_max allows no more",
                hint="Delete topics that are not needed, or raise topics.count_max.",
            )
        future: asyncio.Future[Topic] = asyncio.get_running_loop().create_future()
        self._creating[name] = future
        self._see_through(self._finish_creation(name, partitions, policy, future))
        # The same future as for all others who wait, so that they go on in the order in which they came.
        return await asyncio.shield(future)

    async def _finish_creation(
        self, name: str, partitions: int, policy: TopicPolicy, future: asyncio.Future[Topic]
    ) -> None:
        try:
            try:
                topic = await self._store.create_topic(name, partitions, policy, self._clock.now_us())
            finally:
                del self._creating[name]
            self._keep(topic)
            await self.on_change(topic)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else TopicNotFound("cancelled"))
            future.exception()  # Nobody may be waiting any more.
            raise
        future.set_result(topic)

    async def update(self, name: object, partitions: object | None, options: dict[str, Any]) -> Topic:
        """Changes a topic's policy; its partitions may grow, never shrink."""
        before = self.get(name)
        count = before.partitions if partitions is None else parse_partitions(partitions)
        if count < before.partitions:
            raise InvalidArgument(
                f"{before.name!r} has {before.partitions} partitions; a topic cannot shrink to {count}",
                hint="Create a new topic with fewer partitions and move its readers.",
            )
        policy = parse_policy(options, before.policy)
        topic = msgspec.structs.replace(before, partitions=count, policy=policy)
        if topic != before:
            await asyncio.shield(self._see_through(self._finish_update(topic)))
        return topic

    async def _finish_update(self, topic: Topic) -> None:
        await self._store.update_topic(topic)
        self._keep(topic)
        await self.on_change(topic)

    async def delete(self, topic: Topic) -> None:
        """The topic, its messages and its name go."""
        del self._by_name[topic.name]
        self._leaving[topic.name] = gone = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._see_through(self._finish_deletion(topic, gone)))

    async def _finish_deletion(self, topic: Topic, gone: asyncio.Future[None]) -> None:
        try:
            await self._store.delete_topic(topic)
        except BaseException:
            self._by_name[topic.name] = topic
            raise
        finally:
            del self._leaving[topic.name]
            gone.set_result(None)
        del self._by_id[topic.id]
        await self.on_delete(topic)

    async def _until_gone(self, name: str) -> None:
        """A new topic of a name waits until the old one's files are gone, because it will use the same."""
        if name in self._leaving:
            await asyncio.shield(self._leaving[name])

    def _see_through(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a change to its end also when its caller gives up: store and registry must not differ."""
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever waits has it; when nobody does, it is no reason to complain.

    def _keep(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.id] = topic

    def _spend_allowance(self) -> None:
        """A token bucket: a typo in a loop must not make ten thousand topics."""
        now_s, rate = self._clock.monotonic_s(), self._settings.auto_create_per_s
        refilled = self._allowance + (now_s - self._allowance_at) * rate
        self._allowance, self._allowance_at = min(max(rate, 1.0), refilled), now_s
        if self._allowance < 1.0:
            raise ResourceExhausted(
                "topics are being created on first use too fast",
                hint="Create topics with create_topic, or raise topics.auto_create_per_s.",
                retry_after_s=(1.0 - self._allowance) / rate,
            )
        self._allowance -= 1.0
