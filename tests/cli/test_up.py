"""``sparrow up`` and its neighbours, as real processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sparrow.cli.main import GROUPS, exit_code
from sparrow.model import errors

STOP_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0
RSS_BYTES_MAX = 120 * 1000 * 1000

# A broker whose close never ends, to show what a second signal does.
STUBBORN_BROKER = """
import asyncio
from sparrow.broker.broker import Broker

async def close(self):
    await asyncio.Event().wait()

Broker.close = close
"""

CALL = "\nfrom sparrow.cli.main import main\nmain()\n"


def command(*words: str, prelude: str = "") -> list[str]:
    return [sys.executable, "-c", prelude + CALL, *words]


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    return {**kept, **extra}


def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=START_TIMEOUT_S, env=environment(**extra)
    )


class Up:
    """A running broker process, known by the line of JSON it starts with."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"the broker did not start: {process.communicate()[1]}")
        self.start: dict[str, Any] = json.loads(line)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.start["http"] + path)

    def stop(self, number: int) -> tuple[int, str]:
        """The exit code and what was logged, after a signal."""
        self.process.send_signal(number)
        _, logged = self.process.communicate(timeout=STOP_TIMEOUT_S)
        return self.process.returncode, logged


@contextlib.contextmanager
def up(data: Path, *words: str, prelude: str = "") -> Iterator[Up]:
    process = subprocess.Popen(
        command(
            "up",
            "--data",
            str(data),
            "--http",
            "127.0.0.1:0",
            "--tcp",
            "127.0.0.1:0",
            "--json",
            *words,
            prelude=prelude,
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield Up(process)
    finally:
        process.kill()
        process.communicate()


# Starting and stopping.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_broker_starts_answers_health_and_stops_cleanly_on_a_signal(tmp_path: Path, number: int) -> None:
    with up(tmp_path / "data") as broker:
        assert broker.get("/health/live").status_code == 200
        ready = broker.get("/health/ready")
        assert ready.status_code == 200
        assert ready.json()["status"] == "healthy"
        code, logged = broker.stop(number)
    assert code == 0
    events = [json.loads(line)["event_type"] for line in logged.splitlines()]
    assert [event for event in events if event.startswith("broker-stop")] == [
        "broker-stopping",
        "broker-stopped",
    ]
    assert events[-1] == "broker-stopped"
    assert "broker-started" in events


def test_an_open_connection_does_not_keep_a_broker_from_stopping(tmp_path: Path) -> None:
    with up(tmp_path / "data") as broker, httpx.Client() as client:
        client.get(broker.start["http"] + "/health/live")
        assert broker.stop(signal.SIGTERM)[0] == 0


def test_a_second_signal_ends_a_broker_that_does_not_stop(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--tcp", "none", prelude=STUBBORN_BROKER) as broker:
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.stderr is not None
        while "broker-stopping" not in broker.process.stderr.readline():
            pass
        assert broker.stop(signal.SIGTERM)[0] == 128 + signal.SIGTERM


def test_an_idle_broker_stays_small(tmp_path: Path) -> None:
    with up(tmp_path / "data") as broker:
        broker.get("/health/ready")
        assert psutil.Process(broker.process.pid).memory_info().rss < RSS_BYTES_MAX


def test_a_terminal_gets_readable_lines_and_logs_stay_on_standard_error(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("up", "--data", str(tmp_path / "data"), "--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0"),
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TERM="dumb", COLUMNS="200"),
    )
    os.close(theirs)
    try:
        assert process.stderr is not None
        started = next(line for line in process.stderr if "broker-started" in line)
        shown = os.read(ours, 65536).decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert json.loads(started)["details"]["http"] in shown
    assert str(tmp_path / "data") in shown
    assert "Ctrl-C" in shown
    assert "event_type" not in shown


# Refusals.


def test_a_taken_port_is_a_clear_error_before_the_data_directory_is_touched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("up", "--data", str(tmp_path / "data"), "--http", address, "--tcp", "none")
    assert done.returncode == 5
    assert f"error: cannot listen on {address}: another process listens there" in done.stderr
    assert "hint: " in done.stderr
    assert "code: ADDRESS_UNAVAILABLE" in done.stderr
    assert not (tmp_path / "data").exists()


def test_wrong_settings_are_all_listed_at_once(tmp_path: Path) -> None:
    config = tmp_path / "sparrow.yaml"
    config.write_text("journal:\n  file_byte: 1\n", encoding="utf-8")
    done = run("up", "--config", str(config), "--http", "nowhere", SPARROW_LOG__LEVEL="loud")
    assert done.returncode == 2
    assert "3 settings are wrong" in done.stderr
    assert f"file {config}: journal.file_byte: unknown key; did you mean journal.file_bytes?" in done.stderr
    assert "environment SPARROW_LOG__LEVEL: log.level: is 'loud'" in done.stderr
    assert "flag --http: http: is 'nowhere'" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_json_an_error_is_one_line_of_json() -> None:
    done = run("up", "--http", "nowhere", "--json")
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "INVALID_SETTINGS"
    assert len(error["details"]["problems"]) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidSettings, 2),
        (errors.TopicNotFound, 3),
        (errors.TopicInUse, 4),
        (errors.Backlogged, 6),
        (errors.DataDirectoryLocked, 7),
        (errors.AddressUnavailable, 5),
        (errors.ConnectionLost, 5),
        (errors.SparrowError, 1),
    ],
)
def test_each_kind_of_error_has_its_documented_exit_code(error: type[errors.SparrowError], code: int) -> None:
    assert exit_code(error("x")) == code


# The rest of the command line.


def test_config_show_tells_each_value_and_where_it_came_from(tmp_path: Path) -> None:
    config = tmp_path / "sparrow.yaml"
    config.write_text("data: /d\n", encoding="utf-8")
    done = run("config", "show", "--json", "--config", str(config), SPARROW_TCP="127.0.0.1:1")
    shown = json.loads(done.stdout)
    assert shown["data"] == {"value": "/d", "source": f"file {config}"}
    assert shown["tcp"] == {"value": "127.0.0.1:1", "source": "environment SPARROW_TCP"}
    assert shown["log.level"] == {"value": "info", "source": "default"}


def test_config_show_prints_a_table_for_people() -> None:
    done = run("config", "show", COLUMNS="200")
    assert done.returncode == 0
    assert "journal.file_bytes" in done.stdout


def test_the_version_is_printed() -> None:
    assert run("--version").stdout.startswith("sparrow 0.")


def test_help_lists_every_installed_group_without_loading_one() -> None:
    program = (
        "import sys\nfrom sparrow.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'aiohttp', 'pyarrow', 'uvicorn', 'structlog'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for group in GROUPS:
        if importlib.util.find_spec(group.module) is not None:
            assert group.help in done.stdout


def test_an_unknown_command_is_refused_with_the_nearest_known_one() -> None:
    done = run("cnfig")
    assert done.returncode == 2
    assert "config" in done.stderr
