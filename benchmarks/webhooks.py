"""Webhooks: how many a second, how soon, and whether receivers that are dead hold up the others.

    python -m benchmarks.webhooks [--quick] [--json] [--data DIR]

A broker with default settings (but that it may push to this machine) and a receiver, each a process of its
own. The receiver reads every request whole, and answers 200 at once. Messages are durable, about 250 bytes of
JSON, pushed as signed envelopes.

Throughput is that of one subscription with a backlog. Latency counts from the time at which a message was
*due* to be published, at a steady rate, to its arrival in the receiver: a stall makes every message late that
was due meanwhile. For the crowd every receiver has a topic of its own; one in ten is dead, half of those
refuse connections and half accept them and say nothing, and the latency is that of the others.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import IO, Any, cast

import uvloop

from benchmarks import measure
from benchmarks.measure import Options, Report
from sparrow.broker.broker import Broker
from sparrow.model.push import PushSettings
from sparrow.model.settings import Settings

RATE_MIN = 2_000
STEADY_RATE = 200
STEADY_P99_MS_MAX = 50.0
CROWD_P99_MS_MAX = 500.0
CROWD_RATE = 300
_PADDING = "x" * 200
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_REFUSING_PORT = 9


def run(options: Options, report: Report) -> None:
    _allow_many_files()
    backlog, seconds, crowd = (2_000, 2.0, 40) if options.quick else (40_000, 20.0, 1_000)
    report.set_out(durability="durable", backlog=backlog, seconds=seconds, receivers=crowd)
    with _receiver() as receiver:
        measure.on_loop(bench(options.data, report, receiver, backlog, seconds, crowd))


async def bench(
    data: Path, report: Report, receiver: Receiver, backlog: int, seconds: float, crowd: int
) -> None:
    settings = Settings(
        data=str(data / "broker"),
        push=PushSettings(allow_networks="127.0.0.0/8", ports="1-65535", drain_s=0.0),
    )
    async with await Broker.open(settings) as broker:
        await throughput(broker, report, receiver, backlog)
        await steady(broker, report, receiver, seconds)
        await beside_dead_ones(broker, report, receiver, seconds, crowd)


async def throughput(broker: Broker, report: Report, receiver: Receiver, backlog: int) -> None:
    await broker.create_topic("backlog")
    handle = await broker.subscribe("backlog", "backlog", push={"url": receiver.url("backlog")})
    await handle.pause()
    payload = json.dumps({"at": 0, "padding": _PADDING}).encode()
    for _ in range(0, backlog, 1_000):
        await broker.publish_batch("backlog", [payload] * 1_000)
    start, cpu = perf_counter(), time.process_time()
    await handle.resume()
    await receiver.until(backlog)
    taken, cpu = perf_counter() - start, time.process_time() - cpu
    assert (await receiver.report())["count"] >= backlog
    state = await handle.push_state()
    report.check("delivery", backlog / taken, RATE_MIN, "webhooks/s", at_least=True)
    report.figure("processor time of the broker", cpu / backlog * 1e6, "µs a webhook")
    report.figure("requests at once", state.concurrency, "", "how far concurrency grew by itself")


async def steady(broker: Broker, report: Report, receiver: Receiver, seconds: float) -> None:
    await broker.create_topic("steady")
    await broker.subscribe("steady", "steady", push={"url": receiver.url("steady")})
    await _publish(broker, ["steady"], 20, STEADY_RATE)
    await receiver.until(20)
    await receiver.report()
    count = int(seconds * STEADY_RATE)
    await _publish(broker, ["steady"], count, STEADY_RATE)
    await receiver.until(count)
    found = await receiver.report()
    report.check("due to received, p99", found["p99_ms"], STEADY_P99_MS_MAX, "ms", note=f"{STEADY_RATE}/s")
    report.figure("due to received, p50", found["p50_ms"], "ms")


async def beside_dead_ones(
    broker: Broker, report: Report, receiver: Receiver, seconds: float, crowd: int
) -> None:
    silent = await asyncio.start_server(_say_nothing, "127.0.0.1", 0)
    silent_port = silent.sockets[0].getsockname()[1]
    healthy: list[str] = []
    dead: list[str] = []
    for number in range(crowd):
        topic, url = f"crowd.{number}", receiver.url(f"crowd/{number}")
        if number % 10 == 0:
            url = f"http://127.0.0.1:{_REFUSING_PORT if number % 20 else silent_port}/dead"
        (dead if number % 10 == 0 else healthy).append(topic)
        await broker.create_topic(topic)
        await broker.subscribe(f"crowd-{number}", topic, push={"url": url})
    await _publish(broker, healthy + dead, 2 * crowd, 10 * CROWD_RATE)
    await receiver.until(2 * len(healthy))
    await receiver.report()
    count = int(seconds * CROWD_RATE)
    await _publish(broker, healthy + dead, count, CROWD_RATE)
    expected = sum(len(healthy) > place % crowd for place in range(count))
    await receiver.until(expected)
    found = await receiver.report()
    report.check(
        "due to received by the healthy, p99", found["p99_ms"], CROWD_P99_MS_MAX, "ms",
        note=f"{len(dead)} of {crowd} dead, {CROWD_RATE}/s",
    )  # fmt: skip
    report.figure("due to received by the healthy, p50", found["p50_ms"], "ms")
    silent.close()


async def _publish(broker: Broker, topics: list[str], count: int, rate: float) -> None:
    """One message each at even times, topic after topic; late ones are sent at once, under their due time."""
    start, start_ns = perf_counter(), time.time_ns()
    under_way: set[asyncio.Task[Any]] = set()
    for number in range(count):
        rest_s = number / rate - (perf_counter() - start)
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        due_ns = start_ns + int(number / rate * 1e9)
        payload = json.dumps({"at": due_ns, "padding": _PADDING}).encode()
        task = asyncio.create_task(broker.publish(topics[number % len(topics)], payload))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.read(65_536):
            pass
    finally:
        writer.close()


def _allow_many_files() -> None:
    """A thousand receivers are a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))


