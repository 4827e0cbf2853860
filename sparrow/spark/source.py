"""``format("sparrow")``: topics as a batch or a stream, DataFrames into topics.

Spark makes this object anew for every step of a query, in short-lived processes: it holds the options and
nothing else, and what is heavy is imported by the step that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class SparrowDataSource(DataSource):
    """See the module's text."""

    @classmethod
    def name(cls) -> str:
        return "sparrow"

    def schema(self) -> StructType:
        from sparrow.spark.columns import choose
        from sparrow.spark.options import parse_options

        options = parse_options(self.options)
        return choose(options.columns, options.has_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        from sparrow.spark.batch import BatchReader
        from sparrow.spark.columns import check_schema
        from sparrow.spark.options import parse_options

        check_schema(schema)
        return BatchReader(parse_options(self.options, is_stream=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from sparrow.spark.columns import check_schema
        from sparrow.spark.options import parse_options
        from sparrow.spark.streaming import StreamReader

        check_schema(schema)
        reader = StreamReader(parse_options(self.options, is_stream=True), schema)
        reader.check()
        return reader

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from sparrow.spark.sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from sparrow.spark.sink import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)
