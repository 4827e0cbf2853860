"""Sets of offsets against plain Python sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from sparrow.kernel.offsets import first_missing, is_run, pack, ranges, span, take_first, unpack
from sparrow.model.errors import DataDamaged

offset_sets = st.sets(st.integers(0, 300) | st.integers(2**40, 2**40 + 50))


@given(offset_sets)
def test_ranges_are_the_runs_of_the_set(numbers: set[int]) -> None:
    found = list(ranges(BitMap64(numbers)))
    assert {n for start, end in found for n in range(start, end)} == numbers
    assert all(a[1] < b[0] for a, b in pairwise(found))


@given(offset_sets, st.integers(0, 310))
def test_first_missing_is_the_first_that_is_not_there(numbers: set[int], start: int) -> None:
    expected = next(n for n in range(start, start + 400) if n not in numbers)
    assert first_missing(BitMap64(numbers), start) == expected


@given(offset_sets, st.integers(0, 400))
def test_taking_the_first_leaves_the_rest(numbers: set[int], count: int) -> None:
    offsets = BitMap64(numbers)
    taken = take_first(offsets, count)
    assert list(taken) == sorted(numbers)[:count]
    assert list(offsets) == sorted(numbers)[count:]


@given(offset_sets)
def test_a_packed_set_comes_back(numbers: set[int]) -> None:
    assert unpack(*pack(BitMap64(numbers))) == BitMap64(numbers)


@given(offset_sets)
def test_a_run_is_known_as_one(numbers: set[int]) -> None:
    expected = bool(numbers) and max(numbers) - min(numbers) + 1 == len(numbers)
    assert is_run(BitMap64(numbers)) == expected


@pytest.mark.parametrize(
    ("flat", "dense"), [((1,), b""), ((5, 5), b""), ((-1, 2), b""), ((0, 2**60), b""), ((), b"garbage")]
)
def test_a_packed_set_that_cannot_be_is_refused(flat: tuple[int, ...], dense: bytes) -> None:
    with pytest.raises(DataDamaged):
        unpack(flat, dense)


def test_an_empty_span_is_empty() -> None:
    assert not span(5, 5)
