"""Cursors against a naive model: a set of what is done and a dictionary of failures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pyroaring import BitMap64

from sparrow.kernel.cursor import HISTORY_MAX, Attempt, Cursor
from sparrow.kernel.facts import FailureKind
from sparrow.model.errors import DataDamaged, DataDirectoryNewer

numbers = st.sets(st.integers(0, 60), max_size=12)
ENTRY = Attempt(FailureKind.NACKED, 5, "ann", "no")
END = 80


class CursorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cursor = Cursor()
        self.done: set[int] = set()
        self.fails: dict[int, int] = {}

    def forget(self) -> None:
        self.fails = {o: n for o, n in self.fails.items() if o not in self.done}

    @rule(some=numbers)
    def ack(self, some: set[int]) -> None:
        self.cursor.ack(BitMap64(some))
        self.done |= some
        self.forget()

    @rule(start=st.integers(0, 60), size=st.integers(0, 30))
    def ack_range(self, start: int, size: int) -> None:
        self.cursor.ack_range(start, min(END, start + size))
        self.done |= set(range(start, min(END, start + size)))
        self.forget()

    @rule(end=st.integers(0, 60))
    def ack_to(self, end: int) -> None:
        self.cursor.ack_to(end)
        self.done |= set(range(end))
        self.forget()

    @rule(some=numbers)
    def take_back(self, some: set[int]) -> None:
        self.cursor.take_back(BitMap64(some))
        self.done -= some
        self.fails = {o: n for o, n in self.fails.items() if o not in some}

    @rule(floor=st.integers(0, 60), above=numbers)
    def seek(self, floor: int, above: set[int]) -> None:
        self.cursor.seek(floor, BitMap64(above))
        self.done = set(range(floor)) | above
        self.fails = {}

    @rule(some=numbers, attempt=st.integers(1, 4))
    def fail(self, some: set[int], attempt: int) -> None:
        self.cursor.fail(BitMap64(some), attempt, ENTRY, 9)
        for offset in some - self.done:
            self.fails[offset] = max(attempt, self.fails.get(offset, 0))

    @rule(floor=st.integers(0, 60), above=numbers)
    def merge(self, floor: int, above: set[int]) -> None:
        other = Cursor()
        other.seek(floor, BitMap64(above))
        self.cursor.merge(other)
        self.done |= set(range(floor)) | above
        self.forget()
        assert self.cursor.covers(other)

    @rule()
    def store(self) -> None:
        raw = self.cursor.to_bytes()
        self.cursor = Cursor.from_bytes(raw)
        assert self.cursor.to_bytes() == raw

    @rule()
    def copy(self) -> None:
        twin = self.cursor.copy()
        assert twin == self.cursor
        self.cursor.ack_to(1)
        self.done.add(0)
        self.forget()
        self.cursor, twin = twin, self.cursor
        self.cursor.ack_to(1)
        assert twin == self.cursor

    @invariant()
    def it_knows_what_is_done(self) -> None:
        assert [o for o in range(END) if self.cursor.is_acked(o)] == sorted(self.done)
        assert set(self.cursor.unacked(0, END)) == set(range(END)) - self.done
        assert self.cursor.unacked_count(END) == END - len(self.done)

    @invariant()
    def the_floor_is_the_first_that_is_not_done(self) -> None:
        assert self.cursor.floor == next(o for o in range(END + 1) if o not in self.done)
        assert not self.cursor.above or self.cursor.above.min() > self.cursor.floor

    @invariant()
    def it_knows_what_failed(self) -> None:
        found = {o: f.attempts for o, f in (self.cursor.failures or {}).items()}
        assert found == self.fails
        assert set(self.cursor.failed) == set(self.fails)


TestCursor = CursorMachine.TestCase
TestCursor.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(numbers, max_size=6))
def test_equal_cursors_have_equal_bytes_whatever_way_they_went(steps: list[set[int]]) -> None:
    one, other = Cursor(), Cursor()
    for step in steps:
        one.ack(BitMap64(step))
    for step in reversed(steps):
        for offset in sorted(step, reverse=True):
            other.ack_range(offset, offset + 1)
    assert one == other
    assert one.to_bytes() == other.to_bytes()


def test_dense_cursors_have_equal_bytes_whatever_way_they_went() -> None:
    offsets = random.Random(1).sample(range(200_000), 100_000)
    one, other = Cursor(), Cursor()
    one.ack(BitMap64(offsets))
    for at in range(0, len(offsets), 1000):
        other.ack(BitMap64(offsets[at : at + 1000]))
    assert one.to_bytes() == other.to_bytes()


def test_covering_is_not_symmetric() -> None:
    low, high = Cursor(5), Cursor(3)
    high.ack(BitMap64([4, 7]))
    assert not low.covers(high)
    assert not high.covers(low)
    high.ack(BitMap64([3]))
    assert high.covers(low)


def test_a_failure_is_remembered_once_however_often_it_is_told() -> None:
    cursor = Cursor()
    for _ in range(3):
        cursor.fail(BitMap64([4]), 1, ENTRY, 9)
    assert cursor.failure(4).attempts == 1
    assert len(cursor.failure(4).history) == 1
    assert cursor.attempt(4) == 2


def test_the_history_is_bounded_and_the_count_goes_on() -> None:
    cursor = Cursor()
    for attempt in range(1, 2 * HISTORY_MAX):
        cursor.fail(BitMap64([4]), attempt, ENTRY, 9)
    assert cursor.failure(4).attempts == 2 * HISTORY_MAX - 1
    assert len(cursor.failure(4).history) == HISTORY_MAX


def test_messages_that_failed_alike_share_one_record() -> None:
    cursor = Cursor()
    cursor.fail(BitMap64(range(100)), 1, ENTRY, 9)
    assert cursor.failures is not None
    assert len({id(failure) for failure in cursor.failures.values()}) == 1


def test_taking_back_for_a_replay_keeps_the_round() -> None:
    cursor = Cursor(10)
    cursor.take_back(BitMap64([4]), round=2)
    assert cursor.floor == 4
    assert cursor.failure(4).round == 2
    assert cursor.attempt(4) == 1
    cursor.fail(BitMap64([4]), 1, ENTRY, 9)
    assert cursor.failure(4).round == 2


def test_a_backlog_of_ten_million_costs_a_few_bytes() -> None:
    cursor = Cursor()
    cursor.ack_range(5_000_000, 10_000_000)
    assert len(cursor.to_bytes()) < 50


@pytest.mark.parametrize("raw", [b"", b"\xff\x00", b"\x95\x01\xff\x90\xc4\x00\x90"])
def test_a_damaged_cursor_is_refused(raw: bytes) -> None:
    with pytest.raises(DataDamaged):
        Cursor.from_bytes(raw)


def test_a_newer_cursor_is_refused() -> None:
    raw = bytearray(Cursor(7).to_bytes())
    raw[1] = 2
    with pytest.raises(DataDirectoryNewer):
        Cursor.from_bytes(bytes(raw))


def test_the_bytes_of_a_cursor_stay_as_they_are() -> None:
    cursor = Cursor(7)
    cursor.ack(BitMap64([9, 10]))
    cursor.fail(BitMap64([8]), 1, ENTRY, 9)
    assert cursor.to_bytes().hex() == "95010792090bc400919208950109a00091940105a3616e6ea26e6f"
