"""The audit log: what administrators did, one JSON document a line, in ``audit.log``.

Lines are only ever added. At ``FILE_BYTES`` the file becomes ``audit.log.1``, the one of that name
``audit.log.2``, and so on; the oldest of ``FILES_MAX`` goes. Lines are not synced: they outlive the process,
and all but those of the last moments outlive a loss of power. A line that was cut short is closed when the
file is opened again, and left out when it is read.

It is used from one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparrow.store.disk import Disk

NAME = "audit.log"
FILE_BYTES = 16 * 1024 * 1024
FILES_MAX = 5


class AuditLog:
    """The audit log of one data directory; nothing is opened before the first line."""

    def __init__(
        self, root: Path, disk: Disk, *, file_bytes: int = FILE_BYTES, files_max: int = FILES_MAX
    ) -> None:
        self._path = root / NAME
        self._disk = disk
        self._file_bytes = file_bytes
        self._files_max = files_max
        self._descriptor: int | None = None
        self._size = 0

    def append(self, line: bytes) -> None:
        """Adds a line; it holds no line break itself."""
        assert b"\n" not in line
        if self._descriptor is None:
            self._open()
        if self._size and self._size + len(line) >= self._file_bytes:
            self._rotate()
        assert self._descriptor is not None
        self._size += self._disk.write(self._descriptor, [line + b"\n"], self._size)

    def last(self, count: int) -> list[bytes]:
        """The last lines, the newest last."""
        found: list[bytes] = []
        for path in self._paths():
            lines = [line for line in _lines(path) if _is_whole(line)]
            found = lines[-(count - len(found)) :] + found
            if len(found) >= count:
                break
        return found

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._disk.close(descriptor)

    def _open(self) -> None:
        is_there = self._path.exists()
        descriptor = self._disk.open(self._path) if is_there else self._disk.create(self._path, 0)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size += self._disk.write(descriptor, [b"\n"], size)
        self._descriptor, self._size = descriptor, size

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files_max - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                self._disk.rename(older, self._numbered(number))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{NAME}.{number}") if number else self._path

    def _paths(self) -> Iterator[Path]:
        """The files, the newest first."""
        return (self._numbered(number) for number in range(self._files_max))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except msgspec.DecodeError:
        return False
