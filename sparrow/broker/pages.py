"""Batches on their way to subscriptions, read and judged once for all of them.

A page is one batch of the log as it was stored. Fan-out shares it: ten thousand subscriptions that read the
same batch decode it once, and their filters are evaluated together, the first time any of them asks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from sparrow.kernel.batchview import BatchView
from sparrow.kernel.filter import Filter
from sparrow.kernel.filterset import FilterSet
from sparrow.model.message import StreamId
from sparrow.store.handover import Contents, contents
from sparrow.store.ports import LogBatch, Store

_PAGE_READ_BYTES = 1024 * 1024
_TINY_ROWS = 100
_SMALL_ROWS = 64
_WISHES = ("priority", "deliver_at", "ttl_ms", "depends_on")
_UNPACKED_BYTES = 128
"""Of a value in a dictionary by offset."""
_TEXTS = ("key", "attributes", "idempotency_key", "depends_on", "original_id")
REPLAY_FOR = "replay_for"
"""Attribute of a message that was stored again, because its original is gone, for one subscription."""
REPLAY_ROUND = "replay_round"
"""How many times it had been replayed by then."""
REPLAY_FROM = "replay_from"
"""The subscription whose dead letter it was, when that is another than the one it was stored again for."""


class Page:
    """One batch and what was found out about it."""

    __slots__ = (
        "_contents",
        "_has_again",
        "_is_dense",
        "_judged_at",
        "_published_at_us",
        "_selected",
        "_sparse",
        "_view",
        "batch",
        "end_offset",
        "first_offset",
        "held",
        "is_plain",
        "size_bytes",
        "stream",
    )

    def __init__(self, read: LogBatch) -> None:
        self.stream = read.stream
        self.first_offset = read.first_offset
        self.end_offset = read.end_offset
        self.batch = read.batch
        self._is_dense = read.batch.num_rows == read.end_offset - read.first_offset
        self._view: BatchView | None = None
        self._selected: dict[Filter, BitMap64] = {}
        self._judged_at = -1
        rows = read.batch.num_rows
        self.held = [
            name
            for name, column in zip(read.batch.schema.names, read.batch.columns, strict=True)
            if name == "data" or column.null_count < rows
        ]
        """The columns that hold anything."""
        self.size_bytes = sum(_size(name, read.batch.column(name), rows) for name in self.held)
        self._has_again = "original_id" in self.held
        self.is_plain = not any(name in self.held for name in _WISHES)
        """Whether no message of it asks for anything by itself."""
        self._sparse: dict[str, dict[int, Any] | None] = {}
        self._contents: list[Contents] | None = None
        self._published_at_us: int | None = None

    @property
    def published_at_us(self) -> int:
        """When its messages were published: the middle between the first and the last."""
        if self._published_at_us is None:
            times = self.batch.column("publish_time")
            self._published_at_us = (times[0].value + times[len(times) - 1].value) // 2
        return self._published_at_us

    def offsets(self, start: int, end: int) -> BitMap64 | None:
        """The offsets from ``start`` to ``end`` that exist; None when all do."""
        if self._is_dense:
            return None
        found = BitMap64(self.batch.column("offset").to_pylist())
        return found & BitMap64(range(start, end))

    def selected(self, wanted: Filter, filters: FilterSet) -> BitMap64:
        """The offsets that pass a filter. All filters of ``filters`` are evaluated at the first question."""
        if self._judged_at != filters.version:
            self._selected = self._evaluate(filters)
            self._judged_at = filters.version
        found = self._selected.get(wanted)
        return found if found is not None else BitMap64()

    def meant_for(self, subscription: str) -> BitMap64 | None:
        """Messages stored again for one subscription alone concern no other; None when there are none."""
        if not self._has_again:
            return None
        offsets = self.batch.column("offset").to_pylist()
        attributes = self.batch.column("attributes").to_pylist()
        others = {
            offset
            for offset, pairs in zip(offsets, attributes, strict=True)
            if dict(pairs or ()).get(REPLAY_FOR, subscription) != subscription
        }
        return BitMap64(offset for offset in offsets if offset not in others)

    def _evaluate(self, filters: FilterSet) -> dict[Filter, BitMap64]:
        if self._view is None:
            self._view = BatchView(self.batch)
        found = filters.select(self._view)
        if self._is_dense:
            first = self.first_offset
            return {one: BitMap64([first + place for place in places]) for one, places in found.items()}
        offsets = self.batch.column("offset").to_pylist()
        return {one: BitMap64([offsets[place] for place in places]) for one, places in found.items()}

    def rows(self, offsets: Sequence[int]) -> pa.RecordBatch:
        """The rows of some offsets of this page, in order; offsets that are not there are left out."""
        if self._is_dense:
            first, count = offsets[0] - self.first_offset, len(offsets)
            if count == self.batch.num_rows:
                return self.batch
            if offsets[-1] - offsets[0] == count - 1:
                return self.batch.slice(first, count)
            return self.batch.take(pa.array([offset - self.first_offset for offset in offsets]))
        return self.batch.filter(pc.is_in(self.batch.column("offset"), value_set=pa.array(offsets)))

    def values(self, column: str, start: int) -> list[Any] | None:
        """A column from ``start`` on, one value an offset; None when it is empty."""
        found = self.batch.column(column)
        if found.null_count == len(found):
            return None
        if self._is_dense:
            return list(_plain(found.slice(start - self.first_offset)))
        by_offset = dict(zip(self.batch.column("offset").to_pylist(), _plain(found), strict=True))
        return [by_offset.get(offset) for offset in range(start, self.end_offset)]

    def sparse(self, column: str) -> dict[int, Any] | None:
        """The values of a column by offset, nulls left out; None when it is empty. Not to be changed."""
        if column not in self._sparse:
            self._sparse[column] = self._read_sparse(column)
        return self._sparse[column]

    def _read_sparse(self, column: str) -> dict[int, Any] | None:
        found = self.batch.column(column)
        if found.null_count == len(found):
            return None
        offsets = self.batch.column("offset").to_pylist()
        return {o: v for o, v in zip(offsets, _plain(found), strict=True) if v is not None}

    def contents(self, rows: pa.RecordBatch) -> Iterable[Contents]:
        """What messages show at once, of rows of this page. A small page that many read is unpacked once."""
        if rows is not self.batch or rows.num_rows > _SMALL_ROWS:
            return contents(rows)
        if self._contents is None:
            self._contents = list(contents(rows))
        return self._contents

    def expiries(self) -> dict[int, int] | None:
        """When messages with a time to live stop being worth delivering, by offset."""
        lives = self.sparse("ttl_ms")
        if lives is None:
            return None
        published = self.sparse("publish_time") or {}
        return {offset: published[offset] + ttl_ms * 1000 for offset, ttl_ms in lives.items()}

    def large(self, bytes_min: int) -> BitMap64 | None:
        """Messages whose data is over a size."""
        mask = pc.greater(pc.binary_length(self.batch.column("data")), bytes_min)
        found = self.batch.column("offset").filter(mask)
        return BitMap64(found.to_pylist()) if len(found) else None


def _size(name: str, column: Any, rows: int) -> int:
    """Bytes of a column, and of what is made of it for the kernel; of numbers without asking, which costs
    more than it tells."""
    if name == "data":
        return int(column.total_values_length) + rows * 4
    unpacked = rows * _UNPACKED_BYTES if name in _WISHES else 0
    return unpacked + (int(column.nbytes) if name in _TEXTS else rows * 8)


def _plain(column: Any) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    found: list[Any] = column.to_pylist()
    return found


def _joined(read: list[LogBatch]) -> list[LogBatch]:
    """Many tiny batches become one page: messages published one at a time would be read so, too."""
    rows = sum(batch.batch.num_rows for batch in read)
    if len(read) < 2 or rows / len(read) >= _TINY_ROWS:
        return read
    whole = pa.concat_batches([batch.batch for batch in read])
    return [LogBatch(read[0].stream, read[0].first_offset, read[-1].end_offset, whole)]


class Pages:
    """A small cache of pages; bounded by count and bytes."""

    def __init__(self, store: Store, count_max: int = 256, bytes_max: int = 8 * 1024 * 1024) -> None:
        self._store = store
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._pages: OrderedDict[tuple[StreamId, int], Page] = OrderedDict()
        self._starts: dict[StreamId, list[int]] = {}
        """First offsets of the pages of a stream, in order."""

    async def at(self, stream: StreamId, offset: int) -> Page | None:
        """The page that holds ``offset``, or the next one after a gap; None at the end of the log."""
        held = self.held(stream, offset)
        if held is not None:
            return held
        if offset >= self._store.bounds(stream).end_offset:
            return None
        read = await self._store.read(stream, offset, _PAGE_READ_BYTES, is_whole=True)
        pages = [self._keep(Page(batch)) for batch in _joined(read)]
        return pages[0] if pages else None

    def held(self, stream: StreamId, offset: int) -> Page | None:
        """The page that holds ``offset``, when it is in memory."""
        starts = self._starts.get(stream)
        place = 0 if starts is None else bisect_right(starts, offset)
        if starts is None or not place:
            return None
        key = (stream, starts[place - 1])
        page = self._pages[key]
        if offset >= page.end_offset:
            return None
        self._pages.move_to_end(key)
        return page

    def _keep(self, page: Page) -> Page:
        key = (page.stream, page.first_offset)
        held = self._pages.get(key)
        if held is not None and held.end_offset == page.end_offset:
            return held
        if held is not None:
            self._drop(key)
        self._pages[key] = page
        insort(self._starts.setdefault(page.stream, []), page.first_offset)
        self._bytes += page.size_bytes
        while len(self._pages) > self._count_max or (self._bytes > self._bytes_max and len(self._pages) > 1):
            self._drop(next(iter(self._pages)))
        return page

    def _drop(self, key: tuple[StreamId, int]) -> None:
        page = self._pages.pop(key)
        self._bytes -= page.size_bytes
        starts = self._starts[page.stream]
        del starts[bisect_left(starts, page.first_offset)]
        if not starts:
            del self._starts[page.stream]

    def forget_topic(self, topic_id: int) -> None:
        for key in [key for key in self._pages if key[0].topic_id == topic_id]:
            self._drop(key)
