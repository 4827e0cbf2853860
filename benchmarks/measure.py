"""What the benchmarks share: the raw disk, memory, payloads, and one way to print and judge.

A promise is judged against a limit that is measured in the same run, in turns with what it limits, and
the median of the rounds counts: the machine is shared, so two figures taken minutes apart say nothing.

People read standard output. With ``--json`` they read standard error, and standard output is one JSON
document, which is how ``python -m benchmarks`` makes its table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple, Self, TextIO

import uvloop

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.settings import JournalSettings, LakeSettings, Settings
from sparrow.store.local import LocalStore

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "build" / "benchmarks"
"""Ignored by git, and on the checkout's file system: a temporary directory may be in memory."""

KB = 1024
MIB = 1024 * 1024
MESSAGE_BYTES = 1 * KB
BATCH = 1_000
PAGE = 4096

Batch = list[bytes]


class Options(NamedTuple):
    """How a benchmark was called; ``data`` is a fresh directory that goes when it ends."""

    quick: bool
    data: Path


class Report:
    """Prints figures, judges promises, and remembers both."""

    def __init__(self, benchmark: str, out: TextIO) -> None:
        self.benchmark = benchmark
        self.settings: dict[str, object] = {}
        self.figures: list[dict[str, object]] = []
        self.promises: list[dict[str, object]] = []
        self._out = out

    @property
    def is_kept(self) -> bool:
        return all(promise["holds"] for promise in self.promises)

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def set_out(self, **settings: object) -> None:
        """Under which settings the figures were taken."""
        self.settings.update(settings)
        self.say("  " + ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in settings.items()))

    def figure(self, name: str, value: float, unit: str, note: str = "") -> None:
        """A figure that nothing is promised about."""
        self.figures.append({"name": name, "value": value, "unit": unit, "note": note})
        self.say(f"  {name}: {readable(value)} {unit}{f'  ({note})' if note else ''}")

    def check(
        self, name: str, figure: float, limit: float, unit: str, *, at_least: bool = False, note: str = ""
    ) -> None:
        """A figure that is promised."""
        holds = figure >= limit if at_least else figure <= limit
        bound = "at least" if at_least else "at most"
        self.promises.append(
            {"name": name, "figure": figure, "unit": unit, "bound": bound, "limit": limit, "holds": holds}
        )
        self.say(
            f"  {name}: {readable(figure)} {unit}, promised {bound} {limit:,g}: "
            f"{'holds' if holds else 'BROKEN'}{f'  ({note})' if note else ''}"
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "is_kept": self.is_kept,
                "settings": self.settings,
                "promises": self.promises,
                "figures": self.figures,
            }
        )


Run = Callable[[Options, Report], None]


def main(benchmark: str, text: str | None, run: Run, arguments: Sequence[str] | None = None) -> int:
    """The command line of every benchmark; 1 when a promise is broken."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="JSON on standard output, text on standard error")
    parser.add_argument("--data", type=Path, default=DATA, help="where to make the data directories")
    chosen = parser.parse_args(arguments)
    report = Report(benchmark, sys.stderr if chosen.json else sys.stdout)
    logs.configure("error", "json")
    chosen.data.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{benchmark}-", dir=chosen.data))
    try:
        report.say((text or benchmark).splitlines()[0])
        report.set_out(**machine(directory), size="quick, not a measurement" if chosen.quick else "full")
        run(Options(chosen.quick, directory), report)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report.say("all promises hold" if report.is_kept else "a promise is BROKEN")
    if chosen.json:
        print(report.to_json())
    return 0 if report.is_kept else 1


def machine(directory: Path) -> dict[str, object]:
    """What the figures depend on and the benchmark cannot choose."""
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "file_system": file_system(directory),
        "python": sys.version.split()[0],
    }


def file_system(path: Path) -> str:
    """The type of the file system that holds a path, by the longest mount point above it."""
    found = (0, "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4]
        if path.resolve().is_relative_to(mount):
            found = max(found, (len(mount), after.split()[0]))
    return found[1]


def readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def median_ratio(figures: Sequence[float], limits: Sequence[float]) -> float:
    """The median over the rounds of figure to limit; a round's two halves shared the machine's mood."""
    return statistics.median(figure / limit for figure, limit in zip(figures, limits, strict=True))


# Payloads. They are made before the clock starts, and are many, so that the processor's caches do not
# hold them all.


def random_batches(count: int, message_bytes: int = MESSAGE_BYTES) -> list[Batch]:
    """Batches that cannot be compressed."""
    made = []
    for _ in range(count):
        block = os.urandom(message_bytes * BATCH)
        made.append([block[at : at + message_bytes] for at in range(0, len(block), message_bytes)])
    return made


def json_batches(count: int) -> list[Batch]:
    """Batches of orders as JSON, about 1 KB each; ids and amounts differ, words repeat."""
    choose = random.Random(1)
    return [[_order(choose) for _ in range(BATCH)] for _ in range(count)]


def _order(choose: random.Random) -> bytes:
    items = [
        {
            "sku": f"SKU-{choose.randrange(100_000):06d}",
            "name": choose.choice(["lamp", "chair", "desk", "shelf", "rug"]),
            "quantity": choose.randrange(1, 9),
            "price": round(choose.random() * 500, 2),
        }
        for _ in range(12)
    ]
    order = {
        "id": f"{choose.getrandbits(128):032x}",
        "customer": f"c-{choose.randrange(1_000_000)}",
        "currency": "EUR",
        "status": choose.choice(["created", "paid", "shipped"]),
        "placed_at": f"2025-06-{choose.randrange(1, 29):02d}T12:{choose.randrange(60):02d}:00Z",
        "items": items,
    }
    return json.dumps(order).encode()


# The raw disk.


class Written(NamedTuple):
    """Bytes that went to the disk, and how long they took."""

    bytes: int
    seconds: float
    syncs: int

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6


class RawFile:
    """The limit: sequential pwrite + fdatasync into a preallocated file, written onward from turn to turn.

    One file for a whole run, as the journal is one. A file removed between two turns gives its memory back,
    and whoever writes next is served from that: the same work was seen to go twice as fast so.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - closed by __exit__
        self._position = 0
        os.posix_fallocate(self._file.fileno(), 0, size)
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, source: memoryview, total_bytes: int, bytes_per_sync: int) -> Written:
        """As fast as the system calls allow."""
        descriptor, end, at, syncs = self._file.fileno(), self._position + total_bytes, 0, 0
        start = perf_counter()
        while self._position < end:
            size = min(bytes_per_sync, end - self._position, len(source))
            at = at if at + size <= len(source) else 0
            _pwrite(descriptor, source[at : at + size], self._position)
            os.fdatasync(descriptor)
            self._position, at, syncs = self._position + size, at + size, syncs + 1
        return Written(total_bytes, perf_counter() - start, syncs)


