"""Leases: messages handed to one consumer until a deadline, and the ack ids that name them.

A lease is a set of offsets of one stream, taken in one go by one consumer: a thousand messages are
one lease, one heap entry and one bitmap. Settling takes offsets out of it. Extending some of them
splits the lease into parts with deadlines of their own; the ack ids stay good. Deadlines are exact:
a heap of (deadline, lease), stale entries skipped when they surface.

Leases are volatile. After a crash all are gone, the messages are ready again, and no attempt is
counted, because the broker failed and not the consumer.

**Ack ids.** ``<48 characters>.<hex>``. The head is the same for all messages of a lease: format,
subscription, stream, first offset, lease number, broker session, crc32, in base64url. The tail holds
the distance from the first offset and a check digit of its own. So a batch of ids is parsed by one
dictionary lookup and one ``int`` a message, while each id alone still says everything. Garbage is
``InvalidAckId``. An id whose lease has ended parses well; that it is stale is the table's judgement.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pyroaring import BitMap64

from sparrow.model.errors import InvalidAckId
from sparrow.model.message import StreamId

_HEAD = struct.Struct(">HIIHQQI")
_CRC = struct.Struct(">I")
_FORMAT = 1
_HEAD_CHARACTERS = 48
_PRIME = 65_521
"""Largest prime below 2**16: a change of any one hex digit of a tail changes its remainder."""
_STEP = 40_503
_DISTANCE_MAX = 2**48
NEVER_US = 2**63 - 1
SESSION_MAX = 2**32 - 1


class LeaseName(NamedTuple):
    """What the head of an ack id says."""

    subscription_id: int
    stream: StreamId
    first_offset: int
    number: int
    session: int
    salt: int


class NamedOffsets(NamedTuple):
    """Messages of one lease, as their ack ids name them; ``ids`` lie beside ``offsets``."""

    name: LeaseName
    offsets: list[int]
    ids: Sequence[str]


class AckNames(NamedTuple):
    """What a consumer wants to settle: messages by lease, and ids that are none, each with its error."""

    groups: list[NamedOffsets]
    bad: list[tuple[str, InvalidAckId]]


class Part:
    """Offsets of a lease that share a deadline."""

    __slots__ = ("deadline_us", "offsets")

    def __init__(self, deadline_us: int, offsets: BitMap64) -> None:
        self.deadline_us = deadline_us
        self.offsets = offsets


class Lease:
    """Messages of one stream in the hands of one consumer."""

    __slots__ = ("consumer", "first_offset", "number", "parts", "stream", "taken_at_us")

    def __init__(
        self, number: int, stream: StreamId, consumer: str, offsets: BitMap64, taken_at_us: int
    ) -> None:
        self.number = number
        self.stream = stream
        self.consumer = consumer
        self.first_offset: int = offsets.min()
        self.taken_at_us = taken_at_us
        self.parts: list[Part] = []

    def take_out(self, offsets: BitMap64) -> BitMap64:
        """Remove and return those of ``offsets`` that the lease still holds."""
        if len(self.parts) == 1:
            part = self.parts[0]
            held = part.offsets & offsets
            part.offsets -= held
        else:
            held = BitMap64()
            for part in self.parts:
                some = part.offsets & offsets
                part.offsets -= some
                held |= some
        self.parts = [part for part in self.parts if part.offsets]
        return held

    def held(self) -> BitMap64:
        """Everything the lease still holds, as a new set."""
        return BitMap64().union(*(part.offsets for part in self.parts))


class LeaseTable:
    """The leases of one subscription."""

    __slots__ = ("_deadlines", "_next_number", "by_consumer", "by_number", "count")

    def __init__(self) -> None:
        self.by_number: dict[int, Lease] = {}
        self.by_consumer: dict[str, int] = {}
        """Messages in flight by consumer."""
        self.count = 0
        self._deadlines: list[tuple[int, int]] = []
        self._next_number = 1

    @property
    def next_number(self) -> int:
        """The number that the next lease will have; all earlier ones are older."""
        return self._next_number

    def add(self, stream: StreamId, consumer: str, offsets: BitMap64, now_us: int, deadline_us: int) -> Lease:
        """A lease of these messages; the table owns the set from now on."""
        lease = Lease(self._next_number, stream, consumer, offsets, now_us)
        lease.parts.append(Part(deadline_us, offsets))
        self._next_number += 1
        self.by_number[lease.number] = lease
        self._count(consumer, len(offsets))
        heapq.heappush(self._deadlines, (deadline_us, lease.number))
        return lease

    def take_out(self, lease: Lease, offsets: BitMap64) -> BitMap64:
        """End the lease on those of ``offsets`` that it still holds, and return them."""
        held = lease.take_out(offsets)
        self._count(lease.consumer, -len(held))
        if not lease.parts:
            del self.by_number[lease.number]
        return held

    def revoke(self, stream: StreamId, offsets: BitMap64) -> BitMap64:
        """End whatever lease holds any of these messages; returns those that were held."""
        revoked = BitMap64()
        for lease in list(self.by_number.values()):
            if lease.stream == stream:
                revoked |= self.take_out(lease, offsets)
        return revoked

    def extend(self, lease: Lease, offsets: BitMap64, deadline_us: int) -> BitMap64:
        """Give these a new deadline; returns those that the lease still holds."""
        moved = BitMap64()
        for part in lease.parts:
            some = part.offsets & offsets
            part.offsets -= some
            moved |= some
        lease.parts = [part for part in lease.parts if part.offsets]
        if moved:
            lease.parts.append(Part(deadline_us, moved))
            heapq.heappush(self._deadlines, (deadline_us, lease.number))
        return moved

    def expire(self, now_us: int) -> Iterator[tuple[Lease, BitMap64]]:
        """End what is due by ``now_us``: pairs of lease and the messages it lost."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, number = heapq.heappop(self._deadlines)
            lease = self.by_number.get(number)
            if lease is None:
                continue
            due = BitMap64().union(*(p.offsets for p in lease.parts if p.deadline_us <= now_us))
            if due:
                self.take_out(lease, due)
                yield lease, due

    def of(self, consumer: str, stream: StreamId | None = None) -> list[Lease]:
        """The leases of a consumer, of one stream if given."""
        if consumer not in self.by_consumer:
            return []
        own = [lease for lease in self.by_number.values() if lease.consumer == consumer]
        return own if stream is None else [lease for lease in own if lease.stream == stream]

    def release(self, consumer: str, stream: StreamId | None = None) -> Iterator[tuple[Lease, BitMap64]]:
        """End everything that a consumer holds, of one stream if given."""
        for lease in self.of(consumer, stream):
            held = lease.held()
            self.take_out(lease, held)
            yield lease, held

    def find(self, stream: StreamId, offset: int) -> Lease | None:
        """The lease that holds a message."""
        for lease in self.by_number.values():
            if lease.stream == stream and any(offset in part.offsets for part in lease.parts):
                return lease
        return None

    def next_deadline_us(self) -> int:
        """When ``expire`` will next find something; ``NEVER_US`` when there is no lease."""
        deadlines = self._deadlines
        while deadlines:
            deadline_us, number = deadlines[0]
            lease = self.by_number.get(number)
            if lease is not None and any(p.deadline_us == deadline_us for p in lease.parts):
                return deadline_us
            heapq.heappop(deadlines)
        return NEVER_US

    def _count(self, consumer: str, change: int) -> None:
        self.count += change
        held = self.by_consumer.get(consumer, 0) + change
        if held:
            self.by_consumer[consumer] = held
        else:
            self.by_consumer.pop(consumer, None)


