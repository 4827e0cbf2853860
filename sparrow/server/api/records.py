"""What is sent to the log family and what comes back: topics, records, offsets, members."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from sparrow.model.group import Assigned


class NewTopic(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A topic to be made."""

    name: str
    partitions: int = 1
    retention_ms: int | None = None
    """How long messages are kept; -1 is for ever, and nothing is the broker's default."""


class TopicOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The same for a topic that the path names."""

    partitions: int = 1
    retention_ms: int | None = None


class TopicShown(msgspec.Struct, kw_only=True):
    """A topic of the log."""

    name: str
    partitions: int
    retention_ms: int
    """-1 is for ever."""
    created_at: str


class NewRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A record to be stored."""

    key: str | None = None
    value: Raw | UnsetType = UNSET
    value_base64: bytes | UnsetType | None = UNSET
    headers: dict[str, str] | None = None


class NewRecords(msgspec.Struct, forbid_unknown_fields=True):
    """Records to be stored together; an array without this around it is taken too."""

    messages: list[NewRecord]


class Place(msgspec.Struct):
    """Where a record is; -1 and -1 for one that flow control threw away."""

    partition: int
    offset: int


class Stored(msgspec.Struct, kw_only=True):
    """Where records are, in their order."""

    topic: str
    offsets: list[Place]


class Single(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message, by the short way."""

    message: Raw
    key: str | None = None
    headers: dict[str, str] | None = None


class SingleTo(Single, forbid_unknown_fields=True, kw_only=True):
    """The same with its topic."""

    topic: str


class SinglePublished(msgspec.Struct, kw_only=True):
    """Where it is."""

    message_id: str
    topic: str
    partition: int
    offset: int


class ConsumeQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Who consumes, how much, and how long to wait for it."""

    consumer_group: str
    consumer_id: str | None = None
    """A member of the group; without it all who poll are one."""
    max_messages: int = 100
    timeout_ms: int = 1000
    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    """Where a group begins that does not exist yet."""


class Record(msgspec.Struct, kw_only=True):
    """A record as it is consumed; its value is JSON, or base64 when it is not JSON."""

    partition: int
    offset: int
    message_id: str
    timestamp: str
    key: str | None = None
    value: Raw | UnsetType = UNSET
    value_base64: str | UnsetType | None = UNSET
    headers: dict[str, str] = {}
    attempt: int = 1


class Records(msgspec.Struct, kw_only=True):
    """What was consumed."""

    topic: str
    consumer_group: str
    messages: list[Record]


class PartitionOffset(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Everything below the offset is done."""

    partition: int
    offset: int
    metadata: str = ""


class Commit(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Offsets to be committed."""

    consumer_group: str
    offsets: list[PartitionOffset]
    consumer_id: str | None = None


class OffsetsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whose offsets."""

    consumer_group: str


class PartitionShown(msgspec.Struct, kw_only=True):
    """Where a group is in a partition."""

    partition: int
    committed_offset: int
    """Everything below it is done."""
    start_offset: int
    end_offset: int


class Offsets(msgspec.Struct, kw_only=True):
    """Where a group is."""

    topic: str
    consumer_group: str
    lag: int
    partitions: list[PartitionShown]


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Who joins; the topic is needed only for a group that does not exist yet."""

    consumer_id: str
    topic: str | None = None
    max_in_flight: int | None = None
    instance: str = ""
    """What the process calls itself: host, version."""


class MemberShown(msgspec.Struct, kw_only=True):
    """A member and what it has."""

    consumer_group: str
    consumer_id: str
    generation: int
    assignment: list[Assigned]
    heartbeat_s: float
    """How often it is to say that it lives; polling says it too."""
    session_timeout_s: float


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A sign of life."""

    status: str = ""
