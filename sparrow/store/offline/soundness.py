"""Whether a segment file is sound, down to every page.

Three things are held against one another: the row that the catalog has of the file (sums of its footer
and of every row group), Parquet's own page checksums, and the values themselves (offsets ascend from the
first to the end, times lie within the stated ones). Without a catalog the row is made from the file's
own footer; then the footer is the one part that no checksum covers, so its statements are compared with
the values, and any that matters to the broker and does not fit makes the file damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparrow.model.errors import DataDamaged
from sparrow.model.message import StreamId
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.catalog_tables import RowGroup, Segment
from sparrow.store.lake import SegmentReader, describe
from sparrow.store.segmentname import parse_name

OnBytes = Callable[[int], None]

UNREADABLE = (
    OSError,
    pa.ArrowException,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
    MemoryError,
)
"""What reading a damaged Parquet file can raise: its metadata may claim anything."""


class Flaw(NamedTuple):
    """Something wrong within one segment."""

    what: str
    start_offset: int
    end_offset: int
    position: int = 0
    is_hole: bool = False
    """The file is as it was written, and these offsets were missing then."""


def flaws(path: Path, segment: Segment, on_bytes: OnBytes, *, footer_only: bool = False) -> list[Flaw]:
    """Everything that is wrong with the file, given what the catalog says of it."""
    first, end = segment.first_offset, segment.end_offset
    try:
        SegmentReader(path, segment).close()  # Opening checks size and footer.
        found = [] if footer_only else list(_group_flaws(path, segment, on_bytes))
    except DataDamaged as error:
        return [Flaw(_without_name(error.message), first, end)]
    except UNREADABLE as error:
        return [Flaw(f"cannot be decoded: {error}", first, end)]
    return found


def examine(path: Path, stream: StreamId, topic: str, on_bytes: OnBytes) -> tuple[Segment, list[Flaw]]:
    """The segment that the file's own bytes describe, and its holes; refuses a damaged one."""
    try:
        segment = describe(path, stream)
        _check_names(path, stream, topic, segment)
    except UNREADABLE as error:
        raise DataDamaged(f"its footer cannot be read: {error}") from error
    found = flaws(path, segment, on_bytes)
    broken = [flaw for flaw in found if not flaw.is_hole]
    if broken:
        raise DataDamaged(broken[0].what)
    return segment, found


class Rescue(NamedTuple):
    """Row groups of a damaged file, one after the other, that are sound."""

    segment: Segment
    """As a segment of its own would be described, but for its sums."""
    first_group: int
    end_group: int


def rescues(path: Path, stream: StreamId, topic: str) -> list[Rescue]:
    """What can still be served of a file with some damaged row groups; nothing when its footer is."""
    try:
        segment = describe(path, stream)
        _check_names(path, stream, topic, segment)
    except (DataDamaged, *UNREADABLE):
        return []
    broken = [flaw for flaw in flaws(path, segment, _ignore) if not flaw.is_hole]
    if any(not flaw.position for flaw in broken):
        return []
    damaged = {flaw.start_offset for flaw in broken}
    groups = segment.row_groups()
    firsts = [segment.first_offset, *(group.first_offset for group in groups[1:]), segment.end_offset]
    runs: list[Rescue] = []
    for index, group in enumerate(groups):
        if group.first_offset in damaged:
            continue
        is_next = bool(runs) and runs[-1].end_group == index
        start = runs.pop().first_group if is_next else index
        rows = sum(each.rows for each in groups[start : index + 1])
        piece = msgspec.structs.replace(
            segment, first_offset=firsts[start], end_offset=firsts[index + 1], rows=rows
        )
        runs.append(Rescue(piece, start, index + 1))
    return runs


def read_groups(path: Path, groups: range) -> Iterator[pa.RecordBatch]:
    """Row groups in the table form, their pages checked."""
    file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
    for index in groups:
        yield from file.read_row_group(index).cast(TABLE_SCHEMA).combine_chunks().to_batches()


def _ignore(count: int) -> None:
    """Nobody counts."""


