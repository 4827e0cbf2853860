"""Whether the lake or the journal serves a message, when the catalog that knew is lost.

The rule that keeps every readable message served exactly once:

1. A segment counts when every page matches its checksum and its values match what it states. Of a
   damaged one the row groups that do count are copied into segments of their own, as long as its footer
   can be read; the other offsets are a gap, unless the journal still holds them.
2. Let ``through`` be the new catalog's *sealed through*. Files up to it are treated as sealed, files
   beyond it as unsealed. It starts at the number before the first journal file that is there, so that
   at first every file that is there counts as unsealed; files that are missing there were sealed.
3. A segment whose offsets all lie in unsealed files is dropped in favour of the journal: sealing was
   interrupted before or after its commit, and both hold the same messages. Facts in those files are
   then read again too, which changes nothing when they are known already.
4. A segment that holds anything that no unsealed file holds must stay. Then no unsealed file may hold
   an offset below its end: ``through`` is raised to the last file that does, and 3 and 4 are judged
   again until nothing moves. This is what a crash between the removal of two sealed files leaves.
5. Batches in files up to ``through`` that no staying segment holds are sealed anew, into segments of
   their own. So a file treated as sealed may go, and a batch whose segment is damaged is not lost.
6. Of segments that overlap, the one that the old catalog lists stays, else the one that was rewritten
   last (it has been checked against its sources before it got its name), else the one that starts first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sparrow.model.message import StreamId
from sparrow.store.catalog_tables import Segment
from sparrow.store.offline.evidence import Batch, SoundSegment
from sparrow.store.segmentname import parse_name


class Reseal(NamedTuple):
    """Batches that go into one new segment; of the first one only what lies from ``start_offset`` on."""

    stream: StreamId
    topic: str
    start_offset: int
    end_offset: int
    batches: list[Batch]


def without_doubles(
    offered: Sequence[SoundSegment], listed: Collection[Segment]
) -> tuple[list[SoundSegment], list[SoundSegment]]:
    """Segments of one stream that do not overlap, by offset; and those that had to yield."""
    kept: list[SoundSegment] = []
    doubled: list[SoundSegment] = []
    for found in sorted(offered, key=lambda found: _rank(found, listed)):
        overlaps = any(_overlap(found.segment, other.segment) for other in kept)
        (doubled if overlaps else kept).append(found)
    return sorted(kept, key=lambda found: found.segment.first_offset), doubled


def _rank(found: SoundSegment, listed: Collection[Segment]) -> tuple[bool, bool, int, int, int]:
    segment = found.segment
    is_part = found.groups is not None
    name = parse_name(segment.file_name)
    rounds = 0 if name is None else name.round
    return segment not in listed, is_part, -rounds, segment.first_offset, -segment.end_offset


def _overlap(one: Segment, other: Segment) -> bool:
    return one.first_offset < other.end_offset and other.first_offset < one.end_offset


def sealed_through(
    sound: Mapping[StreamId, Sequence[SoundSegment]],
    batches: Mapping[StreamId, Sequence[Batch]],
    numbers: Sequence[int],
    newest: int,
) -> int:
    """The last file that is treated as sealed, of those with these numbers; see 2 and 4 above."""
    through = 0
    while True:
        through = min((number for number in numbers if number > through), default=newest + 1) - 1
        last = [
            _last_file_below(segments, batches.get(stream, ()), through) for stream, segments in sound.items()
        ]
        raised = max([through, *last])
        if raised == through:
            return through
        through = raised


def _last_file_below(segments: Sequence[SoundSegment], batches: Sequence[Batch], through: int) -> int:
    """The last unsealed file that holds an offset below the end of a segment that must stay."""
    unsealed = [batch for batch in batches if batch.file_number > through]
    ends = [found.segment.end_offset for found in segments if not is_within(found.segment, unsealed)]
    end = max(ends, default=0)
    return max([batch.file_number for batch in unsealed if batch.start_offset < end], default=through)


def is_within(segment: Segment, batches: Sequence[Batch]) -> bool:
    """Whether the batches, which are in offset order, hold every offset of the segment."""
    at = segment.first_offset
    place = max(0, bisect_right(batches, at, key=lambda batch: batch.start_offset) - 1)
    while place < len(batches) and batches[place].start_offset <= at < segment.end_offset:
        at = max(at, batches[place].end_offset)
        place += 1
    return at >= segment.end_offset


def reseals(
    stream: StreamId, topic: str, batches: Sequence[Batch], spans: Sequence[tuple[int, int]]
) -> list[Reseal]:
    """What the batches hold beside the spans, as runs that no span interrupts."""
    runs: list[Reseal] = []
    ordered = sorted(spans)
    for batch in batches:
        for start, end in _outside(batch.start_offset, batch.end_offset, ordered):
            last = runs[-1] if runs else None
            if last and not any(last.end_offset <= first < start for first, _ in ordered):
                runs[-1] = last._replace(end_offset=end, batches=[*last.batches, batch])
            else:
                runs.append(Reseal(stream, topic, start, end, [batch]))
    return runs


def _outside(start: int, end: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    pieces = []
    for first, stop in spans:
        if first >= end:
            break
        if first > start:
            pieces.append((start, first))
        start = max(start, stop)
    if start < end:
        pieces.append((start, end))
    return pieces
