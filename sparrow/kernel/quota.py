"""Quotas: token buckets for messages and bytes, of a topic, a publisher or a token.

Classes share a quota in their order. Bulk is served only while the bucket is more than half full, normal
while it holds anything, critical may overdraw by some bursts: so when a quota is short, it is bulk
that waits. Alone, each class gets the whole rate. Within a class those who waited longest go first.

``PublisherLimits`` holds a quota for each key that a shell names. How many it remembers is bounded.
A bucket that has filled up again is as good as new, so such are forgotten first and nothing is
lost; at the bound the one that has been quiet longest goes, and its publisher gets a fresh burst.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sparrow.kernel.bucket import Bucket
from sparrow.model.flow import PublisherClass, RateLimit

REMEMBERED_MAX = 100_000


SENIORITY_BURSTS = 10
"""Bursts that one who has waited all its time may overdraw; debts are paid by those who come later."""


def class_wait_us(bucket: Bucket, kind: PublisherClass, now_us: int, seniority: float = 0.0) -> int:
    """How long a publisher of this class waits for a bucket that all classes share.

    ``seniority`` is the share of its time that it has waited: the longer, the earlier it is served.
    """
    if kind is PublisherClass.BULK:
        return bucket.wait_us(now_us, bucket.burst / 2 * (1.0 - seniority))
    overdraft = SENIORITY_BURSTS * seniority if kind is PublisherClass.NORMAL else SENIORITY_BURSTS
    return bucket.wait_us(now_us, -bucket.burst * overdraft)


class Quota:
    """One quota: messages and bytes together."""

    __slots__ = ("_buckets", "limit")

    def __init__(self, limit: RateLimit, now_us: int) -> None:
        self.limit = limit
        self._buckets = (
            _bucket(limit.messages_per_s, limit.burst_s, now_us),
            _bucket(limit.bytes_per_s, limit.burst_s, now_us),
        )

    def wait_us(self, kind: PublisherClass, now_us: int, seniority: float = 0.0) -> int:
        """How long a publisher waits before ``spend``; 0 is now."""
        buckets = [bucket for bucket in self._buckets if bucket is not None]
        return max((class_wait_us(bucket, kind, now_us, seniority) for bucket in buckets), default=0)

    def spend(self, count: int, size: int, now_us: int) -> None:
        """A batch passed."""
        for bucket, tokens in zip(self._buckets, (count, size), strict=True):
            if bucket is not None:
                bucket.spend(tokens, now_us)

    def is_full(self, now_us: int) -> bool:
        """Whether it is as good as new."""
        return all(bucket is None or bucket.is_full(now_us) for bucket in self._buckets)

    def change(self, limit: RateLimit, now_us: int) -> None:
        """Other rates from now on; debts stay, a quota that is new begins full."""
        rates = (limit.messages_per_s, limit.bytes_per_s)
        pairs = zip(self._buckets, rates, strict=True)
        messages, size = (_changed(bucket, rate, limit.burst_s, now_us) for bucket, rate in pairs)
        self._buckets = (messages, size)
        self.limit = limit


def _bucket(rate: float | None, burst_s: float, now_us: int) -> Bucket | None:
    return None if rate is None else Bucket(rate, max(1.0, rate * burst_s), now_us)


def _changed(bucket: Bucket | None, rate: float | None, burst_s: float, now_us: int) -> Bucket | None:
    if bucket is None or rate is None:
        return _bucket(rate, burst_s, now_us)
    bucket.change(rate, max(1.0, rate * burst_s), now_us)
    return bucket


class Claim(NamedTuple):
    """A quota that a publish counts against: whose, and how much is allowed."""

    key: Hashable
    """Such as ``("publisher", topic id, name)`` or ``("token", token id)``."""
    limit: RateLimit


class PublisherLimits:
    """The quotas of publishers and tokens."""

    __slots__ = ("_quotas", "_remembered_max")

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._quotas: OrderedDict[Hashable, Quota] = OrderedDict()
        self._remembered_max = remembered_max

    def __len__(self) -> int:
        return len(self._quotas)

    def check(self, claims: Sequence[Claim], kind: PublisherClass, count: int, size: int, now_us: int) -> int:
        """Count a batch against all claims and return 0, or against none and return the wait."""
        quotas = [self._quota(claim, now_us) for claim in claims if _is_limited(claim.limit)]
        wait_us = max((quota.wait_us(kind, now_us) for quota in quotas), default=0)
        if wait_us == 0:
            for quota in quotas:
                quota.spend(count, size, now_us)
        return wait_us

    def forget(self, key: Hashable) -> None:
        """A publisher or token is gone for good."""
        self._quotas.pop(key, None)

    def _quota(self, claim: Claim, now_us: int) -> Quota:
        quota = self._quotas.get(claim.key)
        if quota is None:
            self._make_room(now_us)
            quota = self._quotas[claim.key] = Quota(claim.limit, now_us)
        elif quota.limit != claim.limit:
            quota.change(claim.limit, now_us)
        self._quotas.move_to_end(claim.key)
        return quota

    def _make_room(self, now_us: int) -> None:
        """Two that are as good as new go for one that comes, so the idle ones never pile up."""
        for _ in range(2):
            if not self._quotas:
                return
            oldest = next(iter(self._quotas))
            if self._quotas[oldest].is_full(now_us) or len(self._quotas) >= self._remembered_max:
                del self._quotas[oldest]


def _is_limited(limit: RateLimit) -> bool:
    return limit.messages_per_s is not None or limit.bytes_per_s is not None
