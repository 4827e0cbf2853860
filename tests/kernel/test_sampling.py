"""Sampling by id: the same answer every time, nested sets, and shares that follow the lag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel import sampling
from sparrow.kernel.sampling import Sampler, kept
from sparrow.model.flow import SamplePolicy
from sparrow.model.message import StreamId

STREAM = StreamId(3, 0)
SECOND_US = 1_000_000
shares = st.floats(0, 1)
GOLDEN = [11, 15, 18, 20, 26, 35]


def test_all_are_kept_at_1_and_none_at_0() -> None:
    assert list(kept(STREAM, 5, 8, 1.0)) == [5, 6, 7]
    assert list(kept(STREAM, 5, 8, 0.0)) == []
    assert list(kept(STREAM, 8, 8, 0.5)) == []


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_kept(share: float) -> None:
    assert len(kept(STREAM, 0, 100_000, share)) == pytest.approx(100_000 * share, rel=0.05)


@given(st.integers(0, 2**62), st.integers(0, 300), shares, shares)
def test_kept_sets_are_nested_as_the_share_shrinks(first: int, count: int, one: float, two: float) -> None:
    less, more = sorted([one, two])
    assert kept(STREAM, first, first + count, less) <= kept(STREAM, first, first + count, more)


@given(st.integers(0, 2**40), st.integers(1, 300), st.integers(0, 300), shares)
def test_a_message_gets_the_same_answer_in_whatever_stretch(
    first: int, count: int, cut: int, share: float
) -> None:
    middle, end = first + min(cut, count), first + count
    parts = kept(STREAM, first, middle, share) | kept(STREAM, middle, end, share)
    assert parts == kept(STREAM, first, end, share)


def test_a_long_stretch_is_hashed_in_blocks_with_the_same_result() -> None:
    whole = kept(STREAM, 7, 200_007, 0.01)
    assert whole == kept(STREAM, 7, 100_000, 0.01) | kept(STREAM, 100_000, 200_007, 0.01)


def test_streams_are_sampled_independently() -> None:
    one, two = kept(StreamId(3, 0), 0, 10_000, 0.5), kept(StreamId(3, 1), 0, 10_000, 0.5)
    assert len(one & two) == pytest.approx(2500, rel=0.1)


def test_the_hash_is_what_it_was() -> None:
    """Nodes of different versions must agree, so the choice may not drift unnoticed."""
    assert list(kept(StreamId(1, 2), 0, 40, 0.2)) == GOLDEN
    assert sampling.mask(sampling.numbers_of(0, 4), 0.5).to_pylist() == [True, False, True, True]


def test_a_sampler_keeps_all_while_its_subscription_keeps_up() -> None:
    sampler = Sampler(SamplePolicy(lag_high_s=10))
    for second in range(60):
        assert sampler.observe(3 * SECOND_US, second * SECOND_US) == 1.0


def test_a_sampler_keeps_less_the_longer_it_lags_and_never_less_than_allowed() -> None:
    sampler = Sampler(SamplePolicy(lag_high_s=10, share_min=0.2))
    found = [sampler.observe(60 * SECOND_US, second * SECOND_US) for second in range(60)]
    assert found == sorted(found, reverse=True)
    assert 0.2 <= found[-1] <= 0.2 + 1 / sampling.SHARE_STEPS


def test_a_sampler_recovers_gradually_when_the_lag_is_gone() -> None:
    sampler = Sampler(SamplePolicy(lag_high_s=10))
    for second in range(30):
        sampler.observe(60 * SECOND_US, second * SECOND_US)
    found = [sampler.observe(0, second * SECOND_US) for second in range(30, 90)]
    assert found == sorted(found)
    assert found[0] < 0.1
    assert found[-1] == 1.0


def test_one_old_message_does_not_begin_sampling() -> None:
    sampler = Sampler(SamplePolicy(lag_high_s=10))
    sampler.observe(0, 0)
    sampler.observe(600 * SECOND_US, SECOND_US // 10)
    assert sampler.observe(0, SECOND_US // 5) == 1.0


def test_a_changed_policy_counts_from_now_on() -> None:
    sampler = Sampler(SamplePolicy(lag_high_s=100))
    sampler.change(SamplePolicy(lag_high_s=1))
    for second in range(60):
        sampler.observe(10 * SECOND_US, second * SECOND_US)
    assert sampler.share == pytest.approx(0.01, abs=0.02)
