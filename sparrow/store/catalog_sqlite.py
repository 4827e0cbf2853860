"""The one place that knows the catalog lies in SQLite.

Everything else speaks SQLAlchemy Core. Here are: how a connection is made durable (write-ahead log,
a sync with every commit, foreign keys), how a transaction starts and ends, what SQLite can say about
the health of its file, and which typed error its failures become. A catalog in PostgreSQL needs this
file written once more and nothing else.

The connection stays in autocommit mode and transactions are opened by hand, because Python's own
handling opens them late and not at all around statements that change the schema.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.pool import NullPool
from sqlalchemy.util import LRUCache

from sparrow.model.errors import (
    AlreadyExists,
    CatalogDamaged,
    DataDirectoryLocked,
    DataDirectoryUnusable,
    PreconditionFailed,
    SparrowError,
    StorageError,
    StorageFull,
)

BUSY_TIMEOUT_MS = 1_000
"""How long someone who looks into the file with another program is waited for."""

_PRAGMAS = (
    f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}",
    # Two processes with a ledger in memory each would undo each other's digests: let one in only.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    # Deleted rows leave zeros, so that salvage cannot mistake them for living ones.
    "PRAGMA secure_delete = ON",
    # SQLite's own checkpoints swallow their errors; `keep_log_short` does not.
    "PRAGMA wal_autocheckpoint = 0",
)
LOG_BYTES_MAX = 4 << 20
"""Size at which the write-ahead log is moved into the main file: SQLite's default of 1,000 pages."""

_ERRORS: dict[int, type[SparrowError]] = {
    sqlite3.SQLITE_FULL: StorageFull,
    sqlite3.SQLITE_READONLY: DataDirectoryUnusable,
    sqlite3.SQLITE_CANTOPEN: DataDirectoryUnusable,
    sqlite3.SQLITE_PERM: DataDirectoryUnusable,
    sqlite3.SQLITE_BUSY: DataDirectoryLocked,
    sqlite3.SQLITE_LOCKED: DataDirectoryLocked,
    sqlite3.SQLITE_IOERR: StorageError,
    sqlite3.SQLITE_NOMEM: StorageError,
    sqlite3.SQLITE_CONSTRAINT: PreconditionFailed,
}

_COMPILED: LRUCache[Any, Any] = LRUCache(500)
"""Statements that were compiled, for all catalogs of the process."""


def connect(path: Path) -> Connection:
    """The one connection to the catalog at ``path``, which is created empty when it is not there."""
    engine = create_engine(
        URL.create("sqlite", database=str(path)), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    event.listen(engine, "connect", _prepare)
    return engine.connect().execution_options(compiled_cache=_COMPILED)


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise DataDirectoryUnusable(f"SQLite keeps no write-ahead log on this file system: {mode}")


def begin(connection: Connection) -> None:
    """Opens a transaction that may write; another writer is met here and not in the middle."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def commit(connection: Connection) -> None:
    connection.exec_driver_sql("COMMIT")


def rollback(connection: Connection) -> None:
    """Undoes the transaction, if SQLite has not done so by itself."""
    if _driver(connection).in_transaction:
        connection.exec_driver_sql("ROLLBACK")


def complaints(connection: Connection) -> list[str]:
    """What SQLite finds wrong with the structure of its own file."""
    lines = connection.exec_driver_sql("PRAGMA integrity_check(10)").scalars()
    return [str(line) for line in lines if line != "ok"]


def layout(connection: Connection) -> list[tuple[object, ...]]:
    """The definitions of all tables and indexes, as the database has them."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    return [tuple(row) for row in connection.exec_driver_sql(query)]


def checkpoint(connection: Connection) -> bool:
    """Moves the write-ahead log into the main file; False when someone else prevents it."""
    busy, _, _ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    return not busy


def keep_log_short(connection: Connection, path: Path) -> None:
    """Empties the write-ahead log when it has grown long."""
    if wal_path(path).stat().st_size > LOG_BYTES_MAX:
        checkpoint(connection)


def disconnect(connection: Connection) -> None:
    connection.close()
    connection.engine.dispose()


def wal_path(path: Path) -> Path:
    """Where SQLite keeps the write-ahead log of the catalog at ``path``."""
    return path.with_name(path.name + "-wal")


@contextmanager
def typed_errors(doing: str) -> Iterator[None]:
    """Turns SQLite's errors into ours, save those that only a bug of ours can cause."""
    try:
        yield
    except (ProgrammingError, sqlite3.ProgrammingError):
        raise
    except (DBAPIError, sqlite3.Error) as error:
        raise _typed_error(error, doing) from error


@contextmanager
def opening_errors(doing: str) -> Iterator[None]:
    """As ``typed_errors``, for a file of which nothing is known to be sound yet."""
    try:
        with typed_errors(doing):
            yield
    except UnicodeDecodeError as error:
        # SQLite quotes the damaged table definition in its message, which Python then cannot read.
        raise CatalogDamaged(f"{doing}: its table definitions are damaged ({error.reason})") from error


def _typed_error(error: DBAPIError | sqlite3.Error, doing: str) -> SparrowError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    name = getattr(cause, "sqlite_errorname", type(cause).__name__)
    # Without a code, the driver could not make sense of a stored value.
    kind = CatalogDamaged if code is None else _ERRORS.get(code & 0xFF, CatalogDamaged)
    if code in (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY):
        kind = AlreadyExists
    return kind(f"{doing}: {cause} ({name})", sqlite_error=name)


def leaves_doubt(error: BaseException) -> bool:
    """True when a failure may have left something behind on disk, which opening would find."""
    if isinstance(error, StorageError) and isinstance(error.__cause__, DBAPIError | sqlite3.Error):
        return not isinstance(error, StorageFull | DataDirectoryUnusable | DataDirectoryLocked)
    return isinstance(error, CatalogDamaged)


def _driver(connection: Connection) -> Any:
    return connection.connection.dbapi_connection
