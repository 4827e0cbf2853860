"""The binary protocol of ``sparrow up``, as a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sparrow.model.settings import Address
from sparrow.wire import heads
from sparrow.wire.frame import FrameType

from .wireclient import Client, publish_batch

CALL = "from sparrow.cli.main import main\nmain()\n"


def start(data: Path, tcp: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    words = ["up", "--data", str(data), "--http", "127.0.0.1:0", "--tcp", tcp, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


async def test_a_broker_serves_tcp_drains_on_sigterm_and_keeps_what_was_receipted(tmp_path: Path) -> None:
    for number in range(2):
        process, started = start(tmp_path / "data", "127.0.0.1:0")
        try:
            host, _, port = started["tcp"].removeprefix("sparrow://").rpartition(":")
            client = await Client.connect(Address(host, int(port)))
            await client.hello()
            head, body = publish_batch("t", [b"x"])
            receipts = await client.ask(head, body)
            assert receipts.runs[0].base_offset == number
            process.send_signal(signal.SIGTERM)
            flow: heads.Flow = await client.next_head(FrameType.FLOW)
            assert flow.kind == "draining"
            assert await client.ended()
            await client.close()
            assert await asyncio.to_thread(process.wait, 10) == 0
        finally:
            process.kill()
            process.communicate()


async def test_tcp_can_be_turned_off(tmp_path: Path) -> None:
    process, started = await asyncio.to_thread(start, tmp_path / "data", "none")
    try:
        assert "tcp" not in started
    finally:
        process.kill()
        process.communicate()
