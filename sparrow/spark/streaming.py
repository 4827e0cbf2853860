"""The stream reader: tells Spark how far a topic reaches, how much of it to take next, and what was taken.

Spark keeps it in a process of its own on the driver for as long as the query runs, and asks in turns. What it
answers is decided by positions alone, so a query that is started again from its checkpoint reads exactly what
it would have read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from sparrow.model.segment import Extent, Stretch
from sparrow.spark.offsets import Offsets
from sparrow.spark.options import EARLIEST, LATEST, Moment, ReadOptions
from sparrow.spark.origins import Origin, open_origin
from sparrow.spark.planning import find_topics, gone, overtaken, plan, resolve, stream_ranges
from sparrow.spark.ranges import shares
from sparrow.spark.reading import Task, read_task
from sparrow.spark.subscribing import SubscriptionCursor

Place = tuple[str, int]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module's text."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: dict[Place, int] | None = None
        """With AvailableNow: the ends when the query began."""
        self._ends: Offsets | None = None
        self._own: SubscriptionCursor | None = None
        self._took_at_s = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Tasks need the options alone."""
        return {"_options": self._options, "_schema": self._schema}

    def check(self) -> None:
        """Complains about what can be known to be wrong before the query starts."""
        find_topics(self._origin(), self._options)
        self._cursor()

    def _origin(self) -> Origin:
        return open_origin(self._options.where)

    def _cursor(self) -> SubscriptionCursor | None:
        if self._own is None and self._options.subscription is not None:
            self._own = SubscriptionCursor.open(self._options)
        return self._own

    # Where to begin.

    def initialOffset(self) -> dict[str, Any]:
        extents = find_topics(self._origin(), self._options)
        edge = LATEST if self._options.start is None else self._options.start
        name = "startingTimestamp" if isinstance(edge, Moment) else "startingOffsets"
        found = resolve(
            self._origin(), extents, edge, name, is_loss_fatal=self._options.is_loss_fatal, missing=EARLIEST
        )
        start = self._offsets(found, extents)
        cursor = self._cursor()
        if cursor is not None:
            cursor.commit(start)
        return start.to_json()

    def _offsets(self, found: dict[Place, int], extents: Sequence[Extent]) -> Offsets:
        topics = {topic for topic, _ in found}
        epochs = {extent.topic: extent.topic_id for extent in extents if extent.topic in topics}
        return Offsets(found, epochs, self._options.subscription)

    # How far to go.

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.trigger_bytes_max is not None:
            return ReadMaxBytes(options.trigger_bytes_max)
        if options.trigger_rows_max is not None:
            return ReadMaxRows(options.trigger_rows_max)
        if options.trigger_rows_min is not None:
            return ReadMinRows(options.trigger_rows_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        extents = find_topics(self._origin(), self._options)
        self._target = {place: end for place, (_, end) in _bounds(extents).items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        extents = find_topics_again(self._origin(), self._options)
        before = Offsets.from_json(start)
        positions = self._positions(before, extents)
        ends = self._reachable(positions, extents)
        self._ends = self._offsets({place: end for place, (_, end) in _bounds(extents).items()}, extents)
        backlog = {place: ends[place] - at for place, at in positions.items() if ends[place] > at}
        is_new = self._offsets(positions, extents).next != dict(before.next)
        if not backlog and not is_new:
            return start
        if not self._is_enough(sum(backlog.values()), limit):
            return start
        taken = self._admit(positions, backlog, limit)
        self._took_at_s = time.monotonic()
        return self._offsets({**positions, **taken}, extents).to_json()

    def _positions(self, before: Offsets, extents: Sequence[Extent]) -> dict[Place, int]:
        """Where each partition of now is read on: a new one from its beginning."""
        now, fatal = {extent.topic: extent for extent in extents}, self._options.is_loss_fatal
        for topic, epoch in before.epochs.items():
            if fatal and (topic not in now or now[topic].topic_id != epoch):
                raise gone(topic, now.get(topic))
        found: dict[Place, int] = {}
        for place, (kept, end) in _bounds(extents).items():
            topic, partition = place
            at = before.next.get(place)
            if at is None or before.epochs.get(topic) != now[topic].topic_id:
                found[place] = kept
            elif kept <= at <= end:
                found[place] = at
            elif fatal:
                raise overtaken(topic, partition, at, kept) if at < kept else gone(topic, now[topic])
            else:
                found[place] = kept if at < kept else end
        return found

    def _reachable(self, positions: dict[Place, int], extents: Sequence[Extent]) -> dict[Place, int]:
        ends = {place: end for place, (_, end) in _bounds(extents).items()}
        if self._target is None:
            return ends
        # What came after the beginning, partitions too, waits for the next run.
        return {place: min(end, max(at, self._target.get(place, at)))
                for (place, end), at in zip(ends.items(), positions.values(), strict=True)}  # fmt: skip

    def _is_enough(self, rows: int, limit: ReadLimit) -> bool:
        least = self._options.trigger_rows_min
        if least is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return True
        return rows >= least or time.monotonic() - self._took_at_s >= self._options.trigger_delay_s

    def _admit(
        self, positions: dict[Place, int], backlog: dict[Place, int], limit: ReadLimit
    ) -> dict[Place, int]:
        """The end of each partition's share of the limits."""
        places, rows = list(backlog), list(backlog.values())
        rows_max, bytes_max = self._options.trigger_rows_max, self._options.trigger_bytes_max
        if isinstance(limit, ReadAllAvailable):
            rows_max = bytes_max = None
        if rows_max is not None:
            rows = shares(rows, rows_max)
        ends = {place: positions[place] + count for place, count in zip(places, rows, strict=True)}
        return ends if bytes_max is None else self._within(positions, ends, bytes_max)

    def _within(
        self, positions: dict[Place, int], ends: dict[Place, int], bytes_max: int
    ) -> dict[Place, int]:
        """The ends moved back until all together stay within so many bytes; one message always passes."""
        reached = self._measure(positions, ends, bytes_max)
        sizes = [size for _, size in reached.values()]
        found = {place: end for place, (end, _) in reached.items()}
        if sum(sizes) <= bytes_max:
            return found
        for place, share in zip(reached, shares(sizes, bytes_max), strict=True):
            end = self._measure(positions, {place: ends[place]}, share)[place][0] if share else None
            found[place] = positions[place] if end is None else end
        return found

    def _measure(
        self, positions: dict[Place, int], ends: dict[Place, int], bytes_max: int
    ) -> dict[Place, tuple[int, int]]:
        found: dict[Place, tuple[int, int]] = {}
        for topic in dict.fromkeys(topic for topic, _ in ends):
            own = [place for place in ends if place[0] == topic]
            stretches = [Stretch(place[1], positions[place], ends[place]) for place in own]
            measured = self._origin().measure(topic, stretches, bytes_max)
            found.update(
                {place: (each.end_offset, each.size_bytes) for place, each in zip(own, measured, strict=True)}
            )
        return found

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._ends is None else self._ends.to_json()

    # What to read.

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        origin, options = self._origin(), self._options
        extents = find_topics_again(origin, options)
        ranges = stream_ranges(
            extents, Offsets.from_json(start), Offsets.from_json(end), options.is_loss_fatal
        )
        return [Task(part) for part in plan(origin, options, ranges, is_batch=False)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(self._options, self._schema, partition)

    # What was read.

    def commit(self, end: dict[str, Any]) -> None:
        cursor = self._cursor()
        if cursor is not None:
            cursor.commit(Offsets.from_json(end))


def find_topics_again(origin: Origin, options: ReadOptions) -> list[Extent]:
    """The topics there are; one that is missing is judged by what the query has read of it."""
    return origin.extents(options.patterns)


def _bounds(extents: Sequence[Extent]) -> dict[Place, tuple[int, int]]:
    return {
        (extent.topic, partition): (start, end)
        for extent in extents
        for partition, (start, end) in enumerate(extent.bounds)
    }
