"""``sparrow topic schema``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.spark.descriptors import ORDER, files

AVRO = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}


def test_a_schema_is_set_shown_and_deleted(sparrow: Any, tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(AVRO))
    sparrow("topic", "create", "orders")
    sparrow("topic", "schema", "set", "orders", tmp_path / "order.avsc", "--type", "avro")
    assert json.loads(sparrow("topic", "schema", "show", "orders")) == AVRO
    shown = sparrow.json("topic", "schema", "show", "orders")
    assert shown == {"type": "avro", "definition": AVRO, "message": ""}
    assert sparrow.json("topic", "schema", "delete", "orders", "--yes") == {"deleted": "orders"}
    error = sparrow.error("topic", "schema", "show", "orders", code=3)
    assert error["code"] == "SCHEMA_NOT_FOUND"
    assert "sparrow topic schema set" in error["hint"]


def test_descriptors_are_read_as_they_are(sparrow: Any, tmp_path: Path) -> None:
    (tmp_path / "shop.desc").write_bytes(files().SerializeToString())
    sparrow("topic", "create", "orders")
    words = ("orders", tmp_path / "shop.desc", "--type", "protobuf", "--message")
    assert sparrow.json("topic", "schema", "set", *words, ORDER)["message"] == ORDER
    assert sparrow.error("topic", "schema", "set", *words, "shop.No", code=2)["code"] == "INVALID_SCHEMA"


def test_a_file_that_cannot_be_read_is_named(sparrow: Any, tmp_path: Path) -> None:
    error = sparrow.error("topic", "schema", "set", "a", tmp_path / "no.avsc", "--type", "avro", code=2)
    assert "no.avsc cannot be read" in error["message"]
    (tmp_path / "bad.avsc").write_bytes(b"\xff")
    error = sparrow.error("topic", "schema", "set", "a", tmp_path / "bad.avsc", "--type", "avro", code=2)
    assert "is not text" in error["message"]
