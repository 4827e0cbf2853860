"""Reading the log as it is, without a subscription: messages or record batches from an offset on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from sparrow.broker.topics import Topics
from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import InvalidArgument
from sparrow.model.message import Message, StreamId, to_us
from sparrow.model.segment import BatchPlace, Extent, Measured, Stretch, TopicSegments
from sparrow.store import handover
from sparrow.store.ports import Bounds, Store

READ_BYTES = 4 * 1024 * 1024
HOLD_S_MAX = 24 * 3600.0
STRETCHES_MAX = 10_000
"""Stretches of one call."""


class Reading:
    """See the module's text."""

    def __init__(self, store: Store, topics: Topics) -> None:
        self._store = store
        self._topics = topics
        self._waiting: dict[StreamId, asyncio.Future[None]] = {}
        """Resolved when something arrives in a stream that somebody waits for."""

    def arrived(self, stream: StreamId) -> None:
        """New messages of a stream can be read."""
        waiting = self._waiting.pop(stream, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def wait(self, topic: str, partition: int, offset: int, timeout_s: float) -> None:
        """Returns when the log reaches beyond an offset, or after a time."""
        _, stream = self._topics.stream(topic, partition)
        try:
            async with asyncio.timeout(timeout_s):
                while self._store.bounds(stream).end_offset <= offset:
                    found = self._waiting.get(stream)
                    if found is None or found.done():
                        found = self._waiting[stream] = asyncio.get_running_loop().create_future()
                    await asyncio.shield(found)
        except TimeoutError:
            return

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self._store.bounds(self._topics.stream(topic, partition)[1])

    def extents(self, patterns: Sequence[str]) -> list[Extent]:
        """The topics that match any of the patterns, by name, and what can be read of each partition."""
        if isinstance(patterns, str) or not isinstance(patterns, Sequence):
            raise InvalidArgument("patterns is a list of patterns or topic names")
        wanted = [parse_pattern(pattern) for pattern in patterns]
        found = []
        for topic in self._topics:
            if any(pattern.matches(topic.name) for pattern in wanted):
                streams = [StreamId(topic.id, partition) for partition in range(topic.partitions)]
                bounds = [self._store.bounds(stream) for stream in streams]
                found.append(Extent(topic.name, topic.id, bounds))
        return found

    def segments(self, topic: str, hold_s: float) -> TopicSegments:
        """The segments in force of a topic."""
        is_number = isinstance(hold_s, int | float) and not isinstance(hold_s, bool)
        if not is_number or not 0 <= hold_s <= HOLD_S_MAX:
            raise InvalidArgument(f"hold_s is from 0 to {HOLD_S_MAX:g}, not {hold_s!r}")
        return self._store.layout(self._topics.get(topic), hold_s)

    def measure(self, topic: str, stretches: Sequence[Sequence[int]], max_bytes: int) -> list[Measured]:
        """How far ``max_bytes`` reach in each stretch."""
        _check_count("max_bytes", max_bytes, 1)
        found = self._stretches(topic, stretches)
        return [self._store.measure(stream, start, end, max_bytes) for stream, start, end in found]

    def places(self, topic: str, stretches: Sequence[Sequence[int]]) -> list[list[BatchPlace]]:
        """Where in the journal the unsealed batches of each stretch lie."""
        return [self._store.places(*each) for each in self._stretches(topic, stretches)]

    def _stretches(self, topic: str, given: Sequence[Sequence[int]]) -> list[tuple[StreamId, int, int]]:
        if not isinstance(given, list | tuple) or len(given) > STRETCHES_MAX:
            raise InvalidArgument(f"stretches is a list of at most {STRETCHES_MAX:,} stretches")
        found = []
        for each in given:
            is_one = isinstance(each, list | tuple) and len(each) == len(Stretch._fields)
            if not is_one or not all(type(value) is int for value in each):
                raise InvalidArgument(f"a stretch is (partition, start_offset, end_offset), not {each!r}")
            _, stream = self._topics.stream(topic, each[0])
            found.append((stream, each[1], each[2]))
        return found

    async def messages(self, topic: str, partition: int, offset: int, max_messages: int) -> list[Message]:
        """Up to ``max_messages`` from ``offset`` on."""
        found, stream = self._topics.stream(topic, partition)
        _check_count("max_messages", max_messages, 1)
        _check_offset(offset)
        messages: list[Message] = []
        while len(messages) < max_messages:
            read = await self._store.read(stream, offset, READ_BYTES)
            if not read:
                break
            for batch in read:
                rest = max_messages - len(messages)
                messages.extend(handover.messages(batch, found.name, rest))
                offset = batch.end_offset
                if rest <= batch.batch.num_rows:
                    break
        return messages

    async def batches(self, topic: str, partition: int, offset: int, max_bytes: int) -> list[pa.RecordBatch]:
        """About ``max_bytes`` from ``offset`` on."""
        _, stream = self._topics.stream(topic, partition)
        _check_count("max_bytes", max_bytes, 1)
        _check_offset(offset)
        return [found.batch for found in await self._store.read(stream, offset, max_bytes)]

    async def offset_at(self, topic: str, partition: int, moment: datetime | float) -> int:
        """The first offset published at or after a moment."""
        _, stream = self._topics.stream(topic, partition)
        return await self._store.offset_at(stream, to_us(moment))


def _check_offset(value: Any) -> None:
    if type(value) is not int:
        raise InvalidArgument(f"offset must be a whole number, not {value!r}")


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise InvalidArgument(f"{name} must be a whole number from {least}, not {value!r}")
