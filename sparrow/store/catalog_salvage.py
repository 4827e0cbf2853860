"""What can still be read of a damaged catalog.

A catalog that does not open may have lost one row or its table of contents. So nothing here asks
SQLite: the bytes are read, never written, and every page that looks like part of a table is searched
for rows. A row is believed when it matches the checksum that it carries, which also tells its table;
it does not matter whether the way to it is intact. What is known of the file format is little:

- the main file is an array of pages; the write-ahead log holds newer copies of some of them, and
  counts up to its last commit;
- our tables are clustered on their keys, so rows are cells of index pages, inner ones and leaves;
- a cell is a record of typed values, the key's columns first, and may go on in a chain of pages.

https://www.sqlite.org/fileformat2.html defines it in full.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Table

from sparrow.model.errors import DataDirectoryUnusable
from sparrow.store.catalog_ledger import Ledger
from sparrow.store.catalog_sqlite import wal_path
from sparrow.store.catalog_tables import (
    CONTENT_TABLES,
    CURSORS,
    DOCUMENTS,
    LEDGER_TABLE,
    PRODUCER_STATES,
    PRODUCERS,
    SEGMENTS,
    STREAMS,
    SUBSCRIPTIONS,
    TOPICS,
    CatalogRows,
    CursorCheckpoint,
    Document,
    Key,
    Producer,
    ProducerState,
    StreamRow,
    key_of,
    row_crc,
    segment_from_row,
    subscription_from_row,
    topic_from_row,
)

PAGE_BYTES_DEFAULT = 4096
_WAL_HEADER = struct.Struct(">IIIIIIII")
_FRAME_HEADER = struct.Struct(">IIIIII")
_INNER, _LEAF = 0x02, 0x0A
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

_Record = tuple[Any, ...]
"""Values as they were stored; what they are is certain only once a checksum has matched."""
_Found = defaultdict[str, dict[Key, _Record]]
"""The rows of each table, by key."""
_Pages = dict[int, bytes]
"""Pages by number; the first is 1."""


class SalvagedRows(msgspec.Struct, kw_only=True):
    """Every row that matches its checksum, and what the ledger, if it is among them, says."""

    rows: CatalogRows
    version: int | None
    sealed_through: int | None
    missing: dict[str, int]
    """How many rows each table lacks, for those that lack some; empty when the ledger is lost."""


def salvage(path: str | Path) -> SalvagedRows:
    """All sound rows of the catalog at ``path``, which is not changed and may be damaged anywhere."""
    path = Path(path)
    try:
        pages = _read_pages(path)
    except OSError as error:
        raise DataDirectoryUnusable(f"cannot read the catalog {path}: {error}") from error
    found = _find_rows(pages)
    ledger = _ledger_of(found)
    digests = ledger.digests if ledger else {}
    counts = {name: digest.rows - len(found[name]) for name, digest in digests.items()}
    return SalvagedRows(
        rows=_to_values(found, ledger),
        version=ledger.version if ledger else None,
        sealed_through=ledger.sealed_through if ledger else None,
        missing={name: count for name, count in counts.items() if count > 0},
    )


# Pages.


def _read_pages(path: Path) -> _Pages:
    content = path.read_bytes()
    size = _page_bytes(content)
    pages = {
        start // size + 1: content[start : start + size] for start in range(0, len(content) - size + 1, size)
    }
    log = wal_path(path)
    return _replay(pages, log.read_bytes(), size) if log.exists() else pages


def _page_bytes(content: bytes) -> int:
    size = int.from_bytes(content[16:18], "big")
    size = 65536 if size == 1 else size
    return size if size >= 512 and size.bit_count() == 1 else PAGE_BYTES_DEFAULT


def _replay(pages: _Pages, log: bytes, size: int) -> _Pages:
    """The pages with all commits of the log; each row's checksum guards against a torn one."""
    if len(log) < _WAL_HEADER.size:
        return pages
    salts = _WAL_HEADER.unpack_from(log)[4:6]
    newest, waiting = dict(pages), _Pages()
    for start in range(_WAL_HEADER.size, len(log) - size - _FRAME_HEADER.size + 1, size + 24):
        number, pages_after_commit, *frame_salts, _, _ = _FRAME_HEADER.unpack_from(log, start)
        if tuple(frame_salts) != salts:
            break
        waiting[number] = log[start + _FRAME_HEADER.size : start + _FRAME_HEADER.size + size]
        if pages_after_commit:
            newest |= waiting
            newest = {key: page for key, page in newest.items() if key <= pages_after_commit}
            waiting = {}
    return newest


# Rows.


