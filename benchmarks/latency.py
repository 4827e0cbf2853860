"""The wire's latency: from a publish that was due to the handler that has the message, at a steady rate.

    python -m benchmarks.latency [--quick] [--json] [--data DIR]

A broker (``sparrow up``, default settings) and one client, each a process of its own. Messages of 1 KB,
durable, are due at even times, 10,000 a second. A message carries the time at which it was *due*, and
latency counts from there: a stall makes every message late that was due meanwhile, not only the one that
was sent (no coordinated omission). The handler's clock is the publisher's. The receipt's latency is counted
the same way.
"""

from __future__ import annotations

import asyncio
import gc
import struct
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import sparrow
from benchmarks import measure, remote
from benchmarks.measure import KB, Options, Report

RATE = 10_000
P99_MS_MAX = 10.0
_DUE = struct.Struct("<d")
_TICK_S = 0.001
_PADDING = bytes(KB - _DUE.size)


def run(options: Options, report: Report) -> None:
    seconds, rate = (1.0, 1_000) if options.quick else (20.0, RATE)
    report.set_out(
        durability="durable (receipt after fdatasync)", message_bytes=KB, rate=rate, seconds=seconds
    )
    gc.collect()
    gc.freeze()  # As the broker does: the benchmark's own modules are not what is measured.
    with remote.broker(options.data / "broker") as process:
        measure.on_loop(bench(report, process.url, seconds, rate))


async def bench(report: Report, url: str, seconds: float, rate: int) -> None:
    async with sparrow.aconnect(url) as publisher, sparrow.aconnect(url) as consumer:
        await publisher.create_topic("steady")
        subscription = await consumer.subscribe("steady", "steady")
        await warm_up(publisher, subscription)
        handled: list[float] = []
        receipted: list[float] = []
        count = int(seconds * rate)
        consuming = asyncio.create_task(consume(subscription, count, handled))
        await publish(publisher, count, rate, receipted)
        await asyncio.wait_for(consuming, 60)
        await subscription.close()
    for name, values in (("receipt", receipted), ("handler", handled)):
        late_ms = [value * 1000 for value in values]
        for share in (0.5, 0.99, 0.999):
            figure = measure.percentile(late_ms, share)
            label = f"due to {name}, p{share * 100:g}"
            if name == "handler" and share == 0.99:
                report.check(label, figure, P99_MS_MAX, "ms")
            else:
                report.figure(label, figure, "ms")
        report.figure(f"due to {name}, longest", max(late_ms), "ms")


async def warm_up(publisher: Any, subscription: Any) -> None:
    for _ in range(50):
        await publisher.publish("steady", _DUE.pack(0.0) + _PADDING)
    seen = 0
    while seen < 50:
        messages = await subscription.pull(100, timeout_s=10.0)
        await subscription.ack(messages)
        seen += len(messages)


async def publish(broker: Any, count: int, rate: int, receipted: list[float]) -> None:
    """What is due is sent, whether or not earlier receipts have come."""
    start, sent = perf_counter() + 0.1, 0
    waiting: set[asyncio.Task[None]] = set()

    async def one(due: float) -> None:
        await broker.publish("steady", _DUE.pack(due) + _PADDING)
        receipted.append(perf_counter() - due)

    while sent < count:
        now = perf_counter()
        while sent < count and start + sent / rate <= now:
            task = asyncio.create_task(one(start + sent / rate))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            sent += 1
        await asyncio.sleep(_TICK_S)
    while waiting:
        await asyncio.wait(waiting)


async def consume(subscription: Any, count: int, handled: list[float]) -> None:
    while len(handled) < count:
        messages = await subscription.pull(1_000, timeout_s=10.0)
        now = perf_counter()
        handled.extend(now - _DUE.unpack_from(message.data)[0] for message in messages)
        await subscription.ack(messages)
    await subscription.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("latency", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
