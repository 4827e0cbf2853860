"""Publishing over HTTP: one message, a batch, lines of JSON, raw bytes. The answer comes when it is stored.

Data is any JSON value, stored as the bytes that were sent for it; or ``data_base64``, stored as the bytes
that it encodes, ``null`` for a tombstone. A body that is not JSON is one message whose data it is; what else
there is to say of it goes into the query, and attributes into headers ``X-Attribute-<name>``.

A batch is stored whole or not at all, and costs per batch: it is decoded into columns and published at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import UNSET

from sparrow.model import limits
from sparrow.model.access import Action, Principal
from sparrow.model.errors import InvalidArgument, MessageTooLarge, TopicNotFound, UnsupportedContentType
from sparrow.model.message import Receipt, Receipts, to_us
from sparrow.server.api import cloudevents, spans
from sparrow.server.api.draft import MessageOptions, Moment, NewMessage
from sparrow.server.api.family import (
    JSON,
    Answer,
    Api,
    Req,
    answer,
    content_type,
    decode,
    query,
    read,
    timestamp,
)
from sparrow.server.api.operation import described
from sparrow.server.api.routing import post
from sparrow.store import admission
from sparrow.store import batch as batches

TAG = "messages"
NDJSON = ("application/x-ndjson", "application/jsonl", "application/ndjson")
TRACE_HEADERS = ("traceparent", "tracestate")
_ATTRIBUTE = "x-attribute-"


class NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    """Messages to be published together."""

    messages: list[NewMessage]


class PublishQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Who publishes, where the topic has limits."""

    publisher: str | None = None
    priority_class: str | None = None


class RawQuery(MessageOptions, forbid_unknown_fields=True, kw_only=True):
    """The query of a publish, with what is said of a message whose body is its data."""

    publisher: str | None = None
    priority_class: str | None = None


class Published(msgspec.Struct, kw_only=True):
    """Where a message was stored. ``status`` is published, duplicate (it was stored before) or dropped (the
    topic's flow control threw it away; it has no id)."""

    message_id: str
    status: str
    topic: str
    partition: int
    offset: int
    publish_time: str | None


class PublishedBatch(msgspec.Struct, kw_only=True):
    """The ids of a batch, in its order; an empty one is of a message that flow control threw away."""

    message_ids: list[str]
    status: str
    topic: str
    count: int
    duplicates: int = 0
    dropped: int = 0


EXAMPLE = {
    "data": {"order_id": "o-1", "amount": 120, "country": "DE"},
    "attributes": {"env": "prod"},
    "ordering_key": "customer-7",
    "idempotency_key": "o-1-created",
}


def routes(api: Api) -> list[Any]:
    """The handlers."""

    @post(
        "/v1/topics/{topic:str}/messages",
        opt=described(
            "Publish a message",
            tag=TAG,
            description="Stored as the topic's durability says before the answer. A body that is not JSON is"
            " the data itself.",
            body=NewMessage,
            body_types=(JSON, cloudevents.STRUCTURED, "application/octet-stream", "text/plain"),
            body_example=EXAMPLE,
            query=RawQuery,
            headers={
                "traceparent": "W3C trace context; kept as an attribute and handed on.",
                "tracestate": "The rest of the trace context.",
            },
            answers={202: Published},
            errors=(404, 409, 413, 415, 429, 507),
        ),
    )
    async def publish_message(request: Req, topic: str) -> Answer:
        principal = api.require(request, Action.PUBLISH, topic)
        message, sender = await _message(request, api.clock.now_us())
        with spans.publishing(topic, _context(message.attributes, trace_of(request))) as trace:
            _carry(message, trace)
            receipt = await publish_one(api, topic, message, {**sender, **_token(principal)})
        return answer(to_published(receipt), 202)

    @post(
        "/v1/topics/{topic:str}/messages/batch",
        opt=described(
            "Publish a batch of messages, all or none",
            tag=TAG,
            description="The body is an object with `messages`, or one message a line (NDJSON).",
            body=NewBatch,
            body_types=(JSON, NDJSON[0], cloudevents.BATCHED),
            body_example={"messages": [EXAMPLE, {"data": "hello"}]},
            query=PublishQuery,
            answers={202: PublishedBatch},
            errors=(404, 409, 413, 415, 429, 507),
        ),
    )
    async def publish_batch(request: Req, topic: str) -> Answer:
        principal = api.require(request, Action.PUBLISH, topic)
        sender = _sender(query(request, PublishQuery))
        raw = await read(request)
        messages = _batch(content_type(request), raw, api.clock.now_us())
        with spans.publishing(topic, trace_of(request), is_batch=True) as trace:
            receipts = await publish_many(api, topic, messages, {**sender, **_token(principal)}, trace)
        return answer(to_published_batch(receipts), 202)

    return [publish_message, publish_batch]


