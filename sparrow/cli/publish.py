"""``sparrow publish``: words, lines or files become messages.

Words are published and their receipts printed. Streams and files go in batches, and what is printed is a
summary: how many, how much, how fast. When something is refused on the way, the error says how many
messages before it are stored.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import (
    Column,
    OnProgress,
    count,
    is_terminal,
    number,
    plain,
    print_json,
    print_line,
    print_rows,
    progress,
    reflow,
    size,
)
from sparrow.cli.records import Draft, Fields, Portions, SourceFormat, format_of, from_file, from_stream
from sparrow.cli.target import Data, Json, Url, opened
from sparrow.cli.values import parse_pairs, parse_span, parse_time
from sparrow.model.errors import InvalidArgument, SparrowError

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker
    from sparrow.model.message import Receipt, Receipts

app = typer.Typer()

BATCH_MESSAGES = 5000
BATCH_BYTES = 2 * 1024 * 1024
"""A batch is synced at once; this much keeps a disk busy and stays well below what a request may hold."""
_STDIN = "-"


@app.command(
    epilog="Examples: sparrow publish orders.us hello --key o-1 --attribute env=prod; "
    "cat app.log | sparrow publish logs - ; sparrow publish orders.us --file orders.csv --key-column id"
)
def publish(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where to.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[DATA]...", help="Messages; - reads standard input.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-F", help="Publish a file's records; may be repeated.")
    ] = None,
    form: Annotated[
        SourceFormat | None,
        typer.Option("--format", help="What the source holds; by the file's name, else lines."),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The key of every message.")] = None,
    attribute: Annotated[
        list[str] | None, typer.Option("--attribute", "-a", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    data_field: Annotated[
        str | None,
        typer.Option(
            "--data-field", "--data-column", metavar="NAME", help="The field that is the data; . is all."
        ),
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option("--key-field", "--key-column", metavar="NAME", help="The field that is the key."),
    ] = None,
    attributes_field: Annotated[
        str | None,
        typer.Option(
            "--attributes-field", "--attributes-column", metavar="NAME", help="The field with attributes."
        ),
    ] = None,
    tombstone: Annotated[bool, typer.Option("--tombstone", help="No data: the key is gone.")] = False,
    priority: Annotated[int | None, typer.Option(help="-128 to 127; higher goes first.")] = None,
    ttl: Annotated[str | None, typer.Option(metavar="SPAN", help="How long it is worth delivering.")] = None,
    deliver_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not before: in 10m, 2026-07-01T12:00:00Z.")
    ] = None,
    event_time: Annotated[str | None, typer.Option(metavar="TIME", help="The publisher's own time.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Published twice, it is stored once.")
    ] = None,
    publisher: Annotated[str | None, typer.Option(metavar="NAME", help="Whose quota counts.")] = None,
    receipts: Annotated[
        bool, typer.Option("--receipts", help="Print a receipt a message, also of streams.")
    ] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Publish messages: words, lines of standard input, or records of files.

    Of NDJSON, CSV and Parquet the fields data, key and attributes are those of the message. A record without
    a field data is published whole, as JSON. --data-field, --key-field and --attributes-field name others.
    """
    attributes = parse_pairs(attribute, "--attribute") or None
    single = {
        "ttl_s": None if ttl is None else parse_span(ttl),
        "deliver_at": None if deliver_at is None else parse_time(deliver_at),
        "event_time": None if event_time is None else parse_time(event_time),
        "idempotency_key": idempotency_key,
    }
    single = {name: value for name, value in single.items() if value is not None}
    given = list(words or ())
    is_stream = given == [_STDIN] or bool(file)
    _check_source(given, file, tombstone, key, is_stream, single, form)
    with opened(url, data, publisher=publisher) as broker, ExitStack() as stack:
        to = Outlet(broker, topic, publisher)
        if not is_stream:
            drafts = (
                [Draft(None)]
                if tombstone
                else [Draft(word.encode(errors="surrogateescape")) for word in given]
            )
            drafts = [draft._replace(key=key, attributes=attributes, priority=priority) for draft in drafts]
            _print_receipts(to, to.each(drafts, single), as_json)
            return
        on_progress = stack.enter_context(progress(f"publishing to {topic}", as_json=as_json, is_bytes=True))
        fields = Fields(data_field, key_field, attributes_field)
        try:
            for portion in _sources(file or [], form, fields, on_progress):
                for batch in batches(_completed(portion, key, attributes, priority)):
                    stored = to.batch(batch)
                    if on_progress is not None and not file:  # How much a pipe holds is not known.
                        on_progress(to.bytes, None)
                    for receipt in stored if receipts else ():
                        (print_line if as_json else _print_id)(receipt)
        except SparrowError as error:
            to.tell_stored(error)
            raise
    if not receipts:
        _print_summary(to, as_json)


