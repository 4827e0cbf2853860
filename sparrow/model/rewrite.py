"""Rewriting sealed segments: the order that a job gives, the plan it goes by and what came of it.

A job (Spark's tasks, usually) reads segments, writes *drafts* beside them and asks the broker to put the
drafts in the segments' place. The broker trusts nothing of it: it holds every row of a draft against the
segments that are to go.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from sparrow.model.segment import TopicSegments
from sparrow.model.topic import TopicPolicy

SEGMENT_BYTES = 128 * 1024 * 1024
"""How large a job makes segments: small enough for a task, large enough for a scan."""


class RewriteKind(enum.StrEnum):
    """What a rewrite does to messages."""

    COMPACT = "compact"
    """Leaves out what a newer message of the same key replaced. Offsets stay; there are gaps."""
    MERGE = "merge"
    """Puts neighbours together; every message stays."""


class RewritePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a job needs to know to rewrite the lake of a topic, all seen at one moment."""

    segments: TopicSegments
    policy: TopicPolicy
    kept_from: list[int]
    """Per partition: from this offset on nothing may be left out, because a subscription needs it."""
    now_us: int
    compression: str
    row_group_bytes: int
    dirty_ratio: float
    """The share of the sealed bytes that no compaction has seen yet."""

    @property
    def is_due(self) -> bool:
        """Whether enough has come in since the last compaction."""
        return self.dirty_ratio > 0 and self.dirty_ratio >= self.policy.compaction_dirty_ratio


class Swap(NamedTuple):
    """What was put in the place of what."""

    partition: int
    first_offset: int
    end_offset: int
    rows_before: int
    rows: int
    bytes_before: int
    bytes: int
    files: list[str]
    """The new segments, relative to the data directory."""
