"""A snapshot: the cursors of a subscription, saved under a name until a time.

Seeking to it later puts the cursors back: what was acked then counts as acked, everything else as new.
"""

from __future__ import annotations

import msgspec

from sparrow.kernel.cursor import Cursor
from sparrow.kernel.delivery import Delivery
from sparrow.model.message import StreamId


class Snapshot(msgspec.Struct, frozen=True):
    """Saved cursors; each in its own stable bytes."""

    name: str
    subscription_id: int
    created_at_us: int
    expires_at_us: int
    saved: tuple[tuple[int, int, bytes], ...]

    @classmethod
    def of(cls, delivery: Delivery, name: str, now_us: int, expires_at_us: int) -> Snapshot:
        """The cursors of a subscription as they are."""
        saved = tuple((*stream, delivery.cursor(stream).to_bytes()) for stream in sorted(delivery.streams))
        return cls(name, delivery.subscription_id, now_us, expires_at_us, saved)

    def cursors(self) -> dict[StreamId, Cursor]:
        return {StreamId(topic, partition): Cursor.from_bytes(raw) for topic, partition, raw in self.saved}

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Snapshot:
        return msgspec.msgpack.decode(raw, type=cls)
