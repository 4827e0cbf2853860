"""Lanes: order within, freedom between."""

from __future__ import annotations

from sparrow.kernel.ordering import ENTRY_SHIFT, SHARED, Lanes


def lanes(keys: str, window: int = 1) -> Lanes:
    """Entries 0, 1, 2 … in the lanes that the letters name."""
    made = Lanes(window)
    made.enter(range(len(keys)), keys, 0)
    return made


def test_strict_is_one_outstanding_message_a_lane() -> None:
    some = lanes("aabab")
    assert some.take(9, "c") == [0, 2]
    assert some.take(9, "c") == []
    some.finish([2])
    assert some.take(9, "c") == [4]
    some.finish([0])
    assert some.take(9, "c") == [1]


def test_a_failed_message_holds_up_its_own_lane_only() -> None:
    some = lanes("aabb")
    some.take(9, "c")
    assert some.fail([0]) == []
    some.finish([2])
    assert some.take(9, "c") == [3]
    some.release([0])
    assert some.take(9, "c") == [0]


def test_a_window_stays_on_one_consumer_while_anything_is_outstanding() -> None:
    some = lanes("aaaa", window=2)
    assert some.take(9, "ann") == [0, 1]
    some.finish([0])
    assert some.take(9, "bob") == []
    assert some.take(9, "ann") == [2]
    some.finish([1, 2])
    assert some.take(9, "bob") == [3]


def test_a_failure_in_a_window_names_the_later_ones() -> None:
    some = lanes("aaaa", window=3)
    assert some.take(9, "ann") == [0, 1, 2]
    assert some.fail([1]) == [2]
    some.put_back([2])
    assert some.take(9, "ann") == []
    some.release([1])
    assert some.take(9, "bob") == []
    assert some.take(9, "ann") == [1, 2]


def test_put_back_messages_go_to_anyone_when_nothing_is_outstanding() -> None:
    some = lanes("aaa", window=2)
    some.take(9, "ann")
    some.put_back([0, 1])
    some.drop_consumer("ann")
    assert some.take(9, "bob") == [0, 1]


def test_a_held_message_that_enters_holds_up_those_behind_it() -> None:
    some = Lanes()
    some.hold([0])
    some.enter([0, 1], "aa", 0)
    assert some.take(9, "c") == []
    some.release([0])
    assert some.take(9, "c") == [0]


def test_an_older_message_that_comes_again_goes_before_newer_ones() -> None:
    some = lanes("xaaa")
    some.finish([1])
    some.enter([1], ["a"], 0)
    some.finish([0])
    assert some.take(9, "c") == [1]


def test_lanes_queue_by_the_priority_of_their_first_message() -> None:
    some = Lanes()
    some.prioritise(1, 5)
    some.prioritise(2, -5)
    some.enter(range(3), "abc", 0)
    assert [some.take(1, "x") for _ in range(3)] == [[1], [0], [2]]


def test_over_several_streams_the_rank_decides() -> None:
    some = Lanes()
    other = 1 << ENTRY_SHIFT
    for entry, rank in ((0, 100), (1, 300), (other, 200)):
        some.rank(entry, rank)
    some.enter([0, 1], "**", SHARED)
    some.enter([other], "*", SHARED)
    order = []
    for _ in range(3):
        (entry,) = some.take(9, "c")
        order.append(entry)
        some.finish([entry])
    assert order == [0, other, 1]


def test_only_the_homes_that_are_named_are_served() -> None:
    some = Lanes()
    some.enter([0], ["a"], 0)
    some.enter([1 << ENTRY_SHIFT], ["b"], 1)
    assert some.take(9, "c", homes={1}) == [1 << ENTRY_SHIFT]


def test_a_stream_that_goes_takes_its_messages_along() -> None:
    some = Lanes()
    some.enter([0, 1 << ENTRY_SHIFT], "**", SHARED)
    some.clear(0)
    assert some.take(9, "c") == [1 << ENTRY_SHIFT]
    assert some.count == 1


def test_nothing_is_kept_of_lanes_that_are_done() -> None:
    some = lanes("abcabc")
    while taken := some.take(9, "c"):
        some.finish(taken)
    assert some.count == 0
    assert not some._lanes
    assert not some._held
