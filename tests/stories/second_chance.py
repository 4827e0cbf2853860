"""The story of test_second_chance, told by processes that are killed after a step; the next one goes on.

What was done before they ask the broker; they keep no notes of their own. Each process is forked from this
one, which never opens a broker, so that forty lives cost one import.

    python tests/stories/second_chance.py <directory> <step>...    prints what was told, as JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import pyarrow.compute  # noqa: F401 - imported before the forks, so that no child pays for it

import sparrow
import sparrow.broker.broker
import sparrow.client.blocking
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


def story(data: Path, kill_after: str) -> None:
    def step(name: str, told: str) -> None:
        print(told, flush=True)
        if name == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with sparrow.open(data, settings=SMALL) as broker:
        billing = broker.subscribe(
            "billing",
            "orders",
            dead_letter_topic="orders-dead",
            retry={"max_attempts": 5, "immediate_retries": 5},
        )
        receipt = broker.publish("orders", b"o-1", idempotency_key="o-1")
        step("publish", f"published {receipt.message_id}")

        if not billing.dead_letters.replays():
            while found := billing.pull(timeout_s=0.1):
                [order] = found
                print(f"attempt {order.attempt} of {order.id}", flush=True)
                billing.nack([order], reason="the bank is down", wait=True)
                step(f"fail {order.attempt}", f"failed {order.attempt}")
            billing.flush()
            [letter] = billing.dead_letters.list()
            step("inspect", f"letter {letter.attempts} of {letter.message_id}")
            billing.dead_letters.replay(ids=[letter.message_id])
            step("replay", "replayed")

        for order in billing.pull(timeout_s=0.5):
            step("receive", f"attempt {order.attempt} of {order.id}")
            billing.ack([order], wait=True)
            step("ack", "acked")
        for job in billing.dead_letters.replays():
            billing.dead_letters.wait(job.replay_id)
        print(f"done lag {billing.lag()} letters {len(billing.dead_letters.list())}", flush=True)


def live(data: Path, kill_after: str = "") -> tuple[int, list[str]]:
    """One life of the story: how it ended and what it told."""
    told = data.with_suffix(".told")
    child = os.fork()
    if child == 0:
        os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        try:
            story(data, kill_after)
        except BaseException:  # noqa: BLE001 - a process's root: it reports and ends
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), told.read_text().splitlines()


if __name__ == "__main__":
    base = Path(sys.argv[1])
    lives = {}
    for number, name in enumerate(sys.argv[2:]):
        data = base / str(number)
        lives[name] = [live(data, name), live(data)]
    print(json.dumps(lives))
