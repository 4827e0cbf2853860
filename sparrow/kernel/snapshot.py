"""Snapshots: saved cursors of a subscription, to seek back to.

A snapshot holds what was acked in each stream at one moment, not the failures: after a seek to it
every message that was not acked then is delivered again, from attempt 1. It expires, because what
retention has removed from the log cannot be delivered again (seven days at most, as Google Pub/Sub).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sparrow.kernel.cursor import Cursor
from sparrow.model.errors import InvalidArgument, SnapshotNotFound
from sparrow.model.message import StreamId

TTL_S_MAX = 7 * 86_400


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A saved position, as the catalog keeps it."""

    name: str
    subscription_id: int
    created_at_us: int
    expires_at_us: int
    cursors: tuple[tuple[int, int, bytes], ...]
    """(topic id, partition, stored cursor) of each stream."""

    def positions(self) -> dict[StreamId, Cursor]:
        """What to hand to ``Delivery.seek``."""
        return {StreamId(t, p): Cursor.from_bytes(raw) for t, p, raw in self.cursors}

    def is_expired(self, now_us: int) -> bool:
        return now_us >= self.expires_at_us


def take(
    name: str,
    subscription_id: int,
    cursors: Mapping[StreamId, Cursor],
    now_us: int,
    ttl_s: float = TTL_S_MAX,
) -> Snapshot:
    """A snapshot of some cursors."""
    if not 0 < ttl_s <= TTL_S_MAX:
        raise InvalidArgument(f"ttl_s must be above 0 to {TTL_S_MAX:,} (seven days), not {ttl_s!r}")
    saved = []
    for stream in sorted(cursors):
        bare = Cursor()
        bare.seek(cursors[stream].floor, cursors[stream].above)
        saved.append((*stream, bare.to_bytes()))
    return Snapshot(
        name=name,
        subscription_id=subscription_id,
        created_at_us=now_us,
        expires_at_us=now_us + round(ttl_s * 1_000_000),
        cursors=tuple(saved),
    )


def find(snapshots: Iterable[Snapshot], name: str, now_us: int) -> Snapshot:
    """The snapshot of a name; refuses one that is missing or has expired."""
    for snapshot in snapshots:
        if snapshot.name == name and not snapshot.is_expired(now_us):
            return snapshot
    raise SnapshotNotFound(f"there is no snapshot {name!r}, or it has expired")


def expired(snapshots: Iterable[Snapshot], now_us: int) -> list[Snapshot]:
    """Those that are to be removed."""
    return [snapshot for snapshot in snapshots if snapshot.is_expired(now_us)]
