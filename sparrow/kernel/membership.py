"""Membership: who belongs to a group, in which generation, and when streams change hands.

A member joins under a name and is given an *incarnation*; whoever joins under the same name later has a
higher one and fences the first. It says that it lives by heartbeats. A member that comes back while its
session lasts keeps its seat and its streams, without a rebalance.

Every change of members, streams or strategy makes the group *prepare*: changes are gathered for a
moment, longer when rebalances follow one another. Then ``tick`` returns ``GroupAdvanced``; when that is
durable, ``apply`` starts the generation: the plan is made and what moves drains. It is over when every
member has accepted and nothing drains. Silent members are dropped and drains end at deadlines, so it
always ends. What changes meanwhile waits for the next one (queue.md C12). A generation has one number,
one plan, and is counted when it is complete (C11, C48).

Durable is the generation alone. After a restart a group is empty and everybody joins again (C37).
In shared mode every member may lease every stream, nothing drains, and nobody need accept.

Refuses to know: sockets, leases, messages. The shell tells when an old owner holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparrow.kernel import facts
from sparrow.kernel.assignment import assign
from sparrow.kernel.commits import GroupLedger, check_commit
from sparrow.kernel.facts import Fact
from sparrow.kernel.member import Joined, Member, Reply, Tick
from sparrow.kernel.ownership import NOTHING, Ownership, Streams
from sparrow.kernel.rebalance import Event, State, moved, to_us, wait_us
from sparrow.kernel.schedule import NEVER_US
from sparrow.model.errors import (
    InvalidArgument,
    InvalidName,
    MemberNotFound,
    PreconditionFailed,
    ResourceExhausted,
    StaleGeneration,
)
from sparrow.model.group import GroupMode, GroupPolicy, RebalanceProtocol
from sparrow.model.message import StreamId
from sparrow.model.names import NAME_LENGTH_MAX

MEMBERS_MAX = 1000
"""Members of one group; ten times what rebalances are measured with."""
STATUS_LENGTH_MAX = 512
"""Characters kept of what a member says about itself."""
ABANDONED_WAIT_US = 1_000_000
"""After the journal failed, before the same is decided again."""
SESSION_SHIFT = 1 << 20
"""Incarnations of two runs of a broker are so far apart, and stay below 2**53 for JSON."""


class Group:
    """The members of one group; see the module's text."""

    __slots__ = (
        "_deadline_us",
        "_empty_since_us",
        "_incarnation",
        "_is_advancing",
        "_is_forgetting",
        "_lag_at_us",
        "_members",
        "_ownership",
        "_queued",
        "_reason",
        "_repeats",
        "_seen_us",
        "_started_at_us",
        "_streams",
        "last_rebalance_at_us",
        "last_rebalance_us",
        "ledger",
        "policy",
        "state",
        "subscription_id",
        "total_rebalances",
    )

    def __init__(
        self,
        subscription_id: int,
        policy: GroupPolicy,
        now_us: int,
        *,
        ledger: GroupLedger | None = None,
        session: int = 0,
    ) -> None:
        """``session`` is a number that differs between two runs of a broker."""
        self.subscription_id = subscription_id
        self.policy = policy
        self.ledger = ledger or GroupLedger()
        self.state = State.EMPTY
        self.total_rebalances = 0
        self.last_rebalance_at_us = 0
        """When the last rebalance was complete; 0 before the first."""
        self.last_rebalance_us = 0
        """How long it took from the start of its generation."""
        self._members: dict[str, Member] = {}
        self._streams: Streams = NOTHING
        self._ownership = Ownership()
        self._incarnation = session * SESSION_SHIFT
        self._queued: Event | None = None
        self._reason = ""
        self._repeats = 0
        self._deadline_us = NEVER_US
        self._started_at_us = 0
        self._seen_us = now_us
        """The latest time heard of. A fact may be old when it is durable; waits count from here."""
        self._empty_since_us = now_us
        self._lag_at_us: int | None = None
        self._is_advancing = False
        self._is_forgetting = False

    # What it looks like.

    @property
    def generation(self) -> int:
        """The newest generation."""
        return self.ledger.generation

    @property
    def streams(self) -> Streams:
        """All that the group reads."""
        return self._streams

    @property
    def members(self) -> list[Member]:
        """The members by name."""
        return [self._members[member_id] for member_id in sorted(self._members)]

    @property
    def drains(self) -> dict[StreamId, str]:
        """Streams that wait for the member that owned them; empty most of the time."""
        return {stream: drain.member_id for stream, drain in self._ownership.drains.items()}

    def member(self, member_id: str) -> Member:
        """A member by its name."""
        member = self._members.get(member_id)
        if member is None:
            raise MemberNotFound(f"the group has no member {member_id!r}")
        return member

    def assignment(self, member_id: str) -> Streams:
        """What the member has in this generation, also what it may not lease yet."""
        if self.policy.mode is GroupMode.SHARED:
            return self._streams if member_id in self._members else NOTHING
        return self._ownership.assignment.get(member_id, NOTHING)

    def owned(self, member_id: str) -> Streams:
        """What the member may lease right now."""
        if self.policy.mode is GroupMode.SHARED:
            return self._streams if member_id in self._members else NOTHING
        return self._ownership.leasable(member_id)

    # Members come, speak and go.

    def join(
        self,
        member_id: str,
        now_us: int,
        *,
        max_in_flight: int | None = None,
        is_static: bool = False,
        instance: str = "",
    ) -> Joined:
        """Take part. A name that is a member already gets a new incarnation and keeps its seat."""
        _check_join(member_id, max_in_flight)
        known = self._members.get(member_id)
        if known is None and len(self._members) >= MEMBERS_MAX:
            raise ResourceExhausted(f"the group has {MEMBERS_MAX} members, which is the limit")
        self._incarnation += 1
        room = self.policy.member_max_in_flight if max_in_flight is None else max_in_flight
        member = self._members[member_id] = Member(
            member_id, self._incarnation, room, now_us, now_us, self.generation, is_static
        )
        member.instance = instance[:STATUS_LENGTH_MAX]
        if known is None:
            self._change(Event.JOINED, now_us)
        else:
            self._return(member, known, now_us)
        assignment = self.assignment(member_id)
        return Joined(member_id, member.incarnation, self.generation, known is not None, assignment)

    def leave(self, member_id: str, incarnation: int, now_us: int) -> None:
        """Take part no more; the shell releases what it leased."""
        self._speaker(member_id, incarnation)
        self._depart(member_id, Event.LEFT, now_us)

    def lost(self, member_id: str, incarnation: int, now_us: int) -> bool:
        """Its connection broke. A static member may come back; any other has left. Says if it has."""
        member = self._members.get(member_id)
        if member is None or member.incarnation != incarnation or member.is_static:
            return False
        self._depart(member_id, Event.LEFT, now_us)
        return True

    def heartbeat(
        self, member_id: str, incarnation: int, generation: int, now_us: int, status: str = ""
    ) -> Reply:
        """The member lives. Tells it what it has missed; an outdated one is told to join again."""
        member = self._members.get(member_id)
        if member is None or member.incarnation != incarnation:
            return Reply(self.generation, must_rejoin=True, is_fenced=member is not None)
        if not member.since <= generation <= self.generation:
            return Reply(self.generation, must_rejoin=True)
        self._hear(member, now_us)
        member.status = status[:STATUS_LENGTH_MAX]
        return self._reply(member_id)

    def accept(self, member_id: str, incarnation: int, generation: int, now_us: int) -> Reply:
        """The member has taken up its assignment. Of an older generation: it is told of the present."""
        self.check(member_id, incarnation, generation)
        member = self._members[member_id]
        self._hear(member, now_us)
        if generation == self.generation and member_id in self._ownership.waiting:
            member.accepted = generation
            self._ownership.accept(member_id)
            self._complete(now_us)
        return self._reply(member_id)

    def check(
        self, member_id: str, incarnation: int, generation: int, stream: StreamId | None = None
    ) -> None:
        """Refuse whoever may not speak for the group, or for that stream of it, any more."""
        member = self._speaker(member_id, incarnation)
        if not member.since <= generation <= self.generation:
            raise StaleGeneration(
                f"generation {generation} is not one of {member_id!r}; the group is in {self.generation}",
                generation=self.generation,
            )
        if stream is None or self.policy.mode is GroupMode.SHARED:
            return
        if not self._ownership.may_settle(member_id, stream, generation):
            raise StaleGeneration(
                f"{member_id!r} does not own partition {stream.partition} of topic {stream.topic_id} "
                f"since generation {generation}",
                generation=self.generation,
            )

    def commit(
        self,
        member_id: str,
        incarnation: int,
        generation: int,
        stream: StreamId,
        offset: int,
        now_us: int,
        metadata: str = "",
    ) -> list[Fact]:
        """Note how far the owner of a stream has got; goes into the journal beside the ack."""
        self.check(member_id, incarnation, generation, stream)
        check_commit(offset, metadata)
        name = self.subscription_id, *stream
        return [facts.OffsetCommitted(*name, offset, metadata, member_id, generation, now_us)]

    # Other changes.

    def released(self, member_id: str, stream: StreamId, now_us: int) -> None:
        """The member holds nothing of the stream any more; without effect if nobody waits for that."""
        if self._ownership.release(member_id, stream):
            self._complete(now_us)

    def set_streams(self, streams: Iterable[StreamId], now_us: int) -> None:
        """The group reads these. What is gone is nobody's at once; what is new waits for a plan."""
        after = frozenset(streams)
        if after == self._streams:
            return
        self._streams = after
        self._ownership.retain(after)
        self._change(Event.STREAMS_CHANGED, now_us)
        self._complete(now_us)

    def set_policy(self, policy: GroupPolicy, now_us: int) -> None:
        """Go on by another policy. The mode can change only while there are no members."""
        before = self.policy
        if policy.mode is not before.mode and self._members:
            raise PreconditionFailed(
                f"the group has members; it cannot become {policy.mode.value}",
                hint="Stop its members first.",
            )
        self.policy = policy
        if policy.strategy is not before.strategy:
            self._change(Event.STRATEGY_CHANGED, now_us)

    def rebalance(self, now_us: int) -> None:
        """An operator asks for a new generation."""
        self._change(Event.ADMIN, now_us)

    def lag_critical(self, now_us: int) -> bool:
        """The group is far behind: rebalance, if it is stable and did not do so lately."""
        wait_us = to_us(self.policy.lag_rebalance_s)
        is_early = self._lag_at_us is not None and now_us < self._lag_at_us + wait_us
        if is_early or self.state is not State.STABLE:
            return False
        self._lag_at_us = now_us
        self._change(Event.LAG_CRITICAL, now_us)
        return True

    # Time.

    def tick(self, now_us: int) -> Tick:
        """What is due: the dead, the silent, drains, a plan, forgotten commits."""
        self._seen_us = max(self._seen_us, now_us)
        tick = Tick()
        for member_id in self._dead(now_us):
            self._depart(member_id, Event.TIMED_OUT, now_us)
            tick.removed.append(member_id)
        if self.state is State.REBALANCING:
            tick.removed += self._drop_silent(now_us)
            tick.expelled += self._ownership.expire(now_us)
            self._complete(now_us)
        if self.state is State.PREPARING and now_us >= self._deadline_us and not self._is_advancing:
            self._is_advancing = True
            names = tuple(sorted(self._members))
            number = self.generation + 1
            tick.facts.append(facts.GroupAdvanced(self.subscription_id, number, now_us, self._reason, names))
        if now_us >= self._forget_at_us():
            self._is_forgetting = True
            tick.facts.append(facts.OffsetsForgotten(self.subscription_id, self.ledger.newest_at_us(now_us)))
        return tick

    def next_wakeup_us(self) -> int:
        """When ``tick`` will next find something."""
        times = [self._forget_at_us(), self._ownership.next_wakeup_us()]
        if self._members:
            heard_at_us = min(member.heard_at_us for member in self._members.values())
            times.append(heard_at_us + to_us(self.policy.session_timeout_s))
        is_planned = self.state is State.PREPARING and not self._is_advancing
        if is_planned or (self.state is State.REBALANCING and self._ownership.waiting):
            times.append(self._deadline_us)
        return min(times)

    # Facts.

    def apply(self, fact: Fact) -> None:
        """What happened: durable state changes; live, a generation that was waited for begins."""
        self.ledger.apply(fact)
        if isinstance(fact, facts.OffsetsForgotten):
            self._is_forgetting = False
        elif isinstance(fact, facts.GroupAdvanced) and self._is_advancing:
            self._is_advancing = False
            self._begin(fact)

    def abandon(self, decided: Iterable[Fact]) -> None:
        """The journal did not take these: they are decided again."""
        for fact in decided:
            if isinstance(fact, facts.GroupAdvanced):
                self._is_advancing = False
                self._queued = None
                self._deadline_us = fact.at_us + ABANDONED_WAIT_US
            elif isinstance(fact, facts.OffsetsForgotten):
                self._is_forgetting = False
                self._empty_since_us += ABANDONED_WAIT_US

    # The course of a rebalance.

    def move(self, event: Event) -> None:
        """Walk the table; an illegal move changes nothing and says so."""
        self.state = moved(self.state, event)

    def _change(self, event: Event, now_us: int) -> None:
        """Something is different: prepare, or remember it while a generation is under way."""
        before = self.state
        self.move(event)
        is_too_late = before is State.PREPARING and self._is_advancing and event is Event.JOINED
        if before is State.REBALANCING or is_too_late:
            self._queued = self._queued or event
        elif self.state is State.PREPARING and before is not State.PREPARING:
            self._reason = event.value
            self._deadline_us = now_us + wait_us(self.policy, self._count_repeats(now_us))

    def _count_repeats(self, now_us: int) -> int:
        """How many rebalances followed one another without a calm between them."""
        is_calm = now_us >= self.last_rebalance_at_us + to_us(self.policy.calm_s)
        self._repeats = 0 if self.total_rebalances == 0 or is_calm else self._repeats + 1
        return self._repeats

    def _begin(self, fact: facts.GroupAdvanced) -> None:
        """The generation is durable: plan for those of its members that are still here."""
        present = [member_id for member_id in fact.members if member_id in self._members]
        if self.state is not State.PREPARING or not present:
            return
        self.move(Event.GATHERED)
        self._started_at_us = max(fact.at_us, self._seen_us)
        self._deadline_us = self._started_at_us + to_us(self.policy.rebalance_timeout_s)
        if self.policy.mode is GroupMode.SHARED:
            for member_id in present:
                self._members[member_id].accepted = fact.generation
        else:
            self._plan(present, fact.generation)
        self._complete(self._started_at_us)

    def _plan(self, present: list[str], generation: int) -> None:
        current = self._ownership.assignment
        self._ownership.begin(
            assign(self.policy.strategy, present, self._streams, current),
            generation,
            self._started_at_us + to_us(self.policy.drain_timeout_s),
            is_pausing=self.policy.rebalance is RebalanceProtocol.EAGER,
        )

    def _complete(self, now_us: int) -> None:
        """The generation is in force when nobody is waited for; then what was queued has its turn."""
        if self.state is not State.REBALANCING or not self._ownership.is_settled:
            return
        self.move(Event.ALL_ACCEPTED)
        self._ownership.finish()
        self.total_rebalances += 1
        self.last_rebalance_at_us = now_us
        self.last_rebalance_us = now_us - self._started_at_us
        queued, self._queued = self._queued, None
        if queued is not None:
            self._change(queued, now_us)

    def _return(self, member: Member, known: Member, now_us: int) -> None:
        """The name was a member: the new process takes its seat, as the join tells it."""
        member.joined_at_us = known.joined_at_us
        member.accepted = known.accepted
        self._ownership.release_all(member.member_id)
        if member.member_id in self._ownership.waiting:
            self._ownership.accept(member.member_id)
            member.accepted = self.generation
        self._complete(now_us)

    def _depart(self, member_id: str, event: Event, now_us: int) -> None:
        del self._members[member_id]
        self._ownership.drop(member_id)
        if self._members:
            self._change(event, now_us)
            self._complete(now_us)
            return
        self.move(Event.EMPTIED)
        self._ownership.clear()
        self._queued = None
        self._empty_since_us = now_us

    def _dead(self, now_us: int) -> list[str]:
        limit_us = now_us - to_us(self.policy.session_timeout_s)
        return sorted(m.member_id for m in self._members.values() if m.heard_at_us <= limit_us)

    def _drop_silent(self, now_us: int) -> list[str]:
        silent = sorted(self._ownership.waiting) if now_us >= self._deadline_us else []
        for member_id in silent:
            self._depart(member_id, Event.MEMBER_SILENT, now_us)
        return silent

    def _forget_at_us(self) -> int:
        expiry_s = self.policy.offset_expiry_s
        if self._members or self._is_forgetting or expiry_s is None or not self.ledger.has_commits:
            return NEVER_US
        return self._empty_since_us + to_us(expiry_s)

    def _speaker(self, member_id: str, incarnation: int) -> Member:
        member = self.member(member_id)
        if member.incarnation != incarnation:
            raise StaleGeneration(
                f"another process has joined the group as {member_id!r}",
                hint="Stop this process, or join again under a name of its own.",
                generation=self.generation,
            )
        return member

    def _hear(self, member: Member, now_us: int) -> None:
        member.heard_at_us = max(member.heard_at_us, now_us)
        self._seen_us = max(self._seen_us, now_us)

    def _reply(self, member_id: str) -> Reply:
        must_accept = member_id in self._ownership.waiting
        return Reply(self.generation, must_accept=must_accept, assignment=self.assignment(member_id))


def _check_join(member_id: str, max_in_flight: int | None) -> None:
    if not isinstance(member_id, str) or not 0 < len(member_id) <= NAME_LENGTH_MAX:
        raise InvalidName(
            f"a member name is text of 1 to {NAME_LENGTH_MAX} characters, not {member_id!r:.50}",
            hint="Give every process a name of its own, such as its host and process id.",
        )
    if max_in_flight is None:
        return
    if not isinstance(max_in_flight, int) or isinstance(max_in_flight, bool) or max_in_flight < 1:
        raise InvalidArgument(f"max_in_flight must be a whole number from 1 on, not {max_in_flight!r}")
