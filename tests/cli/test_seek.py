"""``sparrow seek``, ``snapshot``, ``trace`` and ``group``: where subscriptions and messages are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from sparrow.cli.seek import parse_target
from sparrow.model.errors import InvalidArgument


@pytest.fixture
def filled(sparrow: Any) -> Any:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "x", "y", "z")
    return sparrow


@pytest.mark.parametrize(
    ("target", "lag"),
    [("latest", 0), ("earliest", 3), ("1h ago", 3), ("in 1h", 0), ("a/0=1", 2), ("a=2", 1)],
)
def test_seek_goes_where_it_is_told(filled: Any, target: str, lag: int) -> None:
    done = filled.json("seek", "s", target)
    assert (done["lag_before"], done["lag"]) == (3, lag)


def test_a_time_needs_no_quotes(filled: Any) -> None:
    assert filled.json("seek", "s", "1h", "ago")["lag"] == 3


def test_targets_are_told_apart() -> None:
    assert parse_target(["a/0=1", "b.c/2=7"]) == {("a", 0): 1, ("b.c", 2): 7}
    assert parse_target(["2026-01-02"]) == datetime(2026, 1, 2, tzinfo=UTC)
    assert parse_target(["snapshot:2026-01-02"]) == "2026-01-02"
    assert parse_target(["before-deploy"]) == "before-deploy"
    with pytest.raises(InvalidArgument, match="not a place to seek to"):
        parse_target(["next", "week"])


def test_places_that_are_not_there_are_refused(filled: Any) -> None:
    assert filled.error("seek", "s", "nix", code=3)["code"] == "SNAPSHOT_NOT_FOUND"
    assert filled.error("seek", "s", "a=99", code=4)["code"] == "OFFSET_OUT_OF_RANGE"


def test_a_snapshot_is_come_back_to(filled: Any) -> None:
    made = filled.json("snapshot", "create", "s", "before", "--ttl", "1d")
    assert (made["name"], made["subscription"]) == ("before", "s")
    filled("pull", "s")
    assert filled.json("seek", "s", "before")["lag"] == 3
    assert [row["name"] for row in filled.rows("snapshot", "list")] == ["before"]
    assert filled.error("snapshot", "create", "s", "before", code=4)["code"] == "ALREADY_EXISTS"
    filled("snapshot", "delete", "before")
    assert filled.json("snapshot", "list") == []
    assert filled.error("snapshot", "delete", "before", code=3)["code"] == "SNAPSHOT_NOT_FOUND"


def test_trace_tells_the_state_in_every_subscription(filled: Any) -> None:
    filled("sub", "create", "other", "a")
    filled("pull", "s", "--max", "1")
    states = {each["subscription"]: each["state"] for each in filled.json("trace", "1-0-0")}
    assert states == {"s": "acked", "other": "acked"}
    assert filled.rows("trace", "1-0-1")[1]["state"] != "acked"
    assert filled.error("trace", "9-0-9", code=3)["code"] == "MESSAGE_NOT_FOUND"


def test_groups_are_shown_and_offsets_committed(filled: Any) -> None:
    assert filled.json("group", "list") == []
    (found,) = filled.json("group", "list", "--all")
    assert (found["subscription"], found["members"], found["lag"]) == ("s", 0, 3)
    assert filled.json("group", "commit", "s", "a", "0", "2")["lag"] == 1
    shown = filled.json("group", "show", "s")
    assert (shown["group"]["state"], shown["members"]) == ("empty", [])
    assert "state\tempty" in filled("group", "show", "s")
    assert filled.error("group", "rebalance", "s", code=4)["code"] == "FAILED_PRECONDITION"
