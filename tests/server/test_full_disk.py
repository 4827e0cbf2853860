"""A disk that is really full, beneath a broker that is really up, as its HTTP callers see it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

MIB = 1024 * 1024
PATIENCE_S = 30.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB; where one cannot be mounted there is nothing to see."""
    directory = tmp_path / "disk"
    directory.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here, and so no small disk")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def http(small_disk: Path) -> Iterator[httpx.Client]:
    """A broker on the small disk."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    words = ["up", "--data", str(small_disk / "data"), "--http", "127.0.0.1:0", "--tcp", "none", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sparrow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=kept | {"SPARROW_JOURNAL__FILE_BYTES": str(4 * MIB)},
    )
    try:
        assert process.stdout is not None
        with httpx.Client(base_url=json.loads(process.stdout.readline())["http"], timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=60)


def publish(http: httpx.Client, number: int) -> httpx.Response:
    padding = random.Random(number).randbytes(50_000).hex()  # Nothing that could be compressed away.
    return http.post("/v1/topics/orders/messages", json={"data": {"number": number, "padding": padding}})


def publish_until(http: httpx.Client, status: int, number: int) -> tuple[list[int], httpx.Response]:
    """The numbers that were accepted until an answer came with this status, and that answer."""
    accepted = []
    until_s = monotonic() + PATIENCE_S
    while monotonic() < until_s:
        answer = publish(http, number)
        if answer.status_code == 202:
            accepted.append(number)
        if answer.status_code == status:
            return accepted, answer
        number += 1
        sleep(0.0 if answer.status_code == 202 else 0.2)
    pytest.fail(f"no answer {status} in {PATIENCE_S} s; the last was {answer.status_code}: {answer.text}")


def receive(http: httpx.Client, count: int) -> list[dict[str, Any]]:
    """So many messages, acknowledged where that can be."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        body = {"max_messages": 20, "timeout_ms": 2000}
        answer = http.post("/v1/subscriptions/workers/pull", json=body)
        assert answer.status_code == 200, answer.text
        messages = answer.json()["messages"]
        assert messages, f"{len(found)} of {count} messages came"
        found += messages
    return found


def test_a_full_disk_refuses_publishes_delivers_on_and_recovers_by_itself(
    http: httpx.Client, small_disk: Path
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(24 * MIB))
    assert http.post("/v1/topics", json={"name": "orders"}).status_code == 201
    wanted = {"name": "workers", "topic_id": "orders", "ack_deadline_s": 600}
    assert http.post("/v1/subscriptions", json=wanted).status_code == 201

    accepted, refused = publish_until(http, 507, 0)
    error = refused.json()["error"]
    assert error["code"] == "STORAGE_FULL"
    assert "Free disk space" in error["hint"]
    assert len(accepted) > 50
    assert http.get("/health/live").status_code == 200
    assert http.get("/health/ready").status_code == 503

    half = len(accepted) // 2
    first = receive(http, half)
    assert publish(http, 1_000_000).status_code == 507, "it is still full"

    ballast.unlink()
    again, _ = publish_until(http, 202, 2_000_000)
    assert http.get("/health/ready").status_code == 200

    rest = receive(http, len(accepted) + len(again) - len(first))
    seen = [message["data"]["number"] for message in first + rest]
    assert sorted(seen) == sorted(accepted + again), "every accepted message came, once, and no refused one"
    ids = [message["ack_id"] for message in first + rest]
    answer = http.post("/v1/subscriptions/workers/acknowledge", json={"ack_ids": ids})
    assert answer.status_code == 204, answer.text
    assert http.post("/v1/subscriptions/workers/pull", json={"timeout_ms": 0}).json()["messages"] == []
