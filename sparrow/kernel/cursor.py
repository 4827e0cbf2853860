"""A cursor: how far one subscription has got in one stream.

It is an ack floor (everything below is done), a roaring bitmap of what is done above the floor, and,
only for messages that failed at least once, how often they failed and when they are due again. A
backlog costs nothing: what was never touched is not recorded. Ten million acks in random order cost
a bit each at worst and collapse into the floor as the holes close.

Invariants: the floor itself is not done; the bitmap holds nothing below or at the floor; no done
message has a failure record. Two cursors with the same content are equal and have the same bytes.

A cursor knows nothing of leases, consumers' wishes, filters or time: times in it are copied from
facts. It changes only where ``Delivery.apply`` changes it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from pyroaring import BitMap64

from sparrow.kernel.facts import FailureKind
from sparrow.kernel.offsets import OFFSET_MAX, first_missing, pack, span, to_list, unpack
from sparrow.model.errors import DataDamaged, DataDirectoryNewer

HISTORY_MAX = 16
"""Failed attempts of one message that are kept in detail, the newest; the count goes on."""
FORMAT_VERSION = 1


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One hand-over that failed."""

    kind: FailureKind
    at_us: int
    consumer: str
    reason: str


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """What is remembered of a message that failed, or was replayed. Shared between equal messages."""

    attempts: int = 0
    """Failed hand-overs; the next one is number ``attempts + 1``."""
    due_at_us: int = 0
    verdict: str = ""
    """Why it is to be dead-lettered; empty while it may be tried again."""
    round: int = 0
    """How many times it has been replayed from the dead letters."""
    history: tuple[Attempt, ...] = ()

    def after(self, attempt: int, entry: Attempt, due_at_us: int, verdict: str) -> Failure:
        """The record after attempt number ``attempt`` failed; unchanged if that was known."""
        if attempt <= self.attempts:
            return self
        history = (*self.history, entry)[-HISTORY_MAX:]
        return Failure(attempt, due_at_us, verdict, self.round, history)


_FRESH = Failure()


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    floor: int
    ranges: tuple[int, ...]
    dense: bytes
    failures: tuple[tuple[int, Failure], ...]


