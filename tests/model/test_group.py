"""Group policies: what is refused, and how it is said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparrow.model.errors import InvalidArgument
from sparrow.model.group import (
    STRATEGIES,
    GroupMode,
    GroupPolicy,
    GroupStrategy,
    RebalanceProtocol,
    parse_group_policy,
)


def test_no_options_are_the_defaults() -> None:
    assert parse_group_policy({}) == GroupPolicy()


def test_the_defaults_allow_themselves() -> None:
    assert parse_group_policy(msgspec.to_builtins(GroupPolicy())) == GroupPolicy()


def test_a_dead_member_is_found_within_a_minute_by_default_and_at_most() -> None:
    assert GroupPolicy().session_timeout_s <= 60
    with pytest.raises(InvalidArgument):
        parse_group_policy({"session_timeout_s": 61})


@pytest.mark.parametrize("mode", GroupMode)
def test_a_mode_alone_brings_its_default_strategy(mode: GroupMode) -> None:
    assert parse_group_policy({"mode": mode.value}).strategy is STRATEGIES[mode][0]


def test_partitioned_groups_are_sticky_by_default() -> None:
    assert parse_group_policy({"mode": "partitioned"}).strategy is GroupStrategy.STICKY


def test_options_go_on_top_of_the_base() -> None:
    base = parse_group_policy({"mode": "partitioned", "strategy": "range", "stabilisation_s": 0})
    changed = parse_group_policy({"rebalance": "eager"}, base)
    assert (changed.strategy, changed.stabilisation_s) == (GroupStrategy.RANGE, 0)
    assert changed.rebalance is RebalanceProtocol.EAGER


def test_a_policy_goes_through_json() -> None:
    policy = parse_group_policy({"mode": "partitioned", "offset_expiry_s": None})
    assert msgspec.json.decode(msgspec.json.encode(policy), type=GroupPolicy) == policy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stratgy": "range"}, "stratgy"),
        ({"mode": "both"}, "shared, partitioned"),
        ({"mode": 7}, "7"),
        ({"strategy": "random"}, "round_robin, least_loaded, range, sticky"),
        ({"strategy": "sticky"}, "not one of a shared group"),
        ({"mode": "partitioned", "strategy": "least_loaded"}, "sticky, range, round_robin"),
        ({"rebalance": "lazy"}, "cooperative, eager"),
        ({"heartbeat_s": 0}, "heartbeat_s must be a number from 0.01 to 30"),
        ({"heartbeat_s": 16}, "at least twice"),
        ({"session_timeout_s": 19.9}, "heartbeat_s 10"),
        ({"session_timeout_s": float("nan")}, "nan"),
        ({"stabilisation_s": -1}, "stabilisation_s"),
        ({"stabilisation_s": True}, "True"),
        ({"rebalance_timeout_s": 121}, "to 120"),
        ({"drain_timeout_s": "10"}, "'10'"),
        ({"backoff_min_s": 5, "backoff_max_s": 4}, "above backoff_max_s 4"),
        ({"offset_expiry_s": 0}, "offset_expiry_s"),
        ({"member_max_in_flight": 0}, "1 to 1,000,000"),
        ({"member_max_in_flight": 1.5}, "whole"),
        ({"member_max_in_flight": None}, "None"),
    ],
)
def test_a_bad_option_is_refused_and_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_group_policy(options)
    assert said in str(caught.value)
