"""A job for a cluster: looks at a topic, and copies large orders to another one, each once.

    spark-submit --master spark://master:7077 large_orders.py \\
        --servers sparrow://broker:9092 --checkpoint hdfs:///checkpoints/large-orders

Started again with the same checkpoint it goes on where it ended. ``docs/guides/spark.md`` says what executors
need. It prints what it found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

import sparrow.spark

SCHEMA = "id BIGINT, country STRING, amount DOUBLE"


def places(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Where a task runs, and how much it reads: an executor has a directory of its own."""
    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"executor": [os.getcwd()], "process": [os.getpid()], "rows": [rows]})


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--servers", required=True, help="the broker, as executors reach it")
    given.add_argument("--checkpoint", required=True, help="a directory that driver and executors share")
    given.add_argument("--orders", default="orders")
    given.add_argument("--large", default="orders.large")
    given.add_argument("--lake", help="where executors see the data directory, if elsewhere")
    options = given.parse_args()
    spark = sparrow.spark.session()  # The master and all else that spark-submit was told stay.

    source = spark.read.format("sparrow").option("servers", options.servers)
    rows = source.option("subscribe", options.orders).option("minPartitions", 4).load()
    tasks = rows.mapInArrow(places, "executor STRING, process LONG, rows LONG").collect()

    table = sparrow.spark.table(
        spark, options.orders, servers=options.servers, lake=options.lake, schema=SCHEMA
    )
    revenue = {row["country"]: row["revenue"] for row in _revenue(table)}

    live = sparrow.spark.stream(
        spark, options.orders, servers=options.servers, schema=SCHEMA, subscription="large-orders"
    )
    query = (
        live.where("amount >= 1000")
        .selectExpr("__key AS key", "to_json(struct(id, country, amount)) AS data")
        .writeStream.format("sparrow")
        .option("servers", options.servers)
        .option("topic", options.large)
        .option("checkpointLocation", options.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = {
        "master": spark.sparkContext.master,
        "tasks": [task.asDict() for task in tasks],
        "files": len(table.inputFiles()),
        "revenue": revenue,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    spark.stop()


def _revenue(table: Any) -> Any:
    return table.groupBy("country").sum("amount").withColumnRenamed("sum(amount)", "revenue").collect()


if __name__ == "__main__":
    main()
