"""Every Python example of the README and the guides runs.

The blocks of one file run in order, in one namespace, in a temporary working directory. A block marked
``python no-run`` is not run. A guide that opens no broker is given one, and a block that needs a program
library which is not installed is passed over.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sparrow

ROOT = Path(__file__).resolve().parents[1]
SPARK = ("compaction.md", "pipelines.md", "spark.md", "spark-sink.md")
"""Guides whose examples each start Spark: `make test-spark` runs them."""
FILES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


ADDRESS = "sparrow://127.0.0.1:9092"
"""Where the documents take a broker to be."""


@contextlib.contextmanager
def served(data: Path) -> Iterator[str]:
    """A broker in a process of its own; its address."""
    words = ["up", "--json", "--data", str(data), "--log-level", "error"]
    for listener in ("--http", "--tcp", "--grpc"):
        words += [listener, "127.0.0.1:0"]
    command = [sys.executable, "-c", "from sparrow.cli.main import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["tcp"]
        finally:
            process.terminate()


class Block(NamedTuple):
    line: int
    code: str


def blocks(file: Path) -> list[Block]:
    """The blocks that are to run, with the line that each begins at."""
    text = file.read_text()
    return [
        Block(text.count("\n", 0, match.start()) + 1, match["code"])
        for match in _FENCE.finditer(text)
        if match["info"].split() == ["python"]
    ]


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all documents run that use Spark: a JVM stays in the directory that it was started in."""
    return tmp_path_factory.mktemp("spark")


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[pytest.mark.soak] if f.name in SPARK else []) for f in FILES if blocks(f)],
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_every_example_of_the_file_runs(
    file: Path,
    tmp_path: Path,
    spark_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for left in spark_home.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    monkeypatch.chdir(spark_home if "sparrow.spark" in file.read_text() else tmp_path)
    namespace: dict[str, Any] = {"__name__": file.stem}
    with contextlib.ExitStack() as stack:
        text, address = file.read_text(), ADDRESS
        if "sparrow.connect(" in text:
            address = stack.enter_context(served(tmp_path / "served"))
        elif "sparrow.open(" not in text:
            namespace["broker"] = stack.enter_context(sparrow.open("./given"))
        for block in blocks(file):
            # Padded, so that an error names the line of the document.
            source = block.code.replace(ADDRESS, address)
            code = compile("\n" * block.line + source, str(file), "exec")
            try:
                exec(code, namespace)
            except ModuleNotFoundError as error:
                if (error.name or "sparrow").startswith("sparrow"):
                    raise


def test_blocks_are_found_in_the_guides_about_delivery() -> None:
    for name in ("delivery.md", "dead-letters.md"):
        assert len(blocks(ROOT / "docs" / "guides" / name)) >= 5
