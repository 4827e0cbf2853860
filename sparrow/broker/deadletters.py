"""Dead letters: moved, listed, replayed, given up.

The dead-letter topic is an ordinary topic that may serve many subscriptions. Which of its messages are
still open for one of them is the business of a second, hidden subscription ``<name>~dlq`` on that topic: what
it has not acked is open, its lag is the count, and replaying or purging a letter acks it. So the state of
dead letters is a cursor like any other, and every move is one atomic entry of the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pyarrow as pa
from pyroaring import BitMap64

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.pages import REPLAY_FOR, REPLAY_FROM, REPLAY_ROUND, Page, Pages
from sparrow.broker.settling import Settling
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel import deadletter, facts
from sparrow.kernel.deadletter import PREFIX, Statistics
from sparrow.kernel.exchange import DeadLetterDue
from sparrow.kernel.facts import Fact
from sparrow.kernel.filter import Filter, parse_filter
from sparrow.kernel.partition import partition_of
from sparrow.kernel.pattern import parse_pattern
from sparrow.kernel.replay import ReplayJob, ReplaySelection, parse_selection
from sparrow.model.deadletter import DeadLetter
from sparrow.model.errors import (
    DataDamaged,
    InvalidArgument,
    MessageNotFound,
    OffsetOutOfRange,
    PreconditionFailed,
    SparrowError,
    TopicNotFound,
)
from sparrow.model.message import Message, MessageId, StreamId
from sparrow.model.names import is_internal
from sparrow.model.subscription import SubscriptionPolicy
from sparrow.model.topic import Topic
from sparrow.store import batch as batches
from sparrow.store.admission import check_row, rows_to_batch
from sparrow.store.handover import messages
from sparrow.store.ports import BatchDraft, LogBatch, Store

HIDDEN = "~dlq"
_RETRY_S = 5.0
_MOVES_AT_ONCE = 100


def is_unseen(name: str) -> bool:
    """Whether a name of a topic or subscription is of the broker's own business, and shown to nobody."""
    return name.endswith(HIDDEN) or is_internal(name)


