"""Feeding: a subscription's messages, from the log into its kernel.

Pages are read for consumers that ask, offered to the kernel with the columns that it needs, judged by the
subscription's filter; gaps and damage of the log are passed over. What was read already for another
subscription is taken from memory. It holds no rule of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from pyroaring import BitMap64

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.pages import Page, Pages
from sparrow.broker.settling import Settling
from sparrow.broker.topics import Topics
from sparrow.broker.watch import Watch
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival, Wish
from sparrow.kernel.filter import Filter
from sparrow.kernel.filterset import FilterSet
from sparrow.kernel.poison import LARGE_BYTES
from sparrow.kernel.sampling import kept
from sparrow.model.errors import DataDamaged, OffsetOutOfRange, TopicNotFound
from sparrow.model.message import StreamId, parse_message_id
from sparrow.model.subscription import Subscription
from sparrow.store.ports import Store

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
    move_dead_letters: Callable[[Any], None]
    """Starts to move what is due to the dead-letter topic."""


class Feeding:
    """The reading side of a courier."""

    __slots__ = ("_feeding", "_services", "delivery", "filter", "skipped", "subscription", "watch")

    def __init__(
        self, subscription: Subscription, delivery: Delivery, chosen: Filter | None, services: Services
    ) -> None:
        self.subscription = subscription
        self.delivery = delivery
        self.filter = chosen
        self.skipped = 0
        """Messages that could not be delivered because the log no longer holds them whole."""
        self.watch: Watch | None = None
        """What is noted of its lag."""
        self._services = services
        self._feeding: asyncio.Lock | None = None

    def _deliverable(self, streams: Collection[StreamId] | None) -> int:
        return self.delivery.deliverable if streams is None else self.delivery.deliverable_in(streams)

    async def _page(self, stream: StreamId, offset: int) -> Page | None:
        """The page that holds exactly this message; None when it can no longer be read."""
        try:
            page = await self._services.pages.at(stream, offset)
        except (DataDamaged, OffsetOutOfRange, TopicNotFound):
            return None
        return page if page is not None and page.first_offset <= offset else None

    def _feed_from_memory(self, demand: int, streams: Collection[StreamId] | None) -> tuple[bool, bool]:
        """Takes in a page of each stream that somebody has read already, as a wide fan-out finds it. Whether
        there was any, and whether the log holds anything to read at all."""
        self._set_horizon()
        is_fed = is_more = False
        for wish in self.delivery.wanted(demand, streams):
            if not self._is_more(wish):
                continue
            is_more = True
            page = self._services.pages.held(wish.stream, wish.start_offset)
            if page is not None:
                self._take_in(page, wish.start_offset, wish.max_messages)
                is_fed = True
        return is_fed, is_more

    def _set_horizon(self) -> None:
        if self.delivery.is_merged:
            bounds = self._services.store.bounds
            topics = self._services.topics
            streams = [s for s in self.delivery.streams if topics.find(s.topic_id) is not None]
            self.delivery.set_horizon({stream: bounds(stream).end_offset for stream in streams})

    async def _feed(self, demand: int, streams: Collection[StreamId] | None) -> bool:
        """Reads on for consumers; False when there is nothing new."""
        if self._feeding is None:
            self._feeding = asyncio.Lock()
        async with self._feeding:
            self._set_horizon()
            pages = 0
            while pages < _PAGES_AT_ONCE:
                wishes = [wish for wish in self.delivery.wanted(demand, streams) if self._is_more(wish)]
                before = pages
                for wish in wishes:
                    pages += await self._read(wish)
                    if self._deliverable(streams) >= demand:
                        return True
                if pages == before:
                    break
            return pages > 0

    def _is_more(self, wish: Wish) -> bool:
        """Whether the log goes on from there."""
        try:
            return wish.start_offset < self._services.store.bounds(wish.stream).end_offset
        except TopicNotFound:
            return False

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
        if mine is not None:
            chosen = mine if chosen is None else chosen & mine
        if self.watch is not None and self.watch.share < 1.0:
            sampled = kept(page.stream, first, end, self.watch.share)
            chosen = sampled if chosen is None else chosen & sampled
        return chosen


def _parsed(found: Any) -> dict[int, Any] | None:
    if found is None:
        return None
    return {offset: [parse_message_id(text) for text in ids] for offset, ids in found.items()}


def _clip(values: dict[int, Any], first: int, end: int) -> dict[int, Any] | None:
    return {offset: value for offset, value in values.items() if first <= offset < end} or None