# Ack ids.


def head_of(subscription_id: int, stream: StreamId, first_offset: int, number: int, session: int) -> str:
    """The part that the ack ids of one lease share."""
    raw = _HEAD.pack(_FORMAT, subscription_id, *stream, first_offset, number, session)
    return base64.urlsafe_b64encode(raw + _CRC.pack(zlib.crc32(raw))).decode("ascii")


def ack_ids(head: str, first_offset: int, offsets: Iterable[int]) -> list[str]:
    """The ack ids of messages of a lease, in the order of their offsets."""
    salt = _salt(head)
    head += "."
    distances = [offset - first_offset for offset in offsets]
    return [head + "%x" % (d * _PRIME + (d * _STEP + salt) % _PRIME) for d in distances]


def parse_head(head: str) -> LeaseName:
    """What the head of an ack id says; refuses what no broker made."""
    try:
        raw = base64.b64decode(head.encode("ascii"), b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidAckId(f"{_shown(head)} is not an ack id") from error
    if len(raw) != _HEAD.size + _CRC.size or zlib.crc32(raw[:-4]) != _CRC.unpack(raw[-4:])[0]:
        raise InvalidAckId(f"{_shown(head)} is not an ack id")
    form, subscription_id, topic_id, partition, first, number, session = _HEAD.unpack(raw[:-4])
    if form != _FORMAT:
        raise InvalidAckId(f"{_shown(head)} is an ack id of the unknown format {form}")
    stream = StreamId(topic_id, partition)
    return LeaseName(subscription_id, stream, first, number, session, _salt(head))


class _IdsWhenAsked(Sequence[str]):
    """The ack ids of messages whose lease is known; made only when one of them is refused."""

    __slots__ = ("_first_offset", "_head", "_offsets")

    def __init__(self, head: str, first_offset: int, offsets: list[int]) -> None:
        self._head = head
        self._first_offset = first_offset
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, place: Any) -> Any:
        chosen = self._offsets[place]
        if isinstance(place, slice):
            return ack_ids(self._head, self._first_offset, chosen)
        return ack_ids(self._head, self._first_offset, (chosen,))[0]


