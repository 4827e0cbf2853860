"""Recovery's promises: a killed broker is back within seconds, and what is sealed does not slow it down.

    python -m benchmarks.recovery [--quick] [--json] [--data DIR]

A child process publishes 1 M messages of 1 KB (batches of 1,000, default journal files, no sealing) and kills
itself with SIGKILL while more are on their way. A fresh process then opens the directory. The time runs from
the call of open until a message published last has been read; interpreter and imports are printed apart.

A second directory first takes 10 M sealed messages and then the same unsealed tail. To spare the disk the
sealed ones have 100 bytes, but lie in as many segments and row groups as messages of 1 KB would need, since
it is those that an opening broker must know about.

Both are opened in turns, each time from a fresh copy of what the kill left, because opening cuts the torn
tail. The page cache is warm, as a kill leaves it; the time with a cold one is judged by the same limit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.measure import BATCH, MESSAGE_BYTES, MIB, Options, Report, Unsealed
from sparrow.broker import logs
from sparrow.broker.broker import Broker

OPEN_S_MAX = 5.0
SEALED_COSTS_S_MAX = 0.2
TAIL, HISTORY = "tail", "history"
IN_FLIGHT = 16
SMALL_BYTES = 100
KILL_AFTER_S = 0.3
"""Long enough after the last counted receipt that the kill meets a write."""
SEGMENT_MESSAGES = 128 * MIB // MESSAGE_BYTES
"""What a default journal file of 1 KB messages holds, and so a segment."""
ROW_GROUP_BYTES = 4 * MIB * SMALL_BYTES // MESSAGE_BYTES


class Sizes(NamedTuple):
    """How much of everything."""

    rounds: int
    unsealed: int
    sealed: int


FULL = Sizes(rounds=3, unsealed=1_000_000, sealed=10_000_000)
QUICK = Sizes(rounds=1, unsealed=5_000, sealed=20_000)


class Opening(NamedTuple):
    """How long one opening took."""

    open_s: float
    import_s: float
    found: dict[str, Any]


def run(options: Options, report: Report) -> None:
    sizes = QUICK if options.quick else FULL
    report.set_out(
        durability="durable",
        unsealed=f"{sizes.unsealed:,} x {MESSAGE_BYTES} bytes",
        sealed=f"{sizes.sealed:,} x {SMALL_BYTES} bytes",
        journal_files="128 MiB",
        rounds=sizes.rounds,
    )
    plain, laden = options.data / "plain", options.data / "laden"
    kill_while_publishing(plain, 0, sizes.unsealed)
    kill_while_publishing(laden, sizes.sealed, sizes.unsealed)
    warm: dict[Path, list[Opening]] = {plain: [], laden: []}
    for _ in range(sizes.rounds):
        for directory, openings in warm.items():
            openings.append(reopen(directory, sizes, is_cold=False))
    cold = [reopen(plain, sizes, is_cold=True) for _ in range(sizes.rounds)]
    print_openings(report, warm[plain], warm[laden], cold)


def print_openings(
    report: Report, plain: Sequence[Opening], laden: Sequence[Opening], cold: Sequence[Opening]
) -> None:
    found = laden[-1].found
    report.say(
        f"  the journal: {found['journal_files']} files, {found['journal_bytes'] / 1e6:,.0f} MB, "
        f"{found['messages']:,} messages, {found['torn_bytes']:,} torn bytes; "
        f"the lake: {found['segments']} segments"
    )
    plain_s, laden_s = median_s(plain), median_s(laden)
    report.figure("interpreter and imports", statistics.median(each.import_s for each in plain), "s")
    report.figure("journal read", plain[-1].found["journal_bytes"] / plain_s / 1e6, "MB/s")
    report.figure("open with sealed messages", laden_s, "s", listed(laden))
    report.check("open after a kill", plain_s, OPEN_S_MAX, "s", note=listed(plain))
    share = min(each.found["device_bytes"] / each.found["journal_bytes"] for each in cold)
    note = f"{listed(cold)}; {share:.0%} of the journal came from the device"
    report.check("open after a kill, page cache cold", median_s(cold), OPEN_S_MAX, "s", note=note)
    report.check("what sealed messages add", laden_s - plain_s, SEALED_COSTS_S_MAX, "s")


def median_s(openings: Sequence[Opening]) -> float:
    return statistics.median(each.open_s for each in openings)


def listed(openings: Sequence[Opening]) -> str:
    return ", ".join(f"{each.open_s:.2f}" for each in openings)


# The parent's side of its children.


def kill_while_publishing(directory: Path, sealed: int, unsealed: int) -> None:
    counts = (str(sealed), str(unsealed))
    with measure.child("-m", "benchmarks.recovery", "child", "publish", str(directory), *counts) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL, f"the child ended with {process.returncode}"


def reopen(killed: Path, sizes: Sizes, *, is_cold: bool) -> Opening:
    directory = killed.with_name("opened")
    copy(killed, directory)
    if is_cold:
        for path in directory.rglob("*.wal"):
            measure.drop_cache(path)
    start = time.monotonic()
    with measure.child("-m", "benchmarks.recovery", "child", "open", str(directory)) as process:
        output, _ = process.communicate()
    shutil.rmtree(directory)
    answer = json.loads(output)
    assert answer["messages"] >= sizes.unsealed, "a receipted message is lost"
    assert not answer["damages"], "a kill must not look like damage"
    return Opening(answer["open_s"], answer["started_at_s"] - start, answer)


def copy(source: Path, target: Path) -> None:
    """What a kill left, again. Finished files are never changed, so their bytes need not be copied."""
    newest = max(source.rglob("*.wal"))

    def duplicate(one: str, other: str) -> None:
        is_finished = one.endswith(".parquet") or (one.endswith(".wal") and Path(one) != newest)
        if is_finished:
            os.link(one, other)
        else:
            subprocess.run(["cp", "--sparse=never", one, other], check=True)

    shutil.copytree(source, target, copy_function=duplicate)


# The children.


async def publish_and_die(directory: Path, sealed: int, unsealed: int) -> None:
    if sealed:
        await publish_and_seal(directory, sealed)
    broker = await measure.open_on(Unsealed, measure.settings(directory))
    await broker.create_topic(TAIL)
    batches = measure.random_batches(64 if unsealed > 64 * BATCH else 2)
    await measure.publish_batches(broker, [TAIL], batches, unsealed // BATCH, IN_FLIGHT)
    threading.Timer(KILL_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    await measure.publish_batches(broker, [TAIL], batches, unsealed, IN_FLIGHT)


async def publish_and_seal(directory: Path, messages: int) -> None:
    batches = measure.random_batches(64, SMALL_BYTES)
    async with await Broker.open(measure.settings(directory, row_group_bytes=ROW_GROUP_BYTES)) as broker:
        await broker.create_topic(HISTORY)
        for first in range(0, messages, SEGMENT_MESSAGES):
            count = min(SEGMENT_MESSAGES, messages - first) // BATCH
            await measure.publish_batches(broker, [HISTORY], batches, count, IN_FLIGHT)
            await broker.seal()


async def open_and_die(directory: Path) -> None:
    before, started_at_s = measure.device_bytes(), time.monotonic()
    broker = await Broker.open(measure.settings(directory))
    end = (await broker.bounds(TAIL)).end_offset
    assert len(await broker.read(TAIL, offset=end - 1)) == 1
    open_s, device_bytes = time.monotonic() - started_at_s, measure.device_bytes() - before
    found = broker.recovery
    answer = {name: getattr(found, name) for name in found.__struct_fields__ if name != "damages"}
    answer |= {"damages": len(found.damages), "open_s": open_s}
    answer |= {"started_at_s": started_at_s, "device_bytes": device_bytes}
    print(json.dumps(answer), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # Else it would first seal what it found.


def child(task: str, directory: Path, *counts: str) -> int:
    logs.configure("error", "json")
    work: Any = {"publish": publish_and_die, "open": open_and_die}[task]
    measure.on_loop(work(directory, *map(int, counts)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["child"]:
        return child(words[1], Path(words[2]), *words[3:])
    return measure.main("recovery", __doc__, run, words)


if __name__ == "__main__":
    sys.exit(main())
