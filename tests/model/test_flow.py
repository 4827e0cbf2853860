"""Flow policies: nothing is limited unless asked, and what contradicts itself is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import (
    FlowPolicy,
    LagLimits,
    Overflow,
    SamplePolicy,
    parse_flow_policy,
    parse_lag_limits,
    parse_sample_policy,
)


def test_by_default_nothing_is_limited() -> None:
    policy = parse_flow_policy({})
    assert policy == FlowPolicy()
    assert not policy.has_watermarks
    assert policy.topic_rate.messages_per_s is None


def test_options_come_on_top_of_a_base() -> None:
    base = parse_flow_policy({"backlog_high": 100, "overflow": "reject"})
    policy = parse_flow_policy({"backlog_high": 200}, base)
    assert policy.overflow is Overflow.REJECT
    assert policy.backlog_marks == (100, 200, 400)


def test_marks_that_are_not_given_are_derived() -> None:
    policy = parse_flow_policy({"backlog_high": 100, "backlog_low": 90, "lag_high_s": 4})
    assert policy.backlog_marks == (90, 100, 200)
    assert policy.lag_marks_us == (2e6, 4e6, 8e6)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"backlog": 1}, "unknown flow option backlog"),
        ({"overflow": "explode"}, "bad flow option"),
        ({"backlog_high": 0}, "backlog_high must be positive"),
        ({"backlog_high": -5}, "backlog_high must be positive"),
        ({"lag_high_s": float("inf")}, "lag_high_s must be positive"),
        ({"lag_high_s": float("nan")}, "lag_high_s must be positive"),
        ({"backlog_high": 10, "backlog_low": 10}, "backlog_low 10 must be below backlog_high 10"),
        ({"backlog_high": 10, "backlog_max": 10}, "backlog_high 10 must be below backlog_max 10"),
        ({"lag_high_s": 1, "lag_low_s": 2}, "lag_low_s 2 must be below lag_high_s 1"),
        ({"backlog_low": 10}, "backlog_low needs a backlog_high"),
        ({"backlog_max": 10}, "backlog_max needs a backlog_high"),
        ({"lag_low_s": 10}, "lag_low_s needs a lag_high_s"),
        ({"overflow": "sample"}, "'sample' needs a backlog_high or a lag_high_s"),
        ({"overflow": "drop_oldest", "messages_per_s": 5}, "'drop_oldest' needs"),
        ({"block_timeout_s": -1}, "block_timeout_s must be from 0"),
        ({"sample_share_min": 1.5}, "sample_share_min must be from 0 to 1"),
        ({"messages_per_s": 0}, "messages_per_s must be positive"),
        ({"bytes_per_s": 1e-6}, "bytes_per_s must be at least"),
        ({"burst_s": 0}, "burst_s must be from"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_flow_policy(options)
    assert complaint in str(caught.value)


def test_an_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_flow_policy({"high": 1})
    assert "backlog_high" in caught.value.hint


def test_rates_alone_go_with_block_and_reject() -> None:
    for overflow in ("block", "reject"):
        policy = parse_flow_policy({"overflow": overflow, "messages_per_s": 5, "publisher_bytes_per_s": 9})
        assert policy.topic_rate.messages_per_s == 5
        assert policy.publisher_rate.bytes_per_s == 9


def test_policies_survive_json() -> None:
    policy = parse_flow_policy({"backlog_high": 5, "overflow": "sample"})
    assert msgspec.json.decode(msgspec.json.encode(policy), type=FlowPolicy) == policy


def test_lag_limits_are_those_of_the_specification_and_can_be_set() -> None:
    limits = parse_lag_limits({})
    assert (limits.end_to_end_warn_s, limits.end_to_end_critical_s) == (5, 15)
    assert (limits.depth_warn, limits.depth_critical) == (1000, 5000)
    assert parse_lag_limits({"depth_warn": 10}) == LagLimits(depth_warn=10)


@pytest.mark.parametrize(
    "options",
    [
        {"depth_warn": 5000},
        {"end_to_end_warn_s": -1},
        {"throughput_warn_share": 0.2},
        {"throughput_warn_share": 1.2},
        {"deep": 1},
        {"depth_warn": "many"},
    ],
)
def test_lag_limits_that_contradict_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        parse_lag_limits(options)


def test_sampling_fills_its_low_mark_in() -> None:
    assert parse_sample_policy({"lag_high_s": 10}).low_s == 5
    assert parse_sample_policy({}) == SamplePolicy()


@pytest.mark.parametrize(
    "options", [{"lag_low_s": 30}, {"share_min": 2}, {"lag_high_s": 0}, {"lag_low_s": 0}, {"share": 1}]
)
def test_sampling_that_contradicts_itself_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        parse_sample_policy(options)
