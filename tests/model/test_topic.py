"""Topics' partitions and policies: what is accepted, what is refused, and how."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparrow.model.errors import InvalidArgument
from sparrow.model.limits import PARTITIONS_MAX
from sparrow.model.topic import Codec, Durability, Topic, TopicPolicy, parse_partitions, parse_policy


@pytest.mark.parametrize("count", [1, 2, PARTITIONS_MAX])
def test_a_partition_count_within_bounds_is_taken(count: int) -> None:
    assert parse_partitions(count) == count


@pytest.mark.parametrize("count", [0, -1, PARTITIONS_MAX + 1, 1.0, "4", None, True])
def test_a_partition_count_out_of_bounds_or_of_another_type_is_refused(count: object) -> None:
    with pytest.raises(InvalidArgument, match=f"from 1 to {PARTITIONS_MAX}"):
        parse_partitions(count)


def test_without_options_a_topic_is_durable_uncompressed_and_kept_a_week() -> None:
    policy = parse_policy({})
    assert policy == TopicPolicy()
    assert policy.durability is Durability.DURABLE
    assert policy.codec is Codec.NONE
    assert policy.retention_s == 7 * 86400
    assert (policy.retention_bytes, policy.retention_messages) == (None, None)
    assert not policy.retain_until_acked


def test_options_are_taken_by_name_and_as_plain_text() -> None:
    policy = parse_policy({"durability": "written", "codec": "zstd", "retention_s": None})
    assert policy.durability is Durability.WRITTEN
    assert policy.codec is Codec.ZSTD
    assert policy.retention_s is None


def test_options_change_a_base_and_leave_the_rest_of_it() -> None:
    base = TopicPolicy(codec=Codec.LZ4, retention_bytes=5_000, dedupe_window_s=1.0)
    policy = parse_policy({"retention_bytes": None, "retention_messages": 3}, base)
    assert policy == TopicPolicy(codec=Codec.LZ4, retention_messages=3, dedupe_window_s=1.0)


def test_an_unknown_option_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="unknown topic option retention, ttl") as caught:
        parse_policy({"ttl": 1, "retention": 2})
    for name in TopicPolicy.__struct_fields__:
        assert name in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"durability": "safe"},
        {"codec": "gzip"},
        {"retention_s": "7d"},
        {"retention_bytes": 1.5},
        {"retention_messages": "many"},
        {"retain_until_acked": "yes"},
        {"dedupe_window_s": None},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_and_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        parse_policy(options)


@pytest.mark.parametrize("name", ["retention_s", "retention_bytes", "retention_messages"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_that_keeps_nothing_is_refused(name: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be positive"):
        parse_policy({name: value})


def test_a_negative_window_is_refused_and_none_at_all_is_not() -> None:
    with pytest.raises(InvalidArgument, match="dedupe_window_s must not be negative"):
        parse_policy({"dedupe_window_s": -0.1})
    assert parse_policy({"dedupe_window_s": 0}).dedupe_window_s == 0


@pytest.mark.parametrize("name", ["retention_s", "dedupe_window_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_time_that_is_no_finite_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=name):
        parse_policy({name: value})


def test_a_topic_survives_the_way_through_json() -> None:
    topic = Topic(
        id=3,
        name="orders.us",
        partitions=4,
        policy=TopicPolicy(durability=Durability.NONE, codec=Codec.ZSTD, retention_s=None),
        created_at_us=17,
    )
    assert msgspec.json.decode(msgspec.json.encode(topic), type=Topic) == topic


def test_a_topic_cannot_be_changed_in_place() -> None:
    topic = Topic(id=1, name="t", partitions=1, policy=TopicPolicy(), created_at_us=0)
    with pytest.raises(AttributeError):
        topic.partitions = 2
    with pytest.raises(AttributeError):
        topic.policy.retention_s = 1.0
