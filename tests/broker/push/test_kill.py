"""A broker that is killed with SIGKILL while it pushes, again and again: nothing is lost, and order holds."""

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
from sparrow import webhooks

from .receiving import ReceiverProcess, until

KILLS = 2
MESSAGES = 600
KEYS = 40


class BrokerProcess:
    """``sparrow up`` that may push to this machine."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._port = 0
        self._process: Any = None

    @property
    def url(self) -> str:
        return f"sparrow://127.0.0.1:{self._port}"

    def start(self) -> None:
        words = ["up", "--data", str(self._data), "--tcp", f"127.0.0.1:{self._port}", "--http", "127.0.0.1:0"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from sparrow.cli.main import main; main()", *words, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**kept, "SPARROW_PUSH__ALLOW_NETWORKS": "127.0.0.0/8"},
            cwd=Path(__file__).parents[3],
        )
        self._port = int(json.loads(self._process.stdout.readline())["tcp"].rpartition(":")[2])

    def end(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.wait(timeout=20)
        self._process.stdout.close()


async def test_a_broker_that_is_killed_while_it_pushes_loses_nothing_and_keeps_the_order(
    tmp_path: Path, receiver: ReceiverProcess
) -> None:
    process = BrokerProcess(tmp_path / "data")
    await asyncio.to_thread(process.start)
    try:
        async with sparrow.aconnect(process.url, backoff_min_s=0.02, backoff_max_s=0.2) as broker:
            await broker.create_topic("t", partitions=2)
            handle = await broker.subscribe(
                "hook", "t", ordering="key", push={"url": receiver.url, "max_concurrency": 16}
            )
            (secret,) = await handle.push_secrets()
            assert secret.startswith("whsec_")
            await receiver.mode(delay_s=0.005)
            receipts = await broker.publish_batch(
                "t",
                [b'{"n": %d}' % n for n in range(MESSAGES)],
                keys=[f"k-{n % KEYS}" for n in range(MESSAGES)],
            )
            ids = [receipt.message_id for receipt in receipts]
            for number in range(KILLS):
                wanted = (number + 1) * MESSAGES // (KILLS + 2)
                await until(lambda wanted=wanted: receiver.count() >= wanted, f"{wanted} webhooks")
                process.end()
                await asyncio.to_thread(process.start)

            async def is_done() -> bool:
                return await handle.lag() == 0

            await until(is_done, "everything to be pushed")
            state = await handle.push_state()
            assert state.secrets == 1
    finally:
        process.end(signal.SIGTERM)
    seen = receiver.accepted()
    assert {each.id for each in seen} == set(ids)
    for each in seen:
        webhooks.verify(secret, each.headers, each.body, now_s=each.at)
    first: dict[str, int] = {}
    for place, each in enumerate(seen):
        first.setdefault(each.id, place)
    for key in range(KEYS):
        places = [first[ids[n]] for n in range(key, MESSAGES, KEYS)]
        assert places == sorted(places)
    repeats = len(seen) - len(ids)
    assert repeats <= KILLS * 200, f"{repeats} repeats after {KILLS} kills"
