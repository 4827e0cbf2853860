"""A message fails, is looked at, gets a second chance, and succeeds. Also when the power goes in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sparrow

CHILD = Path(__file__).with_name("second_chance.py")
STEPS = ["publish", "fail 1", "fail 2", "fail 3", "fail 4", "fail 5", "inspect", "replay", "receive", "ack"]


def test_five_failures_dead_letter_inspection_replay_and_ack_under_one_id(tmp_path: Path) -> None:
    with sparrow.open(tmp_path) as broker:
        # A shop bills its orders, and gives up on an order after five tries.
        broker.create_topic("orders")
        billing = broker.subscribe(
            "billing",
            "orders",
            dead_letter_topic="orders-dead",
            retry={"max_attempts": 5, "immediate_retries": 5},
        )
        receipt = broker.publish("orders", b'{"amount": 12}', key="o-1")

        # The bank is down.
        for attempt in range(1, 6):
            [order] = billing.pull(timeout_s=5)
            assert (order.id, order.attempt) == (receipt.message_id, attempt)
            order.nack(reason="the bank is down")
        billing.flush()
        assert billing.pull() == []

        # In the morning somebody looks at what was left.
        [letter] = billing.dead_letters.list()
        assert letter.message_id == receipt.message_id
        assert (letter.attempts, letter.reason) == (5, "attempts_exhausted")
        assert (letter.last_error, letter.message.data) == ("the bank is down", b'{"amount": 12}')

        # The bank is up again.
        assert billing.dead_letters.replay(dry_run=True).total == 1
        job = billing.dead_letters.replay(ids=[receipt.message_id])
        [order] = billing.pull(timeout_s=5)
        assert (order.id, order.attempt, order.key) == (receipt.message_id, 1, "o-1")
        order.ack()
        billing.flush()

        # Nothing is left to do.
        assert billing.dead_letters.wait(job.replay_id).status == "completed"
        assert (billing.lag(), billing.dead_letters.list()) == (0, [])
        [trace] = broker.trace(receipt.message_id)
        assert trace.state == "acked"


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each step: a process that was killed after it, and the one that went on."""
    told = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path_factory.mktemp("lives")), *STEPS],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout
    found: dict[str, Any] = json.loads(told)
    return found


@pytest.mark.parametrize("after", STEPS)
def test_kill_between_any_two_steps_changes_nothing_in_the_story(lives: dict[str, Any], after: str) -> None:
    (killed, before), (finished, rest) = lives[after]
    assert (killed, finished) == (-signal.SIGKILL, 0)
    told = before + rest

    # The message has one id, whatever happens, and the story ends as it should.
    ids = {line.split()[-1] for line in told if line.startswith(("published", "attempt", "letter"))}
    assert len(ids) == 1
    assert rest[-1] == "done lag 0 letters 0"

    # A crash of the broker is nobody's failure: five attempts are counted, and one after the replay.
    failed = [line for line in told if line.startswith("failed")]
    assert failed == [f"failed {attempt}" for attempt in range(1, 6)]
    received = [line.split()[1] for line in told[told.index("replayed") :] if line.startswith("attempt")]
    assert received == (["1", "1"] if after == "receive" else ["1"])
    assert told.count("acked") == 1, "what was acked came again"
