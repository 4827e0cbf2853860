"""What may be published: turns a publisher's values into checked columns, or refuses them whole.

Checks run on columns; the only look at single values is the type of each payload, which Arrow would
otherwise convert in silence. Everything is refused before anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model import limits
from sparrow.model.errors import DataDamaged, InvalidArgument, MessageTooLarge
from sparrow.model.message import parse_message_id, to_us
from sparrow.store import batch as batches

_PAYLOAD = {bytes, type(None)}
_TEXT = {str, type(None)}
_TTL_S_MAX = 100 * 366 * 86_400  # a century: what lives longer needs no time to live

Row = tuple[Any, ...]
"""One message's values, in the order of the publish columns."""


def check_row(
    data: Any,
    key: Any = None,
    attributes: Any = None,
    event_time: Any = None,
    priority: Any = None,
    ttl_s: Any = None,
    deliver_at: Any = None,
    idempotency_key: Any = None,
    depends_on: Any = None,
    original_id: str | None = None,
) -> Row:
    """One message's values, checked; the order is that of the stored columns."""
    size = len(data) if type(data) is bytes else _size_of(data)
    if size > limits.MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"the message has {size} bytes; {limits.MESSAGE_BYTES_MAX} are allowed")
    if key is not None:
        _check_text("key", key, limits.KEY_BYTES_MAX)
    if attributes:
        added = limits.ATTRIBUTES_ADDED_MAX if original_id is not None else 0
        _check_attributes(attributes, limits.ATTRIBUTES_MAX + added)
    if priority is not None:
        _check_priority(priority)
    if idempotency_key is not None:
        _check_text("idempotency_key", idempotency_key, limits.KEY_BYTES_MAX)
    return (
        data if type(data) is bytes or data is None else bytes(data),
        key,
        attributes or None,
        None if event_time is None else to_us(event_time),
        priority,
        None if ttl_s is None else to_ttl_ms(ttl_s),
        None if deliver_at is None else to_us(deliver_at),
        idempotency_key,
        None,
        None if depends_on is None else _ids(depends_on),
        original_id,
    )


def _ids(depends_on: Any) -> list[str]:
    if isinstance(depends_on, str) or not isinstance(depends_on, Sequence):
        raise InvalidArgument("depends_on is a list of message ids")
    for text in depends_on:
        parse_message_id(text)
    return list(depends_on)


def _size_of(data: Any) -> int:
    if data is None:
        return 0
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidArgument(
            f"data must be bytes, not {type(data).__name__}",
            hint="Encode text with .encode(), or None for a tombstone.",
        )
    return memoryview(data).nbytes


def _check_text(name: str, value: Any, bytes_max: int) -> None:
    size = _text_size(name, value)
    if not 1 <= size <= bytes_max:
        raise InvalidArgument(f"{name} must have 1 to {bytes_max} bytes")


def _text_size(name: str, value: Any) -> int:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string, not {type(value).__name__}")
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} is not text that UTF-8 can hold: {error.reason}") from error


def _check_attributes(attributes: Any, count_max: int) -> None:
    if not isinstance(attributes, Mapping):
        raise InvalidArgument(f"attributes must be a mapping of strings, not {type(attributes).__name__}")
    if len(attributes) > count_max:
        raise InvalidArgument(f"{len(attributes)} attributes; {count_max} are allowed")
    for name, value in attributes.items():
        _check_text("an attribute name", name, limits.ATTRIBUTE_KEY_BYTES_MAX)
        if _text_size(f"attribute {name!r}", value) > limits.ATTRIBUTE_VALUE_BYTES_MAX:
            raise InvalidArgument(
                f"attribute {name!r} must be a string of at most {limits.ATTRIBUTE_VALUE_BYTES_MAX} bytes"
            )


def _check_priority(priority: Any) -> None:
    if not isinstance(priority, int) or not limits.PRIORITY_MIN <= priority <= limits.PRIORITY_MAX:
        raise InvalidArgument(
            f"priority must be a whole number from {limits.PRIORITY_MIN} to {limits.PRIORITY_MAX}"
        )


def to_ttl_ms(ttl_s: Any) -> int:
    """A time to live in whole milliseconds."""
    if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not 0 < ttl_s <= _TTL_S_MAX:
        raise InvalidArgument(
            f"ttl_s must be a positive number of seconds, at most {_TTL_S_MAX}, not {ttl_s!r}"
        )
    return max(1, int(ttl_s * 1000))


def rows_to_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """The publish form of checked rows."""
    columns = list(zip(*rows, strict=True))
    used = {
        field.name: columns[place]
        for place, field in enumerate(batches.PUBLISH_FIELDS)
        if place and columns[place].count(None) < len(rows)
    }
    return batches.build(columns[0], **used)


