"""The pool: every place where a message can be between having been read and being done.

A message that was read is in exactly one of: ready, a lane, scheduled (timetable), waiting for a
dependency, leased, settling, parked for the dead letters, expired. (In a lane it may also be held by
one of the middle three.) The pool moves messages between these places and decides nothing about
success, failure or time limits: that is ``delivery``. All of it is volatile.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from pyroaring import BitMap64

from sparrow.kernel.causal import Dependencies
from sparrow.kernel.exchange import Arrival
from sparrow.kernel.lease import LeaseTable
from sparrow.kernel.offsets import to_list
from sparrow.kernel.ordering import ENTRY_SHIFT, SHARED, Lanes
from sparrow.kernel.ready import ReadySet, Taken
from sparrow.kernel.schedule import NEVER_US, Timetable
from sparrow.kernel.track import Track
from sparrow.model.message import MessageId, StreamId
from sparrow.model.subscription import Ordering, SubscriptionPolicy

_OFFSET_MASK = (1 << ENTRY_SHIFT) - 1
_TOTAL = "*"


class Pool:
    """Where the messages of one subscription are."""

    __slots__ = (
        "_late_keys",
        "_ordering",
        "_tracks",
        "dependencies",
        "expired",
        "expiries",
        "lanes",
        "leases",
        "ready",
        "waits",
    )

    def __init__(self, policy: SubscriptionPolicy, tracks: dict[StreamId, Track]) -> None:
        self._ordering = policy.ordering
        self._tracks = tracks
        self._late_keys: dict[int, Hashable] = {}
        """Lanes of messages that will enter them when they fall due."""
        self.ready = ReadySet()
        self.leases = LeaseTable()
        self.waits = Timetable()
        self.expiries = Timetable()
        self.dependencies = Dependencies()
        self.lanes = None if policy.ordering is Ordering.NONE else Lanes(policy.key_window)
        self.expired: dict[StreamId, BitMap64] = {}
        """Not delivered in time; to be dropped or dead-lettered at the next tick."""

    @property
    def waiting(self) -> int:
        """Messages read and not yet handed over, those with a date apart."""
        in_lanes = self.lanes.count if self.lanes is not None else 0
        return self.ready.count + in_lanes + self.dependencies.count

    @property
    def deliverable(self) -> int:
        """How many messages could be handed over now, about."""
        return self.ready.count + (self.lanes.running if self.lanes is not None else 0)

    def deliverable_in(self, streams: Collection[StreamId]) -> int:
        """How many of some streams could be handed over now, about."""
        count = self.ready.count_in(streams)
        if self.lanes is not None:
            homes = {self._tracks[stream].index for stream in streams if stream in self._tracks}
            count += self.lanes.running_in({*homes, SHARED})
        return count

    # Coming in.

    def admit(self, track: Track, offsets: BitMap64, arrival: Arrival, now_us: int) -> None:
        """Messages that were read and are to be delivered take their places; owns ``offsets``."""
        has_failed = track.cursor.failures is not None
        if self.lanes is None and arrival.is_plain and not has_failed:
            self.ready.put(track.stream, offsets)
            return
        if arrival.expires_at_us:
            offsets -= self._note_expiries(track, offsets, arrival.expires_at_us, now_us)
        if arrival.priority:
            self._note_priorities(track, offsets, arrival.priority)
        delayed, held = BitMap64(), BitMap64()
        if has_failed:
            held |= self._hold_failed(track, offsets, now_us)
        if arrival.deliver_at_us:
            delayed = self._delay(track, offsets - held, arrival.deliver_at_us, now_us)
        if arrival.depends_on:
            held |= self._hold_dependent(track, offsets - held, arrival.depends_on)
        if self.lanes is not None:
            offsets = self._enter(self.lanes, track, offsets, delayed, held - delayed, arrival)
        self._put_ready(track, offsets - delayed - held)

    def _note_expiries(
        self, track: Track, offsets: BitMap64, expires: Mapping[int, int], now_us: int
    ) -> BitMap64:
        gone = BitMap64()
        for offset, moment in expires.items():
            if offset not in offsets:
                continue
            if moment <= now_us:
                gone.add(offset)
                continue
            track.expires = track.expires or {}
            track.expires[offset] = moment
            self.expiries.put(track.stream, (offset,), moment)
        if gone:
            self.expired.setdefault(track.stream, BitMap64()).update(gone)
        return gone

    def _note_priorities(self, track: Track, offsets: BitMap64, priorities: Mapping[int, int]) -> None:
        for offset, priority in priorities.items():
            if offset in offsets and priority:
                track.priorities = track.priorities or {}
                track.priorities[offset] = priority
                if self.lanes is not None:
                    self.lanes.prioritise(track.entry(offset), priority)

    def _hold_failed(self, track: Track, offsets: BitMap64, now_us: int) -> BitMap64:
        """Those that failed before and are dead or not yet due."""
        held = BitMap64()
        for offset in to_list(track.cursor.failed & offsets):
            failure = track.cursor.failure(offset)
            if failure.verdict or failure.due_at_us > now_us:
                held.add(offset)
            if not failure.verdict and failure.due_at_us > now_us:
                self.waits.put(track.stream, (offset,), failure.due_at_us)
        return held

    def _hold_dependent(
        self, track: Track, offsets: BitMap64, needs: Mapping[int, Sequence[MessageId]]
    ) -> BitMap64:
        held = BitMap64()
        for offset, ids in needs.items():
            if offset not in offsets:
                continue
            missing = [need for need in ids if self._is_awaited(need)]
            place = (track.stream, offset)
            self.dependencies.add(place, missing)
            if self.dependencies.missing(place):
                held.add(offset)
        return held

    def _is_awaited(self, need: MessageId) -> bool:
        """Whether a message is still to come or to be acked here; what is not read is not awaited."""
        track = self._tracks.get(need.stream)
        if track is None or track.cursor.is_acked(need.offset):
            return False
        return track.passed is None or need.offset not in track.passed

    def _delay(self, track: Track, offsets: BitMap64, moments: Mapping[int, int], now_us: int) -> BitMap64:
        delayed = BitMap64()
        for offset, moment in moments.items():
            if offset in offsets and moment > now_us:
                self.waits.put(track.stream, (offset,), moment)
                delayed.add(offset)
        return delayed

    def _enter(
        self,
        lanes: Lanes,
        track: Track,
        offsets: BitMap64,
        delayed: BitMap64,
        held: BitMap64,
        arrival: Arrival,
    ) -> BitMap64:
        """Give each message its lane; returns those that have none."""
        keys, home = self._lane_keys(track, offsets, arrival)
        if arrival.published_at_us is not None and home == SHARED:
            first = arrival.first_offset
            for offset in to_list(offsets):
                lanes.rank(track.entry(offset), arrival.published_at_us[offset - first])
        if held:
            lanes.hold(track.entries(held))
        free = BitMap64()
        names: list[int] = []
        wanted: list[Hashable] = []
        for offset, entry, key in zip(to_list(offsets), track.entries(offsets), keys, strict=True):
            if key is None:
                free.add(offset)
            elif delayed and offset in delayed:
                self._late_keys[entry] = key
            else:
                names.append(entry)
                wanted.append(key)
        lanes.enter(names, wanted, home)
        return free

    def _lane_keys(self, track: Track, offsets: BitMap64, arrival: Arrival) -> tuple[Iterable[Hashable], int]:
        if self._ordering is Ordering.TOTAL:
            return [_TOTAL] * len(offsets), SHARED
        is_key = self._ordering is Ordering.KEY
        column = arrival.keys if is_key else arrival.publishers
        if column is None:
            return [None] * len(offsets), SHARED
        first, index = arrival.first_offset, track.index
        if not is_key:
            return [column[offset - first] for offset in to_list(offsets)], SHARED
        if len(offsets) == arrival.end_offset - first:
            chosen: Iterable[Hashable] = column
        else:
            chosen = [column[offset - first] for offset in to_list(offsets)]
        return [None if key is None else (index, key) for key in chosen], index

    # Between places.

    def advance(self, now_us: int) -> None:
        """What is due by now becomes deliverable; what outlived its time goes out."""
        for stream, offset in self.waits.take_due(now_us):
            self._release_one(stream, offset)
        for stream, offset in self.expiries.take_due(now_us):
            track = self._tracks[stream]
            if self.is_waiting(track, offset):
                gone = BitMap64((offset,))
                self.withdraw(track, gone)
                self._wait_no_longer(track, gone)
                self.expired.setdefault(stream, BitMap64()).update(gone)

    def is_waiting(self, track: Track, offset: int) -> bool:
        """Whether a message was read and is neither leased nor settling nor parked nor done."""
        if track.is_settling(offset) or track.cursor.failure(offset).verdict:
            return False
        return (
            self.ready.holds(track.stream, offset)
            or self.waits.due_at_us(track.stream, offset) is not None
            or bool(self.dependencies.missing((track.stream, offset)))
            or (self.lanes is not None and self.lanes.is_waiting(track.entry(offset)))
        )

    def release(self, track: Track, offsets: BitMap64) -> None:
        """These may be delivered from now on."""
        self._mind_expiries(track, offsets)
        if self.lanes is None:
            self._put_ready(track, offsets)
            return
        free = BitMap64()
        for offset, entry in zip(to_list(offsets), track.entries(offsets), strict=True):
            key = self._late_keys.pop(entry, None)
            if entry in self.lanes:
                self.lanes.put_back((entry,))
                self.lanes.release((entry,))
            elif key is not None:
                home = track.index if self._ordering is Ordering.KEY else SHARED
                self.lanes.enter((entry,), (key,), home)
            else:
                free.add(offset)
        self._put_ready(track, free)

    def withdraw(self, track: Track, offsets: BitMap64) -> None:
        """These are not to be delivered while it is decided what becomes of them."""
        self.ready.discard(track.stream, offsets)
        if self.lanes is not None:
            self.lanes.hold(e for e in track.entries(offsets) if e in self.lanes)

    def reinstate(self, track: Track, offsets: BitMap64) -> None:
        """What was being decided will not be: back to where they were before."""
        expired = self.expired.get(track.stream, ())
        back = BitMap64(
            offset
            for offset in to_list(offsets)
            if offset not in expired
            and self.waits.due_at_us(track.stream, offset) is None
            and not self.dependencies.missing((track.stream, offset))
        )
        self.release(track, back)

    def fail(self, track: Track, offsets: BitMap64) -> None:
        """These failed; later ones of their lanes are recalled from their consumers."""
        if self.lanes is None:
            return
        later = self.lanes.fail(track.entries(offsets))
        for stream, recalled in self.by_stream(later):
            revoked = self.leases.revoke(stream, recalled)
            self.lanes.put_back(self._tracks[stream].entries(revoked))
            self._mind_expiries(self._tracks[stream], revoked)

    def _mind_expiries(self, track: Track, offsets: BitMap64) -> None:
        """Their time to live may have passed while a consumer held them."""
        if track.expires:
            for offset in to_list(BitMap64(track.expires) & offsets):
                self.expiries.put(track.stream, (offset,), track.expires[offset])

    def finish(self, track: Track, offsets: BitMap64) -> None:
        """These are done."""
        if self.lanes is not None:
            self.lanes.finish(track.entries(offsets))
        if self._late_keys:
            for entry in track.entries(offsets):
                self._late_keys.pop(entry, None)
        self._wait_no_longer(track, offsets)
        if track.expires is not None:
            self.expiries.cancel(track.stream, to_list(offsets & BitMap64(track.expires)))

    def resolve(self, stream: StreamId, done: BitMap64) -> None:
        """What waited for these waits no longer."""
        for place in self.dependencies.resolve(stream, done):
            self._release_one(*place)

    def _wait_no_longer(self, track: Track, offsets: BitMap64) -> None:
        waiting = BitMap64(self.waits.waiting(track.stream)) & offsets
        if waiting:
            self.waits.cancel(track.stream, to_list(waiting))
        if self.dependencies.count:
            for offset in to_list(offsets):
                self.dependencies.cancel((track.stream, offset))

    def _release_one(self, stream: StreamId, offset: int) -> None:
        """Release a message unless something else is being decided about it, or it waits for more."""
        track = self._tracks[stream]
        if self.waits.due_at_us(stream, offset) is not None or self.dependencies.missing((stream, offset)):
            return
        if not track.is_settling(offset) and not track.cursor.is_acked(offset):
            self.release(track, BitMap64((offset,)))

    def clear(self, track: Track) -> None:
        """Forget a stream."""
        stream = track.stream
        for lease in [x for x in self.leases.by_number.values() if x.stream == stream]:
            self.leases.take_out(lease, lease.held())
        self.ready.clear(stream)
        self.waits.clear(stream)
        self.expiries.clear(stream)
        self.expired.pop(stream, None)
        if self.lanes is not None:
            self.lanes.clear(track.index)
        own = [e for e in self._late_keys if e >> ENTRY_SHIFT == track.index]
        for entry in own:
            del self._late_keys[entry]
        for waiter, offset in self.dependencies.clear(stream):
            if waiter != stream:
                self._release_one(waiter, offset)

    # Going out.

    def take(
        self, count: int, consumer: str, streams: Collection[StreamId] | None, gate_us: int | None = None
    ) -> Taken:
        """Up to ``count`` messages for a consumer; in lanes over several streams, none published after
        ``gate_us``."""
        if self.lanes is None:
            return self.ready.take(count, streams)
        homes = None if streams is None else {self._tracks[s].index for s in streams}
        share = count - min(self.ready.count, count // 2)
        entries = self.lanes.take(share, consumer, homes, gate_us)
        taken = self.by_stream(entries)
        if self.ready.count:
            taken += self.ready.take(count - len(entries), streams)
        return taken

    def by_stream(self, entries: list[int]) -> Taken:
        """Entries of lanes as offsets of streams."""
        if not entries:
            return []
        names = {track.index: stream for stream, track in self._tracks.items()}
        if len(names) == 1:
            ((index, stream),) = names.items()
            base = index << ENTRY_SHIFT
            return [(stream, BitMap64([entry - base for entry in entries]))]
        sorted_out: dict[int, list[int]] = {}
        for entry in entries:
            sorted_out.setdefault(entry >> ENTRY_SHIFT, []).append(entry & _OFFSET_MASK)
        return [(names[index], BitMap64(found)) for index, found in sorted_out.items()]

    def next_wakeup_us(self, now_expired: int = 0) -> int:
        """When something here falls due."""
        if any(self.expired.values()):
            return now_expired
        return min(
            self.leases.next_deadline_us(),
            self.waits.next_due_us(),
            self.expiries.next_due_us(),
            NEVER_US,
        )

    def _put_ready(self, track: Track, offsets: BitMap64) -> None:
        if not track.priorities:
            self.ready.put(track.stream, offsets)
            return
        special = BitMap64(track.priorities) & offsets
        for offset in to_list(special):
            self.ready.put(track.stream, BitMap64((offset,)), track.priorities[offset])
        self.ready.put(track.stream, offsets - special)
