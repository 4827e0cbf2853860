"""CALL: verbs of the Python interface over the wire (docs/protocol.md §4), and the reading of raw batches.

The table says what may be called; arguments are those of the method, checked by its signature and then by
the method itself. Values become MessagePack by one function. Nothing here knows a rule of the broker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from sparrow.broker.broker import Broker
from sparrow.broker.producer import Producer
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import Sender
from sparrow.model.message import Message, from_us
from sparrow.model.stage import Stage
from sparrow.store.batch import Body
from sparrow.wire.heads import Fetch, Fetched

BROKER_VERBS = frozenset(
    [
        "create_topic", "topic", "topics", "update_topic", "delete_topic",
        "set_topic_schema", "topic_schema", "delete_topic_schema",
        "subscribe", "subscription", "subscriptions",
        "producer", "next_sequence", "commit_staged", "abort_staged", "stages", "committed_batch",
        "snapshots", "delete_snapshot", "trace", "bounds", "offset_at", "seal", "apply_retention",
        "extents", "segments", "measure", "places", "plan_rewrite", "swap_segments",
        "health", "state", "recovery",
        "set_publisher_limits", "set_token_limits", "flow", "lag", "topic_lag",
        "create_token", "tokens", "revoke_token", "audit_log",
        "apply_pipeline", "pipelines", "pipeline", "start_pipeline", "stop_pipeline", "seek_pipeline",
        "delete_pipeline", "pipeline_log", "hold_pipeline", "begin_pipeline", "tell_pipelines",
        "release_pipeline",
    ]
)  # fmt: skip
SUBSCRIPTION_VERBS = frozenset(
    [
        "seek", "snapshot", "commit", "lag", "partition_lags", "lag_report", "consumer_lag", "sample_share",
        "in_flight", "members", "group", "rebalance", "committed", "update", "pause", "resume",
        "unsubscribe", "push_state", "push_secrets", "rotate_secret",
    ]
)  # fmt: skip
DEAD_LETTER_VERBS = frozenset(
    ["list", "get", "replay", "replays", "wait", "abort", "purge", "statistics"]
)  # fmt: skip

_MOMENTS = {
    "subscribe": "start",
    "subscription.seek": "target",
    "seek_pipeline": "target",
    "offset_at": "moment",
}
"""Arguments that may be points in time."""
_MESSAGE_FIELDS = (
    "topic", "topic_id", "partition", "offset", "data", "key", "attributes", "publish_time_us", "priority",
    "ttl_s", "idempotency_key", "producer_id", "sequence", "id",
)  # fmt: skip
FETCH_BYTES_MAX = 8 * 1024 * 1024
FETCH_WAIT_S_MAX = 60.0


async def perform(broker: Broker, verb: str, arguments: dict[str, Any]) -> Any:
    """Does what a verb says; ``to_wire`` makes the result fit for MessagePack."""
    target, name, rest = await _find(broker, verb, dict(arguments))
    moment = _MOMENTS.get(verb)
    if moment in rest:
        rest[moment] = _from_wire(rest[moment])
    found = getattr(target, name)
    if callable(found):
        _check_arguments(verb, found, rest)
        found = found(**rest)
    elif rest:
        raise InvalidArgument(f"{verb} takes no arguments beside the subscription")
    if inspect.isawaitable(found):
        found = await found
    return found


async def _find(broker: Broker, verb: str, arguments: dict[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """What a verb is called on, its name there, and its own arguments."""
    noun, dot, name = verb.rpartition(".")
    if not dot and name in BROKER_VERBS:
        return broker, name, arguments
    known = {"subscription": SUBSCRIPTION_VERBS, "dead_letters": DEAD_LETTER_VERBS}
    if name not in known.get(noun, ()):
        raise InvalidArgument(f"there is no verb {verb[:100]!r}", hint="See docs/protocol.md §4.")
    subscription = arguments.pop("subscription", None)
    if not isinstance(subscription, str):
        raise InvalidArgument(f"{verb} needs the name of the subscription as the argument `subscription`")
    handle = await broker.subscription(subscription)
    return (handle if noun == "subscription" else handle.dead_letters), name, arguments


def _check_arguments(verb: str, method: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        _signature(getattr(method, "__func__", method)).bind(method, **arguments)
    except TypeError as error:
        raise InvalidArgument(f"{verb}: {error}") from error


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _from_wire(value: Any) -> Any:
    """A point in time or a position: microseconds become a time, [topic, partition, offset] an entry."""
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return from_us(value)
        except OverflowError as error:
            raise InvalidArgument(f"{value} is not a time in microseconds since 1970") from error
    if isinstance(value, list):
        try:
            return {(topic, partition): offset for topic, partition, offset in value}
        except (TypeError, ValueError) as error:
            raise InvalidArgument("positions are arrays of [topic, partition, offset]") from error
    return value


def to_wire(value: Any) -> Any:
    """A value of the interface as texts, numbers, booleans, nil, arrays, maps and bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_unusual)


