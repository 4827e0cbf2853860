"""The JSON payloads of a batch, parsed once for all the fields that filters name.

Filters name few fields of large documents. When the names are known before the first question, only the
values under them are built and everything else is stepped over, which takes a quarter of the time of a whole
document. A name that was not foreseen costs one more pass over the batch, and answers the same.

What counts as JSON must not depend on what filters look at. So it is the grammar and UTF-8, over the whole
payload, in both ways of parsing: the text is checked as a column first, and a number too large for a double
is infinite rather than an error, because one that is stepped over is never converted. Nesting deeper than
the parser goes is refused in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

NAMES_MAX = 64
"""More names than these are a whole document."""
MALFORMED = object()
_decode = msgspec.json.Decoder().decode
_decode_any_number = msgspec.json.Decoder(float_hook=float).decode


class _Form(NamedTuple):
    """How documents are parsed for some names."""

    getters: dict[str, attrgetter[Any]]
    decode: Callable[[bytes], Any]
    make: Callable[..., Any]
    nothing: Any
    """Stands for a document without any of the fields."""


class Payloads:
    """The payloads of one batch; ``column`` is binary or null."""

    __slots__ = ("_documents", "_form", "_is_json", "_names", "_raw")

    def __init__(self, column: Any, names: frozenset[str] = frozenset()) -> None:
        self._raw: list[bytes | None] = _checked(column)
        self._names = names
        self._form: _Form | None = None
        self._documents: list[Any] | None = None
        self._is_json: list[bool] = []

    def is_json(self) -> list[bool]:
        """Whether each payload parses."""
        self._parsed()
        return self._is_json

    def values(self, path: tuple[str, ...]) -> list[Any]:
        """The value at a path of each payload; None where there is none."""
        documents, name = self._parsed(), path[0]
        if self._form is not None:
            if name not in self._names:
                self._names = frozenset()
                documents = self._parse()
            else:
                found = list(map(self._form.getters[name], documents))
                return found if len(path) == 1 else [_below(value, path[1:]) for value in found]
        return [_below(document, path) for document in documents]

    def _parsed(self) -> list[Any]:
        return self._parse() if self._documents is None else self._documents

    def _parse(self) -> list[Any]:
        is_narrow = 0 < len(self._names) <= NAMES_MAX
        self._form = _form(self._names) if is_narrow else None
        found = [_document(raw, self._form) for raw in self._raw]
        self._is_json = [document is not MALFORMED for document in found]
        nothing = None if self._form is None else self._form.nothing
        self._documents = [nothing if document is MALFORMED else document for document in found]
        return self._documents


def _checked(column: Any) -> list[bytes | None]:
    """The payloads; those that are not UTF-8 are none."""
    raw: list[bytes | None] = column.to_pylist()
    try:
        column.cast(pa.large_string() if pa.types.is_large_binary(column.type) else pa.string())
    except pa.ArrowInvalid:
        return [each if each is not None and _is_utf8(each) else None for each in raw]
    return raw


def _is_utf8(raw: bytes) -> bool:
    try:
        str(raw, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=1024)
def _form(names: frozenset[str]) -> _Form:
    """A type with just these fields; they are numbered, because names of fields may be any text."""
    numbered = {f"f{number}": name for number, name in enumerate(sorted(names))}
    kind = msgspec.defstruct(
        "Document", [(field, Any, None) for field in numbered], rename=numbered, gc=False, frozen=True
    )
    getters = {name: attrgetter(field) for field, name in numbered.items()}
    return _Form(getters, msgspec.json.Decoder(kind).decode, kind, kind())


def _document(raw: bytes | None, form: _Form | None) -> Any:
    if raw is None:
        return MALFORMED
    try:
        return _decode(raw) if form is None else form.decode(raw)
    except msgspec.ValidationError:
        return _unusual(raw, form)
    except (ValueError, RecursionError):
        return MALFORMED


def _unusual(raw: bytes, form: _Form | None) -> Any:
    """A document that is no object, or has a number that no double holds."""
    try:
        whole = _decode_any_number(raw)
    except (ValueError, RecursionError):
        return MALFORMED
    if form is None:
        return whole
    return form.make(*_each(whole, form.getters)) if type(whole) is dict else form.nothing


def _each(document: dict[str, Any], names: Iterable[str]) -> Iterable[Any]:
    return (document.get(name) for name in names)


def _below(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if type(document) is not dict:
            return None
        document = document.get(name)
    return document
