"""What the OpenAPI document says of one operation, written beside its handler: ``opt=described(…)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KEY = "operation"


class Example(NamedTuple):
    """A value as people would send or get it."""

    value: Any
    summary: str = ""


class Operation(NamedTuple):
    """One operation. Types are msgspec structs or whatever msgspec can make a schema of."""

    summary: str
    tag: str = ""
    description: str = ""
    body: Any = None
    body_types: Sequence[str] = ("application/json",)
    """Content types that are taken; those that are not JSON are bytes."""
    body_example: Any = None
    is_body_optional: bool = False
    query: Any = None
    """A struct whose fields are the query parameters."""
    headers: Mapping[str, str] = {}
    """Request headers by name, with what they are for."""
    answers: Mapping[int, Any] = {}
    """Types by status; ``None`` is an answer without a body, a text its content type."""
    answer_example: Any = None
    errors: Sequence[int] = ()
    """Statuses of errors, beside those that any operation may have."""


def described(summary: str, **fields: Any) -> dict[str, Any]:
    """The ``opt`` of a handler."""
    return {KEY: Operation(summary, **fields)}
