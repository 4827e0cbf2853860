"""The same verbs for blocking code: an event loop in a thread of its own, and callers that wait for it.

What is async in a broker (and, later, in a network client) is blocking here, name for name, so a program
changes between the two by adding or dropping ``await``.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa
import uvloop

from sparrow.kernel.snapshot import Snapshot
from sparrow.kernel.trace import Trace
from sparrow.model.errors import BrokerClosed
from sparrow.model.health import Health
from sparrow.model.message import Delivered, Message, Receipt, Receipts
from sparrow.model.subscription import Subscription, SubscriptionPolicy
from sparrow.model.topic import Topic
from sparrow.store.ports import Bounds, RecoveryReport, StoreState

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread until it is stopped."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparrow-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop and waits for its result. Ctrl-C cancels it."""
        if self._loop.is_closed():
            work.close()
            raise BrokerClosed("the broker is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class BlockingBroker:
    """A broker for blocking code; threads may share it."""

    def __init__(self, open_target: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._thread = LoopThread()
        try:
            self._target = self._thread.run(open_target())
        except BaseException:
            self._thread.stop()
            raise

    def close(self) -> None:
        """Finishes what is under way and closes. Closing twice is allowed."""
        if self._thread._loop.is_closed():
            return
        try:
            self._thread.run(self._target.close())
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._target)

    # Topics.

    def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """A new topic. Options: durability, codec, retention_s, retention_bytes, retention_messages,
        retain_until_acked, dedupe_window_s."""
        return self._run(self._target.create_topic(name, partitions=partitions, **policy))

    def topic(self, name: str) -> Topic:
        """The topic of this name."""
        return self._run(self._target.topic(name))

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        return self._run(self._target.topics())

    def update_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Changes options of a topic; partitions may grow."""
        return self._run(self._target.update_topic(name, partitions=partitions, **policy))

    def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Deletes a topic and its messages; one that subscriptions name needs ``force``."""
        self._run(self._target.delete_topic(name, force=force))

    # Publishing.

    def publish(
        self,
        topic: str,
        data: bytes | None,
        *,
        key: str | None = None,
        attributes: dict[str, str] | None = None,
        event_time: datetime | float | None = None,
        priority: int | None = None,
        ttl_s: float | None = None,
        deliver_at: datetime | float | None = None,
        idempotency_key: str | None = None,
        depends_on: Sequence[str] | None = None,
    ) -> Receipt:
        """Stores one message; the receipt comes when it is as safe as the topic's durability says."""
        return self._run(
            self._target.publish(
                topic,
                data,
                key=key,
                attributes=attributes,
                event_time=event_time,
                priority=priority,
                ttl_s=ttl_s,
                deliver_at=deliver_at,
                idempotency_key=idempotency_key,
                depends_on=depends_on,
            )
        )

    def publish_batch(
        self,
        topic: str,
        data: Sequence[bytes | None],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[dict[str, str] | None] | None = None,
        event_times: Sequence[datetime | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        idempotency_keys: Sequence[str | None] | None = None,
    ) -> Receipts:
        """Stores many messages, all or none; costs per batch, not per message."""
        return self._run(
            self._target.publish_batch(
                topic,
                data,
                keys=keys,
                attributes=attributes,
                event_times=event_times,
                priorities=priorities,
                idempotency_keys=idempotency_keys,
            )
        )

    def publish_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> Receipts:
        """Stores an Arrow table with a column ``data`` and any of the other message columns."""
        return self._run(self._target.publish_table(topic, table))

    def producer(self, name: str, *, hold_gaps_s: float | None = None) -> BlockingProducer:
        """A producer whose repeats are recognised; an earlier one of the same name is fenced off. With
        ``hold_gaps_s``, sequences that arrive out of order are held and stored in order, and a gap is
        given up after that time."""
        return BlockingProducer(self._run(self._target.producer(name, hold_gaps_s=hold_gaps_s)), self._thread)

    # Subscriptions.

    def subscribe(
        self, name: str, pattern: str, *, start: str | datetime | float = "latest", **policy: Any
    ) -> BlockingSubscription:
        """Creates the subscription, or takes hold of it when it exists with the same settings."""
        found = self._run(self._target.subscribe(name, pattern, start=start, **policy))
        return BlockingSubscription(found, self._thread)

    def subscription(self, name: str) -> BlockingSubscription:
        """Takes hold of a subscription that exists."""
        return BlockingSubscription(self._run(self._target.subscription(name)), self._thread)

    def subscriptions(self) -> list[Subscription]:
        """All subscriptions, by name."""
        return self._run(self._target.subscriptions())

    def snapshots(self) -> list[Snapshot]:
        """All snapshots that have not expired."""
        return self._run(self._target.snapshots())

    def delete_snapshot(self, name: str) -> None:
        self._run(self._target.delete_snapshot(name))

    def trace(self, message_id: str) -> list[Trace]:
        """Where is this message? Its state in every subscription that reads its topic."""
        return self._run(self._target.trace(message_id))

    def dead_letters(self, subscription: str) -> BlockingDeadLetters:
        """What a subscription could not deliver."""
        return BlockingSubscription(
            self._run(self._target.subscription(subscription)), self._thread
        ).dead_letters

    # Reading.

    def bounds(self, topic: str, partition: int = 0) -> Bounds:
        """The first offset kept and the one after the last."""
        return self._run(self._target.bounds(topic, partition))

    def read(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_messages: int = 1000
    ) -> list[Message]:
        """Messages of a partition from an offset on; empty at the end of the log."""
        return self._run(
            self._target.read(topic, partition=partition, offset=offset, max_messages=max_messages)
        )

    def read_batches(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_bytes: int = 4 * 1024 * 1024
    ) -> list[pa.RecordBatch]:
        """The same as Arrow record batches, about ``max_bytes`` of them."""
        return self._run(
            self._target.read_batches(topic, partition=partition, offset=offset, max_bytes=max_bytes)
        )

    def offset_at(self, topic: str, moment: datetime | float, *, partition: int = 0) -> int:
        """The first offset published at or after a moment."""
        return self._run(self._target.offset_at(topic, moment, partition=partition))

    # Keeping.

    def seal(self) -> int:
        """Moves everything published so far into the lake now; the number of messages moved."""
        return self._run(self._target.seal())

    def apply_retention(self) -> int:
        """Drops what the topics' policies no longer keep, now; the number of segments dropped."""
        return self._run(self._target.apply_retention())

    def health(self) -> Health:
        found: Health = self._target.health()
        return found

    def state(self) -> StoreState:
        """Sizes, counters and known damage of the store."""
        found: StoreState = self._target.state()
        return found

    @property
    def recovery(self) -> RecoveryReport:
        """What opening did and found."""
        found: RecoveryReport = self._target.recovery
        return found

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)


class BlockingProducer:
    """See ``sparrow.broker.producer.Producer``."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread

    def __repr__(self) -> str:
        return repr(self._target)

    @property
    def name(self) -> str:
        return str(self._target.name)

    @property
    def id(self) -> int:
        return int(self._target.id)

    @property
    def epoch(self) -> int:
        return int(self._target.epoch)

    def next_sequence(self, topic: str) -> int:
        """The sequence that the next new message to this topic has."""
        return int(self._thread.run(self._target.next_sequence(topic)))

    def publish(
        self, topic: str, data: bytes | None, *, sequence: int | None = None, **values: Any
    ) -> Receipt:
        """One message; takes the same options as the broker's publish."""
        found: Receipt = self._thread.run(self._target.publish(topic, data, sequence=sequence, **values))
        return found

    def publish_batch(
        self,
        topic: str,
        data: Sequence[bytes | None],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[dict[str, str] | None] | None = None,
        sequence: int | None = None,
    ) -> Receipts:
        """Many messages, stored whole or not at all; ``sequence`` is that of the first."""
        return self._thread.run(
            self._target.publish_batch(topic, data, keys=keys, attributes=attributes, sequence=sequence)
        )


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

    def pull(self, max_messages: int = 100, timeout_s: float = 0.0) -> list[Delivered]:
        """Up to ``max_messages``, waiting up to ``timeout_s`` for the first; an empty list after that."""
        found: list[Delivered] = self._thread.run(self._target.pull(max_messages, timeout_s))
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

    def lag(self) -> int:
        """Messages that are not done yet."""
        return int(self._thread.run(self._target.lag()))

    @property
    def in_flight(self) -> int:
        """Messages that consumers hold now."""
        return int(self._target.in_flight)

    @property
    def dead_letters(self) -> BlockingDeadLetters:
        """What this subscription could not deliver."""
        return BlockingDeadLetters(self._target.dead_letters, self._thread)

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

    def replay(self, *, rate_per_s: float = 100.0, dry_run: bool = False, **selection: Any) -> Any:
        """Delivers them again under their ids, in the background; returns the job. A dry run only counts."""
        return self._thread.run(self._target.replay(rate_per_s=rate_per_s, dry_run=dry_run, **selection))

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