# What was sent.


async def _message(request: Req, now_us: int) -> tuple[NewMessage, dict[str, Any]]:
    """The message of a request, and who sends it."""
    kind = content_type(request)
    raw = await read(request)
    is_binary = cloudevents.is_binary(request)
    if is_binary or kind == cloudevents.STRUCTURED:
        make = partial(cloudevents.from_binary, request) if is_binary else cloudevents.from_structured
        message = make(raw, now_us)
        sender = _sender(query(request, PublishQuery))
    elif kind == JSON or not kind:
        message = decode(raw, NewMessage)
        sender = _sender(query(request, PublishQuery)) if request.scope["query_string"] else {}
    else:
        options = query(request, RawQuery)
        given = {name: getattr(options, name) for name in MessageOptions.__struct_fields__}
        attributes = {**attributes_of(request), "content-type": request.headers.get("content-type", "")}
        message = NewMessage(data_base64=raw, attributes=attributes, **given)
        sender = _sender(options)
    return message, sender


def _batch(kind: str, raw: bytes, now_us: int) -> list[NewMessage]:
    if kind in NDJSON:
        return _lines(raw)
    if kind == cloudevents.BATCHED:
        return cloudevents.from_batch(raw, now_us)
    if kind and kind != JSON:
        raise UnsupportedContentType(
            f"a batch is {JSON}, {NDJSON[0]} or {cloudevents.BATCHED}, not {kind[:100]}",
            hint='Send {"messages": […]}, or one message a line.',
        )
    return decode(raw, NewBatch).messages


