"""The blocking facade: the same verbs as with asyncio, usable from threads, safe under Ctrl-C."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.member import BrokerMember
from sparrow.broker.producer import Producer
from sparrow.broker.subscription import BrokerSubscription, DeadLetterBox
from sparrow.client.blocking import BlockingBroker, BlockingProducer
from sparrow.client.subscription import BlockingDeadLetters, BlockingMember, BlockingSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
PAIRS = [
    (Broker, BlockingBroker),
    (BrokerSubscription, BlockingSubscription),
    (BrokerMember, BlockingMember),
    (DeadLetterBox, BlockingDeadLetters),
    (Producer, BlockingProducer),
]
FOR_PROTOCOLS = [
    ("Broker", "publish_encoded"),
    ("Broker", "flow_listeners"),
    ("Broker", "next_sequence"),
    ("Broker", "wait_for"),
    ("Broker", "stage_encoded"),
    ("Broker", "pipeline_desk"),
    ("BrokerSubscription", "allow"),
    ("BrokerMember", "is_member"),
    ("BrokerSubscription", "pull_portions"),
    ("BrokerSubscription", "ack_names"),
    ("BrokerSubscription", "nack_names"),
    ("BrokerSubscription", "extend_names"),
    ("BrokerSubscription", "return_names"),
    ("BrokerSubscription", "abandon"),
    ("BrokerSubscription", "subscription"),
    ("BrokerMember", "pull_portions"),
    ("BrokerMember", "abandon"),
    ("BrokerMember", "beat"),
    ("BrokerMember", "owner"),
]
ONE_SIDED = {
    **dict.fromkeys(FOR_PROTOCOLS, "for protocols, which are async"),
    ("Broker", "open"): "sparrow.open does it",
    ("BrokerSubscription", "name"): "an attribute there, a property here",
    ("BrokerMember", "consumer"): "an attribute there, a property here",
    ("BrokerMember", "generation"): "an attribute there, a property here",
    ("Producer", "name"): "an attribute there, a property here",
}
"""Names that one side has and the other needs not, and why."""
OTHERWISE = {
    ("BrokerSubscription", "run"): "a thread handles one message at a time, and must be able to stop",
}
"""Verbs whose options differ, and why."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BlockingBroker]:
    with sparrow.open(tmp_path / "data", settings=SMALL) as broker:
        yield broker


# The same verbs.


def verbs(kind: type) -> dict[str, Any]:
    held = [kind, *(base for base in kind.__bases__ if base.__name__.endswith(("Verbs", "Consumer")))]
    return {name: each for part in held for name, each in vars(part).items() if not name.startswith("_")}


def cases() -> Iterator[Any]:
    for kind, blocking in PAIRS:
        for name in sorted(verbs(kind).keys() | verbs(blocking).keys()):
            if (kind.__name__, name) not in ONE_SIDED:
                yield pytest.param(kind, blocking, name, id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "blocking", "name"), list(cases()))
def test_verb_is_the_same_in_both_worlds(kind: type, blocking: type, name: str) -> None:
    ours = inspect.getattr_static(kind, name, None)
    theirs = inspect.getattr_static(blocking, name, None)
    assert ours is not None, f"asyncio has no {name}"
    assert theirs is not None, f"blocking code has no {name}"
    assert isinstance(ours, property) == isinstance(theirs, property)
    if isinstance(ours, property):
        return
    assert not inspect.iscoroutinefunction(theirs), "a blocking verb must not have to be awaited"
    if (kind.__name__, name) not in OTHERWISE:
        assert parameters(ours) == parameters(theirs)


