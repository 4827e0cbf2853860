"""An open catalog file: verified when it is opened, changed in transactions, vouched for at the end.

The session owns the connection, the ledger and the clean marker, and knows nothing of topics. It
holds these rules:

- A transaction within a transaction is a part of it; an error in any part undoes the whole.
- The ledger in memory changes only after the commit, so that it always says what is on the disk.
- A transaction that changes nothing is not committed and does not count as a version.
- After a failure that may have left something behind, changes are refused until the file is opened,
  and so verified, again. Reading goes on.

The rows that opening has read in order to verify them serve the first reader of each table, since
reading them twice would double the time to open; the first transaction drops them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table

from sparrow.model.errors import CatalogDamaged, PreconditionFailed, SparrowError, StorageError
from sparrow.store import catalog_schema as schema
from sparrow.store import catalog_sqlite as database
from sparrow.store.catalog_ledger import (
    Draft,
    Ledger,
    load_ledger,
    rows_where,
    rows_with_keys,
    store_ledger,
    verify,
)
from sparrow.store.catalog_marker import CleanMarker
from sparrow.store.catalog_tables import Key, Row
from sparrow.store.disk import Disk


class CatalogSession:
    """One open catalog file."""

    def __init__(self, path: Path, disk: Disk, migrations: Sequence[schema.Migration]) -> None:
        doing = f"cannot open the catalog {path}"
        self.path = path
        self._draft: Draft | None = None
        self._failure: SparrowError | None = None
        self._verified: dict[str, list[Row]] = {}
        self._marker = CleanMarker(path, disk)
        self._marker.check()
        with database.opening_errors(doing):
            self._connection: Connection = database.connect(path)
        try:
            with database.opening_errors(doing):
                self.ledger: Ledger = self._load(migrations)
        except BaseException:
            database.disconnect(self._connection)
            raise

    def _load(self, migrations: Sequence[schema.Migration]) -> Ledger:
        if not self._marker.is_there:
            self._check_structure()
        if schema.is_empty(self._connection):
            with self._writing():
                return schema.create(self._connection, migrations)
        version = schema.load_version(self._connection)
        schema.refuse_newer(version, migrations)
        ledger = load_ledger(self._connection)
        verified = verify(self._connection, ledger)
        if version < schema.newest_version(migrations):
            with self._writing():
                return schema.migrate(self._connection, ledger, version, migrations)
        self._verified = verified
        return ledger

    def _check_structure(self) -> None:
        """Needless for a file that is byte for byte the one that was closed in order."""
        complaints = database.complaints(self._connection)
        if complaints:
            raise CatalogDamaged(f"the catalog {self.path} is damaged: {'; '.join(complaints)}")

    @property
    def is_closed(self) -> bool:
        return self._connection.closed

    def close(self) -> None:
        """Leaves one file and the marker that vouches for it, unless a failure left doubt."""
        assert self._draft is None, "a catalog cannot be closed within its own transaction"
        if self.is_closed:
            return
        with database.typed_errors(f"cannot close the catalog {self.path}"):
            try:
                is_whole = self._failure is None and database.checkpoint(self._connection)
            finally:
                database.disconnect(self._connection)
        if is_whole and not self._marker.is_there:
            self._marker.write()

    @contextmanager
    def transaction(self) -> Iterator[Draft]:
        """Makes everything within one transaction. Within another one it is a part of that."""
        if self._draft is None:
            with self._whole_transaction() as draft:
                yield draft
        else:
            with self._part_of_transaction(self._draft) as draft:
                yield draft

    @contextmanager
    def _whole_transaction(self) -> Iterator[Draft]:
        with self._writing():
            draft = self._draft = Draft(self._connection, self.ledger)
            try:
                yield draft
            finally:
                self._draft = None
            if draft.has_failed:
                raise PreconditionFailed("a part of this transaction failed; all of it is undone")
            if draft.is_changed:
                store_ledger(self._connection, draft.ledger())
        if draft.is_changed:
            self.ledger = draft.ledger()
            self._keep_log_short()

    @contextmanager
    def _part_of_transaction(self, draft: Draft) -> Iterator[Draft]:
        try:
            with database.typed_errors("the catalog cannot be changed"):
                yield draft
        except BaseException:
            draft.has_failed = True
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction of the database: committed, or rolled back with a typed error."""
        self._refuse_after_failure()
        self._marker.remove()
        self._verified = {}
        try:
            with database.typed_errors("the catalog cannot be changed"):
                database.begin(self._connection)
                yield
                database.commit(self._connection)
        except BaseException as error:
            self._roll_back(error)
            raise

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise StorageError(
                f"the catalog takes no changes after an earlier failure: {self._failure.message}",
                hint="Check the disk, then open the data directory again.",
            )

    def _roll_back(self, error: BaseException) -> None:
        try:
            with database.typed_errors("the catalog cannot undo a transaction"):
                database.rollback(self._connection)
        except SparrowError as second:
            error = second
        self._freeze_if_in_doubt(error)

    def _keep_log_short(self) -> None:
        """The transaction is committed already, so that a failure here concerns the next one."""
        try:
            with database.typed_errors("the catalog's log cannot be moved into its main file"):
                database.keep_log_short(self._connection, self.path)
        except SparrowError as error:
            self._freeze_if_in_doubt(error)

    def _freeze_if_in_doubt(self, error: BaseException) -> None:
        if isinstance(error, SparrowError) and database.leaves_doubt(error):
            self._failure = error

    def rows(self, table: Table, *where: ColumnElement[bool]) -> list[Any]:
        """Rows in the order of their keys; whoever knows the table knows their types."""
        if not where and table.name in self._verified:
            return sorted(self._verified.pop(table.name))
        with database.typed_errors("the catalog cannot be read"):
            return rows_where(self._connection, table, *where)

    def rows_with_keys(self, table: Table, keys: Sequence[Key]) -> list[Any]:
        """Those rows with these keys that are there."""
        with database.typed_errors("the catalog cannot be read"):
            return rows_with_keys(self._connection, table, keys)
