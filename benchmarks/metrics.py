"""What it costs to look at a broker with a thousand topics and a thousand subscriptions.

    python -m benchmarks.metrics [--quick] [--json] [--data DIR]

Each topic has a subscription, messages and acks, so that every family has a sample for each. A scrape is what
``GET /metrics`` does: figures collected on the event loop in slices, text written in a thread. Beside it a
task sleeps for a millisecond at a time; by how much it oversleeps is how long others are kept waiting.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks import measure
from benchmarks.measure import Options, Report
from sparrow.broker.broker import Broker
from sparrow.server import exposition

SCRAPE_MS_MAX = 200.0
KEPT_WAITING_MS_MAX = 50.0
NAP_S = 0.001


def run(options: Options, report: Report) -> None:
    count, scrapes = (50, 3) if options.quick else (1000, 20)
    report.set_out(topics=count, subscriptions=count, scrapes=scrapes)
    measure.on_loop(scrape(options, report, count, scrapes))


async def scrape(options: Options, report: Report, count: int, scrapes: int) -> None:
    async with await Broker.open(measure.settings(options.data / "metrics")) as broker:
        await fill(broker, count)
        overslept: list[float] = []
        napping = asyncio.create_task(nap(overslept))
        walls, texts = [], [b""]
        for _ in range(scrapes):
            await broker.telemetry.look(is_new=True)
            start = time.perf_counter()
            await broker.telemetry.look(is_new=True)
            texts.append(await exposition.render(broker.telemetry))
            walls.append((time.perf_counter() - start) * 1e3)
        napping.cancel()
        with suppress(asyncio.CancelledError):
            await napping
        start = time.perf_counter()
        await broker.telemetry.record(await broker.telemetry.look())
        recording_ms = (time.perf_counter() - start) * 1e3
        report.figure("samples", texts[-1].count(b"\n"), "")
        report.figure("size of the answer", len(texts[-1]) / 1e6, "MB")
        report.figure("memory of the series now", broker.telemetry.series.nbytes / 1e6, "MB")
        report.figure("keep one sample of every series", recording_ms, "ms")
        report.check("a scrape, median", statistics.median(walls), SCRAPE_MS_MAX, "ms")
        kept_ms = measure.percentile(overslept, 0.99) * 1e3
        report.check("others kept waiting, p99", kept_ms, KEPT_WAITING_MS_MAX, "ms")


async def fill(broker: Broker, count: int) -> None:
    for number in range(count):
        topic = f"bench.{number}"
        await broker.create_topic(topic)
        subscription = await broker.subscribe(f"reader-{number}", topic)
        await broker.publish_batch(topic, [b"x"] * 10)
        await subscription.ack(await subscription.pull(5, timeout_s=1.0))


async def nap(overslept: list[float]) -> None:
    while True:
        start = time.perf_counter()
        await asyncio.sleep(NAP_S)
        overslept.append(time.perf_counter() - start - NAP_S)


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("metrics", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
