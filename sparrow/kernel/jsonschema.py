"""JSON Schema: the columns of an object.

``type``, ``format`` (date-time and date), ``properties``, ``items``, ``additionalProperties``, ``$ref`` into
the same document and unions with null are understood. Whatever has no one type, and an object that says
nothing of its fields or holds itself, is a text: the JSON as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from sparrow.model.errors import InvalidSchema
from sparrow.model.schema import COLUMNS_MAX

_PLAIN = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "null": pa.string(),
}
_FORMATS = {"date-time": pa.timestamp("us", "UTC"), "date": pa.date32()}
_TEXT = pa.string()


def json_columns(definition: Any) -> pa.Schema:
    """The columns that a definition means."""
    found = _Walk(definition).type(definition, "definition")
    if not pa.types.is_struct(found):
        raise _wrong("definition.properties", "a payload with columns is an object that has some")
    return pa.schema(list(found))


class _Walk:
    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._inside: list[str] = []
        self._count = 0

    def type(self, given: Any, place: str) -> pa.DataType:
        """The type of what a part of the schema describes."""
        self._count += 1
        if self._count > COLUMNS_MAX:
            raise _wrong(place, f"there are more than {COLUMNS_MAX} parts")
        if given is True:
            return _TEXT
        if not isinstance(given, Mapping):
            raise _wrong(place, f"{given!r} is not a schema")
        if "$ref" in given:
            return self._reference(given["$ref"], place)
        for word in ("anyOf", "oneOf"):
            if word in given:
                return self._one_of(given[word], f"{place}.{word}")
        kinds = given.get("type")
        named = [kinds] if isinstance(kinds, str) else kinds
        if named is None:
            named = ["object"] if "properties" in given else []
        if not isinstance(named, list):
            raise _wrong(f"{place}.type", f"{kinds!r} is not a type")
        for kind in named:
            if not isinstance(kind, str) or kind not in (*_PLAIN, "array", "object"):
                raise _wrong(f"{place}.type", f"there is no type {kind!r}")
        rest = [kind for kind in named if kind != "null"]
        if sorted(rest) == ["integer", "number"]:
            rest = ["number"]
        return self._kind(rest[0], given, place) if len(rest) == 1 else _TEXT

    def _kind(self, kind: str, given: Mapping[str, Any], place: str) -> pa.DataType:
        if kind == "array":
            return pa.list_(self.type(given["items"], f"{place}.items")) if "items" in given else _TEXT
        if kind == "object":
            return self._object(given, place)
        said = given.get("format") if kind == "string" else None
        return _FORMATS.get(said, _PLAIN[kind]) if isinstance(said, str) else _PLAIN[kind]

    def _object(self, given: Mapping[str, Any], place: str) -> pa.DataType:
        properties, others = given.get("properties"), given.get("additionalProperties")
        if properties is None:
            if isinstance(others, Mapping):
                return pa.map_(pa.string(), self.type(others, f"{place}.additionalProperties"))
            return _TEXT
        if not isinstance(properties, Mapping):
            raise _wrong(f"{place}.properties", "it is not an object")
        fields = []
        for name, value in properties.items():
            fields.append(pa.field(name, self.type(value, f"{place}.{name}")))
        return pa.struct(fields) if fields else _TEXT

    def _one_of(self, given: Any, place: str) -> pa.DataType:
        if not isinstance(given, list) or not given:
            raise _wrong(place, "it is not an array of schemas")
        found = [self.type(each, f"{place}[{number}]") for number, each in enumerate(given)]
        rest = [each for each, said in zip(found, given, strict=True) if said != {"type": "null"}]
        return rest[0] if len(rest) == 1 else _TEXT

    def _reference(self, given: Any, place: str) -> pa.DataType:
        if not isinstance(given, str) or not given.startswith("#"):
            raise _wrong(f"{place}.$ref", f"{given!r} does not point into this document")
        if given in self._inside:
            return _TEXT
        found: Any = self._whole
        for part in given[1:].strip("/").split("/") if given != "#" else []:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise _wrong(f"{place}.$ref", f"there is nothing at {given!r}")
            found = found[name]
        self._inside.append(given)
        kind = self.type(found, place)
        self._inside.pop()
        return kind


def _wrong(place: str, what: str) -> InvalidSchema:
    return InvalidSchema(f"{place}: {what}", place=place)
