"""Every command of docs/guides/operations.md runs, in the order of the page, against one broker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparrow.server.exposition import COUNTED

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "operations.md"
TIMEOUT_S = 60.0
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines behind the prompts."""
    lines = [line for block in _BLOCK.findall(PAGE.read_text()) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The command, and a broker at the address that it has in the page."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sparrow").write_text(f'#!/bin/sh\nexec {sys.executable} -m sparrow.cli.main "$@"\n')
    (folder / "sparrow").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    kept["PATH"] = f"{folder}{os.pathsep}{kept['PATH']}"
    addresses = ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    process = subprocess.Popen(
        ["sparrow", "up", "--data", str(tmp_path / "data"), *addresses, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=kept,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        http = started["http"].removeprefix("http://")
        other = {"SPARROW_TCP": "127.0.0.1:0", "SPARROW_GRPC": "127.0.0.1:0"}
        yield {**kept, **other, "SPARROW_HTTP": http, "SPARROW_URL": started["tcp"], "HTTP": http}
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def test_every_command_of_the_page_runs(environment: dict[str, str], tmp_path: Path) -> None:
    http = environment.pop("HTTP")
    assert len(commands()) > 35
    for command in commands():
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command.replace("localhost:8080", http)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if "%{http_code}" in command:
            assert done.stdout.endswith("503\n"), "in maintenance"
    bundle = zipfile.ZipFile(tmp_path / "support.zip").namelist()
    assert "sparrow/metrics.txt" in bundle
    assert {"sparrow/doctor.json", *bundle} <= set(zipfile.ZipFile(tmp_path / "doctor.zip").namelist())


def test_every_metric_is_in_the_table_of_the_page(environment: dict[str, str]) -> None:
    http = environment.pop("HTTP")
    scrape = ["curl", "-sf", f"http://{http}/metrics"]
    text = subprocess.run(scrape, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) > 30
    page = PAGE.read_text()
    short = {f"sparrow_messages_{field}_total": f"_{field}_" for field in COUNTED}
    for name in names:
        told = [name, short.get(name, name), "_" + name.removeprefix("sparrow_journal_")]
        is_told = any(f"`{each}`" in page for each in told) or name.startswith(("process_", "sparrow_p"))
        assert is_told, name
