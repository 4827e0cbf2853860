"""Telemetry: the broker's figures over time, for whoever watches it.

Every ``monitoring.interval_s`` all figures are collected (figures.py); rates over 1, 5 and 15 minutes follow
from them, and a bounded number of series is kept in memory (kernel/series.py): samples for an hour, minutes
for a day. They are gone after a restart; a Prometheus that scrapes ``/metrics`` keeps them longer. A scrape
gets figures that are not older than a second.

Topics and subscriptions beyond ``monitoring.labels_max`` have no label of their own and are summed up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.counts import Counted
from sparrow.broker.figures import Collector, Figures, Pause, SubscriptionFigures, TopicFigures
from sparrow.broker.flow import Flow
from sparrow.broker.lags import Lags
from sparrow.broker.maintenance import Maintenance
from sparrow.broker.steward import Steward
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel.labels import Labels, Remainder
from sparrow.kernel.series import Key, Point, SeriesSet
from sparrow.kernel.trend import SECOND_US, Rate
from sparrow.model.connection import Door
from sparrow.model.monitoring import MonitoringSettings
from sparrow.store.ports import Store

WINDOWS_S = {"1m": 60, "5m": 300, "15m": 900}
FRESH_US = SECOND_US
"""Figures that are younger serve another scrape too."""
WHOLE = ""
"""The label of what is true of the broker as a whole."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "queue_depth": ("topic.depth", "broker.in_flight"),
    "throughput": (
        "messages.published_per_s",
        "messages.delivered_per_s",
        "messages.acked_per_s",
        "topic.published_per_s",
        "subscription.acked_per_s",
    ),
    "consumer_lag": ("subscription.lag", "subscription.oldest_age_s"),
    "errors": (
        "messages.nacked_per_s",
        "messages.timed_out_per_s",
        "messages.expired_per_s",
        "messages.dead_lettered_per_s",
        "messages.rejected_per_s",
    ),
    "resources": (
        "broker.memory_bytes",
        "broker.disk_free_bytes",
        "broker.connections",
        "broker.journal_bytes",
        "broker.open_files",
        "broker.tasks",
    ),
    "rebalancing": ("groups.rebalances_per_s", "groups.members"),
}
"""The metrics that have series, by category."""


class Extra(NamedTuple):
    """A figure that another part of the broker adds to ``/metrics``."""

    name: str
    help: str
    kind: str
    """``gauge`` or ``counter``; the name of a counter ends in ``_total``."""
    samples: Sequence[tuple[dict[str, str], float]]
    """Labels and value; whoever adds them bounds their number."""


class Labelled(NamedTuple):
    """Figures as they are shown: those with a label, and the sums of all others."""

    figures: Figures
    topics: list[TopicFigures]
    subscriptions: list[SubscriptionFigures]
    other_topics: TopicFigures | None
    other_subscriptions: SubscriptionFigures | None
    rates: dict[str, tuple[float, ...]]
    """Messages published per second over 1, 5 and 15 minutes, by topic."""
    totals: dict[str, tuple[float, ...]]
    """The same of the broker: published, delivered, acked."""
    counted: Counted
    """Over all subscriptions, those that are gone included."""
    published: int


