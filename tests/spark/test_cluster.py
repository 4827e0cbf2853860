"""A cluster: a standalone master and two workers from the wheel, a broker, and jobs that are submitted.

Everything is a process of its own, as it is in production; what they share is the address of the broker that
a job is told, and the file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

import sparrow
from sparrow.spark.java import prepare_java

pytestmark = pytest.mark.soak
"""Half a minute of Spark each: `make test-spark` runs them."""

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
JOB = ROOT / "examples" / "cluster" / "large_orders.py"
PATIENCE_S = 600.0
ORDERS = 400


def until(is_so: Callable[[], Any], what: str) -> Any:
    """Waits for a condition; what it found."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = is_so()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {PATIENCE_S:g} s")


class Crew:
    """Processes that are started, and all gone in the end, with whatever they started themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: object, **environ: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SPARROW_")}
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [str(word) for word in words],
                cwd=self.folder,
                env=kept | environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_for(self, name: str, pattern: str) -> re.Match[str]:
        """Waits for a line of a process that goes on."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.said(name), re.MULTILINE)
            is_over = found is None and self._processes[name].poll() is not None
            assert not is_over, f"{name} ended by itself: {self.said(name)[-3000:]}"
            return found

        found: re.Match[str] = until(look, f"{pattern!r} of {name}")
        return found

    def result(self, name: str) -> str:
        """Waits for the end of a process that does its work; what it said."""
        code = self._processes[name].wait(PATIENCE_S)
        assert code == 0, f"{name} ended with {code}: {self.said(name)[-6000:]}"
        return self.said(name)

    def stop(self, *names: str) -> None:
        """Asks, then kills. Python's workers have groups of their own, so sessions tell what is left."""
        ending = [self._processes[name] for name in names if name in self._processes]
        for process in ending:
            process.terminate()
        for process in ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
        sessions = {process.pid for process in ending}
        for number in _running():
            with contextlib.suppress(OSError):
                if os.getsid(number) in sessions:
                    os.kill(number, signal.SIGKILL)
        for process in ending:
            process.wait()

    def close(self) -> None:
        self.stop(*reversed(self._processes))


def _running() -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid="], capture_output=True, text=True, check=True)
    return [int(number) for number in listed.stdout.split()]


