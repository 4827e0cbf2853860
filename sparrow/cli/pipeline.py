"""``sparrow pipeline``: Spark jobs that are subscriptions: declared, run, stopped, watched, put elsewhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import (
    Column,
    confirm,
    count,
    instant,
    number,
    print_done,
    print_fields,
    print_json,
    print_line,
    print_rows,
    progress,
    reflow,
    size,
    span,
)
from sparrow.cli.seek import parse_target
from sparrow.cli.target import Data, Json, Url, Wide, Yes, address, opened
from sparrow.model.errors import InvalidArgument

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker
    from sparrow.model.pipeline import PipelineLine, PipelineReport

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.")]
Stopped = Annotated[bool, typer.Option("--stopped", help="Leave new ones stopped.")]
_LOOK_S = 0.5
_WAIT_S = 30.0


@app.command(epilog="Example: sparrow pipeline apply pipelines/")
def apply(
    places: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="YAML or Python files, or directories of them.")
    ],
    stopped: Stopped = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Make pipelines be what files declare. A new one runs at once, under `sparrow up` with Spark installed;
    one that exists goes on from where it stands."""
    from sparrow.spark.pipelines import declarations

    found = [pipeline for place in places for pipeline in declarations.read(place)]
    with opened(url, data) as broker:
        reports = [_apply(broker, each, stopped) for each in found]
    if as_json:
        print_json(_plain(reports))
        return
    for report in reports:
        print_done(f"applied {report.pipeline.name}: {_route(report)}; {report.state}")


@app.command("list", epilog="Example: sparrow pipeline list")
def list_(url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False) -> None:
    """List the pipelines with their state and lag."""
    with opened(url, data) as broker:
        found = broker.pipelines()
    if as_json:
        print_json(_plain(found))
        return
    columns = (
        Column("name", is_folded=True),
        Column("state"),
        number("lag"),
        number("rows_per_s"),
        Column("batch_s", span, is_number=True),
        Column("reads", is_folded=True),
        Column("writes", is_folded=True),
        Column("error", is_folded=True),
    )
    rows = [
        (
            each.pipeline.name,
            each.state,
            each.lag,
            None if each.progress is None else each.progress.rows_per_s,
            None if each.progress is None else each.progress.batch_s,
            _reads(each),
            _writes(each),
            each.error,
        )
        for each in found
    ]
    nothing = "no pipelines; `sparrow pipeline apply` makes them from files"
    print_rows(columns, rows, as_table=as_table, nothing=nothing)


