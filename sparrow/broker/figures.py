"""The broker in figures: what is true of topics, subscriptions and the whole at one moment.

Nothing is counted for this beyond what the broker knows anyhow: offsets, cursors, leases, the meters of lag
and flow. Collecting takes some microseconds a topic and subscription, in slices with the event loop's other
work between them, so the figures of many thousands are of nearly one moment and hold nobody up.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from sparrow.broker.clock import Clock
from sparrow.broker.counts import NOTHING, Counted
from sparrow.broker.courier import Courier
from sparrow.broker.deadletters import is_unseen
from sparrow.broker.flow import Flow
from sparrow.broker.groups import GroupRunner
from sparrow.broker.lags import Lags
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel.lag import LagLevel
from sparrow.model.errors import NotFound
from sparrow.model.topic import Topic
from sparrow.store.ports import Store, StoreState

SLICE_S = 0.003
"""How long collecting keeps the loop to itself."""
MODES = ("normal", "warning", "throttled")


class TopicFigures(NamedTuple):
    """One topic."""

    id: int
    name: str
    published: int
    """Messages ever published: the sum of the ends of its partitions."""
    kept: int
    """Messages that can be read."""
    depth: int
    """Messages that its slowest subscription has not acked."""
    subscriptions: int
    mode: int
    """Of its flow control, as a place in ``MODES``."""
    rejected: int
    dropped: int
    """What flow control refused and threw away."""


class SubscriptionFigures(NamedTuple):
    """One subscription."""

    id: int
    name: str
    pattern: str
    lag: int
    oldest_age_s: float
    """As of the last look at it, a few seconds ago at most."""
    level: str
    in_flight: int
    ready: int
    """About how many could be handed over now."""
    counted: Counted
    is_paused: bool
    has_members: bool
    members: int
    generation: int
    rebalances: int
    rebalance_s: float
    """How long the last one took."""


class Figures(NamedTuple):
    """All of it."""

    at_us: int
    topics: list[TopicFigures]
    subscriptions: list[SubscriptionFigures]
    state: StoreState
    tasks: int
    slice_s: float
    """The longest that collecting kept the loop."""
    seconds: float
    """How long collecting took, with all that ran between."""

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.subscriptions)

    @property
    def oldest_age_s(self) -> float:
        return max((each.oldest_age_s for each in self.subscriptions), default=0.0)


class Collector:
    """Looks at the parts of a broker."""

    def __init__(
        self, store: Store, topics: Topics, subscriptions: Subscriptions, lags: Lags, flow: Flow, clock: Clock
    ) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._lags = lags
        self._flow = flow
        self._clock = clock

    async def collect(self) -> Figures:
        """The figures of now."""
        pause = Pause(self._clock)
        depths: dict[int, int] = {}
        readers: dict[int, int] = {}
        subscriptions = []
        for courier in list(self._subscriptions):
            await pause.now_and_then()
            if not courier.is_stopped and not is_unseen(courier.subscription.name):
                subscriptions.append(self._subscription(courier, depths, readers))
        topics = []
        for topic in list(self._topics):
            await pause.now_and_then()
            if not is_unseen(topic.name) and self._topics.find(topic.id) is not None:
                topics.append(self._topic(topic, depths, readers))
        state, tasks = self._store.state(), len(asyncio.all_tasks())
        return Figures(
            self._clock.now_us(), topics, subscriptions, state, tasks, pause.longest_s, pause.total_s
        )

    def _subscription(
        self, courier: Courier, depths: dict[int, int], readers: dict[int, int]
    ) -> SubscriptionFigures:
        subscription, watch, total = courier.subscription, courier.watch, 0
        behind: dict[int, int] = {}
        for lag in self._lags.of(courier):
            total += lag.messages
            topic_id = lag.stream.topic_id
            behind[topic_id] = behind.get(topic_id, 0) + lag.messages
        for topic_id, messages in behind.items():
            readers[topic_id] = readers.get(topic_id, 0) + 1
            depths[topic_id] = max(depths.get(topic_id, 0), messages)
        meter = None if watch is None else watch.meter
        group = courier.group if isinstance(courier.group, GroupRunner) else None
        info = None if group is None else group.pulse
        return SubscriptionFigures(
            id=subscription.id,
            name=subscription.name,
            pattern=subscription.pattern,
            lag=total,
            oldest_age_s=meter.oldest_age_us / 1e6 if meter is not None and total else 0.0,
            level=LagLevel.OK.value if meter is None else meter.level.value,
            in_flight=courier.delivery.in_flight,
            ready=courier.delivery.deliverable,
            counted=NOTHING if watch is None else watch.counts.read(),
            is_paused=subscription.is_paused,
            has_members=info is not None and info.members > 0,
            members=0 if info is None else info.members,
            generation=0 if info is None else info.generation,
            rebalances=0 if info is None else info.rebalances,
            rebalance_s=0.0 if info is None else info.last_rebalance_s,
        )

    def _topic(self, topic: Topic, depths: dict[int, int], readers: dict[int, int]) -> TopicFigures:
        published = kept = 0
        for stream in topic.streams:
            try:
                bounds = self._store.bounds(stream)
            except NotFound:
                continue
            published += bounds.end_offset
            kept += bounds.end_offset - bounds.start_offset
        flow = self._flow.counts(topic)
        return TopicFigures(
            id=topic.id,
            name=topic.name,
            published=published,
            kept=kept,
            depth=depths.get(topic.id, 0),
            subscriptions=readers.get(topic.id, 0),
            mode=0 if flow is None else MODES.index(flow.mode),
            rejected=0 if flow is None else flow.rejected,
            dropped=0 if flow is None else flow.dropped,
        )


class Pause:
    """Lets others run when it is time to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = self._since_s = clock.monotonic_s()
        self.longest_s = 0.0

    @property
    def total_s(self) -> float:
        return self._clock.monotonic_s() - self._start_s

    async def now_and_then(self) -> None:
        kept_s = self._clock.monotonic_s() - self._since_s
        if kept_s > self.longest_s:
            self.longest_s = kept_s
        if kept_s > SLICE_S:
            await asyncio.sleep(0)
            self._since_s = self._clock.monotonic_s()
