"""``sparrow doctor``: is this machine fit for a broker, and is the broker well?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparrow.cli.output import is_terminal, plain, print_json, reflow
from sparrow.cli.target import URL_VARIABLE, Json, Url, address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparrow.cli.checks import Finding
    from sparrow.model.settings import Settings

app = typer.Typer()

_COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
_UNWELL = 1


@app.command(epilog="Example: sparrow doctor --data /var/lib/sparrow --json")
def doctor(
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The data directory to look at; else as the settings say."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings, as for `up`.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a zip for support: findings, settings, and what the broker tells; no messages.",
        ),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Check machine and broker: Python, Java, disk, ports, limits, clock, and whether the broker is healthy.

    A broker that is not named by --url or SPARROW_URL need not run; that is a warning. The data directory
    may be in use.

    Exit codes: 0 well, perhaps with warnings; 1 something failed; 2 the settings are wrong.
    """
    from sparrow.cli.settings import load

    settings = load(config, os.environ, {"data": None if data is None else str(data)}).settings
    is_named = bool(url or os.environ.get(URL_VARIABLE))
    findings = []
    for finding in _look(settings, address(url), is_named=is_named):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if bundle is not None:
        _bundle(bundle, settings, findings, is_quiet=as_json)
    levels = [finding.level.value for finding in findings]
    worst = "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"
    if as_json:
        checks = [{**plain(finding), "level": finding.level.value} for finding in findings]
        print_json({"status": worst, "checks": checks})
    else:
        counted = ", ".join(f"{levels.count(level)} {level}" for level in _COLOURS)
        typer.echo(f"\n{counted}")
    if worst == "fail" or (strict and worst == "warn"):
        raise typer.Exit(_UNWELL)


def _look(settings: Settings, url: str, *, is_named: bool) -> Iterator[Finding]:
    from sparrow.cli import checks

    yield from checks.python()
    yield from checks.java()
    yield from checks.open_files()
    yield from checks.clock()
    yield from checks.disk(Path(settings.data))
    yield from checks.ports(settings)
    yield from checks.broker(url, is_named=is_named)


def _bundle(file: Path, settings: Settings, findings: list[Finding], *, is_quiet: bool) -> None:
    from sparrow.cli import bundle

    shown = [{**plain(finding), "level": finding.level.value} for finding in findings]
    said = bundle.write(file, settings, shown)
    if not is_quiet:
        typer.echo(f"\nwrote {file}; {said}")


def _print(finding: Finding) -> None:
    level = finding.level.value
    if not is_terminal():
        typer.echo("\t".join((level, finding.name, finding.message, finding.advice)))
        return
    typer.secho(f"{level:<6}", fg=_COLOURS[level], bold=level != "ok", nl=False)
    typer.echo(f"{finding.name:<12}{finding.message}")
    if finding.advice:
        typer.secho(f"{'':<18}→ {finding.advice}", dim=True)


reflow(app)