class Telemetry:
    """See the module's text."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        subscriptions: Subscriptions,
        lags: Lags,
        flow: Flow,
        maintenance: Maintenance,
        steward: Steward,
        settings: MonitoringSettings,
        clock: Clock,
    ) -> None:
        self.doors: list[Door] = []
        """The listeners."""
        self.sources: list[Callable[[], Iterable[Extra]]] = []
        """Other parts that have figures of their own."""
        self.maintenance = maintenance
        self.steward = steward
        self.started_at_s = clock.monotonic_s()
        self.series = SeriesSet(settings.interval_s, settings.series_max)
        self._settings = settings
        self._clock = clock
        self._collector = Collector(store, topics, subscriptions, lags, flow, clock)
        self._topic_labels = Labels(settings.labels_max)
        self._subscription_labels = Labels(settings.labels_max)
        self._other_topics = Remainder(3)
        self._other_subscriptions = Remainder(len(Counted._fields))
        self._all_topics = Remainder(3)
        self._all_subscriptions = Remainder(len(Counted._fields))
        self._rates: dict[str, Meters] = {}
        self._last: Labelled | None = None
        self._collecting: asyncio.Task[Labelled] | None = None
        self._task: asyncio.Task[None] | None = None
        self._log = logs.get("telemetry")

    @property
    def uptime_s(self) -> float:
        """Since the broker was opened."""
        return self._clock.monotonic_s() - self.started_at_s

    @property
    def connections(self) -> int:
        """Over all listeners."""
        return sum(door.connections for door in self.doors)

    def start(self) -> None:
        """Look regularly from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look_for_ever(), name="telemetry")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._collecting is not None:
            await asyncio.gather(self._collecting, return_exceptions=True)

    async def look(self, *, is_new: bool = False) -> Labelled:
        """Figures that are not older than a second, or than this call. All who ask at once get the same."""
        if is_new and self._collecting is not None:
            await asyncio.wait([self._collecting])  # Begun before this call.
        elif not is_new and self._last is not None and self._age_us(self._last) < FRESH_US:
            return self._last
        if self._collecting is None:
            self._collecting = asyncio.get_running_loop().create_task(self._collect(), name="figures")
            self._collecting.add_done_callback(self._collected)
        return await asyncio.shield(self._collecting)

    def _age_us(self, seen: Labelled) -> int:
        return self._clock.now_us() - seen.figures.at_us

    def points(self, key: Key, duration_s: int, count_max: int = 300) -> list[Point]:
        """The last of one series."""
        return self.series.points(key, duration_s, self._clock.now_us() / 1e6, count_max)

    # Looking.

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.record(await self.look())
            except Exception as error:  # noqa: BLE001 - a task's root: it reports and goes on
                self._log.error("figures-not-collected", repr(error))
            await asyncio.sleep(self._settings.interval_s)

    def _collected(self, task: asyncio.Task[Labelled]) -> None:
        self._collecting = None
        if not task.cancelled():
            task.exception()  # Whoever waits has it.

    async def _collect(self) -> Labelled:
        figures = await self._collector.collect()
        self._last = await self._label(figures)
        return self._last

    async def _label(self, figures: Figures) -> Labelled:
        pause = Pause(self._clock)
        topics, subscriptions = figures.topics, figures.subscriptions
        self._topic_labels.update(sorted(each.id for each in topics))
        self._subscription_labels.update(sorted(each.id for each in subscriptions))
        own_topics = [each for each in topics if self._topic_labels.has(each.id)]
        own_subscriptions = [each for each in subscriptions if self._subscription_labels.has(each.id)]
        rest = [each for each in topics if not self._topic_labels.has(each.id)]
        rest_subscriptions = [each for each in subscriptions if not self._subscription_labels.has(each.id)]
        await pause.now_and_then()
        self._other_topics.update({each.id: _counters(each) for each in rest})
        self._other_subscriptions.update({each.id: each.counted for each in rest_subscriptions})
        self._all_topics.update({each.id: _counters(each) for each in topics})
        self._all_subscriptions.update({each.id: each.counted for each in subscriptions})
        published, rejected, _ = self._all_topics.totals
        counted = Counted(*self._all_subscriptions.totals)
        wholes = {
            "published": published,
            "rejected": rejected,
            **counted._asdict(),
            "rebalances": sum(each.rebalances for each in subscriptions),
        }
        now_us = figures.at_us
        rates = {}
        for topic in own_topics:
            await pause.now_and_then()
            rates[topic.name] = self._rate(f"topic:{topic.name}", topic.published, now_us)
        totals = {name: self._rate(f"all:{name}", value, now_us) for name, value in wholes.items()}
        for each in own_subscriptions:
            await pause.now_and_then()
            self._rate(f"subscription:{each.name}", each.counted.acked, now_us)
        self._forget(own_topics, own_subscriptions)
        return Labelled(
            figures=figures,
            topics=own_topics,
            subscriptions=own_subscriptions,
            other_topics=_other_topics(rest, self._other_topics.totals),
            other_subscriptions=_other_subscriptions(rest_subscriptions, self._other_subscriptions.totals),
            rates=rates,
            totals=totals,
            counted=counted,
            published=published,
        )

    def _rate(self, key: str, total: int, now_us: int) -> tuple[float, ...]:
        meters = self._rates.get(key)
        if meters is None:
            meters = self._rates[key] = Meters(total, now_us)
        return meters.observe(total, now_us)

    def _forget(self, topics: list[TopicFigures], subscriptions: list[SubscriptionFigures]) -> None:
        alive = {f"topic:{each.name}" for each in topics}
        alive |= {f"subscription:{each.name}" for each in subscriptions}
        gone = [key for key in self._rates if key not in alive and not key.startswith("all:")]
        for key in gone:
            del self._rates[key]

    # Series.

    async def record(self, seen: Labelled) -> None:
        """Adds a sample to every series."""
        now_s, pause = seen.figures.at_us / 1e6, Pause(self._clock)
        for key, value in list(self._samples(seen)):
            await pause.now_and_then()
            self.series.add(key, value, now_s)
        for metric in ("topic.depth", "topic.published_per_s"):
            self.series.keep(metric, {each.name for each in seen.topics})
        for metric in ("subscription.lag", "subscription.oldest_age_s", "subscription.acked_per_s"):
            self.series.keep(metric, {each.name for each in seen.subscriptions})

    def _samples(self, seen: Labelled) -> Iterable[tuple[Key, float]]:
        """Those of the broker first: when there is no room for all, it is not they that are left out."""
        recent = {name: self._rates[f"all:{name}"].sample() for name in seen.totals}
        for name, per_s in recent.items():
            noun = "groups" if name == "rebalances" else "messages"
            if name != "redelivered":
                yield (f"{noun}.{name}_per_s", WHOLE), per_s
        steward, figures = self.steward, seen.figures
        yield ("broker.in_flight", WHOLE), figures.in_flight
        yield ("broker.memory_bytes", WHOLE), steward.usage.memory_bytes
        yield ("broker.disk_free_bytes", WHOLE), steward.space.free_bytes
        yield ("broker.open_files", WHOLE), steward.usage.open_files
        yield ("broker.connections", WHOLE), self.connections
        yield ("broker.journal_bytes", WHOLE), figures.state.journal_bytes
        yield ("broker.tasks", WHOLE), figures.tasks
        yield ("groups.members", WHOLE), sum(each.members for each in figures.subscriptions)
        for topic in seen.topics:
            yield ("topic.depth", topic.name), topic.depth
            yield ("topic.published_per_s", topic.name), self._rates[f"topic:{topic.name}"].sample()
        for each in seen.subscriptions:
            yield ("subscription.lag", each.name), each.lag
            yield ("subscription.oldest_age_s", each.name), each.oldest_age_s
            per_s = self._rates[f"subscription:{each.name}"].sample()
            yield ("subscription.acked_per_s", each.name), per_s


