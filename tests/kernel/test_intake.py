"""Order over several streams: a merge by publish time that never runs ahead of a stream it has not read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival
from sparrow.model.message import StreamId
from sparrow.model.subscription import parse_policy

A, B = StreamId(1, 0), StreamId(2, 0)


def delivery(**options: Any) -> Delivery:
    made = Delivery(7, parse_policy(options), session=5)
    for stream in (A, B):
        for fact in made.attach(stream, 0):
            made.apply(fact)
    return made


def offer(subject: Delivery, stream: StreamId, start: int, times: list[int]) -> None:
    publishers = [1] * len(times)
    arrival = Arrival(
        stream=stream,
        first_offset=start,
        end_offset=start + len(times),
        publishers=publishers,
        published_at_us=times,
    )
    subject.offer(arrival, 0)


def handed_over(subject: Delivery, count: int = 10) -> list[tuple[StreamId, int]]:
    over = subject.lease("ann", count, 0)
    found = [(run.stream, offset) for run in over.runs for offset in run.to_offsets()]
    for run in over.runs:
        for fact in subject.ack(run.ack_ids()).facts:
            subject.apply(fact)
    return found


@pytest.mark.parametrize("ordering", ["publisher", "total"])
def test_a_message_waits_for_a_stream_that_may_hold_an_earlier_one(ordering: str) -> None:
    subject = delivery(ordering=ordering)
    subject.set_horizon({A: 1, B: 1})
    offer(subject, A, 0, [20])
    assert handed_over(subject) == []
    assert [wish.stream for wish in subject.wanted(1)] == [B]
    offer(subject, B, 0, [10])
    assert [handed_over(subject) for _ in range(3)] == [[(B, 0)], [(A, 0)], []]


def test_nothing_beyond_the_horizon_is_read() -> None:
    subject = delivery(ordering="total")
    subject.set_horizon({A: 2, B: 0})
    (wish,) = subject.wanted(100)
    assert (wish.stream, wish.start_offset, wish.max_messages) == (A, 0, 2)
    offer(subject, A, 0, [1, 2])
    assert subject.wanted(100) == []


def test_a_full_read_ahead_does_not_keep_the_late_stream_from_being_read() -> None:
    subject = delivery(ordering="total", read_ahead=1)
    subject.set_horizon({A: 1, B: 1})
    offer(subject, A, 0, [20])
    assert [(wish.stream, wish.max_messages) for wish in subject.wanted(1)] == [(B, 1)]


def test_other_orders_have_no_horizon() -> None:
    assert not delivery(ordering="key").is_merged
    assert delivery(ordering="total").is_merged


@given(
    times=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([A, B])), max_size=30),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=10),
    window=st.integers(1, 3),
)
def test_the_merge_is_exact_however_it_is_read(
    times: list[tuple[int, StreamId]], steps: list[int], window: int
) -> None:
    """Messages of two logs, published in this order; each reading takes a few more of what is wanted."""
    logs: dict[StreamId, list[int]] = {A: [], B: []}
    clock, expected = 0, []
    for wait, stream in times:
        clock += wait + 1
        expected.append((stream, len(logs[stream])))
        logs[stream].append(clock)
    subject = delivery(ordering="total", key_window=window)
    found: list[tuple[StreamId, int]] = []
    turn = 0
    while len(found) < len(expected):
        subject.set_horizon({stream: len(log) for stream, log in logs.items()})
        before = len(found)
        for wish in subject.wanted(steps[turn % len(steps)]):
            count = min(wish.max_messages, steps[turn % len(steps)])
            offer(subject, wish.stream, wish.start_offset, logs[wish.stream][wish.start_offset :][:count])
        got = handed_over(subject)
        found += sorted(got, key=lambda place: logs[place[0]][place[1]])
        turn += 1
        assert len(found) > before or turn < 200, "nothing moves any more"
    assert found == expected
