"""The broker's verbs for reading the log; the rules are in reading.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pyarrow as pa

from sparrow.broker.reading import READ_BYTES, Reading
from sparrow.model.message import Message
from sparrow.model.segment import BatchPlace, Extent, Measured, TopicSegments
from sparrow.store.ports import Bounds


class ReadVerbs:
    """A part of the broker."""

    _reading: Reading

    def _check_open(self) -> None:
        raise NotImplementedError

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        """The first offset kept and the one after the last."""
        self._check_open()
        return self._reading.bounds(topic, partition)

    async def read(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_messages: int = 1000
    ) -> list[Message]:
        """Messages of a partition from an offset on; empty at the end of the log."""
        self._check_open()
        return await self._reading.messages(topic, partition, offset, max_messages)

    async def read_batches(
        self, topic: str, *, partition: int = 0, offset: int = 0, max_bytes: int = READ_BYTES
    ) -> list[pa.RecordBatch]:
        """The same as Arrow record batches, about ``max_bytes`` of them; the columns are the lake's."""
        self._check_open()
        return await self._reading.batches(topic, partition, offset, max_bytes)

    async def wait_for(self, topic: str, offset: int, *, partition: int = 0, timeout_s: float = 1.0) -> None:
        """Returns when a partition reaches beyond ``offset``, or after ``timeout_s``."""
        self._check_open()
        await self._reading.wait(topic, partition, offset, timeout_s)

    async def offset_at(self, topic: str, moment: datetime | float, *, partition: int = 0) -> int:
        """The first offset published at or after a moment."""
        self._check_open()
        return await self._reading.offset_at(topic, partition, moment)

    async def extents(self, patterns: Sequence[str]) -> list[Extent]:
        """The topics that match any of the patterns, and from where to where each partition can be read."""
        self._check_open()
        return self._reading.extents(patterns)

    async def segments(self, topic: str, *, hold_s: float = 0.0) -> TopicSegments:
        """The sealed segments of a topic: Parquet files, their offsets and times, all seen at one moment.
        For ``hold_s`` the files stay where they are even when retention drops their segments."""
        self._check_open()
        return self._reading.segments(topic, hold_s)

    async def measure(
        self, topic: str, stretches: Sequence[Sequence[int]], *, max_bytes: int = 2**62
    ) -> list[Measured]:
        """For each (partition, start_offset, end_offset): up to which offset ``max_bytes`` reach, and how
        many bytes that are as they are stored."""
        self._check_open()
        return self._reading.measure(topic, stretches, max_bytes)

    async def places(self, topic: str, stretches: Sequence[Sequence[int]]) -> list[list[BatchPlace]]:
        """For each (partition, start_offset, end_offset): where in the journal the batches lie that are not
        sealed; nothing where they are too many to tell."""
        self._check_open()
        return self._reading.places(topic, stretches)
