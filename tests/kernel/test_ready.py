"""Ready messages: the higher priority first, streams in turns, low offsets first."""

from __future__ import annotations

from pyroaring import BitMap64

from sparrow.kernel.ready import ReadySet, Taken
from sparrow.model.message import StreamId

A, B = StreamId(1, 0), StreamId(2, 0)


def ready(*puts: tuple[StreamId, list[int], int]) -> ReadySet:
    made = ReadySet()
    for stream, offsets, priority in puts:
        made.put(stream, BitMap64(offsets), priority)
    return made


def plain(taken: Taken) -> list[tuple[StreamId, list[int]]]:
    return [(stream, list(offsets)) for stream, offsets in taken]


def test_low_offsets_go_first() -> None:
    some = ready((A, [5, 6, 7], 0))
    some.put(A, BitMap64([1]))
    assert plain(some.take(2)) == [(A, [1, 5])]
    assert some.count == 2


def test_the_higher_priority_goes_first() -> None:
    some = ready((A, [1, 2], 0), (A, [9], 5), (B, [4], -5))
    assert plain(some.take(10)) == [(A, [9]), (A, [1, 2]), (B, [4])]
    assert some.count == 0


def test_streams_take_turns() -> None:
    some = ready((A, [1, 2, 3, 4], 0), (B, [1, 2, 3, 4], 0))
    assert {stream for _ in range(2) for stream, _ in some.take(2)} == {A, B}


def test_only_the_named_streams_are_served() -> None:
    some = ready((A, [1], 0), (B, [2], 0))
    assert plain(some.take(5, [B])) == [(B, [2])]
    assert plain(some.take(5, [B])) == []


def test_what_is_discarded_or_cleared_is_not_ready() -> None:
    some = ready((A, [1, 2], 0), (A, [3], 4), (B, [7], 0))
    assert list(some.discard(A, BitMap64([2, 3, 8]))) == [2, 3]
    assert some.holds(A, 1)
    assert not some.holds(A, 3)
    some.clear(A)
    assert plain(some.take(9)) == [(B, [7])]


def test_a_selection_can_be_taken_out_of_turn() -> None:
    some = ready((A, [1, 2, 3, 4], 0))
    assert list(some.take_only(A, BitMap64([2, 4, 6]), 1)) == [2]
    assert some.count == 3


def test_putting_twice_counts_once() -> None:
    some = ready((A, [1, 2], 0), (A, [2, 3], 0))
    assert some.count == 3
