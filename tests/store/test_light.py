"""What the store must not load by the way: it would stop everything for a second while it does so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from sparrow.cli.up import _travel_light
_travel_light()
from sparrow.broker.broker import Broker
from sparrow.model.settings import Settings

async def work():
    async with await Broker.open(Settings(data=sys.argv[1])) as broker:
        await broker.create_topic("orders")
        subscription = await broker.subscribe("work", "orders")
        await broker.publish_batch("orders", [b"x"] * 1000, keys=["k"] * 1000)
        await subscription.ack(await subscription.pull(100))
        assert await broker.seal() == 1000
        await subscription.ack(await subscription.pull(1000))
        assert await broker.read("orders", offset=0, max_messages=10)

asyncio.run(work())
print([name for name in ("pandas", "numpy") if name in sys.modules])
"""


def test_publishing_delivering_sealing_and_reading_load_neither_pandas_nor_numpy(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="without pandas nothing can load it")
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "data")], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr
