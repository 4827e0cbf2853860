"""Subscriptions, group members and dead letters for blocking code; the verbs are those of asyncio code."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from sparrow.client.loop import LoopThread
from sparrow.kernel.lag import LagReport, PartitionLag
from sparrow.model.group import Assigned, Committed, GroupInfo, MemberInfo
from sparrow.model.message import Delivered
from sparrow.model.push import PushState
from sparrow.model.subscription import SubscriptionPolicy


class BlockingSubscription:
    """See ``sparrow.broker.subscription.BrokerSubscription``."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread
        target.owner = self

    def __repr__(self) -> str:
        return repr(self._target)

    @property
    def name(self) -> str:
        return str(self._target.name)

    @property
    def pattern(self) -> str:
        return str(self._target.pattern)

    @property
    def policy(self) -> SubscriptionPolicy:
        found: SubscriptionPolicy = self._target.policy
        return found

    def pull(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Delivered]:
        """Up to ``max_messages`` with up to ``max_bytes`` of data (one message at least), waiting up to
        ``timeout_s`` for the first; an empty list after that."""
        pulling = self._target.pull(max_messages, timeout_s, max_bytes=max_bytes)
        found: list[Delivered] = self._thread.run(pulling)
        return found

    def __iter__(self) -> Iterator[Delivered]:
        """Messages for ever; settle each of them."""
        while True:
            yield from self.pull(timeout_s=1.0)

    def run(self, callback: Callable[[Delivered], Any], *, max_messages: int | None = None) -> int:
        """Calls ``callback`` for every message, one after the other, in this thread: returning acks,
        raising nacks. Ends after ``max_messages``, or never; returns how many were handled."""
        handled = 0
        while max_messages is None or handled < max_messages:
            room = 100 if max_messages is None else min(100, max_messages - handled)
            for message in self.pull(room, timeout_s=1.0):
                try:
                    callback(message)
                except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failed attempt
                    message.nack(reason=f"{type(error).__name__}: {error}")
                else:
                    message.ack()
                handled += 1
        self.flush()
        return handled

    def ack(self, messages: Iterable[Delivered | str], *, wait: bool = False) -> None:
        """The work is done. With ``wait`` returns when that is durable."""
        begin = None if wait else getattr(self._target, "begin_ack", None)
        if begin is not None:
            # A broker elsewhere answers later anyhow, so nobody has to wait for the loop's thread.
            self._thread.post(begin(messages))
            return
        self._thread.run(self._target.ack(messages, wait=wait))

    def nack(
        self,
        messages: Iterable[Delivered | str],
        *,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
        wait: bool = False,
    ) -> None:
        """The work failed; see ``Delivered.nack``."""
        self._thread.run(self._target.nack(messages, delay_s=delay_s, reason=reason, retry=retry, wait=wait))

    def extend(self, messages: Iterable[Delivered | str], seconds: float) -> None:
        """More time for the work, counted from now."""
        self._thread.run(self._target.extend(messages, seconds))

    def flush(self) -> None:
        """Returns when all settlements so far are durable."""
        self._thread.run(self._target.flush())

    def seek(self, target: str | datetime | float | Mapping[Any, int]) -> None:
        """Puts the cursor elsewhere: "earliest", "latest", a time, a snapshot's name, or
        ``{(topic, partition): offset}``."""
        self._thread.run(self._target.seek(target))

    def snapshot(self, name: str, *, ttl_s: float = 7 * 86400.0) -> None:
        """Saves the cursor under a name; ``seek(name)`` comes back to it."""
        self._thread.run(self._target.snapshot(name, ttl_s=ttl_s))

    def commit(self, topic: str, partition: int, offset: int) -> None:
        """A cumulative ack: everything of the partition below ``offset`` is done."""
        self._thread.run(self._target.commit(topic, partition, offset))

    def join(
        self,
        name: str,
        *,
        max_in_flight: int | None = None,
        is_static: bool = False,
        instance: str = "",
        heartbeat: str = "automatic",
    ) -> BlockingMember:
        """Becomes a member of the group that shares this subscription; pull, settle, commit and leave with
        what is returned. The name of a member that is gone without leaving keeps its seat for
        ``session_timeout_s``; with ``is_static`` also when its connection breaks."""
        joining = self._target.join(
            name,
            max_in_flight=max_in_flight,
            is_static=is_static,
            instance=instance,
            heartbeat=heartbeat,
        )
        return BlockingMember(self._thread.run(joining), self._thread)

    def members(self) -> list[MemberInfo]:
        """Who shares the subscription, by name."""
        found: list[MemberInfo] = self._thread.run(self._target.members())
        return found

    def group(self) -> GroupInfo:
        """The group as a whole: state, generation, rebalances, what drains."""
        found: GroupInfo = self._thread.run(self._target.group())
        return found

    def rebalance(self) -> None:
        """Starts a new generation of the group."""
        self._thread.run(self._target.rebalance())

    def committed(self) -> list[Committed]:
        """The offsets that members committed, with their notes."""
        found: list[Committed] = self._thread.run(self._target.committed())
        return found

    def lag(self) -> int:
        """Messages that are not done yet."""
        return int(self._thread.run(self._target.lag()))

    def partition_lags(self) -> list[PartitionLag]:
        """The same by partition."""
        found: list[PartitionLag] = self._thread.run(self._target.partition_lags())
        return found

    def lag_report(self) -> LagReport:
        """Lag in all its figures: depth, ages, rates, levels, trend, time to catch up."""
        found: LagReport = self._thread.run(self._target.lag_report())
        return found

    def consumer_lag(self) -> dict[str, LagReport]:
        """The same of each consumer that was active lately, by name; its depth is what it holds."""
        found: dict[str, LagReport] = self._thread.run(self._target.consumer_lag())
        return found

    @property
    def sample_share(self) -> float:
        """Of the messages, how many are delivered: 1 unless ``sample`` is set and it lags."""
        return float(self._thread.obtain(lambda: self._target.sample_share))

    @property
    def in_flight(self) -> int:
        """Messages that consumers hold now."""
        return int(self._thread.obtain(lambda: self._target.in_flight))

    @property
    def dead_letters(self) -> BlockingDeadLetters:
        """What this subscription could not deliver."""
        return BlockingDeadLetters(self._target.dead_letters, self._thread)

    def push_state(self) -> PushState:
        """How pushing goes: active, open (the receiver fails) or disabled, and why; rates, the last error."""
        found: PushState = self._thread.run(self._target.push_state())
        return found

    def push_secrets(self) -> list[str]:
        """The new secret that webhooks are signed with, once: right after the subscription was made."""
        found: list[str] = self._thread.run(self._target.push_secrets())
        return found

    def rotate_secret(self, *, overlap_s: float = 86_400.0, secret: str | None = None) -> str:
        """A new secret, made by the broker unless one is given. The one before stays in force for
        ``overlap_s``; until then webhooks are signed with both."""
        return str(self._thread.run(self._target.rotate_secret(overlap_s=overlap_s, secret=secret)))

    def update(self, **policy: Any) -> None:
        """Changes options. Leases end; what is not acked is judged by the new filter."""
        self._thread.run(self._target.update(**policy))

    def pause(self) -> None:
        self._thread.run(self._target.pause())

    def resume(self) -> None:
        self._thread.run(self._target.resume())

    def close(self) -> None:
        """Lets go: what this program still holds becomes ready for others, without a counted attempt."""
        self._thread.run(self._target.close())

    def unsubscribe(self) -> None:
        """Deletes the subscription and its cursor."""
        self._thread.run(self._target.unsubscribe())


class BlockingMember(BlockingSubscription):
    """See ``sparrow.broker.member.BrokerMember``."""

    @property
    def consumer(self) -> str:
        """The name that it joined under."""
        return str(self._target.consumer)

    @property
    def generation(self) -> int:
        """The generation of the group that it has taken up."""
        return int(self._target.generation)

    @property
    def assignment(self) -> tuple[Assigned, ...]:
        """The partitions that it has: all of them in a shared group."""
        found: tuple[Assigned, ...] = self._thread.call(lambda: self._target.assignment)
        return found

    def heartbeat(self, status: str = "") -> Any:
        """Says that it lives and takes up what has changed; a manual member does this in time."""
        return self._thread.run(self._target.heartbeat(status))

    def commit(self, topic: str, partition: int, offset: int, *, metadata: str = "") -> None:
        """A cumulative ack: everything of the partition below ``offset`` is done. ``metadata`` is kept with
        it, for whoever has the partition next."""
        self._thread.run(self._target.commit(topic, partition, offset, metadata=metadata))

    def info(self) -> MemberInfo:
        """How the group sees it."""
        found: MemberInfo = self._thread.run(self._target.info())
        return found

    def leave(self) -> None:
        """Leaves the group: what it holds goes to the others at once, without a counted attempt."""
        self._thread.run(self._target.leave())


class BlockingDeadLetters:
    """See ``sparrow.broker.subscription.DeadLetterBox``."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread

    def __repr__(self) -> str:
        return repr(self._target)

    def list(self, *, limit: int = 100, **selection: Any) -> builtins.list[Any]:
        """Dead letters, oldest first. Selection: ids, start_at_us, end_at_us, reason, filter."""
        found: builtins.list[Any] = self._thread.run(self._target.list(limit=limit, **selection))
        return found

    def get(self, message_id: str) -> Any:
        """One dead letter by the id of its message."""
        return self._thread.run(self._target.get(message_id))

    def replay(
        self,
        *,
        rate_per_s: float = 100.0,
        dry_run: bool = False,
        destination: str | None = None,
        **selection: Any,
    ) -> Any:
        """Delivers them again under their ids, in the background, here or to another subscription; returns
        the job. A dry run only counts."""
        return self._thread.run(
            self._target.replay(rate_per_s=rate_per_s, dry_run=dry_run, destination=destination, **selection)
        )

    def replays(self) -> builtins.list[Any]:
        """The replay jobs of this subscription."""
        found: builtins.list[Any] = self._thread.run(self._target.replays())
        return found

    def wait(self, replay_id: str) -> Any:
        """Returns the job when it has ended."""
        return self._thread.run(self._target.wait(replay_id))

    def abort(self, replay_id: str) -> Any:
        return self._thread.run(self._target.abort(replay_id))

    def purge(self, *, dry_run: bool = False, **selection: Any) -> int:
        """Gives them up for good; how many."""
        return int(self._thread.run(self._target.purge(dry_run=dry_run, **selection)))

    def statistics(self) -> Any:
        """Counts by topic and reason, oldest and newest."""
        return self._thread.run(self._target.statistics())
