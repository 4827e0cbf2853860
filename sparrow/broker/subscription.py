"""A subscription in the hands of a program: pull, settle, iterate, seek, look.

Settling is quick: an ack is taken at once, travels to the journal with others, and is confirmed when
``flush`` or the next ``pull`` returns. Under *exactly once* each ack waits until it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from sparrow.broker.allowance import Allowance
from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier, Portion, Seat
from sparrow.broker.deadletters import DeadLetters
from sparrow.broker.groups import Groups
from sparrow.broker.lags import Lags
from sparrow.broker.positions import Positions
from sparrow.broker.replays import ReplayJobs
from sparrow.broker.subscriptions import Subscriptions
from sparrow.kernel.exchange import Refusal, Settled
from sparrow.kernel.filter import parse_filter
from sparrow.kernel.lag import LagReport, PartitionLag
from sparrow.kernel.lease import AckNames, name_offsets, parse_ack_ids
from sparrow.model.consumer import Consumer, Target, check_number, sort_target
from sparrow.model.errors import BrokerClosed
from sparrow.model.group import Committed, GroupInfo, MemberInfo
from sparrow.model.message import Delivered
from sparrow.model.push import PushPolicy, PushState
from sparrow.model.subscription import Subscription, SubscriptionPolicy, parse_policy


class Pushing(Protocol):
    """The webhooks of all subscriptions, as far as one of them knows them."""

    def check(self, policy: PushPolicy | None) -> None: ...

    async def changed(self, subscription: Subscription) -> None: ...

    async def resumed(self, subscription: Subscription) -> None: ...

    async def removed(self, subscription_id: int) -> None: ...

    def state(self, subscription: Subscription) -> PushState: ...

    def secrets(self, subscription: Subscription) -> list[str]: ...

    async def rotate(self, subscription: Subscription, overlap_s: float, secret: str | None) -> str: ...


class Piping(Protocol):
    """The pipelines, as far as a subscription that is one knows them."""

    changed: asyncio.Event

    async def sought(self, subscription: Subscription) -> None: ...

    def check_unsubscribe(self, subscription: Subscription) -> None: ...


class Desk(NamedTuple):
    """What a hold on a subscription works with."""

    subscriptions: Subscriptions
    dead_letters: DeadLetters
    replays: ReplayJobs
    positions: Positions
    lags: Lags
    groups: Groups
    clock: Clock
    jitter: Callable[[], float]
    member: Callable[..., Any]
    """Makes a member of a group."""
    push: Pushing
    pipelines: Piping


class BrokerSubscription(Consumer):
    """One program's hold on a subscription. Several may share one; each message goes to one of them."""

    def __init__(self, name: str, consumer: str, desk: Desk) -> None:
        self.name = name
        self.consumer = consumer
        self.owner: Any = self
        """Whom messages are settled with: this object, or one that wraps it for blocking code."""
        self._desk = desk
        self._subscriptions = desk.subscriptions
        self._dead_letters = desk.dead_letters
        self._replays = desk.replays
        self._positions = desk.positions
        self._groups = desk.groups
        self._clock = desk.clock
        self._jitter = desk.jitter
        self._lags = desk.lags
        self._seat: Seat | None = None
        """Its place in a group; none for who only pulls."""
        self._losses: list[BaseException] = []
        """Why a settlement that nobody waited for was lost; told at the next ``flush`` or ``pull``."""

    def __repr__(self) -> str:
        return f"<Subscription {self.name!r} to {self.pattern!r}>"

    @property
    def _courier(self) -> Courier:
        return self._subscriptions.get(self.name)

    @property
    def subscription(self) -> Subscription:
        """What is known of it: id, name, pattern, policy, whether it is paused."""
        return self._courier.subscription

    @property
    def pattern(self) -> str:
        return self._courier.subscription.pattern

    @property
    def policy(self) -> SubscriptionPolicy:
        return self._courier.subscription.policy

    # Receiving.

    async def pull(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Delivered]:
        """Up to ``max_messages`` with up to ``max_bytes`` of data (one message at least), waiting up to
        ``timeout_s`` for the first; an empty list after that."""
        self._check_pull(max_messages, timeout_s, max_bytes)
        if self._courier.unconfirmed:
            await self._courier.flush()
        self._tell_loss()
        until_s = self._clock.monotonic_s() + timeout_s
        while True:
            courier = self._courier  # A change of the policy puts another one in its place.
            if courier.is_stopped:
                raise BrokerClosed("the broker is closed")
            rest_s = max(0.0, until_s - self._clock.monotonic_s())
            found = await courier.pull(
                self.consumer, max_messages, rest_s, self.owner, seat=self._seat, max_bytes=max_bytes
            )
            if found or not courier.is_stopped:
                return found

    async def pull_portions(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Portion]:
        """As ``pull``, as columns: what a protocol hands on without looking at single messages."""
        self._check_pull(max_messages, timeout_s, max_bytes)
        courier = self._courier
        if courier.is_stopped:
            raise BrokerClosed("the broker is closed")
        return await courier.pull_portions(
            self.consumer, max_messages, timeout_s, seat=self._seat, max_bytes=max_bytes
        )

    def allow(self, messages_max: int) -> None:
        """From now on this hold has at most so many unsettled messages; a pull waits for its settlements."""
        check_number("messages_max", messages_max)
        self._seat = Allowance(messages_max, lambda: self._courier.delivery.in_flight_of(self.consumer))

    def _check_seat(self) -> None:
        if self._seat is None or isinstance(self._seat, Allowance):
            super()._check_seat()

    # Settling.

    async def ack(self, messages: Target, *, wait: bool = False) -> None:
        """The work is done. With ``wait`` returns when that is durable."""
        _complain(await self.ack_names(_names(messages), wait=wait))

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
        names = _names(messages)
        _complain(await self.nack_names(names, delay_s=delay_s, reason=reason, retry=retry, wait=wait))

    async def extend(self, messages: Target, seconds: float) -> None:
        """More time for the work, counted from now."""
        _complain(self.extend_names(_names(messages), seconds))

    async def ack_names(self, names: AckNames, *, wait: bool = False) -> list[Refusal]:
        """As ``ack``, for messages by lease and offsets; what was refused is returned."""
        courier = self._courier
        decided = courier.delivery.ack(names, self._speaks_for(names))
        if courier.watch is not None and decided.accepted:
            courier.watch.acked(names.groups, self._clock.now_us())
        return await self._settle(decided, wait)

    async def nack_names(
        self,
        names: AckNames,
        *,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
        wait: bool = False,
    ) -> list[Refusal]:
        """As ``nack``, for messages by lease and offsets; what was refused is returned."""
        if delay_s is not None:
            check_number("delay_s", delay_s)
        decided = self._courier.delivery.nack(
            names,
            self._clock.now_us(),
            jitter=self._jitter(),
            delay_s=delay_s,
            reason=reason,
            retry=retry,
            consumer=self._speaks_for(names),
        )
        return await self._settle(decided, wait)

    def extend_names(self, names: AckNames, seconds: float) -> list[Refusal]:
        """As ``extend``, for messages by lease and offsets; what was refused is returned."""
        check_number("seconds", seconds)
        courier = self._courier
        settled = courier.delivery.extend(names, seconds, self._clock.now_us(), self._speaks_for(names))
        courier.set_timer()
        return settled.refused if courier.watch is None else courier.watch.forgive(settled.refused)

    def return_names(self, names: AckNames) -> None:
        """Gives messages back that nobody looked at: ready at once, and no attempt is counted."""
        courier = self._courier
        courier.delivery.return_unseen(names, self._speaks_for(names))
        courier.wake()

    async def flush(self) -> None:
        """Returns when all settlements so far are durable, and the dead letters they made are moved."""
        courier = self._courier
        await courier.flush()
        self._tell_loss()
        await self._dead_letters.finish(courier)

    def _speaks_for(self, names: AckNames) -> str | None:
        """Whose messages may be settled here; ``None`` is anybody's."""
        return None

    def _tell_loss(self) -> None:
        """Raises when a settlement was lost that nobody waited for; the messages come again."""
        if self._losses:
            raise self._losses.pop()

    async def _settle(self, decided: Settled, wait: bool) -> list[Refusal]:
        courier = self._courier
        refused = await courier.settle(decided, is_confirmed=wait, losses=self._losses)
        if refused and courier.watch is not None:
            refused = courier.watch.forgive(refused)
        return refused

    # Moving.

    async def seek(self, target: str | datetime | float | Mapping[Any, int]) -> None:
        """Puts the cursor elsewhere: "earliest", "latest", a time, a snapshot's name, or
        ``{(topic, partition): offset}``. What lies behind it counts as acked, what lies ahead as new."""
        await self._positions.seek(self._courier, target)
        await self._desk.pipelines.sought(self.subscription)

    async def snapshot(self, name: str, *, ttl_s: float = 7 * 86400.0) -> None:
        """Saves the cursor under a name; ``seek(name)`` comes back to it."""
        await self._courier.flush()
        await self._positions.save(self._courier, name, ttl_s)

    async def commit(self, topic: str, partition: int, offset: int) -> None:
        """A cumulative ack: everything of the partition below ``offset`` is done."""
        await self._positions.commit(self._courier, topic, partition, offset)

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
        return self._desk.member(
            self.name,
            name,
            self._desk,
            self._groups,
            max_in_flight=max_in_flight,
            is_static=is_static,
            instance=instance,
            heartbeat=heartbeat,
        )

    async def members(self) -> list[MemberInfo]:
        """Who shares the subscription, by name."""
        return self._groups.of(self._courier).members()

    async def group(self) -> GroupInfo:
        """The group as a whole: state, generation, rebalances, what drains."""
        return self._groups.of(self._courier).info()

    async def rebalance(self) -> None:
        """Starts a new generation of the group."""
        self._groups.of(self._courier).rebalance()

    async def committed(self) -> list[Committed]:
        """The offsets that members committed, with their notes."""
        return self._groups.committed(self._courier)

    # Looking.

    async def lag(self) -> int:
        """Messages that are not done yet."""
        return self._positions.lag(self._courier)

    async def partition_lags(self) -> list[PartitionLag]:
        """The same by partition."""
        return self._positions.partition_lags(self._courier)

    async def lag_report(self) -> LagReport:
        """Lag in all its figures: depth, ages, rates, levels, trend, time to catch up."""
        return await self._lags.report(self._courier)

    async def consumer_lag(self) -> dict[str, LagReport]:
        """The same of each consumer that was active lately, by name; its depth is what it holds."""
        return await self._lags.consumers(self._courier)

    @property
    def sample_share(self) -> float:
        """Of the messages, how many are delivered: 1 unless ``sample`` is set and it lags."""
        watch = self._courier.watch
        return 1.0 if watch is None else watch.share

    @property
    def in_flight(self) -> int:
        """Messages that consumers hold now."""
        return self._courier.delivery.in_flight

    @property
    def dead_letters(self) -> DeadLetterBox:
        """What this subscription could not deliver."""
        return DeadLetterBox(self.name, self._subscriptions, self._dead_letters, self._replays)

    # Webhooks.

    async def push_state(self) -> PushState:
        """How pushing goes: active, open (the receiver fails) or disabled, and why; rates, the last error."""
        return self._desk.push.state(self.subscription)

    async def push_secrets(self) -> list[str]:
        """The new secret that webhooks are signed with, once: right after the subscription was made."""
        return self._desk.push.secrets(self.subscription)

    async def rotate_secret(self, *, overlap_s: float = 86_400.0, secret: str | None = None) -> str:
        """A new secret, made here unless one is given. The one before stays in force for ``overlap_s``; until
        then webhooks are signed with both."""
        return await self._desk.push.rotate(self.subscription, overlap_s, secret)

    # Its own life.

    async def update(self, **policy: Any) -> None:
        """Changes options. Leases end; what is not acked is judged by the new filter."""
        changed = parse_policy(policy, self.policy)
        parse_filter(changed.filter)
        self._desk.push.check(changed.push)
        await self._dead_letters.prepare(self.name, changed, self.pattern)
        await self._subscriptions.update(self.name, policy)
        await self._desk.push.changed(self.subscription)

    async def pause(self) -> None:
        await self._subscriptions.pause(self.name, True)
        self._desk.pipelines.changed.set()

    async def resume(self) -> None:
        """Delivers again; a receiver of webhooks that was gone is tried again."""
        await self._subscriptions.pause(self.name, False)
        await self._desk.push.resumed(self.subscription)
        self._desk.pipelines.changed.set()

    async def close(self) -> None:
        """Lets go: what this program still holds becomes ready for others, without a counted attempt."""
        courier = self._courier
        await courier.flush()
        decided = courier.delivery.release(self.consumer, self._clock.now_us(), is_graceful=True)
        await courier.journal(decided.facts)
        courier.wake()
        self._tell_loss()

    def abandon(self, *, is_graceful: bool = False) -> None:
        """The program is gone: what it held becomes ready for others, as failed attempts unless it said
        goodbye. Nobody waits for this."""
        courier = self._courier
        decided = courier.delivery.release(
            self.consumer, self._clock.now_us(), self._jitter(), is_graceful=is_graceful
        )
        if decided.facts:
            courier.submit(decided.facts)
        courier.wake()

    async def unsubscribe(self) -> None:
        """Deletes the subscription and its cursor; that of a pipeline goes with the pipeline."""
        self._desk.pipelines.check_unsubscribe(self.subscription)
        await self._courier.flush()
        known = self.subscription.id
        await self._subscriptions.delete(self.name)
        await self._desk.push.removed(known)
        await self._dead_letters.retire(self.name)


