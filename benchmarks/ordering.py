"""Ordering promises: 10,000 keys in strict order through one process.

    python -m benchmarks.ordering [--quick]

Every key has one message outstanding at most. Two workers lease in turns and ack in random order, eight
batches of a thousand behind what they lease: most keys are busy, and their next messages wait in line.
One message in a hundred is nacked once; the order of each key is checked. The same load without
ordering and with a window of ten per key is shown beside it.

First the kernel alone, then the whole broker: messages of 1 KB out of the log, two consumers that pull in
turns and ack what they pulled, acks durable at the end, the order of every key checked. The promise to users
is about the broker; the kernel must leave room for the rest. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Sequence
from time import perf_counter

from benchmarks import measure
from sparrow.broker.broker import Broker
from sparrow.kernel import facts
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival, Settled
from sparrow.model.message import StreamId
from sparrow.model.subscription import Ordering, RetryPolicy, SubscriptionPolicy

STRICT_PER_S_MIN = 60_000
"""Twice what is promised to users, because the kernel is not all there is."""
STRICT_PER_S_GOAL = 150_000
BROKER_PER_S_MIN = 30_000
KEYS = 10_000
BATCH = 1_000
BEHIND = 8
STREAM = StreamId(1, 0)


def run(options: measure.Options, report: measure.Report) -> None:
    count = 50_000 if options.quick else 500_000
    strict = through(count, SubscriptionPolicy(ordering=Ordering.KEY, retry=RetryPolicy(immediate_retries=9)))
    window = through(count, SubscriptionPolicy(ordering=Ordering.KEY, key_window=10))
    loose = through(count, SubscriptionPolicy(retry=RetryPolicy(immediate_retries=9)))
    goal = f"{strict / STRICT_PER_S_GOAL:.2f} of the goal of {STRICT_PER_S_GOAL:,}"
    report.check("strict order, 10,000 keys", strict, STRICT_PER_S_MIN, "/s", at_least=True, note=goal)
    measure.on_loop(through_broker(options, report, 20 if options.quick else 200))
    report.figure("ten of a key at once", window, "/s", f"{window / strict:.2f} x strict")
    report.figure("without order", loose, "/s", f"{loose / strict:.2f} x strict")


def through(count: int, policy: SubscriptionPolicy) -> float:
    """Messages a second through offer, lease, ack id, ack or nack, facts."""
    choose = random.Random(1)
    keys = [choose.randrange(KEYS) for _ in range(count)]
    delivery = Delivery(1, policy, session=1)
    for fact in delivery.attach(STREAM, 0):
        delivery.apply(fact)
    newest = dict.fromkeys(range(KEYS), -1)
    behind: deque[list[str]] = deque()
    done = turn = now_us = 0
    began, aside_s = perf_counter(), 0.0
    while done < count:
        now_us += 1_000
        read(delivery, keys, now_us)
        turn += 1
        over = delivery.lease(f"worker-{turn % 2}", BATCH, now_us)
        if over.runs:
            behind.append([ack_id for run in over.runs for ack_id in run.ack_ids()])
        paused = perf_counter()
        if policy.ordering is Ordering.KEY and policy.key_window == 1:
            for handed in over.runs:
                check_order(handed.to_offsets(), keys, newest)
        if len(behind) < BEHIND and over.runs:
            aside_s += perf_counter() - paused
            continue
        ids = behind.popleft()
        choose.shuffle(ids)
        aside_s += perf_counter() - paused
        failing = len(ids) // 100 if policy.key_window == 1 else 0
        if failing:
            settle(delivery, delivery.nack(ids[:failing], now_us))
        settle(delivery, delivery.ack(ids[failing:]))
        done += len(ids) - failing
    return count / (perf_counter() - began - aside_s)


async def through_broker(options: measure.Options, report: measure.Report, batches: int) -> None:
    """Messages a second from the log to the consumers, until all acks are durable."""
    choose = random.Random(2)
    async with await Broker.open(measure.settings(options.data / "ordered")) as broker:
        await broker.create_topic("ordered")
        consumers = [await broker.subscribe("strict", "ordered", ordering="key") for _ in range(2)]
        for _ in range(batches):
            keys = [f"key-{choose.randrange(KEYS)}" for _ in range(BATCH)]
            await broker.publish_batch("ordered", [b"x" * measure.MESSAGE_BYTES] * BATCH, keys=keys)
        newest: dict[str | None, int] = {}
        began, done = perf_counter(), 0
        while done < batches * BATCH:
            for consumer in consumers:
                messages = await consumer.pull(BATCH)
                for message in messages:
                    assert newest.get(message.key, -1) < message.offset, "a key was delivered out of order"
                    newest[message.key] = message.offset
                await consumer.ack(messages)
                done += len(messages)
        await consumers[0].flush()
        rate = done / (perf_counter() - began)
    report.check("strict order, 10,000 keys, through the broker", rate, BROKER_PER_S_MIN, "/s", at_least=True)


def read(delivery: Delivery, keys: list[int], now_us: int) -> None:
    for wish in delivery.wanted(BATCH):
        start, end = wish.start_offset, min(len(keys), wish.start_offset + wish.max_messages)
        if start < end:
            delivery.offer(
                Arrival(stream=STREAM, first_offset=start, end_offset=end, keys=keys[start:end]), now_us
            )


def check_order(offsets: Sequence[int], keys: list[int], newest: dict[int, int]) -> None:
    """A nacked message comes again; nothing comes after a later one of its key."""
    for offset in offsets:
        assert offset >= newest[keys[offset]], "a key was delivered out of order"
        newest[keys[offset]] = offset


def settle(delivery: Delivery, settled: Settled) -> None:
    assert not settled.refused
    facts.encode(settled.facts)
    for fact in settled.facts:
        delivery.apply(fact)


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("ordering", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