def name_offsets(held: Mapping[str, list[int]]) -> AckNames:
    """Messages that a consumer in this process holds, by the head of their ack ids: no id is parsed."""
    groups = []
    for head, offsets in held.items():
        name = parse_head(head)
        groups.append(NamedOffsets(name, offsets, _IdsWhenAsked(head, name.first_offset, offsets)))
    return AckNames(groups, [])


def parse_ack_ids(ids: Iterable[str]) -> AckNames:
    """Ack ids sorted by lease, and those that are none, each with its error."""
    groups: dict[str, tuple[LeaseName, list[int], list[str]] | InvalidAckId] = {}
    bad: list[tuple[str, InvalidAckId]] = []
    for ack_id in ids:
        try:
            head, _, tail = ack_id.partition(".")
            value = int(tail, 16)
        except (AttributeError, TypeError, ValueError):
            bad.append((ack_id, InvalidAckId(f"{_shown(ack_id)} is not an ack id")))
            continue
        group = groups.get(head)
        if group is None:
            group = groups[head] = _group(head)
        if isinstance(group, InvalidAckId):
            bad.append((ack_id, group))
            continue
        distance, check = divmod(value, _PRIME)
        name, offsets, texts = group
        if (distance * _STEP + name.salt) % _PRIME != check or not 0 <= distance < _DISTANCE_MAX:
            bad.append((ack_id, InvalidAckId(f"{_shown(ack_id)} is not an ack id")))
            continue
        offsets.append(name.first_offset + distance)
        texts.append(ack_id)
    named = [NamedOffsets(*group) for group in groups.values() if not isinstance(group, InvalidAckId)]
    return AckNames([group for group in named if group.offsets], bad)


def _group(head: str) -> tuple[LeaseName, list[int], list[str]] | InvalidAckId:
    try:
        return parse_head(head), [], []
    except InvalidAckId as error:
        return error


def _salt(head: str) -> int:
    return zlib.crc32(head.encode("ascii")) % _PRIME


def _shown(text: object) -> str:
    """What to show of input that may be long or binary."""
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."
