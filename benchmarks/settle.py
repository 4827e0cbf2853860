"""Settling promises: what leasing and acking cost in the kernel, and what a backlog costs in memory.

    python -m benchmarks.settle [--quick]

Individual: messages are offered and leased by the thousand, every ack id is made, and all ids of a
stretch are acked in random order, a thousand a call, each decision encoded as for the journal and
applied. Cumulative: the same messages, committed by the batch. Backlog: 10 M messages on each of 10
subscriptions, every second with a filter that passes half of them; each reads ahead as far as it may
and acks half of that in random places. Then the worst case for a cursor: every second message acked.

Kernel alone: no journal, no sockets, no payloads. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from time import perf_counter

from pyroaring import BitMap64

from benchmarks import measure
from sparrow.kernel import facts
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival, Settled
from sparrow.model.message import StreamId
from sparrow.model.subscription import SubscriptionPolicy

INDIVIDUAL_PER_S_MIN = 300_000
CUMULATIVE_PER_S_MIN = 5_000_000
BACKLOG_MB_MAX = 100.0
RUN_US_MAX = 50.0
IDLE_BYTES_MAX = 2048.0

BATCH = 1_000
STRETCH = 10_000
STREAM = StreamId(1, 0)


def run(options: measure.Options, report: measure.Report) -> None:
    count = 200_000 if options.quick else 2_000_000
    report.check(
        "individual acks, random order", individual(count), INDIVIDUAL_PER_S_MIN, "/s", at_least=True
    )
    report.check("cumulative acks", cumulative(10 * count), CUMULATIVE_PER_S_MIN, "/s", at_least=True)
    report.check("lease of a plain run of 1,000", plain_lease_us(count), RUN_US_MAX, "us")
    report.check("an idle subscription", idle_bytes(), IDLE_BYTES_MAX, "bytes")
    messages = 1_000_000 if options.quick else 10_000_000
    report.check(f"backlog of {messages:,} on 10 subscriptions", backlog_mb(messages), BACKLOG_MB_MAX, "MB")


def opened(number: int = 1) -> Delivery:
    delivery = Delivery(number, SubscriptionPolicy(max_in_flight=1_000_000), session=1)
    for fact in delivery.attach(STREAM, 0):
        delivery.apply(fact)
    return delivery


def settle(delivery: Delivery, settled: Settled) -> None:
    assert not settled.refused
    facts.encode(settled.facts)
    for fact in settled.facts:
        delivery.apply(fact)


def individual(count: int) -> float:
    delivery, shuffle = opened(), random.Random(1).shuffle
    busy_s = 0.0
    for start in range(0, count, STRETCH):
        began = perf_counter()
        delivery.offer(Arrival(stream=STREAM, first_offset=start, end_offset=start + STRETCH), start)
        ids = [
            ack_id
            for _ in range(STRETCH // BATCH)
            for run in delivery.lease("worker", BATCH, start).runs
            for ack_id in run.ack_ids()
        ]
        busy_s += perf_counter() - began
        shuffle(ids)
        began = perf_counter()
        for at in range(0, STRETCH, BATCH):
            settle(delivery, delivery.ack(ids[at : at + BATCH]))
        busy_s += perf_counter() - began
    assert delivery.cursor(STREAM).floor == count
    return count / busy_s


def cumulative(count: int) -> float:
    delivery = opened()
    began = perf_counter()
    for start in range(0, count, BATCH):
        delivery.offer(Arrival(stream=STREAM, first_offset=start, end_offset=start + BATCH), start)
        delivery.lease("worker", BATCH, start)
        settle(delivery, delivery.commit(STREAM, start + BATCH))
    assert delivery.cursor(STREAM).floor == count
    return count / (perf_counter() - began)


def plain_lease_us(count: int) -> float:
    delivery = opened()
    for start in range(0, count, BATCH):
        delivery.offer(Arrival(stream=STREAM, first_offset=start, end_offset=start + BATCH), start)
    rounds = min(500, count // BATCH)
    began = perf_counter()
    for _ in range(rounds):
        delivery.lease("worker", BATCH, 0)
    return (perf_counter() - began) / rounds * 1e6


def idle_bytes(count: int = 10_000) -> float:
    gc.collect()
    before = measure.resident_mb()
    held = [opened(number) for number in range(count)]
    gc.collect()
    return (measure.resident_mb() - before) * measure.MIB / len(held)


def backlog_mb(messages: int) -> float:
    gc.collect()
    before = measure.resident_mb()
    held = [opened(number) for number in range(10)]
    for number, delivery in enumerate(held):
        read_all(delivery, messages, is_filtered=number % 2 == 1)
        ack_half(delivery)
        scattered = facts.acked(delivery.subscription_id, STREAM, BitMap64(range(1, messages, 2)))
        delivery.apply(scattered)
    del scattered
    gc.collect()
    grown = measure.resident_mb() - before
    assert all(delivery.lag({STREAM: messages})[0].messages > messages // 4 for delivery in held)
    return grown


def ack_half(delivery: Delivery) -> None:
    taken: list[int] = []
    while runs := delivery.lease("worker", BATCH, 0).runs:
        for leased in runs:
            taken += leased.to_offsets()
    some = random.Random(1).sample(taken, len(taken) // 2)
    settle(delivery, delivery.ack_offsets(STREAM, BitMap64(some)))


def read_all(delivery: Delivery, messages: int, *, is_filtered: bool) -> None:
    """Offer all that the subscription wants to read for an endless demand."""
    while wishes := delivery.wanted(demand=messages):
        start = wishes[0].start_offset
        end = min(messages, start + wishes[0].max_messages)
        if start >= end:
            return
        selected = BitMap64(range(start, end, 2)) if is_filtered else None
        delivery.offer(Arrival(stream=STREAM, first_offset=start, end_offset=end, selected=selected), 0)


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("settle", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
