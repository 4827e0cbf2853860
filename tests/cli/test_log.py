"""``sparrow log`` as real processes: what people read, what scripts parse, and the exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.settings import Settings

TIMEOUT_S = 60.0
MESSAGES = 400


async def make(root: Path) -> None:
    async with await Broker.open(Settings(data=str(root))) as broker:
        await broker.create_topic("orders.us.created", partitions=2)
        await broker.create_topic("audit")
        for number in range(2):
            data = [f"order {number}-{place}".encode() for place in range(MESSAGES)]
            await broker.publish_batch(
                "orders.us.created", data, keys=[f"k{place}" for place in range(MESSAGES)]
            )
            await broker.publish_batch("audit", data)
            if number == 0:
                await broker.seal()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("log") / "data"
    asyncio.run(make(root))
    return root


@pytest.fixture
def data(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "data")
    return tmp_path / "data"


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARROW_", "COLUMNS"))}
    return {**kept, **extra}


def command(words: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "sparrow.cli.main", "log", *map(str, words)]


def run(*words: object, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(words), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(**extra)
    )


def run_json(*words: object, code: int = 0) -> Any:
    done = run(*words, "--json")
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def run_on_a_terminal(*words: object, answer: str = "") -> tuple[int, str]:
    """The exit code and all that a person sees."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(words),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(COLUMNS="100", TERM="xterm"),
    )
    os.close(theirs)
    if answer:
        os.write(ours, answer.encode())
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed.
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    return process.wait(timeout=TIMEOUT_S), seen.decode(errors="replace")


def damage(data: Path) -> Path:
    path = data / "topics" / "audit" / "0" / f"{0:020d}.parquet"
    column = pq.read_metadata(path).row_group(0).column(3)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    return path


# Inspect.


@pytest.mark.parametrize("columns", [80, 120])
def test_a_summary_fits_the_terminal_and_names_everything(data: Path, columns: int) -> None:
    done = run("inspect", data, COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if str(data) not in line) <= columns
    for title in ("Topics", "Journal", "Segments"):
        assert title in lines
    assert "orders.us.created" in done.stdout


def test_a_summary_as_json_has_the_same_as_numbers(data: Path) -> None:
    summary = run_json("inspect", data)
    assert summary["format"] == 1
    assert {row["topic"] for row in summary["partitions"]} == {"audit", "orders.us.created"}
    assert sum(row["end_offset"] for row in summary["partitions"]) == 4 * MESSAGES


def test_one_topic_and_one_partition_can_be_chosen(data: Path) -> None:
    summary = run_json("inspect", data, "--topic", "orders.us.created", "--partition", 1)
    assert [(row["topic"], row["partition"]) for row in summary["partitions"]] == [("orders.us.created", 1)]
    assert {row["partition"] for row in summary["segments"]} == {1}


def test_entries_of_a_journal_file_are_listed(data: Path) -> None:
    number = run_json("inspect", data)["journal"][0]["number"]
    done = run("inspect", data, "--file", number)
    assert "audit/0 400–799" in done.stdout  # noqa: RUF001
    entries = run_json("inspect", data, "--entries")
    assert {entry["kind"] for entry in entries} == {"batch", "note"}
    assert all(entry["is_crc_right"] for entry in entries)


def test_messages_are_shown_across_lake_and_journal(data: Path) -> None:
    page = run_json("inspect", data, "--messages", "--topic", "audit", "--offset", 398, "--limit", 4)
    assert [message["offset"] for message in page["messages"]] == [398, 399, 400, 401]
    done = run("inspect", data, "--messages", "--topic", "audit", "--offset", 399, "--limit", 2)
    assert "order 0-399" in done.stdout
    assert "order 1-0" in done.stdout


def test_a_topic_that_is_not_there_is_refused_with_those_that_are(data: Path) -> None:
    done = run("inspect", data, "--topic", "oders")
    assert done.returncode == 3
    assert "audit, orders.us.created" in done.stderr


# Verify.


def test_a_whole_directory_exits_with_0_and_is_not_changed(data: Path) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    done = run("verify", data)
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole: every checksum matches" in done.stdout
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


def test_damage_exits_with_1_and_says_what_it_means(data: Path) -> None:
    path = damage(data)
    done = run("verify", data)
    assert done.returncode == 1
    assert str(path.relative_to(data)) in done.stdout
    assert "offsets 0–399 of audit partition 0 cannot be read" in done.stdout  # noqa: RUF001
    verdict = run_json("verify", data, code=1)
    (found,) = verdict["damages"]
    assert (found["topic"], found["partition"], found["start_offset"], found["end_offset"]) == (
        "audit",
        0,
        0,
        400,
    )
    assert run("verify", "--fast", data).returncode == 0


def test_what_cannot_be_looked_at_exits_with_2(data: Path, tmp_path: Path) -> None:
    assert run("verify", tmp_path / "nowhere").returncode == 2
    (data / "sparrow.json").write_text('{"format": 99}')
    done = run("verify", data, "--json")
    assert done.returncode == 2
    assert json.loads(done.stderr)["error"]["code"] == "DATA_DIRECTORY_NEWER"


async def test_every_command_refuses_a_directory_that_a_broker_has_open(data: Path) -> None:
    async with await Broker.open(Settings(data=str(data))):
        for words, code in ((["inspect"], 7), (["verify"], 2), (["rebuild", "--yes"], 7)):
            done = await asyncio.to_thread(run, *words, data, "--json")
            assert done.returncode == code
            assert json.loads(done.stderr)["error"]["code"] == "DATA_DIRECTORY_LOCKED"
            assert done.stdout == ""


def test_a_person_on_a_terminal_sees_progress_and_a_pipe_does_not(data: Path) -> None:
    code, seen = run_on_a_terminal("verify", data)
    assert code == 0
    assert "verifying" in seen
    assert "verifying" not in run("verify", data).stdout + run("verify", data).stderr


# Rebuild.


def test_a_rebuild_must_be_confirmed(data: Path) -> None:
    (data / "catalog.db").unlink()
    done = run("rebuild", data)
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
    code, seen = run_on_a_terminal("rebuild", data, answer="n\n")
    assert (code, "Put a new catalog" in seen) == (2, True)
    assert not (data / "catalog.db").exists()
    code, seen = run_on_a_terminal("rebuild", data, answer="y\n")
    assert (code, "The new catalog is in place" in seen) == (1, True)
    assert (data / "catalog.db").exists()


def test_a_dry_run_lists_losses_and_changes_nothing(data: Path) -> None:
    for name in ("catalog.db", "catalog.clean"):
        (data / name).unlink()
    damage(data)
    before = sorted(data.rglob("*"))
    done = run("rebuild", data, "--dry-run", COLUMNS="80")
    assert done.returncode == 1
    assert "offsets 0–399 of audit partition 0 cannot be read" in done.stdout  # noqa: RUF001
    assert "Nothing was changed" in done.stdout
    assert sorted(data.rglob("*")) == before


def test_a_broker_serves_everything_after_a_rebuild(data: Path) -> None:
    (data / "catalog.db").write_bytes(b"not a database at all" * 500)
    rebuilt = run_json("rebuild", data, "--yes", code=1)
    assert {loss["file"] for loss in rebuilt["losses"]} == {"catalog.db"}
    assert (data / rebuilt["old_catalog"]).exists()
    assert run("verify", data).returncode == 0

    async def count() -> int:
        async with await Broker.open(Settings(data=str(data))) as broker:
            return len(await broker.read("audit", max_messages=10_000))

    assert asyncio.run(count()) == 2 * MESSAGES


def test_a_rebuild_that_loses_nothing_exits_with_0(data: Path) -> None:
    assert run_json("rebuild", data, "--yes")["is_whole"]


# Help.


@pytest.mark.parametrize("name", ["inspect", "verify", "rebuild"])
def test_help_says_that_the_broker_must_be_stopped_and_what_the_exit_codes_mean(name: str) -> None:
    done = run(name, "--help", COLUMNS="100", TERM="dumb")
    text = " ".join(done.stdout.split())
    assert "The broker must be stopped." in text
    assert "Exit codes: 0" in text
