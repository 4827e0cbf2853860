"""Swapping: drafts that a job wrote take the place of segments, after every row of them has been checked.

A draft is a segment file with the ending ``.tmp`` beside the segments. It is right when its bytes match their
sums, when drafts cover exactly the offsets of the segments that go, when each of their rows is, column by
column, a row of those segments, and when no row is missing from the offset on that the caller names: the
start for a merge, which may leave nothing out.

The order of steps: the drafts are checked and synced; they get their names, which is synced; one catalog
transaction takes the old segments out and enters the new ones; a note makes the journal witness that catalog
version; readers move over; the old files go when nobody holds them. A crash between any two steps leaves the
old segments in force or the new ones, and files of the other side, which the next start removes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model.errors import DataDamaged, DraftRefused, InvalidArgument, SegmentsChanged
from sparrow.model.message import StreamId
from sparrow.store.catalog_tables import Segment
from sparrow.store.disk import Disk
from sparrow.store.lake import SegmentReader, describe
from sparrow.store.offline.soundness import UNREADABLE, flaws, stated_names
from sparrow.store.segmentname import SegmentName, parse_name

_DRAFT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,120}\.parquet\.tmp")


class Draft(NamedTuple):
    """A checked draft and the segment that it becomes."""

    path: Path
    segment: Segment


def check_draft_names(names: Sequence[str]) -> None:
    """Names come from outside: they are files of the partition's directory and nothing else."""
    if not names or isinstance(names, str) or len(set(names)) != len(names):
        raise InvalidArgument("drafts are the names of one or more files, each once")
    for name in names:
        if not isinstance(name, str) or not _DRAFT.fullmatch(name):
            raise InvalidArgument(f"{name!r} is not the name of a draft: letters, digits, .parquet.tmp")


def chosen(segments: Sequence[Segment], wanted: Sequence[str]) -> list[Segment]:
    """The segments with these file names, which must be neighbours, in order."""
    names = set(wanted)
    found = [segment for segment in segments if segment.file_name in names]
    if not names or isinstance(wanted, str) or len(found) != len(names):
        gone = sorted(names - {segment.file_name for segment in found})
        raise SegmentsChanged(f"not in force: {', '.join(gone) or 'nothing was named'}")
    for one, other in pairwise(found):
        if one.end_offset != other.first_offset:
            raise InvalidArgument(f"{one.file_name} and {other.file_name} are not neighbours")
    return found


def check_drafts(
    disk: Disk,
    directory: Path,
    topic: str,
    stream: StreamId,
    old: Sequence[Segment],
    names: Sequence[str],
    *,
    is_compacted: bool,
    kept_from: int,
) -> list[Draft]:
    """Drafts that may take the place of the old segments; refuses those that may not."""
    rounds = [name.round for name in (parse_name(segment.file_name) for segment in old) if name]
    drafts = []
    for name in names:
        path = directory / name
        try:
            disk.sync_file(path)
            segment = describe(path, stream)
        except (DataDamaged, *UNREADABLE) as error:
            raise DraftRefused(f"the draft {name} cannot be read: {error}") from error
        own = SegmentName(segment.first_offset, max(rounds, default=0) + 1, is_compacted)
        segment = msgspec.structs.replace(segment, file_name=str(own))
        _check_bytes(path, topic, stream, segment)
        drafts.append(Draft(path, segment))
    drafts.sort(key=lambda draft: draft.segment.first_offset)
    _check_span(old, [draft.segment for draft in drafts])
    _Comparison(directory, old, drafts).check(kept_from)
    return drafts


def _check_bytes(path: Path, topic: str, stream: StreamId, segment: Segment) -> None:
    stated = stated_names(path)
    wanted = {
        "sparrow.topic": topic,
        "sparrow.topic_id": str(stream.topic_id),
        "sparrow.partition": str(stream.partition),
    }
    if any(stated.get(name) != value for name, value in wanted.items()):
        raise DraftRefused(f"the draft {path.name} says that it belongs to another topic or partition")
    broken = [flaw for flaw in flaws(path, segment, lambda count: None) if not flaw.is_hole]
    if broken:
        raise DraftRefused(f"the draft {path.name} is not sound: {broken[0].what}")