def values_to_batch(data: Any, columns: dict[str, Any]) -> pa.RecordBatch:
    """The publish form of a batch given as parallel sequences."""
    if isinstance(data, bytes | bytearray | str | memoryview) or not isinstance(data, Sequence):
        raise InvalidArgument(
            f"a batch is a sequence of bytes, not {type(data).__name__}",
            hint="Pass a list; for one message use publish, for an Arrow table publish_table.",
        )
    if not set(map(type, data)) <= _PAYLOAD:
        wrong = next(value for value in data if type(value) not in _PAYLOAD)
        raise InvalidArgument(f"every message must be bytes, not {type(wrong).__name__}")
    for name, values in columns.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(data):
            raise InvalidArgument(f"{name} must be a sequence of {len(data)} values, one a message")
    for name in {"key", "idempotency_key"} & columns.keys():
        if not set(map(type, columns[name])) <= _TEXT:
            wrong = next(value for value in columns[name] if type(value) not in _TEXT)
            raise InvalidArgument(f"every {name} must be a string or None, not {type(wrong).__name__}")
    if "event_time" in columns:
        times = [None if moment is None else to_us(moment) for moment in columns["event_time"]]
        columns = {**columns, "event_time": times}
    return batches.build(data, **columns)


def check_batch(batch: pa.RecordBatch | pa.Table) -> None:
    """Limits over the columns of a publish form."""
    if not batch.num_rows:
        raise InvalidArgument("the batch is empty", hint="Publish at least one message.")
    names = batch.schema.names
    if not batches.is_within(batch["data"], limits.MESSAGE_BYTES_MAX):
        longest = batches.longest(batch["data"])
        raise MessageTooLarge(f"a message has {longest} bytes; {limits.MESSAGE_BYTES_MAX} are allowed")
    for name in ("key", "idempotency_key"):
        if name in names:
            _check_column(name, batch[name], limits.KEY_BYTES_MAX)
    if "attributes" in names:
        for chunk in _chunks(batch["attributes"]):
            _check_attribute_column(chunk)
    if "ttl_ms" in names and (pc.min(batch["ttl_ms"]).as_py() or 1) <= 0:
        raise InvalidArgument("every ttl must be positive")


def check_request_size(batch: pa.RecordBatch) -> None:
    """One request has a limit, so that one publisher cannot hold up the others. A single message has its
    own, and comes through with its key and attributes."""
    if batch.num_rows > 1 and batch.nbytes > limits.REQUEST_BYTES_MAX:
        raise MessageTooLarge(
            f"the batch has {batch.nbytes} bytes; {limits.REQUEST_BYTES_MAX} are allowed",
            hint="Publish fewer messages at once; publish_table splits a large table by itself.",
        )


def _check_column(name: str, column: Any, bytes_max: int) -> None:
    lengths = pc.min_max(pc.binary_length(column)).as_py()
    if lengths["max"] is not None and (lengths["max"] > bytes_max or lengths["min"] == 0):
        raise InvalidArgument(f"every {name} must have 1 to {bytes_max} bytes, or be None")


def _check_attribute_column(column: Any) -> None:
    if not len(column):
        return
    counts = pc.subtract(column.offsets[1:], column.offsets[:-1])
    if (pc.max(counts).as_py() or 0) > limits.ATTRIBUTES_MAX:
        raise InvalidArgument(f"a message has too many attributes; {limits.ATTRIBUTES_MAX} are allowed")
    _check_column("attribute name", column.keys, limits.ATTRIBUTE_KEY_BYTES_MAX)
    if column.items.null_count:
        raise InvalidArgument("an attribute has no value", hint="Leave the attribute out instead.")
    if batches.longest(column.items) > limits.ATTRIBUTE_VALUE_BYTES_MAX:
        raise InvalidArgument(f"an attribute is over {limits.ATTRIBUTE_VALUE_BYTES_MAX} bytes")


def _chunks(column: Any) -> list[Any]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def to_arrow(table: Any) -> pa.Table | pa.RecordBatch:
    """A table of whatever library as one of Arrow's."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        return table
    try:
        if hasattr(table, "__arrow_c_stream__"):
            return pa.table(table)
        if hasattr(table, "to_arrow"):
            found = table.to_arrow()
            return found if isinstance(found, pa.Table | pa.RecordBatch) else pa.table(found)
        if hasattr(table, "__dataframe__"):
            from pyarrow import interchange

            return interchange.from_dataframe(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(f"the table cannot be read: {error}") from error
    raise InvalidArgument(
        f"publish_table takes an Arrow, pandas or polars table, not {type(table).__name__}",
        hint="Convert with pyarrow.Table.from_pandas or polars' to_arrow().",
    )


def open_body(body: batches.Body) -> pa.RecordBatch:
    """The batch that a client encoded, checked as thoroughly as if every value had been given here."""
    if google_crc32c.value(body.buffer) != body.crc:
        raise InvalidArgument(
            "the batch does not match its crc32c", hint="It was changed on its way; send again."
        )
    refused = [name for name in ("sequence", "original_id") if body.columns & batches.BIT[name]]
    if refused or body.columns >> len(batches.BIT) or not body.columns & 1:
        raise InvalidArgument(f"a batch may not have the columns {body.columns:#x}")
    try:
        batch = batches.decode(body.buffer, body.columns)
        batch.validate(full=True)
    except (DataDamaged, pa.ArrowException) as error:
        raise InvalidArgument(f"the batch is not an Arrow batch of these columns: {error}") from error
    if batch.num_rows != body.record_count:
        raise InvalidArgument(f"the batch has {batch.num_rows} messages, not {body.record_count}")
    check_batch(batch)
    if body.codec or len(body.buffer) > limits.REQUEST_BYTES_MAX:  # Else it cannot be larger than it came.
        check_request_size(batch)
    return batch
