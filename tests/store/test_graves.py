"""Removed journal files: whoever looks at them goes on looking, and their blocks are given back aside."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from sparrow.store.disk import Disk
from sparrow.store.entry import FILE_HEADER_BYTES
from sparrow.store.graves import Graves
from sparrow.store.journalfile import JournalFile


class CountingDisk(Disk):
    """Knows which descriptors are open."""

    def __init__(self) -> None:
        self.opened: set[int] = set()

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        self.opened.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.opened.discard(descriptor)
        super().close(descriptor)


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk()


def finished(disk: Disk, directory: Path, number: int = 1) -> JournalFile:
    file = JournalFile.create(disk, directory, number, 64 * 1024, 0, 0)
    file.write([b"some bytes"])
    file.finish()
    return file


def test_a_view_of_a_buried_file_stays_good_and_holds_it_open(disk: CountingDisk, tmp_path: Path) -> None:
    graves, file = Graves(disk), finished(disk, tmp_path)
    view = file.buffer.slice(FILE_HEADER_BYTES, 10)
    path = file.path
    graves.bury([file])
    del file
    gc.collect()
    assert not path.exists()
    assert view.to_pybytes() == b"some bytes"
    graves.sweep()
    assert len(graves) == len(disk.opened) == 1, "somebody still looks"
    del view
    gc.collect()
    graves.sweep()
    assert not len(graves)
    assert not disk.opened


def test_the_next_burial_closes_what_nobody_looks_at_any_more(disk: CountingDisk, tmp_path: Path) -> None:
    graves = Graves(disk)
    graves.bury([finished(disk, tmp_path)])
    gc.collect()
    graves.bury([finished(disk, tmp_path, 2)])
    assert len(graves) == len(disk.opened) == 1


def test_in_the_end_everything_is_closed(disk: CountingDisk, tmp_path: Path) -> None:
    graves, file = Graves(disk), finished(disk, tmp_path)
    graves.bury([file])
    graves.sweep(is_last=True)
    assert not len(graves)
    assert not disk.opened


def test_a_damaged_file_stays_under_another_name(disk: CountingDisk, tmp_path: Path) -> None:
    graves, file = Graves(disk), finished(disk, tmp_path)
    file.has_damage = True
    graves.bury([file])
    assert os.listdir(tmp_path) == ["0000000001.damaged"]
    assert not len(graves)


def test_a_file_that_is_gone_already_is_no_error(disk: CountingDisk, tmp_path: Path) -> None:
    graves, file = Graves(disk), finished(disk, tmp_path)
    file.path.unlink()
    graves.bury([file])
    assert not len(graves)