def _check_span(old: Sequence[Segment], new: Sequence[Segment]) -> None:
    ends = [segment.end_offset for segment in new[:-1]]
    is_whole = all(end == after.first_offset for end, after in zip(ends, new[1:], strict=True))
    span = (new[0].first_offset, new[-1].end_offset)
    wanted = (old[0].first_offset, old[-1].end_offset)
    if not is_whole or span != wanted:
        raise DraftRefused(f"the drafts cover {span[0]} to {span[1]}, not {wanted[0]} to {wanted[1]}")


class _OldGroup(NamedTuple):
    """A row group of a segment that is to go."""

    reader: SegmentReader
    place: int
    first_offset: int
    end_offset: int
    rows: int


class _Comparison:
    """Rows of drafts held against rows of segments. A group of which no row was kept is not decoded."""

    def __init__(self, directory: Path, old: Sequence[Segment], drafts: Sequence[Draft]) -> None:
        self._readers = [SegmentReader(directory / segment.file_name, segment) for segment in old]
        self._drafts = drafts
        self._old = [
            group
            for reader, segment in zip(self._readers, old, strict=True)
            for group in _old_groups(reader, segment)
        ]
        self._last: tuple[_OldGroup, pa.RecordBatch] | None = None

    def check(self, kept_from: int) -> None:
        try:
            kept = 0
            for batch in self._new():
                self._check_batch(batch)
                kept += _count_from(batch.column("offset"), kept_from)
            wanted = sum(self._rows_from(group, kept_from) for group in self._old)
            if kept != wanted:
                raise DraftRefused(
                    f"the drafts hold {kept} messages from offset {kept_from} on, where {wanted} must stay"
                )
        finally:
            for reader in self._readers:
                reader.close()

    def _new(self) -> Iterator[pa.RecordBatch]:
        for path, segment in self._drafts:
            with closing(SegmentReader(path, segment)) as reader:
                for index in range(len(segment.row_groups())):
                    yield reader.read_group(index)

    def _check_batch(self, batch: pa.RecordBatch) -> None:
        offsets = _numbers(batch.column("offset"))
        found = 0
        for group in self._old:
            if group.end_offset <= offsets[0]:
                continue
            if group.first_offset > offsets[-1]:
                break
            start = bisect_left(offsets, group.first_offset)
            stop = bisect_left(offsets, group.end_offset)
            if start == stop:
                continue
            rows = batch.slice(start, stop - start)
            before = self._read(group)
            same = before.filter(pc.is_in(before.column("offset"), value_set=rows.column("offset")))
            if not same.equals(rows):
                raise DraftRefused(
                    f"between the offsets {group.first_offset} and {group.end_offset} the drafts hold "
                    "messages that are not those of the segments"
                )
            found += stop - start
        if found != batch.num_rows:
            raise DraftRefused("the drafts hold offsets that the segments do not have")

    def _read(self, group: _OldGroup) -> pa.RecordBatch:
        if self._last is None or self._last[0] is not group:
            self._last = (group, group.reader.read_group(group.place))
        return self._last[1]

    def _rows_from(self, group: _OldGroup, kept_from: int) -> int:
        if kept_from <= group.first_offset:
            return group.rows
        if kept_from >= group.end_offset:
            return 0
        return _count_from(group.reader.read_group(group.place, ["offset"]).column("offset"), kept_from)


def _old_groups(reader: SegmentReader, segment: Segment) -> Iterator[_OldGroup]:
    groups = segment.row_groups()
    ends = [*(group.first_offset for group in groups[1:]), segment.end_offset]
    for index, (group, end) in enumerate(zip(groups, ends, strict=True)):
        yield _OldGroup(reader, index, group.first_offset, end, group.rows)


def _count_from(offsets: pa.Array, start: int) -> int:
    return len(offsets) - bisect_left(_numbers(offsets), start)


def _numbers(offsets: pa.Array) -> memoryview:
    """The values where they lie."""
    view = memoryview(offsets.buffers()[1]).cast("q")
    return view[offsets.offset : offsets.offset + len(offsets)]


def give_names(disk: Disk, drafts: Sequence[Draft]) -> None:
    """The drafts get the names of segments, durably; those of a draft that is not in force are taken."""
    for path, segment in drafts:
        disk.rename(path, path.with_name(segment.file_name))


def discard(disk: Disk, drafts: Sequence[Draft]) -> None:
    """The swap was not to be: files that already have their names go."""
    for path, segment in drafts:
        disk.remove(path.with_name(segment.file_name))
        disk.remove(path)
