"""Flow control: holds publishers back where a topic, a publisher or a token has limits.

The rules are in kernel/flow.py and kernel/quota.py. This shell does three things. It looks, five times a
second and only while some topic has watermarks, how far the slowest subscription of each such topic is
behind. It asks the rules about every publish, and lets those wait that must: first in the line of their own
quota, then in the line of their class and topic, so one topic never waits for another and nobody is overtaken
by their own kind. And it gives up old messages where ``drop_oldest`` says so, by a cumulative ack.

A topic without limits has no gate here, and costs its publishers one look into a dict.

What must not have holes is never thinned: under a producer's sequence or an idempotency key a publish stands
or falls with its first message, and what others would have lost is rejected instead. Hidden subscriptions,
which hold dead letters, slow nobody; paused ones count like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.lags import Lags
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.broker.trimming import Trimming
from sparrow.kernel.exchange import total
from sparrow.kernel.flow import Action, Cause, TopicFlow, Trim, Verdict
from sparrow.kernel.quota import Claim, PublisherLimits
from sparrow.model.errors import BrokerClosed, PublishRejected, RateLimited, SparrowError, TopicNotFound
from sparrow.model.flow import (
    ANYONE,
    FlowReport,
    Overflow,
    RateLimit,
    Sender,
    parse_publisher,
    parse_rate_limit,
)
from sparrow.model.topic import Topic
from sparrow.store.ports import Store

TICK_S = 0.2
"""Between two looks at the backlogs; queue.md §7.3 wants decisions within some 100 ms."""
TICK_LEAST_S = 0.02
JITTER_SHARE = 0.25
"""By how much longer a wait may be, so that those who wait do not come all at once."""
_KIND = "publisher-limit"


class FlowCounts(NamedTuple):
    """What flow control made of publishes to a topic; in messages."""

    mode: str
    rejected: int
    dropped: int
    """Never stored, or taken from subscriptions."""


class Lines:
    """Queues by key: whoever comes first goes first, and only the first one asks."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    def is_empty(self, key: Hashable) -> bool:
        return key not in self._lines

    def enter(self, key: Hashable) -> asyncio.Lock:
        lock, count = self._lines.get(key) or (asyncio.Lock(), 0)
        self._lines[key] = lock, count + 1
        return lock

    def leave(self, key: Hashable) -> None:
        lock, count = self._lines[key]
        if count == 1:
            del self._lines[key]
        else:
            self._lines[key] = lock, count - 1


