"""The data directory itself: its layout, its version, and that one process at a time has it open."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparrow.model.errors import (
    DataDirectoryLocked,
    DataDirectoryNewer,
    DataDirectoryUnusable,
    NotADataDirectory,
    StorageError,
    StorageFull,
)
from sparrow.model.topic import Topic
from sparrow.store.disk import Disk

FORMAT = 1
DELETED = "#deleted"
"""Ends the name of a topic's directory while it is being removed; no topic can be called so."""
_OURS = {"sparrow.json", "sparrow.json.tmp", "lock", "journal", "stage", "topics", "catalog.db", "lost+found"}


class _Marker(msgspec.Struct):
    format: int
    created_at_us: int = 0


class TopicFile(msgspec.Struct, frozen=True):
    """What topic.json holds."""

    topic: Topic
    catalog_version: int


class DataDirectory:
    """An open, locked data directory. Knows where things are, not what they mean."""

    def __init__(self, root: Path, disk: Disk, lock: int) -> None:
        self.root = root
        self._disk = disk
        self._lock: int | None = lock

    @classmethod
    def open(cls, root: Path, disk: Disk, now_us: int) -> DataDirectory:
        """Creates or opens the directory and locks it."""
        try:
            return cls._open(root, disk, now_us)
        except OSError as error:
            raise typed_error(root, error) from error

    @classmethod
    def _open(cls, root: Path, disk: Disk, now_us: int) -> DataDirectory:
        if root.is_dir() and not (root / "sparrow.json").exists():
            _refuse_strangers(root)
        is_new = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        check_format(root)  # Before the lock, which writes: a newer directory is left as it is.
        lock = _lock(root / "lock")
        try:
            if not (root / "sparrow.json").exists():
                disk.write_file(root / "sparrow.json", msgspec.json.encode(_Marker(FORMAT, now_us)))
            for name in ("journal", "topics"):
                (root / name).mkdir(exist_ok=True)
            disk.sync_directory(root)
            if is_new:
                disk.sync_directory(root.parent)
        except BaseException:
            os.close(lock)
            raise
        return cls(root, disk, lock)

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def catalog(self) -> Path:
        return self.root / "catalog.db"

    def journal_files(self) -> list[tuple[int, Path]]:
        """Journal files by number."""
        return list_journal(self.root)

    def topic(self, name: str) -> Path:
        return self.root / "topics" / name

    def partition(self, topic: str, partition: int) -> Path:
        return self.topic(topic) / str(partition)

    def make_partition(self, topic: str, partition: int) -> Path:
        """The partition's directory, durably there."""
        path = self.partition(topic, partition)
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            self._disk.sync_directory(path.parent)
            self._disk.sync_directory(path.parent.parent)
        return path

    def write_topic(self, topic: Topic, catalog_version: int) -> None:
        """Keeps a copy of the topic beside its segments, so that a lost catalog can be rebuilt."""
        self.topic(topic.name).mkdir(parents=True, exist_ok=True)
        content = msgspec.json.encode(TopicFile(topic, catalog_version))
        self._disk.write_file(self.topic(topic.name) / "topic.json", content)

    def topic_files(self) -> Iterator[tuple[Path, TopicFile | None]]:
        """Every topic directory and what its topic.json says; None when that cannot be read."""
        return list_topics(self.root)

    def segment_files(self, topic: str) -> Iterator[tuple[int, Path]]:
        """(partition, path) of everything in a topic's partition directories."""
        for directory in sorted(self.topic(topic).glob("*/")):
            if directory.name.isdigit():
                for path in sorted(directory.iterdir()):
                    yield int(directory.name), path

    def remove_topic(self, path: Path) -> None:
        """A topic's directory goes: renamed first, so that a new topic of the name can start at once."""
        if path.is_dir():
            doomed = path.with_name(f"{path.name}{DELETED}")
            if doomed.exists():
                shutil.rmtree(doomed)
            os.rename(path, doomed)
            shutil.rmtree(doomed)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_format(root: Path) -> None:
    """Refuses a directory of a newer version, and one whose marker cannot be read."""
    marker = root / "sparrow.json"
    if not marker.exists():
        return
    try:
        found = msgspec.json.decode(marker.read_bytes(), type=_Marker)
    except msgspec.MsgspecError as error:
        raise DataDirectoryUnusable(
            f"{marker} cannot be read: {error}",
            hint='Restore it from a backup; it holds {"format": 1} and the time of creation.',
        ) from error
    if found.format < 1:
        raise DataDirectoryUnusable(f"{marker} says format {found.format}, which there never was")
    if found.format > FORMAT:
        raise DataDirectoryNewer(f"{root} has format {found.format}; this version knows {FORMAT}")


def require(root: Path) -> None:
    """For tools that read only: the path must hold a data directory of a known format."""
    if not (root / "sparrow.json").is_file():
        raise NotADataDirectory(f"{root} is not a data directory of Sparrow")
    check_format(root)


def list_journal(root: Path) -> list[tuple[int, Path]]:
    """Journal files by number."""
    found = sorted((root / "journal").glob("*.wal"))
    return [(int(path.stem), path) for path in found if re.fullmatch(r"[0-9]{10,}", path.stem)]


def list_topics(root: Path) -> Iterator[tuple[Path, TopicFile | None]]:
    """Every topic directory and what its topic.json says; None when that cannot be read."""
    for path in sorted((root / "topics").iterdir()):
        try:
            yield path, msgspec.json.decode((path / "topic.json").read_bytes(), type=TopicFile)
        except (OSError, msgspec.MsgspecError):
            yield path, None


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        os.close(descriptor)
        who = f" by process {holder}" if holder else ""
        raise DataDirectoryLocked(f"{path.parent} is held open{who}") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _refuse_strangers(root: Path) -> None:
    strangers = sorted(path.name for path in root.iterdir() if path.name not in _OURS)
    if strangers:
        raise DataDirectoryUnusable(
            f"{root} is not empty and not a data directory: it holds {', '.join(strangers[:3])}",
            hint="Give an empty or new directory.",
        )


def typed_error(root: Path, error: OSError) -> StorageError:
    """What the operating system said about a data directory, as an error of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no space to open {root}: {error.strerror}")
    return DataDirectoryUnusable(f"{root} cannot be used: {error.strerror or error}")
