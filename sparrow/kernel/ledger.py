"""The ledger: all durable state of one subscription, and how it rests between two runs.

Cursors by stream, the replay jobs, and what is durable of the group of consumers. It changes by facts
alone and looks the same after live running and after replay; ``checkpoint`` is its whole content, in
stable bytes. How many messages have failure records is counted along, because that number is bounded by
policy.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from pyroaring import BitMap64

from sparrow.kernel.commits import GroupLedger
from sparrow.kernel.cursor import Cursor
from sparrow.kernel.replay import Replays
from sparrow.kernel.track import Track
from sparrow.model.errors import DataDamaged, DataDirectoryNewer, PreconditionFailed
from sparrow.model.message import StreamId

FORMAT_VERSION = 1


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    subscription_id: int
    cursors: list[tuple[int, int, bytes]]
    replays: bytes
    group: bytes = b""


class Ledger:
    """Durable state of one subscription."""

    __slots__ = ("_group", "_next_index", "_replays", "failing", "subscription_id", "tracks")

    def __init__(self, subscription_id: int) -> None:
        self.subscription_id = subscription_id
        self.tracks: dict[StreamId, Track] = {}
        self.failing = 0
        """Messages that have a failure record."""
        self._next_index = 0
        self._replays: Replays | None = None
        self._group: GroupLedger | None = None

    @property
    def group(self) -> GroupLedger:
        if self._group is None:
            self._group = GroupLedger()
        return self._group

    @property
    def replays(self) -> Replays:
        if self._replays is None:
            self._replays = Replays(self.subscription_id)
        return self._replays

    def track(self, stream: StreamId) -> Track:
        """The track of a stream; refuses one that is not read."""
        track = self.tracks.get(stream)
        if track is None:
            raise PreconditionFailed(
                f"the subscription does not read partition {stream.partition} of topic {stream.topic_id}"
            )
        return track

    def add(self, stream: StreamId, cursor: Cursor) -> Track:
        """Read a stream from a cursor on."""
        track = self.tracks[stream] = Track(stream, self._next_index, cursor)
        self._next_index += 1
        self.failing += len(cursor.failures or ())
        return track

    def remove(self, track: Track) -> None:
        """Forget a stream."""
        del self.tracks[track.stream]
        self.failing -= len(track.cursor.failures or ())

    def change(self, track: Track, how: Callable[[], None]) -> None:
        """Change a track's cursor and keep the count of failures right."""
        before = len(track.cursor.failures or ())
        how()
        self.failing += len(track.cursor.failures or ()) - before

    def dead(self, track: Track) -> dict[str, BitMap64]:
        """Messages with a verdict, by verdict."""
        found: dict[str, BitMap64] = {}
        for offset, failure in (track.cursor.failures or {}).items():
            if failure.verdict:
                found.setdefault(failure.verdict, BitMap64()).add(offset)
        return found

    def checkpoint(self) -> bytes:
        """The whole durable state."""
        cursors = [(*s, self.tracks[s].cursor.to_bytes()) for s in sorted(self.tracks)]
        replays = self._replays.to_bytes() if self._replays is not None else b""
        group = self._group.checkpoint() if self._group is not None else b""
        stored = _Stored(FORMAT_VERSION, self.subscription_id, cursors, replays, group)
        return msgspec.msgpack.encode(stored)

    def restore(self, raw: bytes) -> None:
        """Take over what ``checkpoint`` returned; only for a ledger that is empty."""
        assert not self.tracks, "a ledger is restored once, before anything else"
        try:
            stored = msgspec.msgpack.decode(raw, type=_Stored)
        except msgspec.DecodeError as error:
            raise DataDamaged(f"a stored subscription does not decode: {error}") from error
        if stored.version > FORMAT_VERSION:
            raise DataDirectoryNewer(f"a stored subscription has the unknown version {stored.version}")
        if stored.subscription_id != self.subscription_id:
            raise DataDamaged(
                f"the stored state is of subscription {stored.subscription_id}, not of {self.subscription_id}"
            )
        for topic_id, partition, cursor in stored.cursors:
            self.add(StreamId(topic_id, partition), Cursor.from_bytes(cursor))
        if stored.replays:
            self.replays.restore(stored.replays)
        if stored.group:
            self.group.restore(stored.group)
