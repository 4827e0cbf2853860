"""``sparrow pipeline`` on a data directory: everything but running, which tests/spark shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT = """
source: {topic: orders.#, start: earliest, schema: "amount DOUBLE"}
expect: {the amount is positive: amount > 0}
sql: SELECT * FROM source WHERE amount > 1000
sinks: [{topic: large, key: amount}, {table: large}]
"""


@pytest.fixture
def file(tmp_path: Path, sparrow: Any) -> Path:
    (tmp_path / "large.yaml").write_text(TEXT)
    sparrow("publish", "orders.us", "a")
    return tmp_path / "large.yaml"


def test_a_pipeline_is_applied_listed_and_deleted(sparrow: Any, file: Path) -> None:
    (applied,) = sparrow.json("pipeline", "apply", file)
    assert (applied["pipeline"]["name"], applied["state"], applied["lag"]) == ("large", "waiting", 1)
    (row,) = sparrow.rows("pipeline", "list")
    assert (row["name"], row["state"], row["lag"]) == ("large", "waiting", "1")
    assert (row["reads"], row["writes"]) == ("orders.#", "large, table large")
    (subscription,) = sparrow.json("sub", "list")
    assert subscription["policy"]["delivery"] == "pipeline"
    assert "dead-letter_topic\tlarge.dead" in sparrow("pipeline", "status", "large")
    assert sparrow.json("pipeline", "delete", "large", "--yes") == {"deleted": "large", "lag": 1}
    assert sparrow.json("pipeline", "list") == []


def test_a_pipeline_is_stopped_started_and_sought(sparrow: Any, file: Path) -> None:
    sparrow("pipeline", "apply", file, "--stopped")
    assert sparrow.json("pipeline", "status", "large")["state"] == "stopped"
    assert sparrow.json("pipeline", "start", "large")["state"] == "waiting"
    assert sparrow.json("pipeline", "stop", "large", "--wait")["state"] == "stopped"
    sought = sparrow.json("pipeline", "seek", "large", "latest")
    assert (sought["run"], sought["lag"]) == (1, 0)
    assert sparrow("pipeline", "logs", "large") == ""


def test_what_is_wrong_is_told_with_the_file_and_the_key(sparrow: Any, file: Path) -> None:
    file.write_text(TEXT + "mode: all\n")
    error = sparrow.error("pipeline", "apply", file, code=2)
    assert (error["code"], error["details"]["key"]) == ("INVALID_PIPELINE", "mode")
    assert "large.yaml: mode is append or update" in error["message"]
    missing = sparrow.error("pipeline", "status", "none", code=3)
    assert missing["hint"].startswith("`sparrow pipeline list`")
    assert sparrow.error("pipeline", "delete", "none", code=3)["code"] == "PIPELINE_NOT_FOUND"


def test_a_job_is_shown_with_its_turns(sparrow: Any, tmp_path: Path) -> None:
    file = tmp_path / "tidy.yaml"
    file.write_text("{source: state.#, builtin: compact, every: 1h}")
    (applied,) = sparrow.json("pipeline", "apply", file)
    assert (applied["state"], applied["turns"]["count"]) == ("waiting", 0)
    (row,) = sparrow.rows("pipeline", "list")
    assert (row["name"], row["reads"], row["writes"]) == ("tidy", "state.#", "compact, every 1h")
    shown = sparrow("pipeline", "status", "tidy")
    assert "next_turn\t" in shown
    assert "every\t1h" in shown
    assert sparrow.json("pipeline", "stop", "tidy")["state"] == "stopped"
