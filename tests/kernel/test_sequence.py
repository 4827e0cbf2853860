"""Publisher sequences: out in order, gaps skipped in time, repeats dropped, memory bounded."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.sequence import NEVER_US, SequenceLimits, Sequencer

LIMITS = SequenceLimits(gap_timeout_us=100, held_per_publisher_max=3, held_max=5, publishers_max=3)


def sequencer(*numbers: int) -> Sequencer[int]:
    made: Sequencer[int] = Sequencer(LIMITS)
    for number in numbers:
        made.offer("p", number, number, 0)
    return made


def test_the_next_number_goes_through_at_once() -> None:
    some = sequencer()
    assert [some.offer("p", n, n, 0).released for n in (4, 5, 6)] == [[4], [5], [6]]


def test_what_came_early_goes_when_the_gap_closes() -> None:
    some = sequencer(0, 2, 3)
    assert some.held == 2
    assert some.offer("p", 1, 1, 0).released == [1, 2, 3]
    assert (some.held, some.next_wakeup_us()) == (0, NEVER_US)


def test_a_repeat_is_dropped() -> None:
    some = sequencer(0, 2)
    assert some.offer("p", 0, 0, 0).is_repeat
    assert some.offer("p", 2, 2, 0).is_repeat
    assert some.held == 1


def test_a_gap_is_skipped_after_its_timeout_and_not_before() -> None:
    some = sequencer(0, 3)
    assert some.next_wakeup_us() == 100
    assert some.expire(99) == []
    ((publisher, outcome),) = some.expire(100)
    assert (publisher, outcome.released, outcome.skipped) == ("p", [3], 2)
    assert some.offer("p", 1, 1, 101).is_repeat


def test_a_second_gap_has_its_own_time() -> None:
    some = sequencer(0, 2, 5)
    assert some.offer("p", 1, 1, 60).released == [1, 2]
    assert some.next_wakeup_us() == 160
    assert some.expire(159) == []
    assert some.expire(160)[0][1].released == [5]


def test_too_many_held_of_one_publisher_skip_the_gap_early() -> None:
    some = sequencer(0, 2, 3, 4)
    outcome = some.offer("p", 5, 5, 0)
    assert (outcome.released, outcome.skipped, outcome.is_held) == ([2, 3, 4, 5], 1, False)


def test_too_many_held_in_total_skip_the_gap_of_whoever_comes() -> None:
    some = sequencer(0, 2, 3, 4)
    some.offer("q", 0, 0, 0)
    for number in (2, 3):
        some.offer("q", number, number, 0)
    assert some.offer("q", 4, 4, 0).released == [2, 3, 4]
    assert some.held == 3


def test_what_the_store_holds_is_a_repeat_after_a_restart() -> None:
    some = sequencer()
    some.restore("p", 7)
    assert some.offer("p", 7, 7, 0).is_repeat
    assert some.offer("p", 9, 9, 0).is_held
    assert some.offer("p", 8, 8, 0).released == [8, 9]


def test_the_publisher_that_was_quiet_longest_is_forgotten() -> None:
    some = sequencer(0)
    for name in ("q", "r", "s"):
        some.offer(name, 0, 0, 0)
    assert not some.offer("p", 0, 0, 0).is_repeat
    assert some.offer("s", 0, 0, 0).is_repeat


@given(st.integers(0, 40), st.randoms(use_true_random=False))
def test_any_order_comes_out_in_order_and_once(count: int, chance: random.Random) -> None:
    some: Sequencer[int] = Sequencer()
    some.restore("p", -1)
    arrivals = [*range(count), *chance.choices(range(count), k=5)] if count else []
    chance.shuffle(arrivals)
    released = [item for n in arrivals for item in some.offer("p", n, n, 0).released]
    assert released == list(range(count))
    assert some.held == 0