class Gate:
    """The way into one topic that has limits, or is used by a publisher that has."""

    def __init__(self, topic: Topic, house: Flow) -> None:
        self.topic = topic
        self.flow = TopicFlow(topic.name, topic.policy.flow, house.now_us())
        self.backlog = 0
        self.slowest: str | None = None
        self.given_up = 0
        self.trim: Trim | None = None
        """What is to be given up at the next look."""
        self.is_gone = False
        self.under_way = 0
        """Messages that passed and are not in the log yet."""
        self._house = house
        self._lines = Lines()
        self._waiting: set[asyncio.Future[None]] = set()
        self._in_line = 0

    def change(self, topic: Topic) -> None:
        """Another policy: those who wait ask again by it."""
        if topic.policy.flow != self.topic.policy.flow:
            self.flow.change(topic.policy.flow, self._house.now_us())
        self.topic = topic
        self.wake()

    def wake(self) -> None:
        for future in self._waiting:
            _set(future)

    async def admit(self, batch: pa.RecordBatch, sender: Sender) -> Any:
        """Returns when the batch may pass: None, or a mask of what is kept of it."""
        priorities = batch.column("priority") if "priority" in batch.schema.names else None
        verdict = await self._ask(batch.num_rows, batch.nbytes, priorities, sender)
        return self._mask(verdict, batch.num_rows, priorities)

    async def admit_one(self, size: int, priority: int | None, sender: Sender) -> bool:
        """The same for one message: whether it is kept."""
        priorities = None if priority is None else pa.array([priority], pa.int8())
        verdict = await self._ask(1, size, priorities, sender)
        mask = self._mask(verdict, 1, priorities)
        return mask is None or bool(mask[0].as_py())

    async def admit_whole(self, batch: pa.RecordBatch, sender: Sender, count: int | None = None) -> None:
        """The same for what must not have holes: it is kept whole, or rejected."""
        priorities = batch.column("priority") if "priority" in batch.schema.names else None
        count = batch.num_rows if count is None else count
        size = batch.nbytes * count // batch.num_rows
        verdict = await self._ask(count, size, priorities, sender)
        is_kept = verdict.action is not Action.DROP
        if verdict.thin is not None:
            first = None if priorities is None else priorities.slice(0, 1)
            is_kept = bool(verdict.thin.mask(1, first)[0].as_py())
            self.flow.thinned(0 if is_kept else count)
        if not is_kept:
            assert verdict.signal is not None
            self.flow.counts.dropped -= count
            self.flow.counts.rejected += count
            raise PublishRejected(
                f"topic {self.topic.name} sheds messages; one with a sequence or a key is rejected instead",
                **verdict.signal._asdict(),
            )

    @contextmanager
    def storing(self, count: int) -> Iterator[None]:
        """Around the way to the log, so that the hard limit counts what is on it."""
        self.under_way += count
        try:
            yield
        finally:
            self.under_way -= count

    def _mask(self, verdict: Verdict, count: int, priorities: Any) -> Any:
        if verdict.action is Action.DROP:
            return pa.repeat(pa.scalar(False), count)
        if verdict.thin is None:
            return None
        mask = verdict.thin.mask(count, priorities)
        kept = pc.sum(mask).as_py() or 0
        self.flow.thinned(count - kept)
        return None if kept == count else mask

    # Waiting.

    async def _ask(self, count: int, size: int, priorities: Any, sender: Sender) -> Verdict:
        since_us = self._house.now_us()
        claims = self._house.claims(self.topic, sender)
        if claims:
            try:
                await self._in_turn(
                    tuple(claim.key for claim in claims),
                    lambda waited_us: self._ask_quota(claims, sender, count, size, waited_us),
                    since_us,
                )
            except RateLimited:
                await asyncio.sleep(0)  # As below.
                raise
        mix = _mix(priorities) if self.topic.policy.flow.overflow is Overflow.DROP_LOWEST_PRIORITY else None
        verdict = await self._in_turn(
            sender.kind,
            lambda waited_us: self.flow.admit(
                sender.kind, count, size, self._house.now_us(), waited_us=waited_us, priorities=mix
            ),
            since_us,
        )
        if verdict.action in (Action.REJECT, Action.DROP):
            # Neither waits for anything: without this a publisher in a tight loop would hold up the others.
            await asyncio.sleep(0)
        if verdict.action is Action.REJECT:
            assert verdict.signal is not None
            raise verdict.signal.to_error()
        if verdict.trim is not None:
            self.trim = verdict.trim
            if self.flow.is_full:
                self._house.hurry()
        return verdict

    def _ask_quota(
        self, claims: list[Claim], sender: Sender, count: int, size: int, waited_us: int
    ) -> Verdict:
        now_us = self._house.now_us()
        wait_us = self._house.limits.check(claims, sender.kind, count, size, now_us)
        if wait_us == 0:
            return Verdict(Action.PASS)
        policy = self.topic.policy.flow
        left_us = round(policy.block_timeout_s * 1e6) - waited_us
        if policy.overflow is Overflow.REJECT or left_us <= 0:
            self.flow.counts.rejected += count
            whose = "token" if sender.name is None and sender.token is not None else "publisher"
            details = self.flow.signal(now_us)._asdict()
            details |= {"cause": Cause.RATE, "retry_after_s": max(0.1, wait_us / 1e6)}
            raise RateLimited(f"the quota of {whose} {sender.name or sender.token} is used up", **details)
        return Verdict(Action.WAIT, min(wait_us, left_us, 1_000_000))

    async def _in_turn(self, key: Hashable, ask: Callable[[int], Verdict], since_us: int) -> Verdict:
        """Asks until the answer is another than to wait; at once when nobody of this kind is waiting."""
        if self._lines.is_empty(key):
            verdict = ask(self._house.now_us() - since_us)
            if verdict.action is not Action.WAIT:
                return verdict
        self._in_line += 1
        lock = self._lines.enter(key)
        try:
            async with lock:
                while True:
                    self._check_open()
                    verdict = ask(self._house.now_us() - since_us)
                    if verdict.action is not Action.WAIT:
                        return verdict
                    await self._pause(verdict.wait_us)
        finally:
            self._lines.leave(key)
            self._in_line -= 1

    async def _pause(self, wait_us: int) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.add(future)
        wait_s = wait_us / 1e6 * (1.0 + JITTER_SHARE * self._house.jitter())
        alarm = loop.call_later(wait_s, _set, future)
        try:
            await future
        finally:
            alarm.cancel()
            self._waiting.discard(future)

    def _check_open(self) -> None:
        if self._house.is_stopped:
            raise BrokerClosed("the broker is closed")
        if self.is_gone:
            raise TopicNotFound(f"there is no topic {self.topic.name!r}")

    @property
    def is_pausing(self) -> bool:
        """Whether it is full and publishers wait."""
        return self.flow.is_full and self.flow.policy.overflow is Overflow.BLOCK

    def report(self) -> FlowReport:
        now_us = self._house.now_us()
        flow, signal = self.flow, self.flow.signal(now_us)
        return FlowReport(
            topic=self.topic.name,
            mode=flow.mode.value,
            level=signal.level,
            is_paused=self.is_pausing,
            cause=signal.cause.value,
            intensity=signal.intensity,
            pressure=round(flow.pressure, 3),
            retry_after_s=signal.retry_after_s,
            backlog=self.backlog,
            slowest=self.slowest,
            drained_per_s=flow.drain_per_s(now_us),
            waiting=self._in_line,
            mode_changes=flow.mode_changes,
            passed=flow.counts.passed,
            rejected=flow.counts.rejected,
            dropped=flow.counts.dropped,
            given_up=self.given_up,
        )


class Flow:
    """All gates, the quotas of publishers and tokens, and the eye on the backlogs."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        subscriptions: Subscriptions,
        lags: Lags,
        clock: Clock,
        jitter: Callable[[], float],
    ) -> None:
        self.jitter = jitter
        self.limits = PublisherLimits()
        self.is_stopped = False
        self._store = store
        self._subscriptions = subscriptions
        self._lags = lags
        self._clock = clock
        self._trimming = Trimming(store, lags, clock)
        self._gates: dict[int, Gate] = {}
        self.listeners: list[Callable[[FlowReport], None]] = []
        """Told when a topic begins or ceases to slow its publishers."""
        self._side_gates: dict[int, Gate] = {}
        """Of topics without limits, for publishers that have some."""
        self._own: dict[tuple[str, str], RateLimit] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_hurried = False
        self._rested: asyncio.Future[None] | None = None
        self._log = logs.get("flow")
        for topic in topics:
            self.topic_changed(topic)

    def now_us(self) -> int:
        """A clock that never goes back, for waits and rates."""
        return int(self._clock.monotonic_s() * 1e6)

    async def load(self) -> None:
        """The quotas that were set in earlier lives; and looking begins, if there is something to see."""
        for key, raw in (await self._store.documents(_KIND)).items():
            noun, _, name = key.partition(":")
            self._own[noun, name] = msgspec.json.decode(raw, type=RateLimit)
        self._look()

    async def stop(self) -> None:
        self.is_stopped = True
        for gate in [*self._gates.values(), *self._side_gates.values()]:
            gate.wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # Topics.

    def topic_changed(self, topic: Topic) -> None:
        """A topic is new or has other options."""
        gate = self._gates.get(topic.id)
        if gate is not None:
            gate.change(topic)
            if not topic.policy.flow.is_limited:
                del self._gates[topic.id]
        elif topic.policy.flow.is_limited:
            self._side_gates.pop(topic.id, None)
            self._gates[topic.id] = Gate(topic, self)
        elif topic.id in self._side_gates:
            self._side_gates[topic.id].change(topic)
        self._look()

    def topic_deleted(self, topic: Topic) -> None:
        for gates in (self._gates, self._side_gates):
            gate = gates.pop(topic.id, None)
            if gate is not None:
                gate.is_gone = True
                gate.wake()

    def gate(self, topic: Topic, sender: Sender) -> Gate | None:
        """What a publish must pass; None when nothing limits it."""
        gate = self._gates.get(topic.id)
        if gate is not None or sender is ANYONE or not self._own:
            return gate
        if not self._claims_of(sender):
            return None
        gate = self._side_gates.get(topic.id)
        if gate is None:
            gate = self._side_gates[topic.id] = Gate(topic, self)
        return gate

    def counts(self, topic: Topic) -> FlowCounts | None:
        """What it did with what was published to a topic; none when it never had to do with it."""
        gate = self._gates.get(topic.id) or self._side_gates.get(topic.id)
        if gate is None:
            return None
        counts = gate.flow.counts
        return FlowCounts(gate.flow.mode.value, counts.rejected, counts.dropped + gate.given_up)

    def report(self, topic: Topic) -> FlowReport:
        """How a topic treats its publishers."""
        gate = self._gates.get(topic.id) or self._side_gates.get(topic.id) or Gate(topic, self)
        return gate.report()

    # Publishers and tokens.

    async def set_limits(self, noun: str, name: object, options: Mapping[str, Any]) -> RateLimit:
        """The quota of a publisher or a token from now on; one without a rate is none."""
        name = parse_publisher(noun, name)
        limit = parse_rate_limit(options, self._own.get((noun, name)))
        if limit.is_limited:
            await self._store.put_document(_KIND, f"{noun}:{name}", msgspec.json.encode(limit))
            self._own[noun, name] = limit
        else:
            await self._store.delete_document(_KIND, f"{noun}:{name}")
            self._own.pop((noun, name), None)
            self.limits.forget((noun, name))
        for gate in [*self._gates.values(), *self._side_gates.values()]:
            gate.wake()
        return limit

    def claims(self, topic: Topic, sender: Sender) -> list[Claim]:
        """The quotas that a publish counts against, besides the topic's own."""
        rate = topic.policy.flow.publisher_rate
        found = [Claim(("topic", topic.id, sender.name), rate)] if rate.is_limited else []
        return found + self._claims_of(sender) if self._own else found

    def _claims_of(self, sender: Sender) -> list[Claim]:
        keys = [("publisher", sender.name), ("token", sender.token)]
        named = [(noun, name) for noun, name in keys if name is not None]
        return [Claim(key, self._own[key]) for key in named if key in self._own]

    # Looking.

    def _look(self) -> None:
        is_needed = any(gate.flow.policy.has_watermarks for gate in self._gates.values())
        if is_needed and self._task is None and not self.is_stopped:
            try:
                self._task = asyncio.get_running_loop().create_task(self._look_for_ever())
            except RuntimeError:
                return  # The broker is being put together; ``load`` comes on the loop.

    async def _look_for_ever(self) -> None:
        """Ends when no topic has watermarks any more."""
        while True:
            gates = [gate for gate in self._gates.values() if gate.flow.policy.has_watermarks]
            if not gates:
                self._task = None
                return
            for gate in gates:
                try:
                    await self._observe(gate)
                except SparrowError as error:
                    self._log.warning("flow-not-observed", str(error), topic=gate.topic.name)
                except Exception as error:  # noqa: BLE001 - a task's root: it reports and goes on
                    self._log.error("flow-not-observed", repr(error), topic=gate.topic.name)
            await self._rest()

    async def _rest(self) -> None:
        """Until the next look is due; sooner when old messages must go before it."""
        await asyncio.sleep(TICK_LEAST_S)
        if not self._is_hurried:
            # Not wait_for: in Python 3.11 it may swallow the cancellation by which this task is stopped.
            loop = asyncio.get_running_loop()
            self._rested = loop.create_future()
            alarm = loop.call_later(TICK_S - TICK_LEAST_S, _set, self._rested)
            try:
                await self._rested
            finally:
                alarm.cancel()
                self._rested = None
        self._is_hurried = False

    def hurry(self) -> None:
        """A topic is full and goes on taking messages."""
        self._is_hurried = True
        if self._rested is not None:
            _set(self._rested)

    async def _observe(self, gate: Gate) -> None:
        """The slowest subscription of a topic, and what follows from it."""
        flow, topic = gate.flow, gate.topic
        backlogs = self._lags.of_topic(topic)
        depths = {courier.subscription.name: total(lags) for courier, lags in backlogs}
        age_us = 0
        if flow.policy.lag_marks_us is not None:
            ages = [await self._lags.oldest_age_us(lags) for _, lags in backlogs]
            age_us = max(ages, default=0)
        if gate.is_gone:
            return
        gate.slowest = max(depths, key=depths.__getitem__, default=None)
        gate.backlog = depths[gate.slowest] if gate.slowest is not None else 0
        before, was_pausing = flow.mode, gate.is_pausing
        flow.observe(gate.backlog + gate.under_way, age_us, self.now_us())
        if flow.mode is not before:
            self._log_change(gate, before.value)
        if flow.mode is not before or gate.is_pausing != was_pausing:
            self._tell(gate)
        if gate.trim is not None:
            wanted, gate.trim = gate.trim, None
            is_more_coming = gate.under_way > 0
            gate.given_up += await self._trimming.trim(self._lags.of_topic(topic), wanted)
            if is_more_coming and gate.trim is None:
                gate.trim = wanted  # What was let in and not stored yet counts at the next look.

    def _log_change(self, gate: Gate, before: str) -> None:
        report = gate.report()
        tell = self._log.info if report.mode == "normal" else self._log.warning
        tell(
            "flow-mode-changed", "", topic=report.topic, before=before, mode=report.mode, cause=report.cause,
            backlog=report.backlog, slowest=report.slowest,
        )  # fmt: skip

    def _tell(self, gate: Gate) -> None:
        report = gate.report()
        for listener in list(self.listeners):
            listener(report)


def _mix(priorities: Any) -> Mapping[int, int] | None:
    """How many messages have which priority."""
    if priorities is None:
        return None
    found = pc.value_counts(priorities.drop_null())
    return {pair["values"]: pair["counts"] for pair in found.to_pylist()}


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
