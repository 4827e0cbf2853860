"""The ``sparrow`` command: finds the command group, runs it, and turns errors into exit codes.

Groups are modules with a Typer application called ``app``. They are listed here by name and one
line of help, and only the one that is asked for is imported, so that ``sparrow --help`` does not
load a broker to print a page. A group whose module is not installed is not listed.

Exit codes, for scripts:

    0    done; for ``up``: stopped by a signal after a clean close
    1    a fault without a code of its own, a bug, or the answer is no (damage found, not confirmed)
    2    the command line, a setting or an argument is wrong
    3    something named does not exist
    4    the request does not fit the present state
    5    the broker, or an address, cannot be reached or had
    6    a limit is reached; try again later
    7    the storage cannot do it
    130  interrupted before a clean close (143 when terminated)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from sparrow.model.errors import (
    AddressUnavailable,
    AlreadyExists,
    BrokerClosed,
    ConnectionLost,
    InvalidArgument,
    NotADataDirectory,
    NotFound,
    PipelineNotFound,
    ResourceExhausted,
    SparrowError,
    StorageError,
    SubscriptionNotFound,
    TopicExists,
    TopicInUse,
    TopicNotFound,
    Unauthenticated,
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
    Group("topic", "sparrow.cli.topic", "Create, list, show, change and delete topics."),
    Group("sub", "sparrow.cli.sub", "Create, list, change and delete subscriptions; see their lag."),
    Group("publish", "sparrow.cli.publish", "Publish words, lines or files.", is_single=True),
    Group("pull", "sparrow.cli.pull", "Take messages of a subscription.", is_single=True),
    Group("tail", "sparrow.cli.tail", "Watch topics without taking anything.", is_single=True),
    Group("group", "sparrow.cli.group", "See consumer groups: members, assignment, offsets."),
    Group("dlq", "sparrow.cli.dlq", "See, replay and purge dead letters."),
    Group("seek", "sparrow.cli.seek", "Put a subscription elsewhere in its log.", is_single=True),
    Group("pipeline", "sparrow.cli.pipeline", "Apply, run, start, stop and watch Spark pipelines."),
    Group("snapshot", "sparrow.cli.snapshot", "Save positions to come back to."),
    Group("trace", "sparrow.cli.trace", "Tell where a message is.", is_single=True),
    Group("bench", "sparrow.cli.bench", "Measure a broker in a few seconds.", is_single=True),
    Group("doctor", "sparrow.cli.doctor", "Check machine and broker.", is_single=True),
    Group("token", "sparrow.cli.token", "Make, list and revoke tokens; see what was changed by whom."),
    Group("compact", "sparrow.cli.lake", "Keep the newest message of each key.", is_single=True),
    Group("merge", "sparrow.cli.lake", "Put small segments together.", is_single=True),
    Group("archive", "sparrow.cli.lake", "Add to a lake table by topic and date.", is_single=True),
    Group("config", "sparrow.cli.config", "Show the settings and where they come from."),
    Group("log", "sparrow.cli.log", "Look into a data directory and check it."),
)

# The first class that fits decides, so the narrower stand above the wider.
_EXIT_CODES: tuple[tuple[type[SparrowError], int], ...] = (
    (InvalidArgument, 2),
    (NotFound, 3),
    (AlreadyExists, 4),
    (ResourceExhausted, 6),
    (NotADataDirectory, 3),
    (StorageError, 7),
    (AddressUnavailable, 5),
    (BrokerClosed, 5),
    (ConnectionLost, 5),
)
USAGE = 2
INTERRUPTED = 130

# Hints of the registry speak to programs; where a command does the same, people are told the command.
_HINTS: dict[type[SparrowError], str] = {
    TopicNotFound: "`sparrow topic list` shows the topics, `sparrow topic create` makes one.",
    TopicExists: "Pick another name, or change it with `sparrow topic update`.",
    TopicInUse: "Delete the subscriptions first, or repeat with --force.",
    Unauthenticated: "Put a token into SPARROW_TOKEN; `sparrow token create` makes one.",
    PipelineNotFound: "`sparrow pipeline list` shows the pipelines, `sparrow pipeline apply` makes one.",
    SubscriptionNotFound: "`sparrow sub list` shows the subscriptions, `sparrow sub create` makes one.",
}
_COMPLETION_VARIABLE = "_SPARROW_COMPLETE"


class Root(TyperGroup):
    """The root of all commands: whatever goes wrong below leaves as one line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        try:
            outcome = super().main(words, *rest, **{**options, "standalone_mode": False})
        except SparrowError as error:
            report(error, as_json=as_json)
            sys.exit(exit_code(error))
        except typer.TyperException as error:
            _report_usage(error, as_json=as_json)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(INTERRUPTED)
        sys.exit(outcome if isinstance(outcome, int) else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    application(words)(words, prog_name="sparrow")


def application(words: Sequence[str]) -> typer.Typer:
    """The application for one command line, with only the group that it names loaded."""
    app = typer.Typer(
        cls=Root,
        help="Sparrow: a durable publish/subscribe broker whose topics are Spark tables.",
        epilog="Exit codes: 0 done, 1 fault, 2 wrong input, 3 not found, 4 conflict, 5 unavailable, "
        "6 limit reached, 7 storage. More in docs/guides/cli.md.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"max_content_width": 100},
    )
    app.callback()(_root)
    wanted = next((word for word in _completed(words) if not word.startswith("-")), None)
    for group in GROUPS:
        if importlib.util.find_spec(group.module) is None:
            continue
        if group.name == wanted:
            module = importlib.import_module(group.module)
            app.add_typer(module.app, name=None if group.is_single else group.name, help=group.help)
        else:
            app.command(group.name, help=group.help)(_not_loaded)
    return app


def _completed(words: Sequence[str]) -> Sequence[str]:
    """The words of the command line, or of the one that a shell wants completed."""
    if _COMPLETION_VARIABLE not in os.environ:
        return words
    text = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    try:
        return shlex.split(text)[1:]
    except ValueError:  # A quote that is still open; the first words stand before it.
        return text.split()[1:]


def exit_code(error: SparrowError) -> int:
    """The documented exit code of an error."""
    for kind, code in _EXIT_CODES:
        if isinstance(error, kind):
            return code
    return 4 if 400 <= error.status < 500 else 1


def report(error: SparrowError, *, as_json: bool) -> None:
    """Tell a person, or a script, what went wrong and what to do next."""
    hint = _HINTS.get(type(error), error.hint) if error.hint == error.default_hint else error.hint
    if as_json:
        _print_error({**error.to_dict(), "hint": hint})
        return
    typer.secho("error: ", err=True, fg=typer.colors.RED, nl=False)
    typer.echo(f"{error.message} (code: {error.code}; hint: {hint})", err=True)


def _report_usage(error: typer.TyperException, *, as_json: bool) -> None:
    """The same for a command line that cannot be read."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
        return
    hint = f"{context.command_path if context is not None else 'sparrow'} --help"
    if as_json:
        fields = {"code": "USAGE", "message": error.format_message(), "hint": hint, "details": {}}
        _print_error({**fields, "retryable": False})
        return
    typer.secho("error: ", err=True, fg=typer.colors.RED, nl=False)
    typer.echo(f"{' '.join(error.format_message().split())} (code: USAGE; hint: {hint})", err=True)


def _print_error(fields: dict[str, Any]) -> None:
    import msgspec

    typer.echo(msgspec.json.encode({"error": fields}, enc_hook=repr).decode(), err=True)


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
