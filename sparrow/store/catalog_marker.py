"""The clean marker: a small file beside the catalog that vouches for every byte of it.

It is written when the catalog is closed in order, with the size and the crc32c of the whole main
file, and removed before the first write of the next run. While it is there, even a flipped bit in a
part of the file that SQLite does not use is found. After a crash it is not there, and the digests of
the ledger alone decide.

Its own bytes are one line that ends in a checksum of itself.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import google_crc32c

from sparrow.model.errors import CatalogDamaged, DataDirectoryUnusable, StorageFull
from sparrow.store.catalog_sqlite import wal_path
from sparrow.store.disk import Disk

_LINE = re.compile(rb"(sparrow catalog size=(\d{1,19}) crc32c=([0-9a-f]{8}))#([0-9a-f]{8})\n\Z")
_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CleanMarker:
    """The marker of one catalog file."""

    def __init__(self, catalog: Path, disk: Disk) -> None:
        self._catalog = catalog
        self._disk = disk
        self.path = catalog.with_suffix(".clean")
        with _typed_errors("find", self.path):
            self.is_there = self.path.exists()

    def check(self) -> None:
        """Refuses a catalog whose bytes are not those that its marker, if there is one, names."""
        if self.is_there:
            with _typed_errors("read", self.path):
                self._check()

    def _check(self) -> None:
        expected = _parse(self.path.read_bytes())
        if not self._catalog.exists():
            raise CatalogDamaged(f"{self._catalog.name} is missing, but was closed in order")
        if _file_size(wal_path(self._catalog)):
            raise CatalogDamaged(f"{self._catalog.name} was written to after it was closed in order")
        if expected != _measure(self._catalog):
            raise CatalogDamaged(f"the bytes of {self._catalog.name} are not those that were closed")

    def remove(self) -> None:
        """Takes the marker away, durably; to be called before anything is written."""
        if self.is_there:
            with _typed_errors("remove", self.path):
                self._disk.remove(self.path)
                self._disk.sync_directory(self.path.parent)
            self.is_there = False

    def write(self) -> None:
        """Vouches for the catalog as it is now on disk."""
        with _typed_errors("write", self.path):
            size, crc = _measure(self._catalog)
            line = b"sparrow catalog size=%d crc32c=%08x" % (size, crc)
            self._disk.write_file(self.path, b"%s#%08x\n" % (line, google_crc32c.value(line)))
        self.is_there = True


@contextmanager
def _typed_errors(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in _FULL else DataDirectoryUnusable
        raise kind(f"cannot {doing} the catalog's clean marker {path}: {error}") from error


def _parse(content: bytes) -> tuple[int, int]:
    match = _LINE.match(content)
    if match is None or int(match[4], 16) != google_crc32c.value(match[1]):
        raise CatalogDamaged("the catalog's clean marker is damaged")
    return int(match[2]), int(match[3], 16)


def _measure(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = google_crc32c.extend(crc, chunk)
    return size, crc


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
