"""The command line as a whole: errors, exit codes, help, completion, signals, terminals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparrow.cli.main import GROUPS

TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-m", "sparrow.cli.main"]
QUICK = {"up", "config", "log"}
"""Groups that are tested elsewhere."""


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARROW_", "COLUMNS"))}
    return {**kept, **extra}


def on_a_terminal(*words: object) -> tuple[int, str]:
    """The exit code and all that a person sees."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(COLUMNS="100", TERM="xterm"),
    )
    os.close(theirs)
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


# Errors.


def test_an_error_is_one_line_with_code_and_hint(sparrow: Any) -> None:
    assert sparrow("topic", "show", "nix", code=3) == ""
    (line,) = sparrow.err.splitlines()
    assert line.startswith("error: there is no topic 'nix' (code: TOPIC_NOT_FOUND; hint: ")


def test_a_wrong_command_line_is_one_line_and_2(sparrow: Any) -> None:
    for words in (["topic", "create"], ["topic", "create", "a", "--nix"], ["pull", "s", "--max", "x"]):
        sparrow.bare(*words, code=2)
        (line,) = sparrow.err.splitlines()
        assert "code: USAGE" in line
        assert f"hint: sparrow {words[0]}" in line
        sparrow.bare(*words, "--json", code=2)
        assert json.loads(sparrow.err)["error"]["code"] == "USAGE"


def test_url_and_data_exclude_each_other(sparrow: Any) -> None:
    assert "cannot go together" in sparrow.error("topic", "list", "--url", "sparrow://h", code=2)["message"]


def test_a_broker_that_does_not_answer_is_5(sparrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.cli.target.CONNECT_S", 0.1)
    monkeypatch.setenv("SPARROW_URL", "sparrow://127.0.0.1:1")
    sparrow.bare("topic", "list", "--json", code=5)
    error = json.loads(sparrow.err)["error"]
    assert error["code"] == "CONNECTION_LOST"
    assert "sparrow up" in error["hint"]
    sparrow.bare("topic", "list", "--url", "http://nix", code=2)


def test_a_directory_that_is_not_there_is_not_made(sparrow: Any, tmp_path: Path) -> None:
    sparrow.bare("topic", "list", "--data", tmp_path / "nix", code=3)
    assert not (tmp_path / "nix").exists()


def test_what_clients_read_from_the_environment_is_no_setting(
    sparrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARROW_URL", "sparrow://127.0.0.1:1")
    monkeypatch.setenv("SPARROW_TOKEN", "secret")
    assert "secret" not in sparrow.bare("config", "show")


# Help.


@pytest.mark.parametrize(
    "group", [group for group in GROUPS if group.name not in QUICK], ids=lambda g: g.name
)
def test_every_command_has_help_with_an_example(sparrow: Any, group: Any) -> None:
    page = sparrow.bare(group.name, "--help")
    if group.is_single:
        assert "Example" in page
        return
    check_verbs(sparrow, page, group.name)


def check_verbs(sparrow: Any, page: str, *words: str) -> None:
    """Those of a group, and of a group inside it."""
    listed = page.partition("Commands:\n")[2].partition("\n\n")[0]
    verbs = [line.split()[0] for line in listed.splitlines()]
    assert len(verbs) >= 3
    for verb in verbs:
        below = sparrow.bare(*words, verb, "--help")
        assert f"Example: sparrow {' '.join(words)} {verb}" in " ".join(below.split())
        if "Commands:" in below:
            check_verbs(sparrow, below, *words, verb)
        else:
            assert "--json" in below


def test_help_loads_neither_a_broker_nor_tables() -> None:
    program = (
        "import sys\nfrom sparrow.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'aiohttp', 'pyarrow', 'uvloop', 'sqlalchemy', 'rich'} & set(sys.modules)))\n"
    )
    for words in (["--help"], ["topic", "create", "--help"], ["publish", "--help"], ["dlq", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.stdout.splitlines()[-1] == "[]", words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sparrow to", "topic"),
        ("sparrow topic cre", "create"),
        ("sparrow topic create a --durability d", "durable"),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, found: str) -> None:
    extra = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    env = environment(_SPARROW_COMPLETE="complete_bash", **extra)
    program = "import sys; from sparrow.cli.main import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, env=env
    )
    assert found in done.stdout.splitlines(), done.stderr


# Terminals and signals.


def test_a_terminal_gets_tables_and_a_progress_bar(sparrow: Any, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"line {number}\n" for number in range(20_000)))
    code, seen = on_a_terminal("publish", "a", "--file", file, "--data", sparrow.data)
    assert code == 0
    assert "publishing to a" in seen
    assert "20,000 messages" in seen
    code, seen = on_a_terminal("topic", "list", "--data", sparrow.data)
    assert (code, "\t" in seen, "20,000" in seen, "7d" in seen) == (0, False, True, True)


def test_ctrl_c_ends_cleanly_with_130(sparrow: Any) -> None:
    sparrow("publish", "a", "x")
    process = subprocess.Popen(
        [*COMMAND, "tail", "a", "--follow", "--data", str(sparrow.data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline().endswith("x\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_reader_that_goes_away_is_no_crash(sparrow: Any) -> None:
    sparrow("publish", "a", "-", input="".join(f"{number}\n" for number in range(50_000)))
    command = [*COMMAND, "tail", "a", "--from", "earliest", "--data", str(sparrow.data)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(TIMEOUT_S) == 1
