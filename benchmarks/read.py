"""Reading's promises: the hot window at memory speed, and any place of history within milliseconds.

    python -m benchmarks.read [--quick] [--json] [--data DIR]

1. The log as record batches out of the hot window, by Broker.read_batches from the first offset to the last,
   with one byte read of every page of every payload buffer. Warm is what is promised; a bare crc32c over the
   same bytes is timed in turns, because the broker checks every batch that it hands out. Cold: the kernel was
   told to forget the file. The disk's own read is timed in turns, of other bytes of the same file, since a
   page that the broker has mapped cannot be forgotten again: every byte is read cold once.
2. The first batch at a random offset of sealed segments of the default size, half of them random bytes, half
   orders as JSON. Every sample has a broker of its own, so no reader and no decoded row group is there, and
   the kernel was told to forget the file. pyarrow reads the same row group of the same file, forgotten again,
   in turns.
3. A scan of all sealed segments, and pyarrow's own read of the same files, one thread each.

A figure is called cold only when the kernel's own count says that the bytes came from the device; that count
is printed, and shows as well how much more than the asked for is fetched.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import measure
from benchmarks.measure import BATCH, MESSAGE_BYTES, MIB, Batch, Options, Report, Unsealed
from sparrow.broker.broker import Broker

HOT_MB_PER_S_MIN = 1_000.0
FIRST_BATCH_MS_MAX = 20.0
COLD_SHARE_MIN = 0.9
"""Of the bytes read: when fewer came from the device, the read was not cold."""
IN_FLIGHT = 16
SEALED = ("sealed.random", "sealed.json")


class Sizes(NamedTuple):
    """How much of everything; a segment has as many batches as a default journal file holds."""

    rounds: int
    hot_batches: int
    segments: int
    segment_batches: int
    samples: int
    distinct: int


FULL = Sizes(rounds=3, hot_batches=128, segments=2, segment_batches=125, samples=200, distinct=32)
QUICK = Sizes(rounds=3, hot_batches=4, segments=2, segment_batches=4, samples=4, distinct=4)


class Scan(NamedTuple):
    """Bytes of payload that were read, how long it took, and bytes that came from the device for it."""

    bytes: int
    seconds: float
    device_bytes: int

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6


def run(options: Options, report: Report) -> None:
    sizes = QUICK if options.quick else FULL
    batches = measure.random_batches(sizes.distinct)
    report.set_out(
        message_bytes=MESSAGE_BYTES,
        batch=BATCH,
        hot=f"{sizes.hot_batches:,} batches a round",
        sealed=f"{sizes.segments} segments of {sizes.segment_batches:,} batches for each kind of payload",
        row_groups="4 MiB, zstd",
        read_max_bytes="4 MiB",
        rounds=sizes.rounds,
    )
    measure.on_loop(bench_hot(options, report, sizes, batches))
    directory = options.data / "sealed"
    measure.on_loop(fill_sealed(directory, sizes, batches))
    bench_seeks(report, sizes, directory)
    bench_scans(report, sizes, directory)


# The hot window.


async def bench_hot(options: Options, report: Report, sizes: Sizes, batches: list[Batch]) -> None:
    directory = options.data / "hot"
    topics = [f"hot.{number}" for number in range(2 * sizes.rounds)]
    file_bytes = len(topics) * sizes.hot_batches * BATCH * MESSAGE_BYTES * 5 // 4 + 64 * MIB
    cold: list[Scan] = []
    raw: list[Scan] = []
    warm: list[float] = []
    crc: list[float] = []
    settings = measure.settings(directory, file_bytes=file_bytes)
    async with await measure.open_on(Unsealed, settings) as broker:
        ends = [64]
        for topic in topics:
            await broker.create_topic(topic)
            await measure.publish_batches(broker, [topic], batches, sizes.hot_batches, IN_FLIGHT)
            ends.append(broker.state().journal_bytes)
        (journal,) = directory.rglob("*.wal")
        places = list(itertools.pairwise(ends))
        for number in range(0, len(topics), 2):
            measure.drop_cache(journal)
            raw.append(disk_read(journal, *places[number]))
            measure.drop_cache(journal)
            cold.append(await scan(broker, topics[number + 1]))
            warm.append((await scan(broker, topics[number + 1])).mb_per_s)
            crc.append(crc_mb_per_s(journal, *places[number + 1]))
    report.say("record batches from the hot window")
    print_cold(report, cold, raw)
    report.figure("crc32c alone, warm", statistics.median(crc), "MB/s")
    report.figure("ratio of warm to crc32c alone", measure.median_ratio(warm, crc), "x")
    report.check(
        "warm",
        statistics.median(warm),
        HOT_MB_PER_S_MIN,
        "MB/s",
        at_least=True,
        note=", ".join(map(measure.readable, warm)),
    )


def print_cold(report: Report, cold: Sequence[Scan], raw: Sequence[Scan]) -> None:
    shares = [each.device_bytes / each.bytes for each in (*cold, *raw)]
    if min(shares) < COLD_SHARE_MIN:
        report.say(f"  no cold figure: only {min(shares):.0%} of the bytes came from the device")
        return
    rates, limits = [each.mb_per_s for each in cold], [each.mb_per_s for each in raw]
    report.figure("cold", statistics.median(rates), "MB/s", device(cold))
    report.figure("the disk's own read, cold", statistics.median(limits), "MB/s", device(raw))
    report.figure("ratio of the cold ones", measure.median_ratio(rates, limits), "x")


def device(scans: Sequence[Scan]) -> str:
    share = statistics.median(each.device_bytes / each.bytes for each in scans)
    return f"{share:.2f} x the bytes came from the device"


async def scan(broker: Broker, topic: str) -> Scan:
    """Everything that a topic holds, its payload touched page by page."""
    offset, end, size = 0, (await broker.bounds(topic)).end_offset, 0
    before, start = measure.device_bytes(), perf_counter()
    while offset < end:
        for batch in await broker.read_batches(topic, offset=offset):
            size += payload(batch)
            offset += batch.num_rows
    return Scan(size, perf_counter() - start, measure.device_bytes() - before)


def payload(batch: Any) -> int:
    """Bytes of payload of a batch, after a look at every page of them."""
    data = batch.column("data")
    buffer = data.buffers()[2]
    measure.touch(buffer)
    return int(data.nbytes)


def disk_read(path: Path, start: int, end: int) -> Scan:
    descriptor = os.open(path, os.O_RDONLY)
    buffer = memoryview(bytearray(4 * MIB))
    before, began = measure.device_bytes(), perf_counter()
    for position in range(start, end, len(buffer)):
        os.preadv(descriptor, [buffer[: end - position]], position)
    seconds = perf_counter() - began
    os.close(descriptor)
    return Scan(end - start, seconds, measure.device_bytes() - before)


def crc_mb_per_s(path: Path, start: int, end: int) -> float:
    """The bare checksum, in pieces of a batch, of bytes that are in memory."""
    with path.open("rb") as file:
        file.seek(start)
        whole = pa.py_buffer(file.read(end - start))
    began = perf_counter()
    for at in range(0, whole.size, BATCH * MESSAGE_BYTES):
        google_crc32c.value(whole.slice(at, min(BATCH * MESSAGE_BYTES, whole.size - at)))
    return float(whole.size) / (perf_counter() - began) / 1e6


# History.


async def fill_sealed(directory: Path, sizes: Sizes, batches: list[Batch]) -> None:
    payloads = dict(zip(SEALED, (batches, measure.json_batches(min(8, sizes.distinct))), strict=True))
    async with await measure.open_on(Unsealed, measure.settings(directory)) as broker:
        for topic, chosen in payloads.items():
            await broker.create_topic(topic)
            for _ in range(sizes.segments):
                await measure.publish_batches(broker, [topic], chosen, sizes.segment_batches, IN_FLIGHT)
                await broker.seal()


class Seek(NamedTuple):
    """One row group, found and read."""

    ms: float
    device_bytes: int


def bench_seeks(report: Report, sizes: Sizes, directory: Path) -> None:
    choose = random.Random(3)
    rows = sizes.segments * sizes.segment_batches * BATCH
    ours: list[Seek] = []
    arrow: list[Seek] = []
    stored: list[int] = []
    for number in range(sizes.samples):
        topic, offset = SEALED[number % 2], choose.randrange(rows)
        path, group, size = place(directory, topic, offset)
        stored.append(size)
        forget(path)
        ours.append(measure.on_loop(seek(directory, topic, offset)))
        forget(path)
        arrow.append(arrow_seek(path, group))
    report.say(f"first batch at {sizes.samples} random offsets of sealed segments")
    print_seeks(report, "Sparrow", ours, stored)
    print_seeks(report, "pyarrow, same row group", arrow, stored)
    ratio = median_ms(ours) / median_ms(arrow)
    report.figure("ratio of the medians", ratio, "x")
    report.check(
        "first batch, p99", measure.percentile([each.ms for each in ours], 0.99), FIRST_BATCH_MS_MAX, "ms"
    )


def print_seeks(report: Report, name: str, seeks: Sequence[Seek], stored: Sequence[int]) -> None:
    taken = [each.ms for each in seeks]
    pairs = list(zip(seeks, stored, strict=True))
    cold = sum(each.device_bytes >= size * COLD_SHARE_MIN for each, size in pairs)
    fetched = statistics.median(each.device_bytes / size for each, size in pairs)
    report.figure(f"{name}, p50", measure.percentile(taken, 0.5), "ms", f"{cold} of {len(seeks)} were cold")
    report.figure(f"{name}, p99", measure.percentile(taken, 0.99), "ms", f"at most {max(taken):.1f}")
    report.figure(f"{name}, from the device", fetched, "x the row group")


def median_ms(seeks: Sequence[Seek]) -> float:
    return statistics.median(each.ms for each in seeks)


def forget(path: Path) -> None:
    """What a closed broker had mapped must be gone before the kernel can forget it."""
    gc.collect()
    measure.drop_cache(path)


async def seek(directory: Path, topic: str, offset: int) -> Seek:
    async with await measure.open_on(Unsealed, measure.settings(directory)) as broker:
        before, start = measure.device_bytes(), perf_counter()
        found = await broker.read_batches(topic, offset=offset, max_bytes=1)
        payload(found[0])
        taken = Seek((perf_counter() - start) * 1e3, measure.device_bytes() - before)
        assert found[0].column("offset")[0].as_py() == offset
        return taken


def place(directory: Path, topic: str, offset: int) -> tuple[Path, int, int]:
    """The file and the row group that hold an offset, and the group's stored bytes, by pyarrow alone."""
    path = [path for path in segments(directory, topic) if int(path.stem) <= offset][-1]
    metadata, row = pq.read_metadata(path), int(path.stem)
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        row += found.num_rows
        if offset < row:
            size = sum(found.column(index).total_compressed_size for index in range(found.num_columns))
            return path, group, size
    raise AssertionError(f"no row group holds offset {offset}")