def _find_rows(pages: _Pages) -> _Found:
    by_width: dict[int, list[Table]] = defaultdict(list)
    for table in (*CONTENT_TABLES, LEDGER_TABLE):
        by_width[len(table.c)].append(table)
    found: _Found = defaultdict(dict)
    for values in _records(pages):
        for table in by_width[len(values)]:
            row = _row_of(table, values)
            if row is not None:
                found[table.name].setdefault(key_of(table, row), row)
    return found


def _row_of(table: Table, values: _Record) -> _Record | None:
    """The row that a record is, if it is one of this table: its key comes first, then its checksum."""
    width = len(table.primary_key)
    row = values[:width] + values[width + 1 :]
    return row if values[width] == row_crc(table.name, row) else None


def _records(pages: _Pages) -> Iterator[_Record]:
    """Everything in the pages that can be read as a record."""
    for number, page in sorted(pages.items()):
        if number == 1 or page[0] not in (_INNER, _LEAF):
            continue
        for position in _cell_positions(page):
            try:
                yield _decode(_payload(pages, page, position))
            except (IndexError, KeyError, ValueError):
                continue  # Not a sound cell: this is what damage looks like here.


def _cell_positions(page: bytes) -> list[int]:
    count = int.from_bytes(page[3:5], "big")
    start = 12 if page[0] == _INNER else 8
    inner = 4 if page[0] == _INNER else 0
    pointers = (page[at : at + 2] for at in range(start, min(start + 2 * count, len(page) - 1), 2))
    return [int.from_bytes(pointer, "big") + inner for pointer in pointers]


def _payload(pages: _Pages, page: bytes, position: int) -> bytes:
    size, position = _varint(page, position)
    if size > len(page) * len(pages):
        raise ValueError("larger than the file")
    local = _local_bytes(size, len(page))
    payload = page[position : position + local]
    following = page[position + local : position + local + 4]
    while len(payload) < size:
        overflow = pages[int.from_bytes(following, "big")]
        following = overflow[:4]
        payload += overflow[4 : 4 + size - len(payload)]
    return payload


def _local_bytes(size: int, page_bytes: int) -> int:
    """How much of a payload lies in its index page; the rest follows in overflow pages."""
    most = (page_bytes - 12) * 64 // 255 - 23
    least = (page_bytes - 12) * 32 // 255 - 23
    if size <= most:
        return size
    local = least + (size - least) % (page_bytes - 4)
    return local if local <= most else least


def _decode(record: bytes) -> _Record:
    end, position = _varint(record, 0)
    values, body = [], end
    while position < end:
        kind, position = _varint(record, position)
        value, body = _value(record, kind, body)
        values.append(value)
    return tuple(values)


def _value(record: bytes, kind: int, start: int) -> tuple[object, int]:
    if kind in _INTEGER_BYTES:
        end = start + _INTEGER_BYTES[kind]
        return int.from_bytes(record[start:end], "big", signed=True), end
    if kind in (8, 9):
        return kind - 8, start
    if kind < 12:
        raise ValueError(f"no column of ours is of kind {kind}")
    end = start + (kind - 12) // 2
    if end > len(record):
        raise ValueError("a value goes beyond its record")
    return record[start:end].decode() if kind % 2 else record[start:end], end


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of one to nine bytes, and the position after it."""
    value = 0
    for _ in range(8):
        byte = data[position]
        position += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, position
    return value << 8 | data[position], position + 1


# Values.


def _ledger_of(found: _Found) -> Ledger | None:
    for _, content in found[LEDGER_TABLE.name].values():
        assert isinstance(content, bytes), "the row has matched its checksum"
        return msgspec.msgpack.decode(content, type=Ledger)
    return None


def _to_values(found: _Found, ledger: Ledger | None) -> CatalogRows:
    def rows(table: Table) -> list[_Record]:
        return [row for _, row in sorted(found[table.name].items())]

    return CatalogRows(
        topics=[topic_from_row(row) for row in rows(TOPICS)],
        streams=[StreamRow(*row) for row in rows(STREAMS)],
        segments=[segment_from_row(row) for row in rows(SEGMENTS)],
        subscriptions=[subscription_from_row(row) for row in rows(SUBSCRIPTIONS)],
        cursors=[CursorCheckpoint(*row) for row in rows(CURSORS)],
        producers=[Producer(*row) for row in rows(PRODUCERS)],
        producer_states=[ProducerState(*row) for row in rows(PRODUCER_STATES)],
        documents=[Document(*row) for row in rows(DOCUMENTS)],
        last_ids=dict(ledger.last_ids) if ledger else {},
    )
