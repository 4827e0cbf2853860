"""Every command of docs/guides/security.md runs, in the order of the page, and is refused as it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "security.md"
TIMEOUT_S = 60.0
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Step(NamedTuple):
    """A command, and how its error begins when it must fail."""

    command: str
    error: str = ""


def steps() -> list[Step]:
    found: list[Step] = []
    for block in _BLOCK.findall(PAGE.read_text()):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Step(line.removeprefix("$ ")))
            else:
                found[-1] = found[-1]._replace(error=line)
    return found


class Shell:
    """A person who follows the page: exported variables stay, and a broker goes on in the background."""

    def __init__(self, root: Path) -> None:
        folder = root / "bin"
        folder.mkdir()
        (folder / "sparrow").write_text(f'#!/bin/sh\nexec {sys.executable} -m sparrow.cli.main "$@"\n')
        (folder / "sparrow").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
        self.environment = {**kept, "PATH": f"{folder}{os.pathsep}{kept['PATH']}"}
        self.root = root
        self.http = "http://127.0.0.1:8080"
        self.brokers = ExitStack()

    def do(self, command: str) -> subprocess.CompletedProcess[str]:
        return self._run(command.replace("http://127.0.0.1:8080", self.http))

    def export(self, setting: str) -> None:
        name, _, value = setting.partition("=")
        self.environment[name] = self._run(f"echo {value}").stdout.strip()

    def start(self, command: str) -> None:
        words = re.sub(r"0\.0\.0\.0:\d+", "0.0.0.0:0", command).split()
        process = subprocess.Popen(
            [*words, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
            cwd=self.root,
        )
        self.brokers.callback(process.wait, TIMEOUT_S)
        self.brokers.callback(process.terminate)
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        self.http = started["http"].replace("0.0.0.0", "127.0.0.1")
        self.environment["SPARROW_URL"] = started["tcp"].replace("0.0.0.0", "127.0.0.1")

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=self.environment,
            cwd=self.root,
        )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    with found.brokers:
        yield found


def test_every_command_of_the_page_does_what_it_says(shell: Shell) -> None:
    assert len(steps()) > 12
    tokens: list[str] = []
    for command, error in steps():
        if command.startswith("sparrow up") and not error:
            shell.start(command)
            continue
        if command.startswith("export "):
            shell.export(command.removeprefix("export "))
            continue
        done = shell.do(re.sub(r"0\.0\.0\.0:8080", "0.0.0.0:0", command) if error else command)
        assert (done.returncode != 0) is bool(error), f"{command}\n{done.stdout}{done.stderr}"
        assert re.sub(r":8080\b", "", error) in re.sub(r"(0\.0\.0\.0):\d+", r"\1", done.stderr), command
        assert "Traceback" not in done.stderr
        tokens = [path.read_text().strip() for path in shell.root.glob("*.token")]
        assert not [token for token in tokens if token and token in done.stdout + done.stderr], command
    assert len(tokens) == 3
    assert all(token.startswith("sparrow_") for token in tokens)
