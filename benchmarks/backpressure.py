"""Backpressure: fast publishers against a slow consumer for a minute, in each policy, beside a neighbour.

Three publishers, one of each class, offer ten times what the one consumer of their topic gets done; the
critical one alone offers little. The topic may have 10,000 messages waiting, and never more than 20,000. A
neighbour topic without limits is published to at a steady rate on the same broker: first alone, then beside
the crowd. Every five seconds a line says what was offered, stored, dropped and rejected, how far the consumer
is behind, and the memory of the process. In the end the publishers stop, the consumer is let off the leash,
and the throttle must be released.

    python -m benchmarks.backpressure [--quick]
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from benchmarks import measure
from benchmarks.measure import MIB, Options, Report
from sparrow.broker.broker import Broker
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.errors import ResourceExhausted
from sparrow.model.flow import Overflow, PublisherClass

BATCH = 100
PAYLOAD = b"x" * 100
OFFERED_PER_S = {PublisherClass.CRITICAL: 500, PublisherClass.NORMAL: 8_000, PublisherClass.BULK: 12_500}
CONSUMED_PER_S = 2_000
NEIGHBOUR_PER_S = 5_000
MEMORY_MB_MAX = 64.0
OVERSHOOT_MAX = 1.02
CHANGES_MAX = 4
NEIGHBOUR_MIN = 0.95
CRITICAL_MIN = 0.9
"""All but those that meet the hard limit before the throttle has set in."""
RELEASE_S_MAX = 60.0


@dataclass(frozen=True)
class Size:
    """How long and how much."""

    seconds: float
    line_s: float
    alone_s: float
    backlog_high: int


FULL = Size(60.0, 5.0, 5.0, 10_000)
QUICK = Size(3.0, 1.0, 0.5, 1_000)


@dataclass
class Counts:
    """What became of messages so far."""

    offered: int = 0
    stored: int = 0
    dropped: int = 0
    rejected: int = 0
    neighbour: int = 0
    consumed: int = 0
    critical_offered: int = 0
    critical_stored: int = 0


@dataclass
class Outcome:
    """What one policy showed."""

    backlog_max: int
    memory_mb: float
    mode_changes: int
    neighbour: float
    critical: float
    release_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("backpressure", __doc__, run, arguments)


def run(options: Options, report: Report) -> None:
    size = QUICK if options.quick else FULL
    report.set_out(
        offered=f"{sum(OFFERED_PER_S.values()):,}/s",
        consumed=f"{CONSUMED_PER_S:,}/s",
        backlog_high=size.backlog_high,
    )
    found = {
        policy: measure.on_loop(overload(options, report, policy, size, is_quick=options.quick))
        for policy in Overflow
    }
    top = 2 * size.backlog_high
    report.check(
        "worst backlog to its hard limit",
        max(one.backlog_max for one in found.values()) / top,
        OVERSHOOT_MAX if not options.quick else 2 * OVERSHOOT_MAX,
        "x",
    )
    report.check("worst growth of memory", max(one.memory_mb for one in found.values()), MEMORY_MB_MAX, "MB")
    report.check(
        "most changes of mode", max(one.mode_changes for one in found.values()), CHANGES_MAX, "changes"
    )
    worst = min(one.neighbour for one in found.values())
    report.check("neighbour's rate beside to alone", worst, NEIGHBOUR_MIN, "x", at_least=True)
    critical = min(one.critical for one in found.values())
    report.check("critical messages that passed", critical, CRITICAL_MIN, "x", at_least=True)
    if not options.quick:
        slowest = max(one.release_s for one in found.values())
        report.check("released after the load ended", slowest, RELEASE_S_MAX, "s")


async def overload(
    options: Options, report: Report, policy: Overflow, size: Size, *, is_quick: bool
) -> Outcome:
    """One policy under load."""
    settings = measure.settings(options.data / policy.value, file_bytes=16 * MIB)
    async with await Broker.open(settings) as broker:
        await broker.create_topic(
            "busy",
            flow={"overflow": policy, "backlog_high": size.backlog_high, "block_timeout_s": 5.0},
        )
        await broker.create_topic("neighbour")
        consumer = await broker.subscribe("slow", "busy")
        counts = Counts()
        alone = await rate_alone(broker, counts, size.alone_s)
        await broker.seal()  # The first seal loads Parquet, which is no backlog.
        tasks = [asyncio.create_task(publish(broker, kind, counts)) for kind in PublisherClass]
        tasks += [asyncio.create_task(neighbour(broker, counts))]
        pace = [CONSUMED_PER_S]
        working = asyncio.create_task(consume(consumer, counts, pace))
        outcome = await watch(report, broker, policy, counts, size)
        outcome.neighbour /= alone
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pace[0] = 1_000_000
        if not is_quick:
            outcome.release_s = await released(broker)
            report.figure(f"{policy.value}: released after", outcome.release_s, "s")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return outcome


async def rate_alone(broker: Broker, counts: Counts, seconds: float) -> float:
    """Messages a second of the neighbour while nobody else publishes."""
    task = asyncio.create_task(neighbour(broker, counts))
    await asyncio.sleep(seconds / 5)
    before, start = counts.neighbour, perf_counter()
    await asyncio.sleep(seconds)
    rate = (counts.neighbour - before) / (perf_counter() - start)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return rate


async def neighbour(broker: Broker, counts: Counts) -> None:
    """A steady publisher that makes up for what it is late."""
    start, sent = perf_counter(), 0
    while True:
        await broker.publish_batch("neighbour", [PAYLOAD] * BATCH)
        sent += BATCH
        counts.neighbour += BATCH
        await asyncio.sleep(max(0.0, start + sent / NEIGHBOUR_PER_S - perf_counter()))


async def publish(broker: Broker, kind: PublisherClass, counts: Counts) -> None:
    """Offers as much as it may, and comes again when it is told to, as a good client does."""
    batch, priorities = [PAYLOAD] * BATCH, [number % 4 for number in range(BATCH)]
    while True:
        started = perf_counter()
        counts.offered += BATCH
        counts.critical_offered += BATCH * (kind is PublisherClass.CRITICAL)
        try:
            receipts = await broker.publish_batch(
                "busy", batch, priorities=priorities, publisher=kind.value, priority_class=kind.value
            )
            counts.stored += BATCH - receipts.dropped
            counts.dropped += receipts.dropped
            counts.critical_stored += (BATCH - receipts.dropped) * (kind is PublisherClass.CRITICAL)
        except ResourceExhausted as error:
            counts.rejected += BATCH
            await asyncio.sleep(error.details["retry_after_s"] * random.uniform(1.0, 1.5))
        rest_s = BATCH / OFFERED_PER_S[kind] - (perf_counter() - started)
        await asyncio.sleep(max(0.0, rest_s))


async def consume(subscription: BrokerSubscription, counts: Counts, pace: list[int]) -> None:
    """One consumer that takes its time for every batch."""
    while True:
        started = perf_counter()
        found = await subscription.pull(BATCH, timeout_s=1.0)
        if found:
            rest_s = len(found) / pace[0] - (perf_counter() - started)
            await asyncio.sleep(max(0.0, rest_s))
            await subscription.ack(found)
            counts.consumed += len(found)


async def watch(report: Report, broker: Broker, policy: Overflow, counts: Counts, size: Size) -> Outcome:
    """The table of one policy."""
    report.say(f"  {policy.value}")
    report.say(
        "      s   offered/s    stored/s   dropped/s  rejected/s  given up  backlog   age s  memory MB  "
        "mode        neighbour/s"
    )
    start, backlog_max, memory = perf_counter(), 0, []
    before, first = Counts(**vars(counts)), counts.neighbour
    line_at = start
    while (now := perf_counter()) < start + size.seconds:
        next_at = line_at + size.line_s
        while (now := perf_counter()) < next_at:
            await asyncio.sleep(0.1)
            backlog_max = max(backlog_max, (await broker.topic_lag("busy")).depth)
        flow, lag = await broker.flow("busy"), await broker.topic_lag("busy")
        passed_s, line_at = now - line_at, now
        rates = {name: (value - getattr(before, name)) / passed_s for name, value in vars(counts).items()}
        before = Counts(**vars(counts))
        memory.append(measure.resident_mb())
        report.say(
            f"  {now - start:5.0f} {rates['offered']:11,.0f} {rates['stored']:11,.0f} "
            f"{rates['dropped']:11,.0f} {rates['rejected']:11,.0f} {flow.given_up:9,} {lag.depth:8,} "
            f"{lag.oldest_age_s:7.1f} {memory[-1]:10.1f}  {flow.level:10}  {rates['neighbour']:11,.0f}"
        )
    neighbour_per_s = (counts.neighbour - first) / (perf_counter() - start)
    warm = memory[min(1, len(memory) - 1)]
    changes = (await broker.flow("busy")).mode_changes
    report.figure(f"{policy.value}: changes of mode", changes, "changes", f"backlog at most {backlog_max:,}")
    critical = counts.critical_stored / max(1, counts.critical_offered)
    return Outcome(backlog_max, max(memory[1:], default=warm) - warm, changes, neighbour_per_s, critical, 0.0)


async def released(broker: Broker) -> float:
    """Seconds until the topic is back to normal."""
    start = perf_counter()
    while perf_counter() < start + RELEASE_S_MAX:
        if (await broker.flow("busy")).mode == "normal":
            break
        await asyncio.sleep(0.1)
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
