"""Sealing's promises: fast, publishing goes on beside it, and the lake is no larger than the journal.

    python -m benchmarks.sealing [--quick] [--json] [--data DIR]

Messages of 1 KB in batches of 1,000, random bytes, durable, as fast as the broker takes them. In turns, each
on a fresh directory: publishing while the sealer is never woken, and publishing while it seals every finished
journal file (128 MiB, the default) in the same process. The clock starts when the first file has been
finished, so sealing goes on all the time that is measured.

Sealing's rate is journal bytes over the seconds of sealing, all its steps counted: Parquet, fsyncs, catalog,
removal. Publishers that never pause outrun it on two cores: the bytes in finished files that wait are sampled
and their growth is printed. Nothing is promised about it but the bound: at journal.unsealed_bytes_max (8 GiB)
publishers are held until sealing has caught up.

The lake's size is judged for random bytes, which cannot be compressed, and for orders as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks import measure
from benchmarks.measure import BATCH, MESSAGE_BYTES, MIB, Batch, Options, Report, Unsealed
from sparrow.broker.broker import Broker
from sparrow.model.settings import JournalSettings
from sparrow.store.catalog_tables import CursorCheckpoint, Document, ProducerState
from sparrow.store.local import LocalStore

SEALING_MB_PER_S_MIN = 150.0
PUBLISHING_RATIO_MIN = 0.60
LAKE_RATIO_MAX = 1.0
TOPIC = "bench"
IN_FLIGHT = 32
SAMPLE_S = 0.05
FIRST_FILE_TIMEOUT_S = 60.0
PATIENCE = 4
RAW_BYTES = 256 * MIB
RAW_SYNC_BYTES = 4 * MIB


class Sizes(NamedTuple):
    """How much of everything."""

    rounds: int
    seconds: float
    distinct: int
    file_bytes: int
    lake_batches: int


FULL = Sizes(rounds=3, seconds=5.0, distinct=64, file_bytes=JournalSettings().file_bytes, lake_batches=128)
QUICK = Sizes(rounds=1, seconds=0.3, distinct=4, file_bytes=8 * MIB, lake_batches=4)


class Sealing(LocalStore):
    """A store that notes what its sealing moved and how long that took."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.sealed: list[tuple[int, float]] = []
        self._started_at_s: float | None = None

    @property
    def under_way_s(self) -> float:
        """For how long the seal of this moment has been going on."""
        return 0.0 if self._started_at_s is None else perf_counter() - self._started_at_s

    async def seal(
        self,
        cursors: Iterable[CursorCheckpoint],
        producers: Iterable[ProducerState],
        documents: Iterable[Document] = (),
    ) -> int:
        self._started_at_s = start = perf_counter()
        messages = await super().seal(cursors, producers, documents)
        self.sealed.append((messages, perf_counter() - start))
        self._started_at_s = None
        return messages


class Stretch(NamedTuple):
    """A measured stretch of publishing."""

    published_mb_per_s: float
    sealed_mb_per_s: float
    seals: int
    busy: float
    backlog: list[int]
    growth_mb_per_s: float


def run(options: Options, report: Report) -> None:
    sizes = QUICK if options.quick else FULL
    batches = measure.random_batches(sizes.distinct)
    report.set_out(
        durability="durable",
        message_bytes=MESSAGE_BYTES,
        batch=BATCH,
        in_flight=IN_FLIGHT,
        journal_file_bytes=sizes.file_bytes,
        compression="zstd, level 1",
        seconds_a_round=sizes.seconds,
        rounds=sizes.rounds,
    )
    without: list[Stretch] = []
    beside: list[Stretch] = []
    raw: list[float] = []
    source = memoryview(b"".join(itertools.chain.from_iterable(batches)))
    stretch(options.data / "first", Unsealed, sizes, batches)  # Not counted: memory and disk settle.
    raw_bytes = min(RAW_BYTES, 8 * len(source))
    with measure.RawFile(options.data, sizes.rounds * raw_bytes) as limit:
        for number in range(sizes.rounds):
            without.append(stretch(options.data / f"without-{number}", Unsealed, sizes, batches))
            beside.append(stretch(options.data / f"beside-{number}", Sealing, sizes, batches))
            raw.append(limit.write(source, raw_bytes, RAW_SYNC_BYTES).mb_per_s)
    report.figure("raw disk, 4 MiB a sync", statistics.median(raw), "MB/s", listed(raw))
    print_rates(report, sizes, without, beside)
    print_total(report, raw, beside)
    print_lake(report, options, sizes, batches)


def stretch(directory: Path, kind: type[LocalStore], sizes: Sizes, batches: list[Batch]) -> Stretch:
    found: Stretch = measure.on_loop(publish_for(directory, kind, sizes, batches))
    shutil.rmtree(directory)
    return found


async def publish_for(directory: Path, kind: type[LocalStore], sizes: Sizes, batches: list[Batch]) -> Stretch:
    settings = measure.settings(directory, file_bytes=sizes.file_bytes)
    store = await kind.open(
        directory, journal=settings.journal, lake=settings.lake, now_us=lambda: int(perf_counter() * 1e6)
    )
    async with await Broker.open(settings, store=store) as broker:
        await broker.create_topic(TOPIC)
        publishers = Publishers(broker, batches)
        await LocalStore.wait_for_finished(store, 1, FIRST_FILE_TIMEOUT_S)
        journal_bytes = broker.state().journal_bytes / max(1, publishers.messages)
        first, backlog, start = publishers.messages, [], perf_counter()
        while perf_counter() - start < sizes.seconds or is_waiting(store, start, sizes):
            backlog.append(store.finished_bytes())
            await asyncio.sleep(SAMPLE_S)
        seconds, published = perf_counter() - start, publishers.messages - first
        sealed, under_way_s = (
            (store.sealed[:], store.under_way_s) if isinstance(store, Sealing) else ([], 0.0)
        )
        await publishers.stop()
    sealed_s = sum(each_s for _, each_s in sealed)
    sealed_bytes = sum(messages for messages, _ in sealed) * journal_bytes
    return Stretch(
        published * journal_bytes / seconds / 1e6,
        sealed_bytes / sealed_s / 1e6 if sealed_s else 0.0,
        len(sealed),
        (sealed_s + under_way_s) / seconds,
        backlog,
        growth(backlog, seconds) / 1e6,
    )


