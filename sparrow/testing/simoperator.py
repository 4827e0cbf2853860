"""The operator of a simulated broker: makes topics and subscriptions, changes and moves them, and has a
disk that fails now and then."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from sparrow.broker.broker import Broker
from sparrow.model.errors import SparrowError
from sparrow.model.group import STRATEGIES
from sparrow.model.message import StreamId
from sparrow.model.subscription import parse_policy
from sparrow.testing import simaudit
from sparrow.testing.simgroup import GroupModel
from sparrow.testing.simmachine import Machine
from sparrow.testing.simmodel import FILTERS, SubscriptionModel, TopicFacts, World
from sparrow.testing.simplan import PATTERNS, Plan

FAULTS = (
    ("sync", errno.EIO),
    ("pwritev", errno.EIO),
    ("pwritev", errno.ENOSPC),
    ("reserve", errno.ENOSPC),
    ("reserve", errno.ENOSPC),
    ("rename", errno.EIO),
    ("sync_directory", errno.EIO),
    ("truncate", errno.EIO),
)


class _Snapshot:
    """What was known when a snapshot was made."""

    def __init__(self, subscription: str, opened: set[Any], ends: dict[StreamId, int]) -> None:
        self.subscription = subscription
        self.opened = opened
        self.ends = ends


class Operator:
    """One operator; what it knows outlives the brokers."""

    def __init__(self, machine: Machine, world: World, plan: Plan) -> None:
        self._machine = machine
        self._world = world
        self._plan = plan
        self._dice: Random = plan.dice("operator")
        self._snapshots: dict[str, _Snapshot] = {}
        self.is_restart_wanted = False

    # Making.

    async def prepare(self, broker: Broker) -> None:
        """Makes what is not there yet; what was made half before a crash is found and known again."""
        for options in self._plan.topics:
            await self._make_topic(broker, dict(options))
        for name in sorted(
            {s["dead_letter_topic"] for s in self._plan.subscriptions if "dead_letter_topic" in s}
        ):
            if name not in [topic.name for topic in await broker.topics()]:
                await broker.create_topic(name, partitions=self._plan.dead_partitions, retention_s=None)
        for options in self._plan.subscriptions:
            await self._make_subscription(broker, dict(options))

    async def _make_topic(self, broker: Broker, options: dict[str, Any]) -> None:
        name = options.pop("name")
        there = {topic.name: topic for topic in await broker.topics()}
        topic = there.get(name) or await broker.create_topic(name, **options)
        self._world.topics[name] = TopicFacts(
            name,
            topic.id,
            topic.partitions,
            options["durability"] == "durable",
            options["retention_s"] is not None or "retention_messages" in options,
            options.get("retain_until_acked", False),
        )
        for model in self._world.subscriptions.values():
            self._attach(broker, model)

    async def _make_subscription(self, broker: Broker, options: dict[str, Any]) -> None:
        name, pattern, start = options.pop("name"), options.pop("pattern"), options.pop("start")
        if name in self._world.subscriptions:
            self._attach(broker, self._world.subscriptions[name])
            return
        await broker.subscribe(name, pattern, start=start, **options)
        kind = GroupModel if "group" in options else SubscriptionModel
        model = kind(self._world, name, pattern, parse_policy(options))
        self._world.subscriptions[name] = model
        self._attach(broker, model)

    def _attach(self, broker: Broker, model: SubscriptionModel) -> None:
        found = simaudit.delivery(broker, model)
        for stream in self._world.streams(model.pattern):
            if stream not in model.starts:
                model.starts[stream] = found.cursor(stream).floor

    # Working.

    async def run(self, broker: Broker) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(0.1, 2.0))
            work = self._choose()
            self._world.note("operator", work.__name__)
            try:
                await work(broker)
            except (SparrowError, OSError) as error:
                self._world.note("operator is refused", type(error).__name__)
            if not broker.state().is_writable and self._dice.random() < 0.5:
                self.is_restart_wanted = True

    def _choose(self) -> Callable[[Broker], Awaitable[None]]:
        plan, dice = self._plan, self._dice
        choices: list[Callable[[Broker], Awaitable[None]]] = [self._seal, self._look, self._look]
        if any(topic.is_shortened for topic in self._world.topics.values()):
            choices += [self._retain, self._retain]
        if plan.has_faults:
            choices += [self._break, self._break]
        if plan.has_jumps:
            choices += [self._jump]
        if plan.has_resets:
            choices += [self._seek, self._snapshot, self._replay, self._replay]
            choices += [self._commit]
        if plan.has_changes:
            choices += [self._update, self._pause, self._grow, self._subscribe]
        if plan.members:
            choices += [self._regroup]
        return dice.choice(choices)

    async def _seal(self, broker: Broker) -> None:
        await broker.seal()

    async def _retain(self, broker: Broker) -> None:
        await broker.seal()
        await broker.apply_retention()

    async def _look(self, broker: Broker) -> None:
        for model in self._world.subscriptions.values():
            await (await broker.subscription(model.name)).lag()
        if self._world.places:
            await broker.trace(self._dice.choice(list(self._world.places)))

    async def _break(self, broker: Broker) -> None:
        operation, error = self._dice.choice(FAULTS)
        disk = self._machine.disk
        disk.fail(operation, at=self._dice.randint(1, 6), error=error, times=self._dice.randint(1, 3))
        self._world.note("the disk will fail at", operation, errno.errorcode[error])

    async def _jump(self, broker: Broker) -> None:
        seconds = self._dice.choice((-20.0, -2.0, 2.0, 20.0))
        self._world.note("the clock is set by", seconds)
        self._machine.clock.jump(seconds)
        for model in self._groups():
            model.clock_was_set()

    async def _grow(self, broker: Broker) -> None:
        """One partition more; whoever reads the topic reads it from its first message on."""
        facts = self._dice.choice(list(self._world.topics.values()))
        if facts.partitions < 4:
            topic = await broker.update_topic(facts.name, partitions=facts.partitions + 1)
            self._world.topics[facts.name] = facts._replace(partitions=topic.partitions)
            for model in self._world.subscriptions.values():
                self._attach(broker, model)

    async def _subscribe(self, broker: Broker) -> None:
        """Its consumers come with the next life."""
        name = f"late{len(self._world.subscriptions)}"
        options = {**self._plan.policy(self._dice), "start": self._dice.choice(("earliest", "latest"))}
        if len(self._world.subscriptions) < 5:
            await self._make_subscription(
                broker, {"name": name, "pattern": self._dice.choice(PATTERNS), **options}
            )

    # Subscriptions as a whole.

    def _any(self) -> SubscriptionModel:
        return self._dice.choice(list(self._world.subscriptions.values()))

    @contextmanager
    def _changing(self, broker: Broker, model: SubscriptionModel) -> Iterator[None]:
        """While this lasts, and if it fails, nobody knows where the subscription stands."""
        model.is_changing = True
        model.in_doubt(simaudit.ends(broker, model))
        yield
        model.is_changing = False
        model.in_doubt(simaudit.ends(broker, model))

    async def _seek(self, broker: Broker) -> None:
        model, world = self._any(), self._world
        if model.is_changing:
            return
        target = self._target(broker, model)
        since = world.next_tick()
        self._world.note("operator seeks", model.name, "to", target)
        if target == "earliest" or isinstance(target, dict):
            for stream in model.starts:
                model.starts[stream] = min(model.starts[stream], broker._store.bounds(stream).start_offset)
        subscription = await broker.subscription(model.name)
        try:
            with self._changing(broker, model):
                await subscription.seek(target)
        except SparrowError:
            model.in_doubt(simaudit.ends(broker, model))
            model.is_changing = False
            raise
        for item in list(model.responsible()):
            if self._is_new_after(item.place, target, broker):
                model.renewed(item, since)

    def _target(self, broker: Broker, model: SubscriptionModel) -> Any:
        snapshots = [name for name, saved in self._snapshots.items() if saved.subscription == model.name]
        choice = self._dice.choice(("earliest", "latest", "offsets", "snapshot"))
        if choice == "snapshot" and snapshots:
            return self._dice.choice(snapshots)
        if choice in ("earliest", "latest"):
            return choice
        target = {}
        for topic in self._world.topics.values():
            for partition in range(topic.partitions):
                if StreamId(topic.id, partition) in model.starts:
                    start, end = broker._store.bounds(StreamId(topic.id, partition))
                    target[topic.name, partition] = self._dice.randint(start, end)
        return target

    def _is_new_after(self, place: Any, target: Any, broker: Broker) -> bool:
        if target == "latest":
            return False
        if target == "earliest":
            return True
        if isinstance(target, dict):
            names = {topic.id: topic.name for topic in self._world.topics.values()}
            offset = target.get((names[place.stream.topic_id], place.stream.partition))
            return offset is not None and place.offset >= offset
        saved = self._snapshots[target]
        return place in saved.opened or place.offset >= saved.ends.get(place.stream, 1 << 62)

    async def _commit(self, broker: Broker) -> None:
        """Everything below an offset is done, whoever holds it."""
        model = self._any()
        streams = [stream for stream in model.starts if broker._store.bounds(stream).end_offset]
        if model.is_changing or not streams:
            return
        stream = self._dice.choice(streams)
        offset = self._dice.randint(0, broker._store.bounds(stream).end_offset)
        name = next(topic.name for topic in self._world.topics.values() if topic.id == stream.topic_id)
        self._world.note("operator commits", model.name, name, stream.partition, offset)
        model.commit_asked(stream, offset)
        await (await broker.subscription(model.name)).commit(name, stream.partition, offset)

    async def _snapshot(self, broker: Broker) -> None:
        model, name = self._any(), f"snap{len(self._snapshots)}"
        if model.is_changing:
            return
        resets, before = model.resets, {item.place for item in model.responsible() if model.is_open(item)}
        await (await broker.subscription(model.name)).snapshot(name)
        if model.resets == resets:
            still = {item.place for item in model.responsible() if model.is_open(item)}
            self._snapshots[name] = _Snapshot(model.name, before & still, simaudit.ends(broker, model))

    async def _replay(self, broker: Broker) -> None:
        model = self._any()
        if model.policy.dead_letter_topic is None:
            return
        model.replay_asked()
        box = (await broker.subscription(model.name)).dead_letters
        if self._dice.random() < 0.2:
            await box.purge()
        else:
            await box.replay(rate_per_s=self._dice.choice((1.0, 1000.0)))

    async def _update(self, broker: Broker) -> None:
        model = self._any()
        if model.is_changing:
            return
        options: dict[str, Any] = self._dice.choice(
            (
                {"filter": self._dice.choice(list(FILTERS))},
                {"ack_deadline_s": self._dice.choice((1.0, 5.0))},
                {"max_in_flight": self._dice.choice((1, 50))},
                {"retry": {"min_backoff_s": 0.0, "max_backoff_s": self._dice.choice((0.5, 2.0))}},
            )
        )
        await self._change(broker, model, options)

    async def _change(self, broker: Broker, model: SubscriptionModel, options: dict[str, Any]) -> None:
        self._world.note("operator updates", model.name, options)
        subscription = await broker.subscription(model.name)
        model.policies.append(parse_policy(options, model.policy))
        model.is_changing = True
        model.leases_ended()
        try:
            await subscription.update(**options)
        finally:
            model.is_changing = False
            model.leases_ended()

    def _groups(self) -> list[GroupModel]:
        return [model for model in self._world.subscriptions.values() if isinstance(model, GroupModel)]

    async def _regroup(self, broker: Broker) -> None:
        """A new generation, by hand or because members are to share in another way."""
        if not self._groups():
            return
        model = self._dice.choice(self._groups())
        if self._dice.random() < 0.6 or model.is_changing:
            await (await broker.subscription(model.name)).rebalance()
            return
        change: dict[str, Any] = {"strategy": self._dice.choice(STRATEGIES[model.policy.group.mode]).value}
        if self._dice.random() < 0.4:
            change = {"session_timeout_s": model.policy.group.heartbeat_s * self._dice.choice((2, 3))}
        await self._change(broker, model, {"group": change})

    async def _pause(self, broker: Broker) -> None:
        subscription = await broker.subscription(self._any().name)
        await subscription.pause()
        await asyncio.sleep(self._dice.uniform(0.0, 3.0))
        await subscription.resume()
