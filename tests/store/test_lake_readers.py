"""Sealed segments opened as they are by other people's readers: all of them see the same rows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.settings import JournalSettings, LakeSettings, Settings

MOMENT = datetime(2024, 5, 6, 7, 8, 9, 123_456, UTC)
COLUMNS = [
    "offset",
    "publish_time",
    "key",
    "data",
    "attributes",
    "event_time",
    "priority",
    "producer_id",
    "sequence",
]
Row = tuple[Any, ...]


@pytest.fixture(scope="module", params=["zstd", "none", "lz4", "snappy"])
def compression(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, compression: str) -> Path:
    """A data directory with three segments in two partitions, and rows of every kind."""
    import asyncio

    path = tmp_path_factory.mktemp(compression) / "data"
    asyncio.run(fill(path, compression))
    return path


async def fill(path: Path, compression: str) -> None:
    settings = Settings(
        data=str(path),
        journal=JournalSettings(file_bytes=1 << 20),
        lake=LakeSettings(compression=compression, row_group_bytes=64 << 10),  # type: ignore[arg-type]
    )
    async with await Broker.open(settings) as broker:
        await broker.create_topic("orders", partitions=2)
        await broker.publish("orders", b"\x00\xff full", key="k-0", attributes={"env": "prod", "ü": ""},
                             event_time=MOMENT, priority=-5)  # fmt: skip
        await broker.publish("orders", None, key="k-1")
        await broker.publish("orders", b"", key="k-2")
        await broker.publish_batch(
            "orders", [os.urandom(500) for _ in range(600)], keys=[f"k-{n}" for n in range(600)]
        )
        assert await broker.seal() == 603
        producer = await broker.producer("shop")
        await producer.publish_batch("orders", [b"p"] * 20, keys=["k-0"] * 20, sequence=1000)
        assert await broker.seal() == 20


@pytest.fixture(scope="module")
def files(data: Path) -> list[Path]:
    found = sorted(data.glob("topics/orders/*/*.parquet"))
    assert len(found) == 3
    return found


@pytest.fixture(scope="module")
def rows(files: list[Path]) -> list[Row]:
    """What pyarrow reads, as the measure for the others."""
    found = [
        tuple(row.values()) for path in files for row in pq.read_table(path, columns=COLUMNS).to_pylist()
    ]
    return in_order(found)


def in_order(rows: list[Row]) -> list[Row]:
    """Attributes as plain dicts; rows by offset and key, which tell them apart."""
    plain = [tuple(_plain(value) for value in row) for row in rows]
    return sorted(plain, key=lambda row: (row[0], row[2]))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, list):
        return dict((pair["key"], pair["value"]) if isinstance(pair, dict) else pair for pair in value)
    return value


def test_the_rows_are_those_that_were_published(rows: list[Row]) -> None:
    assert len(rows) == 623
    full = next(row for row in rows if row[3] == b"\x00\xff full")
    assert full[4:7] == ({"env": "prod", "ü": ""}, MOMENT, -5)
    assert sum(row[3] is None for row in rows) == 1
    assert sum(row[3] == b"" for row in rows) == 1
    produced = [row for row in rows if row[7] is not None]
    assert sorted(row[8] for row in produced) == list(range(1000, 1020))
    assert all(row[1].tzinfo is not None for row in rows)


def test_pyarrows_dataset_reads_the_directory_as_one_table(data: Path, rows: list[Row]) -> None:
    found = ds.dataset(data / "topics" / "orders", format="parquet", exclude_invalid_files=True)
    table = found.to_table(columns=COLUMNS)
    assert in_order([tuple(row.values()) for row in table.to_pylist()]) == rows


def test_duckdb_reads_the_same_rows(data: Path, rows: list[Row]) -> None:
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        named = ", ".join(f'"{name}"' for name in COLUMNS)
        found = connection.sql(f"select {named} from '{data}/topics/orders/*/*.parquet'").to_arrow_table()
    assert in_order([tuple(row.values()) for row in found.to_pylist()]) == rows


def test_the_duckdb_one_liner_of_the_readme_works(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    found = duckdb.sql("select count(*) from 'data/topics/orders/*/*.parquet'").fetchall()
    assert found == [(623,)]


def test_duckdb_finds_an_offset_by_its_statistics(data: Path) -> None:
    query = f'select min("offset") from \'{data}/topics/orders/0/*.parquet\' where "offset" >= 100'
    assert duckdb.sql(query).fetchall() == [(100,)]


def test_polars_reads_the_same_rows(files: list[Path], rows: list[Row]) -> None:
    frame = pl.read_parquet(files, columns=COLUMNS).select(COLUMNS)
    assert in_order([tuple(row.values()) for row in frame.to_arrow().to_pylist()]) == rows


def test_polars_scans_lazily_with_a_filter(data: Path, rows: list[Row]) -> None:
    found = pl.scan_parquet(f"{data}/topics/orders/*/*.parquet").filter(pl.col("key") == "k-0").collect()
    assert len(found) == sum(row[2] == "k-0" for row in rows) == 22


# Spark: one session for all of them; a JVM takes seconds to start.


def java_version() -> int | None:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if not java:
        return None
    ran = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)', ran.stderr)
    return int(found[1]) if found else None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    version = java_version()
    if version is None or version < 17:
        pytest.skip(f"Spark 4 needs Java 17 or newer; this machine has {version or 'none'}")
    from pyspark.sql import SparkSession

    home = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.warehouse.dir", str(home))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def test_spark_reads_the_same_rows(spark: Any, data: Path, rows: list[Row]) -> None:
    frame = spark.read.parquet(f"{data}/topics/orders/*/*.parquet").select(*COLUMNS)
    # Spark hands out naive times in this machine's zone; astimezone in in_order reads them so.
    assert in_order([tuple(row) for row in frame.collect()]) == rows
