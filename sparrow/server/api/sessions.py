"""Members of groups that come over HTTP: a name, a session, and no connection that could break.

A member joins by ``join``, or by its first poll, and lives as long as it polls or sends heartbeats; after the
group's ``session_timeout_s`` without either it is gone and what it held goes to others. A poll that waits is
a sign of life, and takes up a new generation for its member.

Whoever polls without a name is the member ``anonymous``, which all such share. It lives for as long as
somebody polls and some minutes longer, and leaves as soon as somebody joins by name: partitions must not wait
for a person who tried something out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.member import BrokerMember
from sparrow.model.errors import (
    MemberNotFound,
    PreconditionFailed,
    ResourceExhausted,
    SparrowError,
    StaleGeneration,
    SubscriptionExists,
    SubscriptionNotFound,
)
from sparrow.model.message import Delivered
from sparrow.model.names import parse_subscription

ANONYMOUS = "anonymous"
ANONYMOUS_IDLE_S = 120.0
SESSIONS_MAX = 10_000
JOINS_MAX = 3
"""How often one poll joins anew before it gives up."""
BEAT_S = 1.0
"""How often a poll that waits says that its member lives."""
ASSIGNED_LOOKS, ASSIGNED_LOOK_S = 20, 0.05
GROUP_POLICY: dict[str, Any] = {"mode": "partitioned", "stabilisation_s": 0.05}
"""Partitions have one reader each, so that committing an offset means what it says."""
ACK_DEADLINE_S = 60.0
"""How long what was consumed may stay uncommitted before it comes again."""

Key = tuple[str, str]
"""A group and one of its members."""


class Session:
    """One member."""

    __slots__ = ("deadline_s", "member")

    def __init__(self, member: BrokerMember, deadline_s: float) -> None:
        self.member = member
        self.deadline_s = deadline_s
        """When one without a name is given up."""


class Sessions:
    """All members of all groups that came over HTTP."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._sessions: dict[Key, Session] = {}
        self._joining: dict[Key, asyncio.Lock] = {}
        self._polls: Counter[Key] = Counter()
        """Requests that are under way, by member."""
        self._looking: asyncio.TimerHandle | None = None

    # Groups.

    async def group(self, group: str, topic: str, start: str) -> Any:
        """The group of a topic; made when there is none of its name."""
        try:
            found = await self._broker.subscription(parse_subscription(group))
        except SubscriptionNotFound:
            try:
                return await self._broker.subscribe(
                    group, topic, start=start, group=GROUP_POLICY, ack_deadline_s=ACK_DEADLINE_S
                )
            except SubscriptionExists:  # Somebody was faster.
                found = await self._broker.subscription(group)
        self.check(found, topic)
        return found

    def check(self, subscription: Any, topic: str) -> None:
        """Refuses a group that reads something else."""
        if subscription.pattern != topic:
            raise PreconditionFailed(
                f"the group {subscription.name!r} reads {subscription.pattern!r}, not {topic!r}",
                hint="Use another group for this topic: a group has one topic.",
            )

    # Members.

    async def join(self, group: str, name: str, **options: Any) -> BrokerMember:
        """A new member, or the same name again in a new life."""
        self._sweep()
        if name == ANONYMOUS:
            raise PreconditionFailed(
                f"{ANONYMOUS!r} is the name of those who give none", hint="Pick another consumer_id."
            )
        await self._part_anonymous(group)
        session = await self._join(group, name, **options)
        await self._until_assigned(session)
        return session.member

    async def _join(self, group: str, name: str, **options: Any) -> Session:
        if len(self._sessions) >= SESSIONS_MAX:
            raise ResourceExhausted(f"{SESSIONS_MAX} members hold sessions over HTTP already")
        subscription = await self._broker.subscription(group)
        heartbeat = "automatic" if name == ANONYMOUS else "manual"
        member = await subscription.join(name, heartbeat=heartbeat, **options)
        session = self._sessions[group, name] = Session(member, self._idle_until_s())
        member.on_generation = lambda: self._take_up(group, name)
        return session

    def _take_up(self, group: str, name: str) -> None:
        """A poll that waits takes up a new generation; a member that is away does when it comes."""
        session = self._sessions.get((group, name))
        if session is not None and self._polls[group, name]:
            with suppress(SparrowError):  # Its poll hears of it.
                session.member.beat()

    async def _until_assigned(self, session: Session) -> None:
        """A new member has nothing before the next generation, which is near: whoever polls without waiting
        would go away with nothing."""
        for _ in range(ASSIGNED_LOOKS):
            if session.member.assignment:
                return
            await asyncio.sleep(ASSIGNED_LOOK_S)
            with suppress(SparrowError):
                session.member.beat()

    def find(self, group: str, name: str) -> Session:
        """A member that has a session."""
        session = self._sessions.get((group, name))
        if session is None:
            raise MemberNotFound(f"{name!r} has no session in the group {group!r}")
        return session

    async def heartbeat(self, group: str, name: str, status: str) -> BrokerMember:
        """A sign of life."""
        session = self.find(group, name)
        try:
            await session.member.heartbeat(status)
        except (StaleGeneration, MemberNotFound):
            self._forget((group, name), session)
            raise
        return session.member

    async def leave(self, group: str, name: str) -> None:
        """The member goes; what it holds goes to others at once."""
        session = self.find(group, name)
        self._forget((group, name), session)
        await session.member.leave()

    # Polling.

    async def poll(
        self,
        group: str,
        name: str,
        max_messages: int,
        timeout_s: float,
        max_bytes: int,
        closing: asyncio.Event,
    ) -> list[Delivered]:
        """Messages for a member, which joins if it has to; waits for the first."""
        until_s = self._clock.monotonic_s() + timeout_s
        key, joins = (group, name), 0
        self._polls[key] += 1
        try:
            while True:
                session = await self._session(group, name)
                rest_s = max(0.0, until_s - self._clock.monotonic_s())
                try:
                    found = await session.member.pull(max_messages, min(rest_s, BEAT_S), max_bytes=max_bytes)
                except (StaleGeneration, MemberNotFound):
                    # Its session ended while it was away: it may be a member again.
                    self._forget(key, session)
                    joins += 1
                    if joins >= JOINS_MAX:
                        raise
                    continue
                session.deadline_s = self._idle_until_s()
                if found or rest_s <= BEAT_S or closing.is_set():
                    return found
        finally:
            self._polls[key] -= 1
            if not self._polls[key]:
                del self._polls[key]
                self._look_later(name)

    async def _session(self, group: str, name: str) -> Session:
        self._sweep()
        async with self._joining.setdefault((group, name), asyncio.Lock()):
            session = self._sessions.get((group, name))
            if session is None:
                if name == ANONYMOUS:
                    self._refuse_anonymous(group)
                else:
                    await self._part_anonymous(group)
                session = await self._join(group, name)
                await self._until_assigned(session)
            return session

    # Going.

    def _refuse_anonymous(self, group: str) -> None:
        if any(each[0] == group for each in self._sessions):
            raise PreconditionFailed(
                f"the group {group!r} has members; who polls it must be one",
                hint="Say who you are with consumer_id.",
            )

    async def _part_anonymous(self, group: str) -> None:
        session = self._sessions.pop((group, ANONYMOUS), None)
        if session is not None:
            await session.member.leave()

    def _idle_until_s(self) -> float:
        return self._clock.monotonic_s() + ANONYMOUS_IDLE_S

    def _look_later(self, name: str) -> None:
        """Who polls without a name and goes away is given up in time, also when nobody comes any more."""
        if name == ANONYMOUS and self._looking is None:
            wait_s = ANONYMOUS_IDLE_S + BEAT_S
            self._looking = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self._looking = None
        self._sweep()
        if any(name == ANONYMOUS for _, name in self._sessions):
            self._look_later(ANONYMOUS)

    def _forget(self, key: Key, session: Session) -> None:
        if self._sessions.get(key) is session:
            del self._sessions[key]

    def _sweep(self) -> None:
        """Forgets members that their groups have given up, and gives up those without a name that idle."""
        now_s = self._clock.monotonic_s()
        for key, session in list(self._sessions.items()):
            is_idle = key[1] == ANONYMOUS and not self._polls[key] and session.deadline_s < now_s
            if is_idle:
                session.member.abandon(is_graceful=True)
            if is_idle or not session.member.is_member:
                del self._sessions[key]
        for key in [key for key, lock in self._joining.items() if not lock.locked()]:
            if key not in self._sessions:
                del self._joining[key]
