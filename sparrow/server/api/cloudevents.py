"""CloudEvents 1.0 that are published: structured, binary and batched content, as messages.

An attribute ``x`` of an event is the message attribute ``ce_x``; ``datacontenttype`` is ``content-type``, and
the trace context keeps its names. Some attributes mean something to the broker as well: ``partitionkey`` is
the key, ``time`` the event time, ``expirytime`` the time to live. Source and id together name an event, so
they are its idempotency key: an event that is sent again is stored once.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import msgspec

from sparrow.model import limits
from sparrow.model.errors import InvalidArgument
from sparrow.model.message import to_us
from sparrow.server.api.draft import NewMessage
from sparrow.server.api.family import Req, decode

STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
REQUIRED = ("specversion", "id", "source", "type")
_HEADER = "ce-"
_NAME = re.compile(r"[a-z0-9]{1,100}\Z")
_TRACE = ("traceparent", "tracestate")
_HINT = "A CloudEvent has specversion 1.0, id, source and type; see cloudevents.io."


def is_binary(request: Req) -> bool:
    """Whether a request is an event whose attributes are headers."""
    return "ce-specversion" in request.headers


def from_structured(raw: bytes, now_us: int) -> NewMessage:
    """An event that is one JSON object."""
    return _from_fields(decode(raw, dict[str, msgspec.Raw]), now_us)


def from_batch(raw: bytes, now_us: int) -> list[NewMessage]:
    """Events in a JSON array."""
    return [_from_fields(fields, now_us) for fields in decode(raw, list[dict[str, msgspec.Raw]])]


def from_binary(request: Req, raw: bytes, now_us: int) -> NewMessage:
    """An event whose attributes are headers and whose data is the body."""
    headers = request.headers
    attributes = {
        name.removeprefix(_HEADER): _unquoted(name, value)
        for name, value in headers.items()
        if name.startswith(_HEADER)
    }
    if "content-type" in headers:
        attributes["datacontenttype"] = headers["content-type"]
    message = _to_message(attributes, now_us)
    message.data_base64 = raw
    return message


def _unquoted(name: str, value: str) -> str:
    try:
        return unquote(value.strip('"'), errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the header {name} does not hold UTF-8") from error


def _from_fields(fields: dict[str, msgspec.Raw], now_us: int) -> NewMessage:
    data, encoded = fields.pop("data", None), fields.pop("data_base64", None)
    if data is not None and encoded is not None:
        raise InvalidArgument("an event has data or data_base64, not both")
    message = _to_message({name: _text(name, value) for name, value in fields.items()}, now_us)
    if encoded is not None:
        message.data_base64 = decode(bytes(encoded), bytes)
    elif data is None:
        message.data_base64 = b""
    else:
        message.data = data
        attributes = message.attributes or {}
        kind = attributes.setdefault("content-type", "application/json")
        if "json" not in kind and bytes(data).startswith(b'"'):
            # Text that is not JSON travels as a JSON string, and is stored as itself.
            message.data, message.data_base64 = msgspec.UNSET, decode(bytes(data), str).encode()
    return message


def _text(name: str, raw: msgspec.Raw) -> str:
    value: Any = decode(bytes(raw), str | int | bool | None)  # type: ignore[arg-type]
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _to_message(given: dict[str, str], now_us: int) -> NewMessage:
    attributes = {name: value for name, value in given.items() if value}
    missing = [name for name in REQUIRED if name not in attributes]
    if missing:
        raise InvalidArgument(f"the event has no {', '.join(missing)}", hint=_HINT)
    if attributes["specversion"] != "1.0":
        raise InvalidArgument(f"specversion is {attributes['specversion'][:20]!r}, not '1.0'", hint=_HINT)
    bad = [name for name in attributes if not _NAME.match(name)]
    if bad:
        raise InvalidArgument(f"{bad[0][:100]!r} is not the name of an attribute of an event", hint=_HINT)
    once = f"{attributes['source']}#{attributes['id']}"
    expiry = attributes.get("expirytime")
    return NewMessage(
        attributes={_name(name): value for name, value in attributes.items()},
        ordering_key=attributes.get("partitionkey"),
        idempotency_key=once if len(once.encode()) <= limits.KEY_BYTES_MAX else None,
        event_time=_moment("time", attributes["time"]) if "time" in attributes else None,
        ttl_s=None if expiry is None else _ttl_s(expiry, now_us),
    )


def _name(name: str) -> str:
    if name == "datacontenttype":
        return "content-type"
    return name if name in _TRACE else f"ce_{name}"


def _ttl_s(expiry: str, now_us: int) -> float:
    """An event that has expired already is stored, and dropped as any other whose time has passed."""
    return max(0.001, (to_us(_moment("expirytime", expiry)) - now_us) / 1e6)


def _moment(name: str, value: str) -> datetime:
    try:
        found = msgspec.convert(value, datetime)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name} is {value[:100]!r}, not a time as RFC 3339 has it") from error
    if found.tzinfo is None:
        raise InvalidArgument(f"{name} is {value[:100]!r}, without a time zone")
    return found
