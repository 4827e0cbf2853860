"""A timetable is never early and forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.schedule import NEVER_US, Timetable
from sparrow.model.message import StreamId

A, B = StreamId(1, 0), StreamId(2, 0)


def test_what_is_due_comes_out_at_its_moment() -> None:
    times = Timetable()
    times.put(A, [1, 2], 100)
    times.put(B, [1], 50)
    assert times.next_due_us() == 50
    assert times.take_due(99) == [(B, 1)]
    assert times.take_due(100) == [(A, 1), (A, 2)]
    assert times.next_due_us() == NEVER_US


def test_a_new_moment_replaces_the_old_one() -> None:
    times = Timetable()
    times.put(A, [1], 100)
    times.put(A, [1], 200)
    assert times.take_due(150) == []
    assert times.take_due(200) == [(A, 1)]


def test_what_is_cancelled_does_not_come() -> None:
    times = Timetable()
    times.put(A, [1, 2], 100)
    times.put(B, [3], 70)
    times.cancel(A, [1, 9])
    times.clear(B)
    assert (times.count, times.next_due_us()) == (1, 100)
    assert times.take_due(500) == [(A, 2)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=30), st.integers(0, 50))
def test_it_does_what_a_dictionary_would(puts: list[tuple[int, int]], now_us: int) -> None:
    times, naive = Timetable(), {}
    for offset, due_us in puts:
        times.put(A, [offset], due_us)
        naive[offset] = due_us
    assert times.next_due_us() == min(naive.values(), default=NEVER_US)
    due = {offset for offset, at_us in naive.items() if at_us <= now_us}
    assert {offset for _, offset in times.take_due(now_us)} == due
    assert times.count == len(naive) - len(due)
