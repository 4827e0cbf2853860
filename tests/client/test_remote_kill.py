"""A real broker process is killed with SIGKILL under the load of a client, and started again.

The client goes on by itself. Nothing receipted is lost and nothing is stored twice: what was on its way is
sent again under the same sequence, and the broker recognises what it had stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import sparrow
from sparrow.testing import checker

KILLS = 4
LIFE_S = 0.7


class Process:
    """``sparrow up`` on one data directory and one port."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._port = 0
        self._process: Any = None

    @property
    def url(self) -> str:
        return f"sparrow://127.0.0.1:{self._port}"

    def start(self) -> None:
        words = ["up", "--data", str(self._data), "--tcp", f"127.0.0.1:{self._port}", "--http", "127.0.0.1:0"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from sparrow.cli.main import main; main()", *words, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        start = json.loads(self._process.stdout.readline())
        self._port = int(start["tcp"].rpartition(":")[2])

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.wait(timeout=20)
        self._process.stdout.close()


class Load:
    """Publishers and a consumer that know what they were told."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self.claims = checker.Claims()
        self.receipts = 0
        self.consumed: set[bytes] = set()
        self.is_over = False

    async def singles(self, number: int) -> None:
        n = 0
        while not self.is_over:
            payload = b"single-%d-%d" % (number, n)
            self.claims.sent("t", payload)
            receipt = await self._broker.publish("t", payload, key=str(number))
            self._receipted(payload, receipt)
            n += 1

    async def batches(self, number: int) -> None:
        n = 0
        while not self.is_over:
            payloads = [b"batch-%d-%d-%d" % (number, n, k) for k in range(50)]
            for payload in payloads:
                self.claims.sent("t", payload)
            receipts = await self._broker.publish_batch("t", payloads)
            for payload, receipt in zip(payloads, receipts, strict=True):
                self._receipted(payload, receipt)
            n += 1

    def _receipted(self, payload: bytes, receipt: sparrow.Receipt) -> None:
        self.claims.receipted("t", receipt.partition, receipt.offset, payload)
        self.receipts += 1

    async def consume(self, subscription: Any) -> None:
        while not self.is_over or await subscription.lag():
            messages = await subscription.pull(500, timeout_s=0.2)
            self.consumed.update(message.data for message in messages)
            try:
                await subscription.ack(messages)
            except sparrow.errors.StaleAckId:
                continue  # Delivered again.


async def test_client_outlives_its_broker_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    process = Process(tmp_path / "data")
    await asyncio.to_thread(process.start)
    try:
        async with sparrow.aconnect(process.url, backoff_min_s=0.02, backoff_max_s=0.2) as broker:
            await broker.create_topic("t", partitions=2)
            subscription = await broker.subscribe("s", "t", ack_deadline_s=3)
            load = Load(broker)
            load.claims.created("t")
            work = asyncio.gather(
                load.consume(subscription),
                *(load.singles(number) for number in range(20)),
                *(load.batches(number) for number in range(4)),
            )
            for _ in range(KILLS):
                before = load.receipts
                await asyncio.sleep(LIFE_S)
                assert not work.done(), work.exception()
                process.kill()
                assert load.receipts > before, "the client went on after the last kill"
                await asyncio.to_thread(process.start)
            await asyncio.sleep(LIFE_S)
            load.is_over = True
            await asyncio.wait_for(work, 60)
    finally:
        process.kill(signal.SIGTERM)
    async with sparrow.aopen(tmp_path / "data") as embedded:
        logs = await checker.read_logs(embedded)
        assert checker.judge(load.claims, logs, frozenset()) == []
        stored = [payload for log in logs.values() for payload in log.payloads]
        assert load.receipts == len(stored) == len(set(stored))
        assert load.consumed == set(stored)
