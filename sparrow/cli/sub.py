"""``sparrow sub``: subscriptions, their policies and their lag."""

from __future__ import annotations

from collections.abc import Mapping
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
    print_rows,
    reflow,
    span,
)
from sparrow.cli.target import Data, Json, Url, Wide, Yes, opened
from sparrow.cli.values import merged, parse_set, parse_span, parse_start
from sparrow.model.errors import InvalidArgument, PreconditionFailed, SubscriptionNotFound
from sparrow.model.group import GroupMode
from sparrow.model.subscription import Expired, Guarantee, Ordering

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker
    from sparrow.client.subscription import BlockingSubscription
    from sparrow.kernel.lag import LagReport
    from sparrow.model.subscription import Subscription

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="SUB", help="The subscription's name.")]
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="A topic or a pattern: orders.us, orders.#")]
Filter = Annotated[str | None, typer.Option(help='Only messages for which it holds: attributes.env = "prod"')]
OrderingOption = Annotated[
    Ordering | None, typer.Option("--ordering", help="Which messages wait for each other.")
]
GuaranteeOption = Annotated[
    Guarantee | None, typer.Option("--guarantee", help="What consumers may count on.")
]
AckDeadline = Annotated[
    str | None, typer.Option(metavar="SPAN", help="Time for the work on a message: 10s, 2m.")
]
DeadLetter = Annotated[
    str | None, typer.Option("--dead-letter", metavar="TOPIC", help="Where messages go that keep failing.")
]
MaxAttempts = Annotated[int | None, typer.Option(metavar="N", help="Hand-overs before dead-lettering.")]
MinBackoff = Annotated[str | None, typer.Option(metavar="SPAN", help="The first wait before a retry.")]
MaxBackoff = Annotated[str | None, typer.Option(metavar="SPAN", help="The longest wait before a retry.")]
ExpiredOption = Annotated[Expired | None, typer.Option("--expired", help="What becomes of expired messages.")]
KeyWindow = Annotated[int | None, typer.Option(metavar="N", help="Messages of one key in work at once.")]
MaxInFlight = Annotated[
    int | None, typer.Option(metavar="N", help="Messages in work at once, over all consumers.")
]
GroupOption = Annotated[GroupMode | None, typer.Option("--group", help="How its members share it.")]
PushUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Send its messages there as signed webhooks; none are pulled."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other option; JSON values, as retry.jitter=0.2."),
]


