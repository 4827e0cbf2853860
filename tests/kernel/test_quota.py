"""Quotas of publishers and tokens: counted against all or none, bulk waits first, memory is bounded."""

from __future__ import annotations

from sparrow.kernel.quota import Claim, PublisherLimits, Quota
from sparrow.model.flow import PublisherClass, RateLimit

SECOND_US = 1_000_000
NORMAL, BULK, CRITICAL = PublisherClass.NORMAL, PublisherClass.BULK, PublisherClass.CRITICAL
TEN = RateLimit(messages_per_s=10)


def test_each_publisher_has_a_quota_of_its_own() -> None:
    limits = PublisherLimits()
    assert limits.check([Claim("ann", TEN)], NORMAL, 20, 0, 0) == 0
    assert limits.check([Claim("ann", TEN)], NORMAL, 1, 0, 0) > 0
    assert limits.check([Claim("bob", TEN)], NORMAL, 1, 0, 0) == 0


def test_a_batch_counts_against_all_claims_or_none() -> None:
    limits = PublisherLimits()
    token = Claim(("token", "t"), TEN)
    limits.check([token], NORMAL, 11, 0, 0)
    assert limits.check([Claim("ann", TEN), token], NORMAL, 11, 0, 0) > 0
    assert limits.check([Claim("ann", TEN)], NORMAL, 10, 0, 0) == 0


def test_bytes_are_limited_as_messages_are() -> None:
    limits = PublisherLimits()
    claim = Claim("ann", RateLimit(bytes_per_s=1000))
    assert limits.check([claim], NORMAL, 1, 3000, 0) == 0
    assert limits.check([claim], NORMAL, 1, 1, 0) == 2 * SECOND_US + 1


def test_no_limit_costs_no_memory() -> None:
    limits = PublisherLimits()
    assert limits.check([Claim("ann", RateLimit())], NORMAL, 10**9, 10**9, 0) == 0
    assert len(limits) == 0


def test_idle_publishers_are_forgotten() -> None:
    limits = PublisherLimits()
    for number in range(1000):
        limits.check([Claim(number, TEN)], NORMAL, 1, 0, number * SECOND_US)
    assert len(limits) <= 3


def test_a_publisher_in_debt_is_not_forgotten_before_the_bound() -> None:
    limits = PublisherLimits(remembered_max=10)
    limits.check([Claim("ann", TEN)], NORMAL, 10_000, 0, 0)
    for number in range(9):
        limits.check([Claim(number, TEN)], NORMAL, 1, 0, number * SECOND_US)
    assert limits.check([Claim("ann", TEN)], NORMAL, 1, 0, 10 * SECOND_US) > 0


def test_what_is_remembered_is_bounded() -> None:
    limits = PublisherLimits(remembered_max=10)
    for number in range(1000):
        limits.check([Claim(number, TEN)], NORMAL, 1000, 0, 0)
    assert len(limits) == 10


def test_one_that_is_gone_is_forgotten_when_told() -> None:
    limits = PublisherLimits()
    limits.check([Claim("ann", TEN)], NORMAL, 1, 0, 0)
    limits.forget("ann")
    assert len(limits) == 0


def test_a_changed_limit_counts_at_once() -> None:
    limits = PublisherLimits()
    limits.check([Claim("ann", TEN)], NORMAL, 20, 0, 0)
    slow = limits.check([Claim("ann", TEN)], NORMAL, 1, 0, 0)
    fast = limits.check([Claim("ann", RateLimit(messages_per_s=1000))], NORMAL, 1, 0, 0)
    assert fast < slow / 50


def test_bulk_leaves_half_to_the_others_and_critical_may_overdraw() -> None:
    quota = Quota(TEN, 0)
    quota.spend(6, 0, 0)
    assert quota.wait_us(BULK, 0) > 0
    assert quota.wait_us(NORMAL, 0) == 0
    quota.spend(6, 0, 0)
    assert quota.wait_us(NORMAL, 0) > 0
    assert quota.wait_us(CRITICAL, 0) == 0
    quota.spend(1000, 0, 0)
    assert quota.wait_us(CRITICAL, 0) > 0


def test_alone_bulk_gets_the_whole_rate() -> None:
    quota, now_us, sent = Quota(TEN, 0), 0, 0
    while now_us < 100 * SECOND_US:
        wait_us = quota.wait_us(BULK, now_us)
        if wait_us == 0:
            quota.spend(1, 0, now_us)
            sent += 1
        now_us += wait_us
    assert 1000 <= sent <= 1011
