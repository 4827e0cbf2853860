"""A broker in another process, for benchmarks of the wire: ``sparrow up`` with default settings."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import measure

_UP = "from sparrow.cli.main import main; main()"
_STOP_TIMEOUT_S = 60


class RemoteProcess(NamedTuple):
    """A broker that runs."""

    url: str
    pid: int
    http: str


@contextmanager
def broker(directory: Path, **settings: object) -> Iterator[RemoteProcess]:
    """``sparrow up`` on a directory, until the block ends; settings are named as in the environment, without
    the prefix: ``JOURNAL__FILE_BYTES``."""
    words = ["up", "--json", "--data", str(directory), "--log-level", "error"]
    for listener in ("--http", "--tcp", "--grpc"):
        words += [listener, "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-c", _UP, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=measure.ROOT,
        env=measure.environment() | {f"SPARROW_{name}": str(value) for name, value in settings.items()},
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        yield RemoteProcess(started["tcp"], process.pid, started["http"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_STOP_TIMEOUT_S)
