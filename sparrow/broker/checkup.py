"""Check-ups: how the broker is by its figures, and whether a message really makes the whole way.

The deep one publishes to a topic of its own, durably, receives that message through a subscription, reads it
back from the log and acks it, each step timed, all of it within a few seconds. The topic and the subscription
are the broker's own business (model/names.py): nobody else receives from them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from sparrow.broker import chance
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.kernel import vitals
from sparrow.kernel.degradation import GIVEN_UP, ServiceLevel
from sparrow.kernel.vitals import BrokerHealth, Dimension
from sparrow.model.errors import InMaintenance, SparrowError, TopicExists
from sparrow.model.flow import PublisherClass
from sparrow.model.health import Check, Status
from sparrow.model.names import INTERNAL_PREFIX

NAME = f"{INTERNAL_PREFIX}health"
DEEP_TIMEOUT_S = 5.0
KEPT_MESSAGES = 1000
FREE_SHARE_MIN = 0.10
USED_SHARE_MAX = 0.90
CONNECTED_SHARE_MAX = 0.95
"""queue.md §9.4."""
T = TypeVar("T")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the deep check."""

    name: str
    status: Status
    seconds: float
    message: str = ""


class DeepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a message made the whole way."""

    status: Status
    seconds: float
    steps: tuple[Step, ...]


class Checkup:
    """The check-ups of one broker."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._deep = asyncio.Lock()

    async def report(self) -> BrokerHealth:
        """How the broker is, by its figures."""
        broker = self._broker
        seen = await broker.telemetry.look(is_new=True)
        found = tuple(self._dimensions(seen.figures.in_flight, seen.figures.oldest_age_s))
        level = broker.steward.level
        health = broker.health()
        advice = [each.advice for each in found if each.advice] + list(health.recommendations)
        status = vitals.judge(found, can_write=broker.state().is_writable)
        if status is Status.HEALTHY and level is not ServiceLevel.NORMAL:
            status = Status.DEGRADED
        if level in (ServiceLevel.READ_ONLY, ServiceLevel.EMERGENCY):
            status = Status.CRITICAL
        return BrokerHealth(
            status=status,
            score=vitals.score(found),
            level=level.value,
            given_up=GIVEN_UP[level],
            uptime_s=round(broker.telemetry.uptime_s, 3),
            tasks=seen.figures.tasks,
            dimensions=found,
            recommendations=tuple(dict.fromkeys(advice)),
        )

    def _dimensions(self, in_flight: int, oldest_age_s: float) -> list[Dimension]:
        steward, settings = self._broker.steward, self._broker.settings.monitoring
        used, allowed = steward.usage.memory_bytes, steward.memory_bytes_max
        free, whole = steward.space
        doors = [door for door in self._broker.telemetry.doors if door.connections_max]
        crowded = max((door.connections / door.connections_max for door in doors), default=0.0)
        open_now = self._broker.telemetry.connections
        found = [
            vitals.most(
                "connections",
                crowded,
                CONNECTED_SHARE_MAX,
                15,
                f"{open_now} are open",
                "Close connections that are not needed, or raise server.connections_max.",
            ),
            vitals.most(
                "memory",
                used / allowed if allowed else 0.0,
                USED_SHARE_MAX,
                20,
                f"{used} of {allowed} bytes",
                "Give the broker more memory, or fewer connections and messages in flight.",
            ),
            vitals.least(
                "disk",
                free / whole if whole else 1.0,
                FREE_SHARE_MIN,
                20,
                f"{free} of {whole} bytes are free",
                "Free disk space or shorten the retention of topics.",
            ),
            vitals.most(
                "pending",
                in_flight,
                settings.pending_max,
                10,
                f"consumers hold {in_flight} messages",
                "Look for consumers that do not settle: GET /api/v1/messages/pending.",
            ),
            vitals.most(
                "lag",
                oldest_age_s,
                settings.lag_age_s_max,
                15,
                f"the oldest message not acked is {oldest_age_s:.1f} s old",
                "Add consumers to the subscriptions that lag: GET /api/v1/metrics/consumers.",
            ),
        ]
        return [*found, *(self._store_dimension(check) for check in self._broker.health().checks)]

    def _store_dimension(self, check: Check) -> Dimension:
        weights = {"journal": 20, "data": 10, "maintenance": 5}
        return vitals.sound(check.name, check.status, weights.get(check.name, 0), check.message, "")

    # The whole way.

    async def deep(self, timeout_s: float = DEEP_TIMEOUT_S) -> DeepReport:
        """Sends a message the whole way and back; one at a time."""
        start_s = self._clock.monotonic_s()
        steps: list[Step] = []
        try:
            async with asyncio.timeout(timeout_s):
                async with self._deep:
                    await self._send_and_receive(steps)
        except TimeoutError:
            text = f"not done within {timeout_s:g} s"
            steps.append(Step(name="time", status=Status.CRITICAL, seconds=timeout_s, message=text))
        except InMaintenance as error:
            steps.append(Step(name="publish", status=Status.DEGRADED, seconds=0.0, message=error.message))
        except SparrowError as error:
            name = ("prepare", "publish", "receive", "read back", "ack")[min(len(steps), 4)]
            steps.append(Step(name=name, status=Status.CRITICAL, seconds=0.0, message=str(error)))
        statuses = [step.status for step in steps]
        worst = next((s for s in (Status.CRITICAL, Status.DEGRADED) if s in statuses), Status.HEALTHY)
        seconds = round(self._clock.monotonic_s() - start_s, 6)
        return DeepReport(status=worst, seconds=seconds, steps=tuple(steps))

    async def _send_and_receive(self, steps: list[Step]) -> None:
        broker, data = self._broker, chance.name().encode()
        subscription = await self._timed(steps, "prepare", self._prepare())
        receipt = await self._timed(
            steps, "publish", broker.publish(NAME, data, priority_class=PublisherClass.CRITICAL.value)
        )
        await self._timed(steps, "receive", self._receive(subscription, receipt.message_id))
        read = await self._timed(steps, "read back", broker.read(NAME, offset=receipt.offset, max_messages=1))
        if not read or read[0].data != data:
            text = "the log gives back something else than was published"
            steps.append(Step(name="compare", status=Status.CRITICAL, seconds=0.0, message=text))
        await self._timed(steps, "ack", subscription.flush())

    async def _prepare(self) -> Any:
        with contextlib.suppress(TopicExists):
            await self._broker.create_topic(NAME, partitions=1, retention_messages=KEPT_MESSAGES)
        return await self._broker.subscribe(NAME, NAME)

    async def _receive(self, subscription: Any, message_id: str) -> None:
        """Earlier ones, of check-ups that were given up, are acked on the way."""
        while True:
            messages = await subscription.pull(100, timeout_s=DEEP_TIMEOUT_S)
            await subscription.ack(messages)
            if any(message.id == message_id for message in messages):
                return

    async def _timed(self, steps: list[Step], name: str, work: Awaitable[T]) -> T:
        start_s = self._clock.monotonic_s()
        found = await work
        seconds = round(self._clock.monotonic_s() - start_s, 6)
        steps.append(Step(name=name, status=Status.HEALTHY, seconds=seconds))
        return found
