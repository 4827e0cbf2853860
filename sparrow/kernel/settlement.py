"""Settling by ack id: which messages a consumer may settle, and why the others are refused.

An id is honoured while its lease holds the message. What is left is judged id by id: garbage and ids
of another subscription are ``InvalidAckId``; an id whose lease has ended is ``StaleAckId``, with one
exception. At least once, the ack of an expired lease is honoured while nobody else holds the message:
the work was done, and doing it again helps nobody. Not so after a seek or a take-back (the *fence*),
for these ask for the message again, and not for ids of an earlier broker session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyroaring import BitMap64

from sparrow.kernel.exchange import Refusal
from sparrow.kernel.lease import AckNames, Lease, LeaseTable, NamedOffsets, parse_ack_ids
from sparrow.kernel.track import Track
from sparrow.model.errors import InvalidAckId, SparrowError, StaleAckId
from sparrow.model.message import StreamId


class Claim(NamedTuple):
    """Messages that were taken out of a lease, or that a late ack is honoured for."""

    stream: StreamId
    consumer: str
    offsets: BitMap64
    is_late: bool = False
    """No lease held them: they may be waiting to be delivered again."""
    taken_at_us: int = 0
    """When they were handed over; 0 is not known."""


def parse_names(names: Sequence[str] | AckNames) -> AckNames:
    """Ack ids from outside are parsed; names from this process are good as they are."""
    return names if isinstance(names, AckNames) else parse_ack_ids(names)


class Clerk(NamedTuple):
    """What is needed to judge ack ids."""

    subscription_id: int
    session: int
    fence: int
    """Leases below this number were ended by a seek or a take-back."""
    leases: LeaseTable
    tracks: dict[StreamId, Track]
    honours_late: bool

    def claim(
        self, names: Sequence[str] | AckNames, consumer: str | None = None
    ) -> tuple[list[Claim], list[Refusal]]:
        """Take the named messages out of their leases."""
        names = parse_names(names)
        refused = [Refusal(ack_id, error) for ack_id, error in names.bad]
        claims: list[Claim] = []
        for group in names.groups:
            lease, error = self.find(group, consumer)
            held = BitMap64()
            if lease is not None:
                held = self.leases.take_out(lease, BitMap64(group.offsets))
                claims.append(Claim(lease.stream, lease.consumer, held, taken_at_us=lease.taken_at_us))
            if len(held) != len(group.offsets):
                late = self._judge_rest(group, held, error, refused)
                if late:
                    claims.append(Claim(group.name.stream, "", late, is_late=True))
        return [claim for claim in claims if claim.offsets], refused

    def find(
        self, group: NamedOffsets, consumer: str | None = None
    ) -> tuple[Lease | None, SparrowError | None]:
        """The lease of a group of ids, or why there is none; no error means it has ended."""
        name = group.name
        if name.subscription_id != self.subscription_id:
            return None, InvalidAckId("the ack id belongs to another subscription")
        if name.session != self.session:
            return None, StaleAckId("the broker was restarted since the message was handed over")
        if name.number >= self.leases.next_number:
            return None, InvalidAckId("the ack id names a lease that was never made")
        lease = self.leases.by_number.get(name.number)
        if lease is not None and consumer is not None and lease.consumer != consumer:
            return None, InvalidAckId("the message was handed to another consumer")
        return lease, None

    def _judge_rest(
        self,
        group: NamedOffsets,
        held: BitMap64,
        error: SparrowError | None,
        refused: list[Refusal],
    ) -> BitMap64:
        """Refuse what no lease holds, and return what a late ack is honoured for."""
        late = BitMap64()
        seen = BitMap64()
        for offset, ack_id in zip(group.offsets, group.ids, strict=True):
            if offset in held and offset not in seen:
                seen.add(offset)
            elif error is not None:
                refused.append(Refusal(ack_id, error))
            elif self._honours(group, offset) and offset not in late and offset not in held:
                late.add(offset)
            else:
                refused.append(Refusal(ack_id, StaleAckId("the lease of the message has ended")))
        return late

    def _honours(self, group: NamedOffsets, offset: int) -> bool:
        """Whether a late ack counts: nobody holds the message and nothing was decided about it."""
        if not self.honours_late:
            return False
        track = self.tracks.get(group.name.stream)
        if track is None or group.name.number < self.fence or offset >= track.read_offset:
            return False
        if track.cursor.is_acked(offset) or track.is_settling(offset):
            return False
        if track.cursor.failure(offset).verdict:
            return False
        return self.leases.find(track.stream, offset) is None
