"""The file layer: every byte of a data directory that Sparrow writes itself passes through here.

It exists so that tests can put a disk beneath the store that fails, fills up, tears writes or forgets
what was not synced (``sparrow.testing.disk``). It adds one rule of its own: a short write is
continued, never ignored.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow.store.machine import Space, space

_IOV_MAX = 1024  # Linux refuses longer vectors; POSIX guarantees 16, every Unix we run on has 1024.

Bytes = Any
"""Anything with the buffer protocol: bytes, memoryview, pyarrow.Buffer."""


class Disk:
    """Plain POSIX files."""

    def create(self, path: Path, size: int) -> int:
        """A new file, with ``size`` bytes reserved, so that a full disk shows here and not in a write."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self.reserve(descriptor, size)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return descriptor

    def reserve(self, descriptor: int, size: int) -> None:
        """Blocks for ``size`` bytes, reading as zero."""
        if size:
            os.posix_fallocate(descriptor, 0, size)

    def open(self, path: Path) -> int:
        """An existing file, for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, descriptor: int, pieces: Sequence[Bytes], position: int) -> int:
        """All the pieces, one after the other, from ``position``; the number of bytes written."""
        total = 0
        for start in range(0, len(pieces), _IOV_MAX):
            total += self._write_vector(descriptor, pieces[start : start + _IOV_MAX], position + total)
        return total

    def _write_vector(self, descriptor: int, pieces: Sequence[Bytes], position: int) -> int:
        size = sum(len(memoryview(piece)) for piece in pieces)
        written = self.pwritev(descriptor, pieces, position)
        while written < size:
            rest = _after(pieces, written)
            written += self.pwritev(descriptor, rest, position + written)
        return written

    def pwritev(self, descriptor: int, pieces: Sequence[Bytes], position: int) -> int:
        """One system call; may write less than asked."""
        return os.pwritev(descriptor, pieces, position)

    def sync(self, descriptor: int) -> None:
        """Data and what is needed to read it are on the disk when this returns."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def map(self, descriptor: int, size: int) -> mmap.mmap:
        """The file's bytes, shared with what is written later."""
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)

    def write_file(self, path: Path, content: bytes) -> None:
        """A small file, whole or not at all: written beside, synced, renamed, directory synced."""
        temporary = path.with_name(path.name + ".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._write_vector(descriptor, [content], 0)
            self.sync(descriptor)
        finally:
            self.close(descriptor)
        self.rename(temporary, path)

    def rename(self, source: Path, target: Path) -> None:
        """Durably gives ``source`` its final name."""
        os.replace(source, target)
        self.sync_directory(target.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_file(self, path: Path) -> None:
        descriptor = self.open(path)
        try:
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def hasten(self, path: Path, start: int) -> int:
        """Has the kernel begin to write what a file has from ``start`` on, and waits for nothing: the sync
        that comes later finds little to do, and does not hold up the journal's. Returns the file's end."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = os.fstat(descriptor).st_size
            if hasattr(os, "posix_fadvise") and end > start:
                # Named for what it does to clean pages; of dirty ones it starts the writing and keeps them.
                os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
            return end
        finally:
            os.close(descriptor)

    def space(self, path: Path) -> Space:
        """What is free of the disk that holds a path."""
        return space(path)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _after(pieces: Sequence[Bytes], count: int) -> list[memoryview]:
    """What is left of the pieces when the first ``count`` bytes are taken."""
    rest = []
    for piece in pieces:
        view = memoryview(piece).cast("B")
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest
