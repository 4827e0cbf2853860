"""Assignment: which member of a group reads which streams.

Pure functions of who is there, what there is, and, for *sticky*, who has what. Members and streams
are sorted first, so the same input gives the same answer in every process. Every stream goes to exactly
one member. *Round robin* and *sticky* give any two members numbers of streams that differ by one at
most; *range* keeps that for each topic alone, so that neighbours stay together and the first members
may have one more of each topic.

*Sticky* moves the least that a balance allows: when one member comes or goes, no more than a fair
share, ``ceil(streams / members)``, changes hands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from sparrow.model.group import GroupStrategy
from sparrow.model.message import StreamId

Assignment = dict[str, frozenset[StreamId]]
Current = Mapping[str, frozenset[StreamId]]


def assign(
    strategy: GroupStrategy, members: Iterable[str], streams: Iterable[StreamId], current: Current
) -> Assignment:
    """The streams of every member; nothing to anybody when there is no member."""
    names, parts = sorted(set(members)), sorted(set(streams))
    if not names:
        return {}
    return _STRATEGIES[strategy](names, parts, current)


def count_moved(before: Current, after: Current) -> int:
    """How many streams have an owner now that had another one before."""
    owners = {stream: name for name, streams in before.items() for stream in streams}
    return sum(owners.get(s, name) != name for name, streams in after.items() for s in streams)


def _by_range(members: Sequence[str], streams: Sequence[StreamId], current: Current) -> Assignment:
    got: dict[str, list[StreamId]] = {name: [] for name in members}
    for _, same_topic in groupby(streams, key=lambda stream: stream.topic_id):
        parts = list(same_topic)
        size, longer = divmod(len(parts), len(members))
        start = 0
        for index, name in enumerate(members[: len(parts)]):
            end = start + size + (index < longer)
            got[name] += parts[start:end]
            start = end
    return {name: frozenset(parts) for name, parts in got.items()}


def _by_turns(members: Sequence[str], streams: Sequence[StreamId], current: Current) -> Assignment:
    return {name: frozenset(streams[index :: len(members)]) for index, name in enumerate(members)}


def _sticky(members: Sequence[str], streams: Sequence[StreamId], current: Current) -> Assignment:
    """Who has most already gets the longer share; what is above a share goes to who is below."""
    loose = set(streams)
    kept = {name: _claim(current.get(name, frozenset()), loose) for name in members}
    size, longer = divmod(len(streams), len(members))
    room: deque[tuple[str, int]] = deque()
    for index, name in enumerate(sorted(members, key=lambda name: (-len(kept[name]), name))):
        share = size + (index < longer)
        loose.update(kept[name][share:])
        del kept[name][share:]
        room.append((name, share - len(kept[name])))
    for stream in sorted(loose):
        _deal(stream, room, kept)
    return {name: frozenset(parts) for name, parts in kept.items()}


def _claim(had: frozenset[StreamId], loose: set[StreamId]) -> list[StreamId]:
    """What a member had and nobody claimed before it; no longer loose."""
    mine = had & loose
    loose -= mine
    return sorted(mine)


def _deal(stream: StreamId, room: deque[tuple[str, int]], kept: dict[str, list[StreamId]]) -> None:
    """To the next member with room, which then goes to the end of the line."""
    name, free = room.popleft()
    while free == 0:
        name, free = room.popleft()
    kept[name].append(stream)
    room.append((name, free - 1))


_STRATEGIES: dict[GroupStrategy, Callable[[Sequence[str], Sequence[StreamId], Current], Assignment]] = {
    GroupStrategy.RANGE: _by_range,
    GroupStrategy.ROUND_ROBIN: _by_turns,
    GroupStrategy.STICKY: _sticky,
}
