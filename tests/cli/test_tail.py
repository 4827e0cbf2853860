"""``sparrow tail``."""

from __future__ import annotations

from typing import Any


def data(found: list[Any]) -> list[str]:
    return [each["data"] for each in found]


def test_the_last_messages_are_shown_in_the_order_of_their_times(sparrow: Any) -> None:
    sparrow("topic", "create", "a.x", "--partitions", "3")
    for number in range(6):
        sparrow("publish", "a.x" if number % 2 else "a.y", str(number), "--key", f"k{number}")
    assert data(sparrow.lines("tail", "a.*", "--last", "4")) == ["2", "3", "4", "5"]
    assert sparrow("tail", "a.x", "--format", "raw", "-n", "1") == "5\n"


def test_a_start_shows_everything_from_there(sparrow: Any) -> None:
    sparrow("publish", "a", "-", input="".join(f"{n}\n" for n in range(3000)))
    assert len(sparrow.lines("tail", "a", "--from", "earliest")) == 3000
    assert len(sparrow.lines("tail", "a", "--from", "1h ago")) == 3000
    assert sparrow.lines("tail", "a", "--from", "latest") == []
    assert len(sparrow.lines("tail", "a")) == 10


def test_a_filter_is_looked_back_for_until_there_are_enough(sparrow: Any) -> None:
    sparrow("publish", "a", "old", "-a", "env=prod")
    sparrow("publish", "a", "-", input="".join(f"{n}\n" for n in range(5000)))
    sparrow("publish", "a", "new", "-a", "env=prod")
    found = sparrow.lines("tail", "a", "--filter", 'attributes.env = "prod"', "--last", "2")
    assert data(found) == ["old", "new"]


def test_nothing_is_taken_and_no_subscription_is_made(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "x")
    sparrow("tail", "a")
    assert [each["name"] for each in sparrow.json("sub", "list")] == ["s"]
    assert sparrow("pull", "s", "--format", "raw") == "x\n"


def test_a_pattern_that_matches_no_topic_is_not_found(sparrow: Any) -> None:
    assert sparrow.error("tail", "nix.#", code=3)["code"] == "TOPIC_NOT_FOUND"
    assert sparrow.error("tail", "a.#.b", code=2)["code"] == "INVALID_PATTERN"
    assert sparrow.error("tail", "a", "--filter", "attributes.", code=2)["code"] == "INVALID_FILTER"
