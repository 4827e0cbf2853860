"""``sparrow dlq``: the dead letters of a subscription: look at them, deliver them again, give them up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.messages import to_fields
from sparrow.cli.output import (
    Column,
    OnProgress,
    Shown,
    confirm,
    count,
    instant,
    moment,
    number,
    print_done,
    print_fields,
    print_json,
    print_rows,
    progress,
    reflow,
    size,
    span,
)
from sparrow.cli.target import Data, Json, Url, Wide, Yes, opened
from sparrow.cli.values import parse_time
from sparrow.model.errors import PreconditionFailed

if TYPE_CHECKING:
    from sparrow.client.subscription import BlockingDeadLetters
    from sparrow.kernel.replay import ReplayJob
    from sparrow.model.deadletter import DeadLetter

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="SUB", help="The subscription whose dead letters they are.")]
Ids = Annotated[
    list[str] | None, typer.Option("--id", metavar="MESSAGE_ID", help="Only this one; may be repeated.")
]
Reason = Annotated[str, typer.Option(help="Only with this reason: attempts_exhausted, rejected, expired, …")]
Since = Annotated[str | None, typer.Option(metavar="TIME", help="Dead since: 2h ago, 2026-07-01.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Dead before.")]
Filter = Annotated[str, typer.Option(help="Only letters for which it holds, as of a subscription.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count.")]

_LOOK_S = 0.1
_PREVIEW = 60


@app.command("list", epilog="Example: sparrow dlq list billing --since '1d ago' --reason attempts_exhausted")
def list_(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, help="Letters at most, oldest first.")] = 100,
    ids: Ids = None,
    reason: Reason = "",
    since: Since = None,
    until: Until = None,
    filter: Filter = "",
    url: Url = None,
    data: Data = None,
    as_table: Wide = False,
    as_json: Json = False,
) -> None:
    """List dead letters, oldest first."""
    chosen = _selection(ids, reason, since, until, filter)
    with opened(url, data) as broker:
        letters = broker.dead_letters(name).list(limit=limit, **chosen)
    if as_json:
        print_json([_fields(letter) for letter in letters])
        return
    columns = (
        Column("id"),
        Column("topic", is_folded=True),
        Column("dead_at", lambda text: str(text)[:19]),
        Column("reason"),
        number("attempts"),
        Column("last_error", is_folded=True),
        Column(
            "data", lambda text: text if len(text) <= _PREVIEW else text[: _PREVIEW - 1] + "…", is_folded=True
        ),
    )
    rows = [
        (
            letter.message_id,
            letter.topic,
            instant(letter.dead_at_us),
            letter.reason,
            letter.attempts,
            letter.last_error,
            "" if letter.message.data is None else letter.message.data.decode("utf-8", "replace"),
        )
        for letter in letters
    ]
    print_rows(columns, rows, as_table=as_table, nothing="no dead letters")


@app.command(epilog="Example: sparrow dlq show billing 12-0-4711")
def show(
    name: Name,
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="As dlq list shows it.")],
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Show a dead letter whole."""
    with opened(url, data) as broker:
        letter = broker.dead_letters(name).get(message_id)
    fields = _fields(letter)
    if as_json:
        print_json(fields)
        return
    message = fields.pop("message")
    attributes = " ".join(f"{name}={value}" for name, value in sorted(message["attributes"].items()))
    kept = {name: message[name] for name in ("key", "publish_time", "priority")}
    print_fields({**fields, **kept, "attributes": attributes, "data": message["data"]})


@app.command(epilog="Example: sparrow dlq stats billing")
def stats(
    name: Name, url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False
) -> None:
    """Count dead letters by reason and topic."""
    with opened(url, data) as broker:
        found = broker.dead_letters(name).statistics()
    if as_json:
        print_json(found)
        return
    print_fields(
        {
            "messages": found.messages,
            "bytes": Shown(found.bytes, size(found.bytes)),
            "oldest": instant(found.oldest_at_us),
            "newest": instant(found.newest_at_us),
            "failed every replay": found.loops,
        }
    )
    typer.echo()
    rows = [("reason", *pair) for pair in sorted(found.by_reason.items())]
    rows += [("topic", *pair) for pair in sorted(found.by_topic.items())]
    print_rows((Column("by"), Column("value", is_folded=True), number("messages")), rows, as_table=as_table)