class Outlet:
    """Publishes to one topic, and counts."""

    def __init__(self, broker: BlockingBroker, topic: str, publisher: str | None) -> None:
        self._broker = broker
        self.topic = topic
        self._publisher = publisher
        self._began_s = time.monotonic()
        self.messages = self.bytes = self.duplicates = self.dropped = 0

    def each(self, drafts: list[Draft], single: dict[str, Any]) -> list[Receipt]:
        """Messages given as words: one by one when they have options that batches have not."""
        if not single:
            return list(self.batch(drafts))
        found = []
        for draft in drafts:
            values: dict[str, Any] = {
                "key": draft.key,
                "attributes": draft.attributes,
                "priority": draft.priority,
            }
            found.append(
                self._broker.publish(self.topic, draft.data, publisher=self._publisher, **values, **single)
            )
            self._count([draft], found[-1:])
        return found

    def batch(self, drafts: list[Draft]) -> Receipts:
        """One batch, stored whole or not at all."""
        receipts = self._broker.publish_batch(
            self.topic,
            [draft.data for draft in drafts],
            keys=_column(drafts, "key"),
            attributes=_column(drafts, "attributes"),
            event_times=_column(drafts, "event_time"),
            priorities=_column(drafts, "priority"),
            publisher=self._publisher,
        )
        self.messages += len(drafts)
        self.bytes += sum(len(draft.data or b"") for draft in drafts)
        self.duplicates += len(receipts.duplicates)
        self.dropped += receipts.dropped
        return receipts

    def tell_stored(self, error: SparrowError) -> None:
        """Adds to an error how many messages were stored before it."""
        if self.messages:
            error.message += f"; {count(self.messages, 'message')} before it are stored"
            error.details["published"] = self.messages

    def _count(self, drafts: list[Draft], receipts: list[Receipt]) -> None:
        self.messages += len(drafts)
        self.bytes += sum(len(draft.data or b"") for draft in drafts)
        self.duplicates += sum(receipt.is_duplicate for receipt in receipts)
        self.dropped += sum(receipt.is_dropped for receipt in receipts)

    def summary(self) -> dict[str, Any]:
        """What was done, in figures."""
        seconds = max(1e-6, time.monotonic() - self._began_s)
        return {
            "topic": self.topic,
            "messages": self.messages,
            "bytes": self.bytes,
            "duplicates": self.duplicates,
            "dropped": self.dropped,
            "seconds": round(seconds, 6),
            "messages_per_s": round(self.messages / seconds, 1),
            "bytes_per_s": round(self.bytes / seconds, 1),
        }


def batches(drafts: list[Draft]) -> Iterator[list[Draft]]:
    """Drafts in batches of a good size."""
    batch: list[Draft] = []
    held = 0
    for draft in drafts:
        weight = len(draft.data or b"") + 64
        if batch and (len(batch) == BATCH_MESSAGES or held + weight > BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append(draft)
        held += weight
    if batch:
        yield batch


def _column(drafts: list[Draft], name: str) -> list[Any] | None:
    """A column of a batch; None when no message has it."""
    values = [getattr(draft, name) for draft in drafts]
    return values if any(value is not None for value in values) else None


def _check_source(
    words: list[str],
    files: list[Path] | None,
    tombstone: bool,
    key: str | None,
    is_stream: bool,
    single: dict[str, Any],
    form: SourceFormat | None,
) -> None:
    """One source, and options that fit it."""
    if (bool(words) + bool(files) + tombstone) != 1:
        raise InvalidArgument(
            "give messages as words, - for standard input, --file or --tombstone: one of them",
            hint="As in: sparrow publish orders.us hello",
        )
    if tombstone and key is None:
        raise InvalidArgument("a tombstone needs the --key that is gone")
    if is_stream and single:
        raise InvalidArgument(f"{', '.join(single)} is for messages given as words, not for streams")
    if form is not None and not is_stream:
        raise InvalidArgument("--format is for standard input (-) and --file")


def _sources(
    files: list[Path], form: SourceFormat | None, fields: Fields, on_progress: OnProgress | None
) -> Portions:
    """The drafts of all files, or of standard input."""
    if not files:
        yield from from_stream(sys.stdin.buffer, form or SourceFormat.LINES, fields)
        return
    sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
    before = 0
    for path, weight in zip(files, sizes, strict=True):

        def on_bytes(done: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(before + done, sum(sizes))

        yield from from_file(path, form or format_of(path), fields, on_bytes)
        before += weight


def _completed(
    drafts: list[Draft], key: str | None, attributes: dict[str, str] | None, priority: int | None
) -> list[Draft]:
    """Drafts with what the command line says of all of them; what a record says itself counts more."""
    if key is None and attributes is None and priority is None:
        return drafts
    return [
        draft._replace(
            key=key if draft.key is None else draft.key,
            attributes={**(attributes or {}), **(draft.attributes or {})} or None,
            priority=priority if draft.priority is None else draft.priority,
        )
        for draft in drafts
    ]


def _print_receipts(to: Outlet, receipts: list[Receipt], as_json: bool) -> None:
    if as_json:
        print_json({**to.summary(), "receipts": [plain(receipt) for receipt in receipts]})
    elif is_terminal():
        columns = (Column("id"), Column("topic"), number("partition"), number("offset"), Column("note"))
        rows = [(r.message_id, r.topic, r.partition, r.offset, _note(r)) for r in receipts]
        print_rows(columns if any(row[-1] for row in rows) else columns[:-1], _narrow(rows))
    else:
        for receipt in receipts:
            _print_id(receipt)


def _narrow(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows without their notes when nothing is to be noted."""
    return rows if any(row[-1] for row in rows) else [row[:-1] for row in rows]


def _note(receipt: Receipt) -> str:
    if receipt.is_dropped:
        return "dropped by flow control"
    return "published before" if receipt.is_duplicate else ""


def _print_id(receipt: Receipt) -> None:
    typer.echo(receipt.message_id or "dropped")


def _print_summary(to: Outlet, as_json: bool) -> None:
    found = to.summary()
    if as_json:
        print_json(found)
        return
    rest = "".join(f", {found[name]:,} {name}" for name in ("duplicates", "dropped") if found[name])
    typer.echo(
        f"{count(found['messages'], 'message')} ({size(found['bytes'])}) published to {to.topic} "
        f"in {found['seconds']:.2f} s: {found['messages_per_s']:,.0f} a second, "
        f"{size(found['bytes_per_s'])}/s{rest}"
    )


reflow(app)
