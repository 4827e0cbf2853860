"""``sparrow topic``."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_topic_is_created_with_its_options(sparrow: Any) -> None:
    words = "--partitions 3 --durability written --codec zstd --retention 30d --retention-bytes 10GB"
    made = sparrow.json("topic", "create", "orders.us", *words.split(), "--set", "flow.messages_per_s=500")
    policy = made["policy"]
    assert (made["name"], made["partitions"]) == ("orders.us", 3)
    assert (policy["durability"], policy["codec"]) == ("written", "zstd")
    assert (policy["retention_s"], policy["retention_bytes"]) == (30 * 86400, 10_000_000_000)
    assert policy["flow"]["messages_per_s"] == 500


def test_forever_takes_the_limit_away(sparrow: Any) -> None:
    made = sparrow.json("topic", "create", "audit", "--retention", "forever")
    assert made["policy"]["retention_s"] is None


def test_a_topic_that_exists_is_a_conflict_unless_that_is_allowed(sparrow: Any) -> None:
    sparrow("topic", "create", "a", "--partitions", "2")
    error = sparrow.error("topic", "create", "a", code=4)
    assert error["code"] == "TOPIC_EXISTS"
    assert "sparrow topic update" in error["hint"]
    assert sparrow.json("topic", "create", "a", "--if-not-exists")["partitions"] == 2


def test_a_pipe_gets_topics_between_tabs(sparrow: Any) -> None:
    sparrow("topic", "create", "b", "--partitions", "2")
    sparrow("publish", "a", "x", "y")
    rows = sparrow.rows("topic", "list")
    assert [(row["name"], row["partitions"], row["messages"]) for row in rows] == [
        ("a", "1", "2"),
        ("b", "2", "0"),
    ]
    assert rows[0]["retention_s"] == "604800.0"


def test_a_table_can_be_asked_for(sparrow: Any) -> None:
    sparrow("topic", "create", "a")
    assert "7d" in sparrow("topic", "list", "--table")


def test_topics_are_listed_by_pattern(sparrow: Any) -> None:
    for name in ("orders.us", "orders.eu", "audit"):
        sparrow("topic", "create", name)
    assert [each["name"] for each in sparrow.json("topic", "list", "--pattern", "orders.*")] == [
        "orders.eu",
        "orders.us",
    ]


def test_show_tells_offsets_and_readers(sparrow: Any) -> None:
    sparrow("sub", "create", "billing", "a")
    sparrow("publish", "a", "x")
    shown = sparrow.json("topic", "show", "a")
    assert shown["offsets"] == [{"partition": 0, "start_offset": 0, "end_offset": 1}]
    assert shown["subscriptions"] == ["billing"]
    assert "retention_s\t604800.0" in sparrow("topic", "show", "a")


def test_update_changes_what_is_named_and_nothing_else(sparrow: Any) -> None:
    sparrow("topic", "create", "a", "--codec", "lz4")
    policy = sparrow.json("topic", "update", "a", "--retention", "1h30m")["policy"]
    assert (policy["retention_s"], policy["codec"]) == (5400, "lz4")
    assert sparrow.error("topic", "update", "a", code=2)["message"] == "nothing to change"


def test_delete_must_be_confirmed(sparrow: Any) -> None:
    sparrow("topic", "create", "a")
    assert "--yes" in sparrow.error("topic", "delete", "a", code=2)["hint"]
    assert sparrow.json("topic", "delete", "a", "--yes") == {"deleted": "a", "messages": 0}
    assert sparrow.json("topic", "list") == []


def test_a_topic_in_use_needs_force(sparrow: Any) -> None:
    sparrow("topic", "create", "a")
    sparrow("sub", "create", "s", "a")
    error = sparrow.error("topic", "delete", "a", "--yes", code=4)
    assert error["code"] == "TOPIC_IN_USE"
    assert "--force" in error["hint"]
    sparrow("topic", "delete", "a", "--yes", "--force")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--retention", "soon"], "not a stretch of time"),
        (["--retention-bytes", "much"], "not a size"),
        (["--retention-messages", "many"], "not a count"),
        (["--set", "nonsense"], "not name=value"),
        (["--set", "colour=1"], "unknown topic option colour"),
        (["--codec", "lz4", "--set", "codec=zstd"], "codec is given twice"),
        (["--partitions", "0"], "partitions must be"),
    ],
)
def test_wrong_options_are_refused_by_name(sparrow: Any, words: list[str], complaint: str) -> None:
    assert complaint in sparrow.error("topic", "create", "a", *words, code=2)["message"]
