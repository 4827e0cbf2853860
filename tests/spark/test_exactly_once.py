"""Exactly once, proved: a streaming query from topic to topic that is killed at random moments.

Driver, broker and Python workers are killed with SIGKILL while messages flow. In the end the topic that is
written holds what the other one holds: nothing is lost, nothing is doubled, and the messages of each key are
in their order. A run of the suite kills four times; ``-m soak`` kills twenty times.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sparrow

pytestmark = pytest.mark.soak
"""Minutes of Spark: `make test-spark` runs them."""

ROOT = Path(__file__).resolve().parents[2]
KEYS = 40
BACKLOG_MAX = 2000
PATIENCE_S = 240.0


def until(house: House, is_so: Callable[[], Any], what: str) -> Any:
    """Waits for a condition; what it found. Broker and driver must not die by themselves meanwhile."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        house.check()
        with contextlib.suppress(sparrow.SparrowError):
            found = is_so()
            if found:
                return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {PATIENCE_S:g} s; {house.folder} has the logs")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class House:
    """A broker and a driver, both processes of their own, that are started again after each kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"sparrow://127.0.0.1:{self.port}"
        self.broker = self._start_broker()
        self.driver = self._start_driver()

    def _start_broker(self) -> subprocess.Popen[bytes]:
        script = str(ROOT / "tests" / "spark" / "broker.py")
        with (self.folder / "broker.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, script, str(self.port), str(self.folder / "data")],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def _start_driver(self) -> subprocess.Popen[bytes]:
        script = str(ROOT / "tests" / "spark" / "relay.py")
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, script, self.url, str(self.folder / "checkpoint")],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self) -> None:
        for name, process in (("broker", self.broker), ("driver", self.driver)):
            said = (self.folder / f"{name}.log").read_text()[-3000:]
            assert process.poll() is None, f"the {name} ended by itself: {said}"

    def kill(self, victim: str) -> None:
        if victim == "broker":
            self.broker.kill()
            self.broker.wait()
            self.broker = self._start_broker()
        elif victim == "worker":
            for worker in self._workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        else:
            self._kill_driver()
            self.driver = self._start_driver()

    def _kill_driver(self) -> None:
        """The driver with its JVM and its workers: they are one session of processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.driver.pid, signal.SIGKILL)
        self.driver.wait()

    def _workers(self) -> list[int]:
        """The Python workers of the driver: they run tasks, so they are what an executor is in local mode."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                number = int(entry.name)
                if (
                    os.getsid(number) == self.driver.pid
                    and b"pyspark.daemon" in (entry / "cmdline").read_bytes()
                ):
                    found.append(number)
        return found

    def close(self) -> None:
        self._kill_driver()
        self.broker.kill()
        self.broker.wait()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


class Feeder(threading.Thread):
    """Publishes numbered messages of each key until it is told to stop, over restarts of the broker, and
    never so many that the query could not catch up."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._is_over = threading.Event()
        self.published: dict[str, int] = defaultdict(int)
        self.error: BaseException | None = None

    def run(self) -> None:
        chance = random.Random(3)
        try:
            with sparrow.connect(self._url, connect_s=PATIENCE_S, reconnect_s=PATIENCE_S) as client:
                while not self._is_over.is_set():
                    if sum(self.published.values()) - count(client, "out") > BACKLOG_MAX:
                        time.sleep(0.05)
                        continue
                    keys = [f"k{chance.randrange(KEYS)}" for _ in range(100)]
                    data = []
                    for key in keys:
                        data.append(f"{key}:{self.published[key]}".encode())
                        self.published[key] += 1
                    client.publish_batch("in", data, keys=keys)
                    time.sleep(0.02)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def stop(self) -> int:
        self._is_over.set()
        self.join()
        if self.error is not None:
            raise self.error
        return sum(self.published.values())


def count(client: Any, topic: str) -> int:
    return sum(client.bounds(topic, number).end_offset for number in range(client.topic(topic).partitions))


def has_grown(client: Any, before: int) -> bool:
    return count(client, "out") > before


def by_key(client: Any, topic: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for row in client.fetch_table(topic).select(["key", "data"]).to_pylist():
        found[row["key"]].append(row["data"].decode())
    return found


def prove(house: House, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    options = {"connect_s": PATIENCE_S, "reconnect_s": PATIENCE_S}
    with sparrow.connect(house.url, **options) as client:
        client.create_topic("in", partitions=2)
        client.create_topic("out", partitions=2)
        feeder = Feeder(house.url)
        feeder.start()
        try:
            victims = ["driver", "broker", "worker", "broker"]
            for number in range(kills):
                seen = until(house, lambda: count(client, "out"), "the first message")
                until(house, partial(has_grown, client, seen), "progress")
                time.sleep(chance.uniform(0.0, 1.0))
                house.kill(victims[number % len(victims)])
        finally:
            total = feeder.stop()
        until(house, lambda: count(client, "out") >= total, f"the arrival of {total} messages")
        expected = {key: [f"{key}:{n}" for n in range(size)] for key, size in feeder.published.items()}
        assert by_key(client, "in") == expected
        time.sleep(1.0)  # Whatever would come twice had time to come.
        assert by_key(client, "out") == expected


def test_killed_twice_every_message_arrives_once_and_in_order(house: House) -> None:
    prove(house, kills=2, seed=1)


@pytest.mark.soak
def test_killed_twenty_times_every_message_arrives_once_and_in_order(house: House) -> None:
    prove(house, kills=20, seed=2)
