"""Carries the messages of one subscription from the log to its consumers.

All decisions are the kernel's (kernel/delivery.py); the courier reads pages, offers them, hands over what
was leased, journals what was settled and wakes up when something is due. It holds no rule of its own.

A consumer that asks gets what is ready, else the courier reads on for it, else it waits: for new messages,
for a due retry, or for its own timeout. Nothing is read for a subscription that nobody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pyroaring import BitMap64

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.handover import deliveries
from sparrow.broker.pages import Page, Pages
from sparrow.broker.settling import Settling
from sparrow.broker.topics import Topics
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival, HandOver, Refusal, Settled, Wish
from sparrow.kernel.facts import Fact
from sparrow.kernel.filter import Filter
from sparrow.kernel.filterset import FilterSet
from sparrow.kernel.poison import LARGE_BYTES
from sparrow.kernel.schedule import NEVER_US
from sparrow.model.errors import DataDamaged, OffsetOutOfRange, SparrowError, TopicNotFound
from sparrow.model.message import Delivered, StreamId, parse_message_id
from sparrow.model.subscription import Guarantee, Ordering, Subscription
from sparrow.store.ports import Store

_TICK_S = 0.01
"""Time between two ticks at least: what is due and cannot be done yet, because the journal is frozen or a
move of dead letters is under way, is tried again soon and not at once."""
_PAGES_AT_ONCE = 32
"""Pages read for one request at most: messages published one by one fill a pull, and a filter that lets
little through does not keep a consumer from the little that was found."""


class Services(NamedTuple):
    """What couriers share."""

    store: Store
    topics: Topics
    pages: Pages
    settling: Settling
    clock: Clock
    jitter: Callable[[], float]
    filters: Callable[[int], FilterSet]
    """The filters of all subscriptions of a topic."""
    move_dead_letters: Callable[[Courier], None]
    """Starts to move what is due to the dead-letter topic."""


class Courier:
    """One subscription at work."""

    __slots__ = (
        "__weakref__",
        "_feeding",
        "_services",
        "_timer",
        "_timer_at_us",
        "_waiting",
        "as_of",
        "delivery",
        "filter",
        "is_dirty",
        "is_moving",
        "is_stopped",
        "skipped",
        "streams",
        "subscription",
        "successor",
        "unconfirmed",
    )

    def __init__(
        self, subscription: Subscription, delivery: Delivery, chosen: Filter | None, services: Services
    ) -> None:
        self.subscription = subscription
        self.delivery = delivery
        self.filter = chosen
        self.as_of = 0
        """The log sequence number of the last fact that was applied."""
        self.is_dirty = False
        """Whether facts were applied since the last checkpoint."""
        self.is_stopped = False
        self.successor: Courier | None = None
        """Who took over; facts that were on their way then are its business."""
        self.is_moving = False
        """Whether dead letters are being moved."""
        self.skipped = 0
        """Messages that could not be delivered because the log no longer holds them whole."""
        self.streams: set[StreamId] = set(delivery.streams)
        self._services = services
        self._feeding: asyncio.Lock | None = None
        self._waiting: set[asyncio.Future[None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = NEVER_US
        self.unconfirmed: set[asyncio.Future[None]] = set()
        """Settlements on their way to the journal that nobody waits for."""

    def __repr__(self) -> str:
        return f"<Courier {self.subscription.name!r}>"

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    # Handing over.

    async def pull(self, consumer: str, max_messages: int, timeout_s: float, owner: Any) -> list[Delivered]:
        """Up to ``max_messages`` for a consumer; waits up to ``timeout_s`` for the first. Returns early,
        with nothing, when the courier is stopped."""
        clock = self._services.clock
        until_s = clock.monotonic_s() + timeout_s
        while not self.is_stopped:
            over = self.delivery.lease(consumer, max_messages, clock.now_us())
            if over.runs:
                found = await self._hand_over(over, owner)
                if found:
                    return found
                continue
            is_fed = self._feed_from_memory(max_messages)
            if is_fed and self.delivery.deliverable >= max_messages:
                continue
            waiting = self._wait()
            try:
                if await self._feed(max_messages) or is_fed:
                    continue
                self.set_timer()
                rest_s = until_s - clock.monotonic_s()
                if rest_s <= 0:
                    return []
                alarm = asyncio.get_running_loop().call_later(rest_s, _set, waiting)
                try:
                    await waiting
                finally:
                    alarm.cancel()
            finally:
                self._stop_waiting(waiting)
        return []

    async def _hand_over(self, over: HandOver, owner: Any) -> list[Delivered]:
        if over.facts:
            await self.journal(over.facts)
        found: list[Delivered] = []
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
                    found += deliveries(rows, page.contents(rows), run, topic.name, owner)
                    place += count
        except BaseException:
            for run in over.runs:
                self.delivery.give_back(run.stream, BitMap64(run.to_offsets()))
            raise
        if over.runs[0].deadline_us < self._timer_at_us:
            self.set_timer()
        return self._in_order(found) if len(over.runs) > 1 else found

    def _in_order(self, found: list[Delivered]) -> list[Delivered]:
        """Over several streams a window hands out runs; their messages belong in the order of their lane."""
        policy = self.subscription.policy
        if policy.key_window > 1 and policy.ordering in (Ordering.TOTAL, Ordering.PUBLISHER):
            places = {stream: place for place, stream in enumerate(self.delivery.streams)}
            found.sort(key=lambda m: (m.publish_time_us, places[StreamId(m.topic_id, m.partition)], m.offset))
        return found

    async def _page(self, stream: StreamId, offset: int) -> Page | None:
        """The page that holds exactly this message; None when it can no longer be read."""
        try:
            page = await self._services.pages.at(stream, offset)
        except (DataDamaged, OffsetOutOfRange, TopicNotFound):
            return None
        return page if page is not None and page.first_offset <= offset else None

    def _give_up(self, stream: StreamId, offsets: Sequence[int]) -> None:
        """Retention or damage took the message between its lease and its hand-over."""
        self.skipped += len(offsets)
        logs.get("delivery").warning(
            "message-unreadable", "", subscription=self.subscription.name, offsets=list(offsets)
        )
        self.submit(self.delivery.ack_offsets(stream, BitMap64(offsets)).facts)

    # Reading.

    def _feed_from_memory(self, demand: int) -> bool:
        """Takes in a page of each stream that somebody has read already, as a wide fan-out finds it; False
        when there is none."""
        self._set_horizon()
        found = False
        for wish in self.delivery.wanted(demand):
            page = self._services.pages.held(wish.stream, wish.start_offset)
            if page is not None:
                self._take_in(page, wish.start_offset, wish.max_messages)
                found = True
        return found

    def _set_horizon(self) -> None:
        if self.delivery.is_merged:
            bounds = self._services.store.bounds
            topics = self._services.topics
            streams = [s for s in self.delivery.streams if topics.find(s.topic_id) is not None]
            self.delivery.set_horizon({stream: bounds(stream).end_offset for stream in streams})

    async def _feed(self, demand: int) -> bool:
        """Reads on for consumers; False when there is nothing new."""
        if self._feeding is None:
            self._feeding = asyncio.Lock()
        async with self._feeding:
            self._set_horizon()
            pages = 0
            while pages < _PAGES_AT_ONCE:
                before = pages
                for wish in self.delivery.wanted(demand):
                    pages += await self._read(wish)
                    if self.delivery.deliverable >= demand:
                        return True
                if pages == before:
                    break
            return pages > 0

    async def _read(self, wish: Wish) -> bool:
        services = self._services
        try:
            bounds = services.store.bounds(wish.stream)
            start = max(wish.start_offset, bounds.start_offset)
            if start >= bounds.end_offset:
                return self._pass_gap(wish, start)
            page = await services.pages.at(wish.stream, start)
        except TopicNotFound:
            return False
        except OffsetOutOfRange:
            return True  # Retention moved the start meanwhile; the next look starts there.
        except DataDamaged as damage:
            return self._pass_damage(wish, damage)
        if page is None:
            return False
        self._pass_gap(wish, max(start, page.first_offset))
        self._take_in(page, start, wish.max_messages)
        return True

    def _take_in(self, page: Page, start: int, limit: int) -> None:
        self.delivery.offer(self._arrival(page, start, limit), self._services.clock.now_us())

    def _pass_damage(self, wish: Wish, damage: DataDamaged) -> bool:
        end = int(damage.details.get("end_offset", 0))
        if end <= wish.start_offset:
            raise damage
        self.skipped += end - wish.start_offset
        logs.get("delivery").error(
            "damage-skipped", str(damage), subscription=self.subscription.name, end_offset=end
        )
        return self._pass_gap(wish, end)

    def _pass_gap(self, wish: Wish, end: int) -> bool:
        """The log holds nothing from the wish up to ``end``; False when there is no such gap."""
        if end <= wish.start_offset:
            return False
        gap = Arrival(stream=wish.stream, first_offset=wish.start_offset, end_offset=end, selected=BitMap64())
        self.delivery.offer(gap, self._services.clock.now_us())
        return True

    def _arrival(self, page: Page, start: int, limit: int) -> Arrival:
        first = max(start, page.first_offset)
        end = min(page.end_offset, first + limit)
        needs = self.delivery.needs
        columns: dict[str, Any] = {}
        if "keys" in needs:
            columns["keys"] = page.values("key", first)
        if "publishers" in needs:
            columns["publishers"] = page.values("producer_id", first)
        if "published_at_us" in needs:
            columns["published_at_us"] = page.values("publish_time", first)
        columns = {name: values and values[: end - first] for name, values in columns.items()}
        if not page.is_plain:
            sparse = {
                "priority": page.sparse("priority"),
                "deliver_at_us": page.sparse("deliver_at"),
                "expires_at_us": page.expiries(),
                "depends_on": _parsed(page.sparse("depends_on")),
            }
            columns.update({name: _clip(found, first, end) for name, found in sparse.items() if found})
        return Arrival(
            stream=page.stream,
            first_offset=first,
            end_offset=end,
            selected=self._selected(page, first, end),
            large=page.large(LARGE_BYTES) if "large" in needs else None,
            **columns,
        )

    def _selected(self, page: Page, first: int, end: int) -> BitMap64 | None:
        if self.filter is None:
            chosen = page.offsets(first, end)
        else:
            chosen = page.selected(self.filter, self._services.filters(page.stream.topic_id))
        mine = page.meant_for(self.subscription.name)
        if mine is None:
            return chosen
        return mine if chosen is None else chosen & mine

    # Settling.

    async def settle(
        self, settled: Settled, *, is_confirmed: bool, losses: list[BaseException] | None = None
    ) -> list[Refusal]:
        """Journals a decision; waits for the disk when the caller wants it confirmed. When nobody waits and
        the journal refuses, the first error is left in ``losses``."""
        if settled.facts:
            future = self.submit(settled.facts)
            if is_confirmed or self.subscription.policy.guarantee is Guarantee.EXACTLY_ONCE:
                await asyncio.shield(future)
            else:
                self.unconfirmed.add(future)
                future.add_done_callback(lambda done: self._note_outcome(done, losses))
        return settled.refused

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
        self.wake()
        self.set_timer()
        self._services.move_dead_letters(self)

    def _abandon(self, facts: Sequence[Fact]) -> None:
        self.delivery.abandon(facts)
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
            self.submit(facts)
        self._services.move_dead_letters(self)
        self.wake()
        self.set_timer()

    def stop(self) -> None:
        """The broker closes, or the subscription has gone or changed: nobody waits here any longer."""
        self.is_stopped = True
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


def _clip(values: dict[int, Any], first: int, end: int) -> dict[int, Any] | None:
    return {offset: value for offset, value in values.items() if first <= offset < end} or None


def _parsed(found: Any) -> dict[int, Any] | None:
    if found is None:
        return None
    return {offset: [parse_message_id(text) for text in ids] for offset, ids in found.items()}
