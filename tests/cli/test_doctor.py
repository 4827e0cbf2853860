"""``sparrow doctor`` and ``sparrow bench``."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from sparrow.cli import checks


def examine(sparrow: Any, *words: object, code: int = 0) -> dict[str, dict[str, str]]:
    found = json.loads(sparrow.bare("doctor", "--data", sparrow.data, "--json", *words, code=code))
    return {check["name"]: check for check in found["checks"]}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that are free on any machine."""
    for name in ("TCP", "HTTP", "GRPC"):
        monkeypatch.setenv(f"SPARROW_{name}", "127.0.0.1:0")


@pytest.mark.usefixtures("free")
def test_a_fit_machine_without_a_broker_is_warned_only(sparrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.cli.target.URL_DEFAULT", "sparrow://127.0.0.1:1")
    monkeypatch.setattr("sparrow.cli.target.CONNECT_S", 0.1)
    found = examine(sparrow)
    assert {found[name]["level"] for name in ("python", "pyarrow", "data", "port 0")} == {"ok"}
    assert {"disk space", "disk sync", "open files", "clock", "java"} <= set(found)
    assert found["broker"]["level"] == "warn"
    assert "sparrow up" in found["broker"]["advice"]
    assert examine(sparrow, "--strict", code=1)
    assert list(sparrow.data.iterdir()) == []


@pytest.mark.usefixtures("free")
def test_a_broker_that_was_named_must_answer(sparrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.cli.target.CONNECT_S", 0.1)
    found = examine(sparrow, "--url", "sparrow://127.0.0.1:1", code=1)
    assert found["broker"]["level"] == "fail"


def test_a_taken_port_is_a_failure_that_names_who_has_it(
    sparrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparrow.cli.target.CONNECT_S", 0.1)
    monkeypatch.setattr(checks, "_command", lambda process: "somebody")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SPARROW_HTTP", f"127.0.0.1:{port}")
        found = examine(sparrow, code=1)[f"port {port}"]
    assert found["level"] == "fail"
    assert "taken by process" in found["message"]


def test_a_directory_that_cannot_be_used_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (found,) = checks.disk(file)
    assert (found.level, found.name) == (checks.Level.FAIL, "data")
    assert next(iter(checks.disk(tmp_path / "not" / "yet"))).level is checks.Level.OK


def test_wrong_settings_are_an_error_of_usage(sparrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_HTTP", "nowhere")
    sparrow.bare("doctor", code=2)
    assert "SPARROW_HTTP" in sparrow.err


def test_bench_says_what_it_measured_and_leaves_nothing_behind(sparrow: Any) -> None:
    words = ["--messages", "2500", "--size", "100", "--batch", "1000", "--durability", "written"]
    found = sparrow.json("bench", *words)
    assert found["settings"]["durability"] == "written"
    assert found["publish"]["messages"] == found["consume"]["messages"] == 2500
    assert found["publish"]["p50_s"] <= found["publish"]["p99_s"]
    assert sparrow.json("topic", "list") == sparrow.json("sub", "list") == []
    text = sparrow("bench", "--messages", "10", "--batch", "1")
    assert "durable: receipts after fdatasync" in text
    assert sparrow.error("bench", "--size", "100000", "--batch", "1000", code=2)["code"] == "INVALID_ARGUMENT"
