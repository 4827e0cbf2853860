"""A subscription of a broker elsewhere, in the hands of a program: the verbs of an embedded one.

Three things differ, because a network lies between. What is a plain property there and can only be told by
the broker (``in_flight``, ``sample_share``) is awaited here. A refused ack raises at once when it is waited
for (``wait=True``, and always under *exactly once*), and otherwise at the next ``pull`` or ``flush`` that
hears of it. And ``heartbeat="manual"`` is not offered: a connection that lives is the sign of life.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from sparrow.client import verbs
from sparrow.client.connection import Connection
from sparrow.client.remoteletters import RemoteDeadLetters
from sparrow.client.session import Session
from sparrow.client.settling import Held, complain, parse_names, to_ranges
from sparrow.client.supply import Supply
from sparrow.kernel.lag import LagReport, PartitionLag
from sparrow.model.consumer import Consumer, Target, check_number
from sparrow.model.errors import InvalidArgument, PreconditionFailed
from sparrow.model.group import Committed, GroupInfo, MemberInfo
from sparrow.model.message import Delivered
from sparrow.model.push import PushState
from sparrow.model.subscription import Guarantee, Subscription, SubscriptionPolicy
from sparrow.wire import heads

SETTLE_MAX = 100_000
"""Messages that one frame settles; the broker takes some more."""


class RemoteSubscription(Consumer):
    """One program's hold on a subscription. Several may share one; each message goes to one of them."""

    def __init__(
        self,
        found: Subscription,
        session: Session,
        consumer: str,
        make_member: Callable[..., Any] | None = None,
    ) -> None:
        self.name = found.name
        self.consumer = consumer
        self.owner: Any = self
        """Whom messages are settled with: this object, or one that wraps it for blocking code."""
        self._found = found
        self._session = session
        self._make_member = make_member
        self._supply = Supply(session, self._consume)
        self._supply.policy = found.policy
        self._settling = self._supply.settling

    def __repr__(self) -> str:
        return f"<Subscription {self.name!r} to {self.pattern!r}>"

    @property
    def pattern(self) -> str:
        return self._found.pattern

    @property
    def policy(self) -> SubscriptionPolicy:
        """As this program last heard of it."""
        return self._found.policy

    @property
    def subscription(self) -> Subscription:
        """The subscription as this program last heard of it."""
        return self._found

    async def _consume(self, connection: Connection, made: Callable[[Any], None]) -> Any:
        return await connection.submit(heads.Consume(self.name, 0, 0), then=made)

    async def _call(self, verb: str, result: Any = None, /, **arguments: Any) -> Any:
        return await verbs.call(
            self._session, f"subscription.{verb}", result, subscription=self.name, **arguments
        )

    # Receiving.

    async def pull(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Delivered]:
        """Up to ``max_messages`` with up to ``max_bytes`` of data (one message at least), waiting up to
        ``timeout_s`` for the first; an empty list after that."""
        self._check_pull(max_messages, timeout_s, max_bytes)
        return await self._supply.pull(max_messages, timeout_s, max_bytes, self.owner)

    # Settling.

    async def ack(self, messages: Target, *, wait: bool = False) -> None:
        """The work is done. With ``wait`` returns when that is durable."""
        held, bad = parse_names(messages)
        self._check_life()
        if held:
            if wait or self.policy.guarantee is Guarantee.EXACTLY_ONCE:
                for some in _cut(held):
                    await self._settling.settle_now(heads.Settle(0, heads.ACK, to_ranges(some), wait=True))
            else:
                self._settling.ack(held)
                if not self._supply.is_open:
                    await self._supply.opened()
        complain(bad)

    @property
    def begin_ack(self) -> Callable[[Target], Callable[[], None]] | None:
        """For threads: names what is to be acked, and gives what the loop's thread is to call then. None when
        acks are to be waited for."""
        is_waited_for = self.policy.guarantee is Guarantee.EXACTLY_ONCE
        return None if is_waited_for or not self._supply.is_open else self._begin_ack

    def _begin_ack(self, messages: Target) -> Callable[[], None]:
        held, bad = parse_names(messages)
        self._check_life()
        return partial(self._settling.ack, held, bad)

    async def nack(
        self,
        messages: Target,
        *,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
        wait: bool = False,
    ) -> None:
        """The work failed; see ``Delivered.nack``."""
        if delay_s is not None:
            check_number("delay_s", delay_s)
        held, bad = parse_names(messages)
        self._check_life()
        is_waited_for = wait or self.policy.guarantee is Guarantee.EXACTLY_ONCE
        for some in _cut(held):
            head = heads.Settle(
                0, heads.NACK, to_ranges(some), delay_s, str(reason), bool(retry), is_waited_for
            )
            if is_waited_for:
                await self._settling.settle_now(head)
            else:
                await self._supply.opened()
                self._settling.settle(head)
        complain(bad)

    async def extend(self, messages: Target, seconds: float) -> None:
        """More time for the work, counted from now."""
        check_number("seconds", seconds)
        held, bad = parse_names(messages)
        self._check_life()
        for some in _cut(held):
            await self._settling.settle_now(heads.Extend(0, to_ranges(some), seconds))
        complain(bad)

    async def flush(self) -> None:
        """Returns when all settlements so far are durable, and the dead letters they made are moved."""
        await self._settling.flush()
        self._settling.tell_loss()

    def _check_life(self) -> None:
        """Raises when it may not settle any more."""

    # Moving.

    async def seek(self, target: str | datetime | float | Mapping[Any, int]) -> None:
        """Puts the cursor elsewhere: "earliest", "latest", a time, a snapshot's name, or
        ``{(topic, partition): offset}``. What lies behind it counts as acked, what lies ahead as new."""
        await self._settle_first()
        await self._supply.quiet()
        await self._call("seek", target=verbs.to_position(target))

    async def snapshot(self, name: str, *, ttl_s: float = 7 * 86400.0) -> None:
        """Saves the cursor under a name; ``seek(name)`` comes back to it."""
        await self._settle_first()
        await self._call("snapshot", name=name, ttl_s=ttl_s)

    async def commit(self, topic: str, partition: int, offset: int) -> None:
        """A cumulative ack: everything of the partition below ``offset`` is done."""
        await self._settle_first()
        await self._call("commit", topic=topic, partition=partition, offset=offset)

    async def _settle_first(self) -> None:
        """What was settled before a verb counts for it."""
        if self._settling.is_used:
            await self._settling.flush()

    # The group.

    async def join(
        self,
        name: str,
        *,
        max_in_flight: int | None = None,
        is_static: bool = False,
        instance: str = "",
        heartbeat: str = "automatic",
    ) -> Any:
        """Becomes a member of the group that shares this subscription; pull, settle, commit and leave with
        what is returned. The name of a member that is gone without leaving keeps its seat for
        ``session_timeout_s``; with ``is_static`` also when its connection breaks."""
        if self._make_member is None:
            raise PreconditionFailed(f"{self.consumer!r} is a member already")
        if heartbeat != "automatic":
            raise InvalidArgument(
                f"heartbeat must be 'automatic' over a network, not {heartbeat!r}",
                hint="The connection is the sign of life; leave the option out.",
            )
        member = self._make_member(self._found, self._session, name, max_in_flight, is_static, instance)
        await member.start()
        return member

    async def members(self) -> list[MemberInfo]:
        """Who shares the subscription, by name."""
        found: list[MemberInfo] = await self._call("members", list[MemberInfo])
        return found

    async def group(self) -> GroupInfo:
        """The group as a whole: state, generation, rebalances, what drains."""
        found: GroupInfo = await self._call("group", GroupInfo)
        return found

    async def rebalance(self) -> None:
        """Starts a new generation of the group."""
        await self._call("rebalance")

    async def committed(self) -> list[Committed]:
        """The offsets that members committed, with their notes."""
        found: list[Committed] = await self._call("committed", list[Committed])
        return found

    # Looking.

    async def lag(self) -> int:
        """Messages that are not done yet."""
        await self._settle_first()
        return int(await self._call("lag", int))

    async def partition_lags(self) -> list[PartitionLag]:
        """The same by partition."""
        await self._settle_first()
        found: list[PartitionLag] = await self._call("partition_lags", list[PartitionLag])
        return found

    async def lag_report(self) -> LagReport:
        """Lag in all its figures: depth, ages, rates, levels, trend, time to catch up."""
        found: LagReport = await self._call("lag_report", LagReport)
        return found

    async def consumer_lag(self) -> dict[str, LagReport]:
        """The same of each consumer that was active lately, by name; its depth is what it holds."""
        found: dict[str, LagReport] = await self._call("consumer_lag", dict[str, LagReport])
        return found

    @property
    def sample_share(self) -> Awaitable[float]:
        """Of the messages, how many are delivered: 1 unless ``sample`` is set and it lags. Await it."""
        return self._call("sample_share", float)

    @property
    def in_flight(self) -> Awaitable[int]:
        """Messages that consumers hold now. Await it."""
        return self._in_flight()

    async def _in_flight(self) -> int:
        await self._settle_first()
        return int(await self._call("in_flight", int)) - self._supply.buffered

    @property
    def dead_letters(self) -> RemoteDeadLetters:
        """What this subscription could not deliver."""
        return RemoteDeadLetters(self.name, self._session)

    # Webhooks.

    async def push_state(self) -> PushState:
        """How pushing goes: active, open (the receiver fails) or disabled, and why; rates, the last error."""
        found: PushState = await self._call("push_state", PushState)
        return found

    async def push_secrets(self) -> list[str]:
        """The new secret that webhooks are signed with, once: right after the subscription was made."""
        found: list[str] = await self._call("push_secrets", list[str])
        return found

    async def rotate_secret(self, *, overlap_s: float = 86_400.0, secret: str | None = None) -> str:
        """A new secret, made by the broker unless one is given. The one before stays in force for
        ``overlap_s``; until then webhooks are signed with both."""
        return str(await self._call("rotate_secret", str, overlap_s=overlap_s, secret=secret))

    # Its own life.

    async def update(self, **policy: Any) -> None:
        """Changes options. Leases end; what is not acked is judged by the new filter."""
        await self._settle_first()
        await self._supply.quiet()
        await self._call("update", **policy)
        await self.refresh()

    async def refresh(self) -> None:
        """Hears of its settings anew."""
        self._found = await verbs.call(self._session, "subscription", Subscription, name=self.name)
        self._supply.policy = self._found.policy

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def close(self) -> None:
        """Lets go: what this program still holds becomes ready for others, without a counted attempt."""
        if self._supply.is_open or self._settling.is_used:
            await self._settling.flush()
        await self._supply.close()
        self._settling.tell_loss()

    async def unsubscribe(self) -> None:
        """Deletes the subscription and its cursor."""
        await self._settle_first()
        await self._supply.close()
        await self._call("unsubscribe")


def _cut(held: Held) -> Iterable[Held]:
    """What one frame settles at most."""
    if sum(map(len, held.values())) <= SETTLE_MAX:
        return [held] if held else []
    return [
        {lease: offsets[start : start + SETTLE_MAX]}
        for lease, offsets in held.items()
        for start in range(0, len(offsets), SETTLE_MAX)
    ]
