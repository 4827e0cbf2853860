"""A batch seen through the columns that filters ask for.

Filters of thousands of subscriptions look at the same batch. The view extracts each column that some
filter names once, keeps it, and hands the same array to all of them: an attribute key becomes a
string array, a field of JSON payloads becomes one array per JSON type. A view lives as long as the
work on its batch and knows nothing of filters.

Absence is null everywhere, and never an error: a batch without the ``attributes`` column has no
attributes, a message without a key has a null key, a JSON field that is missing, lies below
something that is no object, or is JSON null, is null. A missing priority is the default, zero.

Attributes are looked up in the flattened keys and items of the map column, without a loop over
messages. A repeated key counts with its last value, as in the dict that a consumer sees. Payloads
are parsed once per view; that loop, and one per field named, are the only ones over messages.

Whole numbers of up to 64 bits stay whole numbers: ids above 2**53 must not be rounded into each
other. Anything larger is compared as a double.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import FrozenBitMap

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
_MALFORMED = object()
_decode = msgspec.json.Decoder().decode
# The generated wrappers of pyarrow.compute cost as much again as the call: 6 against 4 us for 1,000 rows.
_equal = pc.get_function("equal").call
_nonzero = pc.get_function("indices_nonzero").call


class _Entries(NamedTuple):
    """The map column of attributes, flattened: one element an entry."""

    codes: Any
    """Which key, as a position among the distinct keys."""
    code_of: dict[str, int]
    items: Any
    rows: Any
    """Which row the entry belongs to."""


class BatchView:
    """The columns of one batch, extracted when first asked for."""

    __slots__ = ("_batch", "_cache", "rows")

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._cache: dict[object, Any] = {}
        self.rows: int = batch.num_rows

    def attribute(self, key: str) -> Any:
        """The values of an attribute: a string array, null where the message lacks it."""
        return self._once(("attribute", key), lambda: self._attribute(key))

    def attribute_keys(self) -> dict[str, int]:
        """The attribute keys that occur in the batch."""
        return self._entries().code_of

    def key(self) -> Any:
        """The message keys: a string array, null where there is none."""
        return self._once("key", lambda: self._typed("key", pa.string()))

    def priority(self) -> Any:
        """The priorities as 64-bit integers without nulls."""
        return self._once("priority", lambda: self._typed("priority", pa.int64()).fill_null(0))

    def is_json(self) -> Any:
        """True where the payload parses as JSON."""
        return self._once(
            "is_json", lambda: pa.array([d is not _MALFORMED for d in self._documents()], pa.bool_())
        )

    def strings(self, path: tuple[str, ...]) -> Any:
        """The field's values that are strings, null elsewhere."""
        return self._once(("strings", path), lambda: _only(str, self._values(path), pa.string()))

    def booleans(self, path: tuple[str, ...]) -> Any:
        """The field's values that are true or false, null elsewhere."""
        return self._once(("booleans", path), lambda: _only(bool, self._values(path), pa.bool_()))

    def integers(self, path: tuple[str, ...]) -> Any:
        """The field's values that are whole numbers of 64 bits, null elsewhere."""
        return self._once(("integers", path), lambda: _integers(self._values(path)))

    def floats(self, path: tuple[str, ...]) -> Any:
        """The field's values that are other numbers, null elsewhere."""
        return self._once(("floats", path), lambda: _floats(self._values(path)))

    def is_null(self, path: tuple[str, ...]) -> Any:
        """True where the field is missing or null; of malformed payloads too."""
        return self._once(
            ("is_null", path), lambda: pa.array([v is None for v in self._values(path)], pa.bool_())
        )

    def _once(self, name: object, make: Callable[[], Any]) -> Any:
        found = self._cache.get(name)
        if found is None:
            found = self._cache[name] = make()
        return found

    def _typed(self, name: str, kind: Any) -> Any:
        index = self._batch.schema.get_field_index(name)
        if index < 0:
            return pa.nulls(self.rows, kind)
        column = self._batch.column(index)
        return column if column.type == kind else column.cast(kind)

    def _attribute(self, key: str) -> Any:
        entries = self._entries()
        code = entries.code_of.get(key)
        if code is None:
            return self._once("no attribute", lambda: pa.nulls(self.rows, pa.string()))
        places = _nonzero([_equal([entries.codes, pa.scalar(code, pa.int32())])])
        return pc.scatter(entries.items.take(places), entries.rows.take(places), max_index=self.rows - 1)

    def _entries(self) -> _Entries:
        found: _Entries = self._once("entries", self._flatten)
        return found

    def _flatten(self) -> _Entries:
        index = self._batch.schema.get_field_index("attributes")
        column = self._batch.column(index) if index >= 0 else None
        if column is None or not len(column) or not pa.types.is_map(column.type):
            return _Entries(None, {}, None, None)
        offsets = column.offsets
        start, length = offsets[0].as_py(), offsets[-1].as_py() - offsets[0].as_py()
        keys, items = column.keys.slice(start, length), column.items.slice(start, length)
        # Arrow refuses to give parents of a map, but a list over the same offsets is the same thing.
        rows = pc.list_parent_indices(pa.ListArray.from_arrays(offsets, column.keys))
        if column.null_count:
            is_held = column.is_valid().take(rows)
            keys, items, rows = keys.filter(is_held), items.filter(is_held), rows.filter(is_held)
        encoded = keys.cast(pa.string()).dictionary_encode()
        names = encoded.dictionary.to_pylist()
        code_of = {name: code for code, name in enumerate(names)}
        return _Entries(encoded.indices, code_of, items.cast(pa.string()), rows)

    def _documents(self) -> list[Any]:
        found: list[Any] = self._once("documents", self._parse)
        return found

    def _parse(self) -> list[Any]:
        index = self._batch.schema.get_field_index("data")
        if index < 0:
            return [_MALFORMED] * self.rows
        return [_document(data) for data in self._batch.column(index).to_pylist()]

    def _values(self, path: tuple[str, ...]) -> list[Any]:
        found: list[Any] = self._once(("values", path), lambda: [_field(d, path) for d in self._documents()])
        return found


def positions(mask: Any) -> FrozenBitMap:
    """The rows where a mask is true."""
    count = mask.true_count
    if count == len(mask):
        return FrozenBitMap(range(count))
    return FrozenBitMap(_nonzero([mask]).to_pylist() if count else ())


def _document(data: bytes | str | None) -> Any:
    if data is None:
        return _MALFORMED
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        return _MALFORMED


def _field(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if type(document) is not dict:
            return None
        document = document.get(name)
    return document


def _only(kind: type, values: list[Any], arrow_kind: Any) -> Any:
    return pa.array([v if type(v) is kind else None for v in values], arrow_kind)


def _integers(values: list[Any]) -> Any:
    return pa.array(
        [v if type(v) is int and INT64_MIN <= v <= INT64_MAX else None for v in values], pa.int64()
    )


def _floats(values: list[Any]) -> Any:
    return pa.array([_float(v) for v in values], pa.float64())


def _float(value: Any) -> float | None:
    if type(value) is float:
        return value
    if type(value) is not int or INT64_MIN <= value <= INT64_MAX:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)
