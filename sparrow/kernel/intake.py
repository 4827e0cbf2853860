"""Intake: what a subscription reads, and where it goes.

The shell asks what is ``wanted``, reads it and ``offer`` s it. Nothing is wanted without demand or room, so
a subscription that nobody asks costs no reading, and what is read and not yet handed over is bounded.

Order over several streams (publisher, total) is a merge by publish time. It is exact because reading has a
*horizon*, the ends of all streams at one moment: as long as a stream has not been read up to there, nothing
is handed over that was published after its last known message, and that stream is the one to be read next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyroaring import BitMap64

from sparrow.kernel import facts
from sparrow.kernel.exchange import Arrival, Wish
from sparrow.kernel.facts import Fact
from sparrow.kernel.offsets import OFFSET_MAX, first_missing, span
from sparrow.kernel.state import DeliveryState
from sparrow.kernel.track import Track
from sparrow.model.message import StreamId
from sparrow.model.subscription import Ordering

READ_MIN = 1000
"""Messages to ask of the shell at least, when anything is wanted: reading one by one is dear."""

_SPARSE = frozenset({"priority", "expires_at_us", "deliver_at_us", "depends_on"})
_ORDERED: dict[Ordering, frozenset[str]] = {
    Ordering.NONE: frozenset(),
    Ordering.KEY: frozenset({"keys"}),
    Ordering.PUBLISHER: frozenset({"publishers", "published_at_us"}),
    Ordering.TOTAL: frozenset({"published_at_us"}),
}
_MERGED = frozenset({Ordering.PUBLISHER, Ordering.TOTAL})


class Intake(DeliveryState):
    """The reading side of a delivery."""

    __slots__ = ()

    @property
    def needs(self) -> frozenset[str]:
        """The columns of an ``Arrival`` that matter here; a batch without values gives ``None``."""
        large = {"large"} if self.policy.poison_rules else set()
        return _SPARSE | _ORDERED[self.policy.ordering] | large

    # Streams.

    def attach(self, stream: StreamId, start_offset: int) -> list[Fact]:
        """Read a stream from an offset on; nothing to do when it is read already."""
        if stream in self._ledger.tracks:
            return []
        return [facts.StreamAttached(self.subscription_id, *stream, start_offset)]

    def detach(self, stream: StreamId) -> list[Fact]:
        """Read a stream no more and forget its cursor."""
        if stream not in self._ledger.tracks:
            return []
        return [facts.StreamDetached(self.subscription_id, *stream)]

    # Reading.

    def wanted(self, demand: int, streams: Collection[StreamId] | None = None) -> list[Wish]:
        """What to read for ``demand`` messages of free credit; nothing without demand or room. Of some
        streams only, for a consumer that owns these: what others own and do not take is not its limit."""
        gate_us = self.gate_us()
        if not self._is_hungry(demand, gate_us, streams):
            return []
        room = self._room(demand, streams)
        wishes: list[Wish] = []
        for stream in self._ledger.tracks if streams is None else streams:
            track = self._ledger.tracks.get(stream)
            if track is None:
                continue
            space = room if room > 0 else self._least(track)
            if gate_us is not None:
                space = max(space, 1) if self._is_behind(track) and track.frontier_us == gate_us else 0
            if track.reread is None and self._horizon is not None:
                space = min(space, self._horizon.get(stream, 0) - track.read_offset)
            if space <= 0:
                continue
            if track.reread is not None:
                start = track.reread.min()
                end = first_missing(track.reread, start)
                wishes.append(Wish(stream, start, min(space, end - start)))
            else:
                wishes.append(Wish(stream, track.read_offset, space))
        return wishes

    @property
    def is_merged(self) -> bool:
        """Whether order spans several streams, so that reading needs a horizon."""
        return self.policy.ordering in _MERGED and len(self._ledger.tracks) > 1

    def set_horizon(self, ends: Mapping[StreamId, int]) -> None:
        """The ends of all streams at one moment. Nothing beyond is read, and as long as a stream is not
        read up to there, what was published later than its last known message waits: another one of that
        stream may go before it. What is published after that moment comes after all of it."""
        self._horizon = ends

    def _is_behind(self, track: Track) -> bool:
        horizon = self._horizon
        return horizon is not None and track.read_offset < horizon.get(track.stream, 0)

    def gate_us(self) -> int | None:
        """Up to which publish time order over several streams is known; ``None`` is no limit."""
        if self._horizon is None or not self.is_merged:
            return None
        behind = [t.frontier_us for t in self._ledger.tracks.values() if self._is_behind(t)]
        return min(behind, default=None)

    def _is_hungry(self, demand: int, gate_us: int | None, streams: Collection[StreamId] | None) -> bool:
        if demand <= 0 or self.is_paused:
            return False
        pool = self._pool
        if pool is None:
            return True
        here = pool.deliverable if streams is None else pool.deliverable_in(streams)
        is_short = gate_us is not None or here < demand
        return is_short and pool.waits.count < self.policy.max_scheduled

    def _room(self, demand: int, streams: Collection[StreamId] | None) -> int:
        waiting = self._pool.waiting if self._pool is not None else 0
        if streams is not None and self._pool is not None:
            waiting = self._pool.deliverable_in(streams)
        return min(self.policy.read_ahead - waiting, max(demand, READ_MIN))

    def _least(self, track: Track) -> int:
        """One message of a stream that has none here: all the others may be waiting for it."""
        return 1 if track.reread is not None or not track.known_unacked(OFFSET_MAX) else 0

    def offer(self, arrival: Arrival, now_us: int) -> None:
        """Messages were read, in order within their stream. What is known already is ignored."""
        track = self._ledger.tracks.get(arrival.stream)
        if track is None:
            return
        if arrival.first_offset < track.read_offset:
            if track.reread is not None:
                self._offer_again(track, arrival, now_us)
            if arrival.end_offset <= track.read_offset:
                return
        start, end = track.read_offset, arrival.end_offset
        track.read_offset = end
        if arrival.published_at_us:
            track.frontier_us = next(filter(None, reversed(arrival.published_at_us)), track.frontier_us)
        offsets = track.cursor.unacked(start, end)
        self._admit(track, offsets, arrival, now_us)

    def _offer_again(self, track: Track, arrival: Arrival, now_us: int) -> None:
        """Of what must be read again: the stretch is here, and what lies before it is gone."""
        assert track.reread is not None
        offsets = track.reread & span(0, min(arrival.end_offset, track.read_offset))
        track.reread = (track.reread - offsets) or None
        self._admit(track, offsets, arrival, now_us)

    def _admit(self, track: Track, offsets: BitMap64, arrival: Arrival, now_us: int) -> None:
        pool = self._open_pool()
        if track.settling is not None:
            offsets -= track.settling
        here = offsets
        if arrival.selected is not None:
            here = offsets & arrival.selected
        if offsets and offsets.min() < arrival.first_offset:
            here = here.copy()
            here.remove_range(0, arrival.first_offset)
        passed = offsets - here if here is not offsets else None
        if passed:
            track.pass_over(passed)
            pool.resolve(track.stream, passed)
        if arrival.large:
            track.large = arrival.large if track.large is None else track.large | arrival.large
        pool.admit(track, here, arrival, now_us)
