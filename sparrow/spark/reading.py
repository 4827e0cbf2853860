"""What a task does: opens the log by itself and yields the rows of its ranges as Arrow batches.

The filter is applied to whole columns here, before rows reach the JVM. Batches are as they come from the
log, small ones put together: each costs Spark some hundred microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from sparrow.kernel.filter import Filter, parse_filter
from sparrow.spark.columns import Shape
from sparrow.spark.options import ReadOptions
from sparrow.spark.origins import open_origin
from sparrow.spark.ranges import Range
from sparrow.store.batch import TABLE_SCHEMA
from sparrow.store.ports import LogBatch

BATCH_ROWS = 2_000
BATCH_BYTES = 256 * 2**10
"""A batch with either goes as it is: copying it into a larger one costs more than Spark's work for it."""
_FILTERED = ("key", "data", "attributes", "priority")


@dataclass
class Task(InputPartition):
    """The ranges that one task reads."""

    ranges: list[Range]


def read_task(options: ReadOptions, schema: StructType, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a task; nothing for the one that Spark makes up when there are none."""
    if not isinstance(task, Task):
        return
    origin = open_origin(options.where)
    shape, chosen = Shape(schema), parse_filter(options.filter)
    columns = _columns(shape, chosen)
    for wanted in task.ranges:
        found = _clipped(origin.scan(wanted, columns, options.is_loss_fatal), wanted, chosen)
        for rows in _gathered(found):
            yield shape.take(rows, wanted.topic, wanted.partition)


def _columns(shape: Shape, chosen: Filter | None) -> list[str]:
    """What has to be read: what is shown and what is filtered by."""
    filtered = [name for name in _FILTERED if chosen is not None and name in str(chosen)]
    wanted = {"offset", *shape.needed, *filtered}
    return [field.name for field in TABLE_SCHEMA if field.name in wanted]


def _clipped(found: Iterator[LogBatch], wanted: Range, chosen: Filter | None) -> Iterator[pa.RecordBatch]:
    for each in found:
        rows = each.batch
        if each.end_offset > wanted.end or each.first_offset < wanted.start:
            first, last = (_place(rows.column("offset"), offset) for offset in (wanted.start, wanted.end))
            rows = rows.slice(first, last - first)
        if chosen is not None and rows.num_rows:
            rows = rows.filter(chosen.mask(rows))
        if rows.num_rows:
            yield rows
        if each.end_offset >= wanted.end:
            return


def _place(offsets: Any, wanted: int) -> int:
    """Where the first offset stands that is not smaller."""
    return bisect_left(offsets, wanted, key=lambda offset: offset.as_py())


def _gathered(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in found:
        count, weight = batch.num_rows, batch.nbytes
        is_large = count >= BATCH_ROWS or weight >= BATCH_BYTES
        if waiting and (is_large or batch.schema != waiting[0].schema):
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows, size = rows + count, size + weight
        if rows >= BATCH_ROWS or size >= BATCH_BYTES:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: Sequence[pa.RecordBatch]) -> Any:
    return batches[0] if len(batches) == 1 else pa.concat_batches(list(batches))
