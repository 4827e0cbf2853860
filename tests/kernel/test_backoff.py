"""How long a failed message waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.backoff import wait_us
from sparrow.model.subscription import RetryPolicy

EXACT = RetryPolicy(jitter=0.0)


def test_the_ladder_is_at_once_then_times_four_up_to_five_minutes() -> None:
    waits_s = [wait_us(EXACT, failures, 0.5) / 1e6 for failures in range(1, 9)]
    assert waits_s == [0, 1, 4, 16, 64, 256, 300, 300]


def test_any_number_of_failures_stays_at_the_upper_bound() -> None:
    assert wait_us(EXACT, 10_000, 0.0) == 300_000_000


@given(st.integers(2, 50), st.floats(0, 1), st.floats(0, 1))
def test_jitter_never_leaves_the_bounds(failures: int, share: float, jitter: float) -> None:
    wait = wait_us(RetryPolicy(jitter=share), failures, jitter)
    assert 1_000_000 <= wait <= 300_000_000


def test_jitter_moves_a_wait_to_both_sides() -> None:
    policy = RetryPolicy(jitter=0.5)
    assert [wait_us(policy, 3, jitter) for jitter in (0.0, 0.5, 1.0)] == [2_000_000, 4_000_000, 6_000_000]


def test_without_immediate_retries_the_first_one_waits() -> None:
    assert wait_us(RetryPolicy(jitter=0.0, immediate_retries=0), 1, 0.0) == 1_000_000


@pytest.mark.parametrize(("failures", "jitter"), [(0, 0.0), (1, 1.5), (1, -0.1)])
def test_a_wrong_call_is_a_bug(failures: int, jitter: float) -> None:
    with pytest.raises(AssertionError):
        wait_us(EXACT, failures, jitter)
