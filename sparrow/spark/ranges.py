"""Ranges: which offsets of which partition a task reads, and how work is cut and gathered into tasks.

Big ranges are cut, so that one busy partition keeps all cores at work; small ones are gathered, because a
task of Spark costs more than a few hundred messages. Pure: sizes come in, tasks go out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sparrow.model.segment import BatchPlace, SegmentFile

SMALL_BYTES = 4 * 2**20
"""Ranges together smaller than this share a task."""


@dataclass(frozen=True)
class Range:
    """Messages of one partition, from ``start`` up to, not including, ``end``."""

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    size_bytes: int = 0
    file: str | None = None
    """The segment that holds them all, where it can perhaps be opened directly."""
    directory: str | None = None
    places: tuple[BatchPlace, ...] = ()
    """Where in the journal of that directory they lie, if they are not sealed."""

    def __len__(self) -> int:
        return self.end - self.start


def along_segments(whole: Range, directory: str, segments: Sequence[SegmentFile]) -> Iterator[Range]:
    """The range cut where segments begin and end; what no segment holds is left to the broker."""
    at, rows = whole.start, max(1, len(whole))
    for segment in segments:
        if segment.end_offset <= at:
            continue
        if segment.first_offset >= whole.end:
            break
        if segment.first_offset > at:
            yield _part(
                whole, at, segment.first_offset, whole.size_bytes * (segment.first_offset - at) // rows
            )
            at = segment.first_offset
        end = min(segment.end_offset, whole.end)
        size = segment.size_bytes * (end - at) // (segment.end_offset - segment.first_offset)
        yield replace(_part(whole, at, end, size), file=f"{directory}/{segment.file}")
        at = end
    if at < whole.end:
        yield _part(whole, at, whole.end, whole.size_bytes * (whole.end - at) // rows)


def _part(whole: Range, start: int, end: int, size_bytes: int) -> Range:
    return replace(whole, start=start, end=end, size_bytes=size_bytes, file=None)


def to_tasks(
    ranges: Sequence[Range], *, bytes_max: int, rows_max: int | None = None, tasks_min: int = 0
) -> list[list[Range]]:
    """Tasks of about ``bytes_max`` bytes and at most ``rows_max`` messages, at least ``tasks_min`` of them as
    long as there are messages enough. Order within a partition is kept from task to task."""
    total_bytes, total_rows = sum(r.size_bytes for r in ranges), sum(map(len, ranges))
    if tasks_min:
        bytes_max = max(1, min(bytes_max, -(-total_bytes // tasks_min)))
        rows_max = min(rows_max or total_rows, -(-total_rows // tasks_min)) or 1
    small_bytes = min(SMALL_BYTES, bytes_max)
    tasks: list[list[Range]] = []
    room_bytes = room_rows = 0
    for part in (part for whole in ranges for part in _cut(whole, bytes_max, rows_max)):
        fits = part.size_bytes <= room_bytes and (rows_max is None or len(part) <= room_rows)
        if not (tasks and fits) or tasks_min:
            tasks.append([])
            room_bytes, room_rows = small_bytes, rows_max or 0
        tasks[-1].append(part)
        room_bytes -= part.size_bytes
        room_rows -= len(part)
    return tasks


def _cut(whole: Range, bytes_max: int, rows_max: int | None) -> Iterator[Range]:
    count = -(-whole.size_bytes // bytes_max)
    if rows_max is not None:
        count = max(count, -(-len(whole) // rows_max))
    count = max(1, min(count, len(whole)))
    at = whole.start
    for number in range(1, count + 1):
        end = whole.start + len(whole) * number // count
        size = whole.size_bytes * (end - at) // max(1, len(whole))
        places = _between(whole.places, at, end) if count > 1 else whole.places
        yield replace(whole, start=at, end=end, size_bytes=size, places=places)
        at = end


def _between(places: Sequence[BatchPlace], start: int, end: int) -> tuple[BatchPlace, ...]:
    """The batches with something between two offsets."""
    bases = [place.base_offset for place in places]
    return tuple(places[max(0, bisect_right(bases, start) - 1) : bisect_left(bases, end)])


def shares(backlogs: Sequence[int], limit: int) -> list[int]:
    """``limit`` divided over backlogs in proportion, whole numbers, never more than there is."""
    total = sum(backlogs)
    if total <= limit:
        return list(backlogs)
    given = [limit * each // total for each in backlogs]
    rest = limit - sum(given)
    by_fraction = sorted(range(len(backlogs)), key=lambda i: limit * backlogs[i] % total, reverse=True)
    for place in by_fraction[:rest]:
        given[place] += 1
    return given
