"""What clients of a simulated group know: who sits in it, its generations, what they committed.

A *seat* is what one process got from one ``join``. Its client knows when it last said that it lives, so it
knows when it is surely a member, when it surely is none any more, and when nobody knows. From that follows:

* nobody is handed what a sure member holds, and in a partitioned group nothing of a partition of which a
  sure member holds anything; unless that one had the whole ``drain_timeout_s`` to let go
* whoever is surely gone, or was fenced, is refused; whoever surely sits is not told to join again
* a hand-over failed, perhaps, when its member may have been removed
* generations only grow, and a new life of the broker uses no number of an earlier one again
* the committed offset of a partition is the newest one that was confirmed, or one under way beside it
"""

from __future__ import annotations

from typing import Any

from sparrow.model.group import GroupMode
from sparrow.model.message import Delivered, StreamId
from sparrow.model.subscription import SubscriptionPolicy
from sparrow.testing.simmodel import Broken, Handed, Item, SubscriptionModel, World

_LATE_US = 200_000
"""A member that was silent for so long beyond its time is gone for sure."""


class Seat:
    """One membership, from one join to the next."""

    def __init__(self, label: str, name: str, life: int, *, is_automatic: bool, now_us: int) -> None:
        self.label = label
        self.name = name
        self.life = life
        self.is_automatic = is_automatic
        """Signs of life come by themselves."""
        self.heard_at_us = now_us
        """The last sign of life that surely arrived."""
        self.tried_at_us = now_us
        """The last one that may have arrived."""
        self.is_fenced = False
        """Another process has its name."""
        self.has_left = False
        self.is_unsure = False
        """Something happened after which its client cannot tell whether it sits still."""

    def __repr__(self) -> str:
        return self.label


class Note:
    """A commit that was asked for."""

    def __init__(self, offset: int, metadata: str, asked_at: int) -> None:
        self.offset = offset
        self.metadata = metadata
        self.asked_at = asked_at
        self.ended_at: int | None = None
        """None while it is under way, or when nobody heard of its end."""
        self.is_confirmed = False

    def __repr__(self) -> str:
        return f"{self.offset} {self.metadata!r}"