def _lines(raw: bytes) -> list[NewMessage]:
    """One message a line; empty lines are passed over."""
    try:
        str(raw, "utf-8")
        return _line_decoder.decode_lines(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # Which line it is, is found out below.
    found: list[NewMessage] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            try:
                found.append(decode(line, NewMessage))
            except InvalidArgument as error:
                raise InvalidArgument(f"line {number}: {error.message}", line=number) from error
    return found


def attributes_of(request: Req) -> dict[str, str]:
    """The attributes that headers give."""
    found = {name: value for name, value in request.headers.items() if name.startswith(_ATTRIBUTE)}
    return {name.removeprefix(_ATTRIBUTE): value for name, value in found.items()}


def trace_of(request: Req) -> dict[str, str]:
    """The trace context of a request, as attributes."""
    headers = request.headers
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def _context(attributes: dict[str, str] | None, given: dict[str, str]) -> dict[str, str]:
    """The trace context of a message: its own, else that of its request."""
    own = {name: value for name, value in (attributes or {}).items() if name in TRACE_HEADERS}
    return {**given, **own}


def _carry(message: NewMessage, trace: dict[str, str]) -> None:
    if trace:
        message.attributes = {**(message.attributes or {}), **trace}


def _sender(options: Any) -> dict[str, Any]:
    return {"publisher": options.publisher, "priority_class": options.priority_class}


def _token(principal: Principal) -> dict[str, Any]:
    return {} if principal.is_anonymous else {"token": principal.name}


_line_decoder = msgspec.json.Decoder(NewMessage)


# To the broker.


async def publish_one(api: Api, topic: str, message: NewMessage, sender: dict[str, Any]) -> Receipt:
    """Stores one message."""
    return await api.broker.publish(
        topic,
        data_of(message),
        key=await _key(api, topic, message) if message.ordering_key is None else message.ordering_key,
        attributes=message.attributes,
        event_time=message.event_time,
        priority=message.priority,
        ttl_s=message.ttl_s,
        deliver_at=deliver_at(message, api.clock.now_us()),
        idempotency_key=message.idempotency_key,
        depends_on=message.depends_on,
        **sender,
    )


async def publish_many(
    api: Api, topic: str, messages: Sequence[NewMessage], sender: dict[str, Any], trace: dict[str, str]
) -> Receipts:
    """Stores messages, all or none."""
    if not messages:
        raise InvalidArgument("the batch is empty", hint="Publish at least one message.")
    batch = await _columns(api, topic, messages, trace)
    if len(messages) > limits.BATCH_MESSAGES_MAX or (
        len(messages) > 1 and batch.nbytes > limits.BATCH_BYTES_MAX
    ):
        raise MessageTooLarge(
            f"the batch has {len(messages)} messages and {batch.nbytes} bytes; "
            f"{limits.BATCH_MESSAGES_MAX} and {limits.BATCH_BYTES_MAX} are allowed"
        )
    return await api.broker.publish_table(topic, batch, **sender)


async def _columns(
    api: Api, topic: str, messages: Sequence[NewMessage], trace: dict[str, str]
) -> pa.RecordBatch:
    """The publish form of a batch."""
    now_us = api.clock.now_us()
    keys: list[str | None] = [message.ordering_key for message in messages]
    field = await _key_field(api, topic)
    if field is not None:
        keys = [
            _find(message, field) if key is None else key for key, message in zip(keys, messages, strict=True)
        ]
    columns: dict[str, Any] = {
        "key": keys,
        "attributes": [
            {**trace, **(message.attributes or {})} if trace else message.attributes for message in messages
        ],
        "event_time": [_us(message.event_time) for message in messages],
        "priority": [message.priority for message in messages],
        "ttl_ms": [
            None if message.ttl_s is None else admission.to_ttl_ms(message.ttl_s) for message in messages
        ],
        "deliver_at": [_us(deliver_at(message, now_us)) for message in messages],
        "idempotency_key": [message.idempotency_key for message in messages],
        "depends_on": [message.depends_on for message in messages],
    }
    used = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return batches.build([data_of(message) for message in messages], **used)


def data_of(message: NewMessage) -> bytes | None:
    """The bytes that are stored."""
    if message.data is not UNSET:
        if message.data_base64 is not UNSET:
            raise InvalidArgument("a message has data or data_base64, not both")
        return bytes(message.data)
    if message.data_base64 is UNSET:
        raise InvalidArgument(
            "a message has neither data nor data_base64",
            hint='Give "data" any JSON value, or "data_base64": null for a tombstone.',
        )
    return message.data_base64


def deliver_at(message: NewMessage, now_us: int) -> Moment | None:
    """When to deliver, by either of its two ways."""
    if message.delay_s is None:
        return message.deliver_at
    if message.deliver_at is not None:
        raise InvalidArgument("a message has deliver_at or delay_s, not both")
    if not 0 <= message.delay_s <= 100 * 366 * 86_400:
        raise InvalidArgument(f"delay_s must be a number of seconds from 0, not {message.delay_s!r}")
    return now_us / 1e6 + message.delay_s


def _us(moment: Moment | None) -> int | None:
    return None if moment is None else to_us(moment)


async def _key(api: Api, topic: str, message: NewMessage) -> str | None:
    field = await _key_field(api, topic)
    return None if field is None else _find(message, field)


async def _key_field(api: Api, topic: str) -> list[str] | None:
    try:
        field = (await api.broker.topic(topic)).policy.key_field
    except TopicNotFound:
        return None  # It may be made by this publish.
    return None if field is None else field.split(".")


def _find(message: NewMessage, field: list[str]) -> str | None:
    """The value of a field of the data, as text."""
    if message.data is UNSET:
        return None
    value: Any = msgspec.json.decode(message.data)
    for name in field:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None or isinstance(value, dict | list):
        return None
    # A text that is empty is no key.
    return (value or None) if isinstance(value, str) else msgspec.json.encode(value).decode()


# Answers.


def to_published(receipt: Receipt) -> Published:
    """The receipt of one message."""
    status = "dropped" if receipt.is_dropped else "duplicate" if receipt.is_duplicate else "published"
    return Published(
        message_id=receipt.message_id,
        status=status,
        topic=receipt.topic,
        partition=receipt.partition,
        offset=receipt.offset,
        publish_time=None if receipt.is_dropped else timestamp(receipt.publish_time_us),
    )


def to_published_batch(receipts: Receipts) -> PublishedBatch:
    """The receipts of a batch; ids are made run by run."""
    runs, rows = receipts.in_runs()
    topic_id = receipts.topic_id
    duplicates = 0
    if rows is None:
        ids: list[str] = []
        for partition, base, length, _, is_duplicate, is_dropped in runs:
            duplicates += length if is_duplicate else 0
            head = f"{topic_id}-{partition}-"
            ids += [""] * length if is_dropped else [f"{head}{base + place}" for place in range(length)]
    else:
        heads = [(f"{topic_id}-{run[0]}-", run[1]) for run in runs]
        ids = [f"{heads[number][0]}{heads[number][1] + within}" for number, within in rows]
        duplicates = sum(1 for number, _ in rows if runs[number][4])
    return PublishedBatch(
        message_ids=ids,
        status="published",
        topic=receipts.topic,
        count=len(receipts),
        duplicates=duplicates,
        dropped=receipts.dropped,
    )
