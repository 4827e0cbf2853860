"""Bounded labels: who has one keeps it, and the sum of the rest never falls."""

from __future__ import annotations

from sparrow.kernel.labels import Labels, Remainder


def test_the_oldest_have_labels_and_a_free_place_goes_to_a_new_one() -> None:
    labels = Labels(2)
    labels.update([1, 2, 3])
    assert [labels.has(each) for each in (1, 2, 3)] == [True, True, False]
    labels.update([2, 3])
    assert not labels.has(3), "what was summed up stays so, or its sum would fall"
    labels.update([2, 3, 4])
    assert labels.has(4)
    assert not labels.has(3)


def test_without_places_nobody_has_one() -> None:
    labels = Labels(0)
    labels.update([1])
    assert not labels.has(1)


def test_the_sum_of_the_rest_keeps_what_the_gone_had_counted() -> None:
    rest = Remainder(2)
    rest.update({1: (10, 1), 2: (5, 0)})
    assert rest.totals == [15, 1]
    rest.update({2: (7, 0)})
    assert rest.totals == [17, 1]
    rest.update({2: (7, 0), 3: (1, 1)})
    assert rest.totals == [18, 2]
