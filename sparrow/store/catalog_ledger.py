"""The ledger: one row that says what all the other rows must add up to.

It holds the catalog's version (one more with every commit), the last ids given out (an id is never
given twice, even when its owner is gone), the number of the last journal file that was sealed, the
checksum of the table definitions and, for every table, how many rows there are and the exclusive or
of their checksums. A row that is changed, lost, doubled or moved breaks its own checksum or its
table's digest.

Rows change through a ``Draft`` alone, which keeps the digests true within the same transaction. What
a draft has computed becomes the ledger when the transaction is committed, and is dropped otherwise.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import google_crc32c
import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    literal_column,
    select,
    table,
    tuple_,
)

from sparrow.model.errors import CatalogDamaged
from sparrow.store import catalog_sqlite as database
from sparrow.store.catalog_tables import LEDGER_TABLE, Key, Row, Value, key_of, row_crc, row_crcs

NOTHING_SEALED = -1
KEYS_IN_A_QUERY_MAX = 200
"""Three values a key at most: far below the 32,766 variables that SQLite allows in a statement."""
ROWS_IN_A_FETCH = 1_000

_LEDGER_ID = 1


class Digest(msgspec.Struct, frozen=True):
    """What the rows of one table add up to."""

    rows: int = 0
    crc: int = 0


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole catalog adds up to."""

    version: int
    sealed_through: int
    layout_crc: int
    last_ids: dict[str, int]
    digests: dict[str, Digest]


def layout_crc(connection: Connection) -> int:
    """The checksum of the table definitions as the database has them."""
    return int(google_crc32c.value(msgspec.msgpack.encode(database.layout(connection))))


def first_ledger(connection: Connection, tables: Iterable[Table]) -> Ledger:
    """The ledger of a catalog whose tables are there and empty; it is stored at once."""
    ledger = Ledger(
        version=0,
        sealed_through=NOTHING_SEALED,
        layout_crc=layout_crc(connection),
        last_ids={},
        digests={str(table.name): Digest() for table in tables},
    )
    connection.execute(LEDGER_TABLE.insert(), _ledger_row(ledger))
    return ledger


def store_ledger(connection: Connection, ledger: Ledger) -> None:
    connection.execute(LEDGER_TABLE.update(), _ledger_row(ledger))


def _ledger_row(ledger: Ledger) -> dict[str, Value]:
    content = msgspec.msgpack.encode(ledger)
    crc = row_crc(LEDGER_TABLE.name, (_LEDGER_ID, content))
    return {"crc": crc, "id": _LEDGER_ID, "content": content}


def load_ledger(connection: Connection) -> Ledger:
    """The stored ledger; refuses one that is damaged or missing."""
    rows = verified_rows(connection, LEDGER_TABLE.name)
    if len(rows) != 1:
        raise CatalogDamaged(f"the catalog has {len(rows)} ledger rows instead of one")
    try:
        return msgspec.msgpack.decode(rows[0][1], type=Ledger)  # type: ignore[arg-type]
    except msgspec.DecodeError as error:
        raise CatalogDamaged(f"the catalog's ledger cannot be read: {error}") from error


def verified_rows(connection: Connection, name: str) -> list[Row]:
    """All rows of a table of whatever layout, each checked against its own checksum."""
    return _read_table(connection, name)[0]


def rows_where(connection: Connection, source: Table, *where: ColumnElement[bool]) -> list[Row]:
    """The rows that fulfil the conditions, in the order of their keys, each checked."""
    query = select(source).where(*where).order_by(*source.primary_key)
    return _check_rows(source.name, _stored_rows(connection, query))[0]


def rows_with_keys(connection: Connection, source: Table, keys: Sequence[Key]) -> list[Row]:
    """Those rows with these keys that are there, each checked."""
    chunks = (_in_keys(source, chunk) for chunk in _chunks(keys))
    return [row for where in chunks for row in rows_where(connection, source, where)]


def verify(connection: Connection, ledger: Ledger) -> dict[str, list[Row]]:
    """Every row of every table, when all of them add up to what the ledger says."""
    if layout_crc(connection) != ledger.layout_crc:
        raise CatalogDamaged("the definitions of the catalog's tables are not those that were made")
    found: dict[str, list[Row]] = {}
    for name, expected in ledger.digests.items():
        found[name], digest = _read_table(connection, name)
        _compare(name, expected, digest)
    return found


def _read_table(connection: Connection, name: str) -> tuple[list[Row], Digest]:
    query: Select[Any] = select(literal_column("*")).select_from(table(name))
    return _check_rows(name, _stored_rows(connection, query))


def _stored_rows(connection: Connection, query: Select[Any]) -> Iterator[list[Row]]:
    """Rows as the driver reads them, some at a time. Integers, texts and bytes need no conversion,
    and leaving out SQLAlchemy's own row objects saves a fifth of the time to open a catalog."""
    cursor = connection.execute(query).cursor
    assert cursor is not None, "a query has a cursor"
    while chunk := cursor.fetchmany(ROWS_IN_A_FETCH):
        yield list(chunk)


