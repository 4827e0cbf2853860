"""Examines segment files of which nothing is known to be sound, in a process of its own.

The Parquet library trusts a footer: a flipped bit in one can end the process. With a catalog a footer's
checksum is compared before it is parsed; without one there is nothing to compare. So a child process
reads such files one after the other, and when it dies twice over one, that file is damaged and a new
child goes on with the next. Requests and reports are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sparrow.model.errors import DataDamaged, StorageError
from sparrow.model.message import StreamId
from sparrow.store.catalog_tables import Segment
from sparrow.store.offline.soundness import Flaw, Rescue, examine, flaws, rescues, stated_names

_READY = b"ready\n"


class Request(msgspec.Struct):
    """A file, and the topic and stream that its place says it belongs to."""

    path: str
    topic: str
    stream: StreamId


class Report(msgspec.Struct):
    """What the file says of itself, and whether it is true."""

    names: dict[str, str] = {}
    segment: Segment | None = None
    """None when the file is damaged."""
    holes: list[Flaw] = []
    complaint: str = ""
    rescues: list[Rescue] = []


class Examiner:
    """The child process, started when it is first needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def examine(self, path: Path, topic: str, stream: StreamId, listed: Segment | None = None) -> Report:
        """The report on one file; a file that ends the child is damaged. When a row of the catalog vouches
        for its footer, no child is needed."""
        if listed is not None and not flaws(path, listed, _ignore, footer_only=True):
            return report(Request(str(path), topic, stream))
        request = msgspec.json.encode(Request(str(path), topic, stream)) + b"\n"
        # A child can also die for reasons of its own, so that one death proves nothing.
        line = self._ask(request) or self._ask(request)
        if not line:
            return Report(complaint="its metadata is damaged: the Parquet library stops over it")
        return msgspec.json.decode(line, type=Report)

    def _ask(self, request: bytes) -> bytes:
        """The child's answer; empty when it died over it."""
        child = self._child = self._child or _start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.close()
        return line


def _start() -> subprocess.Popen[bytes]:
    """A child that has said that it can work: no file may be blamed for one that cannot."""
    child = subprocess.Popen(
        [sys.executable, "-m", "sparrow.store.offline.examiner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # The library's last words are for nobody.
    )
    assert child.stdout is not None
    if child.stdout.readline() != _READY:
        child.kill()
        child.communicate()
        raise StorageError(
            "the process that reads segments does not start",
            hint="Nothing was changed. Check that Python can start another process, then try again.",
        )
    return child


def report(request: Request) -> Report:
    """Examines one file; runs in the child."""
    path = Path(request.path)
    names = stated_names(path)
    try:
        segment, holes = examine(path, request.stream, request.topic, _ignore)
        return Report(names, segment, holes)
    except DataDamaged as error:
        found = rescues(path, request.stream, request.topic)
        return Report(names, complaint=error.message, rescues=found)


def serve() -> None:
    """Answers until the other side goes away."""
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        answer = report(msgspec.json.decode(line, type=Request))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _ignore(count: int) -> None:
    """The other side counts files."""


if __name__ == "__main__":
    serve()
