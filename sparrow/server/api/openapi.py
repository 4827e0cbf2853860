"""The OpenAPI 3.1 document: made of the routes themselves and of what is written beside them.

Schemas come from the same types that requests are decoded with and answers are made of, so the document and
the server cannot differ. It is made when it is first asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib import metadata
from typing import Any

import msgspec

from sparrow.server.api.operation import KEY, Operation
from sparrow.server.api.routing import JSON, Route

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
ANY_REQUEST = (400, 401, 403, 408, 429, 431, 503)
"""Errors that every operation may answer with."""
WITH_A_BODY = (413, 415)

_DESCRIPTION = """\
Publish, subscribe and operate Sparrow over plain HTTP.

Times are ISO 8601 in UTC. Everything that goes wrong has one body, `{"error": {…}}`, with a stable `code`, \
a message, a hint and the id of the request, which every answer carries in `X-Request-Id`."""


class Problem(msgspec.Struct, kw_only=True):
    """What went wrong, and what to do next."""

    code: str
    message: str
    details: dict[str, Any]
    hint: str
    suggestions: list[str]
    retryable: bool
    request_id: str
    timestamp: str


class Error(msgspec.Struct, kw_only=True):
    """The one shape of everything that goes wrong."""

    error: Problem


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of some routes; those without a description of their own are told of by their names."""
    described = [(route, route.opt.get(KEY) or Operation(_words(route))) for route in routes]
    schemas, definitions = _schemas(operation for _, operation in described)
    names = Counter(route.handler.__name__ for route in routes)
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        path = _PARAMETER.sub(r"{\1}", route.path)
        unique = route.handler.__name__ if names[route.handler.__name__] == 1 else _unique(route)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, operation, unique, schemas)
    tags = sorted({operation.tag for _, operation in described if operation.tag})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sparrow",
            "version": metadata.version("sparrow-broker"),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in tags],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The schema of every type that operations name, and those that these refer to."""
    types: list[Any] = [Error]
    for operation in operations:
        found = [operation.body, *operation.answers.values()]
        types += [kind for kind in found if kind is not None and not isinstance(kind, str)]
    unique = list(dict.fromkeys(types))
    schemas, definitions = msgspec.json.schema_components(unique, ref_template=_REF)
    return dict(zip(unique, schemas, strict=True)), definitions


def _operation(route: Route, operation: Operation, unique: str, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"operationId": unique, "summary": operation.summary}
    if operation.tag:
        shown["tags"] = [operation.tag]
    if operation.description:
        shown["description"] = operation.description
    parameters = [*_path_parameters(route), *_query(operation), *_headers(operation)]
    if parameters:
        shown["parameters"] = parameters
    if operation.body is not None:
        shown["requestBody"] = _body(operation, schemas)
    shown["responses"] = _responses(route, operation, schemas)
    return shown


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(route.path)
    ]


def _query(operation: Operation) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    (_,), components = msgspec.json.schema_components([operation.query], ref_template=_REF)
    schema = components[operation.query.__name__]
    inner = {name: each for name, each in components.items() if name != operation.query.__name__}
    required = set(schema.get("required", ()))
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "schema": _inlined(_without_null(field), inner),
        }
        for name, field in schema["properties"].items()
    ]


def _without_null(field: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter that may be left out is left out, and is never null."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    kept = {name: value for name, value in field.items() if name not in ("anyOf", "default")}
    if field.get("default") is not None:
        kept["default"] = field["default"]
    if not kinds:
        return kept
    return {**kept, **kinds[0]} if len(kinds) == 1 else {**kept, "anyOf": kinds}


def _inlined(value: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if reference is not None:
            return _inlined(components[reference.rpartition("/")[2]], components)
        return {name: _inlined(inner, components) for name, inner in value.items()}
    return [_inlined(each, components) for each in value] if isinstance(value, list) else value


def _headers(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in operation.headers.items()
    ]


_OTHER_BODIES: dict[str, dict[str, Any]] = {
    "application/cloudevents+json": {
        "type": "object",
        "required": ["specversion", "id", "source", "type"],
        "properties": {
            "specversion": {"const": "1.0"},
            "id": {"type": "string", "minLength": 1},
            "source": {"type": "string", "minLength": 1},
            "type": {"type": "string", "minLength": 1},
        },
    },
    "application/octet-stream": {"type": "string", "contentMediaType": "application/octet-stream"},
}
_OTHER_BODIES["application/cloudevents-batch+json"] = {
    "type": "array",
    "minItems": 1,
    "items": _OTHER_BODIES["application/cloudevents+json"],
}


def _body(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for kind in operation.body_types:
        if kind == JSON:
            content[kind] = {"schema": schemas[operation.body]}
            if operation.body_example is not None:
                content[kind]["example"] = operation.body_example
        else:
            content[kind] = {"schema": _OTHER_BODIES.get(kind, {"type": "string"})}
    return {"required": not operation.is_body_optional, "content": content}


def _responses(route: Route, operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in (operation.answers or {route.status: "application/json"}).items():
        found[str(status)] = {"description": _phrase(status)}
        if isinstance(kind, str):
            found[str(status)]["content"] = {kind: {}}
        elif kind is not None:
            content: dict[str, Any] = {"schema": schemas[kind]}
            if operation.answer_example is not None and status < 300:
                content["example"] = operation.answer_example
            found[str(status)]["content"] = {JSON: content}
    errors = {*ANY_REQUEST, *operation.errors, *(WITH_A_BODY if operation.body is not None else ())}
    for status in sorted(errors):
        problem = {"description": _phrase(status), "content": {JSON: {"schema": schemas[Error]}}}
        if status in (429, 503):
            problem["headers"] = {"Retry-After": {"schema": {"type": "string"}}}
        found.setdefault(str(status), problem)
    return found


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase


def _words(route: Route) -> str:
    return route.handler.__name__.replace("_", " ").capitalize()


def _unique(route: Route) -> str:
    words = [word for word in re.split(r"\W+", _PARAMETER.sub(r"by_\1", route.path)) if word]
    return "_".join([route.method.lower(), *words])
