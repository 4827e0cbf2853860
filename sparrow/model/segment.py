"""A segment: a sealed piece of one stream, as everything above the store sees it."""

from __future__ import annotations

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