def is_waiting(store: LocalStore, start: float, sizes: Sizes) -> bool:
    """A slow first seal is waited for, within reason: without one there is no rate to tell."""
    is_late = perf_counter() - start > PATIENCE * sizes.seconds
    return isinstance(store, Sealing) and not store.sealed and not is_late


class Publishers:
    """Tasks that publish until they are stopped."""

    def __init__(self, broker: Broker, batches: list[Batch]) -> None:
        self.messages = 0
        self._is_going = True
        self._tasks = [
            asyncio.create_task(self._publish(broker, batches, place)) for place in range(IN_FLIGHT)
        ]

    async def _publish(self, broker: Broker, batches: list[Batch], number: int) -> None:
        while self._is_going:
            receipts = await broker.publish_batch(TOPIC, batches[number % len(batches)])
            self.messages += len(receipts)
            number += IN_FLIGHT + 1

    async def stop(self) -> None:
        self._is_going = False
        await asyncio.gather(*self._tasks)


def growth(backlog: Sequence[int], seconds: float) -> float:
    """Bytes a second by which the later half lies above the earlier one."""
    middle = len(backlog) // 2
    if not middle:
        return 0.0
    return (statistics.mean(backlog[middle:]) - statistics.mean(backlog[:middle])) / (seconds / 2)


def print_rates(report: Report, sizes: Sizes, without: Sequence[Stretch], beside: Sequence[Stretch]) -> None:
    alone, along = [s.published_mb_per_s for s in without], [s.published_mb_per_s for s in beside]
    report.figure("publishing without sealing", statistics.median(alone), "MB/s", listed(alone))
    report.figure("publishing beside sealing", statistics.median(along), "MB/s", listed(along))
    seals = sum(each.seals for each in beside)
    busy = statistics.median(each.busy for each in beside)
    report.figure("sealing under way", busy, "of the time", f"{seals} seals came to their end")
    for number, each in enumerate(beside, 1):
        samples = [each.backlog[len(each.backlog) * part // 10] for part in range(10)]
        files = ", ".join(f"{sample / sizes.file_bytes:.1f}" for sample in samples)
        report.say(f"  backlog in files, round {number}: {files}; at most {max(each.backlog) / 1e6:,.0f} MB")
    rates = [each.sealed_mb_per_s for each in beside]
    report.check(
        "sealing", statistics.median(rates), SEALING_MB_PER_S_MIN, "MB/s", at_least=True, note=listed(rates)
    )
    ratio = measure.median_ratio(along, alone)
    report.check("publishing beside sealing to without", ratio, PUBLISHING_RATIO_MIN, "x", at_least=True)
    growths = [each.growth_mb_per_s / each.published_mb_per_s for each in beside]
    report.figure(
        "growth of the backlog, share of publishing", statistics.median(growths), "x", listed(growths)
    )


def print_total(report: Report, raw: Sequence[float], beside: Sequence[Stretch]) -> None:
    """Every byte is written twice, to the journal and to the lake: the disk limits their sum."""
    sums = [each.published_mb_per_s + each.sealed_mb_per_s * each.busy for each in beside]
    report.figure("written to journal and lake", statistics.median(sums), "MB/s", listed(sums))
    report.figure("ratio of that to the raw disk", measure.median_ratio(sums, raw), "x")


def print_lake(report: Report, options: Options, sizes: Sizes, batches: list[Batch]) -> None:
    orders = measure.json_batches(min(sizes.distinct, 8))
    for name, payload in (("random bytes", batches), ("JSON", orders)):
        directory = options.data / name.replace(" ", "-")
        journal_bytes, seconds = measure.on_loop(seal_once(directory, payload, sizes.lake_batches))
        lake_bytes = measure.size_on_disk(directory, "*.parquet")
        report.figure(f"journal of {name}", journal_bytes / 1e6, "MB")
        report.figure(f"lake of {name}", lake_bytes / 1e6, "MB")
        report.figure(f"sealing alone, {name}", journal_bytes / seconds / 1e6, "MB/s")
        report.check(f"lake to journal, {name}", lake_bytes / journal_bytes, LAKE_RATIO_MAX, "x")


async def seal_once(directory: Path, batches: list[Batch], count: int) -> tuple[int, float]:
    """Publishes and then seals so many batches; the bytes they had in the journal, and the seconds of it."""
    async with await measure.open_on(Unsealed, measure.settings(directory)) as broker:
        await broker.create_topic(TOPIC)
        await measure.publish_batches(broker, [TOPIC], batches, count, IN_FLIGHT)
        journal_bytes = broker.state().journal_bytes
        start = perf_counter()
        assert await broker.seal() == count * BATCH
        return journal_bytes, perf_counter() - start


def listed(values: Sequence[float]) -> str:
    return ", ".join(measure.readable(value) for value in values)


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("sealing", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
