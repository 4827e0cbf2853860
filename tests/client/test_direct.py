"""The direct line: blocking, several commands on their way, and sent again when the connection breaks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparrow.client.direct import DirectLine
from sparrow.client.staging import Piece, command
from sparrow.model.errors import ConnectionLost, InvalidArgument, StageIncomplete, TopicNotFound
from sparrow.model.settings import MIB, JournalSettings, ServerSettings, Settings
from sparrow.model.topic import Codec
from sparrow.wire import heads
from tests.spark.conftest import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "data")
    yield made
    made.close()


def stage(line: DirectLine, position: int, *payloads: bytes) -> int:
    batch = pa.record_batch({"data": pa.array(payloads, pa.binary())})
    head, body = command("t", "a", "out", Piece(batch), position, Codec.NONE)
    return line.submit(head, body)


def test_verbs_are_called_and_errors_are_typed(served: Served) -> None:
    with DirectLine(f"sparrow://{served.address}") as line:
        assert line.call("create_topic", name="out", partitions=2)["partitions"] == 2
        with pytest.raises(TopicNotFound):
            line.call("topic", name="nowhere")
        assert [topic["name"] for topic in line.call("topics")] == ["out"]


def test_several_commands_are_on_their_way_and_answers_are_theirs(served: Served) -> None:
    with DirectLine(f"sparrow://{served.address}") as line:
        numbers = [stage(line, position, f"{position}".encode() * 1000) for position in range(6)]
        calls = [line.answer(number).value["calls"] for number in reversed(numbers)]
        assert calls == [6, 5, 4, 3, 2, 1]
        with pytest.raises(StageIncomplete):
            line.answer(stage(line, 9, b"x"))
        line.call("commit_staged", application="etl", batch=0, parts=[["t", "a", 6]])
    assert [message.data[:1] for message in served.client.read("out")] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_what_has_no_answer_is_sent_again_to_the_next_broker(tmp_path: Path) -> None:
    """A broker between the line and the real one loses the first connection after some answers."""
    served = Served(tmp_path / "data")
    try:
        with Lossy(served.address) as between, DirectLine(f"sparrow://{between.address}") as line:
            numbers = [stage(line, position, bytes([position]) * 50_000) for position in range(8)]
            assert [line.answer(number).value["calls"] for number in numbers][-1] == 8
            line.call("commit_staged", application="etl", batch=0, parts=[["t", "a", 8]])
            assert between.connections == 2
        found = [message.data[0] for message in served.client.read("out")]
        assert found == list(range(8))
    finally:
        served.close()


def test_a_broker_that_stays_away_is_told_after_the_patience() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(ConnectionLost, match=f"{port}"):
        DirectLine(f"sparrow://127.0.0.1:{port}", patience_s=0.3).call("health")
    assert time.monotonic() - start < 30


def test_a_bad_address_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        DirectLine("http://127.0.0.1")


def test_a_long_wait_is_not_taken_for_death(tmp_path: Path) -> None:
    settings = Settings(journal=JournalSettings(file_bytes=MIB), server=ServerSettings(heartbeat_s=0.2))
    served = Served(tmp_path / "data", settings)
    try:
        served.client.create_topic("out")
        with DirectLine(f"sparrow://{served.address}") as line:
            line.call("health")
            session = line._socket
            number = line.submit(heads.Fetch("out", 0, 0, 1000, 2.0))  # Answered after two seconds.
            line.answer(number)
            assert line._socket is session
    finally:
        served.close()


class Lossy(threading.Thread):
    """Passes bytes on both ways; cuts the first connection after 150 KB."""

    def __init__(self, target: str) -> None:
        super().__init__(daemon=True)
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.start()

    def __enter__(self) -> Lossy:
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.close()

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            limit = 150_000 if self.connections == 1 else 1 << 60
            threading.Thread(target=_pass, args=(server, client, 1 << 60), daemon=True).start()
            threading.Thread(target=_pass, args=(client, server, limit), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, limit: int) -> None:
    passed = 0
    try:
        while passed < limit and (some := source.recv(65_536)):
            target.sendall(some)
            passed += len(some)
    except OSError:
        pass
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()  # Unread bytes make this a reset: whoever still sends hears of it at once.
