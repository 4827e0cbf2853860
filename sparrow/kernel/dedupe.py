"""Repeats at the door: what a producer has already sent, and which idempotency keys are known.

Two independent memories, both rebuilt from the log alone.

A *producer ledger* belongs to one producer and one topic. Sequences count messages. A request is new when
it starts at the next expected sequence, a repeat when it equals one of the last requests, and refused
otherwise. A first request may start anywhere, so that a source can use its own positions. ``expected``
runs ahead of what is stored while requests are on their way to the log; a failed one takes it back.

A *key window* belongs to one topic. A key is known for the window's length after the message that brought
it. The window never forgets early: when it is full, new keys are refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from sparrow.model.errors import DedupeWindowFull, ProducerFenced, SequenceGap, SequenceTooOld


class Stored(NamedTuple):
    """Where a message went."""

    partition: int
    offset: int
    publish_time_us: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The messages of a request that went to one partition, in the order of offsets."""

    partition: int
    base_offset: int
    publish_time_us: int
    first_sequence: int
    length: int
    scattered: tuple[int, ...] | None = None
    """All sequences, when they are not consecutive."""

    @property
    def sequences(self) -> Sequence[int]:
        return self.scattered or range(self.first_sequence, self.first_sequence + self.length)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A stored request of a producer."""

    base_sequence: int
    count: int
    parts: tuple[Part, ...]

    def stored(self) -> list[Stored]:
        """Where each message went, in the order of sequences."""
        places: list[Stored | None] = [None] * self.count
        for part in self.parts:
            for index, sequence in enumerate(part.sequences):
                place = Stored(part.partition, part.base_offset + index, part.publish_time_us)
                places[sequence - self.base_sequence] = place
        assert all(place is not None for place in places)
        return [place for place in places if place is not None]


def part(partition: int, base_offset: int, publish_time_us: int, sequences: Sequence[int]) -> Part:
    """A part, with consecutive sequences kept as a range."""
    first, length = sequences[0], len(sequences)
    is_range = isinstance(sequences, range) or sequences[-1] - first == length - 1
    scattered = None if is_range else tuple(sequences)
    return Part(partition, base_offset, publish_time_us, first, length, scattered)


def request(parts: Iterable[Part]) -> Request:
    """The request that its parts make up."""
    parts = tuple(parts)
    return Request(min(part.first_sequence for part in parts), sum(part.length for part in parts), parts)


class _Saved(msgspec.Struct, array_like=True):
    epoch: int
    next_sequence: int | None
    requests: list[Request]


class ProducerLedger:
    """One producer on one topic."""

    __slots__ = ("_epoch", "_expected", "_next", "_requests")

    def __init__(self, requests_max: int) -> None:
        self._epoch = 0
        self._next: int | None = None
        self._expected: int | None = None
        self._requests: deque[Request] = deque(maxlen=requests_max)

    @property
    def expected(self) -> int | None:
        """The next sequence that is taken as new; None when any is."""
        return self._expected

    def find(self, epoch: int, base_sequence: int, count: int) -> Request | None:
        """The stored request that this one repeats, or None when it is new; refuses everything else."""
        if epoch < self._epoch:
            raise ProducerFenced(f"epoch {epoch} of this producer has ended; {self._epoch} is in force")
        if self._expected is None or base_sequence == self._expected:
            return None
        if base_sequence > self._expected:
            raise SequenceGap(
                f"sequence {base_sequence} was sent, {self._expected} is expected", expected=self._expected
            )
        for known in self._requests:
            if known.base_sequence == base_sequence and known.count == count:
                return known
        raise SequenceTooOld(
            f"sequences {base_sequence} to {base_sequence + count - 1} were stored before or given up; "
            f"the next is {self._expected}",
            expected=self._expected,
        )

    def is_behind(self, base_sequence: int | None) -> bool:
        """Whether the sequence is no news: stored, on its way, or given up."""
        if base_sequence is None or self._expected is None:
            return False
        return base_sequence < self._expected

    def is_on_its_way(self, base_sequence: int) -> bool:
        """Whether the sequence was reserved and is not stored yet."""
        if self._expected is None or base_sequence >= self._expected:
            return False
        return self._next is None or base_sequence >= self._next

    def reserve(self, base_sequence: int, count: int) -> None:
        """A new request goes to the log."""
        self._expected = base_sequence + count

    def skip_to(self, sequence: int) -> None:
        """The numbers before this one are given up."""
        self._expected = max(self._expected or 0, sequence)

    def abandon(self) -> None:
        """A request failed on its way, and so do those behind it."""
        self._expected = self._next

    def apply(self, epoch: int, stored: Request) -> None:
        """A request is in the log."""
        self._epoch = max(self._epoch, epoch)
        self._next = stored.base_sequence + stored.count
        self._expected = max(self._expected or self._next, self._next)
        self._requests.append(stored)

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(_Saved(self._epoch, self._next, list(self._requests)))

    @classmethod
    def from_bytes(cls, raw: bytes, requests_max: int) -> ProducerLedger:
        saved = msgspec.msgpack.decode(raw, type=_Saved)
        ledger = cls(requests_max)
        ledger._epoch, ledger._next = saved.epoch, saved.next_sequence
        ledger._expected = saved.next_sequence
        ledger._requests.extend(saved.requests)
        return ledger


class KeyWindow:
    """The idempotency keys of one topic, in the order in which their messages were stored."""

    __slots__ = ("_keys", "_keys_max", "_window_us")

    def __init__(self, window_us: int, keys_max: int) -> None:
        self._window_us = window_us
        self._keys_max = keys_max
        self._keys: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def resize(self, window_us: int) -> None:
        """The topic's policy has changed."""
        self._window_us = window_us

    def find(self, key: str, now_us: int) -> Stored | None:
        """Where the key's message went, when it is still known."""
        found = self._keys.get(key)
        is_known = found is not None and found.publish_time_us + self._window_us > now_us
        return found if is_known else None

    def admit(self, count: int, now_us: int) -> None:
        """Makes sure that ``count`` new keys fit."""
        self.expire(now_us)
        if len(self._keys) + count > self._keys_max:
            raise DedupeWindowFull(
                f"the topic's idempotency window holds {len(self._keys)} keys; {self._keys_max} are allowed"
            )

    def apply(self, key: str, stored: Stored) -> None:
        """A message with this key is in the log."""
        self._keys[key] = stored
        self._keys.move_to_end(key)

    def expire(self, now_us: int) -> None:
        """Forgets keys whose window has passed."""
        while self._keys:
            key, stored = next(iter(self._keys.items()))
            if stored.publish_time_us + self._window_us > now_us:
                return
            del self._keys[key]