def _pwrite(descriptor: int, piece: memoryview, position: int) -> None:
    while piece:
        written = os.pwrite(descriptor, piece, position)
        piece, position = piece[written:], position + written


def raw_sync_us(directory: Path, count: int, size: int) -> list[float]:
    """Microseconds of each of ``count`` writes of ``size`` bytes with fdatasync, one after the other."""
    piece = os.urandom(size)
    taken = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, count * size)
        os.fsync(file.fileno())
        for number in range(count):
            start = perf_counter()
            os.pwrite(file.fileno(), piece, number * size)
            os.fdatasync(file.fileno())
            taken.append((perf_counter() - start) * 1e6)
    return taken


def drop_cache(path: Path) -> None:
    """Asks the kernel to forget a file's pages; it keeps those that some process has mapped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def device_bytes() -> int:
    """Bytes that this process has had fetched from the device so far: what proves that a read was cold.

    Neither a short time nor few page faults do: the kernel refuses to forget mapped pages without a word,
    and reads ahead without a fault.
    """
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise ProcessLookupError("the kernel does not count what this process reads")


def touch(buffer: Any) -> int:
    """Reads one byte of every page, so that a mapped buffer is really there."""
    return len(memoryview(buffer)[::PAGE].tobytes())


def size_on_disk(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.rglob(pattern))


# Memory and processes.


def resident_mb(process: int | str = "self") -> float:
    """VmRSS in millions of bytes, as the kernel counts it."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ProcessLookupError(f"process {process} has no resident memory")


def environment() -> dict[str, str]:
    """The environment of a child: whatever tunes a broker here must not tune that one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}


def child(*words: str) -> subprocess.Popen[str]:
    """A fresh Python in the checkout."""
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    )


# The broker.


class Unsealed(LocalStore):
    """A store whose sealer is never woken: what is published stays in the journal."""

    async def wait_for_finished(self, bytes_min: int, timeout_s: float) -> None:
        await asyncio.Event().wait()


def settings(data: Path, *, file_bytes: int | None = None, row_group_bytes: int | None = None) -> Settings:
    """The defaults, but for what a benchmark says that it changes."""
    journal = JournalSettings() if file_bytes is None else JournalSettings(file_bytes=file_bytes)
    lake = LakeSettings() if row_group_bytes is None else LakeSettings(row_group_bytes=row_group_bytes)
    return Settings(data=str(data), journal=journal, lake=lake)


async def open_on(store: type[LocalStore], chosen: Settings) -> Broker:
    """An embedded broker on a store of some kind."""
    clock = Clock()
    opened = await store.open(
        Path(chosen.data), journal=chosen.journal, lake=chosen.lake, now_us=clock.now_us
    )
    return await Broker.open(chosen, store=opened, clock=clock)


class Published(NamedTuple):
    """What a timed stretch of publishing did."""

    messages: int
    bytes: int
    seconds: float
    cpu_s: float
    syncs: int
    sync_s: float

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.seconds

    @property
    def bytes_per_sync(self) -> int:
        return self.bytes // max(1, self.syncs)


async def timed(broker: Broker, work: Any, messages: int) -> Published:
    """Runs the work; journal bytes and syncs are the broker's own count."""
    before, cpu, start = broker.state(), process_time(), perf_counter()
    await work
    seconds, cpu, after = perf_counter() - start, process_time() - cpu, broker.state()
    return Published(
        messages,
        after.journal_bytes - before.journal_bytes,
        seconds,
        cpu,
        after.syncs - before.syncs,
        after.sync_seconds - before.sync_seconds,
    )


async def publish_batches(
    broker: Broker, topics: Sequence[str], batches: Sequence[Batch], count: int, in_flight: int
) -> None:
    """``count`` batches by ``in_flight`` tasks that each wait for their receipt before the next."""
    numbers = iter(range(count))

    async def publisher(topic: str) -> None:
        for number in numbers:
            await broker.publish_batch(topic, batches[number % len(batches)])

    await asyncio.gather(*(publisher(topics[place % len(topics)]) for place in range(in_flight)))


def on_loop(work: Any) -> Any:
    """Runs a coroutine on the event loop that ``sparrow up`` uses."""
    return uvloop.run(work)
