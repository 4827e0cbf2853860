"""Built-in transformations, expectations and the search for poison, over a few messages."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sparrow.model.errors import InvalidPipeline
from sparrow.model.pipeline import parse_pipeline
from sparrow.spark.options import Where
from sparrow.spark.pipelines import builtin
from sparrow.spark.pipelines.batches import Batches
from sparrow.spark.pipelines.plan import Poisons, find_function, make_frame, make_letters, stretch_loader
from sparrow.spark.pipelines.poison import Search, describe

pytestmark = pytest.mark.soak
"""Minutes of Spark: `make test-spark` runs them."""

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def declared(**changes: Any) -> Any:
    return parse_pipeline(
        {
            "name": "p",
            "source": {"topic": "orders", "schema": "id STRING, amount INT"},
            "sql": "SELECT id, 100 / amount AS share FROM source",
            "sinks": [{"topic": "out"}],
            **changes,
        }
    )


@pytest.fixture
def where(served: Any) -> Where:
    served.client.create_topic("orders")
    rows = [{"id": "a", "amount": 1}, {"id": "b", "amount": 0}, {"id": "c", "amount": 4}]
    served.client.publish_batch(
        "orders",
        [*(json.dumps(row).encode() for row in rows), b"nonsense"],
        keys=["a", "b", "c", None],
        attributes=[{"country": "de"}, None, {"country": "us"}, None],
        event_times=[datetime.now(UTC) - timedelta(seconds=5)] * 4,
    )
    return Where(f"sparrow://{served.address}", None)


def rows_of(spark: Any, pipeline: Any, where: Where, poisons: Poisons) -> tuple[list[Any], list[Any]]:
    load = stretch_loader(spark, where, {"p": [("orders", 0, 0, 4)]})
    rows = make_frame(spark, pipeline, load, poisons).collect()
    return rows, make_letters(pipeline, load, poisons).collect()


def test_rows_that_do_not_parse_or_do_not_meet_expectations_are_letters(spark: Any, where: Where) -> None:
    pipeline = declared(expect={"the amount is positive": "amount > 0"})
    rows, letters = rows_of(spark, pipeline, where, Poisons())
    assert [(row["id"], row["share"]) for row in rows] == [("a", 100.0), ("c", 25.0)]
    found = {letter["offset"]: letter for letter in letters}
    assert (found[1]["reason"], found[1]["error"]) == ("the amount is positive", "amount > 0")
    assert (found[3]["reason"], bytes(found[3]["data"])) == ("malformed", b"nonsense")
    assert {letter["subscription"] for letter in letters} == {"p"}


def test_the_row_that_is_to_blame_is_found_and_set_apart(spark: Any, where: Where) -> None:
    pipeline = declared()
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        rows_of(spark, pipeline, where, Poisons())
    found = Search(spark, pipeline, where, Poisons()).run({"p": [("orders", 0, 0)]})
    assert list(found.places) == ["p"]
    ((place, error),) = found.places["p"].items()
    assert place == ("orders", 0, 1)
    assert "DIVIDE_BY_ZERO" in error
    rows, letters = rows_of(spark, pipeline, where, found)
    assert [row["id"] for row in rows] == ["a", "c"]
    assert sorted((letter["offset"], letter["reason"]) for letter in letters) == [
        (1, "poison"),
        (3, "malformed"),
    ]


def test_a_query_that_is_wrong_by_itself_blames_no_row(spark: Any, where: Where) -> None:
    pipeline = declared(sql="SELECT nothing FROM source")
    assert len(Search(spark, pipeline, where, Poisons()).run({"p": [("orders", 0, 0)]})) == 0


def test_statistics_count_by_topic_and_minute(spark: Any, where: Where) -> None:
    pipeline = parse_pipeline(
        {"name": "p", "source": "orders", "builtin": "statistics", "sinks": [{"topic": "out"}]}
    )
    load = stretch_loader(spark, where, {"p": [("orders", 0, 0, 4)]})
    rows = make_frame(spark, pipeline, load, Poisons()).collect()
    assert sum(row["messages"] for row in rows) == 4
    assert {row["topic"] for row in rows} == {"orders"}
    assert sum(row["bytes"] for row in rows) == sum(len(each) for each in PAYLOADS)
    assert all(4 < row["latency_p50_s"] < 60 for row in rows)
    assert rows[0]["messages_per_s"] == rows[0]["messages"] / 60
    assert all(row["errors"] == 0 for row in rows)
    top = [each["item"] for row in rows for each in row["top_keys"]]
    assert {"a", "b", "c"} <= set(top)
    with pytest.raises(InvalidPipeline, match=r"options\.windo "):
        builtin.find("statistics")({}, {"windo": "1 hour"})


PAYLOADS = [
    b'{"id": "a", "amount": 1}',
    b'{"id": "b", "amount": 0}',
    b'{"id": "c", "amount": 4}',
    b"nonsense",
]


def test_a_replay_chooses_by_time_key_and_condition_and_says_what_it_is_of(spark: Any, where: Where) -> None:
    load = stretch_loader(spark, where, {"p": [("orders", 0, 0, 4)]})
    source = load("p", declared().sources["source"])
    replay = builtin.find("replay")
    later = datetime.now(UTC) + timedelta(hours=1)

    def offsets(**options: str) -> list[str]:
        found = replay({"source": source}, options).collect()
        return sorted(row["attributes"]["replay_of"] for row in found)

    assert offsets(until=later.isoformat()) == [f"orders/0/{number}" for number in range(4)]
    assert offsets(until=(later - timedelta(hours=2)).isoformat()) == []
    assert offsets(keys="a, c") == ["orders/0/0", "orders/0/2"]
    assert offsets(where="attributes['country'] = 'us'") == ["orders/0/2"]
    (row,) = replay({"source": source}, {"keys": "c"}).collect()
    assert (bytes(row["data"]), row["key"], row["attributes"]["country"]) == (PAYLOADS[2], "c", "us")
    with pytest.raises(InvalidPipeline, match=r"options\.til "):
        replay({"source": source}, {"til": "x"})


def test_functions_that_cannot_be_loaded_are_named() -> None:
    for place in ("no_such_module:f", "/no/such/file.py:f", "json:no_such_function"):
        with pytest.raises(InvalidPipeline, match="cannot be loaded"):
            find_function(place)
    with pytest.raises(InvalidPipeline, match="does not exist"):
        builtin.find("magic")


def test_errors_are_told_in_one_line() -> None:
    assert describe(ValueError("first\nsecond")) == "first"
    trace = "An exception was thrown\nTraceback:\n  File x\nValueError: no such thing\n"
    assert describe(RuntimeError(trace)) == "ValueError: no such thing"


def test_a_batch_begins_where_the_one_before_ends(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()

    def note(number: int, **offsets: int) -> None:
        positions = {f"orders/{name[1:]}": at for name, at in offsets.items()}
        told = {"version": 1, "epochs": {"orders": 7}, "subscription": "p", **positions}
        (tmp_path / "offsets" / str(number)).write_text(f"v1\n{{}}\n{json.dumps(told)}")

    note(0, p0=4)
    note(1, p0=4)
    note(2, p0=9, p1=2)
    batches = Batches(None, str(tmp_path), {"p": [("orders", 0, 3)]})
    assert batches.stretches(0) == {"p": [("orders", 0, 3, 4)]}
    assert batches.stretches(1) == {}
    assert batches.stretches(2) == {"p": [("orders", 0, 4, 9), ("orders", 1, -2, 2)]}
