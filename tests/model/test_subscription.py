"""Subscription policies: what is refused, and how it is said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparrow.model.errors import InvalidArgument
from sparrow.model.subscription import Guarantee, Ordering, SubscriptionPolicy, parse_policy


def test_no_options_are_the_defaults() -> None:
    assert parse_policy({}) == SubscriptionPolicy()


def test_options_go_on_top_of_the_base() -> None:
    base = parse_policy({"ordering": "key", "retry": {"jitter": 0.5}})
    changed = parse_policy({"guarantee": "exactly_once", "retry": {"max_backoff_s": 60}}, base)
    assert changed.ordering is Ordering.KEY
    assert changed.guarantee is Guarantee.EXACTLY_ONCE
    assert (changed.retry.jitter, changed.retry.max_backoff_s) == (0.5, 60)


def test_a_policy_goes_through_json() -> None:
    policy = parse_policy({"dead_letter_topic": "dead", "retry": {"max_attempts": 7}})
    assert msgspec.json.decode(msgspec.json.encode(policy), type=SubscriptionPolicy) == policy


def test_attempts_are_limited_only_with_a_dead_letter_topic() -> None:
    assert SubscriptionPolicy().attempts_max is None
    assert parse_policy({"dead_letter_topic": "dead"}).attempts_max == 5
    assert parse_policy({"dead_letter_topic": "dead", "retry": {"max_attempts": 2}}).attempts_max == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"orderring": "key"}, "orderring"),
        ({"retry": {"jiter": 1}}, "jiter"),
        ({"retry": 5}, "5"),
        ({"ordering": "random"}, "none, key, publisher, total"),
        ({"ordering": 7}, "7"),
        ({"guarantee": "maybe"}, "exactly_once"),
        ({"expired": "keep"}, "dead_letter"),
        ({"ack_deadline_s": -1}, "0 to 600"),
        ({"ack_deadline_s": 601}, "601"),
        ({"ack_deadline_s": float("nan")}, "nan"),
        ({"ack_deadline_s": True}, "True"),
        ({"ack_deadline_s": "10"}, "'10'"),
        ({"key_window": 0}, "1 to 1,000"),
        ({"key_window": 1.5}, "whole"),
        ({"key_window": 2}, "ordering"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"retry": {"jitter": 2}}, "retry.jitter"),
        ({"retry": {"multiplier": 0.5}}, "1 to 100"),
        ({"retry": {"max_attempts": 0}, "dead_letter_topic": "dead"}, "1 to 1,000"),
        ({"retry": {"max_attempts": 3}}, "dead_letter_topic"),
        ({"retry": {"min_backoff_s": 10, "max_backoff_s": 5}}, "above"),
        ({"expired": "dead_letter"}, "dead_letter_topic"),
        ({"dead_letter_topic": "a..b"}, "a..b"),
        ({"dead_letter_topic": 5}, "dead_letter_topic"),
        ({"guarantee": "exactly_once", "ack_deadline_s": 0}, "above 0"),
        ({"filter": "x" * 20_000}, "20000"),
        ({"poison_rules": "yes"}, "bool"),
    ],
)
def test_a_bad_option_is_refused_and_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_policy(options)
    assert said in str(caught.value)
