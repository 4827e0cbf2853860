"""A member of a group in the hands of a program: as a subscription, and with a share of its own.

A member says that it lives by itself, as long as the program holds it and the event loop runs, and takes up
every new generation at once. With ``heartbeat="manual"`` both are the program's business: ``heartbeat`` and
``pull`` say it, and nothing else does. What a member was handed is its own to settle while it is a member;
one that was silent for too long, or whose name another process took, is told to join again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from sparrow.broker.courier import Portion
from sparrow.broker.groups import GroupRunner, Groups
from sparrow.broker.subscription import BrokerSubscription, Desk
from sparrow.kernel.lease import AckNames
from sparrow.kernel.member import Reply
from sparrow.model.errors import InvalidArgument, MemberNotFound, SparrowError, StaleGeneration
from sparrow.model.group import Assigned, Committed, MemberInfo
from sparrow.model.message import Delivered, StreamId


class BrokerMember(BrokerSubscription):
    """One member; see the module's text."""

    def __init__(
        self,
        subscription: str,
        name: str,
        desk: Desk,
        groups: Groups,
        *,
        max_in_flight: int | None = None,
        is_static: bool = False,
        instance: str = "",
        heartbeat: str = "automatic",
    ) -> None:
        super().__init__(subscription, name, desk)
        if heartbeat not in ("automatic", "manual"):
            raise InvalidArgument(f"heartbeat must be 'automatic' or 'manual', not {heartbeat!r}")
        self.is_automatic = heartbeat == "automatic"
        self._groups = groups
        self._seat = _Seat(self)
        self._timer: asyncio.TimerHandle | None = None
        self._has_left = False
        self.on_generation: Callable[[], None] | None = None
        """Told of every new generation; for whoever takes it up by hand."""
        joined = self._runner.join(
            name, _Attendant(self), max_in_flight=max_in_flight, is_static=is_static, instance=instance
        )
        self.incarnation = joined.incarnation
        self.generation = joined.generation
        """The generation of the group that it has taken up."""
        if self.is_automatic:
            _beat_on(weakref.ref(self))

    def __repr__(self) -> str:
        return f"<Member {self.consumer!r} of {self.name!r}, generation {self.generation}>"

    @property
    def owner(self) -> Any:
        """Whom messages are settled with. It does not hold itself: when the program drops it, it is gone at
        once, and its signs of life with it, not when memory is next looked through."""
        return self if self._owner is None else self._owner

    @owner.setter
    def owner(self, owner: Any) -> None:
        self._owner = None if owner is self else owner

    @property
    def _runner(self) -> GroupRunner:
        return self._groups.of(self._courier)

    @property
    def assignment(self) -> tuple[Assigned, ...]:
        """The partitions that it has: all of them in a shared group."""
        return self._runner.assignment(self.consumer)

    @property
    def is_member(self) -> bool:
        """Whether the group still knows it; asking is no sign of life."""
        try:
            self._check()
        except SparrowError:
            return False
        return True

    def _check(self, stream: StreamId | None = None) -> None:
        """Raises when it may not speak for the group any more."""
        if self._has_left:
            raise StaleGeneration(f"{self.consumer!r} has left the group", generation=self.generation)
        self._runner.check(self.consumer, self.incarnation, self.generation, stream)

    # Life.

    async def heartbeat(self, status: str = "") -> Reply:
        """Says that it lives and takes up what has changed; a manual member does this in time."""
        return self.beat(status)

    def beat(self, status: str = "") -> Reply:
        """The same for whoever cannot wait."""
        if self._has_left:
            self._check()
        reply = self._runner.heartbeat(self.consumer, self.incarnation, self.generation, status)
        self.generation = reply.generation
        return self._runner.accept(self.consumer, self.incarnation) if reply.must_accept else reply

    async def leave(self) -> None:
        """Leaves the group: what it holds goes to the others at once, without a counted attempt."""
        if self._has_left:
            return
        await self._courier.flush()
        self._stop()
        with suppress(MemberNotFound, StaleGeneration):  # It is none any more: that is what was wanted.
            self._runner.leave(self.consumer, self.incarnation)
        self._tell_loss()

    async def close(self) -> None:
        await self.leave()

    def abandon(self, *, is_graceful: bool = False) -> None:
        """Its connection is gone. What it held goes to others; a static member keeps its seat for a while."""
        if self._has_left:
            return
        self._stop()
        with suppress(StaleGeneration):  # Another process has its name, and what is held under it.
            self._runner.check(self.consumer, self.incarnation, self.generation)
            super().abandon(is_graceful=is_graceful)
        self._runner.lost(self.consumer, self.incarnation)

    def _stop(self) -> None:
        """No more signs of life."""
        self._has_left = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Receiving and settling.

    async def pull(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Delivered]:
        """Up to ``max_messages`` of its share, waiting up to ``timeout_s`` for the first."""
        self.beat()
        self._check_pull(max_messages, timeout_s, max_bytes)
        self._runner.pull_began(self.consumer, max_messages)
        try:
            return await super().pull(max_messages, timeout_s, max_bytes=max_bytes)
        finally:
            self._runner.pull_ended(self.consumer)

    async def pull_portions(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Portion]:
        self.beat()
        self._runner.pull_began(self.consumer, max_messages)
        try:
            return await super().pull_portions(max_messages, timeout_s, max_bytes=max_bytes)
        finally:
            self._runner.pull_ended(self.consumer)

    def _speaks_for(self, names: AckNames) -> str | None:
        self._check()
        for stream in {group.name.stream for group in names.groups}:
            self._check(stream)
        return self.consumer

    async def commit(self, topic: str, partition: int, offset: int, *, metadata: str = "") -> None:
        """A cumulative ack: everything of the partition below ``offset`` is done. ``metadata`` is kept with
        it, for whoever has the partition next."""
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise InvalidArgument(f"an offset is a whole number, not {offset!r}")
        self._check()
        stream = self._positions.stream(topic, partition)
        await self._courier.flush()
        await self._runner.commit(self.consumer, self.incarnation, self.generation, stream, offset, metadata)

    async def committed(self) -> list[Committed]:
        """The committed offsets of its partitions."""
        mine = {(each.topic, each.partition) for each in self.assignment}
        found = self._groups.committed(self._courier)
        return [each for each in found if (each.topic, each.partition) in mine]

    # Looking.

    async def info(self) -> MemberInfo:
        """How the group sees it."""
        self._check()
        return next(each for each in self._runner.members() if each.name == self.consumer)


