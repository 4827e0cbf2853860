"""The ``sparrow`` command: finds the command group, runs it, and turns errors into exit codes.

Groups are modules with a Typer application called ``app``. They are listed here by name and one
line of help, and only the one that is asked for is imported, so that ``sparrow --help`` does not
load a broker to print a page. A group whose module is not installed is not listed.

Exit codes, for scripts:

    0    done; for ``up``: stopped by a signal after a clean close
    1    a fault without a code of its own, or a bug
    2    the command line, a setting or an argument is wrong
    3    something named does not exist
    4    the request does not fit the present state
    5    a limit is reached; try again later
    6    the storage cannot do it
    7    an address cannot be had or reached
    130  interrupted before a clean close (143 when terminated)
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from sparrow.model.errors import (
    AddressUnavailable,
    AlreadyExists,
    BrokerClosed,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SparrowError,
    StorageError,
)


class Group(NamedTuple):
    """A command, or a group of them, in a module of its own."""

    name: str
    module: str
    help: str
    is_single: bool = False
    """The module's one command stands at the top, not below the group's name."""


GROUPS = (
    Group("up", "sparrow.cli.up", "Start a broker on a data directory.", is_single=True),
    Group("config", "sparrow.cli.config", "Show the settings and where they come from."),
    Group("log", "sparrow.cli.log", "Look into a data directory and check it."),
)

# The first class that fits decides, so the narrower stand above the wider.
_EXIT_CODES: tuple[tuple[type[SparrowError], int], ...] = (
    (InvalidArgument, 2),
    (NotFound, 3),
    (AlreadyExists, 4),
    (ResourceExhausted, 5),
    (StorageError, 6),
    (AddressUnavailable, 7),
    (BrokerClosed, 7),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        application(words)(words, prog_name="sparrow")
    except SparrowError as error:
        report(error, as_json="--json" in words)
        sys.exit(exit_code(error))


def application(words: Sequence[str]) -> typer.Typer:
    """The application for one command line, with only the group that it names loaded."""
    app = typer.Typer(
        help="Sparrow: a durable publish/subscribe broker whose topics are Spark tables.",
        epilog="Exit codes: 0 done, 1 fault, 2 wrong input, 3 not found, 4 conflict, 5 limit reached, "
        "6 storage, 7 address unavailable.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for group in GROUPS:
        if importlib.util.find_spec(group.module) is None:
            continue
        if group.name == wanted:
            module = importlib.import_module(group.module)
            app.add_typer(module.app, name=None if group.is_single else group.name, help=group.help)
        else:
            app.command(group.name, help=group.help)(_not_loaded)
    return app


def exit_code(error: SparrowError) -> int:
    """The documented exit code of an error."""
    for kind, code in _EXIT_CODES:
        if isinstance(error, kind):
            return code
    return 4 if 400 <= error.status < 500 else 1


def report(error: SparrowError, *, as_json: bool) -> None:
    """Tell a person, or a script, what went wrong and what to do next."""
    if as_json:
        import msgspec

        body = msgspec.json.encode({"error": error.to_dict()}, enc_hook=repr).decode()
        typer.echo(body, err=True)
        return
    typer.secho(f"error: {error.message}", err=True, fg=typer.colors.RED)
    typer.echo(f"hint: {error.hint}", err=True)
    typer.echo(f"code: {error.code}", err=True)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib import metadata

        typer.echo(f"sparrow {metadata.version('sparrow-broker')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options before any command; each does its work where it is declared."""


def _not_loaded() -> None:
    raise AssertionError("a group that the command line names is loaded before it is called")


if __name__ == "__main__":
    main()
