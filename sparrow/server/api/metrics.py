"""Metrics of the HTTP API: for Prometheus, and as JSON with what was true for the last hour or day."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sparrow.broker.counts import Counted
from sparrow.broker.figures import MODES, SubscriptionFigures
from sparrow.broker.telemetry import CATEGORIES, WHOLE, WINDOWS_S, Labelled
from sparrow.kernel.pattern import parse_pattern
from sparrow.kernel.series import MINUTE_S, MINUTES, RAW_SPAN_S, Point
from sparrow.model.access import Action
from sparrow.model.errors import InvalidArgument
from sparrow.server import exposition
from sparrow.server.api.calls import call_limits
from sparrow.server.api.family import Answer, Api, Page, Req, answer, paged, query, timestamp
from sparrow.server.api.operation import described
from sparrow.server.api.routing import get

TAG = "Metrics"
DURATION_S_MAX = MINUTES * MINUTE_S
POINTS_MAX = 300
"""Of one series in one answer; neighbours are put together beyond."""
_DURATION = re.compile(r"(\d{1,9})(s|m|h|d)?\Z")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class MetricsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What, and since when."""

    category: str | None = None
    """queue_depth, throughput, consumer_lag, errors, resources or rebalancing; all of them when not given."""
    duration: str = "5m"
    """As in 90s, 15m, 1h or 24h; a plain number is seconds."""
    name: str | None = None
    """Of one topic or subscription; without it the broker's own, and those of a category."""
    limit: int = 100
    """Series at most."""


class TopicsQuery(Page, forbid_unknown_fields=True):
    """Which topics."""

    topic_pattern: str | None = None


class ConsumersQuery(Page, forbid_unknown_fields=True):
    """Which group."""

    group_name: str | None = None


class SeriesShown(msgspec.Struct, frozen=True, kw_only=True):
    """One number over time."""

    metric: str
    name: str
    """A topic or a subscription; empty for the broker."""
    points: list[Point]
    """Unix seconds, mean, least and most of the span, as an array."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second, smoothed over 1, 5 and 15 minutes."""

    one_minute: float
    five_minutes: float
    fifteen_minutes: float


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The broker in figures."""

    timestamp: str
    uptime_s: float
    totals: dict[str, int]
    """Messages since the broker opened; published ones since ever."""
    rates: dict[str, Rates]
    current: dict[str, float]
    resolution_s: int
    """Between two points of a series, unless some were put together."""
    series: list[SeriesShown]


class TopicMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One topic."""

    topic: str
    published: int
    kept: int
    depth: int
    subscriptions: int
    flow_mode: str
    rejected: int
    dropped: int
    throughput: Rates | None
    """Nothing for a topic beyond monitoring.labels_max."""


class ConsumerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription and its group."""

    group: str
    pattern: str
    lag: int
    oldest_age_s: float
    level: str
    in_flight: int
    ready: int
    is_paused: bool
    members: int
    generation: int
    rebalances: int
    last_rebalance_s: float
    counts: dict[str, int]


class TopicMetricsList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of topics."""

    topics: list[TopicMetrics]
    total: int