@app.command(epilog="Example: sparrow dlq replay billing --reason attempts_exhausted --rate 500 --wait")
def replay(
    name: Name,
    ids: Ids = None,
    reason: Reason = "",
    since: Since = None,
    until: Until = None,
    filter: Filter = "",
    rate: Annotated[float, typer.Option(help="Messages a second.")] = 100.0,
    destination: Annotated[
        str | None,
        typer.Option(
            "--to-subscription", metavar="SUB", help="Deliver them to this one; its own if left out."
        ),
    ] = None,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all is done.")] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Deliver dead letters again, under their own ids.

    The replay is a job of the broker and goes on without this command; dlq jobs shows it, dlq abort ends it.
    With --wait this command ends when the job has, and Ctrl-C leaves the job running. Letters that failed
    after every replay are passed over unless named by --id.

    With --to-subscription another subscription gets them, and nobody else. It must read their topics.
    """
    chosen = _selection(ids, reason, since, until, filter)
    with opened(url, data) as broker:
        letters = broker.dead_letters(name)
        job = letters.replay(rate_per_s=rate, dry_run=dry_run, destination=destination, **chosen)
        if not dry_run and (wait or data is not None):  # A directory is closed behind the command.
            with progress(f"replaying {name}", as_json=as_json) as on_progress:
                job = _watch(letters, job.replay_id, on_progress)
    if dry_run:
        _print_plan(name, job.total, rate, as_json)
        return
    if as_json:
        print_json({**_job(job), "is_dry_run": False})
    else:
        typer.echo(f"replay {job.replay_id}: {_state(job)}")
    if job.status == "failed":
        raise PreconditionFailed(
            f"the replay failed: {job.error}", hint=f"`sparrow dlq jobs {name}` shows it."
        )


@app.command(epilog="Example: sparrow dlq jobs billing")
def jobs(
    name: Name, url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False
) -> None:
    """List the replays of a subscription, finished ones included."""
    with opened(url, data) as broker:
        found = broker.dead_letters(name).replays()
    if as_json:
        print_json([_job(job) for job in found])
        return
    columns = (
        Column("replay_id"),
        Column("status"),
        number("total"),
        number("replayed"),
        number("failed"),
        number("rate_per_s"),
        Column("started"),
        Column("to", is_folded=True),
        Column("error", is_folded=True),
    )
    rows = [
        (
            job.replay_id,
            str(job.status),
            job.total,
            job.replayed,
            job.failed,
            job.rate_per_s,
            moment(job.started_at_us)[:19],
            job.destination or name,
            job.error,
        )
        for job in found
    ]
    print_rows(columns, rows, as_table=as_table, nothing="no replays")


@app.command(epilog="Example: sparrow dlq abort billing 6f2c…")
def abort(
    name: Name,
    replay_id: Annotated[str, typer.Argument(metavar="REPLAY_ID", help="As dlq jobs shows it.")],
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """End a replay; what was given back stays given back."""
    with opened(url, data) as broker:
        job = broker.dead_letters(name).abort(replay_id)
    if as_json:
        print_json(_job(job))
    else:
        print_done(f"replay {job.replay_id}: {_state(job)}")


@app.command(epilog="Example: sparrow dlq purge billing --until '30d ago' --yes")
def purge(
    name: Name,
    ids: Ids = None,
    reason: Reason = "",
    since: Since = None,
    until: Until = None,
    filter: Filter = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Give dead letters up for good."""
    chosen = _selection(ids, reason, since, until, filter)
    with opened(url, data) as broker:
        letters = broker.dead_letters(name)
        found = letters.purge(dry_run=True, **chosen)
        if found and not dry_run:
            confirm(
                f"Give up {count(found, 'dead letter')} of {name} for good?", is_sure=yes, as_json=as_json
            )
            found = letters.purge(**chosen)
    if as_json:
        print_json({"subscription": name, "messages": found, "is_dry_run": dry_run})
    else:
        typer.echo(f"{count(found, 'dead letter')} {'would be purged' if dry_run else 'purged'}")


def _selection(
    ids: list[str] | None, reason: str, since: str | None, until: str | None, filter: str
) -> dict[str, Any]:
    from sparrow.model.message import to_us

    found: dict[str, Any] = {
        "ids": list(ids or ()),
        "start_at_us": None if since is None else to_us(parse_time(since)),
        "end_at_us": None if until is None else to_us(parse_time(until)),
        "reason": reason,
        "filter": filter,
    }
    return {name: value for name, value in found.items() if value}


def _watch(letters: BlockingDeadLetters, replay_id: str, on_progress: OnProgress | None) -> ReplayJob:
    """Waits for a job, and shows how far it is."""
    if on_progress is None:
        job: ReplayJob = letters.wait(replay_id)
        return job
    while True:
        (job,) = [each for each in letters.replays() if each.replay_id == replay_id]
        on_progress(job.replayed + job.skipped + job.failed, job.total)
        if job.status not in ("pending", "running"):
            return job
        time.sleep(_LOOK_S)


def _print_plan(name: str, total: int, rate: float, as_json: bool) -> None:
    seconds = round(total / rate, 3)
    if as_json:
        plan = {"subscription": name, "total": total, "rate_per_s": rate, "estimated_s": seconds}
        print_json({**plan, "is_dry_run": True})
    else:
        typer.echo(f"{count(total, 'dead letter')} would be replayed, in about {span(seconds)}")


def _fields(letter: DeadLetter) -> dict[str, Any]:
    return {
        "message_id": letter.message_id,
        "topic": letter.topic,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "last_error": letter.last_error,
        "dead_at": instant(letter.dead_at_us),
        "is_loop": letter.is_loop,
        "message": to_fields(letter.message),
    }


def _job(job: ReplayJob) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(job)
    return fields


def _state(job: ReplayJob) -> str:
    failed = f", {job.failed:,} failed" if job.failed else ""
    return f"{job.status}, {job.replayed:,} of {count(job.total, 'dead letter')} given back{failed}"


reflow(app)
