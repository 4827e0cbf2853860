"""Kills a broker under load with SIGKILL, again and again, and checks what the next one finds.

    python tests/crash/driver.py --cycles 200 --seed 7 --data /dev/shm/crash

Each cycle is one forked child: it opens the directory that the last one left, checks every partition
against what all publishers before it were told, sends again what was never receipted, and publishes until
it is killed. It streams what it sends, and the receipts, over a pipe. The parent holds the claims; a child
inherits them by being forked. The parent never runs a thread or a loop, so forking it is safe and a cycle
costs no import.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import os
import pickle
import random
import select
import shutil
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute
import pyarrow.parquet  # noqa: F401 - imported before the fork, so that no child pays for it

from sparrow.broker.broker import Broker
from sparrow.model.settings import (
    KIB,
    MIB,
    JournalSettings,
    LakeSettings,
    MaintenanceSettings,
    Settings,
)
from sparrow.testing import checker

TOPICS: dict[str, dict[str, Any]] = {
    "bulk": {"partitions": 3, "retention_bytes": 256 * KIB, "codec": "lz4"},
    "tiny": {"partitions": 1, "retention_messages": 200},
    "ordered": {"partitions": 2, "retention_bytes": 64 * KIB},
    "once": {"partitions": 2, "retention_messages": 200},
    "quick": {"partitions": 1, "durability": "written", "retention_messages": 200},
    "kept": {"partitions": 1, "retention_s": None},
}
SHORTENED = frozenset(TOPICS) - {"kept"}
KEYS = [f"k{number}" for number in range(40)]
SINGLES = 8
_LENGTH = struct.Struct("<I")
_CHECK_PATIENCE_S = 60.0
_LIFE_S = 1.0


def settings(data: Path) -> Settings:
    """Small files and short intervals: rotation, sealing and retention run all the time."""
    return Settings(
        data=str(data),
        journal=JournalSettings(file_bytes=1 * MIB, rotate_after_s=0.05, sync_interval_s=0.01),
        lake=LakeSettings(row_group_bytes=64 * KIB),
        maintenance=MaintenanceSettings(retention_interval_s=0.04),
    )


class Request:
    """Something sent, until its receipt is known."""

    def __init__(self, topic: str, payloads: list[bytes], producer: str = "", sequence: int = 0) -> None:
        self.topic = topic
        self.payloads = payloads
        self.producer = producer
        self.sequence = sequence


class Memory:
    """What the publishers know, over all lives of the broker."""

    def __init__(self) -> None:
        self.claims = checker.Claims()
        self.open: dict[Any, Request] = {}
        self.next_sequence = 0
        self.counts: Counter[str] = Counter()

    def take(self, kind: str, *values: Any) -> None:
        self.counts[kind] += 1
        getattr(self, f"_{kind}")(*values)

    def _sent(self, token: Any, request: Request) -> None:
        self.open[token] = request
        for place, payload in enumerate(request.payloads):
            self.claims.sent(request.topic, payload, request.producer, request.sequence + place)
        if request.producer:
            self.next_sequence = max(self.next_sequence, request.sequence + len(request.payloads))

    def _receipted(self, token: Any, places: list[tuple[int, int]]) -> None:
        request = self.open.pop(token)
        for payload, (partition, offset) in zip(request.payloads, places, strict=True):
            self.claims.receipted(request.topic, partition, offset, payload)
        self.counts["messages"] += len(places)

    def _created(self, topic: str) -> None:
        self.claims.created(topic)

    def _deleting(self, topic: str) -> None:
        self.claims.deleting(topic)

    def _deleted(self, topic: str) -> None:
        self.claims.deleted(topic)

    def _learned(self, seen: dict[checker.Partition, checker.Seen]) -> None:
        self.claims.learn(seen)

    def _closing(self) -> None: ...

    def _ready(self) -> None: ...

    def _sealed(self) -> None: ...

    def _dropped(self) -> None: ...

    def _failed(self, text: str) -> None:
        raise checker.CheckFailed(text)

    def unreceipted(self, topic: str) -> list[tuple[Any, Request]]:
        """What has to be sent again, in the order in which it was sent."""
        return [(token, request) for token, request in self.open.items() if request.topic == topic]

    def forget_unrepeatable(self) -> None:
        """Publishers without a sequence or a key do not send again."""
        self.open = {token: one for token, one in self.open.items() if one.topic in ("ordered", "once")}


# The child.


class Life:
    """One life of the broker, from opening to SIGKILL."""

    def __init__(self, data: Path, memory: Memory, cycle: int, seed: int, pipe: int) -> None:
        self._data = data
        self._memory = memory
        self._cycle = cycle
        self._random = random.Random(seed)
        self._pipe = pipe
        self._numbers = itertools.count()

    def tell(self, kind: str, *values: Any) -> None:
        """Blocks when the parent is slow, which is a load of its own."""
        body = pickle.dumps((kind, *values), protocol=5)
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        while rest:
            rest = rest[os.write(self._pipe, rest) :]

    async def run(self) -> None:
        broker = await Broker.open(settings(self._data))
        if broker.recovery.damages:
            self.tell("failed", f"false alarm: {broker.recovery.damages}")
        logs = await checker.read_logs(broker)
        complaints = checker.judge(self._memory.claims, logs, SHORTENED)
        if complaints:
            self.tell("failed", f"{len(complaints)} promises are broken:\n  " + "\n  ".join(complaints[:20]))
        self.tell("learned", self._memory.claims.look(logs))
        await self._make_topics(broker)
        self.tell("ready")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._bulk(broker))
            group.create_task(self._ordered(broker))
            group.create_task(self._once(broker))
            group.create_task(self._kept(broker))
            group.create_task(self._passing(broker))
            group.create_task(self._watch(broker))
            for number in range(SINGLES):
                group.create_task(self._single(broker, ("tiny", "quick")[number % 4 == 0]))
            if self._random.random() < 0.1:
                group.create_task(self._close(broker))

    async def _make_topics(self, broker: Broker) -> None:
        there = {topic.name for topic in await broker.topics()}
        for name, options in TOPICS.items():
            if name not in there:
                await broker.create_topic(name, **options)
            self.tell("created", name)

    def _payload(self, writer: str, size: int) -> bytes:
        head = f"{writer}/{self._cycle}/{next(self._numbers)}/".encode()
        return head + self._random.randbytes(size)

    def _payloads(self, writer: str, count: int, size: int) -> list[bytes]:
        return [self._payload(writer, self._random.randint(0, size)) for _ in range(count)]

    def _keys(self, count: int) -> list[str]:
        return self._random.choices(KEYS, k=count)

    def _receipted(self, token: Any, receipts: Any) -> None:
        self.tell("receipted", token, [(receipt.partition, receipt.offset) for receipt in receipts])

    async def _bulk(self, broker: Broker) -> None:
        """Large batches; every second one is an atomic chain over the partitions."""
        while True:
            payloads = self._payloads("bulk", self._random.choice((1, 30, 150)), 1_500)
            keys = self._keys(len(payloads)) if self._random.random() < 0.5 else None
            token = ("bulk", next(self._numbers))
            self.tell("sent", token, Request("bulk", payloads))
            self._receipted(token, await broker.publish_batch("bulk", payloads, keys=keys))
            await asyncio.sleep(0.005)

    async def _single(self, broker: Broker, topic: str) -> None:
        while True:
            payload = self._payload(topic, self._random.randint(0, 200))
            token = (topic, next(self._numbers))
            self.tell("sent", token, Request(topic, [payload]))
            self._receipted(token, [await broker.publish(topic, payload, key=self._random.choice(KEYS))])
            await asyncio.sleep(0.01)

    async def _ordered(self, broker: Broker) -> None:
        """A producer with its own sequences, three requests on their way at any time."""
        producer = await broker.producer("source")
        for token, request in self._memory.unreceipted("ordered"):
            self.tell("sent", token, request)
            await self._in_order(producer, token, request)
        limit = asyncio.Semaphore(3)
        async with asyncio.TaskGroup() as group:
            for sequence in self._sequences():
                await limit.acquire()
                request = Request("ordered", self._next_payloads, "source", sequence)
                self.tell("sent", ("ordered", sequence), request)
                work = self._in_order(producer, ("ordered", sequence), request)
                group.create_task(work).add_done_callback(lambda _: limit.release())
                await asyncio.sleep(0.004)

    def _sequences(self) -> Iterator[int]:
        sequence = self._memory.next_sequence
        while True:
            self._next_payloads = self._payloads("ordered", self._random.choice((1, 2, 20)), 500)
            yield sequence
            sequence += len(self._next_payloads)

    async def _in_order(self, producer: Any, token: Any, request: Request) -> None:
        # The keys follow from the sequence, so that a repeat is the same request.
        keys = [KEYS[(request.sequence + place) % 7] for place in range(len(request.payloads))]
        receipts = await producer.publish_batch(
            "ordered", request.payloads, keys=keys, sequence=request.sequence
        )
        self._receipted(token, receipts)

    async def _once(self, broker: Broker) -> None:
        """Idempotency keys; the token holds the first, the payloads bear the rest."""
        for token, request in self._memory.unreceipted("once"):
            self.tell("sent", token, request)
            await self._with_key(broker, token, request)
        while True:
            payloads = self._payloads("once", self._random.choice((1, 1, 10)), 100)
            token = ("once", f"{self._cycle}-{next(self._numbers)}")
            request = Request("once", payloads)
            self.tell("sent", token, request)
            await self._with_key(broker, token, request)
            await asyncio.sleep(0.01)

    async def _with_key(self, broker: Broker, token: Any, request: Request) -> None:
        keys = [f"{token[1]}-{place}" for place in range(len(request.payloads))]
        self._receipted(
            token, await broker.publish_batch("once", request.payloads, idempotency_keys=keys, keys=keys)
        )

    async def _kept(self, broker: Broker) -> None:
        """Few messages that are never dropped."""
        while True:
            payloads = self._payloads("kept", 5, 60)
            token = ("kept", next(self._numbers))
            self.tell("sent", token, Request("kept", payloads))
            self._receipted(token, await broker.publish_batch("kept", payloads))
            await asyncio.sleep(0.15)

    async def _passing(self, broker: Broker) -> None:
        """Topics that come and go; those that the last life left behind go first."""
        for topic in [topic for topic in await broker.topics() if topic.name.startswith("passing")]:
            await self._delete(broker, topic.name)
        for number in itertools.count():
            name = f"passing.{self._cycle}.{number}"
            self.tell("created", (await broker.create_topic(name, partitions=2)).name)
            payloads = self._payloads("passing", 20, 100)
            token = (name, 0)
            self.tell("sent", token, Request(name, payloads))
            self._receipted(token, await broker.publish_batch(name, payloads, keys=self._keys(20)))
            await asyncio.sleep(self._random.random() * 0.05)
            await self._delete(broker, name)

    async def _delete(self, broker: Broker, name: str) -> None:
        self.tell("deleting", name)
        await broker.delete_topic(name)
        self.tell("deleted", name)

    async def _watch(self, broker: Broker) -> None:
        """Tells of every change of the lake, so that the parent can strike in its middle."""
        before = broker.state().segments
        while True:
            await asyncio.sleep(0.005)
            now = broker.state().segments
            if now != before:
                self.tell("sealed" if now > before else "dropped")
            before = now

    async def _close(self, broker: Broker) -> None:
        """Some lives end in order, or are killed while they try to."""
        await asyncio.sleep(self._random.random() * 0.1)
        self.tell("closing")
        await broker.close()
        os._exit(0)


def live(life: Life) -> None:
    try:
        asyncio.run(life.run())
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        life.tell("failed", traceback.format_exc())
    os._exit(1)


# The parent.


class Inbox:
    """The frames of a child; a frame that was cut by its death is dropped."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._bytes = bytearray()
        self.is_open = True

    def receive(self, timeout_s: float) -> list[tuple[Any, ...]]:
        if self.is_open and select.select([self._pipe], [], [], max(0.0, timeout_s))[0]:
            found = os.read(self._pipe, 1 << 20)
            self._bytes += found
            self.is_open = bool(found)
        return list(self._frames())

    def _frames(self) -> Iterator[tuple[Any, ...]]:
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if len(self._bytes) < _LENGTH.size + length:
                return
            yield pickle.loads(bytes(self._bytes[_LENGTH.size : _LENGTH.size + length]))
            del self._bytes[: _LENGTH.size + length]