class Cursor:
    """Ack floor, acks above it, and failures; see the module's text."""

    __slots__ = ("_above", "_failed", "failures", "floor")

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self._above: BitMap64 | None = None
        self._failed: BitMap64 | None = None
        self.failures: dict[int, Failure] | None = None

    # Reading.

    @property
    def above(self) -> BitMap64:
        """What is done above the floor; not to be changed."""
        return _EMPTY if self._above is None else self._above

    @property
    def failed(self) -> BitMap64:
        """The offsets that have a failure record; not to be changed."""
        return _EMPTY if self._failed is None else self._failed

    def is_acked(self, offset: int) -> bool:
        """Whether the message is done."""
        return offset < self.floor or (self._above is not None and offset in self._above)

    def failure(self, offset: int) -> Failure:
        """The failure record of a message; a fresh one if it never failed."""
        return self.failures.get(offset, _FRESH) if self.failures else _FRESH

    def attempt(self, offset: int) -> int:
        """The number of the message's next hand-over, from 1."""
        return self.failure(offset).attempts + 1

    def unacked(self, start_offset: int, end_offset: int) -> BitMap64:
        """What is not done in the range, as a set that the caller owns."""
        offsets = span(max(start_offset, self.floor), end_offset)
        if self._above is not None:
            offsets -= self._above
        return offsets

    def unacked_count(self, end_offset: int) -> int:
        """How many messages below ``end_offset`` are not done."""
        if end_offset <= self.floor:
            return 0
        done = self._above.range_cardinality(self.floor, end_offset) if self._above else 0
        return end_offset - self.floor - int(done)

    def covers(self, other: Cursor) -> bool:
        """Whether everything done in ``other`` is done here."""
        if other.floor > self.floor and not self.above.contains_range(self.floor, other.floor):
            return False
        rest = other.above - self.above
        return not rest or rest.max() < self.floor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cursor):
            return NotImplemented
        return (
            self.floor == other.floor
            and self.above == other.above
            and (self.failures or {}) == (other.failures or {})
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        failures = len(self.failures) if self.failures else 0
        return f"Cursor(floor={self.floor}, above={len(self.above)}, failures={failures})"

    # Changing.

    def ack(self, offsets: BitMap64) -> None:
        """These are done. The set may hold what is done already; it is not kept."""
        if not offsets:
            return
        if self._failed is not None:
            self._forget_failures(offsets)
        if offsets.max() < self.floor:
            return
        if self._above is None:
            self._above = offsets.copy()
        else:
            self._above |= offsets
        self._settle_floor()

    def ack_range(self, start_offset: int, end_offset: int) -> None:
        """The range is done."""
        if end_offset <= start_offset or end_offset <= self.floor:
            return
        if self._failed is not None:
            self._forget_failures(span(start_offset, end_offset))
        if start_offset <= self.floor:
            self.floor = end_offset
            if self._above is not None:
                self._settle_floor()
            return
        if self._above is None:
            self._above = BitMap64()
        self._above.add_range(start_offset, end_offset)

    def ack_to(self, end_offset: int) -> None:
        """Everything below ``end_offset`` is done (a cumulative ack)."""
        self.ack_range(0, end_offset)

    def take_back(self, offsets: BitMap64, round: int = 0) -> None:
        """These are not done any more and start again at attempt 1."""
        if not offsets:
            return
        low = offsets.min()
        if low < self.floor:
            below = span(low, self.floor)
            self._above = below if self._above is None else self._above | below
            self.floor = low
        if self._above is not None:
            self._above -= offsets
            self._settle_floor()
        self._forget_failures(offsets)
        if round:
            self._remember(offsets, Failure(round=round))

    def seek(self, floor: int, above: BitMap64 | None = None) -> None:
        """Exactly this is done; failures are forgotten."""
        self.floor = floor
        self._above = above.copy() if above else None
        self.failures = self._failed = None
        self._settle_floor()

    def fail(
        self, offsets: BitMap64, attempt: int, entry: Attempt, due_at_us: int, verdict: str = ""
    ) -> None:
        """Hand-over number ``attempt`` of these failed; what is done stays done."""
        known = self.failures if self.failures is not None else {}
        touched = BitMap64()
        last_old, last_new = _FRESH, _FRESH.after(attempt, entry, due_at_us, verdict)
        for offset in to_list(offsets):
            if self.is_acked(offset):
                continue
            old = known.get(offset, _FRESH)
            if old is not last_old:
                last_old, last_new = old, old.after(attempt, entry, due_at_us, verdict)
            known[offset] = last_new
            touched.add(offset)
        if touched:
            self.failures = known
            self._failed = touched if self._failed is None else self._failed | touched

    def merge(self, other: Cursor) -> None:
        """Everything done in either is done; of two failure records the further one stays."""
        self.ack_to(other.floor)
        self.ack(other.above)
        for offset, failure in (other.failures or {}).items():
            if not self.is_acked(offset) and failure.attempts >= self.failure(offset).attempts:
                self._remember((offset,), failure)

    def copy(self) -> Cursor:
        """A cursor with the same content."""
        twin = Cursor(self.floor)
        twin._above = self._above.copy() if self._above is not None else None
        twin._failed = self._failed.copy() if self._failed is not None else None
        twin.failures = dict(self.failures) if self.failures is not None else None
        return twin

    def _settle_floor(self) -> None:
        """Raise the floor over what is done and drop what lies below it from the bitmap."""
        above = self._above
        if above is None:
            return
        if above and self.floor in above:
            self.floor = first_missing(above, self.floor)
        above.remove_range(0, self.floor)
        if not above:
            self._above = None

    def _remember(self, offsets: Iterable[int], failure: Failure) -> None:
        if self.failures is None or self._failed is None:
            self.failures, self._failed = {}, BitMap64()
        for offset in offsets:
            self.failures[offset] = failure
            self._failed.add(offset)

    def _forget_failures(self, offsets: BitMap64) -> None:
        if self.failures is None or self._failed is None:
            return
        gone = self._failed & offsets
        if not gone:
            return
        for offset in to_list(gone):
            del self.failures[offset]
        self._failed -= gone
        if not self.failures:
            self.failures = self._failed = None

    # Resting.

    def to_bytes(self) -> bytes:
        """The stored form; equal cursors have equal bytes."""
        failures = tuple(sorted((self.failures or {}).items()))
        return _encoder.encode(_Stored(FORMAT_VERSION, self.floor, *pack(self.above), failures))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Cursor:
        """The cursor that ``to_bytes`` stored."""
        try:
            stored = _decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise DataDamaged(f"a stored cursor does not decode: {error}") from error
        if stored.version > FORMAT_VERSION:
            raise DataDirectoryNewer(f"a stored cursor has the unknown version {stored.version}")
        if not 0 <= stored.floor <= OFFSET_MAX:
            raise DataDamaged(f"a stored cursor has the impossible floor {stored.floor}")
        cursor = cls()
        cursor.seek(stored.floor, unpack(stored.ranges, stored.dense))
        for offset, failure in stored.failures:
            cursor._remember((offset,), failure)
        return cursor


_EMPTY = BitMap64()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)