def segments(directory: Path, topic: str) -> list[Path]:
    return sorted((directory / "topics" / topic).rglob("*.parquet"))


def arrow_seek(path: Path, group: int) -> Seek:
    before, start = measure.device_bytes(), perf_counter()
    with pq.ParquetFile(path) as file:
        table = file.read_row_group(group, use_threads=False)
        for chunk in table["data"].chunks:
            measure.touch(chunk.buffers()[2])
    return Seek((perf_counter() - start) * 1e3, measure.device_bytes() - before)


def bench_scans(report: Report, sizes: Sizes, directory: Path) -> None:
    report.say("scan of sealed segments, page cache warm")
    for topic in SEALED:
        ours: list[float] = []
        arrow: list[float] = []
        for _ in range(sizes.rounds):
            ours.append(measure.on_loop(scan_sealed(directory, topic)).mb_per_s)
            arrow.append(arrow_scan(directory, topic).mb_per_s)
        report.figure(f"Sparrow, {topic}", statistics.median(ours), "MB/s")
        report.figure(f"pyarrow, {topic}", statistics.median(arrow), "MB/s")
        report.figure(f"ratio, {topic}", measure.median_ratio(ours, arrow), "x")


async def scan_sealed(directory: Path, topic: str) -> Scan:
    async with await measure.open_on(Unsealed, measure.settings(directory)) as broker:
        return await scan(broker, topic)


def arrow_scan(directory: Path, topic: str) -> Scan:
    start = perf_counter()
    size = sum(map(payload, arrow_batches(directory, topic)))
    return Scan(size, perf_counter() - start, 0)


def arrow_batches(directory: Path, topic: str) -> Iterator[Any]:
    for path in segments(directory, topic):
        with pq.ParquetFile(path, memory_map=True) as file:
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group, use_threads=False).to_batches()


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("read", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
