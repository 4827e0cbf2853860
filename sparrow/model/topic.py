"""A topic: a named, partitioned, append-only log of messages, and the policy it is kept by."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import FlowPolicy, parse_flow_policy
from sparrow.model.limits import PARTITIONS_MAX
from sparrow.model.message import StreamId
from sparrow.model.names import parse_topic

_KEY_FIELD = re.compile(r"(?=.{1,255}\Z)[^.\s]+(?:\.[^.\s]+)*\Z")


class Durability(enum.StrEnum):
    """When a publisher gets its receipt."""

    DURABLE = "durable"
    """After the bytes were synced to disk; survives power loss."""
    WRITTEN = "written"
    """After the kernel took the bytes; survives kill -9, not power loss."""
    NONE = "none"
    """At once; the last moments may be lost in a crash."""


class Codec(enum.StrEnum):
    """How stored batches are compressed."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Compaction(enum.StrEnum):
    """Whether older messages of a key may go when a newer one has come."""

    NONE = "none"
    KEY = "key"
    """The newest message of each key is kept; one with a key and without data marks the key as deleted."""


class TopicPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a topic is written and how long it is kept. ``None`` means no limit."""

    durability: Durability = Durability.DURABLE
    codec: Codec = Codec.NONE
    retention_s: float | None = 7 * 86400.0
    """Age after which a sealed segment may go."""
    retention_bytes: int | None = None
    """Size of the sealed log, over all partitions, above which the oldest segments go."""
    retention_messages: int | None = None
    """Count of sealed messages, over all partitions, above which the oldest segments go."""
    retain_until_acked: bool = False
    """Keep what some subscription has not acked, whatever the limits say."""
    dedupe_window_s: float = 600.0
    """How long a repeated idempotency key returns the first receipt."""
    flow: FlowPolicy = FlowPolicy()
    """What happens when publishers are faster than consumers; nothing by default."""
    key_field: str | None = None
    """A field of JSON data, as in ``customer.id``: its value is the key of what is published over HTTP
    without one. Other surfaces give keys themselves."""
    compaction: Compaction = Compaction.NONE
    """With ``key``, ``sparrow compact`` keeps the newest message of each key."""
    tombstone_delay_s: float = 86400.0
    """How long a message that deletes a key (a key, no data) can still be read before compaction takes it."""
    compaction_dirty_ratio: float = 0.5
    """The share of the sealed bytes that must be new before compaction is worth its work."""


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as the catalog knows it. The id is never used again, even when the name is."""

    id: int
    name: str
    partitions: int
    policy: TopicPolicy
    created_at_us: int

    @property
    def streams(self) -> list[StreamId]:
        """Its partitions."""
        return [StreamId(self.id, partition) for partition in range(self.partitions)]


def parse_partitions(value: object) -> int:
    """A partition count within its bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= PARTITIONS_MAX:
        raise InvalidArgument(f"partitions must be a whole number from 1 to {PARTITIONS_MAX}, not {value!r}")
    return value


def parse_policy(options: dict[str, Any], base: TopicPolicy | None = None) -> TopicPolicy:
    """The policy that ``options`` describe, on top of ``base``; refuses unknown names and bad values.

    ``flow`` may be given in part; what it leaves out is taken from ``base``. ``None`` takes all limits away.
    """
    known = set(TopicPolicy.__struct_fields__)
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidArgument(
            f"unknown topic option {', '.join(unknown)}",
            hint=f"Topic options are: {', '.join(sorted(known))}.",
        )
    base = base or TopicPolicy()
    flow = _flow(options["flow"], base.flow) if "flow" in options else base.flow
    merged = {**msgspec.to_builtins(base), **options, "flow": msgspec.to_builtins(flow)}
    try:
        policy = msgspec.convert(merged, TopicPolicy)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"bad topic option: {error}") from error
    _check_positive(policy)
    return policy


def _flow(given: Any, base: FlowPolicy) -> FlowPolicy:
    if given is None:
        return FlowPolicy()
    if isinstance(given, FlowPolicy):
        return parse_flow_policy(msgspec.to_builtins(given))
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"flow must be a mapping of flow options, not {given!r}")
    return parse_flow_policy(given, base)


def _check_positive(policy: TopicPolicy) -> None:
    for name in ("retention_s", "retention_bytes", "retention_messages"):
        value = getattr(policy, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidArgument(f"{name} must be positive, or None for no limit, not {value!r}")
    if policy.key_field is not None and not _KEY_FIELD.match(policy.key_field):
        raise InvalidArgument(
            f"key_field must be a field or a dotted path of fields, at most 255 characters, not "
            f"{policy.key_field!r}"
        )
    if not 0 <= policy.tombstone_delay_s < math.inf:
        raise InvalidArgument(f"tombstone_delay_s must not be negative, not {policy.tombstone_delay_s!r}")
    if not 0 <= policy.compaction_dirty_ratio <= 1:
        raise InvalidArgument(
            f"compaction_dirty_ratio must be from 0 to 1, not {policy.compaction_dirty_ratio!r}"
        )
    if not 0 <= policy.dedupe_window_s < math.inf:
        raise InvalidArgument(f"dedupe_window_s must not be negative, not {policy.dedupe_window_s!r}")


__all__ = [
    "Codec",
    "Compaction",
    "Durability",
    "Topic",
    "TopicPolicy",
    "parse_partitions",
    "parse_policy",
    "parse_topic",
]
