"""How far subscriptions are behind: counts by the cursor, ages by the log, trends by the meters.

Once a second some hundred subscriptions are looked at, in turns when there are more, and those that sample
by their lag always. Whoever asks for a report gets it as of now. A subscription that is done and was never
behind has no meter and costs next to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.deadletters import is_unseen
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.broker.watch import Watch
from sparrow.kernel.exchange import Lag, total
from sparrow.kernel.lag import LagLevel, LagReport, TopicLag, worst
from sparrow.model.errors import DataDamaged, NotFound, OffsetOutOfRange, SparrowError
from sparrow.model.flow import LagLimits
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic
from sparrow.store.ports import Store

TICK_S = 1.0
AT_ONCE = 250
"""Subscriptions looked at in one tick: some 10 ms of work."""
_TIMES_MAX = 10_000
_LIMITS = LagLimits()


class Lags:
    """The eye on all subscriptions."""

    def __init__(self, store: Store, topics: Topics, subscriptions: Subscriptions, clock: Clock) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._clock = clock
        self._times: dict[tuple[StreamId, int], int] = {}
        self._queue: list[Courier] = []
        self._task: asyncio.Task[None] | None = None
        self._log = logs.get("lag")

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look_for_ever())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # Counts and ages.

    def of(self, courier: Courier, streams: Sequence[StreamId] | None = None) -> list[Lag]:
        """How far a subscription is behind in its streams, or in some of them."""
        ends = {}
        for stream in courier.delivery.streams if streams is None else streams:
            if self._topics.find(stream.topic_id) is not None:
                ends[stream] = self._store.bounds(stream).end_offset
        return courier.delivery.lag(ends)

    def of_topic(self, topic: Topic) -> list[tuple[Courier, list[Lag]]]:
        """How far each subscription of a topic is behind in it; those that hold dead letters left out."""
        readers = {
            c.subscription.id: c for stream in topic.streams for c in self._subscriptions.readers(stream)
        }
        found = [courier for courier in readers.values() if not is_unseen(courier.subscription.name)]
        return [(courier, self.of(courier, topic.streams)) for courier in found]

    async def oldest_age_us(self, lags: Sequence[Lag]) -> int:
        """The age of the oldest message that is not done; 0 when all are."""
        times = [await self.published_at(lag.stream, lag.oldest_offset) for lag in lags if lag.messages > 0]
        now_us = self._clock.now_us()
        return max(0, now_us - min(times, default=now_us))

    async def published_at(self, stream: StreamId, offset: int | None) -> int:
        """When a message was published; now, when the log no longer knows."""
        try:
            start = max(offset or 0, self._store.bounds(stream).start_offset)
            known = self._times.get((stream, start))
            if known is not None:
                return known
            read = await self._store.read(stream, start, 1)
        except (OffsetOutOfRange, DataDamaged, NotFound):
            return self._clock.now_us()
        if not read:
            return self._clock.now_us()
        time_us = int(read[0].batch.column("publish_time")[0].value)
        if len(self._times) >= _TIMES_MAX:
            self._times.clear()
        self._times[stream, start] = time_us
        return time_us

    # Reports.

    async def report(self, courier: Courier) -> LagReport:
        """All about one subscription, as of now."""
        meter = await self._observe(courier)
        return meter

    async def consumers(self, courier: Courier) -> dict[str, LagReport]:
        """The same of each of its consumers: the depth is what it holds."""
        await self._observe(courier)
        now_us, found = self._clock.now_us(), {}
        watch = _watch(courier)
        for consumer, meter in watch.consumers().items():
            published_us = watch.oldest_held_us(consumer)
            age_us = 0 if published_us is None else max(0, now_us - published_us)
            meter.observe(courier.delivery.in_flight_of(consumer), age_us, now_us)
            found[consumer] = meter.report(now_us)
        return found

    async def all(self) -> dict[str, LagReport]:
        """The report of every subscription, by name."""
        shown = [c for c in self._subscriptions if not is_unseen(c.subscription.name)]
        return {courier.subscription.name: await self.report(courier) for courier in shown}

    async def report_topic(self, topic: Topic) -> TopicLag:
        """A topic: as far behind as its slowest subscription."""
        found = self.of_topic(topic)
        depths = {courier.subscription.name: total(lags) for courier, lags in found}
        ages = [await self.oldest_age_us(lags) for _, lags in found]
        reports = {courier.subscription.name: await self.report(courier) for courier, _ in found}
        return TopicLag(
            topic=topic.name,
            level=worst([report.level for report in reports.values()]),
            depth=max(depths.values(), default=0),
            oldest_age_s=max(ages, default=0) / 1e6,
            slowest=max(depths, key=depths.__getitem__, default=None),
            subscriptions=reports,
        )

    # Looking.

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for courier in self._due():
                try:
                    await self._look(courier)
                except SparrowError as error:
                    self._log.warning("lag-not-observed", str(error), subscription=courier.subscription.name)
                except Exception as error:  # noqa: BLE001 - a task's root: it reports and goes on
                    self._log.error("lag-not-observed", repr(error), subscription=courier.subscription.name)

    def _due(self) -> list[Courier]:
        """The next ones in turn, and those that sample."""
        if not self._queue:
            self._queue = [c for c in self._subscriptions if not is_unseen(c.subscription.name)]
        due, self._queue = self._queue[:AT_ONCE], self._queue[AT_ONCE:]
        if self._queue:
            due += [c for c in self._queue if c.subscription.policy.sample is not None]
        return [courier for courier in due if not courier.is_stopped]

    async def _look(self, courier: Courier) -> None:
        watch = courier.watch
        before = LagLevel.OK if watch is None or watch.meter is None else watch.meter.level
        is_at_work = (watch is not None and watch.is_busy) or before is not LagLevel.OK
        if not is_at_work and courier.subscription.policy.sample is None and total(self.of(courier)) == 0:
            return
        report = await self._observe(courier)
        if report.level is not before:
            self._tell(courier, before, report)
        if courier.group is not None and report.levels.get("assignment") is LagLevel.CRITICAL:
            courier.group.lag_critical()

    async def _observe(self, courier: Courier) -> LagReport:
        policy, watch = courier.subscription.policy, _watch(courier)
        lags = self.of(courier)
        age_us = await self.oldest_age_us(lags)
        now_us = self._clock.now_us()
        meter = watch.tell(policy.lag or _LIMITS, now_us)
        meter.published(self._published(watch, courier), now_us)
        meter.observe(total(lags), age_us, now_us)
        if policy.sample is not None or watch.sampler is not None:
            watch.sample(policy.sample, age_us, now_us)
        return meter.report(now_us)

    def _published(self, watch: Watch, courier: Courier) -> int:
        """What came into its streams since the last look."""
        streams = [s for s in courier.delivery.streams if self._topics.find(s.topic_id) is not None]
        ends = {stream: self._store.bounds(stream).end_offset for stream in streams}
        count = sum(end - watch.ends.get(stream, end) for stream, end in ends.items())
        watch.ends = ends
        return count

    def _tell(self, courier: Courier, before: LagLevel, report: LagReport) -> None:
        tell = self._log.info if report.level is LagLevel.OK else self._log.warning
        metrics = [name for name, level in report.levels.items() if level is report.level]
        tell(
            "lag-level-changed", "", subscription=courier.subscription.name, before=before.value,
            level=report.level.value, metrics=metrics, depth=report.depth,
            oldest_age_s=round(report.oldest_age_s, 3),
        )  # fmt: skip


def _watch(courier: Courier) -> Watch:
    if courier.watch is None:
        courier.watch = Watch()
    return courier.watch