class Meters:
    """How fast a counter grows: smoothed over the windows, and between two samples of its series."""

    __slots__ = ("_at_us", "_last", "_rates", "_sampled", "_sampled_at_us")

    def __init__(self, total: int, now_us: int) -> None:
        self._last = self._sampled = total
        self._at_us = self._sampled_at_us = now_us
        self._rates = [Rate(seconds * SECOND_US, now_us) for seconds in WINDOWS_S.values()]

    def observe(self, total: int, now_us: int) -> tuple[float, ...]:
        """The counter now; the rates after it."""
        if now_us > self._at_us:
            grown = max(0, total - self._last)
            self._last, self._at_us = total, now_us
            for rate in self._rates:
                rate.add(grown, now_us)
        return tuple(rate.per_s(now_us) for rate in self._rates)

    def sample(self) -> float:
        """By how much it grew in a second since the last sample."""
        passed_us, grown = self._at_us - self._sampled_at_us, self._last - self._sampled
        self._sampled, self._sampled_at_us = self._last, self._at_us
        return max(0, grown) * 1e6 / passed_us if passed_us > 0 else 0.0


def _counters(topic: TopicFigures) -> tuple[int, int, int]:
    return topic.published, topic.rejected, topic.dropped


def _other_topics(rest: list[TopicFigures], totals: Sequence[int]) -> TopicFigures | None:
    if not rest and not any(totals):
        return None
    return TopicFigures(
        id=0,
        name="_other",
        published=totals[0],
        kept=sum(each.kept for each in rest),
        depth=sum(each.depth for each in rest),
        subscriptions=sum(each.subscriptions for each in rest),
        mode=max((each.mode for each in rest), default=0),
        rejected=totals[1],
        dropped=totals[2],
    )


def _other_subscriptions(
    rest: list[SubscriptionFigures], totals: Sequence[int]
) -> SubscriptionFigures | None:
    if not rest and not any(totals):
        return None
    total: Any = lambda name: sum(getattr(each, name) for each in rest)  # noqa: E731
    return SubscriptionFigures(
        id=0,
        name="_other",
        pattern="_other",
        lag=total("lag"),
        oldest_age_s=max((each.oldest_age_s for each in rest), default=0.0),
        level="ok",
        in_flight=total("in_flight"),
        ready=total("ready"),
        counted=Counted(*totals),
        is_paused=False,
        has_members=any(each.has_members for each in rest),
        members=total("members"),
        generation=0,
        rebalances=total("rebalances"),
        rebalance_s=max((each.rebalance_s for each in rest), default=0.0),
    )
