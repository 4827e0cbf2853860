"""The broker's figures as Prometheus reads them.

``queue_depth``, ``consumer_lag`` and ``message_throughput`` are the names that queue.md §9 fixes; all others
begin with ``sparrow_`` and have base units. Labels are ``topic``, ``subscription`` and what is written here;
their number is bounded by ``monitoring.labels_max``, beyond which all are one, ``_other``.

The text is written here and not by prometheus-client, which takes ten times as long for some ten thousand
samples: the label of a topic or subscription is written once and used for all its families. It is done in a
thread, from figures that do not change any more. What is known of the process comes from that library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from sparrow.broker.counts import Counted
from sparrow.broker.figures import MODES, SubscriptionFigures, TopicFigures
from sparrow.broker.telemetry import WINDOWS_S, Extra, Labelled, Telemetry
from sparrow.kernel.degradation import ServiceLevel
from sparrow.store.synctimes import BOUNDS_S

CONTENT_TYPE = "text/plain; version=0.0.4"

TOPIC_GAUGES: dict[str, tuple[str, Callable[[TopicFigures], float]]] = {
    "queue_depth": ("Messages that the slowest subscription of a topic has not acked.", lambda t: t.depth),
    "sparrow_topic_messages": ("Messages that a topic keeps.", lambda t: t.kept),
    "sparrow_topic_subscriptions": ("Subscriptions that read a topic.", lambda t: t.subscriptions),
}
SUBSCRIPTION_GAUGES: dict[str, tuple[str, Callable[[SubscriptionFigures], float]]] = {
    "sparrow_lag_messages": ("Messages that a subscription has not acked.", lambda s: s.lag),
    "sparrow_oldest_unacked_age_seconds": ("Age of the oldest of them.", lambda s: s.oldest_age_s),
    "sparrow_in_flight_messages": ("Messages that consumers hold unsettled.", lambda s: s.in_flight),
}
GROUP_GAUGES: dict[str, tuple[str, Callable[[SubscriptionFigures], float]]] = {
    "sparrow_group_members": ("Members of a group.", lambda s: s.members),
    "sparrow_group_generation": ("The generation of a group.", lambda s: s.generation),
    "sparrow_rebalance_seconds": ("How long a group's last rebalance took.", lambda s: s.rebalance_s),
}
COUNTED: dict[str, str] = {
    "delivered": "Messages handed to consumers.",
    "redelivered": "Of these, the ones that had been handed over before.",
    "acked": "Messages acked.",
    "nacked": "Messages nacked.",
    "timed_out": "Messages whose lease ran out.",
    "expired": "Messages whose time to live passed.",
    "dead_lettered": "Messages moved to a dead-letter topic.",
}

Sample = tuple[str, float]
"""Labels, as they are written, and a value."""


class Family(NamedTuple):
    """One metric."""

    name: str
    kind: str
    """Empty for a part of the family before it."""
    help: str
    samples: Iterable[Sample]


async def render(telemetry: Telemetry) -> bytes:
    """The text of a scrape."""
    seen = await telemetry.look()
    others = [*_house(telemetry, seen), *(_extra(e) for source in telemetry.sources for e in source())]
    return await asyncio.to_thread(_text, seen, others)


def _text(seen: Labelled, others: Sequence[Family]) -> bytes:
    from prometheus_client import CollectorRegistry, ProcessCollector  # Megabytes that an idle broker saves.
    from prometheus_client.exposition import generate_latest

    families = [*_topics(seen), *_subscriptions(seen), *others]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return "".join(_lines(families)).encode() + generate_latest(registry)


def _lines(families: Iterable[Family]) -> Iterator[str]:
    for name, kind, text, samples in families:
        if kind:
            shown = name.removesuffix("_bucket")
            yield f"# HELP {shown} {text}\n# TYPE {shown} {kind}\n"
        for labels, value in samples:
            yield f"{name}{labels} {value if type(value) is int else _number(value)}\n"


def _number(value: float) -> str:
    return repr(float(value))


def _labels(**given: str) -> str:
    """``{topic="orders"}``."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in given.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# What there is.


def _topics(seen: Labelled) -> Iterator[Family]:
    found = [*seen.topics, *([seen.other_topics] if seen.other_topics else [])]
    topics = [(_labels(topic=topic.name), topic) for topic in found]
    for name, (text, value) in TOPIC_GAUGES.items():
        yield Family(name, "gauge", text, [(labels, value(topic)) for labels, topic in topics])
    yield Family(
        "sparrow_messages_published_total",
        "counter",
        "Messages ever published to a topic.",
        [(labels, topic.published) for labels, topic in topics],
    )
    # Most topics have no limits, so these are told of those that had to do with them.
    slowed = [(labels, topic) for labels, topic in topics if topic.mode or topic.rejected or topic.dropped]
    modes = ", ".join(f"{number} {mode}" for number, mode in enumerate(MODES))
    yield Family(
        "sparrow_flow_mode",
        "gauge",
        f"How a topic treats its publishers: {modes}.",
        [(labels, topic.mode) for labels, topic in slowed],
    )
    yield Family(
        "sparrow_messages_rejected_total",
        "counter",
        "Messages that flow control refused.",
        [(labels, topic.rejected) for labels, topic in slowed],
    )
    yield Family(
        "sparrow_messages_dropped_total",
        "counter",
        "Messages that flow control gave up.",
        [(labels, topic.dropped) for labels, topic in slowed],
    )
    rates = [
        (_labels(topic=name, window=window), per_s)
        for name, found_rates in seen.rates.items()
        for window, per_s in zip(WINDOWS_S, found_rates, strict=True)
    ]
    yield Family("message_throughput", "gauge", "Messages published per second, smoothed.", rates)


