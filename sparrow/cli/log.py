"""``sparrow log``: look into the data directory of a stopped broker, check it, rebuild its catalog.

The work is done in ``sparrow.store.offline``; here are the words. With ``--json`` a command prints one
JSON document and nothing else, errors included. People on a terminal get tables and a progress bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import console, count, moment, print_json, progress, reflow, size, table
from sparrow.model.errors import InvalidArgument, SparrowError

if TYPE_CHECKING:
    from rich.console import Console

    from sparrow.store.offline.findings import Finding
    from sparrow.store.offline.rebuilding import Rebuilt
    from sparrow.store.offline.summaries import EntrySummary, MessageSummary, Page, Summary
    from sparrow.store.offline.verification import Verdict

app = typer.Typer(no_args_is_help=True)

Data = Annotated[Path, typer.Argument(metavar="DATA", help="The data directory; its broker must be stopped.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_DAMAGE_FOUND = 1
_CANNOT_LOOK = 2
_PREVIEW_BYTES = 60


@app.command()
def inspect(
    data: Data,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    file: Annotated[int | None, typer.Option(min=1, help="The entries of this journal file.")] = None,
    entries: Annotated[bool, typer.Option("--entries", help="Journal entries, one by one.")] = False,
    messages: Annotated[bool, typer.Option("--messages", help="Messages of a partition.")] = False,
    offset: Annotated[int, typer.Option(min=0, help="The first message to show.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Lines to show at most.")] = 20,
    as_json: Json = False,
) -> None:
    """Show what a data directory holds: topics, journal files, segments, single entries or messages.

    The broker must be stopped. Nothing is changed, and a damaged directory can be looked into as well.

    Exit codes: 0 shown; 2 the command line is wrong; 3 no such topic, partition, file or data directory;
    7 the directory cannot be read, or a broker has it open.
    """
    from sparrow.store.offline import access
    from sparrow.store.offline.inspection import Inspection

    if messages and topic is None:
        raise InvalidArgument("--messages needs --topic", hint="Name the topic: --messages --topic orders")
    with access.looking(data):
        found = Inspection(data)
        if messages and topic is not None:
            page = found.messages(topic, partition or 0, offset, limit)
            _show(page, as_json, _print_messages)
        elif entries or file is not None:
            listed = list(islice(found.entries(file), None if as_json else limit + 1))
            _show(listed, as_json, lambda console, rows: _print_entries(console, rows, limit))
        else:
            summary = found.summary(topic, partition)
            _show(summary, as_json, lambda console, it: _print_summary(console, it, limit))


@app.command()
def verify(
    data: Data,
    fast: Annotated[
        bool, typer.Option("--fast", help="Of segments check only size and footer, not every row group.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every byte of a data directory, and that everything fits together.

    Checks every journal entry, every row group and page of every segment, the catalog's digests, that
    offsets have no gaps and no overlaps, and that every listed file is there. The broker must be stopped.
    Nothing is changed. Each damage is listed with what it means for your messages.

    Exit codes: 0 whole; 1 damage found; 2 cannot look (not a data directory, held open by a broker,
    no permission, a newer version).
    """
    from sparrow.store.offline import verification

    with (
        _exit_when_it_cannot_look(as_json),
        progress("verifying", as_json=as_json, is_bytes=True) as on_progress,
    ):
        verdict = verification.verify(data, is_fast=fast, on_progress=on_progress)
    _show(verdict, as_json, _print_verdict)
    if not verdict.is_whole:
        raise typer.Exit(_DAMAGE_FOUND)


