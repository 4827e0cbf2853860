"""The catalog's schema version, and the way from an older schema to this one.

A new catalog is made with the present tables at once. An older one takes the steps of ``MIGRATIONS``
that it lacks, in order, all of them in one transaction, and only after it has been verified in its
old form: a migration computes checksums anew and would otherwise make damage look sound. A newer one
is refused untouched.

A step gets the connection, changes tables and rows as it likes, and returns the names of the tables
that it touched. A step states its SQL itself and never uses ``catalog_tables``, which moves on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
from sqlalchemy import Connection, MetaData, Table, Update, bindparam

from sparrow.model.errors import CatalogDamaged, DataDirectoryNewer
from sparrow.store import catalog_sqlite as database
from sparrow.store.catalog_ledger import (
    Digest,
    Ledger,
    first_ledger,
    layout_crc,
    store_ledger,
    verified_rows,
)
from sparrow.store.catalog_tables import (
    CONTENT_TABLES,
    METADATA,
    SCHEMA_VERSION_TABLE,
    Row,
    Value,
    key_of,
    row_crc,
    row_crcs,
)

FIRST_VERSION = 1
Migration: TypeAlias = Callable[[Connection], Sequence[str]]

MIGRATIONS: tuple[Migration, ...] = ()
"""Step i leads from version ``FIRST_VERSION + i`` to the next."""

_ROW_ID = 1


def newest_version(migrations: Sequence[Migration]) -> int:
    return FIRST_VERSION + len(migrations)


def is_empty(connection: Connection) -> bool:
    """True for a file that holds no table yet."""
    return not database.layout(connection)


def create(connection: Connection, migrations: Sequence[Migration]) -> Ledger:
    """All tables, the schema version and the first ledger, in an empty database."""
    METADATA.create_all(connection, checkfirst=False)
    connection.execute(SCHEMA_VERSION_TABLE.insert(), _version_row(newest_version(migrations)))
    return first_ledger(connection, CONTENT_TABLES)


def load_version(connection: Connection) -> int:
    """The schema version of the catalog."""
    names = {name for _, name, *_ in database.layout(connection)}
    if SCHEMA_VERSION_TABLE.name not in names:
        raise CatalogDamaged("the catalog has tables but says no schema version")
    rows = verified_rows(connection, SCHEMA_VERSION_TABLE.name)
    if len(rows) != 1:
        raise CatalogDamaged(f"the catalog has {len(rows)} schema versions instead of one")
    version = rows[0][1]
    assert isinstance(version, int), "the row has just matched its checksum"
    return version


def refuse_newer(version: int, migrations: Sequence[Migration]) -> None:
    """Raises for a catalog that a newer Sparrow has written."""
    newest = newest_version(migrations)
    if version > newest:
        raise DataDirectoryNewer(
            f"the catalog has schema version {version}; this Sparrow knows versions up to {newest}",
            found=version,
            known=newest,
        )


def migrate(connection: Connection, ledger: Ledger, version: int, migrations: Sequence[Migration]) -> Ledger:
    """Takes the steps that are missing, within the caller's transaction; returns the new ledger."""
    touched: set[str] = set()
    for step in migrations[version - FIRST_VERSION :]:
        touched.update(step(connection))
    there = {str(name) for _, name, *_ in database.layout(connection)}
    signed = {name: _sign_rows(connection, name) for name in sorted(touched & there)}
    kept = {name: digest for name, digest in ledger.digests.items() if name in there}
    connection.execute(SCHEMA_VERSION_TABLE.update(), _version_row(newest_version(migrations)))
    migrated = msgspec.structs.replace(
        ledger,
        version=ledger.version + 1,
        layout_crc=layout_crc(connection),
        digests=kept | signed,
    )
    store_ledger(connection, migrated)
    return migrated


def _sign_rows(connection: Connection, name: str) -> Digest:
    """Gives every row of a table, as it is now in the database, its checksum."""
    target = Table(name, MetaData(), autoload_with=connection)
    rows = [tuple(row)[1:] for row in connection.execute(target.select())]
    crcs = row_crcs(name, rows)
    if rows:
        signed = [_signed(target, row, crc) for row, crc in zip(rows, crcs, strict=True)]
        connection.execute(_update_crc(target), signed)
    return Digest(len(rows), functools.reduce(operator.xor, crcs, 0))


def _update_crc(target: Table) -> Update:
    keys = [column == bindparam(f"key_{column.name}") for column in target.primary_key]
    return target.update().where(*keys).values(crc=bindparam("new_crc"))


def _signed(target: Table, row: Row, crc: int) -> dict[str, Value]:
    keys = zip(target.primary_key, key_of(target, row), strict=True)
    return {"new_crc": crc} | {f"key_{column.name}": value for column, value in keys}


def _version_row(version: int) -> dict[str, Value]:
    crc = row_crc(SCHEMA_VERSION_TABLE.name, (_ROW_ID, version))
    return {"crc": crc, "id": _ROW_ID, "version": version}