class _Seat:
    """What the courier asks of a member, while that pulls."""

    __slots__ = ("_held",)

    def __init__(self, member: BrokerMember) -> None:
        self._held = weakref.ref(member)

    @property
    def _member(self) -> BrokerMember:
        member = self._held()
        assert member is not None, "whoever pulls is there"
        return member

    def grant(self, wanted: int) -> tuple[int, Collection[StreamId] | None]:
        member = self._member
        member._check()
        return member._runner.grant(member.consumer, wanted)

    def room(self, wanted: int) -> int:
        return self._member._runner.room(self._member.consumer, wanted)

    def served(self, count: int) -> None:
        self._member._runner.served(self._member.consumer, count)


class _Attendant:
    """A member as its group holds it: without keeping it alive."""

    def __init__(self, member: BrokerMember) -> None:
        self._member = weakref.ref(member)

    def generation_began(self) -> None:
        """Takes it up at once. This runs while facts are applied, so a refusal must not get out: one member
        that is out of step would freeze the journal for all. Its next pull or ack says so."""
        member = self._member()
        if member is None:
            return
        if member.is_automatic:
            with suppress(SparrowError):
                member.beat()
        elif member.on_generation is not None:
            asyncio.get_running_loop().call_soon(member.on_generation)


def _beat_on(held: Any) -> None:
    """Signs of life, until the member leaves, is dropped by the program, or is told to join again."""
    member: BrokerMember | None = held()
    if member is None or member._has_left:
        return
    try:
        member.beat()
        wait_s = member.policy.group.heartbeat_s / 2
    except SparrowError:
        member._timer = None  # The next pull or ack says so.
        return
    member._timer = asyncio.get_running_loop().call_later(wait_s, _beat_on, held)
