"""Groups at work: members that join, pull, fall silent and leave, around the kernel's decisions.

A group is a subscription with members. ``GroupRunner`` belongs to one of them from its first ``join`` on: it
ticks the kernel's ``Group`` when something is due, journals what that decides, takes leases back from members
that are gone, tells the kernel when a stream has drained, and divides what is ready among members that pull.
It holds no rule of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.topics import Topics
from sparrow.kernel import facts
from sparrow.kernel.commits import Commit
from sparrow.kernel.exchange import Settled
from sparrow.kernel.facts import Fact
from sparrow.kernel.member import Joined, Reply
from sparrow.kernel.membership import Group
from sparrow.kernel.pace import GroupPace
from sparrow.kernel.schedule import NEVER_US
from sparrow.kernel.sharing import Sharing
from sparrow.model.errors import MemberNotFound, OffsetOutOfRange, PreconditionFailed, StaleGeneration
from sparrow.model.group import Assigned, Committed, GroupInfo, GroupMode, GroupPolicy, MemberInfo
from sparrow.model.message import StreamId
from sparrow.store.ports import Store

_TICK_S = 0.005
"""Time between two ticks at least."""
_FAILED_MAX = 32
"""Failed members that are remembered, for people."""
_PACE_S = 1.0
"""How often members are compared with each other."""


class Attendant(Protocol):
    """A member's handle in this process: told of a new generation."""

    def generation_began(self) -> None: ...


class Pulse(NamedTuple):
    """A group in numbers."""

    members: int
    generation: int
    rebalances: int
    last_rebalance_s: float


