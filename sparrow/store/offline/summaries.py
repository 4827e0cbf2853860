"""What inspection tells: values that print as tables and as JSON alike."""

from __future__ import annotations

from typing import Any

import msgspec

from sparrow.store.offline.findings import Finding


class CatalogSummary(msgspec.Struct, kw_only=True):
    """The catalog, or why it cannot be used."""

    state: str
    version: int | None = None
    sealed_through: int | None = None
    subscriptions: int | None = None
    producers: int | None = None


class PartitionSummary(msgspec.Struct, kw_only=True):
    """One partition of a topic."""

    topic: str
    topic_id: int
    partition: int
    start_offset: int
    sealed_end_offset: int
    end_offset: int
    segments: int
    segment_bytes: int


class JournalSummary(msgspec.Struct, kw_only=True):
    """One journal file."""

    file: str
    number: int
    is_sealed: bool
    created_at_us: int | None
    bytes: int
    """Up to the end of the last valid entry."""
    size_bytes: int
    torn_bytes: int
    """Behind the last valid entry, and not blank."""
    entries: int
    batches: int
    facts: int
    notes: int
    messages: int
    broken: int
    """Stretches between valid entries in which none can be read."""


class SegmentSummary(msgspec.Struct, kw_only=True):
    """One sealed Parquet file."""

    file: str
    topic: str
    partition: int
    first_offset: int
    end_offset: int
    rows: int
    row_groups: int
    size_bytes: int
    first_time_us: int
    last_time_us: int


class Summary(msgspec.Struct, kw_only=True):
    """The whole directory, or the part that was asked for."""

    directory: str
    format: int
    created_at_us: int
    catalog: CatalogSummary
    partitions: list[PartitionSummary]
    journal: list[JournalSummary]
    segments: list[SegmentSummary]


class EntrySummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One entry of a journal file, or a stretch in which none can be read."""

    file: str
    position: int
    end_position: int
    kind: str
    is_crc_right: bool
    flags: list[str] = []
    codec: str = "none"
    count: int = 0
    topic: str | None = None
    topic_id: int = 0
    partition: int = 0
    base_offset: int | None = None
    end_offset: int | None = None
    publish_time_us: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    base_sequence: int = 0
    durable_position: int = 0
    catalog_version: int = 0
    facts: list[dict[str, Any]] = []


class MessageSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message and where it lies."""

    id: str
    offset: int
    publish_time_us: int
    file: str
    key: str | None = None
    data: bytes | None = None
    attributes: dict[str, str] = {}
    original_id: str | None = None
    producer_id: int | None = None
    sequence: int | None = None


class Page(msgspec.Struct, kw_only=True):
    """Some messages of a partition, and what could not be read among them."""

    topic: str
    partition: int
    messages: list[MessageSummary]
    damages: list[Finding]
