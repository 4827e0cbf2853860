"""Every shell example of docs/guides/http.md and the README runs, in order, against one broker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.server.api.conftest import Served

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "guides" / "http.md"
ADDRESS = "http://127.0.0.1:8080"
TIMEOUT_S = 60.0
_BLOCK = re.compile(r"^```sh(?P<info>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
PRELUDE = 'set -euo pipefail\ncurl() { command curl -sS --fail-with-body --max-time 30 "$@"; }\n'


class Block(NamedTuple):
    code: str
    is_refused: bool


def blocks(page: Path) -> list[Block]:
    return [Block(found["code"], "refused" in found["info"]) for found in _BLOCK.finditer(page.read_text())]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    words = ["up", "--json", "--data", str(tmp_path / "data"), "--log-level", "error", "--tcp", "none"]
    command = [sys.executable, "-c", "from sparrow.cli.main import main; main()", *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    process = subprocess.Popen(
        [*command, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=kept
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["http"]
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("page", "least"), [(PAGE, 10), (ROOT / "README.md", 1)], ids=lambda v: Path(str(v)).name
)
def test_every_example_of_the_page_runs(page: Path, least: int, address: str, tmp_path: Path) -> None:
    assert len(blocks(page)) >= least
    for block in blocks(page):
        done = subprocess.run(
            ["bash", "-c", PRELUDE + block.code.replace(ADDRESS, address)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=tmp_path,
        )
        outcome = f"{block.code}\n{done.stdout}{done.stderr}"
        assert (done.returncode != 0) == block.is_refused, outcome
        assert ('{"error"' in done.stdout) == block.is_refused, outcome


async def test_every_route_of_the_family_is_on_the_page(served: Served) -> None:
    """Named by its last fixed word."""
    text = PAGE.read_text()
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    own = [path for path in paths if path.startswith(("/v1/topics", "/v1/subscriptions", "/v1/snapshots"))]
    words = {re.findall(r"/([a-z-]+)(?=/|$)", path)[-1] for path in own}
    assert len(words) > 15
    # Webhooks have a page of their own.
    assert {word for word in words if word not in text} <= {"rotate-secret"}