def stated_names(path: Path) -> dict[str, str]:
    """The key-value metadata of a file, as far as it can be read."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
        return {key.decode(): value.decode() for key, value in metadata.items()}
    except UNREADABLE:
        return {}


def _check_names(path: Path, stream: StreamId, topic: str, segment: Segment) -> None:
    names = stated_names(path)
    stated = (names.get("sparrow.topic"), names.get("sparrow.topic_id"), names.get("sparrow.partition"))
    if stated != (topic, str(stream.topic_id), str(stream.partition)):
        raise DataDamaged(
            f"it says that it belongs to topic {stated[0]} id {stated[1]} partition {stated[2]}"
        )
    name = parse_name(path.name.removesuffix(".damaged"))
    if name is None or name.first_offset != segment.first_offset:
        raise DataDamaged(f"it says that its first offset is {segment.first_offset}")


def _without_name(message: str) -> str:
    """A reader's complaint, which names the file first; a finding names it already."""
    return message.split(".parquet ", 1)[-1]


def _group_flaws(path: Path, segment: Segment, on_bytes: OnBytes) -> Iterator[Flaw]:
    whole = pa.memory_map(str(path)).read_buffer()
    file = pq.ParquetFile(pa.BufferReader(whole), page_checksum_verification=True, pre_buffer=False)
    groups = segment.row_groups()
    if file.metadata.num_row_groups != len(groups) or not file.schema_arrow.equals(TABLE_SCHEMA):
        yield Flaw("its row groups or columns are not those listed", segment.first_offset, segment.end_offset)
        return
    stated = _Stated(segment)
    name = parse_name(segment.file_name)
    is_rewritten = name is not None and name.round > 0  # Compaction makes holes, and the broker checked it.
    for index, group in enumerate(groups):
        end = groups[index + 1].first_offset if index + 1 < len(groups) else segment.end_offset
        table = _read_group(whole, file, index, group)
        if isinstance(table, str):
            stated.is_complete = False
            yield Flaw(f"row group {index} {table}", group.first_offset, end, group.byte_start)
        else:
            found = _offset_flaws(table.column("offset"), index, group, end)
            yield from (flaw for flaw in found if not (flaw.is_hole and is_rewritten))
            stated.compare(table)
        on_bytes(group.byte_length)
    complaint = stated.complaint()
    if complaint:
        yield Flaw(complaint, segment.first_offset, segment.end_offset)


def _read_group(whole: Any, file: Any, index: int, group: RowGroup) -> pa.Table | str:
    """The group's values, or what is wrong with its bytes."""
    if google_crc32c.value(whole.slice(group.byte_start, group.byte_length)) != group.crc32c:
        return "does not match its checksum"
    try:
        table = file.read_row_group(index, use_threads=False)
        table.validate(full=True)
    except UNREADABLE as error:
        return f"does not match its page checksums or cannot be decoded: {error}"
    if table.num_rows != group.rows:
        return f"has {table.num_rows} rows instead of {group.rows}"
    return table


def _offset_flaws(offsets: pa.ChunkedArray, index: int, group: RowGroup, end: int) -> Iterator[Flaw]:
    values = offsets.combine_chunks()
    first, last = values[0].as_py(), values[-1].as_py()
    steps = pc.pairwise_diff(values)
    is_ascending = len(values) == 1 or pc.min(steps).as_py() > 0
    if first != group.first_offset or last >= end or not is_ascending:
        yield Flaw(f"row group {index} has offsets out of order", group.first_offset, end, group.byte_start)
        return
    jumps = pc.indices_nonzero(pc.fill_null(pc.greater(steps, 1), False)).to_pylist()
    holes = [(values[at - 1].as_py() + 1, values[at].as_py()) for at in jumps]
    if last + 1 < end:
        holes.append((last + 1, end))
    for start, stop in holes:
        what = "messages were missing when it was sealed"
        yield Flaw(what, start, stop, group.byte_start, is_hole=True)


class _Stated:
    """What the segment's row says of its values, held against them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rows = 0
        self._times: list[int] = []
        self._has_keys = False
        self.is_complete = True

    def compare(self, table: pa.Table) -> None:
        found = pc.min_max(table.column("publish_time")).as_py()
        self._times += [_us(found["min"]), _us(found["max"])]
        self._has_keys = self._has_keys or table.column("idempotency_key").null_count < table.num_rows
        self._rows += table.num_rows

    def complaint(self) -> str | None:
        segment = self._segment
        if not self.is_complete:
            return None
        if self._rows != segment.rows:
            return f"it has {self._rows} rows instead of {segment.rows}"
        if (min(self._times), max(self._times)) != (segment.first_time_us, segment.last_time_us):
            return "its times are not those stated"
        if self._has_keys and not segment.has_idempotency_keys:
            return "it holds idempotency keys and states that it has none"
        return None


def _us(moment: Any) -> int:
    return int(pa.scalar(moment, pa.timestamp("us", tz="UTC")).value)
