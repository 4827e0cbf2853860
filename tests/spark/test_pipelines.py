"""The sample pipelines under ``sparrow up``, through the public surface: one broker process, one runner."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.dataset as ds
import pytest

import sparrow

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 600.0
CALL = "from sparrow.cli.main import main; main()"
BAD = {
    b"{broken": "malformed",
    b'{"id": "n", "country": "de", "amount": -5, "ordered_at": "2026-03-01T10:00:00Z"}': (
        "the amount is positive"
    ),
    b'{"id": "c", "amount": 5, "ordered_at": "2026-03-01T10:00:00Z"}': "the order has a country",
}
FRAGILE = """
from pyspark.sql import functions as F
import sparrow

@sparrow.pipeline("fragile", source={"topic": "lots.#", "start": "earliest"}, sinks=[{"topic": "numbers"}],
                  trigger="200ms")
def fragile(source):
    return source.select(F.expr("CAST(CAST(data AS STRING) AS INT)").alias("number"))
"""


def wait_for(what: Callable[[], Any], said: Callable[[], Any] = lambda: "") -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError(f"it did not come to that: {said()}")


class Up:
    """``sparrow up`` with a home for its pipelines."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
        settings = {
            "SPARROW_PIPELINES__HOME": str(self.home),
            "SPARROW_PIPELINES__MASTER": "local[2]",
            "SPARROW_PIPELINES__DRIVER_MEMORY": "700m",
            "SPARROW_PIPELINES__BACKOFF_MIN_S": "0.2",
            "SPARROW_PIPELINES__BACKOFF_MAX_S": "1.0",
        }
        words = ["up", "--json", "--data", str(directory / "data"), "--log-level", "info"]
        for listener in ("--http", "--tcp", "--grpc"):
            words += [listener, "127.0.0.1:0"]
        self.log = (directory / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALL, *words],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env={**kept, **settings},
        )
        assert self.process.stdout is not None
        start = json.loads(self.process.stdout.readline())
        self.http, self.tcp = start["http"], start["tcp"]
        self.client = sparrow.connect(self.tcp)

    def command(self, *words: object) -> Any:
        """What a command prints as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", CALL, *map(str, words), "--url", self.tcp, "--json"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def runner(self) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "sparrow.spark.pipelines.runner" in child.cmdline():
                    return child
        return None

    def lag(self, *names: str) -> int:
        lags = self.client.lag()
        return sum(lags[name].depth for name in names)

    def settled(self, *names: str) -> None:
        """Waits until these pipelines have done everything."""
        wait_for(
            lambda: self.lag(*names) == 0,
            lambda: [(p.pipeline.name, p.state, p.lag, p.error) for p in self.client.pipelines()],
        )

    def read(self, topic: str) -> list[Any]:
        if topic not in [each.name for each in self.client.topics()]:
            return []
        return self.client.read(topic, max_messages=10_000)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.log.close()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path)
    yield started
    started.close()


def orders(first: int, many: int) -> list[bytes]:
    """Orders of two countries; one in five is large."""
    return [
        json.dumps(
            {
                "id": f"o-{number}",
                "country": ("de", "us")[number % 2],
                "amount": 5000.0 if number % 5 == 0 else 10.0,
                "ordered_at": f"2026-03-01T10:00:{number % 60:02d}Z",
            }
        ).encode()
        for number in range(first, first + many)
    ]


def revenue_of(up: Up) -> dict[str, float]:
    """The newest figure of each country."""
    rows = [json.loads(message.data) for message in up.read("revenue.per-country")]
    return {row["country"]: row["revenue"] for row in rows}


@pytest.mark.soak
def test_the_sample_pipelines_run_as_subscriptions_do(up: Up) -> None:
    client = up.client
    assert up.runner() is None, "no JVM while there is nothing to run"
    client.create_topic("orders.eu", partitions=2)
    client.publish_batch("orders.eu", [*orders(0, 20), *BAD])

    applied = up.command("pipeline", "apply", ROOT / "examples" / "pipelines")
    assert [each["pipeline"]["name"] for each in applied] == ["archive", "fraud", "revenue"]
    assert {each.policy.delivery for each in client.subscriptions()} == {"pipeline"}
    up.settled("archive", "fraud", "revenue")

    # What they made of it.
    alerts = [json.loads(message.data)["id"] for message in up.read("alerts.fraud")]
    assert sorted(alerts) == ["o-0", "o-10", "o-15", "o-5"]
    assert up.read("alerts.fraud")[0].attributes["rule"] == "large-order"
    assert revenue_of(up) == {"de": 2 * 5000.0 + 8 * 10.0, "us": 2 * 5000.0 + 8 * 10.0}
    table = ds.dataset(up.home / "tables" / "orders", partitioning="hive").to_table()
    assert Counter(table.column("data").to_pylist()) == Counter([*orders(0, 20), *BAD])
    assert set(table.column("topic").to_pylist()) == {"orders.eu"}

    # Bad rows are dead letters with the reason, seen like those of any subscription.
    letters = {letter.message.data: letter.reason for letter in client.dead_letters("revenue").list()}
    assert letters == BAD
    status = up.command("pipeline", "status", "revenue")
    assert (status["state"], status["lag"], status["dead_letters"], status["error"]) == ("running", 0, 3, "")
    assert status["progress"]["batch_s"] > 0
    wait_for(lambda: 'sparrow_lag_messages{subscription="revenue"} 0' in httpx.get(f"{up.http}/metrics").text)
    assert 'sparrow_pipeline_running{pipeline="revenue"} 1' in httpx.get(f"{up.http}/metrics").text

    # Stop, start.
    assert up.command("pipeline", "stop", "fraud", "--wait")["state"] == "stopped"
    client.publish_batch("orders.eu", orders(20, 10))
    up.settled("revenue")
    assert up.lag("fraud") == 10
    assert len(up.read("alerts.fraud")) == 4
    up.command("pipeline", "start", "fraud")
    up.settled("fraud")
    assert len(up.read("alerts.fraud")) == 6

    # kill -9 of the runner: it comes back, and every message counts once.
    killed = up.runner()
    assert killed is not None
    client.publish_batch("orders.eu", orders(30, 10))
    killed.kill()
    client.publish_batch("orders.eu", orders(40, 10))
    up.settled("archive", "fraud", "revenue")
    assert up.runner() != killed
    alerts = [json.loads(message.data)["id"] for message in up.read("alerts.fraud")]
    assert Counter(alerts) == Counter(f"o-{number}" for number in range(0, 50, 5))
    assert revenue_of(up) == {"de": 5 * 5000.0 + 20 * 10.0, "us": 5 * 5000.0 + 20 * 10.0}
    table = ds.dataset(up.home / "tables" / "orders", partitioning="hive").to_table()
    assert Counter(table.column("data").to_pylist()) == Counter([*orders(0, 50), *BAD])

    # Seek: the pipeline goes on from there, in a run of its own.
    assert up.command("pipeline", "seek", "fraud", "earliest")["run"] == 1
    wait_for(lambda: client.pipeline("fraud").state == "running")
    up.settled("fraud")
    assert len(up.read("alerts.fraud")) == 20

    # A row at which the transformation itself fails.
    (up.home.parent / "fragile.py").write_text(FRAGILE)
    client.publish_batch("lots.a", [b"1", b"2", b"three", b"4"])
    up.command("pipeline", "apply", up.home.parent / "fragile.py")
    up.settled("fragile")
    assert [json.loads(message.data)["number"] for message in up.read("numbers")] == [1, 2, 4]
    (letter,) = client.dead_letters("fragile").list()
    assert (letter.message.data, letter.reason) == (b"three", "poison")
    assert "CAST_INVALID_INPUT" in letter.last_error

    # The end takes the runner along.
    last = up.runner()
    assert last is not None
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0
    wait_for(lambda: not last.is_running() or last.status() == psutil.STATUS_ZOMBIE)
