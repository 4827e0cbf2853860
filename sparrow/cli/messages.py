"""How commands print messages: a line for people, a JSON object for programs, or the bare data.

The JSON form is also what ``sparrow publish --format ndjson`` reads, so messages can be piped from one topic
to another. Data that is not UTF-8 is in Base64, and ``data_encoding`` says so; a tombstone has null.
"""

from __future__ import annotations

import base64
import enum
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from sparrow.cli.output import escape, instant, is_terminal, moment

if TYPE_CHECKING:
    from sparrow.model.message import Message

TEXT = "utf-8"
BASE64 = "base64"


class Format(enum.StrEnum):
    """How a message is printed."""

    TEXT = "text"
    JSON = "json"
    RAW = "raw"


def chosen_format(given: Format | None, as_json: bool) -> Format:
    """The format that the options ask for."""
    return given or (Format.JSON if as_json else Format.TEXT)


def to_fields(message: Message) -> dict[str, Any]:
    """A message as JSON shows it."""
    from sparrow.model.message import Delivered, to_us

    data, encoding = _text(message.data)
    fields: dict[str, Any] = {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "publish_time": instant(message.publish_time_us),
        "key": message.key,
        "data": data,
        "data_encoding": encoding,
        "attributes": message.attributes,
        "event_time": None if message.event_time is None else instant(to_us(message.event_time)),
        "priority": message.priority,
    }
    if isinstance(message, Delivered):
        fields |= {"attempt": message.attempt, "ack_id": message.ack_id}
    return fields


def _text(data: bytes | None) -> tuple[str | None, str]:
    if data is None:
        return None, TEXT
    try:
        return data.decode(), TEXT
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), BASE64


def print_messages(messages: Iterable[Message], form: Format) -> None:
    """Prints messages and sees to it that they are out."""
    if form is Format.RAW:
        for message in messages:
            sys.stdout.buffer.write((message.data or b"") + b"\n")
    elif form is Format.JSON:
        import msgspec

        for message in messages:
            sys.stdout.write(msgspec.json.encode(to_fields(message)).decode() + "\n")
    else:
        line = _line_for_people if is_terminal() else _line_for_pipes
        for message in messages:
            typer.echo(line(message))
    sys.stdout.flush()


def _line_for_pipes(message: Message) -> str:
    """Id, time, topic, key, attributes and data between tabs."""
    attributes = ",".join(f"{name}={value}" for name, value in sorted(message.attributes.items()))
    time = instant(message.publish_time_us) or ""
    return "\t".join(
        escape(each)
        for each in (message.id, time, message.topic, message.key or "", attributes, show(message))
    )


def _line_for_people(message: Message) -> str:
    head = typer.style(f"{moment(message.publish_time_us)[11:]} {message.topic} {message.id}", dim=True)
    key = typer.style(f" {escape(message.key)}", fg=typer.colors.CYAN) if message.key is not None else ""
    attempt = getattr(message, "attempt", 1)
    again = typer.style(f" attempt {attempt}", fg=typer.colors.YELLOW) if attempt > 1 else ""
    attributes = " ".join(f"{name}={value}" for name, value in sorted(message.attributes.items()))
    rest = typer.style(f"  {escape(attributes)}", fg=typer.colors.GREEN) if attributes else ""
    return f"{head}{key}{again}  {escape(show(message))}{rest}"


def show(message: Message) -> str:
    """The data as text; bytes that are not text are replaced, for reading only."""
    return "(tombstone)" if message.data is None else message.data.decode("utf-8", "replace")
