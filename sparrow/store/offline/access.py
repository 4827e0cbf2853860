"""Ways into the data directory of a stopped broker.

Whoever only looks takes the directory's lock shared, so that several may look at once and no broker
starts under their eyes; they open files for reading and read the catalog from a copy, because SQLite
writes even when it is only asked. Whoever changes something takes the lock as a broker does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from sparrow.model import schema
from sparrow.model.errors import (
    CatalogDamaged,
    DataDirectoryLocked,
    DataDirectoryUnusable,
    SparrowError,
)
from sparrow.model.topic import Topic
from sparrow.store.catalog import Catalog
from sparrow.store.catalog_tables import (
    CursorCheckpoint,
    Producer,
    ProducerState,
    Segment,
    StreamRow,
    SubscriptionRow,
)
from sparrow.store.directory import DataDirectory, TopicFile, list_topics, require
from sparrow.store.disk import Disk

CATALOG = "catalog.db"
_CATALOG_FILES = (CATALOG, f"{CATALOG}-wal", "catalog.clean")


class ReadOnlyDisk(Disk):
    """Opens for reading alone, so that a backup on a read-only disk can be looked at too."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class CatalogView(NamedTuple):
    """What a sound catalog says."""

    version: int
    sealed_through: int
    newest_file: int
    topics: list[Topic]
    streams: list[StreamRow]
    segments: list[Segment]
    subscriptions: list[SubscriptionRow]
    cursors: list[CursorCheckpoint]
    producers: list[Producer]
    producer_states: list[ProducerState]
    schemas: dict[str, bytes]
    """By the id of their topic."""


class Marker(msgspec.Struct, frozen=True):
    """What sparrow.json holds."""

    format: int
    created_at_us: int = 0


@contextmanager
def looking(root: Path) -> Iterator[None]:
    """The directory, which no broker has open and none can open meanwhile."""
    with _typed_errors(root):
        require(root)
        lock = _lock_shared(root / "lock")
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def changing(root: Path, disk: Disk, now_us: int) -> Iterator[DataDirectory]:
    """The directory, locked as a broker locks it."""
    with _typed_errors(root):
        require(root)
        directory = DataDirectory.open(root, disk, now_us)
        try:
            yield directory
        finally:
            directory.close()


def _lock_shared(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # A copy that no broker has ever opened; making the file would be a change.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        os.close(descriptor)
        who = f" by process {holder}" if holder else ""
        raise DataDirectoryLocked(
            f"{path.parent} is held open{who}", hint="Stop the broker first; this command works offline."
        ) from error
    return descriptor


@contextmanager
def _typed_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise DataDirectoryUnusable(
            f"{root} cannot be used: {error.strerror or error}{where}",
            hint="Run the command as the user that runs the broker.",
        ) from error


def read_marker(root: Path) -> Marker:
    """The directory's format; ``looking`` has checked that it can be read."""
    return msgspec.json.decode((root / "sparrow.json").read_bytes(), type=Marker)


def read_catalog(root: Path) -> CatalogView:
    """Everything in the catalog, fully verified, without a change to any of its files."""
    if not (root / CATALOG).exists():
        raise CatalogDamaged(f"{root / CATALOG} is missing")
    with TemporaryDirectory(prefix="sparrow-catalog-") as place:
        for name in _CATALOG_FILES:
            with suppress(FileNotFoundError):
                shutil.copyfile(root / name, Path(place) / name)
        try:
            with Catalog.open(Path(place) / CATALOG) as catalog:
                return _view(catalog)
        except SparrowError as error:
            message = error.message.replace(place, str(root))
            raise type(error)(message, hint=error.hint, **error.details) from error


def _view(catalog: Catalog) -> CatalogView:
    return CatalogView(
        catalog.version,
        catalog.sealed_through,
        int(catalog.documents("journal").get("newest", b"0")),
        catalog.topics(),
        catalog.streams(),
        catalog.segments(),
        catalog.subscriptions(),
        catalog.cursors(),
        catalog.producers(),
        catalog.producer_states(),
        catalog.documents(schema.DOCUMENTS),
    )


def journal_files(root: Path) -> list[tuple[int, Path]]:
    """Journal files by number; a file with some other name is not one."""
    found = [path for path in (root / "journal").glob("*.wal") if path.stem.isdigit()]
    return sorted((int(path.stem), path) for path in found)


def topic_files(root: Path) -> list[tuple[Path, TopicFile | None]]:
    """Every topic directory and what its topic.json says; None when that cannot be read."""
    if not (root / "topics").is_dir():
        return []
    return [(path, found) for path, found in list_topics(root) if path.is_dir()]


def segment_path(root: Path, topic: str, segment: Segment) -> Path:
    return root / "topics" / topic / str(segment.partition) / segment.file_name


def partition_files(topic_directory: Path) -> list[tuple[int, Path]]:
    """(partition, path) of everything in a topic's partition directories."""
    directories = [path for path in topic_directory.glob("*/") if path.name.isdigit()]
    return sorted((int(directory.name), path) for directory in directories for path in directory.iterdir())
