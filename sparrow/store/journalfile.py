"""One journal file: created with its space reserved, written front to back, mapped for reading.

The map shares the page cache with the writes, so a batch can be read where it lies as soon as it has
been written. A reader's buffer keeps the map alive after the file is closed or removed.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import pyarrow as pa

from sparrow.model.errors import DataDamaged
from sparrow.store.disk import Bytes, Disk
from sparrow.store.entry import (
    FILE_HEADER_BYTES,
    FileHeader,
    Header,
    is_body_right,
    pack_file_header,
    unpack,
    unpack_file_header,
)

_FADE_BYTES = 1024 * 1024


def file_name(number: int) -> str:
    return f"{number:010d}.wal"


class JournalFile:
    """An open file. ``end`` is where the next entry goes, ``durable`` what is known to be synced."""

    def __init__(self, disk: Disk, path: Path, number: int, descriptor: int, size: int) -> None:
        self.path = path
        self.number = number
        self.size = size
        self.end = FILE_HEADER_BYTES
        self.durable = 0
        self.has_damage = False
        self._disk = disk
        self._descriptor: int | None = descriptor
        self._map: mmap.mmap = disk.map(descriptor, size)
        self._buffer: Any = pa.py_buffer(self._map)

    @classmethod
    def create(
        cls,
        disk: Disk,
        directory: Path,
        number: int,
        size: int,
        created_at_us: int,
        previous_length: int,
    ) -> JournalFile:
        """A new, empty file whose name is durable."""
        path = directory / file_name(number)
        descriptor = disk.create(path, size)
        header = pack_file_header(FileHeader(number, created_at_us, previous_length))
        try:
            disk.write(descriptor, [header], 0)
            disk.sync(descriptor)
            disk.sync_directory(directory)
        except OSError:
            disk.close(descriptor)
            disk.remove(path)
            raise
        file = cls(disk, path, number, descriptor, size)
        file.durable = FILE_HEADER_BYTES
        return file

    @classmethod
    def open(cls, disk: Disk, path: Path, number: int) -> JournalFile | None:
        """An existing file; None when it is too short to hold anything."""
        size = path.stat().st_size
        if size < FILE_HEADER_BYTES:
            return None
        return cls(disk, path, number, disk.open(path), size)

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    @property
    def source(self) -> mmap.mmap:
        return self._map

    @property
    def buffer(self) -> Any:
        return self._buffer

    def file_header(self) -> FileHeader | None:
        header = unpack_file_header(self._map[:FILE_HEADER_BYTES])
        return header if header is not None and header.file_number == self.number else None

    def write(self, pieces: Sequence[Bytes]) -> None:
        """Appends the pieces; on an error the file must not be written again."""
        assert self._descriptor is not None
        self.end += self._disk.write(self._descriptor, pieces, self.end)
        assert self.end <= self.size, "an entry must fit the file it is laid out for"

    def sync(self) -> None:
        assert self._descriptor is not None
        end = self.end
        self._disk.sync(self._descriptor)
        self.durable = end

    def cut(self, end: int) -> None:
        """Drops everything from ``end`` on, durably."""
        assert self._descriptor is not None
        self._disk.truncate(self._descriptor, end)
        self._disk.sync(self._descriptor)
        self.end = self.durable = self.size = end

    def finish(self) -> None:
        """Gives the unused space back; the file is only read from now on."""
        if self._descriptor is not None:
            self.cut(self.end)
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            self._disk.close(self._descriptor)
            self._descriptor = None

    def fade(self) -> None:
        """Leaves memory bit by bit, because the file is about to go: unmapped all at once, by whoever drops
        the last view of it, it would stop the event loop. Views stay good, their pages are read again."""
        for start in range(0, self.size, _FADE_BYTES):
            self._map.madvise(mmap.MADV_DONTNEED, start, min(_FADE_BYTES, self.size - start))
            sleep(0)
        self._disk.hasten(self.path, 0)

    def header(self, position: int) -> Header:
        header = unpack(self._map, position, self.number)
        if header is None:
            raise DataDamaged(f"the entry at {position} of {self.path.name} has a damaged header")
        return header

    def body(self, header: Header) -> Any:
        """The body where it lies, checked against its crc at every read: a disk may rot under us."""
        body = self._buffer.slice(header.body_position, header.body_length)
        if not is_body_right(header, body):
            raise DataDamaged(
                f"offsets {header.base_offset} to {header.end_offset - 1} in {self.path.name} are damaged",
                topic_id=header.topic_id,
                partition=header.partition,
                start_offset=header.base_offset,
                end_offset=header.end_offset,
            )
        return body