class DeadLetters:
    """The shell around kernel/deadletter."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        subscriptions: Subscriptions,
        pages: Pages,
        settling: Settling,
        clock: Clock,
    ) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._pages = pages
        self._settling = settling
        self._clock = clock
        self._log = logs.get("dead-letters")
        self._moving: dict[int, asyncio.Task[None]] = {}

    # Coming and going of subscriptions.

    async def prepare(self, name: str, policy: SubscriptionPolicy, pattern: str) -> None:
        """Before a subscription exists or changes: its letters have a place from the first moment on."""
        wanted, hidden = policy.dead_letter_topic, self._subscriptions.peek(name + HIDDEN)
        if wanted is None:
            return
        reads = parse_pattern(pattern)
        if reads.matches(wanted) and (reads.is_literal or not is_internal(wanted)):
            raise InvalidArgument(
                f"the dead-letter topic {wanted!r} matches the subscription's own pattern {pattern!r}",
                hint="Use a topic that the subscription does not read, or letters would come back for ever.",
            )
        if hidden is not None and hidden.subscription.pattern != wanted:
            await self._retire_if_empty(hidden)
            hidden = None
        if hidden is None:
            options = {"filter": f'attributes.{PREFIX}subscription = "{name}"'}
            await self._subscriptions.create(name + HIDDEN, wanted, "latest", options)

    async def _retire_if_empty(self, hidden: Courier) -> None:
        name = hidden.subscription.name.removesuffix(HIDDEN)
        async for _ in self.selected(self._subscriptions.get(name), ReplaySelection(), with_loops=True):
            raise PreconditionFailed(
                f"{name!r} has dead letters in {hidden.subscription.pattern!r}",
                hint="Replay or purge them before changing dead_letter_topic.",
            )
        await self._subscriptions.delete(hidden.subscription.name)

    async def retire(self, name: str) -> None:
        """A subscription is gone, and nobody will ask for its letters."""
        if self._subscriptions.peek(name + HIDDEN) is not None:
            await self._subscriptions.delete(name + HIDDEN)

    # Moving.

    def move(self, courier: Courier) -> None:
        """Starts to move what is due, unless that is under way."""
        if courier.is_moving or courier.subscription.policy.dead_letter_topic is None:
            return
        dues = courier.delivery.dead_letters_due(self._clock.now_us(), _MOVES_AT_ONCE)
        if dues:
            courier.is_moving = True
            task = asyncio.get_running_loop().create_task(self._move(courier, dues))
            self._moving[courier.subscription.id] = task
            task.add_done_callback(lambda _: self._moving.pop(courier.subscription.id, None))

    async def finish(self, courier: Courier) -> None:
        """Returns when what is being moved has been moved, or deferred."""
        task = self._moving.get(courier.subscription.id)
        if task is not None:
            await asyncio.wait([task])

    async def _move(self, courier: Courier, dues: list[DeadLetterDue]) -> None:
        try:
            while dues:
                await self._move_some(courier, dues)
                dues = courier.delivery.dead_letters_due(self._clock.now_us(), _MOVES_AT_ONCE)
        except SparrowError as error:
            self._log.warning("dead-letter-deferred", str(error), subscription=courier.subscription.name)
            retry_at_us = self._clock.now_us() + int(_RETRY_S * 1_000_000)
            courier.delivery.defer_dead_letters(dues, retry_at_us)
            courier.set_timer()
        finally:
            courier.is_moving = False
            if courier.successor is not None:
                courier.successor.is_moving = False
                self.move(courier.successor)

    async def _move_some(self, courier: Courier, dues: list[DeadLetterDue]) -> None:
        """The copies and the facts go into the log as one chain."""
        subscription, now_us = courier.subscription, self._clock.now_us()
        topic = await self._topics.resolve(subscription.policy.dead_letter_topic)
        rows: dict[int, list[Any]] = {}
        decided: list[Fact] = []
        for due in dues:
            original = await self.read_one(due.stream, due.offset)
            if original is None:
                # Retention took the message before it could be kept; nothing is left to copy.
                self._log.warning("dead-letter-gone", "", subscription=subscription.name, offset=due.offset)
                decided.append(facts.acked(subscription.id, due.stream, BitMap64([due.offset])))
                continue
            partition = partition_of(original.key, topic.partitions) if original.key else 0
            rows.setdefault(partition, []).append(self._copy(courier, due, original, now_us))
            place = MessageId(topic.id, partition, 0)
            decided.append(deadletter.dead_lettered(subscription.id, due, now_us, place))
        drafts = [self.draft(StreamId(topic.id, p), topic, some) for p, some in rows.items()]
        await self._settling.append_with(drafts, decided, courier.apply)
        courier.counts.dead_lettered += sum(len(some) for some in rows.values())
        for draft in drafts:
            for reader in self._subscriptions.readers(draft.stream):
                reader.wake()
        self._log.info("dead-lettered", "", subscription=subscription.name, messages=len(dues))

    def _copy(self, courier: Courier, due: DeadLetterDue, original: Message, now_us: int) -> Any:
        own = original.attributes
        if is_again := original.id != str(MessageId(*due.stream, due.offset)):
            # It was stored again by a replay: it keeps its first id, and the replay counts.
            rounds = due.failure.round + int(own.pop(REPLAY_ROUND, "0"))
            due = due._replace(failure=msgspec.structs.replace(due.failure, round=rounds))
            own.pop(REPLAY_FOR, None)
            own.pop(REPLAY_FROM, None)
        attributes = deadletter.attributes(
            due,
            own,
            source_topic=original.topic,
            subscription=courier.subscription.name,
            publish_time_us=original.publish_time_us,
            now_us=now_us,
        )
        if is_again:
            attributes[PREFIX + "message_id"] = original.id
        return check_row(original.data, original.key, attributes, original_id=original.id)

    def draft(self, stream: StreamId, topic: Topic, rows: list[Any]) -> BatchDraft:
        body = batches.encode(rows_to_batch(rows), topic.policy.codec)
        return BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns, body.codec)

    async def read_one(self, stream: StreamId, offset: int) -> Message | None:
        try:
            if offset < self._store.bounds(stream).start_offset:
                return None  # Retention took it; a page may still be cached.
            page = await self._pages.at(stream, offset)
        except (OffsetOutOfRange, TopicNotFound, DataDamaged):
            return None
        if page is None or not page.first_offset <= offset:
            return None
        rows = page.rows([offset])
        topic = self._topics.find(stream.topic_id)
        if not rows.num_rows or topic is None:
            return None
        return messages(LogBatch(stream, offset, offset + 1, rows), topic.name)[0]

    # Looking.

    async def find(self, courier: Courier, limit: int, selection: dict[str, Any]) -> list[DeadLetter]:
        """Open dead letters, oldest first."""
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InvalidArgument(f"limit must be a whole number from 1, not {limit!r}")
        found = []
        async for _, _, letter in self.selected(courier, parse_selection(selection), with_loops=True):
            found.append(letter)
            if len(found) >= limit:
                break
        return found

    async def get(self, courier: Courier, message_id: str) -> DeadLetter:
        found = await self.find(courier, 1, {"ids": [message_id]})
        if not found:
            raise MessageNotFound(f"{message_id!r} is not a dead letter of {courier.subscription.name!r}")
        return found[0]

    async def statistics(self, courier: Courier) -> Statistics:
        counts = Statistics()
        async for _, _, letter in self.selected(courier, ReplaySelection(), with_loops=True):
            counts.add(letter.message.attributes, len(letter.message.data or b""))
        return counts

    # Giving up.

    async def purge(self, courier: Courier, selection: dict[str, Any], dry_run: bool) -> int:
        """Acks the letters in the hidden subscription; their copies go with the topic's retention. None is
        purged when a replay that is under way still has to come to one of them."""
        hidden = self.hidden(courier)
        doomed: dict[StreamId, BitMap64] = {}
        chosen = parse_selection(selection)
        jobs = list(courier.delivery.replays.jobs.values())
        async for stream, offset, letter in self.selected(courier, chosen, with_loops=True):
            doomed.setdefault(stream, BitMap64()).add(offset)
            _refuse_awaited(jobs, stream, offset, letter)
        if not dry_run:
            decided = [facts.acked(hidden.subscription.id, s, offsets) for s, offsets in doomed.items()]
            await hidden.journal(decided)
            self._log.info("dead-letters-purged", "", subscription=courier.subscription.name)
        return sum(len(offsets) for offsets in doomed.values())

    # The open letters.

    def hidden(self, courier: Courier) -> Courier:
        found = self._subscriptions.peek(courier.subscription.name + HIDDEN)
        if found is None:
            raise PreconditionFailed(
                f"the subscription {courier.subscription.name!r} has no dead-letter topic",
                hint="Set dead_letter_topic with update.",
            )
        return found

    async def selected(
        self,
        courier: Courier,
        selection: ReplaySelection,
        stream: StreamId | None = None,
        start: int | None = None,
        end: int | None = None,
        *,
        limit: int | None = None,
        with_loops: bool = False,
    ) -> AsyncIterator[tuple[StreamId, int, DeadLetter]]:
        hidden = self.hidden(courier)
        chosen = parse_filter(selection.filter)
        count = 0
        for one in sorted(hidden.delivery.streams) if stream is None else [stream]:
            async for offset, letter in self._open(
                hidden, courier.subscription.name, one, start, end, chosen
            ):
                attributes = letter.message.attributes
                if with_loops:
                    attributes.pop(PREFIX + "loop", None)
                if selection.takes(attributes, letter.dead_at_us):
                    yield one, offset, letter
                    count += 1
                    if limit is not None and count >= limit:
                        return

    async def _open(
        self,
        hidden: Courier,
        name: str,
        stream: StreamId,
        start: int | None,
        end: int | None,
        chosen: Filter | None,
    ) -> AsyncIterator[tuple[int, DeadLetter]]:
        """Letters of one stream that are neither replayed nor purged."""
        bounds = self._store.bounds(stream)
        cursor = hidden.delivery.cursor(stream)
        offset = max(bounds.start_offset, cursor.floor, start or 0)
        end = bounds.end_offset if end is None else end
        topic = self._topics.find(stream.topic_id)
        while offset < end and topic is not None:
            page = await self._pages.at(stream, offset)
            if page is None:
                return
            rows = _filtered(page, chosen)
            read = LogBatch(stream, page.first_offset, page.end_offset, rows)
            for message in messages(read, topic.name):
                is_open = not cursor.is_acked(message.offset)
                mine = message.attributes.get(PREFIX + "subscription") == name
                if offset <= message.offset < end and is_open and mine:
                    yield message.offset, _letter(message)
            offset = page.end_offset

    async def stop(self) -> None:
        """What is being moved is left to the next start: the chain is stored whole or not at all."""
        tasks = list(self._moving.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


def _filtered(page: Page, chosen: Filter | None) -> pa.RecordBatch:
    return page.batch if chosen is None else page.batch.filter(chosen.mask(page.batch))


def _letter(message: Message) -> DeadLetter:
    attributes = message.attributes
    return DeadLetter(
        message,
        attributes.get(PREFIX + "message_id", message.id),
        attributes.get(PREFIX + "topic", ""),
        attributes.get(PREFIX + "reason", ""),
        int(attributes.get(PREFIX + "attempts", "0")),
        attributes.get(PREFIX + "last_error", ""),
        int(attributes.get(PREFIX + "at_us", "0")),
        deadletter.is_loop(attributes),
    )


def _refuse_awaited(jobs: list[ReplayJob], stream: StreamId, offset: int, letter: DeadLetter) -> None:
    for job in jobs:
        attributes = letter.message.attributes
        if job.is_ahead(stream, offset) and job.selection.takes(attributes, letter.dead_at_us):
            raise PreconditionFailed(
                f"the replay {job.replay_id!r} is under way and still has to come to some of these letters",
                hint="Wait for it or abort it, then purge.",
                replay_id=job.replay_id,
            )
