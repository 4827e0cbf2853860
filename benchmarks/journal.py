"""The journal's promises: batches as fast as the disk syncs them, whatever the topics; fast single messages.

    python -m benchmarks.journal [--quick] [--json] [--data DIR]

Messages of 1 KB, random bytes, durable receipts. Batches hold 1,000 messages, given as Python bytes objects
that exist before the clock starts; everything from there to the receipt is timed, on one event loop.

1. Batches to one topic, several publish_batch calls in flight, against raw sequential pwrite + fdatasync of
   as many bytes into a preallocated file of the same directory, with as many bytes a sync as Sparrow's own
   groups had. Raw with 4 MiB a sync is printed beside it.
2. The same batches to 8 topics in parallel, against one topic.
3. Single messages from 64 tasks, each waiting for its receipt.

Sealing does not run: the journal file is made large enough for the whole run, and the end checks it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import google_crc32c

from benchmarks import measure
from benchmarks.measure import BATCH, MESSAGE_BYTES, MIB, Batch, Options, Published, RawFile, Report, Written
from sparrow.broker.broker import Broker
from sparrow.store import admission
from sparrow.store.entry import Header, Kind, pack

RAW_RATIO_MIN = 0.70
TOPICS_RATIO_MIN = 0.90
SINGLES_PER_S_MIN = 20_000
IN_FLIGHT = 4
"""Enough that the disk always has a group to write while the next one is built; the sweep shows others."""
SWEEP = (1, 4, 8, 16, 32, 64)
TASKS = 64
TOPICS = [f"bench.{number}" for number in range(8)]
RAW_SYNC_BYTES = 4 * MIB
SMALL_WRITE_BYTES = 4096


class Sizes(NamedTuple):
    """How much of everything."""

    rounds: int
    distinct: int
    batches: int
    singles: int
    alone: int
    sweep: int


FULL = Sizes(rounds=5, distinct=64, batches=150, singles=40_000, alone=2_000, sweep=100)
QUICK = Sizes(rounds=3, distinct=4, batches=8, singles=500, alone=50, sweep=4)


class Round(NamedTuple):
    """One turn of everything that is compared."""

    one_topic: Published
    raw: Written
    raw_4_mib: Written
    topics: Published
    singles: Published


def run(options: Options, report: Report) -> None:
    sizes = QUICK if options.quick else FULL
    batches = measure.random_batches(sizes.distinct)
    report.set_out(
        durability="durable (receipt after fdatasync)",
        message_bytes=MESSAGE_BYTES,
        batch=BATCH,
        in_flight=IN_FLIGHT,
        batches_a_round=sizes.batches,
        rounds=sizes.rounds,
    )
    measure.on_loop(bench(options, report, sizes, batches))


async def bench(options: Options, report: Report, sizes: Sizes, batches: list[Batch]) -> None:
    file_bytes = journal_bytes_needed(sizes)
    source = memoryview(b"".join(itertools.chain.from_iterable(batches)))
    async with await Broker.open(measure.settings(options.data / "broker", file_bytes=file_bytes)) as broker:
        for topic in TOPICS:
            await broker.create_topic(topic)
            await broker.publish_batch(topic, batches[0])
        with measure.RawFile(options.data, file_bytes) as raw:
            await one_round(sizes, broker, batches, source, raw)  # Not counted: memory and disk settle.
            rounds = [await one_round(sizes, broker, batches, source, raw) for _ in range(sizes.rounds)]
            print_batches(report, rounds)
            print_topics(report, rounds)
            print_singles(report, rounds)
            await bench_alone(options, report, sizes, broker, batches)
            await bench_in_flight(report, sizes, broker, batches)
            bench_steps(options, report, batches)
        state = broker.state()
        assert not state.segments, "sealing must not run in the timed window"
        assert state.journal_files == 1, "nor may the journal be rotated in it"
        report.say("  nothing was sealed: one journal file took the whole run")


def journal_bytes_needed(sizes: Sizes) -> int:
    """Room for all that the run publishes, and a quarter for headers and tiny groups."""
    batches = 2 * (sizes.rounds + 1) * sizes.batches + len(SWEEP) * sizes.sweep + len(TOPICS)
    singles = (sizes.rounds + 1) * sizes.singles + sizes.alone
    return (batches * BATCH + 2 * singles) * MESSAGE_BYTES * 5 // 4 + 64 * MIB


async def one_round(
    sizes: Sizes, broker: Broker, batches: list[Batch], source: memoryview, limit: RawFile
) -> Round:
    messages = sizes.batches * BATCH
    work = measure.publish_batches(broker, TOPICS[:1], batches, sizes.batches, IN_FLIGHT)
    one_topic = await measure.timed(broker, work, messages)
    raw = limit.write(source, one_topic.bytes, one_topic.bytes_per_sync)
    work = measure.publish_batches(broker, TOPICS, batches, sizes.batches, IN_FLIGHT)
    topics = await measure.timed(broker, work, messages)
    raw_4_mib = limit.write(source, one_topic.bytes, RAW_SYNC_BYTES)
    work = publish_singles(broker, batches[0], sizes.singles, TASKS, [])
    return Round(one_topic, raw, raw_4_mib, topics, await measure.timed(broker, work, sizes.singles))


async def publish_singles(
    broker: Broker, messages: Batch, count: int, tasks: int, taken_us: list[float]
) -> None:
    """``count`` messages, one publish each, by so many tasks; the latency of each receipt."""
    numbers = iter(range(count))

    async def publisher() -> None:
        for number in numbers:
            start = perf_counter()
            await broker.publish(TOPICS[0], messages[number % BATCH])
            taken_us.append((perf_counter() - start) * 1e6)

    await asyncio.gather(*(publisher() for _ in range(tasks)))


def print_batches(report: Report, rounds: Sequence[Round]) -> None:
    ours = [each.one_topic.mb_per_s for each in rounds]
    raw, raw_4_mib = [each.raw.mb_per_s for each in rounds], [each.raw_4_mib.mb_per_s for each in rounds]
    sync_bytes = statistics.median(each.one_topic.bytes_per_sync for each in rounds)
    busy = statistics.median(each.one_topic.sync_s / each.one_topic.seconds for each in rounds)
    report.say("durable batches to one topic")
    report.figure("Sparrow", statistics.median(ours), "MB/s", spread(ours))
    report.figure("Sparrow's group", sync_bytes / 1e6, "MB a sync", f"{busy:.0%} of the time in fdatasync")
    report.figure("raw disk, same bytes a sync", statistics.median(raw), "MB/s", spread(raw))
    report.figure("raw disk, 4 MiB a sync", statistics.median(raw_4_mib), "MB/s", spread(raw_4_mib))
    report.figure("ratio to raw with 4 MiB a sync", measure.median_ratio(ours, raw_4_mib), "x")
    print_cpu(report, "batched", [each.one_topic for each in rounds])
    report.check(
        "ratio to raw with the same bytes a sync",
        measure.median_ratio(ours, raw),
        RAW_RATIO_MIN,
        "x",
        at_least=True,
    )


def print_topics(report: Report, rounds: Sequence[Round]) -> None:
    one, eight = [each.one_topic.mb_per_s for each in rounds], [each.topics.mb_per_s for each in rounds]
    report.say(f"{len(TOPICS)} topics in parallel")
    report.figure("Sparrow", statistics.median(eight), "MB/s", spread(eight))
    report.check("ratio to one topic", measure.median_ratio(eight, one), TOPICS_RATIO_MIN, "x", at_least=True)


def print_singles(report: Report, rounds: Sequence[Round]) -> None:
    singles = [each.singles for each in rounds]
    rates = [each.messages_per_s for each in singles]
    groups = statistics.median(each.messages / max(1, each.syncs) for each in singles)
    report.say(f"single messages from {TASKS} tasks")
    report.figure("messages a sync", groups, "")
    print_cpu(report, "single", singles)
    report.check(
        "single durable publishes",
        statistics.median(rates),
        SINGLES_PER_S_MIN,
        "/s",
        at_least=True,
        note=spread(rates),
    )


async def bench_alone(
    options: Options, report: Report, sizes: Sizes, broker: Broker, batches: list[Batch]
) -> None:
    """One task, so nothing to share a sync with: the latency of a receipt beside that of a bare sync."""
    ours: list[float] = []
    raw: list[float] = []
    for _ in range(4):
        await publish_singles(broker, batches[0], sizes.alone // 4, 1, ours)
        raw += measure.raw_sync_us(options.data, sizes.alone // 4, SMALL_WRITE_BYTES)
    report.say("single messages from one task")
    for name, values in (("receipt", ours), ("raw write + fdatasync of 4 KiB", raw)):
        report.figure(f"{name}, p50", measure.percentile(values, 0.5), "us")
        report.figure(f"{name}, p99", measure.percentile(values, 0.99), "us")
    report.figure("ratio of the medians", statistics.median(ours) / statistics.median(raw), "x")


async def bench_in_flight(report: Report, sizes: Sizes, broker: Broker, batches: list[Batch]) -> None:
    report.say("durable batches to one topic, by calls in flight")
    for in_flight in SWEEP:
        work = measure.publish_batches(broker, TOPICS[:1], batches, sizes.sweep, in_flight)
        done = await measure.timed(broker, work, sizes.sweep * BATCH)
        note = f"{done.bytes_per_sync / 1e6:.1f} MB a sync"
        report.figure(f"{in_flight} in flight", done.mb_per_s, "MB/s", note)


def bench_steps(options: Options, report: Report, batches: list[Batch]) -> None:
    """What one batch costs, step by step, each alone and on one thread."""
    built = [admission.values_to_batch(batch, {}) for batch in batches]
    bodies = [batch.serialize() for batch in built]
    header = Header(Kind.BATCH, 0, 0, 1, len(bodies[0]), BATCH, 1, 0, 1, 0, 1, 0, 0, 0, 1, 64, 64, 1)
    report.say("one batch of 1,000 messages, each step alone")
    step(report, "build columns from bytes", lambda batch: admission.values_to_batch(batch, {}), batches)
    step(report, "check limits", check, built)
    step(report, "encode (Arrow IPC)", lambda batch: batch.serialize(), built)
    step(report, "crc32c", google_crc32c.value, bodies)
    step(report, "header", pack, [header] * len(bodies))
    with tempfile.TemporaryFile(dir=options.data, buffering=0) as file:
        descriptor, positions = file.fileno(), itertools.count(0, len(bodies[0]) + 104)
        os.posix_fallocate(descriptor, 0, len(bodies) * (len(bodies[0]) + 104))
        writes: list[float] = []
        syncs: list[float] = []
        for body in bodies:
            start = perf_counter()
            os.pwritev(descriptor, [pack(header), body], next(positions))
            middle = perf_counter()
            os.fdatasync(descriptor)
            writes.append(middle - start)
            syncs.append(perf_counter() - middle)
    report.figure("write (pwritev)", statistics.median(writes) * 1e6, "us")
    report.figure("sync (fdatasync of this batch)", statistics.median(syncs) * 1e6, "us")


def check(batch: Any) -> None:
    admission.check_batch(batch)
    admission.check_request_size(batch)


def step(report: Report, name: str, call: Callable[[Any], object], arguments: Sequence[Any]) -> None:
    taken = []
    for argument in arguments:
        start = perf_counter()
        call(argument)
        taken.append(perf_counter() - start)
    report.figure(name, statistics.median(taken) * 1e6, "us")


def print_cpu(report: Report, kind: str, rounds: Sequence[Published]) -> None:
    cost = statistics.median(each.cpu_s / each.messages for each in rounds) * 1e6
    share = statistics.median(each.cpu_s / each.seconds for each in rounds)
    report.figure(f"processor time a {kind} message", cost, "us", f"{share:.0%} of one core")


def spread(values: Sequence[float]) -> str:
    return f"{measure.readable(min(values))} to {measure.readable(max(values))} over {len(values)} rounds"


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("journal", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
