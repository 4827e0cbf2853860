"""A member of a group of a broker elsewhere: as a subscription, and with a share of its own.

The broker says when the share changes, and takes that for accepted. When the connection breaks, the member
joins again on the next one under its name. One that the group has removed, or whose name another process
took, is told to join again by what it does next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparrow.client.connection import Connection
from sparrow.client.remotesub import RemoteSubscription
from sparrow.client.session import Session
from sparrow.kernel.member import Reply
from sparrow.model.errors import InvalidArgument, StaleGeneration
from sparrow.model.group import Assigned, Committed, MemberInfo
from sparrow.model.subscription import Subscription
from sparrow.wire import heads


class RemoteMember(RemoteSubscription):
    """One member; see the module's text."""

    def __init__(
        self,
        found: Subscription,
        session: Session,
        name: str,
        max_in_flight: int | None = None,
        is_static: bool = False,
        instance: str = "",
    ) -> None:
        super().__init__(found, session, name)
        self._max_in_flight = max_in_flight
        self._is_static = is_static
        self._instance = instance
        self._is_removed = False
        self._has_left = False
        self.incarnation = 0
        self.generation = 0
        """The generation of the group that it has taken up."""
        self._assignment: tuple[Assigned, ...] = ()
        self._supply.on_rebalance = self._rebalanced

    def __repr__(self) -> str:
        return f"<Member {self.consumer!r} of {self.name!r}, generation {self.generation}>"

    @property
    def assignment(self) -> tuple[Assigned, ...]:
        """The partitions that it has: all of them in a shared group."""
        return self._assignment

    async def start(self) -> None:
        """Joins."""
        await self._supply.opened()
        self._supply.is_lasting = True

    async def _consume(self, connection: Connection, made: Callable[[Any], None]) -> Any:
        head = heads.JoinGroup(
            self.name, self.consumer, self._max_in_flight, self._is_static, self._instance, 0, 0
        )

        def joined(reply: Any) -> None:
            self.incarnation = int(reply.value["incarnation"])
            self._take_up(int(reply.value["generation"]), reply.value["assignment"])
            made(reply)

        return await connection.submit(head, then=joined)

    def _take_up(self, generation: int, assignment: Any) -> None:
        self.generation = generation
        self._assignment = tuple(Assigned(topic, partition) for topic, partition in assignment)

    def _rebalanced(self, head: heads.Rebalance) -> None:
        if head.must_rejoin:
            self._is_removed = True
            self._supply.is_lasting = False
            self._supply.ended(self._stale())
        else:
            self._take_up(head.generation, head.assignment)

    def _stale(self) -> StaleGeneration:
        what = "has left the group" if self._has_left else "is not a member of the group any more"
        return StaleGeneration(f"{self.consumer!r} {what}", generation=self.generation)

    def _check_life(self) -> None:
        if self._has_left or self._is_removed:
            raise self._stale()

    def _check_seat(self) -> None:
        self._check_life()

    # Life.

    async def heartbeat(self, status: str = "") -> Reply:
        """Says that it lives, and how it is; its connection says the first by itself."""
        self._check_life()
        connection, _ = await self._supply.opened()
        await connection.submit(heads.Beat(status))
        self._check_life()
        return Reply(self.generation)

    async def leave(self) -> None:
        """Leaves the group: what it holds goes to the others at once, without a counted attempt."""
        if self._has_left:
            return
        if not self._is_removed and self._settling.is_used:
            await self._settling.flush()
        self._has_left = True
        await self._supply.close(leave=True)
        self._settling.tell_loss()

    async def close(self) -> None:
        await self.leave()

    # Settling.

    async def commit(self, topic: str, partition: int, offset: int, *, metadata: str = "") -> None:
        """A cumulative ack: everything of the partition below ``offset`` is done. ``metadata`` is kept with
        it, for whoever has the partition next."""
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise InvalidArgument(f"an offset is a whole number, not {offset!r}")
        self._check_life()
        await self._settle_first()
        connection, number = await self._supply.opened()
        await connection.submit(heads.Commit(number, topic, partition, offset, metadata))

    async def committed(self) -> list[Committed]:
        """The committed offsets of its partitions."""
        mine = {(each.topic, each.partition) for each in self.assignment}
        return [each for each in await super().committed() if (each.topic, each.partition) in mine]

    # Looking.

    async def info(self) -> MemberInfo:
        """How the group sees it."""
        self._check_life()
        found = [each for each in await self.members() if each.name == self.consumer]
        if not found:
            raise self._stale()
        return found[0]
