"""A disk that fails: the faults of the world, injected beneath the store.

Three kinds, all through the file layer that the store itself uses:

* an error at the n-th call of an operation, once or until ``heal``;
* short writes: the kernel takes only a part, as it may;
* power loss: ``stop_at`` kills the machine before the n-th call, ``crash`` gives the directory as it is
  found afterwards. What was synced is there. What was not may be there, may be gone, or half of each;
  a name that was not synced may be missing, a removed one may be back.

Everything random comes from the seed. SQLite syncs its own files, so those come out as they are.
"""

from __future__ import annotations

import errno as errors
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sparrow.store.disk import Bytes, Disk

OPERATIONS = ("reserve", "pwritev", "sync", "truncate", "rename", "remove", "sync_directory")
"""Every way in which the store changes files, apart from SQLite's and the Parquet writer's own."""

PAGE_BYTES = 4096
_FOREIGN = ("catalog.db", "lock")


class PowerLost(Exception):
    """The machine has stopped; nothing reaches the disk any more."""


class _Fault(NamedTuple):
    error: int
    from_call: int
    to_call: int


class FaultyDisk(Disk):
    """See the module's text. Counts its calls in ``calls``, by operation."""

    def __init__(self, root: Path | None = None, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._faults: dict[str, _Fault] = {}
        self._stop_at: int | None = None
        self._is_short = False
        self._synced: dict[int, bytes] = {}
        """What is certain of a file's content, by inode."""
        self._named: dict[Path, dict[str, int]] = {}
        """What is certain of a directory's names."""
        self._removed: dict[int, bytes] = {}
        self._root = root
        if root is not None and root.is_dir():
            self._take_as_synced(root)

    # What goes wrong.

    def fail(self, operation: str, *, at: int = 1, error: int = errors.EIO, times: int | None = 1) -> None:
        """The ``at``-th call from now fails, and the ``times`` - 1 after it; None means until ``heal``."""
        assert operation in OPERATIONS, f"{operation} is not one of {OPERATIONS}"
        first = self.calls[operation] + at
        self._faults[operation] = _Fault(error, first, first + (times or 1 << 60))

    def heal(self) -> None:
        """No more errors; what is on the disk stays as it is."""
        self._faults.clear()
        self._is_short = False

    def write_short(self) -> None:
        """Every write takes a part of what it is given, until ``heal``."""
        self._is_short = True

    def stop_at(self, call: int) -> None:
        """Power is lost before the ``call``-th call from now, of whatever operation."""
        self._stop_at = self.calls.total() + call

    @property
    def has_stopped(self) -> bool:
        return self._stop_at is not None and self.calls.total() >= self._stop_at

    def _call(self, operation: str) -> None:
        self.calls[operation] += 1
        if self.has_stopped:
            raise PowerLost(f"power was lost before {operation}")
        fault = self._faults.get(operation)
        if fault is not None and fault.from_call <= self.calls[operation] < fault.to_call:
            raise OSError(fault.error, os.strerror(fault.error))

    # The operations.

    def reserve(self, descriptor: int, size: int) -> None:
        self._synced.pop(_inode(descriptor), None)  # a new file, maybe under the number of a removed one
        self._call("reserve")
        super().reserve(descriptor, size)

    def pwritev(self, descriptor: int, pieces: Sequence[Bytes], position: int) -> int:
        self._call("pwritev")
        if self._is_short:
            whole = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
            return os.pwrite(descriptor, whole[: self._random.randint(1, max(1, len(whole)))], position)
        return super().pwritev(descriptor, pieces, position)

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        super().sync(descriptor)
        if self._root is not None:
            # By its path, because the descriptor may be for writing only.
            self._synced[_inode(descriptor)] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def truncate(self, descriptor: int, size: int) -> None:
        self._call("truncate")
        super().truncate(descriptor, size)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._call("remove")
        self._remember_removed(path)
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self._call("sync_directory")
        super().sync_directory(path)
        self._named[path] = _names(path)

    # What is found after power loss.

    def crash(self, target: Path) -> None:
        """Writes to ``target`` what the machine finds when it starts again. The disk has stopped."""
        assert self._root is not None, "a disk that forgets needs to know its root"
        self.stop_at(0)
        self._revive(self._root, target)

    def _revive(self, source: Path, target: Path) -> None:
        target.mkdir()
        named = self._named.get(source, {})
        present = _names(source)
        for entry in sorted(source.iterdir()):
            if entry.is_dir():
                self._revive(entry, target / entry.name)
            elif entry.name.startswith(_FOREIGN):
                (target / entry.name).write_bytes(entry.read_bytes())
            elif named.get(entry.name) == present[entry.name] or self._random.random() < 0.5:
                (target / entry.name).write_bytes(self._remnant(present[entry.name], entry.read_bytes()))
        for name in sorted(named.keys() - present.keys()):
            if named[name] in self._removed and self._random.random() < 0.5:
                (target / name).write_bytes(self._removed[named[name]])

    def _remnant(self, inode: int, now: bytes) -> bytes:
        """What is left of a file that holds ``now`` and was synced before, or never."""
        before = self._synced.get(inode, b"")
        outcome = self._random.choice(("lost", "kept", "prefix", "pages"))
        if before == now or outcome == "kept":
            return now
        if outcome == "lost":
            return before
        size = self._random.choice((len(before), len(now)))
        if outcome == "prefix":
            return self._prefix(before, now, size)
        return self._pages(before, now, size)

    def _prefix(self, before: bytes, now: bytes, size: int) -> bytes:
        """The new bytes up to some place among those that differ, the old ones behind it."""
        first, last = _difference(before, now)
        place = self._random.randint(first, last)
        return (now[:place] + before[place:]).ljust(size, b"\0")[:size]

    def _pages(self, before: bytes, now: bytes, size: int) -> bytes:
        """Some pages new, some old."""
        old, new = before.ljust(size, b"\0"), now.ljust(size, b"\0")
        starts = range(0, size, PAGE_BYTES)
        chosen = [self._random.choice((old, new))[start : start + PAGE_BYTES] for start in starts]
        return b"".join(chosen)[:size]

    def _take_as_synced(self, directory: Path) -> None:
        """What was there before is certain."""
        self._named[directory] = _names(directory)
        for entry in directory.iterdir():
            if entry.is_dir():
                self._take_as_synced(entry)
            else:
                self._synced[entry.stat().st_ino] = entry.read_bytes()

    def _remember_removed(self, path: Path) -> None:
        if self._root is not None and path.exists():
            inode = path.stat().st_ino
            self._removed[inode] = self._synced.pop(inode, b"")


def _inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def _names(directory: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_ino for entry in directory.iterdir() if entry.is_file()}


def _difference(before: bytes, now: bytes) -> tuple[int, int]:
    """Where two contents start and stop to differ; both hold zeros behind their end."""
    size = max(len(before), len(now))
    old, new = before.ljust(size, b"\0"), now.ljust(size, b"\0")
    first, last = 0, size
    while last - first > 1:  # Finds the first difference by halves: comparing slices is one memcmp.
        middle = (first + last) // 2
        first, last = (first, middle) if old[first:middle] != new[first:middle] else (middle, last)
    low, first, last = first, first, size
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if old[middle:last] != new[middle:last] else (first, middle)
    return low, last