def one_cycle(data: Path, memory: Memory, cycle: int, seed: int) -> None:
    """Forks a life, takes in what it tells, and kills it."""
    chance = random.Random(seed)
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    pid = os.fork()
    if pid == 0:
        os.close(read)
        live(Life(data, memory, cycle, seed, write))
    os.close(write)
    try:
        _listen(Inbox(read), memory, chance, pid)
    finally:
        _kill(pid)
        os.close(read)
    memory.forget_unrepeatable()


def _listen(inbox: Inbox, memory: Memory, chance: random.Random, pid: int) -> None:
    """Until the moment to kill has come; what was told up to the death still counts."""
    strike = chance.choices(["opening", "ready", "sealed", "dropped"], [10, 40, 35, 15])[0]
    slack_s = {"opening": 0.06, "ready": 0.2, "sealed": 0.12, "dropped": 0.06}[strike]
    is_marked = strike == "opening"
    deadline = time.monotonic() + (chance.random() * slack_s if is_marked else _CHECK_PATIENCE_S)
    is_dead = is_ready = False
    while inbox.is_open:
        if not is_dead and time.monotonic() >= deadline:
            if not is_ready and not is_marked:
                raise checker.CheckFailed("the broker did not open in time")
            os.kill(pid, signal.SIGKILL)
            is_dead = True
        for event in inbox.receive(0.05 if is_dead else deadline - time.monotonic()):
            memory.take(*event)
            if event[0] == "ready" and not is_marked:
                is_ready, deadline = True, time.monotonic() + _LIFE_S
            if event[0] in (strike, "closing") and not is_marked:
                is_marked, deadline = True, time.monotonic() + chance.random() * slack_s


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def run(root: Path, cycles: int, seed: int, per_directory: int) -> Counter[str]:
    """All cycles; a fresh directory every so often."""
    total: Counter[str] = Counter()
    for start in range(0, cycles, per_directory):
        data, memory = root / f"data-{start}", Memory()
        count = min(per_directory, cycles - start)
        for cycle in range(start, start + count):
            try:
                one_cycle(data, memory, cycle, seed * 1_000_003 + cycle)
            except BaseException:
                print(f"cycle {cycle} of seed {seed} failed; the directory is {data}", file=sys.stderr)
                raise
        total += memory.counts
        shutil.rmtree(data)
    return total


def _refuse_threads() -> None:
    """Forking is safe without threads; the allocator's own knows how to survive it."""
    names = {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
    assert len(names - {"jemalloc_bg_thd"}) == 1, f"threads are running: {names}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-directory", type=int, default=40)
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    _refuse_threads()
    given.data.mkdir(parents=True, exist_ok=True)
    total = run(given.data, given.cycles, given.seed, given.per_directory)
    counts = " ".join(f"{name}={count}" for name, count in sorted(total.items()))
    print(f"cycles={given.cycles} {counts}")


if __name__ == "__main__":
    main()
