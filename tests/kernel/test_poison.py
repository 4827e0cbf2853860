"""Each row of the poison table: what matches it, and what just does not."""

from __future__ import annotations

import pytest

from sparrow.kernel.cursor import Attempt
from sparrow.kernel.facts import FailureKind
from sparrow.kernel.poison import OUTAGE_SAMPLE_MIN, RULES, OutageGauge, judge

SECOND_US = 1_000_000
NOW_US = 10_000 * SECOND_US
KINDS = {"n": FailureKind.NACKED, "t": FailureKind.TIMED_OUT, "g": FailureKind.CONSUMER_GONE}


def history(text: str) -> list[Attempt]:
    """``kind consumer age_s reason`` separated by commas."""
    entries = []
    for part in text.split(","):
        kind, consumer, age_s, *reason = part.split()
        at_us = NOW_US - int(age_s) * SECOND_US
        entries.append(Attempt(KINDS[kind], at_us, consumer, " ".join(reason)))
    return entries


@pytest.mark.parametrize(
    ("text", "is_large", "rule"),
    [
        ("n a 30, n a 20, n a 0", False, "rapid_cycling"),
        ("n a 31, n a 20, n a 0", False, ""),
        ("n a 900 bad row, n b 0 bad row", False, "same_reason"),
        ("n a 900 bad row, n a 0 bad row", False, ""),
        ("n a 900 bad row, n b 0 other", False, ""),
        ("n a 900, n b 0", False, ""),
        ("t a 300, t b 100, t c 0", False, "timeouts_on_several_consumers"),
        ("t a 301, t b 100, t c 0", False, ""),
        ("t a 200, t b 100, t a 0", False, ""),
        ("t a 900, t a 0", True, "large_message_times_out"),
        ("t a 900, t a 0", False, ""),
        ("n a 900, t a 0", True, ""),
    ],
)
def test_a_pattern_is_found_exactly(text: str, is_large: bool, rule: str) -> None:
    found = judge(history(text), NOW_US, is_large=is_large)
    assert found == (f"poison:{rule}" if rule else "")


def test_every_rule_needs_more_than_one_failure() -> None:
    assert all(rule.failures_min >= 2 for rule in RULES)


def test_failures_of_a_bad_consumer_do_not_count() -> None:
    rapid = history("n a 3, n a 2, n a 0")
    assert judge(rapid, NOW_US)
    assert not judge(rapid, NOW_US, bad_consumers={"a"})


def test_most_messages_failing_is_an_outage() -> None:
    gauge = OutageGauge()
    gauge.record(failures=OUTAGE_SAMPLE_MIN - 1)
    assert not gauge.is_outage
    gauge.record(failures=1)
    assert gauge.is_outage
    gauge.record(successes=OUTAGE_SAMPLE_MIN)
    assert not gauge.is_outage
