"""Stage files: batches that wait for a commit, in the form of journal files (docs/format.md §7).

One file a part, written from front to back, never preallocated and not synced until somebody asks: a commit
that copies what they hold into the journal needs no sync here. What a crash left of a file is its whole
chains from the front; the rest is cut when the directory is opened.

The event loop owns the table of files, one thread does their bytes. A file whose write failed is given up
whole: nobody knows what it holds.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import msgspec
import pyarrow as pa

from sparrow.model.errors import DataDamaged, StorageError, StorageFull
from sparrow.model.message import StreamId
from sparrow.model.stage import Stage
from sparrow.store.disk import Disk
from sparrow.store.entry import (
    CONTINUES,
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    FileHeader,
    Header,
    Kind,
    Scan,
    is_body_right,
    pack,
    pack_file_header,
    padded,
    unpack_file_header,
)
from sparrow.store.ports import BatchDraft, StagedEntry

_VERSION = 1


class _Name(NamedTuple):
    """The first entry of a file."""

    version: int
    transaction: str
    part: str


class _File:
    """What is known of one file."""

    __slots__ = ("end", "headers", "name", "number", "path", "written_at_us")

    def __init__(self, number: int, path: Path, name: _Name) -> None:
        self.number = number
        self.path = path
        self.name = name
        self.end = 0
        """Where the next entry goes; 0 of a file that does not exist yet."""
        self.headers: list[Header] = []
        self.written_at_us = 0

    @property
    def calls(self) -> int:
        return self.headers[-1].base_sequence + 1 if self.headers else 0

    @property
    def messages(self) -> int:
        return self.headers[-1].end_offset if self.headers else 0

    def describe(self) -> Stage:
        return Stage(
            transaction=self.name.transaction,
            part=self.name.part,
            calls=self.calls,
            messages=self.messages,
            bytes=self.end,
            written_at_us=self.written_at_us,
        )


class StageFiles:
    """The directory ``stage/``; the meaning of each method is in ports.py."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._directory = root / "stage"
        self._disk = disk
        self._files: dict[int, _File] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._last_number = 0
        self.size_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-stage")

    @classmethod
    def open(cls, root: Path, disk: Disk) -> StageFiles:
        """Reads what is there; files that hold nothing whole are removed."""
        stages = cls(root, disk)
        for number, path in list_stages(root):
            stages._last_number = max(stages._last_number, number)
            file = _read(disk, number, path)
            if file is None:
                disk.remove(path)
            else:
                stages._keep(file)
        return stages

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    # What there is.

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[int, Stage]]:
        return iter([(file.number, file.describe()) for file in self._files.values()])

    def find(self, transaction: str, part: str) -> int | None:
        return self._numbers.get((transaction, part))

    def get(self, number: int) -> Stage | None:
        found = self._files.get(number)
        return None if found is None else found.describe()

    def reserve_numbers(self, through: int) -> None:
        self._last_number = max(self._last_number, through)

    # Writing.

    def open_part(self, transaction: str, part: str) -> int:
        found = self._numbers.get((transaction, part))
        if found is None:
            self._last_number = found = self._last_number + 1
            path = self._directory / file_name(found)
            self._keep(_File(found, path, _Name(_VERSION, transaction, part)))
        return found

    async def write(self, number: int, drafts: Sequence[BatchDraft], partitions: int, now_us: int) -> Stage:
        file = self._files[number]
        pieces, headers = _lay_out(file, drafts, partitions, now_us)
        start = file.end
        try:
            await self._in_thread(self._write, file.path, start, pieces)
        except OSError as error:
            self._forget(file)
            with suppress(OSError):
                await self._in_thread(self._disk.remove, file.path)
            raise _typed(error) from error
        self.size_bytes += headers[-1].end_position - start if number in self._files else 0
        file.end = headers[-1].end_position
        file.headers.extend(headers)
        file.written_at_us = now_us
        return file.describe()

    def _write(self, path: Path, position: int, pieces: list[Any]) -> None:
        if position:
            descriptor = self._disk.open(path)
        else:
            self._make_directory()
            descriptor = self._disk.create(path, 0)
        try:
            self._disk.write(descriptor, pieces, position)
        finally:
            self._disk.close(descriptor)

    def _make_directory(self) -> None:
        if not self._directory.is_dir():
            self._directory.mkdir(exist_ok=True)
            self._disk.sync_directory(self._directory.parent)

    async def sync(self, numbers: Iterable[int]) -> None:
        paths = [self._files[number].path for number in numbers]
        try:
            await self._in_thread(self._sync, paths)
        except OSError as error:
            raise _typed(error) from error

    def _sync(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._disk.sync_file(path)
        if paths:
            self._disk.sync_directory(self._directory)

    # Reading.

    async def read(self, number: int) -> list[StagedEntry]:
        file = self._files[number]
        try:
            found: list[StagedEntry] = await self._in_thread(self._entries, file.path, list(file.headers))
        except OSError as error:
            raise _typed(error) from error
        return found

    def _entries(self, path: Path, headers: Sequence[Header]) -> list[StagedEntry]:
        if not headers:
            return []
        descriptor = self._disk.open(path)
        try:
            buffer = pa.py_buffer(self._disk.map(descriptor, headers[-1].end_position))
        finally:
            self._disk.close(descriptor)
        found = []
        for header in headers:
            body = buffer.slice(header.body_position, header.body_length)
            if not is_body_right(header, body):
                raise DataDamaged(f"the entry at {header.position} of stage/{path.name} is damaged")
            found.append(StagedEntry(_draft(header, body), header.producer_epoch))
        return found

    # The end of a file.

    async def drop(self, numbers: Iterable[int]) -> None:
        files = [self._files[number] for number in numbers if number in self._files]
        for file in files:
            self._forget(file)
        try:
            await self._in_thread(self._remove, [file.path for file in files])
        except OSError as error:
            raise _typed(error) from error

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._disk.remove(path)

    def _keep(self, file: _File) -> None:
        self._files[file.number] = file
        self.size_bytes += file.end
        self._numbers[file.name.transaction, file.name.part] = file.number

    def _forget(self, file: _File) -> None:
        if self._files.pop(file.number, None) is not None:
            self.size_bytes -= file.end
        name = (file.name.transaction, file.name.part)
        if self._numbers.get(name) == file.number:
            del self._numbers[name]

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def file_name(number: int) -> str:
    return f"{number:010d}.stage"


def list_stages(root: Path) -> list[tuple[int, Path]]:
    """Stage files by number."""
    found = sorted((root / "stage").glob("*.stage"))
    return [(int(path.stem), path) for path in found if re.fullmatch(r"[0-9]{10,}", path.stem)]


def _lay_out(
    file: _File, drafts: Sequence[BatchDraft], partitions: int, now_us: int
) -> tuple[list[Any], list[Header]]:
    """The bytes of one call, and the headers of its entries."""
    pieces: list[Any] = []
    position = file.end
    if not position:
        first = _first_entry(file, now_us)
        pieces += first
        position = sum(len(piece) for piece in first)
    headers = []
    offset, call = file.messages, file.calls
    for index, draft in enumerate(drafts):
        header = Header(
            Kind.BATCH,
            CONTINUES if index < len(drafts) - 1 else 0,
            draft.codec,
            draft.body_crc,
            len(draft.body),
            draft.record_count,
            *draft.stream,
            draft.columns,
            offset,
            now_us,
            0,
            call,
            partitions,
            file.number,
            position,
            0,
            0,
        )
        pieces += [pack(header), draft.body, bytes(padded(len(draft.body)) - len(draft.body))]
        headers.append(header)
        offset, position = header.end_offset, header.end_position
    return pieces, headers


def _first_entry(file: _File, now_us: int) -> list[bytes]:
    body = msgspec.msgpack.encode(file.name)
    crc = int(google_crc32c.value(body))
    place, number = FILE_HEADER_BYTES, file.number
    header = Header(Kind.FACTS, 0, 0, crc, len(body), 1, 0, 0, 0, 0, now_us, 0, 0, 0, number, place, 0, 0)
    filled = body.ljust(padded(len(body)), b"\0")
    return [pack_file_header(FileHeader(number, now_us, 0)), pack(header), filled]


def _draft(header: Header, body: Any) -> BatchDraft:
    stream = StreamId(header.topic_id, header.partition)
    return BatchDraft(stream, body, header.body_crc, header.record_count, header.columns, header.codec)


def _read(disk: Disk, number: int, path: Path) -> _File | None:
    """A file as a crash may have left it, cut to its whole chains; None when it holds nothing."""
    size = path.stat().st_size
    if size < FILE_HEADER_BYTES + HEADER_BYTES:
        return None
    descriptor = disk.open(path)
    try:
        source = disk.map(descriptor, size)
        file = _scan(number, path, source, size)
        if file is not None and file.end < size:
            disk.truncate(descriptor, file.end)
            disk.sync(descriptor)
        return file
    finally:
        disk.close(descriptor)


def _scan(number: int, path: Path, source: Any, size: int) -> _File | None:
    head = unpack_file_header(source[:FILE_HEADER_BYTES])
    if head is None or head.file_number != number:
        return None
    buffer = pa.py_buffer(source)
    file: _File | None = None
    chain: list[Header] = []
    for item in Scan(source, buffer, number, size):
        if not isinstance(item, Header):
            break
        if file is None:
            file = _named(item, buffer, path)
            if file is None:
                return None
            continue
        chain.append(item)
        if not item.continues:
            file.headers.extend(chain)
            file.end, file.written_at_us = item.end_position, item.publish_time_us
            chain = []
    return file if file is not None and file.headers else None


def _named(header: Header, buffer: Any, path: Path) -> _File | None:
    body = buffer.slice(header.body_position, header.body_length).to_pybytes()
    try:
        name = msgspec.msgpack.decode(body, type=_Name)
    except msgspec.MsgspecError:
        return None
    return _File(header.file_number, path, name) if name.version == _VERSION else None


def _typed(error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no space for a stage: {error.strerror}")
    return StorageError(f"a stage cannot be written or read: {error}")