class GroupModel(SubscriptionModel):
    """A subscription that a group shares."""

    def __init__(self, world: World, name: str, pattern: str, policy: SubscriptionPolicy) -> None:
        super().__init__(world, name, pattern, policy)
        self.seats: dict[str, Seat] = {}
        self.generation = 0
        """The highest that anybody has seen."""
        self._generations: dict[int, int] = {}
        """The highest seen in each life."""
        self._sitting: dict[str, Seat] = {}
        self._notes: dict[StreamId, list[Note]] = {}
        self._committed: dict[StreamId, tuple[int, int]] = {}
        """Up to which offset everything is done, by a commit that was confirmed at a tick."""
        self._out: dict[StreamId, list[Handed]] = {}

    @property
    def is_partitioned(self) -> bool:
        return self.policy.group.mode is GroupMode.PARTITIONED

    @property
    def session_timeout_s(self) -> float:
        """The longest that it ever had."""
        return max(policy.group.session_timeout_s for policy in self.policies)

    def _patience_us(self) -> int:
        """Who is silent for so long may be removed: as dead, or because it did not accept a generation."""
        limits = [min(p.group.session_timeout_s, p.group.rebalance_timeout_s) for p in self.policies]
        return round(min(limits) * 1_000_000)

    # Members.

    def joins(self, name: str) -> None:
        """A process is about to join; whoever has the name is fenced."""
        before = self._sitting.pop(name, None)
        if before is not None and before.life == self._world.life:
            before.is_unsure = before.is_unsure or self.may_be_gone(before)
            before.is_fenced = True

    def joined(self, name: str, *, is_automatic: bool) -> Seat:
        label = f"{self.name}/{name}#{len(self.seats)}"
        now_us = self._world.clock.now_us()
        seat = Seat(label, name, self._world.life, is_automatic=is_automatic, now_us=now_us)
        self.seats[label] = self._sitting[name] = seat
        return seat

    def heard(self, seat: Seat, at_us: int) -> None:
        """A sign of life that was given at a time has surely arrived."""
        seat.heard_at_us = max(seat.heard_at_us, at_us)

    def leaves(self, seat: Seat) -> None:
        """It says goodbye: what it holds is free, and no attempt is counted, unless it was removed before."""
        seat.is_unsure = seat.is_unsure or self.may_be_gone(seat)
        seat.has_left = True
        self._let_go(seat)

    def crashes(self, seat: Seat) -> None:
        """No more signs of life; the last one may be half a heartbeat old."""
        if seat.is_automatic:
            seat.is_automatic = False
            now_us = self._world.clock.now_us()
            longest_s = max(policy.group.heartbeat_s for policy in self.policies)
            seat.heard_at_us = now_us - round(longest_s * 1_000_000)
            seat.tried_at_us = now_us

    def clock_was_set(self) -> None:
        """Sessions may have ended at once, or last longer."""
        for seat in self.seats.values():
            seat.is_unsure = True

    def _let_go(self, seat: Seat) -> None:
        for item in self.items.values():
            for handed in item.handed:
                if handed.consumer == seat.label:
                    handed.is_over = True

    def may_be_gone(self, seat: Seat) -> bool:
        """Whether it may have been removed in its life, as silent or by another of its name."""
        if seat.is_unsure or seat.is_fenced:
            return True
        latest_us = self._world.latest_in(seat.life)
        return not seat.is_automatic and latest_us >= seat.heard_at_us + self._patience_us()

    def is_surely_gone(self, seat: Seat) -> bool:
        """Whether whatever it asks for must be refused."""
        if seat.is_fenced or seat.has_left:
            return True
        silent_us = self._world.clock.now_us() - seat.tried_at_us
        is_dead = silent_us > round(self.session_timeout_s * 1_000_000) + _LATE_US
        return is_dead and not seat.is_automatic and not seat.is_unsure

    def saw_generation(self, generation: int, *, is_served: bool) -> None:
        """A member has taken up a generation; or has also been handed messages in it."""
        life = self._world.life
        earlier = max((seen for at, seen in self._generations.items() if at < life), default=-1)
        if generation < earlier or (is_served and self.is_partitioned and generation <= earlier):
            raise Broken(f"{self.name} is in generation {generation}, after {earlier} in an earlier life")
        self._generations[life] = max(generation, self._generations.get(life, 0))
        self.generation = max(generation, self.generation)

    # Handing over.

    def delivered(self, message: Delivered, consumer: str, began: int) -> Item:
        item = super().delivered(message, consumer, began)
        handed = item.handed[-1]
        handed.taken_at_us = message.deadline_us - round(self.policy.ack_deadline_s * 1_000_000)
        self._out.setdefault(item.place.stream, []).append(handed)
        end_offset, tick = self._committed.get(item.place.stream, (0, 0))
        if item.place.offset < end_offset and began > tick and not self.is_changing:
            raise self._broken(item, f"was handed over after a commit of {end_offset} was confirmed")
        return item

    def _may_have_failed(self, handed: Handed) -> bool:
        if super()._may_have_failed(handed):
            return True
        seat = self.seats.get(handed.consumer)
        if seat is None or seat.has_left:
            return seat is not None and seat.is_unsure
        return self.may_be_gone(seat)

    def _is_held(self, handed: Handed) -> bool:
        if not super()._is_held(handed) or self._may_be_expelled(handed.taken_at_us):
            return False
        seat = self.seats.get(handed.consumer)
        return seat is None or not self.may_be_gone(seat)

    def _may_be_expelled(self, taken_at_us: int) -> bool:
        """A partition that moves waits for its owner: from the lease on, for this long at least."""
        if not self.is_partitioned:
            return False
        shortest_s = min(policy.group.drain_timeout_s for policy in self.policies)
        return self._world.clock.latest_us >= taken_at_us + round(shortest_s * 1_000_000)

    def _check_alone(self, item: Item, consumer: str) -> None:
        seat = self.seats.get(consumer)
        if seat is not None and self.may_be_gone(seat):
            return  # It was removed, perhaps, while this was on its way to it.
        super()._check_alone(item, consumer)
        if not self.is_partitioned or not self.is_strict:
            return
        stream = item.place.stream
        out = self._out[stream] = [handed for handed in self._out.get(stream, ()) if self._is_held(handed)]
        for handed in out:
            if handed.consumer != consumer:
                raise self._broken(
                    item, f"was handed to {consumer} while {handed.consumer} held messages of its partition"
                )

    # Commits.

    def note_asked(self, stream: StreamId, offset: int, metadata: str) -> Note:
        note = Note(offset, metadata, self._world.next_tick())
        self._notes.setdefault(stream, []).append(note)
        return note

    def note_confirmed(self, stream: StreamId, note: Note, resets: int) -> None:
        """Durable. What it did counts unless a seek or a replay came between."""
        note.is_confirmed, note.ended_at = True, self._world.next_tick()
        notes = self._notes[stream]
        self._notes[stream] = [n for n in notes if n.ended_at is None or n.ended_at >= note.asked_at]
        if resets == self.resets and note.offset >= self._committed.get(stream, (0, 0))[0]:
            self._committed[stream] = note.offset, note.ended_at

    def note_refused(self, stream: StreamId, note: Note) -> None:
        self._notes[stream].remove(note)

    def in_doubt(self, ends: dict[StreamId, int]) -> None:
        self._committed.clear()
        super().in_doubt(ends)

    def replay_asked(self) -> None:
        self._committed.clear()
        super().replay_asked()

    def check_notes(self, found: dict[StreamId, tuple[int, str]], *, is_final: bool) -> None:
        """What the broker says was committed; when nothing is under way, that is what is known from now."""
        for stream in {*found, *self._notes}:
            notes = self._notes.get(stream, [])
            read = found.get(stream)
            fits = [note for note in notes if (note.offset, note.metadata) == read]
            if not fits and (read is not None or any(note.is_confirmed for note in notes)):
                raise Broken(f"{self.name}: the commit of {stream} is {read}, and not one of {notes}")
            if is_final:
                self._notes[stream] = fits
                for note in fits:
                    note.is_confirmed, note.ended_at = True, self._world.next_tick()

    def check_floors(self, delivery: Any) -> None:
        """Everything below a confirmed commit is done."""
        for stream, (offset, _) in self._committed.items():
            floor = delivery.cursor(stream).floor
            if floor < offset:
                raise Broken(
                    f"{self.name}: {offset} of {stream} was committed, and all is done up to {floor}"
                )
