"""The main commands against a broker in another process, over TCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import sparrow as package

COMMAND = [sys.executable, "-m", "sparrow.cli.main"]
TIMEOUT_S = 60.0


class Remote:
    """``sparrow`` with ``--url`` filled in."""

    def __init__(self, commands: Any, url: str) -> None:
        self._commands = commands
        self.url = url

    def __call__(self, *words: object, code: int = 0, input: str | None = None) -> str:
        out: str = self._commands.bare(*words, "--url", self.url, code=code, input=input)
        return out

    def json(self, *words: object, input: str | None = None) -> Any:
        return json.loads(self(*words, "--json", input=input))

    def lines(self, *words: object) -> list[Any]:
        return [json.loads(line) for line in self(*words, "--json").splitlines()]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that runs for the tests of this file."""
    data = tmp_path_factory.mktemp("tcp") / "data"
    addresses = ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*COMMAND, "up", "--data", str(data), *addresses, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")},
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["tcp"]
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@pytest.fixture
def remote(sparrow: Any, url: str) -> Remote:
    return Remote(sparrow, url)


def test_topics(remote: Remote) -> None:
    assert remote.json("topic", "create", "t.a", "--partitions", "2")["partitions"] == 2
    assert remote.json("topic", "update", "t.a", "--retention", "1d")["policy"]["retention_s"] == 86400
    assert len(remote.json("topic", "show", "t.a")["offsets"]) == 2
    remote("topic", "create", "t.a", code=4)
    remote("topic", "delete", "t.a", "--yes")
    remote("topic", "show", "t.a", code=3)


def test_publish_and_pull(remote: Remote) -> None:
    remote("sub", "create", "p", "p.#", "--ack-deadline", "1m")
    ids = remote("publish", "p.a", "x", "y", "--key", "k", "-a", "env=prod", "--publisher", "me").split()
    assert [(m["id"], m["data"], m["key"]) for m in remote.lines("pull", "p", "--timeout", "10s")] == [
        (ids[0], "x", "k"),
        (ids[1], "y", "k"),
    ]
    lines = "".join(f"{number}\n" for number in range(12_000))
    assert remote.json("publish", "p.b", "-", input=lines)["messages"] == 12_000
    assert remote.json("sub", "lag", "p")["p"]["depth"] == 12_000
    assert remote("pull", "p", "--max", "3", "--format", "raw", "--timeout", "10s") == "0\n1\n2\n"
    remote("sub", "pause", "p")
    remote("sub", "resume", "p")
    assert remote.json("sub", "show", "p")["lag"]["depth"] == 11_997


def test_what_is_pulled_without_ack_comes_again(remote: Remote) -> None:
    remote("sub", "create", "n", "n")
    remote("publish", "n", "x")
    for _ in range(2):
        (found,) = remote.lines("pull", "n", "--no-ack", "--timeout", "10s")
        assert found["attempt"] == 1


def test_tail_reads_without_taking(remote: Remote) -> None:
    for number in range(3):
        remote("publish", "w.a", str(number), "-a", f"n={number % 2}")
    assert [m["data"] for m in remote.lines("tail", "w.#", "--last", "2")] == ["1", "2"]
    found = remote.lines("tail", "w.a", "--from", "earliest", "--filter", 'attributes.n = "0"')
    assert [m["data"] for m in found] == ["0", "2"]


def test_seek_snapshot_trace_and_groups(remote: Remote) -> None:
    remote("sub", "create", "g", "g")
    (first, _) = remote("publish", "g", "x", "y").split()
    remote("snapshot", "create", "g", "g-1")
    assert remote.json("seek", "g", "latest")["lag"] == 0
    assert remote.json("seek", "g", "g-1")["lag"] == 2
    assert remote.json("seek", "g", "1h ago")["lag"] == 2
    assert remote.json("seek", "g", "g/0=1")["lag"] == 1
    assert [each["subscription"] for each in remote.json("trace", first)] == ["g"]
    assert "g" in [each["subscription"] for each in remote.json("group", "list", "--all")]
    assert remote.json("group", "commit", "g", "g", "0", "2")["lag"] == 0
    remote("snapshot", "delete", "g-1")


def test_dead_letters(remote: Remote) -> None:
    with package.connect(remote.url) as broker:
        retry = {"max_attempts": 1, "min_backoff_s": 0}
        handle = broker.subscribe("d", "d.in", dead_letter_topic="d.dead", retry=retry)
        broker.publish_batch("d.in", [b"1", b"2", b"3"])
        taken: list[Any] = []
        while len(taken) < 3:
            taken += handle.pull(3, 10.0)
        handle.nack(taken, reason="broken")
        handle.flush()
    assert remote.json("dlq", "stats", "d")["messages"] == 3
    (first, *_) = remote.json("dlq", "list", "d")
    assert (first["last_error"], first["message"]["data"]) == ("broken", "1")
    assert remote.json("dlq", "replay", "d", "--dry-run")["total"] == 3
    done = remote.json("dlq", "replay", "d", "--id", first["message_id"], "--wait")
    assert (done["status"], done["replayed"]) == ("completed", 1)
    assert remote.json("dlq", "purge", "d", "--yes")["messages"] == 2
    assert [m["id"] for m in remote.lines("pull", "d", "--timeout", "10s")] == [first["message_id"]]


def test_bench_and_doctor(remote: Remote, sparrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TCP", "HTTP", "GRPC"):
        monkeypatch.setenv(f"SPARROW_{name}", "127.0.0.1:0")
    found = remote.json("bench", "--messages", "2000", "--size", "100", "--batch", "500")
    assert found["consume"]["messages"] == 2000
    done = sparrow.bare("doctor", "--url", remote.url, "--data", sparrow.data, "--json", code=0)
    checks = {check["name"]: check for check in json.loads(done)["checks"]}
    assert checks["broker"]["level"] == "ok"


def test_the_environment_names_the_broker(
    remote: Remote, sparrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARROW_URL", remote.url)
    assert isinstance(json.loads(sparrow.bare("topic", "list", "--json")), list)


def test_follow_shows_new_topics_and_outlives_deleted_ones(remote: Remote) -> None:
    command = [*COMMAND, "tail", "f.#", "--follow", "--format", "raw", "--url", remote.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        remote("publish", "f.a", "one")
        assert process.stdout.readline() == "one\n"
        remote("topic", "delete", "f.a", "--yes")
        remote("publish", "f.b", "two")
        assert process.stdout.readline() == "two\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()
        process.communicate()


def test_the_members_of_a_group_are_shown_with_what_they_have(remote: Remote) -> None:
    remote("topic", "create", "m", "--partitions", "2")
    remote("sub", "create", "m", "m", "--group", "partitioned", "--set", "group.strategy=range")
    with package.connect(remote.url) as broker:
        member = broker.subscription("m").join("ann")
        remote("publish", "m", "x")
        while not member.pull(1, 10.0):
            pass
        shown = remote.json("group", "show", "m")
        assert [each["name"] for each in shown["members"]] == ["ann"]
        assert shown["members"][0]["assignment"] == [
            {"topic": "m", "partition": 0},
            {"topic": "m", "partition": 1},
        ]
        assert remote.json("group", "rebalance", "m")["group"]["members"] == 1
        member.leave()
