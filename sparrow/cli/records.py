"""Where ``sparrow publish`` takes its messages from: words, lines, NDJSON, CSV and Parquet.

Every source yields portions: lists of drafts that are there together. From a pipe a portion is what has
arrived while the one before was being published, so that a slow pipe is published line by line and a fast
one in large batches. Files are read in portions of a fixed size; nothing is read whole but a line.
"""

from __future__ import annotations

import base64
import csv
import enum
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sparrow.cli.messages import BASE64
from sparrow.cli.values import parse_time
from sparrow.model.errors import InvalidArgument
from sparrow.model.limits import MESSAGE_BYTES_MAX

_READ_BYTES = 256 * 1024
_READS_AHEAD = 16
_ROWS = 2000
WHOLE = "."
"""As a field's name: the record itself."""


class Draft(NamedTuple):
    """A message to be published."""

    data: bytes | None
    key: str | None = None
    attributes: dict[str, str] | None = None
    event_time: datetime | None = None
    priority: int | None = None


class SourceFormat(enum.StrEnum):
    """What a source holds."""

    LINES = "lines"
    NDJSON = "ndjson"
    CSV = "csv"
    PARQUET = "parquet"


class Fields(NamedTuple):
    """Which fields of a record are the parts of its message; None is the usual name, where there is one."""

    data: str | None = None
    key: str | None = None
    attributes: str | None = None


Portions = Iterator[list[Draft]]
_SUFFIXES = {
    ".ndjson": SourceFormat.NDJSON,
    ".jsonl": SourceFormat.NDJSON,
    ".csv": SourceFormat.CSV,
    ".parquet": SourceFormat.PARQUET,
}


def format_of(path: Path) -> SourceFormat:
    """What a file holds, by its name."""
    return _SUFFIXES.get(path.suffix.lower(), SourceFormat.LINES)


