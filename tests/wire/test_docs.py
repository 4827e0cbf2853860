"""The tables of docs/protocol.md §3 name the frames and fields of the code, no more and no fewer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from sparrow.wire import core
from sparrow.wire.frame import FrameType
from sparrow.wire.heads import HEADS, WireRun

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_BRACKETS = re.compile(r"\[[^][]*\]|\{[^}{]*\}|\([^)(]*\)")


class Row(NamedTuple):
    """A line of a table of frames."""

    number: int
    sender: str
    name: str
    payload: str
    rest: list[str]


def section(title: str) -> str:
    """A part of the page, from its title to the next one."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    assert found, f"{PAGE.name} has no section {title}"
    return found[1]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(title: str) -> list[Row]:
    """The lines that begin with the number of a frame and who sends it."""
    found = []
    for line in section(title).splitlines():
        if match := re.match(r"\| (\d+) ([CB]) \|", line):
            _, name, payload, *rest = cells(line)
            found.append(Row(int(match[1]), match[2], name, payload, rest))
    return found


def fields(column: str) -> list[str]:
    """The names of a head column: what is in brackets or parentheses is about the name in front."""
    while _BRACKETS.search(column):
        column = _BRACKETS.sub("", column)
    return [name.strip() for name in column.split(",")] if column.strip() else []


CORE, EXTENDED = rows("3.1 Core frames"), rows("3.2 Extended frames")


def test_both_tables_are_found() -> None:
    assert len(CORE) >= 7
    assert len(EXTENDED) >= 22


def test_every_frame_of_the_page_has_its_number_in_the_code() -> None:
    named = {row.name: row.number for row in CORE + EXTENDED}
    assert named == {kind.name: kind.value for kind in FrameType}


def test_no_number_or_name_stands_twice_but_that_of_a_heartbeat() -> None:
    for table in (CORE, EXTENDED):
        assert len({row.number for row in table}) == len({row.name for row in table}) == len(table)
    assert {row.name for row in CORE} & {row.name for row in EXTENDED} == {"HEARTBEAT"}


def test_the_extended_frames_are_those_with_a_head() -> None:
    assert sorted(row.number for row in EXTENDED) == sorted(HEADS)


@pytest.mark.parametrize("row", EXTENDED, ids=lambda row: row.name)
def test_the_fields_of_a_head_stand_on_the_page_in_their_order(row: Row) -> None:
    assert fields(row.payload) == list(HEADS[row.number].__struct_fields__)


@pytest.mark.parametrize("row", EXTENDED, ids=lambda row: row.name)
def test_fields_that_may_be_nil_are_marked_so(row: Row) -> None:
    kind = HEADS[row.number]
    nullable = [name for name in kind.__struct_fields__ if "None" in str(kind.__annotations__[name])]
    assert re.findall(r"(\w+)(?: \[\[[\w, ]*\]\])? \(nil:", row.payload) == nullable


def test_the_fields_of_a_run_stand_on_the_page_in_their_order() -> None:
    (row,) = (row for row in EXTENDED if row.name == "RECEIPTS")
    runs = re.search(r"runs \[\[(.*?)\]\]", row.payload)
    assert runs
    assert fields(runs[1]) == list(WireRun._fields)


@pytest.mark.parametrize("row", CORE + EXTENDED, ids=lambda row: f"{row.number} {row.name}")
def test_a_reply_is_a_frame_that_the_broker_sends(row: Row) -> None:
    senders = {other.name: other.sender for other in CORE + EXTENDED}
    for name in re.findall(r"\b[A-Z_]{5,}\b", row.rest[-1] if row.rest else ""):
        assert senders[name] == "B"


def test_the_statuses_of_the_page_are_those_of_the_code() -> None:
    found = re.findall(r"^\| (\d+) \| ", section("3.1 Core frames"), re.M)
    assert list(map(int, found)) == [int(status) for status in core.Status]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("", []),
        ("a", ["a"]),
        ("a, b [[x, [y, z]]], c (1, 2), d {k: v}", ["a", "b", "c", "d"]),
        ("a as above, b", ["a as above", "b"]),
    ],
)
def test_names_are_told_from_what_is_said_about_them(column: str, expected: list[str]) -> None:
    assert fields(column) == expected
