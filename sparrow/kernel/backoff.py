"""How long a failed message waits before it is tried again.

The first retries go at once, then the wait grows by a factor from a lower to an upper bound:
0, 1 s, 4 s, 16 s, 64 s, 256 s, 300 s, 300 s … by default (queue.md C17). Jitter moves a wait to both
sides by a share of it and never past the bounds; where it comes from is the caller's business.
"""

from __future__ import annotations

from sparrow.model.subscription import RetryPolicy


def wait_us(policy: RetryPolicy, failures: int, jitter: float) -> int:
    """Microseconds to wait after failure number ``failures`` (from 1); ``jitter`` is in 0..1."""
    assert failures >= 1, "a message that has not failed does not wait"
    assert 0.0 <= jitter <= 1.0, f"jitter {jitter} is not within 0..1"
    if failures <= policy.immediate_retries:
        return 0
    steps = failures - policy.immediate_retries - 1
    wait_s = _grown(policy, steps)
    low = max(policy.min_backoff_s, wait_s * (1 - policy.jitter))
    high = min(policy.max_backoff_s, wait_s * (1 + policy.jitter))
    return round((low + (high - low) * jitter) * 1_000_000)


def _grown(policy: RetryPolicy, steps: int) -> float:
    """The wait without jitter; a float that overflows has long passed the upper bound."""
    try:
        wait_s = policy.min_backoff_s * policy.multiplier**steps
    except OverflowError:
        return policy.max_backoff_s
    return min(policy.max_backoff_s, wait_s)
