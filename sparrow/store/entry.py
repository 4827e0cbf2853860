"""One journal entry: its header's bytes, and how entries are found in a file again.

Sections 1, 2 and 4 of docs/format.md are the law here. This file packs, unpacks and judges bytes; it
opens nothing and decides nothing about what the entries mean.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c

FILE_MAGIC = b"SPRWJRNL"
ENTRY_MAGIC = b"SPRW"
VERSION = 1

_FILE_HEADER = struct.Struct("<8sIIqQ28x")
FILE_HEADER_BYTES = _FILE_HEADER.size + 4
_HEADER = struct.Struct("<4sBBBBIIIIIIQqQqIIQQQ4x")
HEADER_BYTES = _HEADER.size + 4
_CRC = struct.Struct("<I")
ALIGNMENT = 8
_POSITION_BITS = 40

assert FILE_HEADER_BYTES == 64
assert HEADER_BYTES == 104


class Kind(enum.IntEnum):
    """What an entry's body is."""

    BATCH = 1
    FACTS = 2
    NOTE = 3


CONTINUES = 0x01
SEQUENCES = 0x02


class Header(NamedTuple):
    """The fields of an entry header, in the order of their bytes."""

    kind: int
    flags: int
    codec: int
    body_crc: int
    body_length: int
    record_count: int
    topic_id: int
    partition: int
    columns: int
    base_offset: int
    publish_time_us: int
    producer_id: int
    base_sequence: int
    producer_epoch: int
    file_number: int
    position: int
    durable_position: int
    catalog_version: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.record_count

    @property
    def body_position(self) -> int:
        return self.position + HEADER_BYTES

    @property
    def end_position(self) -> int:
        """Where the next entry starts."""
        return self.position + HEADER_BYTES + padded(self.body_length)

    @property
    def continues(self) -> bool:
        return bool(self.flags & CONTINUES)


class FileHeader(NamedTuple):
    """The first bytes of a journal file."""

    file_number: int
    created_at_us: int
    previous_length: int


class Broken(NamedTuple):
    """A stretch of a file in which no valid entry starts."""

    position: int
    end_position: int
    headers: tuple[Header, ...] = ()
    """Entries in it whose header is whole and only whose body is damaged: their offsets are known."""


def lsn(file_number: int, position: int) -> int:
    """An entry's place in the whole journal as one number."""
    return file_number << _POSITION_BITS | position


def padded(length: int) -> int:
    return (length + ALIGNMENT - 1) & -ALIGNMENT


def pack(header: Header) -> bytes:
    fields = _HEADER.pack(ENTRY_MAGIC, VERSION, *header)
    return fields + _CRC.pack(google_crc32c.value(fields))


def pack_file_header(header: FileHeader) -> bytes:
    fields = _FILE_HEADER.pack(
        FILE_MAGIC, VERSION, header.file_number, header.created_at_us, header.previous_length
    )
    return fields + _CRC.pack(google_crc32c.value(fields))


def unpack_file_header(raw: bytes) -> FileHeader | None:
    """The header, or None when the bytes are not one."""
    if len(raw) < FILE_HEADER_BYTES:
        return None
    fields = raw[: _FILE_HEADER.size]
    magic, version, number, created_at_us, previous_length = _FILE_HEADER.unpack(fields)
    if magic != FILE_MAGIC or version != VERSION or not _is_crc_right(raw, fields):
        return None
    return FileHeader(number, created_at_us, previous_length)


def unpack(source: Any, position: int, file_number: int) -> Header | None:
    """The header at ``position`` when it is a valid one that belongs there."""
    raw = source[position : position + HEADER_BYTES]
    if len(raw) < HEADER_BYTES or raw[:4] != ENTRY_MAGIC or raw[4] != VERSION:
        return None
    fields = raw[: _HEADER.size]
    if not _is_crc_right(raw, fields):
        return None
    header = Header(*_HEADER.unpack(fields)[2:])
    belongs = header.position == position and header.file_number == file_number
    return header if belongs else None


def _is_crc_right(raw: bytes, fields: bytes) -> bool:
    return bool(_CRC.unpack(raw[len(fields) : len(fields) + 4])[0] == google_crc32c.value(fields))


def is_body_right(header: Header, body: Any) -> bool:
    """Whether the body is what was written."""
    return bool(google_crc32c.value(body) == header.body_crc)


class Scan:
    """Walks the entries of one file's bytes; yields headers and the stretches between them.

    ``source`` is an mmap (or bytes) of the file. A stretch is only reported when something valid
    follows it or it is not all zero; whether it is damage or the end of the log is for recovery to say.
    """

    def __init__(self, source: Any, buffer: Any, file_number: int, length: int) -> None:
        self._source = source
        self._buffer = buffer
        self._number = file_number
        self._length = length

    def __iter__(self) -> Iterator[Header | Broken]:
        position = FILE_HEADER_BYTES
        while position < self._length:
            header = self._entry_at(position)
            if header is None:
                following = self._next_after(position)
                if following is None and self._is_blank(position):
                    return
                end = self._length if following is None else following.position
                yield Broken(position, end, self._headers_between(position, end))
                if following is None:
                    return
                header = following
            yield header
            position = header.end_position

    def _entry_at(self, position: int) -> Header | None:
        header = unpack(self._source, position, self._number)
        if header is None or header.body_position + header.body_length > self._length:
            return None
        body = self._buffer.slice(header.body_position, header.body_length)
        return header if is_body_right(header, body) else None

    def _next_after(self, position: int) -> Header | None:
        at = self._source.find(ENTRY_MAGIC, position + 1)
        while at != -1 and at < self._length:
            header = self._entry_at(at) if at % ALIGNMENT == 0 else None
            if header is not None:
                return header
            at = self._source.find(ENTRY_MAGIC, at + 1)
        return None

    def _headers_between(self, position: int, end: int) -> tuple[Header, ...]:
        """Whole headers in a broken stretch; each says where the next entry would start."""
        found = []
        header = unpack(self._source, position, self._number)
        while header is not None and header.position < end:
            found.append(header)
            header = unpack(self._source, header.end_position, self._number)
        return tuple(found)

    def _is_blank(self, position: int) -> bool:
        step = 1 << 20
        zeros = bytes(step)
        for start in range(position, self._length, step):
            piece = self._source[start : min(start + step, self._length)]
            if piece != zeros[: len(piece)]:
                return False
        return True
