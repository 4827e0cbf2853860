"""Batches of a journal file that a broker has open, read by another process of the same machine.

The broker says where they lie: entries that are committed, which nobody changes or cuts off any more. The
file may be removed meanwhile; mapped, it can still be read. Each entry is checked as the broker itself does,
header and body, and must be the one that was expected; otherwise it is NotFound and the broker is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparrow.model.errors import DataDamaged, NotFound
from sparrow.model.message import StreamId
from sparrow.model.segment import BatchPlace
from sparrow.store import batch as batches
from sparrow.store.disk import Disk
from sparrow.store.journalfile import JournalFile, file_name
from sparrow.store.ports import LogBatch


class _Looking(Disk):
    """Opens for reading alone."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_places(directory: Path, places: Sequence[BatchPlace], stream: StreamId) -> Iterator[LogBatch]:
    """The batches at these places, in order."""
    file: JournalFile | None = None
    for place in places:
        if file is None or file.number != place.file_number:
            file = _open(directory / "journal" / file_name(place.file_number), place.file_number)
        yield _read(file, place, stream)


def _open(path: Path, number: int) -> JournalFile:
    try:
        found = JournalFile.open(_Looking(), path, number)
    except OSError as error:
        raise NotFound(f"{path} cannot be opened here: {error.strerror}") from error
    if found is None:
        raise NotFound(f"{path} holds nothing")
    found.close()  # The map stays.
    return found


def _read(file: JournalFile, place: BatchPlace, stream: StreamId) -> LogBatch:
    if place.position + place.body_bytes > file.size:
        raise NotFound(f"{file.path} is shorter than expected")
    try:
        header = file.header(place.position)
        if (header.topic_id, header.partition, header.base_offset) != (*stream, place.base_offset):
            raise NotFound(f"{file.path} holds another batch at {place.position}")
        found = batches.decode(file.body(header), header.columns)
    except DataDamaged as error:
        raise NotFound(error.message) from error
    rows = batches.to_table_form(
        found, header.base_offset, header.publish_time_us, header.producer_id, header.base_sequence
    )
    return LogBatch(stream, header.base_offset, header.end_offset, rows)
