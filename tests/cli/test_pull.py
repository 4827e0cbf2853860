"""``sparrow pull``."""

from __future__ import annotations

from typing import Any


def test_printed_messages_are_acked(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "x", "y", "z")
    assert sparrow("pull", "s", "--max", "2", "--format", "raw") == "x\ny\n"
    assert sparrow("pull", "s", "--format", "raw", "--timeout", "0") == "z\n"
    assert sparrow("pull", "s", "--timeout", "0") == ""


def test_without_ack_messages_go_back_and_no_attempt_is_counted(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "x")
    for _ in range(2):
        (found,) = sparrow.lines("pull", "s", "--no-ack")
        assert (found["data"], found["attempt"]) == ("x", 1)


def test_json_has_stable_fields(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "x", "--key", "k", "-a", "env=prod")
    (found,) = sparrow.lines("pull", "s")
    assert list(found) == [
        *("id", "topic", "partition", "offset", "publish_time", "key", "data", "data_encoding", "attributes"),
        *("event_time", "priority", "attempt", "ack_id"),
    ]
    assert (found["id"], found["key"], found["attributes"]) == ("1-0-0", "k", {"env": "prod"})
    assert found["publish_time"].endswith("Z")


def test_text_in_a_pipe_is_one_line_a_message_between_tabs(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "two\nlines\tand \x1b[31m", "--key", "k", "-a", "env=prod")
    fields = sparrow("pull", "s").rstrip("\n").split("\t")
    assert (fields[0], *fields[2:]) == ("1-0-0", "a", "k", "env=prod", r"two\nlines\tand \x1b[31m")


def test_a_group_by_partitions_is_pulled_as_a_member(sparrow: Any) -> None:
    sparrow("topic", "create", "a", "--partitions", "2")
    sparrow("sub", "create", "s", "a", "--group", "partitioned", "--set", "group.strategy=range")
    sparrow("publish", "a", "x")
    assert sparrow.error("pull", "s", code=4)["code"] == "FAILED_PRECONDITION"
    assert sparrow("pull", "s", "--member", "m-1", "--format", "raw", "--timeout", "5s") == "x\n"


def test_a_missing_subscription_is_not_found(sparrow: Any) -> None:
    assert sparrow.error("pull", "nix", code=3)["code"] == "SUBSCRIPTION_NOT_FOUND"
