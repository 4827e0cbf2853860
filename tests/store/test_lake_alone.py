"""The lake belongs to its owner: DuckDB, Polars and Spark read it where Sparrow cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import sparrow
from sparrow.spark.java import prepare_java

SCRIPT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sparrow", "pyspark_sparrow"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
try:
    import sparrow
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("sparrow can be imported")

files, found = sys.argv[1], {}
query = "select count(*), sum(length(data)), min(key), max(\\"offset\\") from "

import duckdb
found["duckdb"] = duckdb.sql(query.replace("length(", "octet_length(") + f"'{files}'").fetchall()[0]

import polars as pl
table = pl.scan_parquet(files)
sizes = pl.col("data").bin.size().sum()
found["polars"] = table.select(pl.len(), sizes, pl.col("key").min(), pl.col("offset").max()).collect().row(0)

from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
         .config("spark.driver.memory", "512m").getOrCreate())
spark.read.parquet(files).createOrReplaceTempView("lake")
found["spark"] = tuple(spark.sql(query.replace('"offset"', "`offset`") + "lake").collect()[0])
spark.stop()
print("found", json.dumps(found))
"""


def test_duckdb_polars_and_spark_read_the_lake_with_sparrow_not_installed(tmp_path: Path) -> None:
    with sparrow.open(tmp_path / "data") as broker:
        broker.create_topic("orders", partitions=2)
        for start in (0, 300):
            data = [b"x" * (start + number) for number in range(300)]
            broker.publish_batch("orders", data, keys=[f"k-{start + number}" for number in range(300)])
            broker.seal()
        end = max(broker.bounds("orders", partition).end_offset for partition in range(2))
    environment = {**os.environ, "JAVA_HOME": str(prepare_java())}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "data" / "topics" / "orders" / "*" / "*.parquet")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = next(line for line in ran.stdout.splitlines() if line.startswith("found "))
    expected = [600, sum(range(600)), "k-0", end - 1]
    assert json.loads(told.removeprefix("found ")) == dict.fromkeys(["duckdb", "polars", "spark"], expected)