@app.command()
def rebuild(
    data: Data,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Make a new catalog from topic files, segments, journal, and what is left of the old catalog.

    For a catalog that is lost or damaged. The broker must be stopped. Every message that can be read is
    served exactly once afterwards, and ids go on where they were. Damaged segments are set aside as
    .parquet.damaged, and the old catalog is kept as catalog.db.TIME.old. Nothing is deleted.

    Exit codes: 0 rebuilt (or, with --dry-run, could be) and nothing is lost; 1 rebuilt, and what is lost
    is listed; 2 not confirmed; 3 not a data directory; 7 the directory cannot be used, or a broker has
    it open.
    """
    from sparrow.broker.clock import Clock
    from sparrow.store.offline import rebuilding

    if not dry_run and not yes:
        _confirm(data, as_json)
    now_us = Clock().now_us()
    with progress("reading", as_json=as_json, is_bytes=True) as on_progress:
        work = rebuilding.plan if dry_run else rebuilding.rebuild
        rebuilt = work(data, now_us=now_us, on_progress=on_progress)
    _show(rebuilt, as_json, _print_rebuilt)
    if not rebuilt.is_whole:
        raise typer.Exit(_DAMAGE_FOUND)


def _confirm(data: Path, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise InvalidArgument(
            "a rebuild must be confirmed", hint="Look with --dry-run first, then repeat with --yes."
        )
    if not typer.confirm(f"Put a new catalog in the place of that in {data}?"):
        raise typer.Exit(_CANNOT_LOOK)


@contextmanager
def _exit_when_it_cannot_look(as_json: bool) -> Iterator[None]:
    """The codes 0 and 1 say what was found; whatever kept the command from looking is 2."""
    try:
        yield
    except SparrowError as error:
        from sparrow.cli.main import report

        report(error, as_json=as_json)
        raise typer.Exit(_CANNOT_LOOK) from error


# Output.


def _show(value: Any, as_json: bool, print_for_people: Callable[[Any, Any], None]) -> None:
    if as_json:
        print_json(value)
    else:
        print_for_people(console(), value)


def _print_summary(console: Console, summary: Summary, limit: int) -> None:
    console.print(f"{summary.directory}: format {summary.format}, created {moment(summary.created_at_us)}")
    catalog = summary.catalog
    if catalog.version is None:
        console.print(f"catalog: {catalog.state}")
    else:
        console.print(
            f"catalog: version {catalog.version}, {catalog.state}; journal sealed through file "
            f"{max(0, catalog.sealed_through or 0)}; {count(catalog.subscriptions or 0, 'subscription')}, "
            f"{count(catalog.producers or 0, 'producer')}"
        )
    _print_partitions(console, summary)
    _print_journal(console, summary)
    _print_segments(console, summary, limit)


def _print_partitions(console: Console, summary: Summary) -> None:
    numbers = ("id", "part", "start", "sealed", "end", "segments", "lake")
    lines = table("topic", *numbers, numbers=numbers, folded=["topic"])
    for row in summary.partitions:
        lines.add_row(
            row.topic,
            str(row.topic_id),
            str(row.partition),
            str(row.start_offset),
            str(row.sealed_end_offset),
            str(row.end_offset),
            str(row.segments),
            size(row.segment_bytes),
        )
    console.print("\nTopics" if summary.partitions else "\nNo topics")
    if summary.partitions:
        console.print(lines)


def _print_journal(console: Console, summary: Summary) -> None:
    numbers = ("entries", "batches", "facts", "notes", "messages", "bytes")
    lines = table("file", *numbers, "state", numbers=numbers, folded=["state"])
    for row in summary.journal:
        state = ["sealed, to be removed"] if row.is_sealed else []
        state += [f"{size(row.torn_bytes)} torn at the end"] if row.torn_bytes else []
        state += [f"{count(row.broken, 'broken stretch', 'broken stretches')}"] if row.broken else []
        counts = (row.entries, row.batches, row.facts, row.notes, row.messages)
        lines.add_row(row.file, *map(str, counts), size(row.bytes), ", ".join(state) or "ok")
    console.print("\nJournal" if summary.journal else "\nNo journal files")
    if summary.journal:
        console.print(lines)


def _print_segments(console: Console, summary: Summary, limit: int) -> None:
    numbers = ("part", "first", "end", "groups", "bytes")
    lines = table("topic", *numbers, "from", "to", numbers=numbers, folded=["topic", "to"])
    for row in summary.segments[:limit]:
        lines.add_row(
            row.topic,
            str(row.partition),
            str(row.first_offset),
            str(row.end_offset),
            str(row.row_groups),
            size(row.size_bytes),
            moment(row.first_time_us)[:19],
            _until(row.first_time_us, row.last_time_us),
        )
    console.print("\nSegments" if summary.segments else "\nNo segments")
    if summary.segments:
        console.print(lines)
    if len(summary.segments) > limit:
        console.print(f"… and {len(summary.segments) - limit} more; use --topic, --partition or --limit")


def _print_entries(console: Console, rows: Sequence[EntrySummary], limit: int) -> None:
    numbers = ("position", "producer")
    titles = ("position", "kind", "crc", "time", "producer", "what")
    lines = table(*titles, numbers=numbers, folded=["what"])
    last = None
    for row in rows[:limit]:
        if row.file != last:
            lines.add_row(row.file)
            last = row.file
        lines.add_row(
            str(row.position),
            row.kind,
            "ok" if row.is_crc_right else "BAD",
            moment(row.publish_time_us)[:19] if row.publish_time_us else "",
            f"{row.producer_id}/{row.producer_epoch}" if row.producer_id else "",
            _what(row),
        )
    console.print(lines if rows else "no entries")
    if len(rows) > limit:
        console.print("… and more; use --file, --limit or --json")


def _what(row: EntrySummary) -> str:
    parts = []
    if row.kind == "unreadable":
        parts.append(f"nothing readable up to {row.end_position}")
    if row.base_offset is not None and row.end_offset is not None:
        topic = row.topic or f"topic id {row.topic_id}"
        parts.append(f"{topic}/{row.partition} {row.base_offset}–{row.end_offset - 1}")  # noqa: RUF001
    if row.producer_id:
        parts.append(f"sequence {row.base_sequence}")
    for fact in row.facts:
        fields = ", ".join(f"{name}={value}" for name, value in fact.items() if name != "fact")
        parts.append(f"{fact['fact']}({fields})")
    parts += [*row.flags, *([row.codec] if row.codec != "none" else [])]
    return ", ".join(parts)


def _print_messages(console: Console, page: Page) -> None:
    lines = table("offset", "time", "key", "bytes", "data", numbers=["offset", "bytes"], folded=["data"])
    for row in page.messages:
        length = "" if row.data is None else str(len(row.data))
        lines.add_row(str(row.offset), moment(row.publish_time_us)[:19], row.key or "", length, _preview(row))
    console.print(lines if page.messages else f"no messages of {page.topic} partition {page.partition} there")
    for finding in page.damages:
        _print_finding(console, finding)


def _preview(row: MessageSummary) -> str:
    if row.data is None:
        return "(tombstone)"
    text = row.data[:_PREVIEW_BYTES].decode("utf-8", "replace")
    text = "".join(letter if letter.isprintable() else "." for letter in text)
    return text + ("…" if len(row.data) > _PREVIEW_BYTES else "")


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print(
        f"{verdict.directory}: {count(verdict.topics, 'topic')}, "
        f"{count(verdict.journal_files, 'journal file')} with {count(verdict.journal_entries, 'entry')} "
        f"({size(verdict.journal_bytes)}), {count(verdict.segments, 'segment')} "
        f"({size(verdict.segment_bytes)})"
    )
    _print_findings(console, "damage", verdict.damages)
    _print_findings(console, "note", verdict.notes)
    if not verdict.is_whole:
        console.print(f"\n{count(len(verdict.damages), 'damage')} found")
    elif verdict.is_fast:
        console.print("whole, as far as --fast looks: row groups of segments were not read")
    else:
        console.print("whole: every checksum matches and everything fits together")


def _print_rebuilt(console: Console, rebuilt: Rebuilt) -> None:
    numbers = ("id", "partitions", "segments", "sealed", "in the journal")
    lines = table("topic", *numbers, numbers=numbers, folded=["topic"])
    for row in rebuilt.topics:
        counts = (row.id, row.partitions, row.segments, row.sealed_messages, row.journal_messages)
        lines.add_row(row.name, *map(str, counts))
    console.print(lines if rebuilt.topics else "no topics")
    console.print(
        f"catalog version {rebuilt.version}, journal sealed through file {max(0, rebuilt.sealed_through)}; "
        f"{count(rebuilt.subscriptions, 'subscription')}, {count(rebuilt.producers, 'producer')}, "
        f"{count(rebuilt.documents, 'document')} kept"
    )
    for title, names in (
        ("set aside, damaged", rebuilt.set_aside),
        ("set aside, held twice", rebuilt.doubled),
        ("left to the journal, which still holds it", rebuilt.redundant),
        ("copied from the sound part of a damaged one", rebuilt.rescued),
        ("sealed anew from the journal", rebuilt.resealed),
    ):
        for name in names:
            console.print(f"{title}: {name}", soft_wrap=True)
    _print_findings(console, "lost", rebuilt.losses)
    _print_findings(console, "note", rebuilt.notes)
    if rebuilt.is_dry_run:
        console.print("\nNothing was changed. Without --dry-run the catalog would be as above.")
    else:
        kept = f"; the old one is {rebuilt.old_catalog}" if rebuilt.old_catalog else ""
        console.print(f"\nThe new catalog is in place{kept}.")


def _print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        console.print()
        console.print(f"{title}: ", end="", style="bold red" if title != "note" else "bold")
        _print_finding(console, finding)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.padding import Padding

    at = ""
    if finding.position is not None:
        end = f"–{finding.end_position - 1}" if finding.end_position else ""  # noqa: RUF001
        at = f" at byte {finding.position}{end}"
    console.print(f"{finding.file}{at}", soft_wrap=True)
    console.print(Padding.indent(finding.what, 2))
    console.print(Padding.indent(f"→ {finding.meaning}", 2))


def _until(first_time_us: int, last_time_us: int) -> str:
    """The end of a stretch of time; without its date when that is the date of the start."""
    first, last = moment(first_time_us)[:19], moment(last_time_us)[:19]
    return last[11:] if first[:10] == last[:10] else last


reflow(app)