def _unusual(value: Any) -> Any:
    if isinstance(value, Message):
        fields = {name: getattr(value, name) for name in _MESSAGE_FIELDS}
        for name in ("event_time", "deliver_at"):
            fields[f"{name}_us"] = value._lot.value(name, value._row)
        return fields
    if isinstance(value, BrokerSubscription):
        return value.subscription
    if isinstance(value, Producer):
        return [value.id, value.epoch]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form on the wire")


# Raw batches.


class StageCall(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``stage``; the batch is the body of the frame."""

    transaction: str
    part: str
    topic: str
    record_count: int
    columns: int
    codec: int
    crc: int
    position: int | None = None
    partition: int = -1
    partitions: int = 0


async def stage(broker: Broker, arguments: dict[str, Any], body: memoryview, sender: Sender) -> Stage:
    """Adds a batch as the journal stores it to a part."""
    try:
        given = msgspec.convert(arguments, StageCall)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"stage: {error}") from error
    return await broker.stage_encoded(
        given.transaction,
        given.part,
        given.topic,
        Body(pa.py_buffer(body), given.crc, given.record_count, given.columns, given.codec),
        position=given.position,
        partition=given.partition,
        partitions=given.partitions,
        sender=sender,
    )


async def fetch(broker: Broker, head: Fetch) -> tuple[Fetched, list[pa.Buffer]]:
    """Batches of a partition from an offset on; at its end waits for more."""
    topic = await broker.topic(head.topic)
    if not 1 <= head.max_bytes <= 2**31 or not 0 <= head.wait_s <= FETCH_WAIT_S_MAX:
        raise InvalidArgument(
            f"max_bytes is at least 1 and wait_s from 0 to {FETCH_WAIT_S_MAX:g}, "
            f"not {head.max_bytes} and {head.wait_s:g}"
        )
    if head.wait_s:
        await broker.wait_for(head.topic, head.offset, partition=head.partition, timeout_s=head.wait_s)
    found = await broker.read_batches(
        head.topic,
        partition=head.partition,
        offset=head.offset,
        max_bytes=min(head.max_bytes, FETCH_BYTES_MAX),
    )
    batches: list[tuple[int, int, int]] = []
    streams: list[pa.Buffer] = []
    size = 0
    for batch in found:
        for stream, rows in _streams(batch, head.columns):
            if streams and size + stream.size > FETCH_BYTES_MAX:
                break
            offsets = rows.column("offset")
            batches.append((offsets[0].as_py(), offsets[len(offsets) - 1].as_py() + 1, stream.size))
            streams.append(stream)
            size += stream.size
        else:
            continue
        break
    bounds = await broker.bounds(head.topic, head.partition)
    return Fetched(topic.id, bounds.start_offset, bounds.end_offset, batches), streams


def _streams(batch: pa.RecordBatch, columns: list[str]) -> Any:
    """A batch as IPC streams, each small enough for a frame."""
    if columns:
        batch = batch.select([name for name in batch.schema.names if name in columns or name == "offset"])
    if batch.nbytes > FETCH_BYTES_MAX and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _streams(batch.slice(0, half), [])
        yield from _streams(batch.slice(half), [])
        return
    held = [n for n in batch.schema.names if batch.column(n).null_count < batch.num_rows or n == "data"]
    rows = batch.select(held)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    yield sink.getvalue(), rows
