"""Every command of docs/guides/cli.md runs, in the order of the page, against one broker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "cli.md"
TIMEOUT_S = 60.0
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines behind the prompts."""
    lines = [line for block in _BLOCK.findall(PAGE.read_text()) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a person has who follows the page: the command, and a broker that it finds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sparrow").write_text(f'#!/bin/sh\nexec {sys.executable} -m sparrow.cli.main "$@"\n')
    (folder / "sparrow").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    kept["PATH"] = f"{folder}{os.pathsep}{kept['PATH']}"
    addresses = ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0"]
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
        free = dict.fromkeys(("SPARROW_TCP", "SPARROW_HTTP", "SPARROW_GRPC"), "127.0.0.1:0")
        yield {**kept, **free, "SPARROW_URL": json.loads(process.stdout.readline())["tcp"]}
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def test_every_command_of_the_page_runs(environment: dict[str, str], tmp_path: Path) -> None:
    assert len(commands()) > 40
    for command in commands():
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr


def test_every_command_of_the_program_is_on_the_page() -> None:
    from sparrow.cli.main import GROUPS

    told = " ".join(commands()) + PAGE.read_text()
    for group in GROUPS:
        if group.name not in ("config", "log"):
            assert f"sparrow {group.name}" in told, group.name
