"""The disk of a simulated machine: a ``FaultyDisk`` that outlives processes.

Every life of the broker gets a directory of its own, made from what the life before left behind: ``crash``
gives what power loss leaves, ``survive`` what a killed process leaves. In the second case everything that
was written is there, and what had not been synced may still be lost by a later power loss.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sparrow.testing.disk import FaultyDisk


class SimDisk(FaultyDisk):
    """Knows its open descriptors too, so that nothing of a dead process stays open."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root, seed)
        self._open: dict[int, None] = {}

    def create(self, path: Path, size: int) -> int:
        descriptor = super().create(path, size)
        self._open[descriptor] = None
        return descriptor

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        self._open[descriptor] = None
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        super().close(descriptor)

    def close_all(self) -> None:
        for descriptor in self._open:
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()

    def sync(self, descriptor: int) -> None:
        """Remembers the content; the bytes of a simulated disk need no real sync."""
        self._call("sync")
        with Path(f"/proc/self/fd/{descriptor}").open("rb") as again:  # it may be open for writing only
            self._synced[os.fstat(descriptor).st_ino] = again.read()

    def survive(self, target: Path, seed: int) -> SimDisk:
        """The disk of the next process, with a copy of all that was written in ``target``."""
        assert self._root is not None
        self.stop_at(0)
        after = SimDisk(target, seed)
        self._copy(self._root, target, after)
        return after

    def _copy(self, source: Path, target: Path, after: SimDisk) -> None:
        target.mkdir()
        inodes: dict[int, int] = {}
        for entry in sorted(source.iterdir()):
            if entry.is_dir():
                self._copy(entry, target / entry.name, after)
                continue
            copy = target / entry.name
            copy.write_bytes(entry.read_bytes())
            before, now = entry.stat().st_ino, copy.stat().st_ino
            inodes[before] = now
            if before in self._synced:
                after._synced[now] = self._synced[before]
        for name, inode in self._named.get(source, {}).items():
            after._named.setdefault(target, {})[name] = inodes.get(inode, -inode)
            if inode in self._removed:
                after._removed[-inode] = self._removed[inode]