class Cluster:
    """A master and two workers with a core each."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.environ = {
            "JAVA_HOME": str(prepare_java()),
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        }
        self._daemon("master", "master.Master")
        self.master = crew.wait_for("master", r"Starting Spark master at (spark://\S+)")[1]
        for name in ("worker-1", "worker-2"):
            words = ("--cores", 1, "--memory", "1g", "--work-dir", crew.folder / name)
            self._daemon(name, "worker.Worker", *words, self.master)
        for name in ("worker-1", "worker-2"):
            crew.wait_for(name, "Successfully registered with master")

    def _daemon(self, name: str, kind: str, *words: object) -> None:
        listen = ("--host", "127.0.0.1", "--port", 0, "--webui-port", 0)
        program = (HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}")
        self._crew.start(name, *program, *listen, *words, **self.environ)

    def submit(self, name: str, script: Path, *words: object) -> Any:
        """Runs a job as the guide has it; the JSON that it printed."""
        settings = {
            "spark.cores.max": "2",
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.python.daemon.module": "sparrow.spark.daemon",
            # Both executors are there before the first task.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{PATIENCE_S:g}s",
        }
        flags = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        program = (HOME / "bin" / "spark-submit", "--master", self.master)
        self._crew.start(name, *program, *flags, script, *words, **self.environ)
        said = self._crew.result(name).splitlines()
        return json.loads([line for line in said if line.startswith('{"')][-1])


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(crew: Crew) -> Cluster:
    return Cluster(crew)


class BrokerProcess:
    """``sparrow up``, once it is started."""

    def __init__(self, crew: Crew, name: str, data: Path) -> None:
        self._crew = crew
        self._data = data
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._listens = f"127.0.0.1:{probe.getsockname()[1]}"
        self.servers = f"sparrow://{self._listens.replace('127.0.0.1', 'localhost')}"
        """How others reach it: by another name than the one that it listens on."""

    def start(self, **environ: str) -> None:
        flags = ("--data", self._data, "--http", "127.0.0.1:0", "--tcp", self._listens, "--json")
        self._crew.start(self.name, sys.executable, "-m", "sparrow", "up", *flags, **environ)
        self._crew.wait_for(self.name, r"^\{\"http\"")


@pytest.fixture
def broker(crew: Crew, tmp_path: Path) -> Iterator[BrokerProcess]:
    made = BrokerProcess(crew, f"broker-{tmp_path.name}", tmp_path / "data")
    yield made
    crew.stop(made.name)


def publish(client: Any, start: int, end: int) -> None:
    """Orders in every partition: half of them in files, half in the tail."""
    middle = (start + end) // 2
    for numbers in (range(start, middle), range(middle, end)):
        client.publish_batch(
            "orders",
            [
                json.dumps({"id": n, "country": "de" if n % 2 else "us", "amount": n * 10}).encode()
                for n in numbers
            ],
            keys=[f"k{n % 50}" for n in numbers],
        )
        if numbers.start == start:
            client.seal()


def large(client: Any) -> list[int]:
    """The ids of what was written, by its offsets: those of each partition begin at 0 and have no gap."""
    partitions = client.topic("orders.large").partitions
    rows = client.fetch_table("orders.large").select(["partition", "offset", "data"]).to_pylist()
    for partition in range(partitions):
        offsets = [row["offset"] for row in rows if row["partition"] == partition]
        assert offsets == list(range(client.bounds("orders.large", partition).end_offset))
    return [json.loads(row["data"])["id"] for row in rows]


def test_a_submitted_job_reads_and_writes_by_executors_and_once(
    cluster: Cluster, broker: BrokerProcess, tmp_path: Path
) -> None:
    broker.start()
    words = ("--servers", broker.servers, "--checkpoint", f"file://{tmp_path / 'checkpoint'}")
    with sparrow.connect(broker.servers) as client:
        client.create_topic("orders", partitions=4)
        client.create_topic("orders.large", partitions=2)
        publish(client, 0, ORDERS)
        told = cluster.submit("first", JOB, *words)
        assert Counter(large(client)) == dict.fromkeys(range(100, ORDERS), 1)
        publish(client, ORDERS, ORDERS + 50)
        again = cluster.submit("second", JOB, *words)  # It goes on where the first one ended.
        assert Counter(large(client)) == dict.fromkeys(range(100, ORDERS + 50), 1)
        assert client.lag()["large-orders"].depth == 0
    assert told["master"] == cluster.master
    assert told["revenue"] == {"de": sum(range(1, ORDERS, 2)) * 10, "us": sum(range(0, ORDERS, 2)) * 10}
    assert told["files"] == 4
    assert sum(task["rows"] for task in told["tasks"]) == ORDERS
    assert sum(task["rows"] for task in again["tasks"]) == ORDERS + 50
    executors = {Path(task["executor"]) for task in told["tasks"] if task["rows"]}
    assert {each.parents[1].name for each in executors} == {"worker-1", "worker-2"}


def test_pipelines_of_a_broker_run_on_the_cluster_by_the_address_that_they_are_told(
    crew: Crew, cluster: Cluster, broker: BrokerProcess
) -> None:
    before = set(crew.folder.glob("worker-*/app-*"))
    broker.start(
        **cluster.environ,
        SPARROW_PIPELINES__MASTER=cluster.master,
        SPARROW_PIPELINES__SERVERS=broker.servers,
    )
    with sparrow.connect(broker.servers) as client:
        client.create_topic("orders", partitions=4)
        publish(client, 0, ORDERS)
        client.apply_pipeline(
            {
                "name": "large",
                "source": {"topic": "orders", "start": "earliest", "schema": "id BIGINT, amount DOUBLE"},
                "sql": "SELECT id FROM source WHERE amount >= 1000",
                "sinks": [{"topic": "orders.large"}],
            }
        )
        until(lambda: client.pipeline("large").lag == 0, "the end of the batch")
        report = client.pipeline("large")
        assert (report.state, report.error) == ("running", "")
        assert Counter(large(client)) == dict.fromkeys(range(100, ORDERS), 1)
    ran = set(crew.folder.glob("worker-*/app-*")) - before
    assert ran
    assert any("Finished task" in log.read_text() for each in ran for log in each.glob("*/stderr"))
