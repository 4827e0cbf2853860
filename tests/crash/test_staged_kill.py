"""A broker that is killed while Spark-like writers stage and commit: every batch is there once, in order.

The writer is one forked child a life: it opens the directory that the last one left, stages the parts of the
next batch, commits it, and goes on until it is killed. As a driver would, it repeats the batch that it had no
answer for. The parent hears over a pipe which commits were answered.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import time
import traceback
from pathlib import Path

import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.settings import KIB, MIB, JournalSettings, Settings
from sparrow.model.stage import StagingSettings

LIVES, LIVES_MAX = 12, 60
PARTS = 3
CALLS = 4


def settings(data: Path) -> Settings:
    """Small chains, so that every other commit is rolled forward; files are sealed all the time."""
    return Settings(
        data=str(data),
        journal=JournalSettings(file_bytes=1 * MIB, rotate_after_s=1.0),
        staging=StagingSettings(chain_bytes_max=64 * KIB),
    )


def payloads(batch: int, part: int) -> list[list[bytes]]:
    """What a part of a batch stages, call by call; odd batches do not fit one chain."""
    size = 8 * KIB if batch % 2 else 100
    return [
        [f"{batch}/{part}/{call}/{row}".encode().ljust(size, b".") for row in range(5)]
        for call in range(CALLS)
    ]


def expected(batches: int) -> list[bytes]:
    return [
        row
        for batch in range(batches)
        for part in range(PARTS)
        for call in payloads(batch, part)
        for row in call
    ]


async def found(broker: Broker) -> list[bytes | None]:
    rows: list[bytes | None] = []
    while messages := await broker.read("out", offset=len(rows)):
        rows += [message.data for message in messages]
    return rows


async def write_batch(broker: Broker, life: int, batch: int) -> None:
    parts = []
    for part in range(PARTS):
        for position, call in enumerate(payloads(batch, part)):
            table = pa.table({"data": pa.array(call, pa.binary())})
            await broker.stage(f"{batch}/{life}", str(part), "out", table, position=position)
        parts.append((f"{batch}/{life}", str(part), CALLS * 5))
    await broker.commit_staged("query", batch, parts)


async def live(data: Path, life: int, heard: int, report: int) -> None:
    """One life of the writer; ``heard`` batches were answered before."""
    async with await Broker.open(settings(data)) as broker:
        await broker.create_topic("out") if not await broker.topics() else None
        newest = await broker.committed_batch("query")
        known = 0 if newest is None else newest + 1
        assert known in (heard, heard + 1), f"{known} batches are known, {heard} were answered"
        assert await found(broker) == expected(known)
        os.write(report, b"ready\n")
        batch = heard  # The one without an answer is sent again, whether it is committed or not.
        while True:
            await write_batch(broker, life, batch)
            os.write(report, f"{batch}\n".encode())
            batch += 1


def run_life(data: Path, life: int, heard: int, life_s: float, *, is_awaited: bool) -> int:
    """Lets one child live for a while, from its start or from when it is ready; how many batches are answered
    by then."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            asyncio.run(live(data, life, heard, writing))
        except BaseException:  # noqa: BLE001 - a child must not go on as the test
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    if is_awaited:
        select.select([reading], [], [], 60.0)
    time.sleep(life_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as lines:
        told = [int(line) for line in lines if line != "ready\n"]
    assert os.WIFSIGNALED(status), "the writer found something wrong; see above"
    return told[-1] + 1 if told else heard


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_any_moment_every_batch_is_published_once_and_in_order(tmp_path: Path) -> None:
    chance = random.Random(11)
    heard = life = 0
    while life < LIVES or (heard < LIVES and life < LIVES_MAX):
        is_awaited = life % 3 > 0  # Every third life may end while it recovers.
        life_s = chance.uniform(0.02, 0.6)
        heard = run_life(tmp_path / "data", life, heard, life_s, is_awaited=is_awaited)
        life += 1
    assert heard >= LIVES

    async def look() -> None:
        async with await Broker.open(settings(tmp_path / "data")) as broker:
            newest = await broker.committed_batch("query")
            assert newest is not None
            assert newest + 1 in (heard, heard + 1)
            assert await found(broker) == expected(newest + 1)

    asyncio.run(look())
