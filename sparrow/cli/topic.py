"""``sparrow topic``: topics and the policies they are kept by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli import schema
from sparrow.cli.output import (
    Column,
    Shown,
    confirm,
    count,
    instant,
    number,
    print_done,
    print_fields,
    print_json,
    print_rows,
    reflow,
    size,
    span,
)
from sparrow.cli.target import Data, Json, Url, Wide, Yes, opened
from sparrow.cli.values import (
    merged,
    parse_limit_count,
    parse_limit_size,
    parse_limit_span,
    parse_set,
    parse_span,
)
from sparrow.model.errors import InvalidArgument, TopicExists
from sparrow.model.flow import Overflow
from sparrow.model.topic import Codec, Durability

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker
    from sparrow.model.topic import Topic

app = typer.Typer(no_args_is_help=True)
app.add_typer(
    schema.app,
    name="schema",
    help="Say what payloads are, for columns in Spark.",
    epilog="Example: sparrow topic schema set orders order.avsc --type avro",
)

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name, as in orders.us.")]
Partitions = Annotated[int | None, typer.Option(help="How many; they may grow, never shrink.")]
DurabilityOption = Annotated[
    Durability | None, typer.Option("--durability", help="When a publisher gets its receipt.")
]
CodecOption = Annotated[Codec | None, typer.Option("--codec", help="How stored batches are compressed.")]
Retention = Annotated[str | None, typer.Option(help="How long messages are kept: 7d, 12h, forever.")]
RetentionBytes = Annotated[str | None, typer.Option(help="How much is kept: 10GB, unlimited.")]
RetentionMessages = Annotated[str | None, typer.Option(help="How many are kept: 1000000, unlimited.")]
RetainUntilAcked = Annotated[
    bool | None, typer.Option("--retain-until-acked/--no-retain-until-acked", help="Keep what is not acked.")
]
DedupeWindow = Annotated[str | None, typer.Option(help="How long idempotency keys are remembered: 10m.")]
OverflowOption = Annotated[
    Overflow | None, typer.Option("--overflow", help="What happens when consumers are too far behind.")
]
BacklogHigh = Annotated[int | None, typer.Option(help="Messages not acked at which overflow acts.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any other option; JSON values, as flow.messages_per_s=500."
    ),
]


@app.command(epilog="Example: sparrow topic create orders.us --partitions 4 --retention 30d")
def create(
    name: Name,
    partitions: Partitions = None,
    durability: DurabilityOption = None,
    codec: CodecOption = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    retention_messages: RetentionMessages = None,
    retain_until_acked: RetainUntilAcked = None,
    dedupe_window: DedupeWindow = None,
    overflow: OverflowOption = None,
    backlog_high: BacklogHigh = None,
    set_: Set = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Leave a topic of this name as it is.")
    ] = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Create a topic."""
    policy = _policy(
        durability,
        codec,
        retention,
        retention_bytes,
        retention_messages,
        retain_until_acked,
        dedupe_window,
        overflow,
        backlog_high,
        set_,
    )
    with opened(url, data) as broker:
        is_new = True
        try:
            topic = broker.create_topic(name, partitions=partitions, **policy)
        except TopicExists:
            if not if_not_exists:
                raise
            topic, is_new = broker.topic(name), False
    _show_done("created" if is_new else "exists already:", topic, as_json)


@app.command("list", epilog='Example: sparrow topic list --pattern "orders.#" --json')
def list_(
    pattern: Annotated[str, typer.Option(help="Only topics that match, as in orders.*.")] = "",
    url: Url = None,
    data: Data = None,
    as_table: Wide = False,
    as_json: Json = False,
) -> None:
    """List the topics with what they hold."""
    from sparrow.kernel.pattern import parse_pattern

    chosen = parse_pattern(pattern) if pattern else None
    with opened(url, data) as broker:
        topics = [topic for topic in broker.topics() if chosen is None or chosen.matches(topic.name)]
        held = [_messages(broker, topic) for topic in topics]
    if as_json:
        print_json([{**_fields(topic), "messages": n} for topic, n in zip(topics, held, strict=True)])
        return
    columns = (
        Column("name", is_folded=True),
        number("partitions"),
        number("messages"),
        Column("durability"),
        Column("codec"),
        Column("retention_s", span, is_number=True),
        Column("created"),
    )
    rows = [
        (
            topic.name,
            topic.partitions,
            n,
            topic.policy.durability.value,
            topic.policy.codec.value,
            topic.policy.retention_s,
            (instant(topic.created_at_us) or "")[:19] + "Z",
        )
        for topic, n in zip(topics, held, strict=True)
    ]
    print_rows(columns, rows, as_table=as_table, nothing="no topics; `sparrow topic create` makes one")


