"""Avro: the columns of a record, and what its decoded values become on their way there.

Types are as Spark's own reader of Avro has them: a union with null is its other type, int with long is long,
float with double is double, and any other union is a struct with a field for each type, ``member0`` and so
on, of which one is set. Timestamps are in microseconds; those outside the years 1 to 9999 are refused with
their message, because no reader could show them. Times of day, durations and unknown logical types are the
numbers and bytes that they are made of. A record that holds itself has no columns and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from sparrow.model.errors import InvalidSchema
from sparrow.model.schema import COLUMNS_MAX

Convert = Callable[[Any], Any] | None
"""None where a value stays as it is."""

SECOND_US = 1_000_000
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
"""From 0001-01-01 to 9999-12-31."""
FIRST_US, LAST_US = FIRST_DAY * 86_400 * SECOND_US, (LAST_DAY + 1) * 86_400 * SECOND_US - 1
PRECISION_MAX = 38

_PLAIN: dict[str, tuple[pa.DataType, type]] = {
    "null": (pa.string(), type(None)),
    "boolean": (pa.bool_(), bool),
    "int": (pa.int32(), int),
    "long": (pa.int64(), int),
    "float": (pa.float32(), float),
    "double": (pa.float64(), float),
    "bytes": (pa.binary(), bytes),
    "string": (pa.string(), str),
}
_NAMED = ("record", "error", "enum", "fixed")
_TIMES: dict[str, tuple[bool, Callable[[int], int]]] = {
    "timestamp-millis": (True, lambda value: value * 1000),
    "timestamp-micros": (True, lambda value: value),
    "timestamp-nanos": (True, lambda value: value // 1000),
    "local-timestamp-millis": (False, lambda value: value * 1000),
    "local-timestamp-micros": (False, lambda value: value),
    "local-timestamp-nanos": (False, lambda value: value // 1000),
}


class _Node(NamedTuple):
    type: pa.DataType
    convert: Convert = None


class AvroShape:
    """What is known of an Avro schema before a message is read."""

    def __init__(self, definition: Any) -> None:
        from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

        _check(definition, "definition")
        self._named: dict[str, Any] = {}
        try:
            parsed = parse_schema(definition, named_schemas=self._named)
            canonical = to_parsing_canonical_form(parsed)
        except Exception as error:
            raise InvalidSchema(f"definition: {_said(error)}", place="definition") from error
        if not isinstance(parsed, Mapping) or parsed.get("type") != "record":
            raise InvalidSchema("definition: a payload with columns is a record", place="definition.type")
        self.fingerprint = bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))
        """Of the canonical form, as the header of a single object has it."""
        self._inside: list[str] = []
        self._count = 0
        whole = self._node(parsed, "definition")
        self.columns: pa.Schema = pa.schema(list(whole.type))
        self.convert = whole.convert
        self.reading: Any = parse_schema(_without_logic(definition))
        """The schema to decode with: numbers stay numbers."""

    def _node(self, given: Any, place: str) -> _Node:
        if isinstance(given, list):
            return self._union(given, place)
        kind = given if isinstance(given, str) else given["type"]
        if not isinstance(kind, str):
            return self._node(kind, place)
        details: Mapping[str, Any] = {} if isinstance(given, str) else given
        if kind in self._named:
            return self._node(self._named[kind], place)
        logical = details.get("logicalType")
        if logical == "decimal" and kind in ("bytes", "fixed"):
            return _decimal(details, place)
        if logical == "date" and kind == "int":
            return _Node(pa.date32(), _to_date)
        if logical in _TIMES and kind == "long":
            is_utc, to_us = _TIMES[logical]
            return _Node(pa.timestamp("us", "UTC" if is_utc else None), _to_time(to_us))
        if kind in _PLAIN:
            return _Node(_PLAIN[kind][0])
        if kind == "enum":
            return _Node(pa.string())
        if kind == "fixed":
            return _Node(pa.binary())
        if kind == "array":
            item = self._node(details["items"], f"{place}.items")
            if self._is_empty(details["items"]):
                raise InvalidSchema(
                    f"{place}.items: they take no bytes, so ten could claim to be a billion of them",
                    place=f"{place}.items",
                )
            return _Node(pa.list_(item.type), _each(item.convert))
        if kind == "map":
            value = self._node(details["values"], f"{place}.values")
            return _Node(pa.map_(pa.string(), value.type), _values(value.convert))
        return self._record(details, place)

    def _record(self, given: Mapping[str, Any], place: str) -> _Node:
        name = given["name"]
        if name in self._inside:
            raise InvalidSchema(
                f"{place}: the record {name} holds itself, which columns cannot",
                hint="Leave that field out of the reader's schema, or read the data as it is.",
                place=place,
            )
        self._inside.append(name)
        fields, converts = [], {}
        for field in given["fields"]:
            self._count += 1
            if self._count > COLUMNS_MAX:
                raise InvalidSchema(f"{place}: there are more than {COLUMNS_MAX} fields", place=place)
            found = self._node(field["type"], f"{place}.{field['name']}")
            fields.append(pa.field(field["name"], found.type))
            if found.convert is not None:
                converts[field["name"]] = found.convert
        self._inside.pop()
        return _Node(pa.struct(fields), _fields(converts))

    def _union(self, given: list[Any], place: str) -> _Node:
        branches = [branch for branch in given if branch not in ("null", {"type": "null"})]
        if not branches:
            return _Node(_PLAIN["null"][0])
        if len(branches) == 1:
            found = self._node(branches[0], place)
            return _Node(found.type, _unnamed(found.convert))
        for wide, narrow in (("long", "int"), ("double", "float")):
            if branches in ([wide, narrow], [narrow, wide]):
                return _Node(_PLAIN[wide][0])
        fields: list[pa.Field] = []
        members: dict[Any, tuple[str, Convert]] = {}
        for number, branch in enumerate(branches):
            at = f"{place}.member{number}"
            found, kind = self._node(branch, at), self._kind(branch)
            if kind in members:
                raise InvalidSchema(
                    f"{at}: its values cannot be told from those of {members[kind][0]} in the same union",
                    place=at,
                )
            fields.append(pa.field(f"member{number}", found.type))
            members[kind] = (f"member{number}", found.convert)
        return _Node(pa.struct(fields), _member(members))

    def _is_empty(self, given: Any) -> bool:
        """Whether values of a type take no bytes; of records that hold themselves none came this far."""
        found = self._named.get(given, given) if isinstance(given, str) else given
        if not isinstance(found, Mapping):
            return bool(found == "null")
        if found["type"] in ("record", "error"):
            return all(self._is_empty(field["type"]) for field in found["fields"])
        if found["type"] == "fixed":
            return bool(found["size"] == 0)
        return found["type"] == "null" or (
            isinstance(found["type"], Mapping) and self._is_empty(found["type"])
        )

    def _kind(self, branch: Any) -> Any:
        """By what a decoded value is known: the name of its type, or its class in Python."""
        details = self._named.get(branch) if isinstance(branch, str) else branch
        if details is None:
            return _PLAIN[branch][1]
        kind = details["type"]
        if kind in _NAMED:
            return details["name"]
        if details.get("logicalType") == "decimal":
            from decimal import Decimal

            return Decimal
        return {"array": list, "map": dict}.get(kind) or _PLAIN[kind][1]


def _check(given: Any, place: str, depth: int = 0) -> None:
    """What the library would take for granted, or complain of without saying where."""
    if depth > 64:
        raise InvalidSchema(f"{place}: it is nested too deeply", place=place)
    if isinstance(given, list):
        for number, branch in enumerate(given):
            _check(branch, f"{place}[{number}]", depth + 1)
        return
    if isinstance(given, str):
        return
    if not isinstance(given, Mapping) or "type" not in given:
        raise InvalidSchema(
            f"{place}: a type is a name, an array of types or an object with type", place=place
        )
    kind = given["type"]
    needs: Any = {"array": "items", "map": "values"}.get(kind) if isinstance(kind, str) else None
    if needs is not None:
        if needs not in given:
            raise InvalidSchema(f"{place}.{needs}: it is missing", place=f"{place}.{needs}")
        _check(given[needs], f"{place}.{needs}", depth + 1)
    elif kind in ("record", "error"):
        fields, names = given.get("fields"), set()
        if not isinstance(fields, list):
            raise InvalidSchema(f"{place}.fields: it is not an array", place=f"{place}.fields")
        for number, field in enumerate(fields):
            at = f"{place}.fields[{number}]"
            name = field.get("name") if isinstance(field, Mapping) else None
            if not isinstance(name, str) or not name or "type" not in field:
                raise InvalidSchema(f"{at}: a field has a name and a type", place=at)
            if name in names:
                raise InvalidSchema(f"{at}: the name {name!r} is taken", place=at)
            names.add(name)
            _check(field["type"], f"{place}.{name}", depth + 1)
    elif not isinstance(kind, str):
        _check(kind, place, depth + 1)
    if isinstance(kind, str) and kind in _NAMED and not isinstance(given.get("name"), str):
        raise InvalidSchema(f"{place}.name: a type {kind} has one", place=f"{place}.name")


def _said(error: Exception) -> str:
    """What the library found, in words."""
    from fastavro.schema import UnknownType

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnknownType):
        return f"there is no type {text}"
    return f"{text} is missing" if isinstance(error, KeyError) else text


def _decimal(given: Mapping[str, Any], place: str) -> _Node:
    precision, scale = given.get("precision"), given.get("scale", 0)
    numbers = isinstance(precision, int) and isinstance(scale, int)
    if not numbers or not 0 <= scale <= precision <= PRECISION_MAX or precision < 1:  # type: ignore[operator]
        raise InvalidSchema(
            f"{place}: a decimal has a precision from 1 to {PRECISION_MAX} and a scale within it, "
            f"not {precision!r} and {scale!r}",
            place=place,
        )
    return _Node(pa.decimal128(precision, scale))


def _without_logic(given: Any) -> Any:
    """The same schema whose values decode to what is stored; decimals stay, for their bytes say little."""
    if isinstance(given, list):
        return [_without_logic(each) for each in given]
    if not isinstance(given, Mapping):
        return given
    found = {name: value for name, value in given.items() if name not in ("default", "aliases", "doc")}
    if found.get("logicalType") != "decimal":
        found.pop("logicalType", None)
    for part in ("type", "items", "values"):
        if part in found and not isinstance(found[part], str):
            found[part] = _without_logic(found[part])
    if "fields" in found:
        found["fields"] = [_without_logic(field) for field in found["fields"]]
    return found


# What values become.


def _to_date(value: int) -> int:
    if not FIRST_DAY <= value <= LAST_DAY:
        raise ValueError(f"{value} is not a day of the years 1 to 9999")
    return value


def check_us(value: int) -> int:
    """A time that readers can show."""
    if not FIRST_US <= value <= LAST_US:
        raise ValueError(f"{value} is not a time of the years 1 to 9999")
    return value


def _to_time(to_us: Callable[[int], int]) -> Callable[[int], int]:
    return lambda value: check_us(to_us(value))


def _each(convert: Convert) -> Convert:
    if convert is None:
        return None
    return lambda values: [None if value is None else convert(value) for value in values]


def _values(convert: Convert) -> Convert:
    if convert is None:
        return None
    return lambda values: {key: None if value is None else convert(value) for key, value in values.items()}


def _fields(converts: Mapping[str, Callable[[Any], Any]]) -> Convert:
    if not converts:
        return None
    wanted = list(converts.items())

    def convert(record: dict[str, Any]) -> dict[str, Any]:
        for name, change in wanted:
            value = record[name]
            if value is not None:
                record[name] = change(value)
        return record

    return convert


def _unnamed(convert: Convert) -> Convert:
    """A value of a named type comes with its name out of a union."""

    def strip(value: Any) -> Any:
        plain = value[1] if isinstance(value, tuple) else value
        return plain if convert is None else convert(plain)

    return strip


def _member(members: Mapping[Any, tuple[str, Convert]]) -> Callable[[Any], dict[str, Any]]:
    def convert(value: Any) -> dict[str, Any]:
        kind, plain = value if isinstance(value, tuple) else (type(value), value)
        name, change = members[kind]
        return {name: plain if change is None else change(plain)}

    return convert
