"""What may go: decides which sealed segments a topic's policy no longer keeps.

Segments go from the front of their stream only, so that what is left has no hole. Age is judged per
segment; size and count are judged over the whole topic, oldest segment first. With
``retain_until_acked`` a segment stays as long as any subscription still needs a message of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparrow.model.message import StreamId
from sparrow.model.segment import SegmentInfo
from sparrow.model.topic import TopicPolicy


def expired_segments(
    segments: Sequence[SegmentInfo],
    policy: TopicPolicy,
    now_us: int,
    needed_from: Mapping[StreamId, int],
) -> list[SegmentInfo]:
    """The segments to drop. ``needed_from`` names, per stream, the lowest offset that some
    subscription has not acked; a stream without an entry is needed by nobody."""
    ordered = _oldest_first(segments)
    surplus = _Surplus(ordered, policy)
    blocked: set[StreamId] = set()
    gone: list[SegmentInfo] = []
    for segment in ordered:
        if segment.stream in blocked:
            continue
        wanted_gone = _is_too_old(segment, policy, now_us) or surplus.is_over
        if not wanted_gone or _is_needed(segment, policy, needed_from):
            blocked.add(segment.stream)
            continue
        gone.append(segment)
        surplus.drop(segment)
    return gone


def _oldest_first(segments: Sequence[SegmentInfo]) -> list[SegmentInfo]:
    """By time over all streams, and by offset within each, also where a clock went back between two."""
    newest_us: dict[StreamId, int] = {}
    keyed = []
    for segment in sorted(segments, key=lambda s: (s.stream, s.first_offset)):
        time_us = max(segment.last_time_us, newest_us.get(segment.stream, segment.last_time_us))
        newest_us[segment.stream] = time_us
        keyed.append((time_us, segment.stream, segment.first_offset, segment))
    return [segment for *_, segment in sorted(keyed)]


def _is_too_old(segment: SegmentInfo, policy: TopicPolicy, now_us: int) -> bool:
    if policy.retention_s is None:
        return False
    return segment.last_time_us + int(policy.retention_s * 1_000_000) <= now_us


def _is_needed(segment: SegmentInfo, policy: TopicPolicy, needed_from: Mapping[StreamId, int]) -> bool:
    if not policy.retain_until_acked:
        return False
    return needed_from.get(segment.stream, segment.end_offset) < segment.end_offset


class _Surplus:
    """How far the topic is above its size and count."""

    def __init__(self, segments: Sequence[SegmentInfo], policy: TopicPolicy) -> None:
        self._policy = policy
        self._bytes = sum(segment.size_bytes for segment in segments)
        self._rows = sum(segment.rows for segment in segments)

    @property
    def is_over(self) -> bool:
        bytes_max, rows_max = self._policy.retention_bytes, self._policy.retention_messages
        over_bytes = bytes_max is not None and self._bytes > bytes_max
        return over_bytes or (rows_max is not None and self._rows > rows_max)

    def drop(self, segment: SegmentInfo) -> None:
        self._bytes -= segment.size_bytes
        self._rows -= segment.rows
