"""Token buckets: nothing lost, nothing too much, and large batches pass."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.bucket import Bucket

SECOND_US = 1_000_000
rates = st.floats(0.01, 1e6).map(lambda rate: round(rate * 1e6) / 1e6)
steps = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 3 * SECOND_US)), max_size=60)


def test_a_full_bucket_serves_its_burst_at_once() -> None:
    bucket = Bucket(10, 5, 0)
    assert [bucket.take(1, 0) for _ in range(5)] == [0] * 5
    assert bucket.take(1, 0) > 0


def test_the_wait_it_names_is_enough_and_not_a_microsecond_too_long() -> None:
    bucket = Bucket(3, 1, 0)
    bucket.spend(2, 0)
    wait_us = bucket.wait_us(0)
    assert bucket.take(1, wait_us - 1) > 0
    assert bucket.take(1, wait_us) == 0


def test_a_batch_larger_than_the_burst_passes_and_the_next_one_pays() -> None:
    bucket = Bucket(10, 5, 0)
    assert bucket.take(100, 0) == 0
    assert bucket.level(0) == -95
    assert bucket.take(1, 0) == 9_500_001


def test_nothing_is_taken_by_one_who_must_wait() -> None:
    bucket = Bucket(1, 1, 0)
    bucket.spend(1, 0)
    before = bucket.level(0)
    bucket.take(1000, 0)
    assert bucket.level(0) == before


def test_taking_nothing_never_waits() -> None:
    bucket = Bucket(1, 1, 0)
    bucket.spend(10, 0)
    assert bucket.take(0, 0) == 0


def test_a_reserve_is_left_to_others() -> None:
    bucket = Bucket(10, 10, 0)
    bucket.spend(5, 0)
    assert bucket.wait_us(0, reserve=5) > 0
    assert bucket.wait_us(0) == 0


def test_a_reserve_of_the_whole_burst_still_lets_one_pass_when_full() -> None:
    assert Bucket(10, 10, 0).wait_us(0, reserve=10) == 0


def test_a_negative_reserve_is_an_overdraft() -> None:
    bucket = Bucket(10, 10, 0)
    bucket.spend(15, 0)
    assert bucket.wait_us(0, reserve=-10) == 0
    assert bucket.wait_us(0, reserve=-5) > 0


def test_a_changed_rate_counts_from_the_change_on() -> None:
    bucket = Bucket(1, 100, 0)
    bucket.spend(100, 0)
    bucket.change(10, 100, 10 * SECOND_US)
    assert bucket.level(10 * SECOND_US) == 10
    assert bucket.level(11 * SECOND_US) == 20


def test_a_smaller_burst_cuts_what_was_saved() -> None:
    bucket = Bucket(1, 100, 0)
    bucket.change(1, 10, 0)
    assert bucket.level(0) == 10


def test_a_clock_that_runs_backwards_gives_nothing() -> None:
    bucket = Bucket(1000, 10, SECOND_US)
    bucket.spend(10, SECOND_US)
    assert bucket.level(0) == 0
    assert bucket.level(SECOND_US) == 0


def test_it_is_as_good_as_new_when_left_alone() -> None:
    bucket = Bucket(10, 10, 0)
    bucket.spend(10, 0)
    assert not bucket.is_full(SECOND_US - 1)
    assert bucket.is_full(SECOND_US)


@given(rate=rates, burst=st.integers(1, 1000), schedule=steps)
def test_no_more_is_granted_than_burst_and_rate_and_one_batch(
    rate: float, burst: int, schedule: list[tuple[int, int]]
) -> None:
    bucket, now_us, granted, largest = Bucket(rate, burst, 0), 0, 0, 0
    for tokens, passed_us in schedule:
        now_us += passed_us
        if bucket.take(tokens, now_us) == 0:
            granted += tokens
            largest = max(largest, tokens)
            allowed = burst + Fraction(round(rate * 1e6), 10**6) * now_us / SECOND_US + largest
            assert granted <= allowed


@given(rate=rates, tokens=st.integers(1, 100), looks=st.lists(st.integers(1, 10_000), max_size=50))
def test_one_who_comes_when_told_gets_the_exact_rate(rate: float, tokens: int, looks: list[int]) -> None:
    bucket, now_us, granted = Bucket(rate, 1, 0), 0, 0
    exact = Fraction(round(rate * 1e6), 10**6)
    in_a_microsecond = exact / SECOND_US
    for look_us in looks:
        wait_us = bucket.take(tokens, now_us)
        granted += tokens if wait_us == 0 else 0
        bucket.level(now_us + min(look_us, wait_us))  # looking in between loses no fraction
        now_us += wait_us
        assert granted >= exact * now_us / SECOND_US - in_a_microsecond


@given(rate=rates, cuts=st.lists(st.integers(0, SECOND_US), max_size=100))
def test_asking_often_accrues_as_much_as_asking_once(rate: float, cuts: list[int]) -> None:
    often, once = Bucket(rate, 1e9, 0), Bucket(rate, 1e9, 0)
    often.spend(10**9, 0)
    once.spend(10**9, 0)
    now_us = 0
    for cut_us in cuts:
        now_us += cut_us
        often.level(now_us)
    assert often.level(now_us) == once.level(now_us)
