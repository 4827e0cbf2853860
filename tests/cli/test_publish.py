"""``sparrow publish``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def everything(sparrow: Any, topic: str) -> list[tuple[Any, Any, Any]]:
    found = sparrow.lines("tail", topic, "--from", "earliest")
    return [(each["data"], each["key"], each["attributes"]) for each in found]


def test_words_become_messages_and_their_ids_are_printed(sparrow: Any) -> None:
    assert sparrow("publish", "a", "x", "ü").splitlines() == ["1-0-0", "1-0-1"]
    assert everything(sparrow, "a") == [("x", None, {}), ("ü", None, {})]


def test_json_tells_receipts_and_figures(sparrow: Any) -> None:
    done = sparrow.json("publish", "a", "x", "yz", "--key", "k", "-a", "env=prod", "-a", "n=1")
    assert (done["messages"], done["bytes"], done["dropped"]) == (2, 3, 0)
    assert [receipt["message_id"] for receipt in done["receipts"]] == ["1-0-0", "1-0-1"]
    assert everything(sparrow, "a")[0] == ("x", "k", {"env": "prod", "n": "1"})


def test_options_of_single_messages(sparrow: Any) -> None:
    words = [
        "--priority",
        "5",
        "--event-time",
        "2026-01-02T03:04:05Z",
        "--ttl",
        "1h",
        "--deliver-at",
        "in 1h",
    ]
    sparrow("publish", "a", "x", *words)
    (found,) = sparrow.lines("tail", "a")
    assert (found["priority"], found["event_time"]) == (5, "2026-01-02T03:04:05Z")
    sparrow("sub", "create", "s", "a", "--start", "earliest")
    assert sparrow("pull", "s", "--timeout", "0.2s") == ""


def test_an_idempotency_key_is_stored_once(sparrow: Any) -> None:
    first = sparrow("publish", "a", "x", "--idempotency-key", "i-1")
    again = sparrow.json("publish", "a", "x", "--idempotency-key", "i-1")
    assert again["duplicates"] == 1
    assert again["receipts"][0]["message_id"] == first.strip()


def test_a_tombstone_has_no_data(sparrow: Any) -> None:
    sparrow("publish", "a", "--tombstone", "--key", "k")
    assert everything(sparrow, "a") == [(None, "k", {})]
    assert "needs the --key" in sparrow.error("publish", "a", "--tombstone", code=2)["message"]


def test_lines_of_standard_input_become_messages(sparrow: Any) -> None:
    done = sparrow.json("publish", "a", "-", "--key", "k", input="one\n\ntwo\r\nthree")
    assert done["messages"] == 4
    assert [data for data, key, _ in everything(sparrow, "a")] == ["one", "", "two", "three"]


def test_many_lines_go_in_batches(sparrow: Any) -> None:
    lines = "".join(f"{number}\n" for number in range(12_345))
    assert "12,345 messages" in sparrow("publish", "a", "-", input=lines)
    assert sparrow.json("topic", "list")[0]["messages"] == 12_345


def test_ndjson_is_taken_apart_by_its_fields(sparrow: Any) -> None:
    lines = [
        {"data": "text", "key": "k", "attributes": {"n": 1, "t": "x"}, "priority": 3},
        {"data": {"a": 1}},
        {"data": None, "key": "gone"},
        {"data": "/w==", "data_encoding": "base64"},
    ]
    sparrow("publish", "a", "-", "--format", "ndjson", input="\n".join(map(json.dumps, lines)))
    found = sparrow.lines("tail", "a")
    assert [(each["data"], each["key"]) for each in found] == [
        ("text", "k"),
        ('{"a":1}', None),
        (None, "gone"),
        ("/w==", None),
    ]
    assert found[0]["attributes"] == {"n": "1", "t": "x"}
    assert found[3]["data_encoding"] == "base64"


def test_ndjson_without_data_is_published_whole_and_fields_can_be_named(sparrow: Any) -> None:
    lines = '{"id": 7, "body": "b", "meta": {"x": "1"}}\n'
    sparrow("publish", "a", "-", "--format", "ndjson", "--key-field", "id", input=lines)
    sparrow(
        *("publish", "b", "-", "--format", "ndjson", "--data-field", "body", "--attributes-field", "meta"),
        input=lines,
    )
    assert everything(sparrow, "a") == [(lines.strip(), "7", {})]
    assert everything(sparrow, "b") == [("b", None, {"x": "1"})]


def test_messages_can_be_piped_from_one_topic_to_another(sparrow: Any) -> None:
    sparrow("publish", "a", "x", "--key", "k", "-a", "env=prod", "--priority", "2")
    piped = sparrow("tail", "a", "--json")
    sparrow("publish", "b", "-", "--format", "ndjson", input=piped)
    assert everything(sparrow, "b") == [("x", "k", {"env": "prod"})]


def test_csv_rows_become_json_with_a_column_as_key(sparrow: Any, tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.write_text('id,note\n1,plain\n2,"two\nlines"\n')
    sparrow("publish", "a", "--file", file, "--key-column", "id")
    assert [(json.loads(data), key) for data, key, _ in everything(sparrow, "a")] == [
        ({"id": "1", "note": "plain"}, "1"),
        ({"id": "2", "note": "two\nlines"}, "2"),
    ]


def test_parquet_is_published_by_its_columns(sparrow: Any, tmp_path: Path) -> None:
    file, other = tmp_path / "m.parquet", tmp_path / "o.parquet"
    pq.write_table(pa.table({"data": [b"a", b"b"], "key": ["1", None]}), file)
    pq.write_table(pa.table({"id": [7], "total": [1.5]}), other)
    assert sparrow.json("publish", "a", "-F", file)["messages"] == 2
    assert everything(sparrow, "a") == [("a", "1", {}), ("b", None, {})]
    sparrow("publish", "b", "-F", other, "--key-column", "id")
    assert everything(sparrow, "b") == [('{"id":7,"total":1.5}', "7", {})]


def test_receipts_of_a_stream_can_be_asked_for(sparrow: Any) -> None:
    assert sparrow("publish", "a", "-", "--receipts", input="x\ny\n").splitlines() == ["1-0-0", "1-0-1"]
    receipts = sparrow.lines("publish", "a", "-", "--receipts", input="z\n")
    assert [receipt["offset"] for receipt in receipts] == [2]


def test_what_was_stored_before_an_error_is_told(sparrow: Any) -> None:
    good = "".join('{"data":"x"}\n' for _ in range(6000))
    error = sparrow.error("publish", "a", "-", "--format", "ndjson", input=good + "{broken\n", code=2)
    assert "line 6001 of standard input is not JSON" in error["message"]
    stored = sparrow.json("topic", "list")
    assert error["details"].get("published", 0) == (stored[0]["messages"] if stored else 0)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "one of them"),
        (["x", "--file", "f"], "one of them"),
        (["x", "--attribute", "env"], "not name=value"),
        (["-", "--ttl", "5s"], "not for streams"),
        (["x", "--format", "csv"], "--format is for"),
        (["-", "--key-field", "id"], "lines have no fields"),
        (["-", "--format", "parquet"], "cannot be read from a pipe"),
        (["--file", "/nowhere.csv"], "cannot be read"),
        (["-", "--format", "ndjson"], "is not JSON"),
        (["-", "--format", "ndjson", "--key-field", "nix"], "is not JSON"),
        (["x", "--deliver-at", "soon"], "not a time"),
    ],
)
def test_wrong_sources_are_refused(sparrow: Any, words: list[str], complaint: str) -> None:
    assert complaint in sparrow.error("publish", "a", *words, code=2, input="x\n")["message"]


def test_a_row_that_does_not_fit_its_titles_is_refused(sparrow: Any, tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text("a,b\n1\n")
    assert "line 2" in sparrow.error("publish", "t", "-F", file, code=2)["message"]