def _check_rows(name: str, stored: Iterable[list[Row]]) -> tuple[list[Row], Digest]:
    rows: list[Row] = []
    total = 0
    for chunk in stored:
        found = [values[1:] for values in chunk]
        crcs = row_crcs(name, found)
        if crcs != [values[0] for values in chunk]:
            raise CatalogDamaged(
                f"a row of the catalog's table {name} does not match its checksum", table=name
            )
        rows += found
        total ^= functools.reduce(operator.xor, crcs)
    return rows, Digest(len(rows), total)


def _compare(name: str, expected: Digest, found: Digest) -> None:
    if expected.rows != found.rows:
        raise CatalogDamaged(
            f"the catalog's table {name} has {found.rows} rows; its ledger says {expected.rows}",
            table=name,
        )
    if expected.crc != found.crc:
        raise CatalogDamaged(
            f"the rows of the catalog's table {name} are not those that its ledger counts", table=name
        )


class Draft:
    """The changes of one transaction, and the ledger that will be true once it is committed."""

    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self._connection = connection
        self._ledger = ledger
        self._digests = dict(ledger.digests)
        self._last_ids = dict(ledger.last_ids)
        self.version = ledger.version + 1
        self.sealed_through = ledger.sealed_through
        self.is_changed = False
        self.has_failed = False

    def ledger(self) -> Ledger:
        """The ledger after these changes."""
        return msgspec.structs.replace(
            self._ledger,
            version=self.version,
            sealed_through=self.sealed_through,
            last_ids=self._last_ids,
            digests=self._digests,
        )

    def seal(self, journal_file: int) -> None:
        """Notes that the journal is sealed up to and with this file."""
        self.sealed_through = journal_file
        self.is_changed = True

    def next_id(self, target: Table) -> int:
        """An id that no row of this table has ever had."""
        return self.reserve_id(target, self._last_ids.get(target.name, 0) + 1)

    def reserve_id(self, target: Table, taken: int) -> int:
        """Notes that an id is taken, so that it is not given out again."""
        self._last_ids[str(target.name)] = max(taken, self._last_ids.get(target.name, 0))
        return taken

    def insert(self, target: Table, rows: Sequence[Row]) -> None:
        """New rows; one whose key is there already fails the transaction."""
        if rows:
            stored = _signed(target, rows)
            self._connection.execute(target.insert(), stored)
            self._count(target, added=[row["crc"] for row in stored])

    def put(self, target: Table, rows: Sequence[Row]) -> None:
        """Rows that take the place of those with the same key, or are new; the last of a key stays."""
        newest = {key_of(target, row): row for row in rows}
        there = self.crcs(target, list(newest))
        self._update(target, [newest[key] for key in there], there.values())
        self.insert(target, [row for key, row in newest.items() if key not in there])

    def _update(self, target: Table, rows: Sequence[Row], old_crcs: Iterable[int]) -> None:
        if rows:
            stored = _signed(target, rows)
            self._connection.execute(_update_by_key(target), [_with_key(target, row) for row in stored])
            self._count(target, added=[row["crc"] for row in stored], removed=old_crcs)

    def remove(self, target: Table, *where: ColumnElement[bool]) -> int:
        """Takes the rows out that fulfil the conditions; says how many there were."""
        crcs = self._connection.execute(select(target.c.crc).where(*where)).scalars().all()
        if crcs:
            self._connection.execute(target.delete().where(*where))
            self._count(target, removed=crcs)
        return len(crcs)

    def remove_keys(self, target: Table, keys: Sequence[Key]) -> int:
        """Takes the rows with these keys out; says how many there were."""
        return sum(self.remove(target, _in_keys(target, chunk)) for chunk in _chunks(keys))

    def crcs(self, target: Table, keys: Sequence[Key]) -> dict[Key, int]:
        """The checksums of those rows with these keys that are there, by key."""
        found: dict[Key, int] = {}
        for chunk in _chunks(keys):
            query = select(*target.primary_key, target.c.crc).where(_in_keys(target, chunk))
            found |= {tuple(key): crc for *key, crc in self._connection.execute(query)}
        return found

    def _count(self, target: Table, *, added: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        digest = self._digests[target.name]
        count, crc = digest.rows, digest.crc
        for one in added:
            count, crc = count + 1, crc ^ one
        for one in removed:
            count, crc = count - 1, crc ^ one
        self._digests[str(target.name)] = Digest(count, crc)
        self.is_changed = True


def _signed(target: Table, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as they are stored: with their checksums, and by column name."""
    names = target.c.keys()
    crcs = row_crcs(target.name, rows)
    return [dict(zip(names, (crc, *row), strict=True)) for crc, row in zip(crcs, rows, strict=True)]


def _update_by_key(target: Table) -> Update:
    keys = [column == bindparam(f"key_{column.name}") for column in target.primary_key]
    others = [column.name for column in target.c if not column.primary_key]
    return target.update().where(and_(*keys)).values({name: bindparam(name) for name in others})


def _with_key(target: Table, stored: dict[str, Any]) -> dict[str, Any]:
    keys = {column.name for column in target.primary_key}
    return {f"key_{name}" if name in keys else name: value for name, value in stored.items()}


def _in_keys(target: Table, keys: Sequence[Key]) -> ColumnElement[bool]:
    columns = list(target.primary_key)
    if len(columns) == 1:
        return columns[0].in_([key[0] for key in keys])
    return tuple_(*columns).in_(keys)


def _chunks(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), KEYS_IN_A_QUERY_MAX):
        yield keys[start : start + KEYS_IN_A_QUERY_MAX]