class GroupRunner:
    """One group; see the module's text."""

    def __init__(
        self,
        courier: Courier,
        store: Store,
        topics: Topics,
        clock: Clock,
        jitter: Callable[[], float],
        session: int,
    ) -> None:
        self._courier = courier
        self._store = store
        self._topics = topics
        self._clock = clock
        self._jitter = jitter
        policy, now_us = courier.subscription.policy.group, clock.now_us()
        self._group = Group(
            courier.subscription.id, policy, now_us, ledger=courier.delivery.group, session=session
        )
        self._sharing = Sharing(policy.strategy, self._in_flight_of)
        self._pace = GroupPace(policy.heartbeat_s)
        self._attendants: dict[str, Attendant] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = NEVER_US
        self._pace_at_us = now_us
        self._is_stopped = False
        self.failed: dict[str, int] = {}
        """Members that were lost or silent for too long, and when; the newest last."""
        self._group.set_streams(courier.streams, now_us)

    @property
    def policy(self) -> GroupPolicy:
        return self._group.policy

    @property
    def is_partitioned(self) -> bool:
        return self._group.policy.mode is GroupMode.PARTITIONED

    @property
    def has_members(self) -> bool:
        return bool(self._group.members)

    @property
    def generation(self) -> int:
        return self._group.generation

    # Members.

    def join(
        self,
        name: str,
        attendant: Attendant,
        *,
        max_in_flight: int | None = None,
        is_static: bool = False,
        instance: str = "",
    ) -> Joined:
        now_us = self._clock.now_us()
        joined = self._group.join(
            name, now_us, max_in_flight=max_in_flight, is_static=is_static, instance=instance
        )
        if joined.is_returning:
            self._release(name, is_graceful=False)
        self._attendants[name] = attendant
        self.failed.pop(name, None)
        self._sharing.add(name, self._group.member(name).max_in_flight, now_us)
        self._pace.joined(name, now_us)
        self._log("member-joined", name, is_returning=joined.is_returning)
        self._step()
        return joined

    def leave(self, name: str, incarnation: int) -> None:
        self._group.leave(name, incarnation, self._clock.now_us())
        self._part_with(name, is_graceful=True)
        self._log("member-left", name)
        self._step()

    def evict(self, name: str) -> None:
        """An operator sends a member away: what it holds goes to the others. It may join again."""
        self.leave(name, self._group.member(name).incarnation)

    def lost(self, name: str, incarnation: int) -> None:
        """Its connection broke."""
        if self._group.lost(name, incarnation, self._clock.now_us()):
            self._part_with(name, is_graceful=False)
            self._mourn(name)
            self._log("member-lost", name)
        self._step()

    def heartbeat(self, name: str, incarnation: int, generation: int, status: str = "") -> Reply:
        """A sign of life; what the member has missed is taken up for it."""
        now_us = self._clock.now_us()
        reply = self._group.heartbeat(name, incarnation, generation, now_us, status)
        if reply.must_rejoin:
            self.check(name, incarnation, generation)
            raise StaleGeneration(f"{name!r} must join again", generation=reply.generation)
        self._pace.heartbeat(name, now_us)
        return reply

    def accept(self, name: str, incarnation: int) -> Reply:
        reply = self._group.accept(name, incarnation, self.generation, self._clock.now_us())
        self._step()
        return reply

    def check(self, name: str, incarnation: int, generation: int, stream: StreamId | None = None) -> None:
        """Refuses whoever may not settle or commit any more."""
        try:
            self._group.check(name, incarnation, generation, stream)
        except MemberNotFound as error:
            raise StaleGeneration(
                f"{name!r} is no member any more; it was silent or left", generation=self.generation
            ) from error

    def assignment(self, name: str) -> tuple[Assigned, ...]:
        return self._named(self._group.assignment(name))

    def owned(self, name: str) -> frozenset[StreamId]:
        return self._group.owned(name)

    # Pulls.

    def pull_began(self, name: str, wanted: int) -> None:
        self._sharing.pull_began(name, wanted, self._clock.now_us())

    def pull_ended(self, name: str) -> None:
        self._sharing.pull_ended(name, self._clock.now_us())

    def grant(self, name: str, wanted: int) -> tuple[int, Collection[StreamId] | None]:
        """How many messages a member may take now, and of which streams."""
        now_us, delivery = self._clock.now_us(), self._courier.delivery
        if self.is_partitioned:
            room = self._group.member(name).max_in_flight - delivery.in_flight_of(name)
            return max(0, min(wanted, room)), self._group.owned(name)
        own = min(self.room(name, wanted), delivery.reserved(name))
        count = own + self._sharing.allowance(name, wanted - own, delivery.deliverable, now_us)
        if count < wanted:
            self._arm()
        return min(count, self.room(name, wanted)), None

    def room(self, name: str, wanted: int) -> int:
        """How many messages are worth reading for a member: none when it is full."""
        held = self._courier.delivery.in_flight_of(name)
        return max(0, min(wanted, self._group.member(name).max_in_flight - held))

    def served(self, name: str, count: int) -> None:
        now_us = self._clock.now_us()
        if not self.is_partitioned:
            self._sharing.served(name, count, now_us)
        if count:
            self._pace.handed_over(name, count, now_us)

    def settled(self, decided: Settled) -> None:
        """Members settled messages."""
        now_us = self._clock.now_us()
        for outcome in decided.outcomes:
            name, size = outcome.consumer, outcome.size
            if name not in self._attendants:
                continue
            if outcome.is_success:
                self._pace.acked(name, size, size * outcome.taken_at_us, now_us)
            else:
                self._pace.failed(name, size, now_us)
            self._sharing.settled(name, now_us)

    # Commits.

    async def commit(
        self, name: str, incarnation: int, generation: int, stream: StreamId, offset: int, metadata: str
    ) -> None:
        """A cumulative ack by a member, with its note."""
        bounds = self._store.bounds(stream)
        if not bounds.start_offset <= offset <= bounds.end_offset:
            raise OffsetOutOfRange(
                f"cannot commit {offset}: the partition holds {bounds.start_offset} to {bounds.end_offset}",
                start_offset=bounds.start_offset,
                end_offset=bounds.end_offset,
            )
        self.check(name, incarnation, generation, stream)
        noted = self._group.commit(
            name, incarnation, generation, stream, offset, self._clock.now_us(), metadata
        )
        decided = self._courier.delivery.commit(stream, offset, bounds.end_offset)
        if self._courier.watch is not None:
            self._courier.watch.committed(stream, offset, self._clock.now_us())
        self._courier.counts.acked += decided.accepted
        await self._courier.journal([*decided.facts, *noted])

    # Looking.

    def members(self) -> list[MemberInfo]:
        return [self._info(member.member_id) for member in self._group.members]

    def info(self) -> GroupInfo:
        group = self._group
        owned = {s for member in group.members for s in group.assignment(member.member_id)}
        return GroupInfo(
            state=group.state.value,
            generation=group.generation,
            mode=group.policy.mode.value,
            strategy=group.policy.strategy.value,
            members=len(group.members),
            rebalances=group.total_rebalances,
            last_rebalance_s=group.last_rebalance_us / 1e6,
            draining=self._named(group.drains),
            unassigned=self._named(group.streams - owned),
        )

    @property
    def pulse(self) -> Pulse:
        """The group in numbers, for whoever looks at all groups often."""
        group = self._group
        return Pulse(
            len(group.members), group.generation, group.total_rebalances, group.last_rebalance_us / 1e6
        )

    def _info(self, name: str) -> MemberInfo:
        member, now_us = self._group.member(name), self._clock.now_us()
        pace = self._pace.look(name, now_us)
        return MemberInfo(
            name=name,
            generation=member.accepted,
            assignment=self.assignment(name),
            in_flight=self._in_flight_of(name),
            max_in_flight=member.max_in_flight,
            is_static=member.is_static,
            instance=member.instance,
            status=member.status,
            joined_at_us=member.joined_at_us,
            silent_s=max(0, now_us - member.heard_at_us) / 1e6,
            pace="ok" if pace is None else pace.level.value,
            weight=self._pace.weight(name),
            acks_per_s=None if pace is None else pace.rate_per_s,
            ack_latency_s=None if pace is None else pace.latency_s,
            failure_share=0.0 if pace is None else pace.failure_share,
        )

    def _named(self, streams: Collection[StreamId]) -> tuple[Assigned, ...]:
        found = [(self._topics.find(stream.topic_id), stream.partition) for stream in streams]
        return tuple(sorted(Assigned(topic.name, partition) for topic, partition in found if topic))

    # What others tell it.

    def rebalance(self) -> None:
        """An operator wants a new generation."""
        if not self.has_members:
            raise PreconditionFailed("the group has no members to rebalance", hint="Join it first.")
        self._group.rebalance(self._clock.now_us())
        self._step()

    def check_policy(self, policy: GroupPolicy) -> None:
        """Refuses what members cannot be asked to go along with."""
        if policy.mode is not self.policy.mode and self.has_members:
            raise PreconditionFailed(
                f"the group has members; it cannot become {policy.mode.value}", hint="Let them leave first."
            )

    def lag_critical(self) -> None:
        """Messages wait long for a member: share anew, now and then."""
        if self._group.lag_critical(self._clock.now_us()):
            self._step()

    def streams_changed(self) -> None:
        self._group.set_streams(self._courier.streams, self._clock.now_us())
        self._step()

    def moved(self, courier: Courier) -> None:
        """The subscription changed: another courier does its work. Leases have ended, seats stay."""
        self._courier, courier.group = courier, self
        self._group.ledger = courier.delivery.group
        now_us, policy = self._clock.now_us(), courier.subscription.policy.group
        if policy != self._group.policy:
            self._group.set_policy(policy, now_us)
            self._sharing.strategy = policy.strategy
        self._group.set_streams(courier.streams, now_us)
        self._step()

    def applied(self, found: Sequence[Fact]) -> None:
        """Facts of the subscription are durable."""
        has_begun = False
        for fact in found:
            if isinstance(fact, facts.GroupAdvanced | facts.OffsetsForgotten):
                self._group.apply(fact)
                has_begun = has_begun or isinstance(fact, facts.GroupAdvanced)
        if has_begun:
            self._log("generation-began", "", generation=self.generation)
            for name in [m.member_id for m in self._group.members]:
                attendant = self._attendants.get(name)
                if attendant is not None:
                    attendant.generation_began()
        if has_begun or self._group.drains:
            self._step()

    def abandoned(self, found: Sequence[Fact]) -> None:
        self._group.abandon(found)
        self._arm()

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Time.

    def _step(self) -> None:
        """Does what is due and looks when something will be next."""
        if self._is_stopped:
            return
        now_us = self._clock.now_us()
        self._sweep(now_us)
        tick = self._group.tick(now_us)
        for name in tick.removed:
            self._log("member-removed", name)
            self._part_with(name, is_graceful=False)
            self._mourn(name)
        for name, stream in tick.expelled:
            self._release(name, is_graceful=True, stream=stream)
        if tick.facts:
            self._courier.submit(tick.facts)
        self._compare(now_us)
        self._courier.wake()
        self._arm()

    def _sweep(self, now_us: int) -> None:
        """Tells of streams that have drained."""
        for stream, name in list(self._group.drains.items()):
            if not self._courier.delivery.holds(name, stream):
                self._group.released(name, stream, now_us)

    def _compare(self, now_us: int) -> None:
        if now_us < self._pace_at_us:
            return
        self._pace_at_us = now_us + round(_PACE_S * 1e6)
        self._pace.observe(now_us)
        if not self.is_partitioned:
            for name in self._attendants:
                self._sharing.set_weight(name, self._pace.weight(name))

    def _arm(self) -> None:
        now_us = self._clock.now_us()
        at_us = self._group.next_wakeup_us()
        if not self.is_partitioned:
            at_us = min(at_us, self._sharing.next_wakeup_us(now_us))
        if self._attendants:
            at_us = min(at_us, max(now_us, self._pace_at_us))
        if self._is_stopped or (at_us >= self._timer_at_us and self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_us = at_us
        if at_us < NEVER_US:
            wait_s = max(_TICK_S, (at_us - now_us) / 1e6)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at_us = NEVER_US
        self._step()

    # Parting.

    def _mourn(self, name: str) -> None:
        self.failed.pop(name, None)
        self.failed[name] = self._clock.now_us()
        if len(self.failed) > _FAILED_MAX:
            del self.failed[next(iter(self.failed))]

    def _part_with(self, name: str, *, is_graceful: bool) -> None:
        self._release(name, is_graceful=is_graceful)
        self._attendants.pop(name, None)
        self._sharing.remove(name)
        self._pace.left(name)

    def _release(self, name: str, *, is_graceful: bool, stream: StreamId | None = None) -> None:
        decided = self._courier.delivery.release(
            name, self._clock.now_us(), self._jitter(), is_graceful=is_graceful, stream=stream
        )
        self._pace.returned(name, decided.accepted, self._clock.now_us())
        if decided.facts:
            self._courier.submit(decided.facts)
        self._courier.wake()

    def _in_flight_of(self, name: str) -> int:
        return self._courier.delivery.in_flight_of(name)

    def _log(self, event: str, member: str, **details: object) -> None:
        logs.get("groups").info(
            event, "", subscription=self._courier.subscription.name, member=member, **details
        )


class Groups:
    """The groups of all subscriptions, made when their first member joins."""

    def __init__(
        self, store: Store, topics: Topics, clock: Clock, jitter: Callable[[], float], session: int
    ) -> None:
        self._store = store
        self._topics = topics
        self._clock = clock
        self._jitter = jitter
        self._session = session

    def of(self, courier: Courier) -> GroupRunner:
        """The group of a subscription."""
        if not isinstance(courier.group, GroupRunner):
            courier.group = GroupRunner(
                courier, self._store, self._topics, self._clock, self._jitter, self._session
            )
        return courier.group

    def committed(self, courier: Courier) -> list[Committed]:
        """The newest commit of every partition that has one."""
        return [self._named(commit) for commit in courier.delivery.group.commits()]

    def _named(self, commit: Commit) -> Committed:
        topic = self._topics.find(commit.topic_id)
        return Committed(
            topic="" if topic is None else topic.name,
            partition=commit.partition,
            offset=commit.offset,
            metadata=commit.metadata,
            member=commit.member,
            generation=commit.generation,
            at_us=commit.at_us,
        )
