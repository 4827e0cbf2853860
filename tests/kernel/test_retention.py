"""What retention lets go: whole segments, from the front, and never what somebody needs."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.retention import expired_segments
from sparrow.model.message import StreamId
from sparrow.model.segment import SegmentInfo
from sparrow.model.topic import TopicPolicy

SECOND = 1_000_000
A, B = StreamId(1, 0), StreamId(1, 1)
FOREVER = TopicPolicy(retention_s=None)


def segment(
    stream: StreamId, first: int, end: int, *, last_s: float = 0, size: int = 100, rows: int | None = None
) -> SegmentInfo:
    last_us = int(last_s * SECOND)
    return SegmentInfo(stream, first, end, end - first if rows is None else rows, size, last_us, last_us)


def gone(
    segments: list[SegmentInfo],
    policy: TopicPolicy,
    *,
    now_s: float = 100,
    needed: Mapping[StreamId, int] | None = None,
) -> list[tuple[StreamId, int]]:
    found = expired_segments(segments, policy, int(now_s * SECOND), needed or {})
    return [(one.stream, one.first_offset) for one in found]


def line(stream: StreamId, count: int, start_s: float = 0, size: int = 100) -> list[SegmentInfo]:
    """Segments of ten messages, one a second."""
    return [segment(stream, n * 10, n * 10 + 10, last_s=start_s + n, size=size) for n in range(count)]


def test_without_limits_nothing_goes() -> None:
    assert gone(line(A, 5), FOREVER, now_s=1e9) == []


def test_no_segments_lose_nothing() -> None:
    assert gone([], TopicPolicy(retention_s=1.0, retention_bytes=1, retention_messages=1)) == []


# Age.


def test_a_segment_goes_when_its_last_message_has_reached_the_age() -> None:
    policy = TopicPolicy(retention_s=10.0)
    assert gone(line(A, 5), policy, now_s=12) == [(A, 0), (A, 10), (A, 20)]


def test_a_segment_stays_a_microsecond_before_its_age() -> None:
    policy = TopicPolicy(retention_s=10.0)
    assert gone([segment(A, 0, 10, last_s=5)], policy, now_s=15 - 1e-6) == []
    assert gone([segment(A, 0, 10, last_s=5)], policy, now_s=15) == [(A, 0)]


def test_age_may_take_the_last_segment_too() -> None:
    assert len(gone(line(A, 3), TopicPolicy(retention_s=1.0), now_s=100)) == 3


def test_age_is_judged_by_stream() -> None:
    segments = [*line(A, 3), *line(B, 3, start_s=50)]
    assert gone(segments, TopicPolicy(retention_s=10.0), now_s=30) == [(A, 0), (A, 10), (A, 20)]


# Bytes and count.


def test_bytes_above_the_limit_go_oldest_first_over_all_partitions() -> None:
    segments = [*line(A, 3), *line(B, 3, start_s=0.5)]
    policy = TopicPolicy(retention_s=None, retention_bytes=300)
    assert gone(segments, policy) == [(A, 0), (B, 0), (A, 10)]


def test_bytes_at_the_limit_stay() -> None:
    assert gone(line(A, 3), TopicPolicy(retention_s=None, retention_bytes=300)) == []
    assert gone(line(A, 3), TopicPolicy(retention_s=None, retention_bytes=299)) == [(A, 0)]


def test_messages_above_the_limit_go_oldest_first_over_all_partitions() -> None:
    segments = [*line(A, 2), *line(B, 2, start_s=10)]
    policy = TopicPolicy(retention_s=None, retention_messages=25)
    assert gone(segments, policy) == [(A, 0), (A, 10)]


def test_messages_are_counted_by_rows_and_not_by_offsets() -> None:
    holed = [segment(A, 0, 1000, rows=5, last_s=0), segment(A, 1000, 1010, last_s=1)]
    assert gone(holed, TopicPolicy(retention_s=None, retention_messages=15)) == []


def test_no_more_goes_than_brings_the_topic_under_its_limit() -> None:
    segments = [segment(A, 0, 10, size=1000, last_s=0), *[segment(A, n, n + 10, last_s=n) for n in (10, 20)]]
    assert gone(segments, TopicPolicy(retention_s=None, retention_bytes=500)) == [(A, 0)]


# Acked by all.


def test_what_a_subscription_needs_stays_whatever_the_limits_say() -> None:
    policy = TopicPolicy(retention_s=1.0, retention_bytes=1, retention_messages=1, retain_until_acked=True)
    assert gone(line(A, 3), policy, needed={A: 0}) == []
    assert gone(line(A, 3), policy, needed={A: 15}) == [(A, 0)]
    assert gone(line(A, 3), policy, needed={A: 20}) == [(A, 0), (A, 10)]


def test_a_segment_whose_last_message_is_needed_stays() -> None:
    policy = TopicPolicy(retention_s=1.0, retain_until_acked=True)
    assert gone(line(A, 1), policy, needed={A: 9}) == []
    assert gone(line(A, 1), policy, needed={A: 10}) == [(A, 0)]


def test_without_retain_until_acked_limits_win_over_needs() -> None:
    assert gone(line(A, 2), TopicPolicy(retention_s=1.0), needed={A: 0}) == [(A, 0), (A, 10)]


def test_a_stream_that_nobody_reads_is_needed_by_nobody() -> None:
    policy = TopicPolicy(retention_s=1.0, retain_until_acked=True)
    assert gone([*line(A, 1), *line(B, 1)], policy, needed={A: 0}) == [(B, 0)]


def test_acked_messages_stay_as_long_as_no_limit_wants_them_gone() -> None:
    policy = TopicPolicy(retention_s=None, retain_until_acked=True)
    assert gone(line(A, 3), policy, needed={A: 30}) == []


def test_a_stream_that_is_held_back_makes_the_others_pay_for_the_size() -> None:
    policy = TopicPolicy(retention_s=None, retention_bytes=200, retain_until_acked=True)
    segments = [*line(A, 2), *line(B, 2, start_s=10)]
    assert gone(segments, policy, needed={A: 0}) == [(B, 0), (B, 10)]


# Order and mixtures.


def test_a_segment_behind_one_that_stays_stays_too() -> None:
    late_first = [segment(A, 0, 10, last_s=95), segment(A, 10, 20, last_s=96)]
    assert gone(late_first, TopicPolicy(retention_s=10.0), now_s=100) == []


def test_clocks_that_went_back_leave_no_hole() -> None:
    """The front segment is younger than the one behind it; dropping by age alone would tear a hole."""
    segments = [segment(A, 0, 10, last_s=99), segment(A, 10, 20, last_s=1)]
    assert gone(segments, TopicPolicy(retention_s=10.0), now_s=100) == []


def test_whichever_limit_is_reached_first_decides() -> None:
    policy = TopicPolicy(retention_s=98.5, retention_bytes=250)
    assert gone(line(A, 4), policy, now_s=100) == [(A, 0), (A, 10)]
    older = TopicPolicy(retention_s=97.5, retention_bytes=350)
    assert gone(line(A, 4), older, now_s=100) == [(A, 0), (A, 10), (A, 20)]


def test_the_order_in_which_segments_are_named_does_not_matter() -> None:
    segments = [*line(A, 3), *line(B, 3, start_s=0.5)]
    policy = TopicPolicy(retention_s=None, retention_bytes=300)
    assert gone(segments[::-1], policy) == gone(segments, policy)


# For every topic there may be.

streams = st.sampled_from([A, B])


@st.composite
def topics(draw: st.DrawFn) -> list[SegmentInfo]:
    found = []
    for stream in (A, B):
        at = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 6))):
            at += draw(st.sampled_from([0, 0, 0, 3]))
            count = draw(st.integers(1, 10))
            last_s = draw(st.integers(0, 100))
            found.append(segment(stream, at, at + count, last_s=last_s, size=draw(st.integers(1, 300))))
            at += count
    return draw(st.permutations(found))


policies = st.builds(
    TopicPolicy,
    retention_s=st.none() | st.integers(1, 120).map(float),
    retention_bytes=st.none() | st.integers(1, 1500),
    retention_messages=st.none() | st.integers(1, 80),
    retain_until_acked=st.booleans(),
)
needs = st.dictionaries(streams, st.integers(0, 80))


@given(topics(), policies, needs)
def test_what_goes_is_the_front_of_each_stream(
    segments: list[SegmentInfo], policy: TopicPolicy, needed: dict[StreamId, int]
) -> None:
    doomed = expired_segments(segments, policy, 100 * SECOND, needed)
    assert len(set(doomed)) == len(doomed)
    for stream in (A, B):
        ordered = sorted(s.first_offset for s in segments if s.stream == stream)
        lost = sorted(s.first_offset for s in doomed if s.stream == stream)
        assert lost == ordered[: len(lost)]


@given(topics(), policies, needs)
def test_what_a_subscription_needs_never_goes(
    segments: list[SegmentInfo], policy: TopicPolicy, needed: dict[StreamId, int]
) -> None:
    doomed = expired_segments(segments, policy, 100 * SECOND, needed)
    if policy.retain_until_acked:
        for one in doomed:
            assert one.stream not in needed or one.end_offset <= needed[one.stream]


@given(topics(), policies)
def test_nothing_goes_without_a_reason(segments: list[SegmentInfo], policy: TopicPolicy) -> None:
    """Taking back the last one dropped would break a limit: its age, or the topic's size or count."""
    doomed = expired_segments(segments, policy, 100 * SECOND, {})
    for last in doomed:
        is_old = (
            policy.retention_s is not None and last.last_time_us + policy.retention_s * SECOND <= 100 * SECOND
        )
        before = doomed[: doomed.index(last)]
        rest = [s for s in segments if s not in before]
        over_bytes = (
            policy.retention_bytes is not None and sum(s.size_bytes for s in rest) > policy.retention_bytes
        )
        over_rows = (
            policy.retention_messages is not None and sum(s.rows for s in rest) > policy.retention_messages
        )
        assert is_old or over_bytes or over_rows


@given(topics(), policies)
def test_when_nobody_needs_anything_size_and_count_end_within_their_limits(
    segments: list[SegmentInfo], policy: TopicPolicy
) -> None:
    doomed = expired_segments(segments, policy, 100 * SECOND, {})
    rest = [s for s in segments if s not in doomed]
    if policy.retention_bytes is not None:
        assert sum(s.size_bytes for s in rest) <= policy.retention_bytes
    if policy.retention_messages is not None:
        assert sum(s.rows for s in rest) <= policy.retention_messages