@app.command(
    epilog="Example: sparrow sub create billing 'orders.#' --dead-letter dead.orders --max-attempts 5"
)
def create(
    name: Name,
    pattern: Pattern,
    start: Annotated[
        str, typer.Option(metavar="WHERE", help="Where it begins: earliest, latest or a time.")
    ] = "latest",
    filter: Filter = None,
    ordering: OrderingOption = None,
    guarantee: GuaranteeOption = None,
    ack_deadline: AckDeadline = None,
    dead_letter: DeadLetter = None,
    max_attempts: MaxAttempts = None,
    min_backoff: MinBackoff = None,
    max_backoff: MaxBackoff = None,
    expired: ExpiredOption = None,
    key_window: KeyWindow = None,
    max_in_flight: MaxInFlight = None,
    group: GroupOption = None,
    push_url: PushUrl = None,
    set_: Set = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Create a subscription; one that exists with the same settings is left as it is."""
    policy = _policy(
        filter,
        ordering,
        guarantee,
        ack_deadline,
        dead_letter,
        max_attempts,
        min_backoff,
        max_backoff,
        expired,
        key_window,
        max_in_flight,
        group,
        push_url,
        set_,
    )
    with opened(url, data) as broker:
        handle = broker.subscribe(name, pattern, start=parse_start(start), **policy)
        found = _find(broker, name)
        secret = _new_secret(handle) if found.policy.push is not None else None
    _show_done("created", found, as_json, secret)


@app.command("list", epilog="Example: sparrow sub list")
def list_(url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False) -> None:
    """List the subscriptions with their lag."""
    with opened(url, data) as broker:
        found = broker.subscriptions()
        lags = broker.lag()
    if as_json:
        print_json([{**_fields(each), "lag": _depth(lags, each.name)} for each in found])
        return
    columns = (
        Column("name", is_folded=True),
        Column("pattern", is_folded=True),
        Column("state"),
        number("lag"),
        Column("ordering"),
        Column("guarantee"),
        Column("dead_letter"),
        Column("filter", is_folded=True),
    )
    rows = [
        (
            each.name,
            each.pattern,
            "paused" if each.is_paused else "active",
            _depth(lags, each.name),
            each.policy.ordering.value,
            each.policy.guarantee.value,
            each.policy.dead_letter_topic,
            each.policy.filter,
        )
        for each in found
    ]
    print_rows(columns, rows, as_table=as_table, nothing="no subscriptions; `sparrow sub create` makes one")


@app.command(epilog="Example: sparrow sub show billing")
def show(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Show a subscription: its options, its lag and what is in flight."""
    with opened(url, data) as broker:
        found = _find(broker, name)
        handle = broker.subscription(name)
        lag, in_flight = handle.lag_report(), handle.in_flight
        push = handle.push_state() if found.policy.push is not None else None
    if as_json:
        pushing = {} if push is None else {"push_state": push}
        print_json({**_fields(found), "lag": lag, "in_flight": in_flight, **pushing})
        return
    policy = _fields(found)["policy"]
    print_fields(
        {
            "name": found.name,
            "id": found.id,
            "pattern": found.pattern,
            "state": "paused" if found.is_paused else "active",
            "created": instant(found.created_at_us),
            "behind": f"{lag.depth:,} ({lag.level.value}), oldest {span(lag.oldest_age_s)}",
            "in flight": in_flight,
            **({} if push is None else {"webhooks": " ".join(filter(None, (push.state.value, push.why)))}),
            **dict(_flat(policy)),
        }
    )


@app.command(epilog="Example: sparrow sub update billing --ack-deadline 60s --set retry.jitter=0.2")
def update(
    name: Name,
    filter: Filter = None,
    ordering: OrderingOption = None,
    guarantee: GuaranteeOption = None,
    ack_deadline: AckDeadline = None,
    dead_letter: DeadLetter = None,
    max_attempts: MaxAttempts = None,
    min_backoff: MinBackoff = None,
    max_backoff: MaxBackoff = None,
    expired: ExpiredOption = None,
    key_window: KeyWindow = None,
    max_in_flight: MaxInFlight = None,
    group: GroupOption = None,
    push_url: PushUrl = None,
    set_: Set = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Change options of a subscription; those not named stay. What is in flight is delivered again."""
    policy = _policy(
        filter,
        ordering,
        guarantee,
        ack_deadline,
        dead_letter,
        max_attempts,
        min_backoff,
        max_backoff,
        expired,
        key_window,
        max_in_flight,
        group,
        push_url,
        set_,
    )
    if not policy:
        raise InvalidArgument("nothing to change", hint="Name an option, as in --ack-deadline 60s.")
    with opened(url, data) as broker:
        broker.subscription(name).update(**policy)
        found = _find(broker, name)
    _show_done("updated", found, as_json)


@app.command(epilog="Example: sparrow sub delete billing --yes")
def delete(name: Name, yes: Yes = False, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Delete a subscription and its position; the messages stay in their topics."""
    with opened(url, data) as broker:
        handle = broker.subscription(name)
        waiting = handle.lag()
        question = f"Delete {name} with {count(waiting, 'message')} not done?"
        confirm(question, is_sure=yes, as_json=as_json)
        handle.unsubscribe()
    if as_json:
        print_json({"deleted": name, "lag": waiting})
    else:
        print_done(f"deleted {name}; {count(waiting, 'message')} had not been done")


@app.command(epilog="Example: sparrow sub pause billing")
def pause(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Stop handing out messages until resume."""
    with opened(url, data) as broker:
        broker.subscription(name).pause()
        found = _find(broker, name)
    _show_done("paused", found, as_json)


@app.command(epilog="Example: sparrow sub resume billing")
def resume(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Hand out messages again."""
    with opened(url, data) as broker:
        broker.subscription(name).resume()
        found = _find(broker, name)
    _show_done("resumed", found, as_json)


@app.command("rotate-secret", epilog="Example: sparrow sub rotate-secret billing --overlap 1d")
def rotate_secret(
    name: Name,
    overlap: Annotated[
        str, typer.Option(metavar="SPAN", help="How long the secret before it stays in force.")
    ] = "1d",
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Make a new secret that webhooks are signed with, and print it this once."""
    with opened(url, data) as broker:
        secret = broker.subscription(name).rotate_secret(overlap_s=parse_span(overlap))
    if as_json:
        print_json({"name": name, "secret": secret})
    else:
        typer.echo(secret)


@app.command(epilog="Example: sparrow sub lag billing --json")
def lag(
    name: Annotated[str | None, typer.Argument(metavar="[SUB]", help="Only this one.")] = None,
    url: Url = None,
    data: Data = None,
    as_table: Wide = False,
    as_json: Json = False,
) -> None:
    """Tell how far subscriptions are behind, and when they will have caught up."""
    with opened(url, data) as broker:
        reports = broker.lag() if name is None else {name: broker.subscription(name).lag_report()}
    if as_json:
        print_json(reports)
        return
    columns = (
        Column("name", is_folded=True),
        Column("level"),
        number("depth"),
        Column("oldest_s", span, is_number=True),
        Column("end_to_end_s", span, is_number=True),
        number("published_per_s"),
        number("acked_per_s"),
        Column("catch_up_s", span, is_number=True),
    )
    rows = [
        (
            each,
            report.level.value,
            report.depth,
            round(report.oldest_age_s, 3),
            report.end_to_end_s,
            round(report.published_per_s, 3),
            round(report.acked_per_s, 3),
            report.catch_up_s,
        )
        for each, report in sorted(reports.items())
    ]
    print_rows(columns, rows, as_table=as_table, nothing="no subscriptions")


def _policy(
    filter: str | None,
    ordering: Ordering | None,
    guarantee: Guarantee | None,
    ack_deadline: str | None,
    dead_letter: str | None,
    max_attempts: int | None,
    min_backoff: str | None,
    max_backoff: str | None,
    expired: Expired | None,
    key_window: int | None,
    max_in_flight: int | None,
    group: GroupMode | None,
    push_url: str | None,
    set_: list[str] | None,
) -> dict[str, Any]:
    """The options that were given, as the broker takes them."""
    retry = {
        "max_attempts": max_attempts,
        "min_backoff_s": None if min_backoff is None else parse_span(min_backoff),
        "max_backoff_s": None if max_backoff is None else parse_span(max_backoff),
    }
    named = {
        "filter": filter,
        "ordering": ordering and ordering.value,
        "guarantee": guarantee and guarantee.value,
        "ack_deadline_s": None if ack_deadline is None else parse_span(ack_deadline),
        "dead_letter_topic": dead_letter,
        "expired": expired and expired.value,
        "key_window": key_window,
        "max_in_flight": max_in_flight,
        "retry": {name: value for name, value in retry.items() if value is not None},
        "group": {"mode": group.value} if group is not None else {},
        "push": {"url": push_url} if push_url is not None else {},
    }
    return merged(named, parse_set(set_))


def _find(broker: BlockingBroker, name: str) -> Subscription:
    for each in broker.subscriptions():
        if each.name == name:
            return each
    raise SubscriptionNotFound(f"there is no subscription {name!r}")


def _fields(found: Subscription) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(found)
    return fields


def _flat(options: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Options by their path, as ``--set`` takes them."""
    found: list[tuple[str, Any]] = []
    for name, value in options.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def _depth(lags: Mapping[str, LagReport], name: str) -> int | None:
    return lags[name].depth if name in lags else None


def _new_secret(handle: BlockingSubscription) -> str | None:
    """What the receiver of a subscription that was just made verifies with; none of one that existed."""
    try:
        return handle.push_secrets()[0]
    except PreconditionFailed:
        return None


def _show_done(what: str, found: Subscription, as_json: bool, secret: str | None = None) -> None:
    if as_json:
        print_json(_fields(found) | ({} if secret is None else {"secret": secret}))
        return
    policy = found.policy
    dead = f", dead letters to {policy.dead_letter_topic}" if policy.dead_letter_topic else ""
    where = f", pushed to {policy.push.url}" if policy.push is not None else ""
    print_done(f"{what} {found.name}: {found.pattern}, {policy.guarantee.value}{dead}{where}")
    if secret is not None:
        print_done("its webhooks are signed with this secret, which is not shown again:")
        typer.echo(secret)


reflow(app)
