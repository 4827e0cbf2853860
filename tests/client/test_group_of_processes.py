"""Ten processes share a subscription and one is killed: its share moves, nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparrow

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, PARTITIONS, BATCHES, BATCH = 10, 20, 40, 50
REBALANCED_S_MAX = 5.0

WORKER = """
import sys
import sparrow

url, name, out = sys.argv[1:]
with sparrow.connect(url) as broker, open(out, "a", buffering=1) as acked:
    member = broker.subscription("workers").join(name)
    print("joined", flush=True)
    while True:
        messages = member.pull(20, timeout_s=0.2)
        if messages:
            member.ack(messages, wait=True)
            acked.write("".join(message.id + "\\n" for message in messages))
"""


@contextlib.contextmanager
def broker_process(data: Path) -> Iterator[str]:
    words = ["up", "--json", "--data", str(data), "--log-level", "error"]
    for listener in ("--http", "--tcp", "--grpc"):
        words += [listener, "127.0.0.1:0"]
    command = [sys.executable, "-c", "from sparrow.cli.main import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["tcp"]
        finally:
            process.terminate()


@contextlib.contextmanager
def workers(url: str, directory: Path) -> Iterator[list[subprocess.Popen[str]]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = []
    try:
        for number in range(MEMBERS):
            command = [sys.executable, "-c", WORKER, url, f"m{number}", str(directory / f"m{number}.acked")]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("mode", ["partitioned", "shared"])
def test_one_of_ten_processes_is_killed(tmp_path: Path, mode: str) -> None:
    with broker_process(tmp_path / "data") as url, sparrow.connect(url) as broker:
        broker.create_topic("jobs", partitions=PARTITIONS)
        group = broker.subscribe("workers", "jobs", group={"mode": mode}, ack_deadline_s=5)
        with workers(url, tmp_path) as processes:
            until_stable(group, MEMBERS)
            published: set[str] = set()
            for number in range(BATCHES):
                keys = [f"k{number}-{place}" for place in range(BATCH)]
                receipts = broker.publish_batch("jobs", [b"x" * 100] * BATCH, keys=keys)
                published |= {receipt.message_id for receipt in receipts}
                if number == BATCHES // 2:
                    processes[3].send_signal(signal.SIGKILL)
                    killed_at = time.monotonic()
            until_stable(group, MEMBERS - 1)
            took_s = time.monotonic() - killed_at
            until = time.monotonic() + 30
            while group.lag():
                assert time.monotonic() < until, group.group()
                time.sleep(0.05)
            time.sleep(0.3)
    assert took_s < REBALANCED_S_MAX
    found = [path.read_text().split() for path in sorted(tmp_path.glob("*.acked"))]
    acked = [message_id for lines in found for message_id in lines]
    assert len(acked) == len(set(acked)), "a message was acked twice"
    # The killed one may have acked a pull of which it could not tell any more.
    assert published >= set(acked)
    assert len(published) - len(acked) <= 20


def until_stable(group: Any, members: int) -> None:
    until = time.monotonic() + 20
    while True:
        info = group.group()
        if info.members == members and info.state == "stable" and not info.unassigned:
            return
        assert time.monotonic() < until, info
        time.sleep(0.02)
