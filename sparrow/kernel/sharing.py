"""Sharing: of what is ready, how many messages a member that pulls may take now.

Members of a shared group pull when they like and for as much as they like. A share is cut by *filling
up*: every member that is counted on gets messages up to one common level, less what it has had already
(round robin: messages served; least loaded: messages in flight), and never more than it asks for and
has room for. What one cannot use is the others'. So of nine ready messages three members get three
each, in whatever order they pull, and of thousands a third each, in one go.

Only members that will take their share soon are counted on, so that nobody waits for somebody who does
not come: those whose pull is under way, and those seen a moment ago (``idle_us``; only ``busy_us`` for
one that works on what it has). The full, the suspended, and those that were offered something and could
take nothing are not counted on. Whoever asks always is.

History is short. A member is owed one pull of its own size at most, and whoever comes back starts
level with the others: neither an old lead nor an old debt starves anybody. All of it is volatile.

A question costs O(members · log members), whatever the number of messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sparrow.kernel.schedule import NEVER_US
from sparrow.model.errors import MemberNotFound
from sparrow.model.group import GroupStrategy

IDLE_US = 1_000_000
"""How long a member without work is counted on after it was seen."""
BUSY_US = 100_000
"""The same for one that has messages in flight: it pulls again when it is done with them."""
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0
_NEARLY = 1e-6
"""Shares are fractions; one that is whole up to this is whole."""


@dataclass(slots=True)
class _Seat:
    max_in_flight: int
    level: float
    """Messages served, over the weight: the one with the lowest is next."""
    wanted: int
    seen_at_us: int
    weight: float = 1.0
    is_pulling: bool = False
    passed_until_us: int = 0
    """It was offered something and could take nothing; not counted on until then."""
    suspended_until_us: int = 0


class _Claim(NamedTuple):
    """What a member may have more: from its level on, by its weight, at most ``room``."""

    level: float
    weight: float
    room: int

    def at(self, level: float) -> float:
        """How much it gets when all are filled up to a level."""
        return min(float(self.room), max(0.0, (level - self.level) * self.weight))


class Sharing:
    """Who gets how many; see the module's text."""

    __slots__ = ("_busy_us", "_idle_us", "_in_flight_of", "_seats", "strategy")

    def __init__(
        self,
        strategy: GroupStrategy,
        in_flight_of: Callable[[str], int],
        *,
        idle_us: int = IDLE_US,
        busy_us: int = BUSY_US,
    ) -> None:
        """``in_flight_of`` is asked for the messages that a member has leased."""
        self.strategy = strategy
        self._in_flight_of = in_flight_of
        self._idle_us = idle_us
        self._busy_us = busy_us
        self._seats: dict[str, _Seat] = {}

    # Members.

    def add(self, member_id: str, max_in_flight: int, now_us: int) -> None:
        """A member joined, or came back; it is counted on from now."""
        self._seats.pop(member_id, None)
        seat = _Seat(max_in_flight, 0.0, max_in_flight, now_us)
        self._level_out(seat, now_us)
        self._seats[member_id] = seat

    def remove(self, member_id: str) -> None:
        """A member is gone."""
        self._seats.pop(member_id, None)

    def set_weight(self, member_id: str, weight: float) -> None:
        """Its share beside the others' 1.0; less for one that is slow."""
        self._seat(member_id).weight = min(WEIGHT_MAX, max(WEIGHT_MIN, weight))

    def suspend(self, member_id: str, until_us: int) -> None:
        """It gets nothing until then, because it fails; a time that has passed ends that."""
        self._seat(member_id).suspended_until_us = until_us

    # Pulls.

    def pull_began(self, member_id: str, wanted: int, now_us: int) -> None:
        """A pull is under way: the member takes messages as soon as it may."""
        self._see(member_id, wanted, now_us).is_pulling = True

    def pull_ended(self, member_id: str, now_us: int) -> None:
        """The pull was answered, timed out or broke off; without effect for who is gone."""
        seat = self._seats.get(member_id)
        if seat is not None:
            seat.is_pulling = False
            seat.seen_at_us = max(seat.seen_at_us, now_us)

    def allowance(self, member_id: str, wanted: int, deliverable: int, now_us: int) -> int:
        """How many of the ``deliverable`` messages the member may take now."""
        seat = self._see(member_id, wanted, now_us)
        limit = min(wanted, deliverable, seat.max_in_flight - self._in_flight_of(member_id))
        if limit <= 0 or now_us < seat.suspended_until_us:
            return 0
        others = {name: other for name, other in self._seats.items() if other is not seat}
        counted = [name for name, other in others.items() if self._is_counted_on(name, other, now_us)]
        claims = self._claims([*counted, member_id])
        if sum(claim.room for claim in claims) <= deliverable:
            return limit
        share = claims[-1].at(_fill(claims, deliverable))
        return min(limit, math.ceil(share - _NEARLY))

    def served(self, member_id: str, count: int, now_us: int) -> None:
        """It was handed so many; 0 when it had an allowance and there was nothing that it could take."""
        seat = self._seat(member_id)
        seat.seen_at_us = max(seat.seen_at_us, now_us)
        seat.passed_until_us = 0 if count else now_us + self._idle_us
        seat.level += count / seat.weight

    def settled(self, member_id: str, now_us: int) -> None:
        """It settled something; one that has nothing left will pull soon. Without effect if gone."""
        seat = self._seats.get(member_id)
        if seat is not None and self._in_flight_of(member_id) == 0:
            seat.seen_at_us = max(seat.seen_at_us, now_us)

    def turns(self) -> list[str]:
        """The members whose pulls are under way, in the order in which to serve them."""
        pulling = [name for name, seat in self._seats.items() if seat.is_pulling]
        return sorted(pulling, key=lambda name: (self._level(name), name))

    def next_wakeup_us(self, now_us: int) -> int:
        """When time alone will change what a pull under way may take."""
        if not any(seat.is_pulling for seat in self._seats.values()):
            return NEVER_US
        times = [NEVER_US]
        for name, seat in self._seats.items():
            if seat.suspended_until_us > now_us:
                times.append(seat.suspended_until_us)
            elif not seat.is_pulling and self._is_counted_on(name, seat, now_us):
                times.append(self._counted_until_us(name, seat))
        return min(times)

    # How it decides.

    def _seat(self, member_id: str) -> _Seat:
        seat = self._seats.get(member_id)
        if seat is None:
            raise MemberNotFound(f"the group has no member {member_id!r}")
        return seat

    def _see(self, member_id: str, wanted: int, now_us: int) -> _Seat:
        seat = self._seat(member_id)
        if not seat.is_pulling and now_us >= self._counted_until_us(member_id, seat):
            self._level_out(seat, now_us)
        seat.wanted = wanted
        seat.seen_at_us = max(seat.seen_at_us, now_us)
        return seat

    def _counted_until_us(self, member_id: str, seat: _Seat) -> int:
        return seat.seen_at_us + (self._busy_us if self._in_flight_of(member_id) else self._idle_us)

    def _is_counted_on(self, member_id: str, seat: _Seat, now_us: int) -> bool:
        if now_us < seat.suspended_until_us or now_us < seat.passed_until_us:
            return False
        if seat.max_in_flight <= self._in_flight_of(member_id):
            return False
        return seat.is_pulling or now_us < self._counted_until_us(member_id, seat)

    def _level_out(self, seat: _Seat, now_us: int) -> None:
        """Who comes back is neither behind nor ahead of everybody who is there."""
        there = [
            other.level
            for name, other in self._seats.items()
            if other is not seat and self._is_counted_on(name, other, now_us)
        ]
        if there:
            seat.level = min(max(there), max(min(there), seat.level))

    def _level(self, member_id: str) -> float:
        seat = self._seats[member_id]
        if self.strategy is GroupStrategy.LEAST_LOADED:
            return self._in_flight_of(member_id) / seat.weight
        return seat.level

    def _claims(self, names: list[str]) -> list[_Claim]:
        if self.strategy is not GroupStrategy.LEAST_LOADED:
            self._forgive(self._seats[name] for name in names)
        claims = []
        for name in names:
            seat = self._seats[name]
            room = min(seat.wanted, seat.max_in_flight - self._in_flight_of(name))
            claims.append(_Claim(self._level(name), seat.weight, room))
        return claims

    def _forgive(self, seats: Iterable[_Seat]) -> None:
        """A member is owed one pull of its own size at most."""
        counted = list(seats)
        highest = max(seat.level for seat in counted)
        for seat in counted:
            owed = min(seat.wanted, seat.max_in_flight) / seat.weight
            seat.level = max(seat.level, highest - owed)


def _fill(claims: list[_Claim], total: int) -> float:
    """The level up to which ``total`` fills all claims, which have room for more than that."""
    bends = [(claim.level, claim.weight) for claim in claims if claim.room > 0]
    bends += [(c.level + c.room / c.weight, -c.weight) for c in claims if c.room > 0]
    bends.sort()
    level, slope, left = bends[0][0], 0.0, float(total)
    for at, change in bends:
        if left <= (at - level) * slope:
            break
        left -= (at - level) * slope
        level = at
        slope += change
    return level + left / slope if slope > _NEARLY else level
