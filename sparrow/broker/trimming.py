"""Gives up old messages for new ones, where a topic's ``drop_oldest`` asks for it.

Each subscription that is too far behind gets a cumulative ack of its oldest messages: a fact in the journal,
as if it had committed, so a restart knows of it too. What consumers hold of them is taken along. Over several
partitions each gives its share, rounded down. Rather too little is given up than too much.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.lags import Lags
from sparrow.broker.watch import Watch
from sparrow.kernel.exchange import Lag, total
from sparrow.kernel.flow import Trim
from sparrow.model.message import StreamId
from sparrow.store.ports import Store


class Trimming:
    """The one who gives up."""

    def __init__(self, store: Store, lags: Lags, clock: Clock) -> None:
        self._store = store
        self._lags = lags
        self._clock = clock

    async def trim(self, backlogs: Sequence[tuple[Courier, list[Lag]]], wanted: Trim) -> int:
        """Returns how many messages were given up, over all subscriptions."""
        count = 0
        for courier, lags in backlogs:
            excess = 0 if wanted.keep_newest is None else total(lags) - wanted.keep_newest
            for lag in lags:
                end_offset = self._by_count(courier, lag, excess, total(lags))
                if wanted.keep_younger_us is not None and lag.messages > 0:
                    oldest_us = self._clock.now_us() - wanted.keep_younger_us
                    end_offset = max(end_offset, await self._by_age(lag, oldest_us))
                count += await self._give_up(courier, lag.stream, end_offset)
        return count

    def _by_count(self, courier: Courier, lag: Lag, excess: int, depth: int) -> int:
        """Up to where a stream gives its share of what is too much."""
        if excess <= 0 or lag.messages <= 0 or lag.oldest_offset is None:
            return 0
        share = excess * lag.messages // depth
        if share == 0:
            return 0
        end = self._store.bounds(lag.stream).end_offset
        waiting = courier.delivery.cursor(lag.stream).unacked(lag.oldest_offset, end)
        return int(waiting[min(share, len(waiting)) - 1]) + 1 if waiting else 0

    async def _by_age(self, lag: Lag, oldest_us: int) -> int:
        """The first offset that is young enough: times ascend, so it is found by halving."""
        low, high = lag.oldest_offset or 0, self._store.bounds(lag.stream).end_offset
        while low < high:
            middle = (low + high) // 2
            if await self._lags.published_at(lag.stream, middle) < oldest_us:
                low = middle + 1
            else:
                high = middle
        return low

    async def _give_up(self, courier: Courier, stream: StreamId, end_offset: int) -> int:
        delivery = courier.delivery
        if courier.is_stopped or stream not in courier.streams:
            return 0
        if end_offset <= delivery.cursor(stream).floor:
            return 0
        count = delivery.cursor(stream).unacked_count(end_offset)
        if courier.watch is None:
            courier.watch = Watch()
        courier.watch.gave_up(stream, end_offset)
        decided = delivery.commit(stream, end_offset, self._store.bounds(stream).end_offset)
        await courier.settle(decided, is_confirmed=True)
        return count
