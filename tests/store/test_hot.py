"""The hot window: places of unsealed batches, by offset and by file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.model.message import StreamId
from sparrow.store.entry import Header, Kind
from sparrow.store.hot import HotStream, HotWindow, Place


def header(base: int, count: int, file: int = 1, position: int = 64) -> Header:
    return Header(Kind.BATCH, 0, 0, 0, 0, count, 1, 0, 1, base, 0, 0, 0, 0, file, position, 0, 0)


def stream_of(*batches: tuple[int, int, int, int], start: int = 0, sealed_end: int = 0) -> HotStream:
    stream = HotStream(start, sealed_end)
    for base, count, file, position in batches:
        stream.add(header(base, count, file, position))
    return stream


THREE = ((0, 10, 1, 64), (10, 5, 1, 900), (15, 1, 2, 64))


def test_a_new_stream_starts_and_ends_where_its_sealed_part_ends() -> None:
    stream = HotStream(5, 40)
    assert (stream.start_offset, stream.sealed_end, stream.end_offset, stream.next_offset) == (5, 40, 40, 40)
    assert stream.first_hot_offset == 40
    assert len(stream) == 0
    assert list(stream.places_from(40)) == []


def test_a_batch_moves_the_end_when_it_becomes_readable() -> None:
    stream = stream_of(*THREE)
    assert (stream.end_offset, stream.next_offset, stream.first_hot_offset, len(stream)) == (16, 16, 0, 3)


def test_the_next_offset_may_run_ahead_of_the_end() -> None:
    stream = stream_of(*THREE)
    stream.next_offset = 30
    stream.add(header(16, 4, 2, 500))
    assert (stream.end_offset, stream.next_offset) == (20, 30)


def test_a_batch_below_the_end_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="offset order"):
        stream_of(*THREE).add(header(15, 2))


@pytest.mark.parametrize(
    ("offset", "first_base"), [(0, 0), (9, 0), (10, 10), (14, 10), (15, 15), (16, 15), (99, 15)]
)
def test_reading_starts_at_the_batch_that_holds_the_offset(offset: int, first_base: int) -> None:
    assert next(stream_of(*THREE).places_from(offset)).base_offset == first_base


def test_reading_before_the_first_hot_batch_starts_with_it() -> None:
    stream = stream_of((40, 5, 3, 64), sealed_end=40)
    assert list(stream.places_from(0)) == [Place(40, 3, 64)]


def test_places_come_in_order_to_the_end() -> None:
    assert list(stream_of(*THREE).places_from(12)) == [Place(10, 1, 900), Place(15, 2, 64)]


def test_the_places_of_finished_files_are_those_up_to_their_number() -> None:
    stream = stream_of(*THREE)
    assert stream.places_through(0) == []
    assert stream.places_through(1) == [Place(0, 1, 64), Place(10, 1, 900)]
    assert len(stream.places_through(2)) == 3


def test_dropping_files_leaves_the_rest_and_moves_the_border() -> None:
    stream = stream_of(*THREE)
    stream.drop_files_through(1, 15)
    assert (stream.sealed_end, stream.first_hot_offset, stream.end_offset) == (15, 15, 16)
    assert list(stream.places_from(0)) == [Place(15, 2, 64)]


def test_dropping_all_files_leaves_an_empty_window_at_the_end() -> None:
    stream = stream_of(*THREE)
    stream.drop_files_through(2, 16)
    assert (len(stream), stream.first_hot_offset, stream.sealed_end) == (0, 16, 16)


def test_the_border_never_goes_back() -> None:
    stream = stream_of(*THREE, sealed_end=0)
    stream.drop_files_through(2, 16)
    stream.drop_files_through(2, 3)
    assert stream.sealed_end == 16


def test_retention_moves_the_start_forward_only() -> None:
    stream = stream_of((40, 5, 3, 64), sealed_end=40)
    stream.drop_before(20)
    assert stream.start_offset == 20
    stream.drop_before(10)
    assert stream.start_offset == 20
    stream.drop_before(40)
    assert (stream.start_offset, len(stream)) == (40, 1)


def test_retention_of_what_is_not_sealed_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="only sealed"):
        stream_of((40, 5, 3, 64), sealed_end=40).drop_before(41)


def test_a_window_keeps_streams_apart_and_forgets_whole_topics() -> None:
    window = HotWindow()
    for topic, partition in ((1, 0), (1, 1), (2, 0)):
        window.open(StreamId(topic, partition), sealed_end=topic)
    window.forget_topic(1)
    assert window.get(StreamId(1, 0)) is None
    assert [stream for stream, _ in window] == [StreamId(2, 0)]
    assert window.get(StreamId(2, 0)).end_offset == 2


def test_a_batch_costs_24_bytes() -> None:
    stream = HotStream()
    arrays = (stream._bases, stream._files, stream._positions)
    assert sum(part.itemsize for part in arrays) == 24


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 1)), max_size=20),
    st.integers(0, 150),
    st.integers(0, 22),
)
def test_any_offset_is_found_as_a_plain_list_finds_it(
    batches: list[tuple[int, int, int]], offset: int, sealed_files: int
) -> None:
    stream, plain, at, file = HotStream(), [], 0, 1
    for position, (count, gap, rotation) in enumerate(batches):
        at, file = at + gap, file + rotation
        stream.add(header(at, count, file, position))
        plain.append((at, at + count, file, position))
        at += count
    sealed = [one for one in plain if one[2] <= sealed_files]
    hot = [one for one in plain if one[2] > sealed_files]
    stream.drop_files_through(sealed_files, sealed[-1][1] if sealed else 0)
    found = list(stream.places_from(offset))
    wanted = [one for one in hot if one[1] > offset]
    assert [tuple(place) for place in found][-len(wanted) or len(found) :] == [
        (b, f, p) for b, _, f, p in wanted
    ]
    assert len(found) <= len(wanted) + 1
