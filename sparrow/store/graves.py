"""Graves: journal files that are removed while somebody may still look at them.

The kernel gives back the blocks of a removed file when its last map goes, and has whoever drops that wait for
it: with 128 MB the event loop would stand still for a twentieth of a second. So a removed file is held open
until its map is gone, and closed by the sealer's thread, which may wait. Nothing here needs to survive: when
the process ends the kernel closes everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress

from sparrow.store.disk import Disk
from sparrow.store.journalfile import JournalFile


class Graves:
    """Used by one thread at a time."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: list[tuple[weakref.ref[object], int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def bury(self, files: Iterable[JournalFile]) -> None:
        """Removes sealed files; a damaged one stays under another name. Closes what nobody looks at any
        more of those that were removed before."""
        self.sweep()
        for file in files:
            if file.has_damage:
                self._disk.rename(file.path, file.path.with_suffix(".damaged"))
                continue
            with suppress(FileNotFoundError):
                self._open.append((weakref.ref(file.source), self._disk.open(file.path)))
                file.fade()
                self._disk.remove(file.path)

    def sweep(self, *, is_last: bool = False) -> None:
        """Closes the files whose map is gone; the last time all of them."""
        kept = []
        for source, descriptor in self._open:
            if source() is None or is_last:
                self._disk.close(descriptor)
            else:
                kept.append((source, descriptor))
        self._open = kept
