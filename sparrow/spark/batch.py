"""The batch reader: a log from one edge to the other, as it is when Spark plans the query."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sparrow.spark.options import ReadOptions
from sparrow.spark.origins import open_origin
from sparrow.spark.planning import batch_ranges, plan
from sparrow.spark.reading import Task, read_task


class BatchReader(DataSourceReader):
    """See the module's text. Spark pickles it into every task, so it holds the options alone."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        origin = open_origin(self._options.where)
        ranges = batch_ranges(origin, self._options)
        return [Task(part) for part in plan(origin, self._options, ranges, is_batch=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(self._options, self._schema, partition)