def _subscriptions(seen: Labelled) -> Iterator[Family]:
    found = [*seen.subscriptions, *([seen.other_subscriptions] if seen.other_subscriptions else [])]
    lags = [(_labels(topic=each.pattern, consumer_group=each.name), each.lag) for each in found]
    text = "Messages that a group has not acked; the topic is what it subscribes to."
    yield Family("consumer_lag", "gauge", text, lags)
    named = [(_labels(subscription=each.name), each) for each in found]
    for name, (text, value) in SUBSCRIPTION_GAUGES.items():
        yield Family(name, "gauge", text, [(labels, value(each)) for labels, each in named])
    paused = [(labels, 1) for labels, each in named if each.is_paused]
    yield Family("sparrow_paused", "gauge", "1 for each subscription that is paused.", paused)
    for place, field in enumerate(Counted._fields):
        # One that never happened to a subscription is left out: most have no nacks and no dead letters.
        counts = [(labels, each.counted[place]) for labels, each in named if each.counted[place]]
        yield Family(f"sparrow_messages_{field}_total", "counter", COUNTED[field], counts)
    groups = [(labels, each) for labels, each in named if each.members or each.generation]
    for name, (text, value) in GROUP_GAUGES.items():
        yield Family(name, "gauge", text, [(labels, value(each)) for labels, each in groups])
    rebalances = [(labels, each.rebalances) for labels, each in groups]
    yield Family("sparrow_rebalances_total", "counter", "Rebalances of a group.", rebalances)


def _house(telemetry: Telemetry, seen: Labelled) -> Iterator[Family]:
    state, keeping, steward, figures = (
        seen.figures.state,
        telemetry.maintenance,
        telemetry.steward,
        seen.figures,
    )
    yield from _syncs(state.sync_buckets, state.sync_seconds)
    gauges: dict[str, tuple[str, float]] = {
        "sparrow_journal_writable": ("1 while the journal takes messages.", state.is_writable),
        "sparrow_journal_bytes": ("Bytes of journal files.", state.journal_bytes),
        "sparrow_journal_files": ("Journal files.", state.journal_files),
        "sparrow_journal_pending_bytes": ("Bytes that wait to be written.", state.pending_bytes),
        "sparrow_journal_unsealed_bytes": ("Finished files that are not sealed.", state.unsealed_bytes),
        "sparrow_lake_bytes": ("Bytes of sealed segments.", state.lake_bytes),
        "sparrow_lake_segments": ("Sealed segments.", state.segments),
        "sparrow_damaged_places": ("Places of the data known to be damaged.", len(state.damages)),
        "sparrow_maintenance_failing": ("1 while sealing or retention fails.", bool(keeping.complaint)),
        "sparrow_topics": ("Topics.", len(figures.topics)),
        "sparrow_subscriptions": ("Subscriptions.", len(figures.subscriptions)),
        "sparrow_uptime_seconds": ("Since the broker was opened.", telemetry.uptime_s),
        "sparrow_tasks": ("Asyncio tasks under way.", figures.tasks),
        "sparrow_memory_bytes": ("Memory of the process's own.", steward.usage.memory_bytes),
        "sparrow_memory_limit_bytes": ("Memory that it may use.", steward.memory_bytes_max),
        "sparrow_disk_free_bytes": ("Free space for data.", steward.space.free_bytes),
        "sparrow_disk_bytes": ("The disk that holds the data.", steward.space.total_bytes),
        "sparrow_series": ("Time series kept in memory.", len(telemetry.series)),
        "sparrow_scrape_collect_seconds": ("How long collecting took.", figures.seconds),
        "sparrow_scrape_blocked_seconds": ("The longest that it kept the event loop.", figures.slice_s),
    }
    for name, (text, value) in gauges.items():
        yield Family(name, "gauge", text, [("", float(value))])
    counters: dict[str, tuple[str, float]] = {
        "sparrow_journal_written_bytes_total": ("Bytes written to the journal.", state.written_bytes),
        "sparrow_sealed_messages_total": ("Messages moved to the lake.", keeping.sealed_messages),
        "sparrow_sealing_seconds_total": ("Time spent sealing.", keeping.sealed_seconds),
    }
    for name, (text, value) in counters.items():
        yield Family(name, "counter", text, [("", value)])
    doors = [(_labels(listener=door.listener), door.connections) for door in telemetry.doors]
    yield Family("sparrow_connections", "gauge", "Open connections.", doors)
    levels = [(_labels(level=each.value), int(each is steward.level)) for each in ServiceLevel]
    yield Family("sparrow_service_level", "gauge", "1 for what the broker still does.", levels)


def _syncs(counts: Sequence[int], seconds: float) -> Iterator[Family]:
    """A histogram: its parts have names of their own and one description."""
    total, samples = 0, []
    for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], counts, strict=False):
        total += count
        samples.append((_labels(le=bound), total))
    name, text = "sparrow_fsync_seconds", "How long syncs of the journal took."
    yield Family(f"{name}_bucket", "histogram", text, samples)
    yield Family(f"{name}_sum", "", "", [("", seconds)])
    yield Family(f"{name}_count", "", "", [("", total)])


def _extra(extra: Extra) -> Family:
    samples = [(_labels(**given) if given else "", value) for given, value in extra.samples]
    return Family(extra.name, extra.kind, extra.help, samples)