class DeadLetterBox:
    """The dead letters of one subscription."""

    def __init__(
        self, name: str, subscriptions: Subscriptions, dead_letters: DeadLetters, replays: ReplayJobs
    ) -> None:
        self._name = name
        self._subscriptions = subscriptions
        self._dead_letters = dead_letters
        self._replays = replays

    def __repr__(self) -> str:
        return f"<Dead letters of {self._name!r}>"

    @property
    def _courier(self) -> Courier:
        return self._subscriptions.get(self._name)

    async def list(self, *, limit: int = 100, **selection: Any) -> Any:
        """Dead letters, oldest first. Selection: ids, start_at_us, end_at_us, reason, filter."""
        return await self._dead_letters.find(self._courier, limit, selection)

    async def get(self, message_id: str) -> Any:
        """One dead letter by the id of its message."""
        return await self._dead_letters.get(self._courier, message_id)

    async def replay(
        self,
        *,
        rate_per_s: float = 100.0,
        dry_run: bool = False,
        destination: str | None = None,
        **selection: Any,
    ) -> Any:
        """Delivers them again under their ids, in the background, here or to another subscription; returns
        the job. A dry run only counts."""
        return await self._replays.start(self._courier, selection, rate_per_s, dry_run, destination)

    async def replays(self) -> Any:
        """The replay jobs of this subscription."""
        return self._replays.jobs(self._courier)

    async def wait(self, replay_id: str) -> Any:
        """Returns the job when it has ended."""
        return await self._replays.wait(self._courier, replay_id)

    async def abort(self, replay_id: str) -> Any:
        return await self._replays.abort(self._courier, replay_id)

    async def purge(self, *, dry_run: bool = False, **selection: Any) -> int:
        """Gives them up for good; how many."""
        return await self._dead_letters.purge(self._courier, selection, dry_run)

    async def statistics(self) -> Any:
        """Counts by topic and reason, oldest and newest."""
        return await self._dead_letters.statistics(self._courier)


def _names(messages: Target) -> AckNames:
    """What the messages are called in the kernel."""
    held, texts = sort_target(messages)
    parsed = parse_ack_ids(texts)
    return AckNames(name_offsets(held).groups + parsed.groups, parsed.bad)


def _complain(refused: list[Refusal]) -> None:
    """All that could be settled was; the first refusal is raised and names all refused ids."""
    if refused:
        error = refused[0].error
        error.details["refused"] = [refusal.ack_id for refusal in refused]
        raise error