class ConsumerMetricsList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of subscriptions."""

    consumers: list[ConsumerMetrics]
    total: int


def routes(api: Api) -> list[Any]:
    """The metrics of one broker."""
    telemetry = api.broker.telemetry
    limits = call_limits(api.settings)

    @get(
        "/metrics",
        opt=described(
            "Everything, for Prometheus", tag=TAG, answers={200: "text/plain; version=0.0.4; charset=utf-8"}
        ),
    )
    async def prometheus(request: Req) -> Answer:
        api.require(request, Action.READ)
        text = await exposition.render(telemetry)
        return Answer(text, 200, {"Cache-Control": "no-store"}, exposition.CONTENT_TYPE)

    @get(
        "/api/v1/metrics",
        opt=described(
            "The broker in figures, and over time",
            tag=TAG,
            query=MetricsQuery,
            answers={200: MetricsSnapshot},
        ),
    )
    async def metrics(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        asked = query(request, MetricsQuery)
        duration_s = _duration_s(asked.duration)
        wanted = _metrics_of(asked.category)
        if not 1 <= asked.limit <= 1000:
            raise InvalidArgument(f"limit is from 1 to 1000, not {asked.limit}")
        seen = await telemetry.look(is_new=True)
        keys = [
            (metric, name)
            for metric, name in telemetry.series.names()
            if metric in wanted and _is_chosen(name, asked)
        ]
        series = [
            SeriesShown(
                metric=metric,
                name=name,
                points=telemetry.points((metric, name), duration_s, POINTS_MAX),
            )
            for metric, name in keys[: asked.limit]
        ]
        shown = MetricsSnapshot(
            timestamp=timestamp(seen.figures.at_us, "milliseconds") or "",
            uptime_s=round(telemetry.uptime_s, 3),
            totals={"published": seen.published, **seen.counted._asdict()},
            rates={name: _rates(found) for name, found in seen.totals.items()},
            current=_current(seen),
            resolution_s=telemetry.series.raw_s if duration_s <= RAW_SPAN_S else MINUTE_S,
            series=series,
        )
        return answer(shown, headers={"X-Total-Count": str(len(keys)), "Cache-Control": "no-store"})

    def _current(seen: Labelled) -> dict[str, float]:
        steward, figures = telemetry.steward, seen.figures
        return {
            "topics": len(figures.topics),
            "subscriptions": len(figures.subscriptions),
            "in_flight": figures.in_flight,
            "lag": sum(each.lag for each in figures.subscriptions),
            "oldest_age_s": figures.oldest_age_s,
            "connections": telemetry.connections,
            "memory_bytes": steward.usage.memory_bytes,
            "disk_free_bytes": steward.space.free_bytes,
            "journal_bytes": figures.state.journal_bytes,
            "lake_bytes": figures.state.lake_bytes,
            "tasks": figures.tasks,
        }

    @get(
        "/api/v1/metrics/topics",
        opt=described("Topics in figures", tag=TAG, query=TopicsQuery, answers={200: TopicMetricsList}),
    )
    async def topics(request: Req) -> Answer:
        principal = api.principal(request)
        api.access.require_some(principal, Action.READ, limit=limits.read)
        asked = query(request, TopicsQuery)
        pattern = None if asked.topic_pattern is None else parse_pattern(asked.topic_pattern)
        seen = await telemetry.look(is_new=True)
        found = [
            topic
            for topic in seen.figures.topics
            if (pattern is None or pattern.matches(topic.name))
            and api.access.may(principal, Action.READ, topic.name)
        ]

        def show(topic: Any) -> TopicMetrics:
            rates = seen.rates.get(topic.name)
            return TopicMetrics(
                topic=topic.name,
                published=topic.published,
                kept=topic.kept,
                depth=topic.depth,
                subscriptions=topic.subscriptions,
                flow_mode=MODES[topic.mode],
                rejected=topic.rejected,
                dropped=topic.dropped,
                throughput=None if rates is None else _rates(rates),
            )

        return paged(request, "topics", found, asked, show)

    @get(
        "/api/v1/metrics/consumers",
        opt=described(
            "Subscriptions in figures",
            tag=TAG,
            query=ConsumersQuery,
            answers={200: ConsumerMetricsList},
            errors=(404,),
        ),
    )
    async def consumers(request: Req) -> Answer:
        principal = api.principal(request)
        api.access.require_some(principal, Action.READ, limit=limits.read)
        asked = query(request, ConsumersQuery)
        if asked.group_name is not None:
            await api.broker.subscription(asked.group_name)
        seen = await telemetry.look(is_new=True)
        found = [
            each
            for each in seen.figures.subscriptions
            if asked.group_name in (None, each.name) and api.access.may(principal, Action.READ, each.pattern)
        ]
        return paged(request, "consumers", found, asked, _consumer)

    return [prometheus, metrics, topics, consumers]


def _consumer(each: SubscriptionFigures) -> ConsumerMetrics:
    return ConsumerMetrics(
        group=each.name,
        pattern=each.pattern,
        lag=each.lag,
        oldest_age_s=round(each.oldest_age_s, 3),
        level=each.level,
        in_flight=each.in_flight,
        ready=each.ready,
        is_paused=each.is_paused,
        members=each.members,
        generation=each.generation,
        rebalances=each.rebalances,
        last_rebalance_s=each.rebalance_s,
        counts=dict(zip(Counted._fields, each.counted, strict=True)),
    )


def _rates(found: tuple[float, ...]) -> Rates:
    values = dict(zip(WINDOWS_S, (round(each, 3) for each in found), strict=True))
    return Rates(one_minute=values["1m"], five_minutes=values["5m"], fifteen_minutes=values["15m"])


def _is_chosen(name: str, asked: MetricsQuery) -> bool:
    if asked.name is not None:
        return name == asked.name
    return asked.category is not None or name == WHOLE


def _metrics_of(category: str | None) -> frozenset[str]:
    if category is None:
        return frozenset(metric for metrics in CATEGORIES.values() for metric in metrics)
    if category not in CATEGORIES:
        raise InvalidArgument(
            f"there is no category {category[:100]!r}", hint=f"It may be one of: {', '.join(CATEGORIES)}."
        )
    return frozenset(CATEGORIES[category])


def _duration_s(text: str) -> int:
    match = _DURATION.match(text)
    seconds = int(match[1]) * _UNITS[match[2] or "s"] if match else 0
    if not 1 <= seconds <= DURATION_S_MAX:
        raise InvalidArgument(
            f"duration {text[:40]!r} is not a time of up to a day", hint="Write it as 90s, 15m, 1h or 24h."
        )
    return seconds
