"""Carries the messages of one subscription from the log to its consumers.

All decisions are the kernel's (kernel/delivery.py); the courier reads pages, offers them, hands over what
was leased, journals what was settled and wakes up when something is due. It holds no rule of its own.

A consumer that asks gets what is ready, else the courier reads on for it, else it waits: for new messages,
for a due retry, or for its own timeout. Nothing is read for a subscription that nobody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from sparrow.broker import logs
from sparrow.broker.counts import Counts
from sparrow.broker.feeding import Feeding, Services
from sparrow.broker.pages import Page
from sparrow.broker.watch import Watch
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import HandOver, Refusal, Run, Settled
from sparrow.kernel.facts import AttemptsFailed, Fact, FailureKind, MessagesAcked
from sparrow.kernel.filter import Filter
from sparrow.kernel.pace import Deadline
from sparrow.kernel.schedule import NEVER_US
from sparrow.model.errors import SparrowError
from sparrow.model.group import GroupPolicy
from sparrow.model.message import Delivered, StreamId
from sparrow.model.subscription import Guarantee, Ordering, Subscription
from sparrow.store.handover import deliveries

_TICK_S = 0.01
"""Time between two ticks at least: what is due and cannot be done yet, because the journal is frozen or a
move of dead letters is under way, is tried again soon and not at once."""


_PUSH_MARGIN_S = 15.0
"""By which the lease of a message outlasts the webhook that carries it."""


class Seat(Protocol):
    """How a member of a group takes part in a pull."""

    def grant(self, wanted: int) -> tuple[int, Collection[StreamId] | None]:
        """How many messages it may take now, and of which streams; ``None`` is all."""

    def room(self, wanted: int) -> int:
        """How many messages are worth reading for it."""

    def served(self, count: int) -> None:
        """It was handed so many."""


class Membership(Protocol):
    """The group of a subscription, as far as its courier knows it."""

    def applied(self, found: Sequence[Fact]) -> None: ...

    def abandoned(self, found: Sequence[Fact]) -> None: ...

    def settled(self, decided: Settled) -> None: ...

    def streams_changed(self) -> None: ...

    def lag_critical(self) -> None: ...

    def check_policy(self, policy: GroupPolicy) -> None: ...

    def moved(self, courier: Courier) -> None: ...

    def stop(self) -> None: ...


class Portion(NamedTuple):
    """Messages of one run that lie in one page."""

    run: Run
    topic: str
    rows: pa.RecordBatch
    page: Page


class Ends(Sequence[Any]):
    """As many messages as some portions hold, of which only the first and the last are looked at."""

    def __init__(self, portions: list[Portion]) -> None:
        self._portions = portions
        self._size: int = sum(portion.rows.num_rows for portion in portions)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: Any) -> Any:
        portion = self._portions[0 if place == 0 else -1]
        return Moment(portion.rows.column("publish_time")[place].value)


class Moment(NamedTuple):
    """When a message was published."""

    about_published_us: int


class Courier(Feeding):
    """One subscription at work."""

    __slots__ = (
        "__weakref__",
        "_is_seated",
        "_timer",
        "_timer_at_us",
        "_waiting",
        "as_of",
        "deadline",
        "group",
        "is_dirty",
        "is_moving",
        "is_stopped",
        "streams",
        "successor",
        "unconfirmed",
    )

    def __init__(
        self, subscription: Subscription, delivery: Delivery, chosen: Filter | None, services: Services
    ) -> None:
        super().__init__(subscription, delivery, chosen, services)
        self.as_of = 0
        """The log sequence number of the last fact that was applied."""
        self.is_dirty = False
        """Whether facts were applied since the last checkpoint."""
        self.is_stopped = False
        self.successor: Courier | None = None
        """Who took over; facts that were on their way then are its business."""
        self.is_moving = False
        """Whether dead letters are being moved."""
        self.streams: set[StreamId] = set(delivery.streams)
        self._waiting: set[asyncio.Future[None]] | None = None
        self._is_seated = False
        """Whether anybody ever pulled who has only so much room."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = NEVER_US
        self.unconfirmed: set[asyncio.Future[None]] = set()
        """Settlements on their way to the journal that nobody waits for."""
        self.group: Membership | None = None
        """Who shares the subscription; made when the first member joins."""
        self.deadline: Deadline | None = None
        """How long leases last when that follows from how long the work takes."""
        if subscription.policy.adaptive_deadline:
            self.deadline = Deadline(subscription.policy.ack_deadline_s)

    def __repr__(self) -> str:
        return f"<Courier {self.subscription.name!r}>"

    @property
    def counts(self) -> Counts:
        """What became of its messages."""
        if self.watch is None:
            self.watch = Watch()
        return self.watch.counts

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    # Handing over.

    async def pull(
        self,
        consumer: str,
        max_messages: int,
        timeout_s: float,
        owner: Any,
        *,
        seat: Seat | None = None,
        max_bytes: int | None = None,
    ) -> list[Delivered]:
        """Up to ``max_messages`` for a consumer; waits up to ``timeout_s`` for the first. Returns early,
        with nothing, when the courier is stopped."""
        until_s = self._services.clock.monotonic_s() + timeout_s
        while (over := await self._obtain(consumer, max_messages, until_s, seat)) is not None:
            found: list[Delivered] = []
            for run, topic, rows, page in await self._portions(over):
                found += deliveries(rows, page.contents(rows), run, topic, owner, page.published_at_us)
            found = self._in_order(found) if len(over.runs) > 1 else found
            found = found if max_bytes is None else self._cut(found, over, max_bytes)
            if found:
                self._note_hand_over(consumer, over, found)
                return found
        return []

    async def pull_portions(
        self,
        consumer: str,
        max_messages: int,
        timeout_s: float,
        *,
        seat: Seat | None = None,
        max_bytes: int | None = None,
    ) -> list[Portion]:
        """The same as columns, one portion a run and page; bytes are cut between messages."""
        until_s = self._services.clock.monotonic_s() + timeout_s
        while (over := await self._obtain(consumer, max_messages, until_s, seat)) is not None:
            found = await self._portions(over)
            if max_bytes is not None and self.subscription.policy.guarantee is not Guarantee.AT_MOST_ONCE:
                found = self._cut_portions(found, max_bytes)
            if found:
                self._note_hand_over(consumer, over, Ends(found))
                return found
        return []

    async def _obtain(
        self, consumer: str, max_messages: int, until_s: float, seat: Seat | None
    ) -> HandOver | None:
        """Leased messages; None when there are none in time."""
        clock = self._services.clock
        self._is_seated |= seat is not None
        while not self.is_stopped:
            count, streams = (max_messages, None) if seat is None else seat.grant(max_messages)
            over = self._lease(consumer, count, streams)
            if seat is not None and count:
                seat.served(over.size)
            if over.runs:
                return over
            demand = max_messages if seat is None else seat.room(max_messages)
            is_fed, is_more = self._feed_from_memory(demand, streams)
            if is_fed and self._deliverable(streams) >= demand:
                continue
            waiting = self._wait()
            try:
                if is_more and (await self._feed(demand, streams) or is_fed):
                    continue
                self.set_timer()
                rest_s = until_s - clock.monotonic_s()
                if rest_s <= 0:
                    return None
                alarm = asyncio.get_running_loop().call_later(rest_s, _set, waiting)
                try:
                    await waiting
                finally:
                    alarm.cancel()
            finally:
                self._stop_waiting(waiting)
        return None

    def _lease(self, consumer: str, count: int, streams: Collection[StreamId] | None) -> HandOver:
        if count <= 0:
            return HandOver([], [])
        deadline_s = None if self.deadline is None else self.deadline.ack_deadline_s
        if (push := self.subscription.policy.push) is not None:
            deadline_s = push.timeout_s + _PUSH_MARGIN_S
        now_us = self._services.clock.now_us()
        return self.delivery.lease(consumer, count, now_us, deadline_s=deadline_s, streams=streams)

    async def _portions(self, over: HandOver) -> list[Portion]:
        """What was leased, as rows of the log; facts of the hand-over go into the journal first."""
        if over.facts:
            await self.journal(over.facts)
        found: list[Portion] = []
        try:
            for run in over.runs:
                topic = self._services.topics.find(run.stream.topic_id)
                if topic is None:
                    continue
                offsets = run.to_offsets()
                place = 0
                while place < len(offsets):
                    page = self._services.pages.held(run.stream, offsets[place])
                    if page is None:
                        page = await self._page(run.stream, offsets[place])
                    count = 0 if page is None else _count_below(offsets, place, page.end_offset)
                    if page is None or count == 0:
                        self._give_up(run.stream, offsets[place : place + 1])
                        place += 1
                        continue
                    rows = page.rows(offsets[place : place + count])
                    if rows.num_rows < count:
                        self._give_up_missing(run.stream, offsets[place : place + count], rows)
                    if rows.num_rows:
                        found.append(Portion(run, topic.name, rows, page))
                    place += count
        except BaseException:
            for run in over.runs:
                self.delivery.give_back(run, BitMap64(run.to_offsets()))
            raise
        if over.runs[0].deadline_us < self._timer_at_us:
            self.set_timer()
        return found

    def _cut_portions(self, found: list[Portion], max_bytes: int) -> list[Portion]:
        """As many messages as fit, at least one; the others are ready again and were never tried."""
        if sum(portion.rows.column("data").total_values_length for portion in found) <= max_bytes:
            return found
        kept: list[Portion] = []
        size = 0
        for portion in found:
            rows = portion.rows
            lengths = pc.binary_length(rows.column("data")).fill_null(0)
            total = pc.sum(lengths).as_py() or 0
            count = rows.num_rows
            if size + total > max_bytes:
                room = max_bytes - size
                count = sum(each <= room for each in pc.cumulative_sum(lengths).to_pylist())
                count = max(count, 0 if kept else 1)
            size += total
            if count:
                kept.append(portion._replace(rows=rows.slice(0, count)))
            back = rows.column("offset").slice(count).to_pylist()
            if back:
                self.delivery.give_back(portion.run, BitMap64(back))
        self.wake()
        return kept

    def _cut(self, found: list[Delivered], over: HandOver, max_bytes: int) -> list[Delivered]:
        """As many as fit, at least one; the others are ready again and were never tried."""
        if self.subscription.policy.guarantee is Guarantee.AT_MOST_ONCE:
            return found  # They are acked already: taking them back would lose them.
        size, count = 0, 0
        for message in found:
            size += len(message.data or b"")
            if count and size > max_bytes:
                break
            count += 1
        back: dict[StreamId, BitMap64] = {}
        for message in found[count:]:
            stream = StreamId(message.topic_id, message.partition)
            back.setdefault(stream, BitMap64()).add(message.offset)
        for run in over.runs:
            if run.stream in back:
                self.delivery.give_back(run, back[run.stream])
        if back:
            self.wake()
        return found[:count]

    def _in_order(self, found: list[Delivered]) -> list[Delivered]:
        """Over several streams a window hands out runs; their messages belong in the order of their lane."""
        policy = self.subscription.policy
        if policy.key_window > 1 and policy.ordering in (Ordering.TOTAL, Ordering.PUBLISHER):
            places = {stream: place for place, stream in enumerate(self.delivery.streams)}
            found.sort(key=lambda m: (m.publish_time_us, places[StreamId(m.topic_id, m.partition)], m.offset))
        return found

    def _note_hand_over(self, consumer: str, over: HandOver, found: Sequence[Any]) -> None:
        if self.watch is None:
            self.watch = Watch()
        is_for_good = self.subscription.policy.guarantee is Guarantee.AT_MOST_ONCE
        self.watch.handed_over(consumer, over.runs, found, self._services.clock.now_us(), is_for_good)

    def _give_up(self, stream: StreamId, offsets: Sequence[int]) -> None:
        """Retention or damage took the message between its lease and its hand-over."""
        self.skipped += len(offsets)
        logs.get("delivery").warning(
            "message-unreadable", "", subscription=self.subscription.name, offsets=list(offsets)
        )
        self.submit(self.delivery.ack_offsets(stream, BitMap64(offsets)).facts)

    def _give_up_missing(self, stream: StreamId, offsets: Sequence[int], rows: pa.RecordBatch) -> None:
        """Compaction left messages out after they had been read: newer ones of their keys are there."""
        there = set(rows.column("offset").to_pylist())
        gone = BitMap64([offset for offset in offsets if offset not in there])
        decided = self.delivery.ack_offsets(stream, gone).facts
        if decided:  # At most once they are acked already.
            self.submit(decided)

    # Settling.

    async def settle(
        self, settled: Settled, *, is_confirmed: bool, losses: list[BaseException] | None = None
    ) -> list[Refusal]:
        """Journals a decision; waits for the disk when the caller wants it confirmed. When nobody waits and
        the journal refuses, the first error is left in ``losses``."""
        self._measure(settled)
        if settled.facts:
            future = self.submit(settled.facts)
            if is_confirmed or self.subscription.policy.guarantee is Guarantee.EXACTLY_ONCE:
                await asyncio.shield(future)
            else:
                self.unconfirmed.add(future)
                future.add_done_callback(lambda done: self._note_outcome(done, losses))
        return settled.refused

    def _measure(self, settled: Settled) -> None:
        self.counts.settled(settled)
        if self.group is not None:
            self.group.settled(settled)
        if self.deadline is not None:
            now_us = self._services.clock.now_us()
            for outcome in settled.outcomes:
                if outcome.is_success:
                    self.deadline.processed(now_us - outcome.taken_at_us)

    def _note_outcome(self, done: asyncio.Future[None], losses: list[BaseException] | None) -> None:
        self.unconfirmed.discard(done)
        error = None if done.cancelled() else done.exception()
        if error is not None and losses is not None and not losses:
            losses.append(error)

    async def flush(self) -> None:
        """Returns when every settlement so far is durable or lost; whose it was is told by ``losses``."""
        pending = list(self.unconfirmed)
        if pending:
            await asyncio.wait(pending)

    def submit(self, facts: Sequence[Fact]) -> asyncio.Future[None]:
        return self._services.settling.submit(facts, self.apply, self._abandon)

    async def journal(self, facts: Sequence[Fact]) -> None:
        """Facts that must be durable before the caller goes on."""
        if facts:
            await asyncio.shield(self.submit(facts))

    def apply(self, facts: Sequence[Fact], lsn: int) -> None:
        """The facts are in the log."""
        if self.successor is not None:
            self.successor.apply(facts, lsn)
            return
        for fact in facts:
            self.delivery.apply(fact)
        self.as_of = lsn
        self.is_dirty = True
        if self.group is not None:
            self.group.applied(facts)
        if not self._is_idle_after(facts):
            self.wake()
        self.set_timer()
        self._services.move_dead_letters(self)

    def _is_idle_after(self, facts: Sequence[Fact]) -> bool:
        """Whether nobody who waits could be handed anything because of these: mostly acks of the last that
        was there. Whoever has only so much room may read on after any ack."""
        has_room = self.group is None and not self._is_seated
        return has_room and not self.delivery.waiting and all(type(fact) is MessagesAcked for fact in facts)

    def _abandon(self, facts: Sequence[Fact]) -> None:
        self.delivery.abandon(facts)
        if self.group is not None:
            self.group.abandoned(facts)
        self.wake()

    # Waking up.

    def wake(self) -> None:
        """Something may be ready."""
        if self._waiting:
            for future in self._waiting:
                _set(future)

    def _wait(self) -> asyncio.Future[None]:
        if self._waiting is None:
            self._waiting = set()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        return future

    def _stop_waiting(self, future: asyncio.Future[None]) -> None:
        assert self._waiting is not None
        self._waiting.discard(future)

    def set_timer(self) -> None:
        at_us = self.delivery.next_wakeup_us()
        if at_us >= self._timer_at_us and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_us = at_us
        if at_us < NEVER_US:
            wait_s = max(_TICK_S, (at_us - self._services.clock.now_us()) / 1_000_000)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        """Something is due: leases, schedules, dead letters."""
        self._timer = None
        self._timer_at_us = NEVER_US
        facts = self.delivery.expire(self._services.clock.now_us(), self._services.jitter())
        if facts:
            self._note_timeouts(facts)
            self.counts.ended(facts)
            self.submit(facts)
        self._services.move_dead_letters(self)
        self.wake()
        self.set_timer()

    def _note_timeouts(self, found: Sequence[Fact]) -> None:
        if self.deadline is not None:
            for fact in found:
                if isinstance(fact, AttemptsFailed) and fact.kind is FailureKind.TIMED_OUT:
                    self.deadline.timed_out()

    def stop(self) -> None:
        """The broker closes, or the subscription has gone or changed: nobody waits here any longer."""
        self.is_stopped = True
        if self.group is not None and self.successor is None:
            self.group.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()


def first_refusal(refused: Sequence[Refusal]) -> SparrowError | None:
    """Why the first of some ids was refused."""
    return refused[0].error if refused else None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _count_below(offsets: Sequence[int], place: int, end: int) -> int:
    if isinstance(offsets, range):
        return min(end, offsets[-1] + 1) - offsets[place]
    count = 0
    while place + count < len(offsets) and offsets[place + count] < end:
        count += 1
    return count
