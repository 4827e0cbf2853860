"""``sparrow config``: what the settings are, and where each came from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sparrow.cli.settings import load
from sparrow.model.settings import Effective, describe, environment_name, flatten, is_secret

app = typer.Typer(no_args_is_help=True)


@app.command()
def show(
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the effective settings and the source of each: default, file or environment."""
    effective = load(config, os.environ, {})
    if as_json:
        _print_json(effective)
    else:
        _print_table(effective)


@app.command()
def table() -> None:
    """Print all settings as a Markdown table, as docs/guides/configuration.md has it."""
    typer.echo("\n".join(markdown()))


def markdown() -> Iterator[str]:
    """The lines of the table of all settings."""
    yield "| key | environment | default | allowed | meaning |"
    yield "|---|---|---|---|---|"
    for setting in describe():
        name = environment_name(setting.path)
        default = _plain(setting.default)
        yield f"| `{setting.path}` | `{name}` | `{default}` | {setting.type} | {setting.doc} |"


def _print_json(effective: Effective) -> None:
    import msgspec

    values = _shown(effective)
    sourced = {path: {"value": value, "source": effective.sources[path]} for path, value in values.items()}
    typer.echo(msgspec.json.format(msgspec.json.encode(sourced), indent=2).decode())


def _print_table(effective: Effective) -> None:
    from rich.console import Console
    from rich.table import Table

    lines = Table(box=None, pad_edge=False)
    for title in ("setting", "value", "source"):
        lines.add_column(title, overflow="fold")
    for path, value in _shown(effective).items():
        lines.add_row(path, _plain(value), effective.sources[path])
    Console(highlight=False, markup=False).print(lines)


def _shown(effective: Effective) -> dict[str, Any]:
    """The values, secrets masked."""
    values = flatten(effective.settings)
    return {path: "***" if value and is_secret(path) else value for path, value in values.items()}


def _plain(value: Any) -> str:
    """A value as it would be written in YAML or in the environment."""
    return str(value).lower() if isinstance(value, bool) else str(value)
