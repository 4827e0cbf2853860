"""What a webhook says: a message as body and headers, in the format that its receiver asked for.

The body depends on the message alone, so every attempt sends the same bytes under the same id. Data that is
JSON stands in JSON as it is, byte for byte; other data stands there as base64. A CloudEvent takes its
attributes from the message: those named ``ce_type``, ``ce_source``, … as they came, else what the topic, the
key and the times say.
"""

from __future__ import annotations

import base64
import re
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from sparrow.model.message import Message, from_us
from sparrow.model.push import PushFormat

JSON = "application/json"
OCTETS = "application/octet-stream"
_CE_PREFIX = "ce_"
_CE_NAME = re.compile(r"[a-z0-9]{1,20}\Z")
_CE_OWN = frozenset({"specversion", "id", "data", "data_base64", "database64"})
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_TRACESTATE = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,511}\Z")
_JSON_TYPE = re.compile(r"[^/;]+/(?:[^;]*\+)?json\s*(?:;|\Z)", re.IGNORECASE)
_CONTENT_TYPE = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,254}\Z")


class Body(NamedTuple):
    """The part of a request that does not change from attempt to attempt."""

    content: bytes
    headers: dict[str, str]


def make(message: Message, format: PushFormat, subscription: str) -> Body:
    """The webhook of a message."""
    attributes = message.attributes
    if format is PushFormat.ENVELOPE:
        body = _envelope(message, attributes, subscription)
    elif format is PushFormat.RAW:
        body = _raw(message, attributes)
    elif format is PushFormat.CLOUDEVENTS:
        body = _structured(message, attributes)
    else:
        body = _binary(message, attributes)
    if attributes:
        body.headers.update(_trace(attributes))
    return body


def _envelope(message: Message, attributes: dict[str, str], subscription: str) -> Body:
    fields: dict[str, Any] = {
        "id": message.id,
        "type": attributes.get("ce_type") or message.topic,
        "timestamp": _moment(message.publish_time_us),
        "topic": message.topic,
        "subscription": subscription,
        "key": message.key,
        "attributes": attributes,
        **_data(message.data),
    }
    return Body(msgspec.json.encode(fields), {"Content-Type": JSON})


def _raw(message: Message, attributes: dict[str, str]) -> Body:
    headers = {"Content-Type": _content_type(message, attributes), "X-PubSub-Topic": message.topic}
    if message.key is not None:
        headers["X-PubSub-Key"] = quote(message.key, safe=" !#$&'()*+,/:;=?@[]~-._")
    return Body(message.data or b"", headers)


def _structured(message: Message, attributes: dict[str, str]) -> Body:
    fields = _event(message, attributes)
    if message.data is not None:
        # Data of another type may look like JSON and is not meant so.
        is_meant = bool(_JSON_TYPE.match(fields["datacontenttype"]))
        fields |= _data(message.data) if is_meant else _base64(message.data)
    return Body(msgspec.json.encode(fields), {"Content-Type": "application/cloudevents+json; charset=UTF-8"})


def _binary(message: Message, attributes: dict[str, str]) -> Body:
    event = _event(message, attributes)
    headers = {"Content-Type": event.pop("datacontenttype")}
    for name, value in event.items():
        # As the HTTP binding says: what is not printable ASCII, and the quote and the percent sign.
        headers[f"ce-{name}"] = quote(str(value), safe=" !#$&'()*+,/:;<=>?@[\\]^_`{|}~-.")
    return Body(message.data or b"", headers)


def _event(message: Message, attributes: dict[str, str]) -> dict[str, Any]:
    """The attributes of the CloudEvent that a message is."""
    event_time = message.event_time
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": message.id,
        "source": f"/topics/{message.topic}",
        "type": message.topic,
        "time": _moment(message.publish_time_us) if event_time is None else _iso(event_time.isoformat()),
        "datacontenttype": _content_type(message, attributes),
    }
    if message.key is not None:
        event |= {"subject": message.key, "partitionkey": message.key}
    for name, value in attributes.items():
        own = name.removeprefix(_CE_PREFIX)
        if own not in _CE_OWN and _CE_NAME.match(own) and (own != name or own not in event):
            event[own] = value
    return event


def _data(data: bytes | None) -> dict[str, Any]:
    if data is None or is_json(data):
        return {"data": None if data is None else msgspec.Raw(data)}
    return _base64(data)


def _base64(data: bytes) -> dict[str, Any]:
    return {"data_base64": base64.b64encode(data).decode()}


def is_json(data: bytes) -> bool:
    """Whether data can stand in a JSON document as it is."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
        data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _content_type(message: Message, attributes: dict[str, str]) -> str:
    for name in ("ce_datacontenttype", "content-type", "Content-Type", "content_type"):
        found = attributes.get(name)
        if found is not None and _CONTENT_TYPE.match(found):
            return found
    return JSON if message.data is not None and is_json(message.data) else OCTETS


def _trace(attributes: dict[str, str]) -> dict[str, str]:
    """The W3C trace context that a message carries, when it is one."""
    parent = attributes.get("traceparent", "")
    if not _TRACEPARENT.match(parent):
        return {}
    state = attributes.get("tracestate", "")
    return {"traceparent": parent} | ({"tracestate": state} if _TRACESTATE.match(state) else {})


def _moment(time_us: int) -> str:
    return _iso(from_us(time_us).isoformat(timespec="microseconds"))


def _iso(text: str) -> str:
    return text.replace("+00:00", "Z")
