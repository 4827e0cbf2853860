"""Fan-out: one publish reaches every one of 10,000 subscriptions, half of them with filters of their own.

Each filter is another one, is found through the index of equalities, and matches. Two ways to receive: all
consumers wait in a long-poll when the message is published, or all of them ask right after it. The time runs
from the call of publish (on a durable topic) until the last consumer holds the message. The garbage
collector is set as ``sparrow up`` sets it.

    python -m benchmarks.fanout [--quick] [--profile FILE]
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import psutil

from benchmarks import measure
from benchmarks.measure import Options, Report
from sparrow.broker import memory
from sparrow.broker.broker import Broker
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.message import Delivered
from sparrow.model.settings import Settings

SIZES = (100, 1_000, 10_000)
ROUNDS = 7
PROMISE_MS = 1_000.0
GOAL_MS = 100.0
ATTRIBUTES = {"shared": "yes"}

profile_to: Path | None = None


class Round(NamedTuple):
    """Milliseconds until the receipt, until everyone had the message, and of this process's processor."""

    receipt_ms: float
    reached_ms: float
    cpu_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    global profile_to
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--profile" in given:
        place = given.index("--profile")
        profile_to = Path(given[place + 1])
        del given[place : place + 2]
    return measure.main("fanout", __doc__, run, given)


def run(options: Options, report: Report) -> None:
    measure.on_loop(fan_out(options, report))


async def fan_out(options: Options, report: Report) -> None:
    sizes = SIZES[:2] if options.quick else SIZES
    memory.settle()
    async with await Broker.open(Settings(data=str(options.data / "data"))) as broker:
        for size in sizes:
            before = rss()
            started = perf_counter()
            readers = await subscribe(broker, size)
            report.figure(f"{size:,} subscriptions made", perf_counter() - started, "s")
            idle = (rss() - before) / size
            started = perf_counter()
            await broker.create_topic(topic(size))
            report.figure(f"{size:,} attached to a new topic", (perf_counter() - started) * 1000, "ms")
            attached = (rss() - before) / size
            waiting = [await all_wait(broker, readers, size) for _ in range(ROUNDS)]
            asking = [await all_ask(broker, readers, size) for _ in range(ROUNDS)]
            tell(report, f"{size:,} that wait", waiting, size)
            tell(report, f"{size:,} that ask right after", asking, size)
            report.figure(f"memory of an idle subscription of {size:,}", idle / 1024, "KiB")
            report.figure(f"the same with its cursor on the topic, of {size:,}", attached / 1024, "KiB")
            served = (rss() - before) / size
            report.figure(f"the same after it was served, of {size:,}", served / 1024, "KiB")
            if profile_to is not None and size == sizes[-1]:
                await profiled(broker, readers, size, profile_to)


def topic(size: int) -> str:
    return f"fan-{size}"


async def subscribe(broker: Broker, size: int) -> list[BrokerSubscription]:
    """Every other one has a filter that nobody else has, and that the message passes."""
    found = []
    for number in range(size):
        text = f'attributes.shared = "yes" OR attributes.tenant = "t{number}"' if number % 2 else ""
        found.append(
            await broker.subscribe(f"s-{size}-{number}", topic(size), filter=text, ack_deadline_s=600)
        )
    return found


async def all_wait(broker: Broker, readers: list[BrokerSubscription], size: int) -> Round:
    """Milliseconds until the receipt, and until everyone who waited has the message."""
    pulls = [asyncio.create_task(reader.pull(1, 60.0)) for reader in readers]
    await asyncio.sleep(0.2)
    gc.collect()
    started, cpu = perf_counter(), process_time()
    await broker.publish(topic(size), b"x" * 100, attributes=ATTRIBUTES)
    receipted = perf_counter()
    got = await asyncio.gather(*pulls)
    reached, cpu = perf_counter(), process_time() - cpu
    await settle(readers, got)
    return Round((receipted - started) * 1000, (reached - started) * 1000, cpu * 1000)


async def all_ask(broker: Broker, readers: list[BrokerSubscription], size: int) -> Round:
    """The same when everyone asks as soon as the receipt is there."""
    gc.collect()
    started, cpu = perf_counter(), process_time()
    await broker.publish(topic(size), b"x" * 100, attributes=ATTRIBUTES)
    receipted = perf_counter()
    got = await asyncio.gather(*(reader.pull(1, 0.0) for reader in readers))
    reached, cpu = perf_counter(), process_time() - cpu
    await settle(readers, got)
    return Round((receipted - started) * 1000, (reached - started) * 1000, cpu * 1000)


async def settle(readers: list[BrokerSubscription], got: list[list[Delivered]]) -> None:
    assert all(len(messages) == 1 for messages in got), "somebody was left out"
    for reader, messages in zip(readers, got, strict=True):
        await reader.ack(messages)
    for reader in readers:
        await reader.flush()


def tell(report: Report, name: str, rounds: list[Round], size: int) -> None:
    receipt, median, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
    note = (
        f"median of {len(rounds)}; best {min(one.reached_ms for one in rounds):,.0f} ms, worst "
        f"{max(one.reached_ms for one in rounds):,.0f} ms; receipt after {receipt:,.1f} ms; processor "
        f"{cpu:,.0f} ms, {cpu / size * 1000:,.0f} us each; goal {GOAL_MS:g} ms: "
        f"{'reached' if median <= GOAL_MS else 'missed'}"
    )
    report.check(name, median, PROMISE_MS, "ms", note=note)


async def profiled(broker: Broker, readers: list[BrokerSubscription], size: int, to: Path) -> None:
    """One round of each under a profiler; the page says where the time goes."""
    from pyinstrument import Profiler

    for way, rounds in ((all_wait, 3), (all_ask, 3)):
        profiler = Profiler(interval=0.0005, async_mode="disabled")
        profiler.start()
        for _ in range(rounds):
            await way(broker, readers, size)
        profiler.stop()
        with to.open("a") as out:
            out.write(f"== {way.__name__}\n{profiler.output_text(unicode=True, show_all=False)}\n")


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    sys.exit(main())
