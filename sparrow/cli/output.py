"""What commands print: tables for people, tab-separated lines for pipes, JSON for programs.

A listing is rows of plain values and columns that know how a person reads them. On a terminal it becomes a
table with sizes and times made readable; in a pipe the same columns are separated by tabs under one line of
titles, with exact values; with ``--json`` it is one document. Nothing but the answer goes to standard output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from sparrow.model.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_WHEN_PIPED = 120
OnProgress = Callable[[int, int | None], None]
"""Told how much is done, and of how much when that is known."""


def is_terminal() -> bool:
    """Whether a person reads the output."""
    return sys.stdout.isatty()


# JSON.


def print_json(value: Any) -> None:
    """One document."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(plain(value)), indent=2).decode())


def print_line(value: Any) -> None:
    """One document of a stream, on a line of its own."""
    import msgspec

    typer.echo(msgspec.json.encode(plain(value)).decode())


def plain(value: Any) -> Any:
    """A result as maps, lists and scalars: named tuples become maps, and their names fields."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


# Listings.


class Column(NamedTuple):
    """A column: its title, which is also the field of the row, and how a person reads a value."""

    title: str
    show: Callable[[Any], str] = str
    is_number: bool = False
    is_folded: bool = False


def number(title: str, show: Callable[[Any], str] | None = None) -> Column:
    """A column of numbers."""
    return Column(title, show or grouped, is_number=True)


def print_rows(
    columns: Sequence[Column], rows: Sequence[Sequence[Any]], *, as_table: bool = False, nothing: str = ""
) -> None:
    """A listing, for whoever reads the output; ``nothing`` is told to a person when it is empty."""
    if not (as_table or is_terminal()):
        typer.echo("\t".join(column.title.replace(" ", "_") for column in columns))
        for row in rows:
            typer.echo("\t".join(_exact(value) for value in row))
        return
    if not rows:
        typer.echo(nothing or "none")
        return
    titles = {column: _title(column.title) for column in columns}
    numbers = [title for column, title in titles.items() if column.is_number]
    folded = [title for column, title in titles.items() if column.is_folded]
    lines = table(*titles.values(), numbers=numbers, folded=folded)
    for row in rows:
        shown = (_readable(column, value) for column, value in zip(columns, row, strict=True))
        lines.add_row(*shown)
    console().print(lines)


def _title(name: str) -> str:
    """The name of a field as a person reads it; units stand with the values."""
    return name.replace("_per_s", "/s").removesuffix("_s").replace("_", " ")


class Shown(NamedTuple):
    """A value, and how a person reads it."""

    value: Any
    text: str


def print_fields(fields: Mapping[str, Any]) -> None:
    """One thing, a field a line."""
    width = max(len(name) for name in fields) + 2
    for name, value in fields.items():
        if is_terminal():
            typer.echo(typer.style(f"{name:<{width}}", dim=True) + _readable(Column(name), value))
        else:
            typer.echo(f"{name.replace(' ', '_')}\t{_exact(value)}")


def print_done(sentence: str) -> None:
    """What was done, for a person; a pipe is told by the exit code."""
    if is_terminal():
        typer.echo(sentence)


def _readable(column: Column, value: Any) -> str:
    if isinstance(value, Shown):
        return value.text
    if value is None or value == "":
        return "–"  # noqa: RUF001
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(column.show(value))


def _exact(value: Any) -> str:
    value = value.value if isinstance(value, Shown) else value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return escape(str(value))


def escape(text: str) -> str:
    """A text on one line, with nothing in it that moves a terminal's cursor or splits a field."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def console(*, is_error: bool = False) -> Console:
    """Where Rich prints."""
    from rich.console import Console

    is_free = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(
        highlight=False, markup=False, width=None if is_free else WIDTH_WHEN_PIPED, stderr=is_error
    )


def table(*titles: str, numbers: Sequence[str] = (), folded: Sequence[str] = ()) -> Table:
    """A table without lines; numbers stand on the right, folded columns may break."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        made.add_column(
            title,
            justify="right" if title in numbers else "left",
            no_wrap=title not in folded,
            overflow="fold" if title in folded else "ellipsis",
        )
    return made


# Values as people read them.


def grouped(value: float) -> str:
    """A number with its thousands apart."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def count(number: int, noun: str, nouns: str | None = None) -> str:
    """So many of something."""
    plural = nouns or (f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s")
    return f"{number:,} {noun if number == 1 else plural}"


def size(value: float) -> str:
    """Bytes."""
    amount = float(value)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("the last unit takes every size")


def moment(time_us: int) -> str:
    """A point in time, in UTC, to the millisecond."""
    from sparrow.model.message import from_us

    return from_us(time_us).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def instant(time_us: int | None) -> str | None:
    """A point in time as ISO 8601, exact."""
    from sparrow.model.message import from_us

    return None if time_us is None else from_us(time_us).isoformat().replace("+00:00", "Z")


def span(seconds: float) -> str:
    """A stretch of time."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts = []
    rest = round(seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, rest = divmod(rest, length)
        if amount:
            parts.append(f"{amount}{unit}")
    return " ".join(parts[:2])


# Asking and waiting.


def confirm(question: str, *, is_sure: bool, as_json: bool, code: int = 1) -> None:
    """Asks a person; a script must say ``--yes``."""
    if is_sure:
        return
    if as_json or not sys.stdin.isatty():
        raise InvalidArgument("this must be confirmed", hint="Repeat with --yes.")
    if not typer.confirm(question):
        raise typer.Exit(code)


@contextmanager
def progress(doing: str, *, as_json: bool, is_bytes: bool = False) -> Iterator[OnProgress | None]:
    """A bar on standard error for a person who watches; None for everybody else."""
    if as_json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    amounts: tuple[Any, ...] = (bars.MofNCompleteColumn(), bars.TimeRemainingColumn())
    if is_bytes:
        amounts = (bars.DownloadColumn(), bars.TransferSpeedColumn())
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *amounts)
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def reflow(app: typer.Typer) -> None:
    """Makes each paragraph of the commands' help one line: the page breaks lines where the terminal ends."""
    for command in app.registered_commands:
        assert command.callback is not None
        paragraphs = cleandoc(command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