@app.command(epilog="Example: sparrow topic show orders.us")
def show(
    name: Name, url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False
) -> None:
    """Show a topic: its options, its partitions and the flow control of its publishers."""
    with opened(url, data) as broker:
        topic = broker.topic(name)
        bounds = [broker.bounds(name, partition) for partition in range(topic.partitions)]
        flow = broker.flow(name)
        readers = sorted(broker.topic_lag(name).subscriptions)
    parts = [
        {"partition": number, "start_offset": each.start_offset, "end_offset": each.end_offset}
        for number, each in enumerate(bounds)
    ]
    if as_json:
        print_json({**_fields(topic), "offsets": parts, "subscriptions": readers, "flow": flow})
        return
    policy = _fields(topic)["policy"]
    limits = {name: value for name, value in policy.pop("flow").items() if value is not None}
    print_fields(
        {
            "name": topic.name,
            "id": topic.id,
            "created": instant(topic.created_at_us),
            **{name: _readable(name, value) for name, value in policy.items()},
            "flow": ", ".join(f"{name}={value}" for name, value in limits.items()),
            "flow now": f"{flow.level}: {flow.passed:,} passed, {flow.rejected:,} rejected, "
            f"{flow.dropped:,} dropped",
            "subscriptions": ", ".join(readers),
        }
    )
    typer.echo()
    columns = (number("partition"), number("start_offset"), number("end_offset"), number("messages"))
    rows = [
        (place, each.start_offset, each.end_offset, each.end_offset - each.start_offset)
        for place, each in enumerate(bounds)
    ]
    print_rows(columns, rows, as_table=as_table)


@app.command(
    epilog="Example: sparrow topic update orders.us --retention forever --set flow.messages_per_s=500"
)
def update(
    name: Name,
    partitions: Partitions = None,
    durability: DurabilityOption = None,
    codec: CodecOption = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    retention_messages: RetentionMessages = None,
    retain_until_acked: RetainUntilAcked = None,
    dedupe_window: DedupeWindow = None,
    overflow: OverflowOption = None,
    backlog_high: BacklogHigh = None,
    set_: Set = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Change options of a topic; those not named stay."""
    policy = _policy(
        durability,
        codec,
        retention,
        retention_bytes,
        retention_messages,
        retain_until_acked,
        dedupe_window,
        overflow,
        backlog_high,
        set_,
    )
    if not policy and partitions is None:
        raise InvalidArgument("nothing to change", hint="Name an option, as in --retention 30d.")
    with opened(url, data) as broker:
        topic = broker.update_topic(name, partitions=partitions, **policy)
    _show_done("updated", topic, as_json)


@app.command(epilog="Example: sparrow topic delete orders.us --yes")
def delete(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Also when subscriptions name it.")] = False,
    yes: Yes = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Delete a topic and its messages."""
    with opened(url, data) as broker:
        held = _messages(broker, broker.topic(name))
        confirm(f"Delete {name} and its {count(held, 'message')}?", is_sure=yes, as_json=as_json)
        broker.delete_topic(name, force=force)
    if as_json:
        print_json({"deleted": name, "messages": held})
    else:
        print_done(f"deleted {name} and its {count(held, 'message')}")


def _policy(
    durability: Durability | None,
    codec: Codec | None,
    retention: str | None,
    retention_bytes: str | None,
    retention_messages: str | None,
    retain_until_acked: bool | None,
    dedupe_window: str | None,
    overflow: Overflow | None,
    backlog_high: int | None,
    set_: list[str] | None,
) -> dict[str, Any]:
    """The options that were given, as the broker takes them; "forever" is a None that must arrive."""
    flow = {"overflow": overflow and overflow.value, "backlog_high": backlog_high}
    named = {
        "durability": durability and durability.value,
        "codec": codec and codec.value,
        "retain_until_acked": retain_until_acked,
        "dedupe_window_s": None if dedupe_window is None else parse_span(dedupe_window),
        "flow": {name: value for name, value in flow.items() if value is not None},
    }
    found = merged(named, parse_set(set_))
    for name, text, parse in (
        ("retention_s", retention, parse_limit_span),
        ("retention_bytes", retention_bytes, parse_limit_size),
        ("retention_messages", retention_messages, parse_limit_count),
    ):
        if text is not None:
            found[name] = parse(text)
    return found


def _messages(broker: BlockingBroker, topic: Topic) -> int:
    """How many messages a topic keeps."""
    bounds = (broker.bounds(topic.name, partition) for partition in range(topic.partitions))
    return sum(each.end_offset - each.start_offset for each in bounds)


def _fields(topic: Topic) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(topic)
    return found


def _readable(name: str, value: Any) -> Any:
    if value is None:
        return Shown(value, "unlimited")
    if name.endswith("_bytes"):
        return Shown(value, size(value))
    return Shown(value, span(value)) if name.endswith("_s") else value


def _show_done(what: str, topic: Topic, as_json: bool) -> None:
    if as_json:
        print_json(_fields(topic))
        return
    fields: Mapping[str, Any] = _fields(topic)["policy"]
    kept = "forever" if fields["retention_s"] is None else span(fields["retention_s"])
    print_done(
        f"{what} {topic.name}: {count(topic.partitions, 'partition')}, {fields['durability']}, kept {kept}"
    )


reflow(app)
