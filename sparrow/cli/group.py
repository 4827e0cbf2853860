"""``sparrow group``: the members who share a subscription, what each has, and what they committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import (
    Column,
    instant,
    number,
    print_done,
    print_fields,
    print_json,
    print_rows,
    reflow,
    span,
)
from sparrow.cli.target import Data, Json, Url, Wide, opened

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparrow.model.group import Assigned, MemberInfo

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="SUB", help="The subscription that the group shares.")]


@app.command("list", epilog="Example: sparrow group list --json")
def list_(
    everything: Annotated[
        bool, typer.Option("--all", help="Also subscriptions that nobody has joined.")
    ] = False,
    url: Url = None,
    data: Data = None,
    as_table: Wide = False,
    as_json: Json = False,
) -> None:
    """List the groups: subscriptions that have members or are shared by partitions."""
    found = []
    with opened(url, data) as broker:
        lags = broker.lag()
        for each in broker.subscriptions():
            info = broker.subscription(each.name).group()
            if everything or info.members or info.mode == "partitioned":
                found.append((each.name, info, lags[each.name].depth if each.name in lags else None))
    if as_json:
        import msgspec

        print_json([{"subscription": n, **msgspec.to_builtins(info), "lag": lag} for n, info, lag in found])
        return
    columns = (
        Column("subscription", is_folded=True),
        Column("mode"),
        Column("state"),
        number("members"),
        number("generation"),
        number("rebalances"),
        number("lag"),
    )
    rows = [(n, i.mode, i.state, i.members, i.generation, i.rebalances, lag) for n, i, lag in found]
    print_rows(columns, rows, as_table=as_table, nothing="no groups; --all shows every subscription")


@app.command(epilog="Example: sparrow group show billing")
def show(
    name: Name, url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False
) -> None:
    """Show a group: its members, what each has, its lag and the committed offsets."""
    with opened(url, data) as broker:
        handle = broker.subscription(name)
        info, members, committed = handle.group(), handle.members(), handle.committed()
        lag = handle.lag_report()
    if as_json:
        print_json(
            {"subscription": name, "group": info, "members": members, "committed": committed, "lag": lag}
        )
        return
    print_fields(
        {
            "subscription": name,
            "state": info.state,
            "mode": f"{info.mode}, {info.strategy}",
            "generation": info.generation,
            "rebalances": f"{info.rebalances}, the last took {span(info.last_rebalance_s)}",
            "lag": f"{lag.depth:,} ({lag.level.value})",
            "draining": _places(info.draining),
            "unassigned": _places(info.unassigned),
        }
    )
    typer.echo()
    columns = (
        Column("member", is_folded=True),
        number("generation"),
        Column("assignment", is_folded=True),
        number("in_flight"),
        Column("pace"),
        number("acks_per_s"),
        Column("silent_s", span, is_number=True),
        Column("status"),
    )
    print_rows(columns, [_row(member) for member in members], as_table=as_table, nothing="no members")
    if committed:
        typer.echo()
        offsets = (
            Column("topic", is_folded=True),
            number("partition"),
            number("committed"),
            Column("member"),
            Column("at"),
            Column("metadata", is_folded=True),
        )
        rows = [(c.topic, c.partition, c.offset, c.member, instant(c.at_us), c.metadata) for c in committed]
        print_rows(offsets, rows, as_table=as_table)


@app.command(epilog="Example: sparrow group rebalance billing")
def rebalance(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Start a new generation: partitions are shared out again."""
    with opened(url, data) as broker:
        handle = broker.subscription(name)
        handle.rebalance()
        info = handle.group()
    if as_json:
        print_json({"subscription": name, "group": info})
    else:
        print_done(f"a new generation of {name} begins; it has {info.members} members")


@app.command(epilog="Example: sparrow group commit billing orders.us 0 1200")
def commit(
    name: Name,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    partition: Annotated[int, typer.Argument(metavar="PARTITION", min=0, help="Its partition.")],
    offset: Annotated[int, typer.Argument(metavar="OFFSET", min=0, help="The first that is not done.")],
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Commit an offset: everything of the partition below it counts as done."""
    with opened(url, data) as broker:
        handle = broker.subscription(name)
        handle.commit(topic, partition, offset)
        lag = handle.lag()
    if as_json:
        print_json(
            {"subscription": name, "topic": topic, "partition": partition, "offset": offset, "lag": lag}
        )
    else:
        print_done(f"committed {topic}/{partition} at {offset:,}; lag is {lag:,}")


def _row(member: MemberInfo) -> tuple[Any, ...]:
    return (
        member.name,
        member.generation,
        _places(member.assignment),
        member.in_flight,
        member.pace,
        member.acks_per_s,
        round(member.silent_s, 3),
        member.status,
    )


def _places(assigned: Iterable[Assigned]) -> str:
    return " ".join(f"{each.topic}/{each.partition}" for each in assigned)


reflow(app)
