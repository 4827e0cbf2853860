"""A query's progress as a subscription, so that its lag is seen where all lags are.

Committing is a cumulative ack: everything below the position is done. It only ever goes forward, may be
repeated, and passes over topics that are gone. A subscription that does not exist yet is made, if one pattern
says what it reads.
"""

from __future__ import annotations

import asyncio

from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import InvalidOption, OffsetOutOfRange, SubscriptionNotFound, TopicNotFound
from sparrow.spark.offsets import Offsets
from sparrow.spark.options import ReadOptions, Where
from sparrow.spark.origins import BrokerOrigin, open_broker


class SubscriptionCursor:
    """Where a query stands, in the broker's books."""

    def __init__(self, origin: BrokerOrigin, name: str) -> None:
        self._origin = origin
        self._name = name
        self._committed: set[tuple[tuple[str, int], int]] = set()

    @classmethod
    def open(cls, options: ReadOptions) -> SubscriptionCursor:
        """The subscription that options name; made when it is not there."""
        assert options.subscription is not None
        origin = open_broker(options.where)
        broker, name = origin.broker, options.subscription
        try:
            pattern = parse_pattern(origin.run(broker.subscription(name)).pattern)
        except SubscriptionNotFound:
            if len(options.patterns) > 1:
                raise InvalidOption(
                    f"option subscription: there is no subscription {name!r}, and several topics to read",
                    hint="Create it with a pattern that covers them, or use subscribePattern.",
                    option="subscription",
                ) from None
            origin.run(broker.subscribe(name, options.patterns[0], start="earliest"))
            return cls(origin, name)
        for each in options.patterns:
            if not pattern.covers(parse_pattern(each)):
                raise InvalidOption(
                    f"option subscription: {name!r} reads {str(pattern)!r}, which does not cover {each!r}",
                    hint="Take another subscription, or leave the option out.",
                    option="subscription",
                )
        return cls(origin, name)

    @classmethod
    def of(cls, where: Where, name: str) -> SubscriptionCursor:
        """One that exists."""
        return cls(open_broker(where), name)

    def commit(self, offsets: Offsets) -> None:
        """Everything below these positions is done."""
        changed = [item for item in offsets.next.items() if item not in self._committed]
        if changed:
            self._origin.run(self._commit(changed))
            self._committed = set(offsets.next.items())

    async def _commit(self, changed: list[tuple[tuple[str, int], int]]) -> None:
        handle = await self._origin.broker.subscription(self._name)
        places = [handle.commit(topic, partition, offset) for (topic, partition), offset in changed]
        for outcome in await asyncio.gather(*places, return_exceptions=True):
            # A topic that is gone or new: the query itself complains if that matters.
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, TopicNotFound | OffsetOutOfRange
            ):
                raise outcome