# The receiver.


class Receiver:
    """The receiving process, as the benchmark sees it."""

    def __init__(self, port: int, questions: IO[str], answers: IO[str]) -> None:
        self._port = port
        self._questions = questions
        self._answers = answers

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}/{path}"

    async def report(self) -> dict[str, float]:
        """What came since the last report."""
        return await self._ask("report")

    async def until(self, count: int, timeout_s: float = 60.0) -> None:
        """Returns when so many have come since the last report."""
        end = perf_counter() + timeout_s
        while (await self._ask("count"))["count"] < count:
            assert perf_counter() < end, f"{count} webhooks did not arrive within {timeout_s} s"
            await asyncio.sleep(0.05)

    async def _ask(self, question: str) -> dict[str, float]:
        self._questions.write(question + "\n")
        self._questions.flush()
        found: dict[str, float] = json.loads(await asyncio.to_thread(self._answers.readline))
        return found


@contextmanager
def _receiver() -> Iterator[Receiver]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.webhooks", "receive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=measure.ROOT,
        env=measure.environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Receiver(int(process.stdout.readline()), process.stdin, process.stdout)
    finally:
        process.kill()
        process.communicate()


class Arrivals(asyncio.Protocol):
    """Enough of HTTP to take requests of a known length, and the time of each."""

    late_ms: list[float]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self._held = b""

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (head := self._held.find(b"\r\n\r\n")) >= 0:
            start = self._held.lower().index(b"content-length:", 0, head) + len(b"content-length:")
            end = head + 4 + int(self._held[start : self._held.index(b"\r\n", start)])
            if len(self._held) < end:
                return
            place = self._held.index(b'"at": ', head, end) + len(b'"at": ')
            due_ns = int(self._held[place : self._held.index(b",", place)])
            self.late_ms.append((time.time_ns() - due_ns) / 1e6)
            self._held = self._held[end:]
            self._transport.write(_ANSWER)


async def receive() -> None:
    """The receiving process: answers questions on standard input."""
    _allow_many_files()
    Arrivals.late_ms = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Arrivals, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    while question := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        found = Arrivals.late_ms
        answer: dict[str, float] = {"count": len(found)}
        if question == "report":
            Arrivals.late_ms = []
            if found:
                answer |= {f"p{p}_ms": measure.percentile(found, p / 100) for p in (50, 99)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["receive"]:
        uvloop.run(receive())
        sys.exit(0)
    sys.exit(measure.main("webhooks", __doc__, run))
