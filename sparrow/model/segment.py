"""A segment: a sealed piece of one stream, as everything above the store sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparrow.model.message import StreamId


class SegmentInfo(NamedTuple):
    """Offsets, size and times of a sealed piece of a stream."""

    stream: StreamId
    first_offset: int
    end_offset: int
    rows: int
    size_bytes: int
    first_time_us: int
    last_time_us: int


class SegmentFile(NamedTuple):
    """A sealed piece of a stream as a file that other programs may read: Parquet, written once."""

    file: str
    """Relative to the data directory."""
    first_offset: int
    end_offset: int
    rows: int
    size_bytes: int
    first_time_us: int
    last_time_us: int


class PartitionSegments(NamedTuple):
    """What is kept of a partition: sealed below ``sealed_end_offset``, in the journal from there on."""

    partition: int
    start_offset: int
    sealed_end_offset: int
    end_offset: int
    segments: list[SegmentFile]


class TopicSegments(NamedTuple):
    """The segments in force of a topic, all seen at one moment."""

    topic: str
    topic_id: int
    directory: str
    """The data directory, as the broker's machine knows it."""
    partitions: list[PartitionSegments]


class Extent(NamedTuple):
    """From where to where each partition of a topic can be read."""

    topic: str
    topic_id: int
    bounds: Sequence[tuple[int, int]]


class Stretch(NamedTuple):
    """A part of a partition."""

    partition: int
    start_offset: int
    end_offset: int


class BatchPlace(NamedTuple):
    """Where in the journal a batch lies that is not sealed yet."""

    base_offset: int
    file_number: int
    position: int
    body_bytes: int


class Measured(NamedTuple):
    """How far a stretch reaches that stays within so many bytes, and how many it has as it is stored."""

    end_offset: int
    size_bytes: int
