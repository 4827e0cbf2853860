"""Looks at a simulated broker as a whole, when it has just started and when everything has been drained.

* every known message is where its receipt says, once; offsets are dense; nothing is there that nobody sent
* cursors hold every confirmed ack, and none of what was never acked
* every dead letter has its source, and the source is done
* a group's generation and commits are those that its members have seen; one that is empty keeps nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from sparrow.broker.broker import Broker
from sparrow.broker.deadletters import HIDDEN
from sparrow.broker.groups import GroupRunner
from sparrow.model.message import StreamId, parse_message_id
from sparrow.testing.simgroup import GroupModel
from sparrow.testing.simmodel import Broken, Item, Place, SubscriptionModel, World
from sparrow.testing.simplan import DEAD

_SOON_US = 86_400_000_000
"""Only forgetting commits is further away."""


class Letter(NamedTuple):
    """A dead letter as its topic holds it."""

    subscription: str
    source: Place
    stream: StreamId
    offset: int
    data: bytes


async def audit(broker: Broker, world: World, *, is_power_lost: bool) -> list[Letter]:
    """Everything that can be seen without taking part; returns the dead letters."""
    if broker.recovery.damages:
        raise Broken(f"recovery found damage: {broker.recovery.damages[0]}")
    letters: list[Letter] = []
    for topic in await broker.topics():
        for partition in range(topic.partitions):
            stream = StreamId(topic.id, partition)
            rows = await _read(broker, topic.name, stream)
            if topic.name.endswith(DEAD):
                letters += [_letter(stream, row) for row in rows]
            else:
                _check_log(world, topic.name, stream, rows, is_power_lost)
    for model in world.subscriptions.values():
        if model.is_changing:
            model.in_doubt(ends(broker, model))
            model.is_changing = False
        _check_cursor(broker, model)
        if isinstance(model, GroupModel):
            _check_ledger(broker, model)
    _check_letters(broker, world, letters)
    return letters


def ends(broker: Broker, model: SubscriptionModel) -> dict[StreamId, int]:
    """Where the streams of a subscription end."""
    return {stream: broker._store.bounds(stream).end_offset for stream in delivery(broker, model).streams}


def delivery(broker: Broker, model: SubscriptionModel) -> Any:
    """The kernel of a subscription, to look into."""
    return broker._subscriptions.get(model.name).delivery


def is_synced(broker: Broker, place: Place) -> bool:
    """Whether a message is where power loss does not reach it."""
    store: Any = broker._store
    hot = store._hot.get(place.stream)
    current = store._journal._current
    found = next(iter(hot.places_from(place.offset)), None) if place.offset >= hot.sealed_end else None
    if found is None or current is None or found.file_number != current.number:
        return True
    return bool(current.header(found.position).end_position <= current.durable)


# The log.


async def _read(broker: Broker, topic: str, stream: StreamId) -> list[dict[str, Any]]:
    start, end = await broker.bounds(topic, stream.partition)
    rows: list[dict[str, Any]] = []
    offset = start
    while offset < end:
        for batch in await broker.read_batches(topic, partition=stream.partition, offset=offset):
            columns = batch.select(["offset", "data", "attributes", "original_id"]).to_pydict()
            columns["publish_time"] = batch.column("publish_time").cast("int64").to_pylist()
            rows += [
                dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
            ]
        offset = max(offset + 1, rows[-1]["offset"] + 1)
    rows = [row for row in rows if row["offset"] < end]
    if [row["offset"] for row in rows] != list(range(start, end)):
        raise Broken(f"{topic}/{stream.partition} is not dense from {start} to {end}")
    return rows


def _check_log(
    world: World, topic: str, stream: StreamId, rows: Iterable[dict[str, Any]], is_power_lost: bool
) -> None:
    facts = world.topics.get(topic)
    found: dict[int, bytes] = {row["offset"]: row["data"] for row in rows if row["original_id"] is None}
    start = world.start_of(stream)
    if start and facts is not None and not facts.is_shortened:
        raise Broken(f"{topic}/{stream.partition} starts at {start}")
    for place, known in list(world.by_place.items()):
        if place.stream != stream or place.offset < start or found.get(place.offset) == known.data:
            continue
        if facts is not None and not facts.is_durable and is_power_lost:
            world.forget(known)
        else:
            raise Broken(f"{known} is lost: {found.get(place.offset)!r} is in its place")
    for row in rows:
        if row["original_id"] is None:
            record = world.by_data.get(row["data"])
            if record is None or record.topic != topic:
                raise Broken(f"{topic}/{stream.partition} holds {row['data']!r}, which nobody sent")
            world.learn(record, Place(stream, row["offset"]), row["publish_time"], by="the audit")


# Subscriptions.


def _check_cursor(broker: Broker, model: SubscriptionModel) -> None:
    found = delivery(broker, model)
    for stream in model.starts:
        if stream not in found.streams:
            raise Broken(f"{model.name} no longer reads {stream}")
    for item in list(model.responsible()):
        is_acked = found.cursor(item.place.stream).is_acked(item.place.offset)
        if item.is_done and not is_acked:
            raise Broken(f"{model.name}: the confirmed ack of {item} is lost")
        if is_acked and model.is_open(item) and not _is_passed(model, item):
            raise Broken(f"{model.name}: {item} is lost: nobody acked it, and yet it counts as acked")


def _is_passed(model: SubscriptionModel, item: Item) -> bool:
    """A message that was stored again is for one subscription; the others pass over it."""
    return str(item.place) != str(item.record.place)


# Groups.


def commits(broker: Broker, model: GroupModel) -> dict[StreamId, tuple[int, str]]:
    """What the broker says was committed."""
    found = delivery(broker, model).group.commits()
    return {StreamId(each.topic_id, each.partition): (each.offset, each.metadata) for each in found}


def _check_ledger(broker: Broker, model: GroupModel) -> None:
    """The generation and the commits, when nothing is under way."""
    found = delivery(broker, model)
    if found.group.generation < model.generation:
        raise Broken(
            f"{model.name} is in generation {found.group.generation}, and was in {model.generation} before"
        )
    model.check_notes(commits(broker, model), is_final=True)
    model.check_floors(found)


def check_owners(broker: Broker, model: GroupModel) -> None:
    """Whoever holds messages is a member. In a partitioned group a partition has one owner, nobody may lease
    what drains, and whoever holds something of a partition owns it or has it drained."""
    courier = broker._subscriptions.get(model.name)
    if not isinstance(courier.group, GroupRunner):
        return
    group = courier.group._group
    owners: dict[StreamId, str] = {}
    names = [member.member_id for member in group.members]
    for name in names if model.is_partitioned else ():
        for stream in group.assignment(name):
            if stream in owners:
                raise Broken(f"{model.name}: {stream} has two owners, {owners[stream]} and {name}")
            owners[stream] = name
        for stream in group.owned(name):
            if owners.get(stream) != name or stream in group.drains:
                raise Broken(f"{model.name}: {name} may lease {stream} too early")
    pool = courier.delivery._pool
    for lease in pool.leases.by_number.values() if pool is not None else ():
        if lease.consumer not in names:
            raise Broken(f"{model.name}: {lease.consumer} is gone, and yet holds messages of {lease.stream}")
        owner = group.drains.get(lease.stream, owners.get(lease.stream))
        if model.is_partitioned and lease.consumer != owner:
            raise Broken(
                f"{model.name}: {lease.consumer} holds messages of {lease.stream}, and {owner} owns it"
            )


def check_left(broker: Broker, model: GroupModel) -> None:
    """Nobody is left in the group, and nothing of anybody."""
    runner = broker._subscriptions.get(model.name).group
    assert isinstance(runner, GroupRunner)
    owns = runner._group._ownership
    found = delivery(broker, model)
    left: dict[str, Any] = {
        "members": runner._group._members,
        "attendants": runner._attendants,
        "seats": runner._sharing._seats,
        "paces": runner._pace._members,
        "owners": owns._assigned or owns._since,
        "drains": owns._drains,
        "acceptances": owns._gained,
        "answers": owns._leasable,
        "leases": found._pool.leases.by_number if found._pool is not None else {},
        "queues": [name for name in _queues(found) if isinstance(name, str)],
        "breakers": found._judge._breakers if found._judge is not None else {},
        "timers": runner._group.next_wakeup_us() <= runner._clock.now_us() + _SOON_US,
    }
    for what, kept in left.items():
        if kept:
            raise Broken(f"{model.name} is empty, and yet keeps {what}: {kept}")


def _queues(found: Any) -> Any:
    return found._pool.lanes._queues if found._pool is not None and found._pool.lanes is not None else ()


# Dead letters.


def _letter(stream: StreamId, row: dict[str, Any]) -> Letter:
    attributes = dict(row["attributes"] or ())
    source = parse_message_id(attributes["dlq_message_id"])
    return Letter(
        attributes["dlq_subscription"],
        Place(source.stream, source.offset),
        stream,
        row["offset"],
        row["data"],
    )


def _check_letters(broker: Broker, world: World, letters: list[Letter]) -> None:
    counts = Counter((letter.subscription, letter.source) for letter in letters)
    for letter in letters:
        record = world.by_place.get(letter.source)
        if record is None or record.data != letter.data:
            raise Broken(f"the dead letter {letter} has no source: {record}")
        model = world.subscriptions.get(letter.subscription)
        if model is None or model.resets:
            continue
        if not _passes(model, letter):
            raise Broken(f"{letter} is a dead letter of a message that was not for its subscription")
        if counts[letter.subscription, letter.source] > 1:
            raise Broken(f"{letter} is there twice")
        cursor = delivery(broker, model).cursor(letter.source.stream)
        if not cursor.is_acked(letter.source.offset):
            raise Broken(f"{letter} is a dead letter, and its source is not done")
        if is_open(broker, letter):
            model.item(record, letter.source).is_excused = True


def _passes(model: SubscriptionModel, letter: Letter) -> bool:
    return letter.source.offset >= model.starts.get(letter.source.stream, 1 << 62)


def is_open(broker: Broker, letter: Letter) -> bool:
    """Whether a letter was neither replayed nor purged."""
    hidden = broker._subscriptions.peek(letter.subscription + HIDDEN)
    if hidden is None or letter.stream not in hidden.delivery.streams:
        return False
    return not hidden.delivery.cursor(letter.stream).is_acked(letter.offset)


# The end.


def check_drained(broker: Broker, model: SubscriptionModel, letters: list[Letter]) -> None:
    """After everything could be delivered and was acked: every message is accounted for."""
    dead = {letter.source for letter in letters if letter.subscription == model.name}
    found = delivery(broker, model)
    for item in list(model.responsible()):
        is_there = item.place.offset >= broker._store.bounds(item.place.stream).start_offset
        if not found.cursor(item.place.stream).is_acked(item.place.offset) and is_there:
            raise Broken(f"{model.name}: {item} is still not done after the drain")
        if item.is_acked or item.is_excused or item.place in dead or model.may_have_expired(item):
            continue
        if model.is_open(item) or (is_there and not model.is_at_most_once):
            raise Broken(f"{model.name}: {item} was neither acked nor dead-lettered nor dropped")
