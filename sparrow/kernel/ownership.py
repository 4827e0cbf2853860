"""Ownership: which member may lease which stream, also while streams change hands.

A generation assigns every stream to one member. A stream that moves *drains*: its new owner may not
lease it before the old one holds none of it any more, is gone, or had long enough. So no stream is ever
leasable by two members. A member leases what it kept without a pause; what it gained, after it has
accepted the generation; in a pausing (eager) generation, nothing before all is done.

An owner may settle what it holds of its streams and of those that drain from it, with any generation
since it has owned them without a break; whoever owned a stream before a break is stale.

Refuses to know: time beyond the deadlines it is given, members that are not in the assignment, leases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from sparrow.kernel.schedule import NEVER_US
from sparrow.model.message import StreamId

Streams = frozenset[StreamId]
NOTHING: Streams = frozenset()


class Drain(NamedTuple):
    """A stream on its way: who must let go of it, owner since which generation, and until when."""

    member_id: str
    since: int
    deadline_us: int


class Ownership:
    """The assignment of one group and what is still in motion of it."""

    __slots__ = ("_assigned", "_drains", "_gained", "_is_pausing", "_leasable", "_since")

    def __init__(self) -> None:
        self._assigned: dict[str, Streams] = {}
        self._since: dict[StreamId, int] = {}
        self._drains: dict[StreamId, Drain] = {}
        self._gained: dict[str, Streams] = {}
        """Members that have not accepted yet, and what they will have more."""
        self._is_pausing = False
        self._leasable: dict[str, Streams] = {}
        """Answers of ``leasable`` since the last change."""

    @property
    def assignment(self) -> Mapping[str, Streams]:
        """What every member has in this generation; not to be changed."""
        return self._assigned

    @property
    def drains(self) -> Mapping[StreamId, Drain]:
        """The streams that wait for their old owner; not to be changed."""
        return self._drains

    @property
    def waiting(self) -> Collection[str]:
        """Members that have not accepted yet."""
        return self._gained.keys()

    @property
    def is_settled(self) -> bool:
        """Whether everybody has accepted and nothing drains."""
        return not self._gained and not self._drains

    def leasable(self, member_id: str) -> Streams:
        """What the member may lease now."""
        known = self._leasable.get(member_id)
        if known is None:
            known = self._leasable[member_id] = self._may_lease(member_id)
        return known

    def may_settle(self, member_id: str, stream: StreamId, generation: int) -> bool:
        """Whether the member may settle or commit in the stream, speaking for that generation."""
        drain = self._drains.get(stream)
        if drain is not None:
            return drain.member_id == member_id and drain.since <= generation
        if stream not in self._assigned.get(member_id, NOTHING):
            return False
        if stream in self._gained.get(member_id, NOTHING):
            return False
        return self._since[stream] <= generation

    def begin(
        self,
        plan: Mapping[str, Streams],
        generation: int,
        drain_deadline_us: int,
        *,
        is_pausing: bool,
    ) -> None:
        """A generation starts; the one before has ended, except for members that are gone."""
        assert self.is_settled, "rebalances of a group go one after the other"
        owners = {stream: name for name, streams in self._assigned.items() for stream in streams}
        since = {}
        for name, streams in plan.items():
            for stream in streams:
                before = owners.get(stream)
                since[stream] = self._since[stream] if before == name else generation
                if before is not None and before != name:
                    self._drains[stream] = Drain(before, self._since[stream], drain_deadline_us)
        self._gained = {name: streams - self._assigned.get(name, NOTHING) for name, streams in plan.items()}
        self._assigned, self._since = dict(plan), since
        self._is_pausing = is_pausing
        self._changed()

    def accept(self, member_id: str) -> None:
        """The member has taken up its assignment."""
        self._gained.pop(member_id, None)
        self._changed()

    def release(self, member_id: str, stream: StreamId) -> bool:
        """The old owner holds nothing of the stream any more; says whether that was waited for."""
        drain = self._drains.get(stream)
        if drain is None or drain.member_id != member_id:
            return False
        del self._drains[stream]
        self._changed()
        return True

    def release_all(self, member_id: str) -> None:
        """The member, or the process that had its name, holds nothing any more."""
        kept = {stream: drain for stream, drain in self._drains.items() if drain.member_id != member_id}
        self._drains = kept
        self._changed()

    def drop(self, member_id: str) -> None:
        """The member is gone: its streams have no owner until the next generation."""
        for stream in self._assigned.pop(member_id, NOTHING):
            del self._since[stream]
        self._gained.pop(member_id, None)
        self.release_all(member_id)

    def retain(self, streams: Streams) -> None:
        """Only these streams exist; others have no owner and do not drain."""
        self._assigned = {name: mine & streams for name, mine in self._assigned.items()}
        self._gained = {name: mine & streams for name, mine in self._gained.items()}
        self._since = {stream: since for stream, since in self._since.items() if stream in streams}
        self._drains = {stream: drain for stream, drain in self._drains.items() if stream in streams}
        self._changed()

    def expire(self, now_us: int) -> list[tuple[str, StreamId]]:
        """End the drains that had long enough: who must lose its leases of which stream."""
        late = [(d.member_id, stream) for stream, d in self._drains.items() if d.deadline_us <= now_us]
        for member_id, stream in late:
            self.release(member_id, stream)
        return sorted(late)

    def finish(self) -> None:
        """The generation is in force; a pause ends."""
        assert self.is_settled
        self._is_pausing = False
        self._changed()

    def clear(self) -> None:
        """Nobody is left."""
        for member_id in list(self._assigned):
            self.drop(member_id)
        assert self.is_settled
        self.finish()

    def next_wakeup_us(self) -> int:
        """When the next drain has had long enough."""
        return min((drain.deadline_us for drain in self._drains.values()), default=NEVER_US)

    def _may_lease(self, member_id: str) -> Streams:
        if self._is_pausing:
            return NOTHING
        mine = self._assigned.get(member_id, NOTHING) - self._gained.get(member_id, NOTHING)
        return mine - self._drains.keys() if self._drains else mine

    def _changed(self) -> None:
        self._leasable.clear()
