"""What is noted of a subscription while it works, for the sake of its lag.

Noting is a few additions for every batch handed over or acked. Once a second or so the sums are told to the
meters (kernel/lag.py), one of the subscription and one of each consumer. The publish time of a message is
taken to be that of its page, which was stored at once. How long an ack took is known by the place where
its lease begins; the oldest of very many open leases are forgotten and not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparrow.broker.counts import Counts
from sparrow.kernel.exchange import Refusal, Run
from sparrow.kernel.lag import LagMeter
from sparrow.kernel.lease import NamedOffsets, parse_ack_ids
from sparrow.kernel.sampling import Sampler
from sparrow.model.errors import StaleAckId
from sparrow.model.flow import LagLimits, SamplePolicy
from sparrow.model.message import Delivered, StreamId

OPEN_MAX = 1024
"""Leases whose hand-over is remembered."""
CONSUMERS_MAX = 64
"""Consumers of one subscription that have a meter of their own."""
IDLE_US = 600 * 1_000_000
"""A consumer that did nothing for so long is forgotten."""

Place = tuple[StreamId, int]
"""Stream and first offset of a lease."""
Open = list[Any]
"""A lease that is being worked on: consumer, time of hand-over, publish time, messages left."""


class Tally:
    """Sums since they were last told."""

    __slots__ = ("acked", "end_to_end_us", "handed", "processing_us", "waited_us")

    def __init__(self) -> None:
        self.handed = 0
        self.waited_us = 0
        """From publish to hand-over, over all that were handed over."""
        self.acked = 0
        self.end_to_end_us = 0
        self.processing_us = 0

    def tell(self, meter: LagMeter, now_us: int) -> None:
        if self.handed:
            meter.handed_over(self.handed, self.handed * now_us - self.waited_us, now_us)
        if self.acked:
            since_us = self.acked * now_us
            meter.acked(self.acked, since_us - self.end_to_end_us, since_us - self.processing_us, now_us)


class Watch:
    """One subscription; a change of its policy does not end it."""

    __slots__ = (
        "_given_up",
        "_meters",
        "_open",
        "_sample_policy",
        "_seen_us",
        "_tallies",
        "counts",
        "ends",
        "meter",
        "sampler",
    )

    def __init__(self) -> None:
        self.counts = Counts()
        self.meter: LagMeter | None = None
        self.sampler: Sampler | None = None
        self.ends: dict[StreamId, int] = {}
        """The log's ends when they were last looked at."""
        self._tallies: dict[str, Tally] = {}
        self._open: dict[Place, Open] = {}
        self._meters: dict[str, LagMeter] | None = None
        self._seen_us: dict[str, int] | None = None
        self._given_up: dict[StreamId, int] | None = None
        self._sample_policy: SamplePolicy | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something happened that the meters were not told of."""
        return bool(self._tallies)

    @property
    def share(self) -> float:
        """Of the messages, how many the subscription gets."""
        return 1.0 if self.sampler is None else self.sampler.share

    # Noting.

    def handed_over(
        self, consumer: str, runs: Sequence[Run], found: Sequence[Delivered], now_us: int, is_for_good: bool
    ) -> None:
        """Messages went to a consumer; ``is_for_good`` when they count as acked with that."""
        count = len(found)
        published_us = found[0].about_published_us
        if count > 1:
            published_us = (published_us + found[-1].about_published_us) // 2
        tally = self._tallies.get(consumer) or self._tally(consumer)
        waited_us = count * (now_us - published_us)
        tally.handed += count
        tally.waited_us += waited_us
        counts = self.counts
        counts.delivered += count
        counts.redelivered += min(count, sum(len(run.attempts) for run in runs))
        if is_for_good:
            counts.acked += count
            tally.acked += count
            tally.end_to_end_us += waited_us
            return
        open_leases = self._open
        for run in runs:
            open_leases[run.stream, run.start_offset] = [consumer, now_us, published_us, run.size]
        if len(open_leases) > OPEN_MAX:
            for place in list(open_leases)[: len(open_leases) - OPEN_MAX]:
                del open_leases[place]

    def acked(self, groups: Iterable[NamedOffsets], now_us: int) -> None:
        """Messages were acked, by lease."""
        for name, offsets, _ in groups:
            self._ack((name.stream, name.first_offset), len(offsets), now_us)

    def committed(self, stream: StreamId, end_offset: int, now_us: int) -> None:
        """Everything below an offset was acked."""
        done = [place for place in self._open if place[0] == stream and place[1] < end_offset]
        for place in done:
            self._ack(place, min(self._open[place][3], end_offset - place[1]), now_us)

    def _ack(self, place: Place, count: int, now_us: int) -> None:
        lease = self._open.get(place)
        if lease is None:
            return
        consumer, at_us, published_us, left = lease
        tally = self._tallies.get(consumer) or self._tally(consumer)
        tally.acked += count
        tally.end_to_end_us += count * (now_us - published_us)
        tally.processing_us += count * (now_us - at_us)
        if left <= count:
            del self._open[place]
        else:
            lease[3] = left - count

    def _tally(self, consumer: str) -> Tally:
        tally = self._tallies[consumer] = Tally()
        return tally

    # Messages that flow control took away.

    def gave_up(self, stream: StreamId, end_offset: int) -> None:
        """Everything below an offset was given up, also what consumers hold."""
        if self._given_up is None:
            self._given_up = {}
        self._given_up[stream] = end_offset
        for place in [place for place in self._open if place[0] == stream and place[1] < end_offset]:
            del self._open[place]

    def forgive(self, refused: list[Refusal]) -> list[Refusal]:
        """What is left of refusals without those of messages that were given up in their consumer's
        hands: such are done, and nobody did anything wrong."""
        given_up = self._given_up
        if given_up is None:
            return refused
        return [refusal for refusal in refused if not _is_given_up(refusal, given_up)]

    # Telling.

    def tell(self, limits: LagLimits, now_us: int) -> LagMeter:
        """Tells the meters what happened since; the subscription's."""
        if self.meter is None:
            self.meter = LagMeter(limits, now_us)
        elif self.meter.limits != limits:
            self.meter.change(limits)
        for consumer, tally in self._tallies.items():
            tally.tell(self.meter, now_us)
            meter = self._meter_of(consumer, limits, now_us)
            if meter is not None:
                tally.tell(meter, now_us)
        self._tallies.clear()
        return self.meter

    def sample(self, policy: SamplePolicy | None, oldest_age_us: int, now_us: int) -> None:
        """The share from now on."""
        if policy is None:
            self.sampler = None
            return
        if self.sampler is None:
            self.sampler = Sampler(policy)
        elif self._sample_policy != policy:
            self.sampler.change(policy)
        self._sample_policy = policy
        self.sampler.observe(oldest_age_us, now_us)

    def consumers(self) -> dict[str, LagMeter]:
        """The meters of its consumers."""
        return {} if self._meters is None else self._meters

    def oldest_held_us(self, consumer: str) -> int | None:
        """When the oldest message was published that a consumer holds."""
        times = [published_us for name, _, published_us, _ in self._open.values() if name == consumer]
        return min(times, default=None)

    def _meter_of(self, consumer: str, limits: LagLimits, now_us: int) -> LagMeter | None:
        if self._meters is None or self._seen_us is None:
            self._meters, self._seen_us = {}, {}
        meter = self._meters.get(consumer)
        if meter is None:
            for name in [name for name, at_us in self._seen_us.items() if at_us < now_us - IDLE_US]:
                del self._meters[name], self._seen_us[name]
            if len(self._meters) >= CONSUMERS_MAX:
                return None
            meter = self._meters[consumer] = LagMeter(limits, now_us)
        elif meter.limits != limits:
            meter.change(limits)
        self._seen_us[consumer] = now_us
        return meter


def _is_given_up(refusal: Refusal, given_up: dict[StreamId, int]) -> bool:
    if not isinstance(refusal.error, StaleAckId):
        return False
    groups = parse_ack_ids([refusal.ack_id]).groups
    return all(max(offsets) < given_up.get(name.stream, 0) for name, offsets, _ in groups)
