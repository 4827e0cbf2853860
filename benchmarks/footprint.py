"""What a broker costs before it does anything: a start within a second, and little memory.

    python -m benchmarks.footprint [--quick] [--json] [--data DIR]

The start is a fresh process: from the moment it is spawned, through the interpreter and all imports, through
opening a new data directory and creating a topic, to the receipt of a first durable message. An interpreter
that does nothing and one that imports pyarrow are timed in turns with it: that part is not Sparrow's.

Memory is VmRSS of a process that holds an open, idle broker: embedded, and ``sparrow up``, both two seconds
after they said that they are open.

numpy and pandas are not among what Sparrow needs, but the tests use them, and where they are installed
pyarrow loads them at its first conversion, whoever asks for it. So the embedded broker is measured with them
out of reach, and once more as it is beside them. ``sparrow up`` keeps them out by itself.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Options, Report

START_S_MAX = 1.0
RESIDENT_MB_MAX = 120.0
STOP_TIMEOUT_S = 10.0

ALONE = """
import sys
sys.modules["numpy"] = sys.modules["pandas"] = None
"""

EMBEDDED = """
import sys, time
import uvloop
from sparrow.broker.broker import Broker
from sparrow.broker import logs
from sparrow.model.settings import Settings
logs.configure("error", "json")
opening = time.monotonic()

async def start():
    broker = await Broker.open(Settings(data=sys.argv[1]))
    opened = time.monotonic()
    await broker.publish("first", b"message")
    print(opening, opened, time.monotonic(), flush=True)
    sys.stdin.readline()
    await broker.close()

uvloop.run(start())
"""

IDLE = """
import sys
import uvloop
from sparrow.broker.broker import Broker
from sparrow.broker import logs
from sparrow.model.settings import Settings
logs.configure("error", "json")

async def idle():
    broker = await Broker.open(Settings(data=sys.argv[1]))
    print("open", flush=True)
    sys.stdin.readline()
    await broker.close()

uvloop.run(idle())
"""

ARROW = """
import time
import pyarrow, pyarrow.compute, pyarrow.parquet
print(time.monotonic(), flush=True)
input()
"""

UP = "from sparrow.cli.main import main; main()"


def run(options: Options, report: Report) -> None:
    rounds, idle_s = (1, 0.1) if options.quick else (5, 2.0)
    report.set_out(durability="durable", rounds=rounds, idle_s=idle_s)
    print_start(report, options, rounds)
    print_memory(report, options, idle_s)


def print_start(report: Report, options: Options, rounds: int) -> None:
    bare: list[float] = []
    arrow: list[tuple[float, float]] = []
    steps: list[tuple[float, float, float]] = []
    for number in range(rounds):
        bare.append(spawned_s("pass"))
        arrow.append(arrow_once())
        steps.append(start_once(options.data / f"start-{number}"))
    report.figure("an interpreter that does nothing", statistics.median(bare), "s")
    report.figure("an interpreter that imports pyarrow", statistics.median(s for s, _ in arrow), "s")
    report.figure("interpreter and imports", statistics.median(step[0] for step in steps), "s")
    report.figure("open a new directory", statistics.median(step[1] for step in steps), "s")
    report.figure("first topic and message", statistics.median(step[2] for step in steps), "s")
    totals = [sum(step) for step in steps]
    report.figure("ratio to importing pyarrow", measure.median_ratio(totals, [s for s, _ in arrow]), "x")
    report.figure("resident with pyarrow alone", statistics.median(mb for _, mb in arrow), "MB")
    note = ", ".join(f"{total:.2f}" for total in totals)
    report.check("spawn to first durable receipt", statistics.median(totals), START_S_MAX, "s", note=note)


def spawned_s(code: str) -> float:
    start = time.monotonic()
    with measure.child("-c", code) as process:
        process.communicate()
    return time.monotonic() - start


def arrow_once() -> tuple[float, float]:
    """Seconds until an interpreter has imported what Sparrow cannot do without, and its memory then."""
    start = time.monotonic()
    with spawn("-c", ALONE + ARROW) as process:
        seconds = float(answer(process)) - start
        resident_mb = measure.resident_mb(process.pid)
        process.communicate("\n")
    return seconds, resident_mb


def start_once(directory: Path) -> tuple[float, float, float]:
    """Seconds until Python is ready to open, has opened, and has the receipt."""
    start = time.monotonic()
    with spawn("-c", ALONE + EMBEDDED, str(directory)) as process:
        opening, opened, published = map(float, answer(process).split())
        process.communicate("\n")
    return opening - start, opened - opening, published - opened


def print_memory(report: Report, options: Options, idle_s: float) -> None:
    embedded_mb = idle_mb(ALONE + IDLE, options.data / "idle", idle_s)
    beside_mb = idle_mb(IDLE, options.data / "beside", idle_s)
    words = ["up", "--json", "--data", str(options.data / "up"), "--log-level", "error"]
    for listener in ("--http", "--tcp", "--grpc"):
        words += [listener, "127.0.0.1:0"]
    with spawn("-c", UP, *words) as process:
        try:
            assert json.loads(answer(process))["pid"] == process.pid
            time.sleep(idle_s)
            up_mb = measure.resident_mb(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_TIMEOUT_S)
    report.check("resident, embedded and idle", embedded_mb, RESIDENT_MB_MAX, "MB")
    report.figure("the same beside numpy and pandas", beside_mb, "MB")
    report.check("resident, sparrow up and idle", up_mb, RESIDENT_MB_MAX, "MB")


def idle_mb(code: str, directory: Path, idle_s: float) -> float:
    """The memory of a program that says when its broker is open."""
    with spawn("-c", code, str(directory)) as process:
        answer(process)
        time.sleep(idle_s)
        resident_mb = measure.resident_mb(process.pid)
        process.communicate("\n")
    return resident_mb


def spawn(*words: str) -> subprocess.Popen[str]:
    """A fresh Python that answers on its standard output and waits for a line on its input."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=measure.ROOT,
        env=measure.environment(),
    )


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the child ended without an answer"
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("footprint", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
