"""The wire's promises: batches and single messages from a Python client in another process, durable.

    python -m benchmarks.throughput [--quick] [--json] [--data DIR]

A broker (``sparrow up``, default settings) and one client, each a process of its own, on one machine.
Publishing: batches of 1,000 given as Python bytes, and single publish calls by many tasks, which the client
gathers; every receipt means fdatasync. Consuming: the same messages from the start of the topic, pulled and
acked in batches, and message by message; it ends when the last ack is durable. The raw disk is measured in
turns with publishing. Messages of 100 bytes are shown as well.

Then 1,000 idle connections, for the broker's memory, and a reader that never reads beside one that does.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any, NamedTuple

import sparrow
from benchmarks import measure, remote
from benchmarks.measure import BATCH, KB, MIB, Batch, Options, Report

PUBLISH_BATCH_MIN = 150_000
PUBLISH_ONE_MIN = 50_000
CONSUME_BATCH_MIN = 150_000
CONSUME_ONE_MIN = 50_000
SLOW_READER_RATIO_MIN = 0.8
IN_FLIGHT = 8
TASKS = 512


class Sizes(NamedTuple):
    """How much of everything."""

    rounds: int
    batches: int
    singles: int
    one_by_one: int
    connections: int


FULL = Sizes(rounds=3, batches=200, singles=100_000, one_by_one=100_000, connections=1_000)
QUICK = Sizes(rounds=1, batches=4, singles=500, one_by_one=500, connections=10)


def run(options: Options, report: Report) -> None:
    sizes = QUICK if options.quick else FULL
    report.set_out(
        durability="durable (receipt after fdatasync)", batch=BATCH, in_flight=IN_FLIGHT, tasks=TASKS
    )
    with remote.broker(options.data / "broker") as process:
        measure.on_loop(bench(options, report, sizes, process))


async def bench(options: Options, report: Report, sizes: Sizes, process: remote.RemoteProcess) -> None:
    for size in (KB, 100):
        batches = measure.random_batches(16, size)
        with measure.RawFile(
            options.data, 2 * (sizes.rounds + 1) * sizes.batches * BATCH * size + MIB
        ) as raw:
            await bench_size(report, sizes, process.url, batches, size, raw)
    await bench_connections(report, sizes, process)
    await bench_slow_reader(report, sizes, process.url)


async def bench_size(
    report: Report, sizes: Sizes, url: str, batches: list[Batch], size: int, raw: measure.RawFile
) -> None:
    report.say(f"messages of {size} bytes")
    is_promised = size == KB
    topic = f"size-{size}"
    source = memoryview(b"".join(itertools.chain.from_iterable(batches)))
    async with sparrow.aconnect(url) as broker:
        await broker.create_topic(topic)
        whole = await broker.subscribe(f"whole-{size}", topic)
        single = await broker.subscribe(f"single-{size}", topic)
        await publish_batches(broker, topic, batches, sizes.batches // 4 or 1)
        rates, ratios = [], []
        for _ in range(sizes.rounds):
            seconds = await publish_batches(broker, topic, batches, sizes.batches)
            rates.append(sizes.batches * BATCH / seconds)
            limit = raw.write(source, sizes.batches * BATCH * size, 4 * MIB)
            ratios.append(sizes.batches * BATCH * size / seconds / 1e6 / limit.mb_per_s)
        told(report, "publish_batch", rates, PUBLISH_BATCH_MIN if is_promised else 0)
        report.figure("  in bytes, next to the raw disk with 4 MiB a sync", statistics.median(ratios), "x")
        ones = [await publish_ones(broker, topic, batches[0], sizes.singles) for _ in range(sizes.rounds)]
        told(report, "publish, one at a time", ones, PUBLISH_ONE_MIN if is_promised else 0)
        total = (sizes.batches // 4 or 1) + sizes.rounds * sizes.batches
        count = total * BATCH + sizes.rounds * sizes.singles
        told(
            report,
            "pull and ack in batches",
            [await consume(whole, count)],
            CONSUME_BATCH_MIN if is_promised else 0,
        )
        told(
            report,
            "consume and ack message by message",
            [await consume_ones(single, sizes.one_by_one)],
            CONSUME_ONE_MIN if is_promised else 0,
        )


def told(report: Report, name: str, rates: Sequence[float], promised: float) -> None:
    note = ", ".join(measure.readable(rate) for rate in rates)
    if promised:
        report.check(name, statistics.median(rates), promised, "/s", at_least=True, note=note)
    else:
        report.figure(name, statistics.median(rates), "/s", note)


async def publish_batches(broker: Any, topic: str, batches: list[Batch], count: int) -> float:
    start = perf_counter()
    await measure.publish_batches(broker, [topic], batches, count, IN_FLIGHT)
    return perf_counter() - start


async def publish_ones(broker: Any, topic: str, messages: Batch, count: int) -> float:
    """Tasks that each wait for the receipt of a message before the next."""
    numbers = iter(range(count))

    async def publisher() -> None:
        for number in numbers:
            await broker.publish(topic, messages[number % BATCH])

    start = perf_counter()
    await asyncio.gather(*(publisher() for _ in range(TASKS)))
    return count / (perf_counter() - start)


async def consume(subscription: Any, count: int) -> float:
    start, done = perf_counter(), 0
    while done < count:
        messages = await subscription.pull(1_000, timeout_s=10.0)
        assert messages, f"only {done} of {count} messages came"
        await subscription.ack(messages)
        done += len(messages)
    await subscription.flush()
    rate = done / (perf_counter() - start)
    await subscription.close()
    return rate


async def consume_ones(subscription: Any, count: int) -> float:
    """One message after the other, data looked at, acked by its own verb."""
    start, done = perf_counter(), 0
    async for message in subscription:
        assert message.data
        await message.ack()
        done += 1
        if done == count:
            break
    await subscription.flush()
    rate = done / (perf_counter() - start)
    await subscription.close()
    return rate


async def bench_connections(report: Report, sizes: Sizes, process: remote.RemoteProcess) -> None:
    report.say(f"{sizes.connections:,} idle connections")
    before = measure.resident_mb(process.pid)
    async with AsyncExitStack() as stack:
        for _ in range(sizes.connections):
            await stack.enter_async_context(sparrow.aconnect(process.url))
        await asyncio.sleep(1.0)
        grown = measure.resident_mb(process.pid) - before
    report.figure("memory of the broker", grown * 1000 / sizes.connections, "KB a connection")


async def bench_slow_reader(report: Report, sizes: Sizes, url: str) -> None:
    """A consumer that takes messages and never acks or pulls on, beside one that works; in turns with the
    same without it, because the machine has better and worse seconds."""
    report.say("a reader that stands still beside one that works")
    batches = measure.random_batches(4)
    rates: dict[bool, list[float]] = {False: [], True: []}
    async with sparrow.aconnect(url) as broker, sparrow.aconnect(url) as other:
        for number in range(sizes.rounds):
            for is_beside in (False, True):
                topic = f"beside-{is_beside}-{number}"
                await broker.create_topic(topic)
                reader = await broker.subscribe(f"reader-{is_beside}-{number}", topic)
                if is_beside:
                    slow = await other.subscribe(f"slow-{number}", topic)
                    await publish_batches(broker, topic, batches, 1)
                    assert await slow.pull(1, timeout_s=10.0)
                count = sizes.batches // 2 or 1
                await publish_batches(broker, topic, batches, count)
                rates[is_beside].append(await consume(reader, count * BATCH))
                await reader.close()
    ratio = measure.median_ratio(rates[True], rates[False])
    report.check("rate beside it, next to alone", ratio, SLOW_READER_RATIO_MIN, "x", at_least=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("throughput", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
