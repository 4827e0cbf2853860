"""Runs command lines in this process, on a data directory of the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparrow.cli.main import application


class Commands:
    """``sparrow`` with ``--data`` filled in."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.err = ""

    def __call__(self, *words: object, code: int = 0, input: str | bytes | None = None) -> str:
        """What a command prints on standard output."""
        return self.bare(*words, "--data", self.data, code=code, input=input)

    def bare(self, *words: object, code: int = 0, input: str | bytes | None = None) -> str:
        """The same without a data directory."""
        texts = [str(word) for word in words]
        done = CliRunner().invoke(application(texts), texts, prog_name="sparrow", input=input)
        self.err = done.stderr
        assert done.exit_code == code, (texts, done.exit_code, done.output, done.exception)
        return done.stdout

    def json(self, *words: object, input: str | bytes | None = None) -> Any:
        """The JSON document that a command prints."""
        return json.loads(self(*words, "--json", input=input))

    def lines(self, *words: object, input: str | bytes | None = None) -> list[Any]:
        """The JSON objects that a command prints, one a line."""
        return [json.loads(line) for line in self(*words, "--json", input=input).splitlines()]

    def rows(self, *words: object) -> list[dict[str, str]]:
        """The rows of a listing as a pipe gets it."""
        titles, *rows = [line.split("\t") for line in self(*words).splitlines()]
        return [dict(zip(titles, row, strict=True)) for row in rows]

    def error(self, *words: object, code: int, input: str | bytes | None = None) -> dict[str, Any]:
        """The error of a command that must fail with an exit code."""
        out = self(*words, "--json", code=code, input=input)
        assert out == ""
        found: dict[str, Any] = json.loads(self.err)["error"]
        return found


@pytest.fixture
def sparrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    for name in ("SPARROW_URL", "SPARROW_TOKEN", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "data").mkdir()
    return Commands(tmp_path / "data")
