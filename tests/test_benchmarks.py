"""The benchmarks run to their end and judge every promise. How fast is for a quiet machine to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT, BROKEN = 0, 1

PROMISES = {
    "journal": {
        "ratio to raw with the same bytes a sync",
        "ratio to one topic",
        "single durable publishes",
    },
    "recovery": {
        "open after a kill",
        "open after a kill, page cache cold",
        "what sealed messages add",
    },
    "sealing": {
        "sealing",
        "publishing beside sealing to without",
        "lake to journal, random bytes",
        "lake to journal, JSON",
    },
    "read": {"warm", "first batch, p99"},
    "footprint": {
        "spawn to first durable receipt",
        "resident, embedded and idle",
        "resident, sparrow up and idle",
    },
    "backpressure": {
        "worst backlog to its hard limit",
        "worst growth of memory",
        "most changes of mode",
        "neighbour's rate beside to alone",
        "critical messages that passed",
    },
    "throughput": {
        "publish_batch",
        "publish, one at a time",
        "pull and ack in batches",
        "consume and ack message by message",
        "rate beside it, next to alone",
    },
    "latency": {"due to handler, p99"},
    "spark_read": {
        "table to plain Parquet, full scan",
        "table to plain Parquet, count",
        "table to plain Parquet, one column",
        "hot tail by the source",
    },
    "metrics": {"a scrape, median", "others kept waiting, p99"},
    "webhooks": {"delivery", "due to received, p99", "due to received by the healthy, p99"},
    "http": {"publish in batches", "publish one at a time", "stream and acknowledge"},
    "groups": {
        "sticky assignment",
        "sticky assignment, one joined",
        "moved when one joins",
        "moved when one leaves",
        "pause of partitions that stay, cooperative",
        "a rebalance, cooperative",
        "one share of a shared group, round_robin",
        "one share of a shared group, least_loaded",
    },
}


LONG = {"backpressure", "recovery", "spark_read"}
"""They take half a minute, however small."""


@pytest.mark.parametrize(
    "benchmark", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in PROMISES]
)
def test_benchmark_judges_each_of_its_promises_and_leaves_nothing_behind(
    benchmark: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", "--json", "--data", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (KEPT, BROKEN), done.stderr
    report = json.loads(done.stdout)
    assert {promise["name"] for promise in report["promises"]} == PROMISES[benchmark]
    assert report["is_kept"] == (done.returncode == KEPT)
    assert {"cores", "load", "file_system"} <= set(report["settings"])
    assert list(tmp_path.iterdir()) == []
