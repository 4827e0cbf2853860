"""Publisher sequences at ingress: what arrives out of order is held and let through in order.

A publisher numbers its messages within a topic, from 0 or from where it goes on. The next number
goes through at once, and with it whatever was held behind it. A number ahead is held until the gap
before it closes or has lasted its timeout; then the gap is skipped. A number that went through, or
was skipped, is a repeat and dropped. Held messages are bounded for each publisher and in total: at a
bound the gap is skipped early rather than memory spent.

What was let through last is durable elsewhere (every stored batch carries publisher and sequence);
``restore`` tells it after a restart. What was held is lost with its publishers' receipts outstanding,
so they send it again. Publishers that have been quiet longest are forgotten at ``publishers_max``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

NEVER_US = 2**63 - 1


class SequenceLimits(NamedTuple):
    """The bounds of one sequencer."""

    gap_timeout_us: int = 5_000_000
    held_per_publisher_max: int = 1000
    held_max: int = 100_000
    publishers_max: int = 100_000


class Sequenced(NamedTuple, Generic[Item]):
    """What became of an arrival: messages to let through now, in order, and what was noticed."""

    released: list[Item]
    is_held: bool = False
    is_repeat: bool = False
    skipped: int = 0
    """Sequence numbers given up: they are repeats from now on."""


class _Publisher(Generic[Item]):
    __slots__ = ("gap_since_us", "held", "next_sequence", "order")

    def __init__(self, next_sequence: int) -> None:
        self.next_sequence = next_sequence
        self.held: dict[int, tuple[Item, int]] = {}
        """What is held and how many numbers it covers, by its first one."""
        self.order: list[int] = []
        self.gap_since_us = NEVER_US


class Sequencer(Generic[Item]):
    """The sequences of the publishers of one topic."""

    __slots__ = ("_gaps", "_held", "_limits", "_publishers")

    def __init__(self, limits: SequenceLimits | None = None) -> None:
        self._limits = limits or SequenceLimits()
        self._publishers: OrderedDict[Hashable, _Publisher[Item]] = OrderedDict()
        self._gaps: list[tuple[int, int, Hashable]] = []
        self._held = 0

    @property
    def held(self) -> int:
        """Messages held at present, over all publishers."""
        return self._held

    def restore(self, publisher: Hashable, last_sequence: int) -> None:
        """The store holds this publisher's messages up to ``last_sequence``."""
        state = self._publishers.get(publisher)
        if state is None:
            self._remember(publisher, last_sequence + 1)
        else:
            state.next_sequence = max(state.next_sequence, last_sequence + 1)

    def offer(
        self, publisher: Hashable, sequence: int, item: Item, now_us: int, length: int = 1
    ) -> Sequenced[Item]:
        """A message, or a batch of ``length``, arrived under its first number. An unknown publisher goes
        on from whatever number it sends first."""
        state = self._publishers.get(publisher)
        if state is None:
            state = self._remember(publisher, sequence)
        self._publishers.move_to_end(publisher)
        if sequence < state.next_sequence or sequence in state.held:
            return Sequenced([], is_repeat=True)
        if sequence == state.next_sequence:
            state.next_sequence += length
            return Sequenced([item, *self._drain(publisher, state, now_us)])
        self._hold(publisher, state, sequence, (item, length), now_us)
        if self._is_full(state):
            released, skipped = self._skip_gap(publisher, state, now_us)
            return Sequenced(released, is_held=sequence in state.held, skipped=skipped)
        return Sequenced([], is_held=True)

    def expire(self, now_us: int) -> list[tuple[Hashable, Sequenced[Item]]]:
        """Skip the gaps that have lasted too long; returns what that lets through."""
        found: list[tuple[Hashable, Sequenced[Item]]] = []
        while self.next_wakeup_us() <= now_us:
            _, _, publisher = heapq.heappop(self._gaps)
            state = self._publishers[publisher]
            released, skipped = self._skip_gap(publisher, state, now_us)
            found.append((publisher, Sequenced(released, skipped=skipped)))
        return found

    def next_wakeup_us(self) -> int:
        """When ``expire`` will next find something."""
        while self._gaps:
            due_us, since_us, publisher = self._gaps[0]
            state = self._publishers.get(publisher)
            if state is not None and state.held and state.gap_since_us == since_us:
                return due_us
            heapq.heappop(self._gaps)
        return NEVER_US

    def _remember(self, publisher: Hashable, next_sequence: int) -> _Publisher[Item]:
        state = self._publishers[publisher] = _Publisher(next_sequence)
        if len(self._publishers) > self._limits.publishers_max:
            quiet = next((name for name, p in self._publishers.items() if not p.held), None)
            if quiet is not None and quiet != publisher:
                del self._publishers[quiet]
        return state

    def _hold(
        self,
        publisher: Hashable,
        state: _Publisher[Item],
        sequence: int,
        held: tuple[Item, int],
        now_us: int,
    ) -> None:
        state.held[sequence] = held
        heapq.heappush(state.order, sequence)
        self._held += 1
        if state.gap_since_us == NEVER_US:
            self._note_gap(publisher, state, now_us)

    def _note_gap(self, publisher: Hashable, state: _Publisher[Item], now_us: int) -> None:
        state.gap_since_us = now_us
        heapq.heappush(self._gaps, (now_us + self._limits.gap_timeout_us, now_us, publisher))

    def _is_full(self, state: _Publisher[Item]) -> bool:
        limits = self._limits
        return len(state.held) > limits.held_per_publisher_max or self._held > limits.held_max

    def _skip_gap(self, publisher: Hashable, state: _Publisher[Item], now_us: int) -> tuple[list[Item], int]:
        skipped = state.order[0] - state.next_sequence
        state.next_sequence = state.order[0]
        return self._drain(publisher, state, now_us), skipped

    def _drain(self, publisher: Hashable, state: _Publisher[Item], now_us: int) -> list[Item]:
        """What is next, and next after that; the timeout of a further gap starts now."""
        released: list[Item] = []
        while state.order and state.order[0] == state.next_sequence:
            item, length = state.held.pop(heapq.heappop(state.order))
            released.append(item)
            state.next_sequence += length
        self._held -= len(released)
        if not state.held:
            state.gap_since_us = NEVER_US
        elif released:
            self._note_gap(publisher, state, now_us)
        return released
