"""Verbs of CALL as a client makes them: arguments become plain values, results the types of the interface."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from sparrow.client.session import Session
from sparrow.model.deadletter import DeadLetter
from sparrow.model.errors import InvalidArgument, ProtocolError
from sparrow.model.message import Message, to_us

T = TypeVar("T")

REPEATABLE = frozenset(
    [
        "topic", "topics", "update_topic", "topic_schema", "set_topic_schema",
        "subscribe", "subscription", "subscriptions", "next_sequence",
        "snapshots", "trace", "bounds", "offset_at", "apply_retention", "health", "state", "recovery",
        "set_publisher_limits", "set_token_limits", "flow", "lag", "topic_lag", "tokens", "audit_log",
        "extents", "segments", "measure", "places", "plan_rewrite",
        "apply_pipeline", "pipelines", "pipeline", "start_pipeline", "stop_pipeline", "pipeline_log",
        "hold_pipeline", "tell_pipelines", "release_pipeline", "begin_pipeline",
        "commit_staged", "abort_staged", "stages", "committed_batch",
        "subscription.seek", "subscription.commit", "subscription.lag", "subscription.lag_report",
        "subscription.consumer_lag", "subscription.partition_lags",
        "subscription.sample_share", "subscription.in_flight",
        "subscription.members", "subscription.group", "subscription.committed", "subscription.update",
        "subscription.pause", "subscription.resume", "subscription.push_state",
        "dead_letters.list", "dead_letters.get", "dead_letters.replays", "dead_letters.wait",
        "dead_letters.statistics",
    ]
)  # fmt: skip
"""Doing these twice is doing them once, so they are sent again when the answer was lost."""
_PATIENT = frozenset({"dead_letters.wait", "seal", "commit_staged", "swap_segments"})
_FOR_EVER_S = 10 * 366 * 86_400.0


async def call(session: Session, verb: str, result: type[T] | Any = None, /, **arguments: Any) -> Any:
    """Calls a verb; its result as the type that the interface promises."""
    plain = {name: to_plain(name, value) for name, value in arguments.items()}
    timeout_s = _FOR_EVER_S if verb in _PATIENT else None
    found = await session.call(verb, is_safe=verb in REPEATABLE, timeout_s=timeout_s, **plain)
    return None if result is None else parse(verb, found, result)


def parse(verb: str, found: Any, result: Any) -> Any:
    """A plain value as the type that it is of."""
    if result is Any:
        return found
    try:
        return msgspec.convert(found, result, strict=False)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the result of {verb} is not what this version knows: {error}") from error


def to_plain(name: str, value: Any) -> Any:
    """An argument as texts, numbers, booleans, arrays, maps and bytes."""
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes,))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} cannot be {value!r}: {error}") from error


def to_position(value: Any) -> Any:
    """Where to begin: a word, a time, or {(topic, partition): offset}, as it is sent."""
    if isinstance(value, datetime | int | float) and not isinstance(value, bool):
        return to_us(value)
    if isinstance(value, Mapping):
        try:
            return [[topic, partition, offset] for (topic, partition), offset in value.items()]
        except (TypeError, ValueError) as error:
            raise InvalidArgument("positions are {(topic, partition): offset}") from error
    return value


class _FieldsLot:
    """The values of one message that came as a map."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.topic = fields["topic"]
        self.topic_id = fields["topic_id"]
        self.partition = fields["partition"]

    def value(self, column: str, row: int) -> Any:
        if column == "ttl_ms":
            ttl_s = self._fields.get("ttl_s")
            return None if ttl_s is None else round(ttl_s * 1000)
        if column == "original_id":
            return self._fields.get("id")
        if column in ("publish_time", "event_time", "deliver_at"):
            return self._fields.get(f"{column}_us")
        return self._fields.get(column)


def to_message(fields: Mapping[str, Any]) -> Message:
    """The message that a map describes."""
    return Message(_FieldsLot(fields), 0, fields["offset"], fields["data"], fields["key"])


def to_letter(found: Any) -> DeadLetter:
    """The dead letter that an array describes."""
    return DeadLetter(to_message(found[0]), *found[1 : len(DeadLetter._fields)])
