"""Turns finished journal files into segments: the bytes, not the bookkeeping.

Runs in a thread of its own. Everything it needs is handed over beforehand, so it shares nothing with the
event loop but the mapped files. A batch that turns out damaged is left out and reported; the journal file
that holds it is then kept aside.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

import pyarrow as pa

from sparrow.model.errors import DataDamaged
from sparrow.model.message import StreamId
from sparrow.store.batch import Lot, decode, to_table
from sparrow.store.catalog_tables import Segment
from sparrow.store.disk import Disk
from sparrow.store.hot import Place
from sparrow.store.journalfile import JournalFile
from sparrow.store.lake import write_segment
from sparrow.store.ports import Damage

_REST = 3.0
"""While it is not behind, how long to rest next to having worked: publishers and consumers come first. In
its rests the event loop has the interpreter, for which it would else wait a switch interval each time."""
_WORK_S_MIN, _REST_S_MAX = 0.001, 0.05
_NICENESS = 15


class SealPlan(NamedTuple):
    """What is to be sealed: the finished files and, per stream, its topic, directory and batches."""

    files: Mapping[int, JournalFile]
    streams: Sequence[tuple[StreamId, str, Path, Sequence[Place]]]

    @property
    def last_file(self) -> int:
        return max(self.files)


class Sealed(NamedTuple):
    """What came of it."""

    segments: list[Segment]
    damages: list[Damage]


def step_back() -> None:
    """Has this thread leave the processors to everybody else who wants them. There is no way back: to take
    precedence again is a privilege."""
    if sys.platform == "linux":  # Elsewhere it is processes that have a precedence, not threads.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def seal(
    disk: Disk,
    plan: SealPlan,
    *,
    compression: str,
    row_group_bytes: int,
    is_behind: Callable[[int], bool],
) -> Sealed:
    """Writes one durable segment for each stream of the plan; rests now and then unless it is behind."""
    segments: list[Segment] = []
    damages: list[Damage] = []
    pace = _Pace(is_behind)
    for stream, topic, directory, places in plan.streams:
        batches = _Peeked(_read(plan.files, places, damages, pace, row_group_bytes))
        if batches.is_empty:
            continue
        segments.append(
            write_segment(
                disk,
                directory,
                topic,
                stream,
                batches,
                compression=compression,
                row_group_bytes=row_group_bytes,
            )
        )
    pa.default_memory_pool().release_unused()
    return Sealed(segments, damages)


def _read(
    files: Mapping[int, JournalFile],
    places: Sequence[Place],
    damages: list[Damage],
    pace: _Pace,
    size: int,
) -> Iterator[pa.Table]:
    """The batches in tables of about ``size`` bytes."""
    gathered: list[Lot] = []
    weight = 0
    kind: tuple[int, bool] | None = None
    for place in places:
        pace.rest()
        file = files[place.file_number]
        try:
            header = file.header(place.position)
            batch = decode(file.body(header), header.columns)
        except DataDamaged as error:
            file.has_damage = True
            damages.append(Damage(file=file.path.name, what=error.message, position=place.position))
            continue
        pace.done += header.body_length
        bytes_here = header.body_length if header.codec == 0 else batch.nbytes
        kind_here = (header.columns, header.producer_id != 0)
        if gathered and (kind_here != kind or weight + bytes_here > size):
            yield to_table(gathered)
            gathered, weight = [], 0
        kind = kind_here
        weight += bytes_here
        gathered.append(
            Lot(batch, header.base_offset, header.publish_time_us, header.producer_id, header.base_sequence)
        )
    if gathered:
        yield to_table(gathered)


class _Pace:
    """Rests while sealing is ahead of those who publish."""

    def __init__(self, is_behind: Callable[[int], bool]) -> None:
        self.done = 0
        self._is_behind = is_behind
        self._resumed_s = perf_counter()

    def rest(self) -> None:
        worked_s = perf_counter() - self._resumed_s
        if worked_s >= _WORK_S_MIN:
            if not self._is_behind(self.done):
                sleep(min(_REST_S_MAX, _REST * worked_s))
            self._resumed_s = perf_counter()


class _Peeked:
    """An iterator whose first item has been looked at."""

    def __init__(self, items: Iterator[pa.Table]) -> None:
        self._items = items
        self._first = next(items, None)

    @property
    def is_empty(self) -> bool:
        return self._first is None

    def __iter__(self) -> Iterator[pa.Table]:
        if self._first is not None:
            yield self._first
        self._first = None
        yield from self._items
