"""A track: what one subscription knows of one stream.

Durable is the cursor alone. The rest is volatile and comes back by reading the log again from the
cursor's floor: how far has been read, what was passed over without a fact of its own, what is being
settled, what must be read again because its ack was taken back, and the rare wishes of single
messages (priority, time to live).
"""

from __future__ import annotations

from pyroaring import BitMap64

from sparrow.kernel.cursor import Cursor
from sparrow.kernel.offsets import OFFSET_MAX, first_missing, span, to_list
from sparrow.kernel.ordering import ENTRY_SHIFT
from sparrow.model.message import StreamId

NEVER_US = 2**63 - 1


class Track:
    """One stream of one subscription."""

    __slots__ = (
        "cursor",
        "expires",
        "frontier_us",
        "index",
        "large",
        "passed",
        "priorities",
        "read_offset",
        "reread",
        "settling",
        "stream",
        "unseen",
    )

    def __init__(self, stream: StreamId, index: int, cursor: Cursor) -> None:
        self.stream = stream
        self.index = index
        self.cursor = cursor
        self.forget_volatile()

    def forget_volatile(self) -> None:
        """As after a crash: only the cursor is known."""
        self.read_offset = self.cursor.floor
        self.frontier_us = -1
        """When the last message that was read here had been published, as far as order needs it."""
        self.passed: BitMap64 | None = None
        self.settling: BitMap64 | None = None
        self.reread: BitMap64 | None = None
        self.unseen: BitMap64 | None = None
        """Settling without having been read: a commit went ahead of the reading."""
        self.large: BitMap64 | None = None
        self.priorities: dict[int, int] | None = None
        self.expires: dict[int, int] | None = None

    # Names in lanes.

    def entries(self, offsets: BitMap64) -> list[int]:
        """The names of messages in lanes."""
        base = self.index << ENTRY_SHIFT
        return [base + offset for offset in to_list(offsets)]

    def entry(self, offset: int) -> int:
        """The name of a message in lanes."""
        return (self.index << ENTRY_SHIFT) + offset

    # Passing over.

    def pass_over(self, offsets: BitMap64) -> None:
        """These need no delivery. They join the next ack's fact, or ``flush``."""
        if offsets:
            self.passed = offsets if self.passed is None else self.passed | offsets

    def with_passed(self, done: BitMap64) -> BitMap64:
        """``done`` and what was passed over below it and right after it."""
        if self.passed is None:
            return done
        joined: BitMap64 = self.passed | done
        end = first_missing(joined, done.max())
        joined.remove_range(end, OFFSET_MAX)
        return joined

    # Settling.

    def begin_settling(self, offsets: BitMap64) -> None:
        self.settling = offsets.copy() if self.settling is None else self.settling | offsets

    def end_settling(self, offsets: BitMap64) -> BitMap64:
        """These are settled or given up; returns those that were settling."""
        if self.settling is None:
            return BitMap64()
        ended: BitMap64 = self.settling & offsets
        self.settling -= ended
        if not self.settling:
            self.settling = None
        return ended

    def skip_to(self, end_offset: int) -> None:
        """A commit is being journaled: what it covers and was not read begins settling as well."""
        unseen = self.cursor.unacked(max(self.read_offset, self.cursor.floor), end_offset)
        if self.reread is not None:
            again = self.reread & span(0, end_offset)
            unseen |= again
            self.reread = (self.reread - again) or None
        if not unseen:
            return
        self.begin_settling(unseen)
        self.unseen = unseen if self.unseen is None else self.unseen | unseen
        self.read_offset = max(self.read_offset, end_offset)

    def unskip(self, offsets: BitMap64) -> BitMap64:
        """The commit was given up: read now what it had skipped. Returns what had been read."""
        if self.unseen is None:
            return offsets
        again = self.unseen & offsets
        self.unseen = (self.unseen - again) or None
        if again:
            self.reread = again if self.reread is None else self.reread | again
        return offsets - again

    def is_settling(self, offset: int) -> bool:
        return self.settling is not None and offset in self.settling

    def known_unacked(self, end_offset: int) -> BitMap64:
        """What was read below ``end_offset`` and is neither done nor being settled nor passed."""
        offsets = self.cursor.unacked(self.cursor.floor, min(end_offset, self.read_offset))
        for other in (self.settling, self.passed, self.reread):
            if other is not None:
                offsets -= other
        return offsets

    # Acking.

    def ack(self, offsets: BitMap64) -> None:
        """These are done: forget what was kept for them."""
        self.cursor.ack(offsets)
        if self.passed is not None:
            self.passed -= offsets
            self.passed.remove_range(0, self.cursor.floor)
            self.passed = self.passed or None
        if self.reread is not None:
            self.reread = (self.reread - offsets) or None
        if self.unseen is not None:
            self.unseen = (self.unseen - offsets) or None
        if self.large is not None:
            self.large = (self.large - offsets) or None
        self.priorities = _without(self.priorities, offsets)
        self.expires = _without(self.expires, offsets)
        self.read_offset = max(self.read_offset, self.cursor.floor)

    def take_back(self, offsets: BitMap64, round: int) -> None:
        """These are to be delivered again: what had been read must be read again."""
        self.cursor.take_back(offsets, round)
        again = offsets & span(0, self.read_offset)
        if again:
            self.reread = again if self.reread is None else self.reread | again
        if self.passed is not None:
            self.passed = (self.passed - offsets) or None

    # Single messages.

    def priority(self, offset: int) -> int:
        return self.priorities.get(offset, 0) if self.priorities else 0

    def expires_at_us(self, offset: int) -> int:
        return self.expires.get(offset, NEVER_US) if self.expires else NEVER_US

    def is_large(self, offset: int) -> bool:
        return self.large is not None and offset in self.large


def _without(values: dict[int, int] | None, offsets: BitMap64) -> dict[int, int] | None:
    if values is None:
        return None
    for offset in to_list(BitMap64(values) & offsets):
        del values[offset]
    return values or None
