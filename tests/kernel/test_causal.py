"""Messages wait for what they depend on, and for nothing else."""

from __future__ import annotations

from pyroaring import BitMap64

from sparrow.kernel.causal import Dependencies
from sparrow.model.message import MessageId, StreamId

A, B = StreamId(1, 0), StreamId(2, 0)


def test_a_message_is_free_when_the_last_of_its_needs_is_done() -> None:
    waits = Dependencies()
    waits.add((A, 9), [MessageId(*A, 1), MessageId(*B, 4)])
    assert waits.resolve(A, BitMap64([0, 1])) == []
    assert waits.missing((A, 9)) == [(B, 4)]
    assert waits.resolve(B, BitMap64([4])) == [(A, 9)]
    assert waits.count == 0


def test_many_may_wait_for_one() -> None:
    waits = Dependencies()
    for offset in (5, 6):
        waits.add((A, offset), [MessageId(*A, 1)])
    assert waits.resolve(A, BitMap64([1])) == [(A, 5), (A, 6)]


def test_a_message_does_not_wait_for_itself() -> None:
    waits = Dependencies()
    waits.add((A, 5), [MessageId(*A, 5)])
    assert waits.count == 0


def test_naming_a_need_twice_is_naming_it_once() -> None:
    waits = Dependencies()
    waits.add((A, 5), [MessageId(*A, 1), MessageId(*A, 1)])
    assert waits.resolve(A, BitMap64([1])) == [(A, 5)]


def test_a_message_that_is_gone_is_not_freed() -> None:
    waits = Dependencies()
    waits.add((A, 5), [MessageId(*A, 1)])
    waits.cancel((A, 5))
    assert waits.resolve(A, BitMap64([1])) == []


def test_a_stream_that_goes_frees_those_who_waited_for_it() -> None:
    waits = Dependencies()
    waits.add((A, 5), [MessageId(*B, 1)])
    waits.add((B, 6), [MessageId(*A, 1)])
    assert waits.clear(B) == [(A, 5)]
    assert waits.count == 0