def from_file(path: Path, form: SourceFormat, fields: Fields, on_bytes: Callable[[int], None]) -> Portions:
    """The messages of a file; ``on_bytes`` is told how far it has been read."""
    if form is SourceFormat.PARQUET:
        yield from _from_parquet(path, fields, on_bytes)
        return
    try:
        with path.open("rb") as file:
            yield from _parsed(_lines(_chunks(file, on_bytes)), form, fields, str(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def from_stream(stream: BinaryIO, form: SourceFormat, fields: Fields) -> Portions:
    """The messages of a pipe, as they come."""
    if form is SourceFormat.PARQUET:
        raise InvalidArgument("Parquet cannot be read from a pipe", hint="Give the file: --file NAME.parquet")
    yield from _parsed(_lines(_arrived(stream)), form, fields, "standard input")


# Bytes and lines.


def _chunks(file: BinaryIO, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    while chunk := file.read(_READ_BYTES * 4):
        done += len(chunk)
        yield chunk
        on_bytes(done)


def _arrived(stream: BinaryIO) -> Iterator[bytes]:
    """What a pipe has delivered since the last look; a thread reads on meanwhile, up to a bound."""
    arrived: queue.Queue[bytes] = queue.Queue(_READS_AHEAD)
    read = getattr(stream, "read1", stream.read)

    def listen() -> None:
        while chunk := read(_READ_BYTES):
            arrived.put(chunk)
        arrived.put(b"")

    threading.Thread(target=listen, name="sparrow-stdin", daemon=True).start()
    while chunk := arrived.get():
        parts = [chunk]
        while parts[-1] and not arrived.empty():
            parts.append(arrived.get())
        yield b"".join(parts)
        if not parts[-1]:
            return


def _lines(chunks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Whole lines without their ends; the last one may lack its newline."""
    rest: list[bytes] = []
    held = 0
    for chunk in chunks:
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            whole = b"".join([*rest, head])
            yield [line.removesuffix(b"\r") for line in whole.split(b"\n")]
            rest, held = [], 0
        rest.append(tail)
        held += len(tail)
        if held > MESSAGE_BYTES_MAX * 2:
            raise InvalidArgument("a line is too long to be a message", hint="Is this a text file?")
    last = b"".join(rest)
    if last:
        yield [last]


def _parsed(portions: Iterator[list[bytes]], form: SourceFormat, fields: Fields, name: str) -> Portions:
    if form is SourceFormat.NDJSON:
        yield from _from_ndjson(portions, fields, name)
    elif form is SourceFormat.CSV:
        yield from _from_csv(portions, fields, name)
    else:
        _refuse_fields(fields)
        for lines in portions:
            yield [Draft(line) for line in lines]


def _refuse_fields(fields: Fields) -> None:
    if any(fields):
        raise InvalidArgument(
            "lines have no fields", hint="Say what the source holds: --format ndjson, csv or parquet."
        )


# NDJSON.


def _from_ndjson(portions: Iterator[list[bytes]], fields: Fields, name: str) -> Portions:
    import msgspec

    decode = msgspec.json.Decoder().decode
    number = 0
    for lines in portions:
        drafts = []
        for line in lines:
            number += 1
            if not line or line.isspace():
                continue
            try:
                record = decode(line)
            except msgspec.DecodeError as error:
                raise InvalidArgument(f"line {number} of {name} is not JSON: {error}") from error
            if type(record) is not dict:
                raise InvalidArgument(
                    f"line {number} of {name} is not a JSON object",
                    hint="Use --format lines for other lines.",
                )
            drafts.append(_draft_of_json(record, line, fields, f"line {number} of {name}"))
        if drafts:
            yield drafts


def _draft_of_json(record: dict[str, Any], line: bytes, fields: Fields, where: str) -> Draft:
    draft = _draft(record, fields, where, whole=line)
    if fields.data is not None or "data" not in record:
        return draft
    data = draft.data
    if record.get("data_encoding") == BASE64:
        data = _from_base64(record["data"], where)
    time, priority = _time(record, where), _whole(record.get("priority"), where)
    return Draft(data, draft.key, draft.attributes, time, priority)


def _from_base64(text: Any, where: str) -> bytes | None:
    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{where}: data is not Base64: {error}") from error


def _time(record: dict[str, Any], where: str) -> datetime | None:
    given = record.get("event_time")
    if given is None:
        return None
    if not isinstance(given, str):
        raise InvalidArgument(f"{where}: event_time is not a text")
    return parse_time(given)


def _whole(value: Any, where: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value or None
    raise InvalidArgument(f"{where}: priority is not a whole number")


# Records of any kind.


def _draft(record: dict[str, Any], fields: Fields, where: str, whole: bytes | None = None) -> Draft:
    """The message that a record describes by its fields."""
    usual = "data" if "data" in record else WHOLE
    name = usual if fields.data is None else fields.data
    if name == WHOLE:
        data: bytes | None = _to_json(record) if whole is None else whole
    else:
        data = _to_bytes(_value(record, name, where))
    key = record.get("key") if fields.key is None and usual == "data" else None
    if fields.key is not None:
        key = _value(record, fields.key, where)
    attributes = record.get("attributes") if fields.attributes is None and usual == "data" else None
    if fields.attributes is not None:
        attributes = _value(record, fields.attributes, where)
    return Draft(data, None if key is None else _to_text(key), _to_attributes(attributes, where))


def _value(record: dict[str, Any], name: str, where: str) -> Any:
    if name not in record:
        known = ", ".join(list(record)[:10])
        raise InvalidArgument(f"{where} has no field {name!r}", hint=f"It has: {known}.")
    return record[name]


def _to_bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else _to_json(value)


def _to_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else _to_json(value).decode()


def _to_json(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def _to_attributes(value: Any, where: str) -> dict[str, str] | None:
    if not value:
        return None
    try:
        pairs = dict(value)  # A map of Arrow is a list of pairs.
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{where}: attributes are a map of texts, not {value!r}") from error
    return {str(name): _to_text(each) for name, each in pairs.items() if each is not None}


# CSV and Parquet.


def _from_csv(portions: Iterator[list[bytes]], fields: Fields, name: str) -> Portions:
    """Rows by the titles of the first line; a quoted value may go over several lines."""

    def text() -> Iterator[str]:
        for lines in portions:
            for line in lines:
                try:
                    yield line.decode("utf-8-sig") + "\n"
                except UnicodeDecodeError as error:
                    raise InvalidArgument(f"{name} is not UTF-8: {error}") from error

    rows = csv.DictReader(text(), strict=True)
    try:
        drafts = []
        for row in rows:
            where = f"line {rows.line_num} of {name}"
            if None in row or None in row.values():
                raise InvalidArgument(
                    f"{where} has not {len(rows.fieldnames or ())} values, as the titles say"
                )
            drafts.append(_draft(row, fields, where))
            if len(drafts) == _ROWS:
                yield drafts
                drafts = []
        if drafts:
            yield drafts
    except csv.Error as error:
        raise InvalidArgument(f"line {rows.line_num} of {name} is not CSV: {error}") from error


def _from_parquet(path: Path, fields: Fields, on_bytes: Callable[[int], None]) -> Portions:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except pa.ArrowException as error:
        raise InvalidArgument(f"{path} is not Parquet: {error}") from error
    with file:
        total, done, size = file.metadata.num_rows, 0, path.stat().st_size
        for batch in file.iter_batches(batch_size=_ROWS):
            rows = batch.to_pylist()
            yield [_draft_of_row(row, fields, f"row {done + n} of {path}") for n, row in enumerate(rows)]
            done += len(rows)
            on_bytes(size * done // total)


def _draft_of_row(row: dict[str, Any], fields: Fields, where: str) -> Draft:
    draft = _draft(row, fields, where)
    time, priority = row.get("event_time"), row.get("priority")
    if fields.data is not None or "data" not in row:
        return draft
    return draft._replace(event_time=time if isinstance(time, datetime) else None, priority=priority)


def _unreadable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(
        f"{path} cannot be read: {error.strerror or error}", hint="Give a file that exists."
    )
