"""Messages handed over, as JSON: made from columns, a batch at a time.

Data that is JSON stands in the envelope as it was published, as ``data``; other data stands there as
``data_base64``; a tombstone is ``"data_base64": null``. Values that nobody gave are left out. Everything is
text until the whole of an answer is encoded at once.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from sparrow.broker.courier import Portion
from sparrow.kernel.lease import ack_ids
from sparrow.model.message import Message
from sparrow.server.api.family import timestamp

_raw = msgspec.json.Decoder(msgspec.Raw)
_quote: Callable[[Any], str] = lambda value: msgspec.json.encode(value).decode()  # noqa: E731


class MessageView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message as it is handed over; its ``ack_id`` names this hand-over until its deadline."""

    message_id: str
    topic: str
    partition: int
    offset: int
    ordering_key: str | None = None
    attributes: dict[str, str] = {}
    data: Any = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType | None = msgspec.UNSET
    publish_time: str
    event_time: str | None = None
    priority: int | None = None
    ttl_s: float | None = None
    deliver_at: str | None = None
    idempotency_key: str | None = None
    attempt: int
    ack_id: str
    deadline: str


class Enclosed(NamedTuple):
    """Messages of one lease as JSON texts, beside their offsets."""

    head: str
    offsets: list[int]
    texts: list[str]


def enclose(portion: Portion) -> Enclosed:
    """The messages of a portion."""
    rows, run = portion.rows, portion.run
    offsets: list[int] = rows.column("offset").to_pylist()
    topic_id, partition = run.stream
    ids = _ids(rows, f"{topic_id}-{partition}-", offsets)
    acks = ack_ids(run.head, run.start_offset, offsets)
    data = _data(rows.column("data"))
    times = _moments(_times(rows, "publish_time"))
    extras = _extras(rows)
    topic = f',"topic":{_quote(portion.topic)},"partition":{partition},"offset":'
    deadline = f'","deadline":"{timestamp(run.deadline_us)}"}}'
    tried = run.attempts.get
    texts = [
        f'{{"message_id":"{message_id}"{topic}{offset}{extra},{value},"publish_time":"{time}"'
        f',"attempt":{tried(offset, 1)},"ack_id":"{ack_id}{deadline}'
        for message_id, offset, extra, value, time, ack_id in zip(
            ids, offsets, extras, data, times, acks, strict=True
        )
    ]
    return Enclosed(run.head, offsets, texts)


def attributes_of(rows: pa.RecordBatch) -> list[dict[str, str] | None]:
    """The attributes of each row; none for those without any."""
    column = _column(rows, "attributes")
    return [None] * rows.num_rows if column is None else _attributes(column)


def describe(message: Message) -> dict[str, Any]:
    """One message that was read and not leased, as values."""
    shown: dict[str, Any] = {
        "message_id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "ordering_key": message.key,
        "attributes": message.attributes,
        "publish_time": timestamp(message.publish_time_us),
    }
    return shown | data_fields(message.data)


def data_fields(data: bytes | None) -> dict[str, Any]:
    """Data as JSON holds it."""
    if data is not None and _is_json(data):
        return {"data": msgspec.Raw(data)}
    return {"data_base64": data}


def _is_json(data: bytes) -> bool:
    try:
        str(data, "utf-8")
        _raw.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


# Columns.


def _ids(rows: pa.RecordBatch, head: str, offsets: Sequence[int]) -> list[str]:
    again = _column(rows, "original_id")
    if again is None:
        return [f"{head}{offset}" for offset in offsets]
    return [own or f"{head}{offset}" for own, offset in zip(again.to_pylist(), offsets, strict=True)]


def _data(column: Any) -> list[str]:
    """The data of each message as a field of its envelope."""
    try:
        texts = column.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        return [_field(data) for data in column.to_pylist()]
    decode = _raw.decode
    fields: list[str] = []
    for text in texts:
        try:
            decode(text)
        except (msgspec.DecodeError, TypeError, RecursionError):
            fields.append(_encoded(None if text is None else text.encode()))
        else:
            # JSON has line breaks between its tokens only; an event stream has them nowhere.
            fields.append('"data":' + (text if "\n" not in text and "\r" not in text else _on_a_line(text)))
    return fields


def _field(data: bytes | None) -> str:
    if data is not None and _is_json(data):
        return '"data":' + _on_a_line(data.decode())
    return _encoded(data)


def _encoded(data: bytes | None) -> str:
    return '"data_base64":' + ("null" if data is None else f'"{base64.b64encode(data).decode()}"')


def _on_a_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def _extras(rows: pa.RecordBatch) -> list[str]:
    """What some messages have: each as fields that follow others."""
    found = [""] * rows.num_rows
    for name, shown, show in _OPTIONAL:
        column = _column(rows, name)
        if column is None:
            continue
        values = _attributes(column) if name == "attributes" else column
        values = _times(rows, name) if name in ("event_time", "deliver_at") else values
        values = values.to_pylist() if isinstance(values, pa.Array) else values
        for place, value in enumerate(values):
            if value is not None:
                found[place] += f',"{shown}":{show(value)}'
    return found


def _attributes(column: Any) -> list[dict[str, str] | None]:
    """The attributes of each message, without making pairs of them first."""
    ends = column.offsets.to_pylist()
    first = ends[0]
    names, values = column.keys.to_pylist(), column.items.to_pylist()
    if len(names) != ends[-1] - first:  # The children of a slice are those of the whole.
        names, values = names[first : ends[-1]], values[first : ends[-1]]
    return [
        dict(zip(names[start - first : end - first], values[start - first : end - first], strict=True))
        or None
        for start, end in itertools.pairwise(ends)
    ]


def _times(rows: pa.RecordBatch, name: str) -> list[int | None]:
    times: list[int | None] = rows.column(name).cast(pa.int64()).to_pylist()
    return times


def _moments(times: Sequence[int | None]) -> list[str | None]:
    """Times as text; most messages of a batch share one."""
    known = {time: timestamp(time) for time in set(times)}
    return [known[time] for time in times]


def _column(rows: pa.RecordBatch, name: str) -> Any:
    """A column that holds something."""
    place = rows.schema.get_field_index(name)
    if place < 0:
        return None
    column = rows.column(place)
    return None if column.null_count == len(column) else column


_OPTIONAL: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("key", "ordering_key", _quote),
    ("attributes", "attributes", _quote),
    ("event_time", "event_time", lambda time: f'"{timestamp(time)}"'),
    ("priority", "priority", str),
    ("ttl_ms", "ttl_s", lambda ttl_ms: str(ttl_ms / 1000)),
    ("deliver_at", "deliver_at", lambda time: f'"{timestamp(time)}"'),
    ("idempotency_key", "idempotency_key", _quote),
)