@app.command(epilog="Example: sparrow pipeline status revenue")
def status(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Show a pipeline: its state, lag, last batch, dead letters and last error."""
    with opened(url, data) as broker:
        found = broker.pipeline(name)
        letters = _letters(broker, found)
    if as_json:
        print_json({**_plain(found), "dead_letters": letters})
        return
    told = found.progress
    batch = None
    if told is not None and told.batch >= 0:
        batch = f"{told.batch}: {count(told.rows, 'message')} in {span(told.batch_s)}, {told.rows_per_s:,}/s"
    if found.turns is not None:
        print_fields({**_fields_of_job(found), "last error": found.error, "at": instant(found.error_at_us)})
        return
    print_fields(
        {
            "name": name,
            "state": found.state,
            "wanted": "running" if found.is_wanted else "stopped",
            "run by": found.runner,
            "run": found.run,
            "lag": found.lag,
            "last batch": batch,
            "restarts": 0 if told is None else told.restarts,
            "dead letters": letters,
            "dead-letter topic": found.pipeline.dead_letter_topic,
            "reads": _reads(found),
            "writes": _writes(found),
            "changed": instant(found.changed_at_us),
            "last error": found.error,
            "at": instant(found.error_at_us),
        }
    )


@app.command(epilog="Example: sparrow pipeline start revenue --wait")
def start(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it runs.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Let a pipeline run, from where it stands."""
    with opened(url, data) as broker:
        found = broker.start_pipeline(name)
        found = _await(broker, name, ("running", "failing", "scheduled")) if wait else found
    _show_done(found, as_json)


@app.command(epilog="Example: sparrow pipeline stop revenue")
def stop(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has stopped.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Stop a pipeline; it goes on from there when it is started."""
    with opened(url, data) as broker:
        found = broker.stop_pipeline(name)
        found = _await(broker, name, ("stopped",)) if wait else found
    _show_done(found, as_json)


@app.command(epilog="Example: sparrow pipeline seek revenue '2h ago'")
def seek(
    name: Name,
    target: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="earliest, latest, a time, a snapshot, or offsets."),
    ],
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Put a pipeline elsewhere, as `sparrow seek` does. It goes on with a new run: what it aggregates begins
    anew, and what it wrote before stays."""
    place = parse_target(target)
    with opened(url, data) as broker:
        found = broker.seek_pipeline(name, place)
    if as_json:
        print_json(_plain(found))
    else:
        print_done(f"{name} goes on from {' '.join(target)}, {count(found.lag, 'message')} to go")


@app.command(epilog="Example: sparrow pipeline logs revenue --follow")
def logs(
    name: Name,
    lines: Annotated[int, typer.Option(min=1, max=1000, help="Lines at most.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print what a pipeline's runner wrote: starts, stops, errors, rows that were refused."""
    with opened(url, data) as broker:
        after = 0
        while True:
            found = broker.pipeline_log(name, after=after, count=lines)
            for line in found:
                after = line.number
                _print_log_line(line, as_json)
            if not follow:
                return
            time.sleep(_LOOK_S)


@app.command(epilog="Example: sparrow pipeline run pipelines/revenue.yaml --once")
def run(
    place: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A pipeline, or a file that declares it.")
    ],
    once: Annotated[bool, typer.Option("--once", help="End when all that is there now is done.")] = False,
    home: Annotated[
        str, typer.Option(help="Where its checkpoint and relative tables are.")
    ] = "./data.pipelines",
    master: Annotated[str, typer.Option(help="The Spark master.")] = "local[*]",
    driver_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of Spark's driver.")] = "1g",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Run one pipeline here, until it is interrupted. A supervised runner leaves it alone meanwhile. A job
    (compact, merge) is done once, whether it is due or not."""
    import signal

    from sparrow.cli.target import TOKEN_VARIABLE
    from sparrow.model.pipeline import PipelineSettings
    from sparrow.spark.pipelines.runner import Runner

    where = address(url)
    name = _declared(place, where)
    settings = PipelineSettings(master=master, driver_memory=driver_memory)
    runner = Runner(
        where,
        Path(home).absolute(),
        settings,
        name=f"hand {os.getpid()}",
        token=os.environ.get(TOKEN_VARIABLE, ""),
        only=name,
        is_once=once,
    )
    signal.signal(signal.SIGTERM, lambda *_: runner.stop())
    signal.signal(signal.SIGINT, lambda *_: runner.stop())
    with opened(where, None) as broker, progress(name, as_json=as_json) as on_progress:

        def look(seen: list[Any]) -> None:
            if on_progress is not None and seen and seen[0].turn:
                on_progress(seen[0].done_bytes, seen[0].total_bytes)
            elif on_progress is not None and seen:
                done = seen[0].done_rows
                on_progress(done, done + broker.pipeline(name).lag)

        runner.on_look = look
        runner.run()
        found = broker.pipeline(name)
    if found.error:
        raise InvalidArgument(f"{name}: {found.error}", hint=f"`sparrow pipeline logs {name}` tells more.")
    done = 0 if found.progress is None else found.progress.done_rows
    if found.turns is not None:
        if as_json:
            print_json({"name": name, "outcome": found.turns.outcome, "detail": found.turns.detail})
        else:
            print_done(f"{name}: {found.turns.detail or 'there was nothing to do'}")
    elif as_json:
        print_json({"name": name, "messages": done, "lag": found.lag})
    else:
        print_done(f"{name} did {count(done, 'message')}; {count(found.lag, 'message')} to go")


@app.command(epilog="Example: sparrow pipeline delete revenue --yes")
def delete(name: Name, yes: Yes = False, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Delete a pipeline and its position; what it wrote stays."""
    with opened(url, data) as broker:
        waiting = broker.pipeline(name).lag
        confirm(f"Delete {name} with {count(waiting, 'message')} not done?", is_sure=yes, as_json=as_json)
        broker.delete_pipeline(name)
    if as_json:
        print_json({"deleted": name, "lag": waiting})
    else:
        print_done(f"deleted {name}; {count(waiting, 'message')} had not been done")


def _declared(place: str, url: str) -> str:
    """The name of the pipeline; a file's is applied first, and left stopped when it is new."""
    if not place.endswith((".yaml", ".yml", ".py")):
        return place
    from sparrow.spark.pipelines import declarations

    found = declarations.read(Path(place))
    if len(found) != 1:
        raise InvalidArgument(
            f"{place} declares {count(len(found), 'pipeline')}", hint="Run one by its name."
        )
    with opened(url, None) as broker:
        _apply(broker, found[0], True)
    return found[0].name


def _apply(broker: BlockingBroker, pipeline: Any, stopped: bool) -> PipelineReport:
    return broker.apply_pipeline(_plain(pipeline), is_stopped=stopped)


def _await(broker: BlockingBroker, name: str, states: tuple[str, ...]) -> PipelineReport:
    deadline_s = time.monotonic() + _WAIT_S * 4
    found = broker.pipeline(name)
    while found.state not in states and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        found = broker.pipeline(name)
    return found


def _letters(broker: BlockingBroker, found: PipelineReport) -> int:
    return sum(broker.dead_letters(each).statistics().messages for each in found.pipeline.subscriptions())


def _reads(found: PipelineReport) -> str:
    return ", ".join(source.topic for source in found.pipeline.sources.values())


def _writes(found: PipelineReport) -> str:
    if found.turns is not None:
        return f"{found.pipeline.builtin}, every {span(found.pipeline.every_s)}"
    return ", ".join(sink.topic or f"table {sink.table}" for sink in found.pipeline.sinks)


def _route(found: PipelineReport) -> str:
    if found.turns is not None:
        return f"{found.pipeline.builtin} {_reads(found)} every {span(found.pipeline.every_s)}"
    return f"{_reads(found)} to {_writes(found)}"


def _show_done(found: PipelineReport, as_json: bool) -> None:
    if as_json:
        print_json(_plain(found))
    elif found.turns is not None:
        print_done(
            f"{found.pipeline.name} is {found.state}; the next turn is {instant(found.turns.next_at_us)}"
        )
    else:
        print_done(f"{found.pipeline.name} is {found.state}; {count(found.lag, 'message')} to go")


def _fields_of_job(found: PipelineReport) -> dict[str, Any]:
    turns, told = found.turns, found.progress
    assert turns is not None
    done = None
    if told is not None and found.state == "running" and told.total_bytes:
        done = f"{told.done_bytes / told.total_bytes:.0%} of {size(told.total_bytes)}"
    return {
        "name": found.pipeline.name,
        "state": found.state,
        "wanted": "running" if found.is_wanted else "stopped",
        "run by": found.runner,
        "job": found.pipeline.builtin,
        "topics": _reads(found),
        "every": span(found.pipeline.every_s),
        "turns": turns.count,
        "last turn": instant(turns.began_at_us),
        "ended": instant(turns.ended_at_us),
        "outcome": turns.outcome,
        "detail": turns.detail,
        "under way": done,
        "next turn": instant(turns.next_at_us) if found.is_wanted else None,
        "failures": turns.failures,
        "changed": instant(found.changed_at_us),
    }


def _print_log_line(line: PipelineLine, as_json: bool) -> None:
    if as_json:
        print_line(_plain(line))
    else:
        typer.echo(f"{instant(line.at_us)} {line.level:<7} {line.text}")


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


reflow(app)