def parameters(verb: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults, without self."""
    found = inspect.signature(verb).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize(("kind", "name"), list(OTHERWISE))
def test_list_of_differences_holds_nothing_that_is_alike(kind: str, name: str) -> None:
    ours, blocking = next(pair for pair in PAIRS if pair[0].__name__ == kind)
    assert parameters(verbs(ours)[name]) != parameters(verbs(blocking)[name])


def test_message_settles_without_await(broker: BlockingBroker) -> None:
    broker.create_topic("t")
    subscription = broker.subscribe("s", "t")
    broker.publish_batch("t", [b"a", b"b", b"c"])
    a, b, c = subscription.pull()
    assert a.ack() is None
    assert b.nack(delay_s=60) is None
    assert c.extend(30) is None
    subscription.ack([c], wait=True)
    subscription.flush()
    assert subscription.lag() == 1


def test_walk_through_every_verb(broker: BlockingBroker) -> None:
    broker.create_topic("t", partitions=1)
    assert broker.update_topic("t", partitions=2).partitions == broker.topic("t").partitions == 2
    subscription = broker.subscribe("s", "t", dead_letter_topic="d")
    producer = broker.producer("p")
    assert producer.publish("t", b"x", key="k").offset == 0
    assert (producer.name, producer.epoch, producer.next_sequence("t")) == ("p", 0, 1)
    [message] = subscription.pull(timeout_s=5)
    message.nack(retry=False, reason="no")
    subscription.flush()
    letters = broker.dead_letters("s")
    assert [letter.last_error for letter in letters.list()] == ["no"]
    assert letters.get(message.id).message.data == b"x"
    assert letters.statistics().messages == letters.replay(dry_run=True).total == 1
    job = letters.replay(rate_per_s=1000)
    assert letters.wait(job.replay_id).status == "completed"
    assert [j.replay_id for j in letters.replays()] == [job.replay_id]
    assert letters.purge() == 0
    subscription.snapshot("now")
    assert [s.name for s in broker.snapshots()] == ["now"]
    subscription.seek("latest")
    subscription.seek("now")
    broker.delete_snapshot("now")
    assert broker.trace(message.id)[0].state == "not_reached"
    subscription.commit(message.topic, message.partition, 1)
    assert (subscription.lag(), subscription.in_flight) == (0, 0)
    subscription.pause()
    subscription.resume()
    subscription.update(ack_deadline_s=33)
    assert (subscription.policy.ack_deadline_s, subscription.pattern) == (33, "t")
    assert broker.bounds("t", message.partition).end_offset == 1
    assert len(broker.read("t", partition=message.partition)) == 1
    assert len(broker.read_batches("t", partition=message.partition)) == 1
    assert broker.offset_at("t", 0.0, partition=message.partition) == 0
    assert broker.seal() == 2
    assert broker.apply_retention() == 0
    assert broker.health().status
    assert broker.state() is not None
    assert broker.recovery.messages == 0
    assert repr(broker).startswith("<Broker")
    assert repr(subscription) == "<Subscription 's' to 't'>"
    subscription.close()
    subscription.unsubscribe()
    assert broker.subscriptions() == []
    broker.delete_topic("t")
    assert [topic.name for topic in broker.topics()] == ["d"]


def test_iteration_and_callbacks(broker: BlockingBroker) -> None:
    broker.create_topic("t")
    subscription = broker.subscribe("s", "t")
    broker.publish_batch("t", [b"a", b"b", b"c", b"d"])
    for message in subscription:
        message.ack()
        if message.data == b"b":
            break
    subscription.close()
    seen: list[tuple[bytes | None, int]] = []

    def handle(message: sparrow.Delivered) -> None:
        seen.append((message.data, message.attempt))
        if len(seen) == 1:
            raise ValueError("once")

    assert subscription.run(handle, max_messages=3) == 3
    assert sorted(seen) == [(b"c", 1), (b"c", 2), (b"d", 1)]
    assert subscription.lag() == 0


def test_errors_are_the_same_and_come_to_the_caller(broker: BlockingBroker) -> None:
    with pytest.raises(errors.SubscriptionNotFound):
        broker.subscription("nobody")
    with pytest.raises(errors.InvalidFilter):
        broker.subscribe("s", "t", filter="(")


def loops() -> set[threading.Thread]:
    """The threads of event loops; other tests of this process may have left theirs running."""
    return {thread for thread in threading.enumerate() if thread.name == "sparrow-loop"}


def test_opening_a_directory_twice_is_refused_and_leaves_no_thread(
    broker: BlockingBroker, tmp_path: Path
) -> None:
    before = loops()
    with pytest.raises(errors.DataDirectoryLocked):
        sparrow.open(tmp_path / "data")
    assert loops() == before


# The end.


def test_closed_broker_refuses_and_may_be_closed_again(tmp_path: Path) -> None:
    broker = sparrow.open(tmp_path, settings=SMALL)
    subscription = broker.subscribe("s", "t")
    broker.close()
    broker.close()
    for verb in (lambda: broker.publish("t", b"x"), subscription.pull, lambda: subscription.seek("latest")):
        with pytest.raises(errors.BrokerClosed):
            verb()


def test_closing_leaves_no_thread_of_the_loop(tmp_path: Path) -> None:
    before = loops()
    sparrow.open(tmp_path, settings=SMALL).close()
    assert loops() == before


def test_thread_that_waits_in_a_pull_is_told_when_the_broker_closes(tmp_path: Path) -> None:
    broker = sparrow.open(tmp_path, settings=SMALL)
    subscription = broker.subscribe("s", "t")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(subscription.pull, 1, 60.0)
        time.sleep(0.05)
        broker.close()
        with pytest.raises(errors.BrokerClosed):
            waiting.result(timeout=5)


# Threads.


def test_threads_share_a_broker(broker: BlockingBroker) -> None:
    broker.create_topic("t", partitions=2)
    subscription = broker.subscribe("s", "t", guarantee="exactly_once")
    got: list[bytes | None] = []

    def publish(number: int) -> None:
        for n in range(25):
            broker.publish("t", b"%d-%d" % (number, n), key=str(number))

    def consume(_: int) -> None:
        member = broker.subscription("s")
        while messages := member.pull(10, timeout_s=1.0):
            member.ack(messages)
            got.extend(m.data for m in messages)

    with ThreadPoolExecutor(6) as threads:
        consuming = [threads.submit(consume, n) for n in range(3)]
        for publishing in [threads.submit(publish, n) for n in range(3)]:
            publishing.result(timeout=30)
        for one in consuming:
            one.result(timeout=30)
    assert sorted(got) == sorted(b"%d-%d" % (number, n) for number in range(3) for n in range(25))
    assert subscription.lag() == 0


def test_waiting_thread_is_woken_by_a_publish_of_another(broker: BlockingBroker) -> None:
    subscription = broker.subscribe("s", "t")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(subscription.pull, 1, 60.0)
        time.sleep(0.02)
        broker.publish("t", b"x")
        assert [m.data for m in waiting.result(timeout=5)] == [b"x"]


# Ctrl-C.


def test_ctrl_c_ends_a_waiting_pull_closes_the_broker_and_loses_nothing(tmp_path: Path) -> None:
    program = """
        import sys, sparrow
        with sparrow.open(sys.argv[1]) as broker:
            subscription = broker.subscribe("s", "t")
            broker.publish("t", b"held")
            [held] = subscription.pull(timeout_s=5)
            broker.publish("t", b"acked")
            [done] = subscription.pull(timeout_s=5)
            done.ack()
            try:
                print("waiting", flush=True)
                subscription.pull(timeout_s=600)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                broker.publish("t", b"the broker still works")
                raise
        """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert out == "interrupted\n"
    assert err.strip().endswith("KeyboardInterrupt")
    with sparrow.open(tmp_path, settings=SMALL) as broker:
        assert broker.recovery.torn_bytes == 0
        found = broker.subscription("s").pull(10, timeout_s=5)
        assert [(m.data, m.attempt) for m in found] == [(b"held", 1), (b"the broker still works", 1)]


def test_interrupted_pull_gives_its_message_to_the_next(broker: BlockingBroker) -> None:
    """A Ctrl-C in the middle of a wait cancels it in the broker as well: nothing is leased to nobody."""
    subscription = broker.subscribe("s", "t")
    main = threading.get_ident()

    def interrupt() -> None:
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        subscription.pull(timeout_s=30)
    sender.join()
    broker.publish("t", b"x")
    assert [m.attempt for m in subscription.pull(timeout_s=5)] == [1]
