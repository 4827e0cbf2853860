"""Compaction: which messages of a sealed log may be left out, and which segments are rewritten together.

A message is left out when a later one of the same key is in the sealed log. What stays whatever its key:

* messages without a key, and those stored again by a replay: they are nobody's state, and replace nothing;
* what is still scheduled for delivery, and what some subscription needs (``kept_from``);
* messages with an idempotency key that is still in its window: without them a repeat would be stored twice.

A message with a key and without data is a tombstone: it replaces what was there and goes itself when its
delay is over, because nothing older of its key is left by then. For the same reason segments must be swapped
from the front: a tombstone may not go before what it deletes.

Pure: columns come in, masks go out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model.rewrite import RewriteKind, RewritePlan
from sparrow.model.segment import SegmentFile

SCANNED = ("offset", "publish_time", "key", "deliver_at", "idempotency_key", "original_id")
"""The columns that decide; the data is read only of what is kept."""
_WORTH = 0.25
"""A merge is worth its bytes when what joins the largest is this share of it."""


class Rules(NamedTuple):
    """What a topic's policy says, at one moment."""

    now_us: int
    tombstone_delay_us: int
    dedupe_window_us: int
    kept_from: int
    """From this offset on everything stays."""


def contenders(rows: pa.RecordBatch) -> pa.Array:
    """Whether each message can be the newest of its key."""
    return pc.and_(pc.is_valid(rows.column("key")), pc.is_null(rows.column("original_id")))


def kept(rows: pa.RecordBatch, newest: pa.Array, rules: Rules) -> pa.Array:
    """Whether each message stays; ``newest`` are the offsets that are the newest of some key."""
    stays = pc.or_(pc.invert(contenders(rows)), pc.greater_equal(rows.column("offset"), rules.kept_from))
    if len(newest):
        stays = pc.or_(stays, pc.is_in(rows.column("offset"), value_set=newest))
    if rows.column("deliver_at").null_count < rows.num_rows:
        stays = pc.or_(stays, _is_after(rows.column("deliver_at"), rules.now_us))
    keys = rows.column("idempotency_key")
    if keys.null_count < rows.num_rows:
        is_young = _is_after(rows.column("publish_time"), rules.now_us - rules.dedupe_window_us)
        stays = pc.or_(stays, pc.and_(pc.is_valid(keys), is_young))
    return stays


def spent(rows: pa.RecordBatch, rules: Rules) -> pa.Array:
    """Whether each message, the newest of its key, is a tombstone whose delay is over."""
    delay_us = max(rules.tombstone_delay_us, rules.dedupe_window_us)
    is_old = pc.invert(_is_after(rows.column("publish_time"), rules.now_us - delay_us))
    is_due = pc.invert(_is_after(rows.column("deliver_at"), rules.now_us))
    is_free = pc.less(rows.column("offset"), rules.kept_from)
    is_tombstone = pc.and_(contenders(rows), pc.is_null(rows.column("data")))
    return pc.and_(pc.and_(is_tombstone, is_free), pc.and_(is_old, is_due))


def _is_after(times: pa.Array, moment_us: int) -> pa.Array:
    moment = pa.scalar(moment_us, pa.timestamp("us", tz="UTC"))
    return pc.fill_null(pc.greater(times, moment), False)


def runs(segments: Sequence[SegmentFile]) -> list[list[SegmentFile]]:
    """Segments that follow one another without a hole: only those can be rewritten together."""
    found = [list(segments[:1])] if segments else []
    for one, other in pairwise(segments):
        if one.end_offset == other.first_offset:
            found[-1].append(other)
        else:
            found.append([other])
    return found


def groups_to_compact(
    segments: Sequence[SegmentFile], kept_rows: Sequence[int], bytes_max: int
) -> list[list[SegmentFile]]:
    """Neighbours that become one segment each of about ``bytes_max``, as far as the rows that stay tell; a
    group holds at least one of them, unless none of the run does."""
    found: list[list[SegmentFile]] = []
    for run in runs(segments):
        places = [segments.index(segment) for segment in run]
        gathered: list[list[SegmentFile]] = []
        weight, count = 0, 0
        for segment, place in zip(run, places, strict=True):
            size = segment.size_bytes * kept_rows[place] // max(1, segment.rows)
            if gathered and (count == 0 or weight + size <= bytes_max):
                gathered[-1].append(segment)
                weight, count = weight + size, count + kept_rows[place]
            else:
                gathered.append([segment])
                weight, count = size, kept_rows[place]
        if len(gathered) > 1 and count == 0:
            gathered[-2:] = [[*gathered[-2], *gathered[-1]]]
        found += gathered
    return found


def groups_to_merge(segments: Sequence[SegmentFile], bytes_max: int) -> list[list[SegmentFile]]:
    """Small neighbours that are worth being one segment of at most ``bytes_max``."""
    found: list[list[SegmentFile]] = []
    for run in runs(segments):
        gathered: list[list[SegmentFile]] = [[]]
        for segment in run:
            if sum(each.size_bytes for each in gathered[-1]) + segment.size_bytes > bytes_max:
                gathered.append([])
            gathered[-1].append(segment)
        found += [group for group in gathered if _is_worth_it(group)]
    return found


def has_work(kind: RewriteKind, plan: RewritePlan, bytes_max: int) -> bool:
    """Whether a job of this kind that looks at what is due would do anything."""
    partitions = [each.segments for each in plan.segments.partitions]
    if kind is RewriteKind.COMPACT:
        return plan.is_due and any(partitions)
    return any(groups_to_merge(segments, bytes_max) for segments in partitions)


def _is_worth_it(group: Sequence[SegmentFile]) -> bool:
    sizes = sorted(segment.size_bytes for segment in group)
    return len(group) > 1 and sum(sizes[:-1]) >= _WORTH * sizes[-1]
