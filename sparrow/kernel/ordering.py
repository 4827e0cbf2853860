"""Order: lanes in which the next message waits for the one before.

A lane is what is ordered together: a key, a publisher, or the whole subscription. Its messages wait
in the order of their rank (the offset; over several streams the publish time first). A lane runs
when its first message is not held and it has room: one outstanding message when strict, up to
``window`` of them on one consumer at a time when that consumer processes a lane serially.

A message is *held* while it waits for its next try, for a dependency or for its dead letter; it then
holds up its own lane and nobody else's. When a message fails, it and the later outstanding ones of
its lane go back to their places; the later ones lost their lease without having failed.

Messages are named by *entries*: one integer of stream index and offset, so that the per-message work
is a few dictionary steps. The invariant that everything rests on: an entry is in ``_lane_of`` exactly
as long as it is waiting or outstanding in that lane, and in one of the two, once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Hashable, Iterable

ENTRY_SHIFT = 48
"""Offsets stay below 2**48: at a million messages a second that is nine years of one stream."""
SHARED = -1
"""Home of the lanes that span streams."""

Place = int | str
"""Where a lane queues: its home (a stream index or SHARED), or the consumer that it sticks to."""


class Lane:
    """Messages that are ordered together."""

    __slots__ = ("consumer", "home", "key", "outstanding", "place", "waiting")

    def __init__(self, key: Hashable, home: int) -> None:
        self.key = key
        self.home = home
        self.waiting: deque[int] = deque()
        self.outstanding: list[int] = []
        self.consumer: str | None = None
        self.place: Place | None = None
        """The queue that it stands in; entries of other queues are leftovers."""


class Lanes:
    """All lanes of one subscription."""

    __slots__ = ("_held", "_lane_of", "_lanes", "_priority", "_queues", "_rank", "_turn", "_window")

    def __init__(self, window: int = 1) -> None:
        self._window = window
        self._lanes: dict[Hashable, Lane] = {}
        self._lane_of: dict[int, Lane] = {}
        self._held: set[int] = set()
        self._rank: dict[int, int] = {}
        self._priority: dict[int, int] = {}
        self._queues: dict[Place, dict[int, deque[Lane]]] = {}
        """Lanes that run, by place and priority of their first message."""
        self._turn = 0

    @property
    def count(self) -> int:
        """Messages waiting or outstanding."""
        return len(self._lane_of)

    @property
    def running(self) -> int:
        """Lanes that any consumer could be served from.

        May count leftovers; after a ``take`` that returned less than was asked there are none.
        """
        homes = (levels for place, levels in self._queues.items() if not isinstance(place, str))
        return sum(len(queue) for levels in homes for queue in levels.values())

    def running_in(self, homes: Collection[int]) -> int:
        """The same of some homes."""
        levels = (levels for place, levels in self._queues.items() if place in homes)
        return sum(len(queue) for one in levels for queue in one.values())

    def reserved(self, consumer: str) -> int:
        """Messages that this consumer alone could be handed now: those of lanes that stick to it."""
        queues = self._queues.get(consumer, {}).values()
        lanes = {lane.key: lane for queue in queues for lane in queue if lane.place == consumer}
        return sum(min(len(x.waiting), self._window - len(x.outstanding)) for x in lanes.values())

    def is_waiting(self, entry: int) -> bool:
        """Whether a message is in a lane and not outstanding."""
        lane = self._lane_of.get(entry)
        return lane is not None and entry not in lane.outstanding

    def __contains__(self, entry: int) -> bool:
        return entry in self._lane_of

    def is_held(self, entry: int) -> bool:
        """Whether a message holds up its lane."""
        return entry in self._held

    def is_first(self, entry: int) -> bool:
        """Whether nothing of its lane goes before a message; true for one that has no lane."""
        lane = self._lane_of.get(entry)
        if lane is None:
            return True
        return bool(lane.waiting) and lane.waiting[0] == entry and not lane.outstanding

    # Coming in.

    def enter(self, entries: Iterable[int], keys: Iterable[Hashable], home: int) -> None:
        """Messages take their places in their lanes, in the order of the log."""
        lanes, lane_of, rank, window = self._lanes, self._lane_of, self._rank, self._window
        for entry, key in zip(entries, keys, strict=True):
            lane = lanes.get(key)
            if lane is None:
                lane = lanes[key] = Lane(key, home)
            lane_of[entry] = lane
            waiting = lane.waiting
            if waiting and (rank or entry < waiting[-1]):
                self._insert(lane, entry)
            else:
                waiting.append(entry)
            if lane.place is None and len(lane.outstanding) < window:
                self._queue(lane)

    def rank(self, entry: int, rank: int) -> None:
        """Over several streams: what decides before the entry itself; to be told before entering."""
        self._rank[entry] = rank

    def prioritise(self, entry: int, priority: int) -> None:
        """A lane queues by the priority of its first message; to be told before entering."""
        self._priority[entry] = priority

    def hold(self, entries: Iterable[int]) -> None:
        """These hold up their lanes, from before they enter or from now on."""
        self._held.update(entries)

    def release(self, entries: Iterable[int]) -> None:
        """These hold up their lanes no longer."""
        for entry in entries:
            self._held.discard(entry)
            lane = self._lane_of.get(entry)
            if lane is not None:
                self._queue(lane)

    # Going out.

    def take(
        self, count: int, consumer: str, homes: Collection[int] | None = None, gate: int | None = None
    ) -> list[int]:
        """Up to ``count`` messages for a consumer: those of lanes that stick to it come first. What ranks
        above ``gate`` stays: something that is not here yet may go before it."""
        taken: list[int] = []
        gated: list[Lane] = []
        for place in self._places(consumer, homes):
            levels = self._queues.get(place)
            for priority in sorted(levels, reverse=True) if levels else ():
                self._drain(place, priority, count, consumer, taken, gate, gated)
                if len(taken) >= count:
                    break
            if len(taken) >= count:
                break
        for lane in gated:
            self._queue(lane)
        return taken

    def finish(self, entries: Iterable[int]) -> None:
        """These are done; the next of their lanes may go."""
        lane_of, held = self._lane_of, self._held
        has_marks = bool(self._rank or self._priority)
        for entry in entries:
            lane = lane_of.pop(entry, None)
            if lane is None:
                continue
            outstanding = lane.outstanding
            if entry in outstanding:
                outstanding.remove(entry)
            else:
                lane.waiting.remove(entry)
            if held:
                held.discard(entry)
            if has_marks:
                self._forget(entry)
            if not outstanding and lane.consumer is not None:
                lane.consumer = lane.place = None
            if lane.waiting:
                self._queue(lane)
            elif not outstanding:
                del self._lanes[lane.key]
                lane.place = None

    def fail(self, entries: Iterable[int]) -> list[int]:
        """These failed: they take their old places and hold up their lanes.

        Returns the later ones that are outstanding in the same lanes. The caller ends their leases
        and puts them back; those that are being settled have no lease and stay.
        """
        later: list[int] = []
        for entry in entries:
            lane = self._lane_of.get(entry)
            if lane is None:
                continue
            self._held.add(entry)
            if len(lane.outstanding) > 1:
                mark = self._key(entry)
                later += [e for e in lane.outstanding if self._key(e) > mark]
            self.put_back((entry,))
        return later

    def put_back(self, entries: Iterable[int]) -> None:
        """These are outstanding no longer and take their old places."""
        for entry in entries:
            lane = self._lane_of.get(entry)
            if lane is None or entry not in lane.outstanding:
                continue
            lane.outstanding.remove(entry)
            self._insert(lane, entry)
            if not lane.outstanding:
                lane.consumer = None
                lane.place = None
            self._queue(lane)

    def clear(self, index: int) -> None:
        """Forget a stream."""
        gone = [entry for entry in self._lane_of if entry >> ENTRY_SHIFT == index]
        self.finish(gone)
        self._held = {entry for entry in self._held if entry >> ENTRY_SHIFT != index}

    def drop_consumer(self, consumer: str) -> None:
        """The consumer holds nothing any more; its queue goes."""
        self._queues.pop(consumer, None)

    # Inside.

    def _places(self, consumer: str, homes: Collection[int] | None) -> list[Place]:
        places: list[Place] = [p for p in self._queues if not isinstance(p, str)]
        if homes is not None:
            places = [place for place in places if place in homes or place == SHARED]
        if len(places) > 1:
            first = self._turn % len(places)
            self._turn += 1
            places = places[first:] + places[:first]
        return [consumer, *places] if consumer in self._queues else places

    def _drain(
        self,
        place: Place,
        priority: int,
        count: int,
        consumer: str,
        taken: list[int],
        gate: int | None,
        gated: list[Lane],
    ) -> None:
        levels = self._queues[place]
        queue = levels[priority]
        held, window = self._held, self._window
        room = count - len(taken)
        while queue and room > 0:
            lane = queue.popleft()
            if lane.place != place:
                continue
            lane.place = None
            waiting, outstanding = lane.waiting, lane.outstanding
            while waiting and room > 0 and len(outstanding) < window and waiting[0] not in held:
                if gate is not None and self._rank.get(waiting[0], 0) > gate:
                    gated.append(lane)
                    break
                entry = waiting.popleft()
                outstanding.append(entry)
                taken.append(entry)
                room -= 1
            if window > 1 and outstanding:
                lane.consumer = consumer
                if not (gated and gated[-1] is lane):
                    self._queue(lane)
        if not queue:
            levels.pop(priority, None)
            if not levels:
                self._queues.pop(place, None)

    def _queue(self, lane: Lane) -> None:
        """Stand the lane in its queue if it runs and does not stand there yet."""
        waiting = lane.waiting
        if not waiting or len(lane.outstanding) >= self._window or waiting[0] in self._held:
            return
        place: Place = lane.home if lane.consumer is None else lane.consumer
        if lane.place == place:
            return
        lane.place = place
        levels = self._queues.get(place)
        if levels is None:
            levels = self._queues[place] = {}
        priority = self._priority.get(waiting[0], 0) if self._priority else 0
        queue = levels.get(priority)
        if queue is None:
            queue = levels[priority] = deque()
        queue.append(lane)

    def _insert(self, lane: Lane, entry: int) -> None:
        """Put an entry where its rank belongs; nearly always an end."""
        waiting, mark = lane.waiting, self._key(entry)
        if not waiting or self._key(waiting[-1]) < mark:
            waiting.append(entry)
        elif mark < self._key(waiting[0]):
            waiting.appendleft(entry)
        else:
            waiting.insert(bisect_left(waiting, mark, key=self._key), entry)

    def _key(self, entry: int) -> tuple[int, int]:
        return self._rank.get(entry, 0), entry

    def _forget(self, entry: int) -> None:
        if self._rank:
            self._rank.pop(entry, None)
        if self._priority:
            self._priority.pop(entry, None)
