"""Flow control as publishers meet it: limits of topics, publishers and tokens, on a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.errors import (
    BrokerClosed,
    InvalidArgument,
    PublishRejected,
    RateLimited,
    TopicNotFound,
)
from sparrow.model.flow import FlowPolicy, Overflow
from sparrow.model.settings import Settings
from sparrow.model.topic import TopicPolicy
from sparrow.store import catalog_tables

SPEED = 20.0
FULL = {"backlog_high": 5, "backlog_max": 10, "block_timeout_s": 0.2}
"""Ten messages that nobody acks, and nothing more passes."""


class FastClock(Clock):
    """A clock that runs ahead, so that what must hold for seconds holds soon."""

    def now_us(self) -> int:
        return int(time.time() * SPEED * 1e6)

    def monotonic_s(self) -> float:
        return time.monotonic() * SPEED


async def open_broker(path: Path, clock: Clock | None = None) -> Broker:
    return await Broker.open(Settings(data=str(path / "data")), clock=clock)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with await open_broker(tmp_path) as broker:
        yield broker


@pytest.fixture
async def fast(tmp_path: Path) -> AsyncIterator[Broker]:
    async with await open_broker(tmp_path, FastClock()) as broker:
        yield broker


async def limited(broker: Broker, overflow: str, **flow: Any) -> BrokerSubscription:
    """A topic with little room and a subscription that does nothing yet."""
    await broker.create_topic("orders", flow={**FULL, "overflow": overflow, **flow})
    return await broker.subscribe("slow", "orders")


async def fill(broker: Broker, count: int = 10) -> None:
    await broker.publish_batch("orders", [b"x"] * count)


async def until(condition: Any, timeout_s: float = 10.0) -> Any:
    """The first answer that counts as true."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        found = condition()
        found = await found if asyncio.iscoroutine(found) else found
        if found:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


async def mode(broker: Broker, wanted: str) -> bool:
    return (await broker.flow("orders")).mode == wanted


# Reject and block.


async def test_a_full_topic_rejects_and_says_which_and_when_to_come_again(broker: Broker) -> None:
    await limited(broker, "reject")
    await fill(broker)
    with pytest.raises(PublishRejected) as caught:
        await broker.publish("orders", b"too much")
    details = caught.value.details
    assert (details["topic"], details["cause"], details["level"]) == ("orders", "backlog", "full")
    assert details["retry_after_s"] > 0
    assert "orders" in caught.value.message
    assert (await broker.bounds("orders")).end_offset == 10


async def test_another_topic_does_not_feel_it(broker: Broker) -> None:
    await limited(broker, "reject")
    await broker.create_topic("payments", flow={**FULL, "overflow": "reject"})
    await fill(broker)
    with pytest.raises(PublishRejected):
        await fill(broker)
    assert len(await broker.publish_batch("payments", [b"x"] * 10)) == 10
    assert (await broker.publish("free", b"x")).offset == 0


async def test_a_batch_is_rejected_whole(broker: Broker) -> None:
    await limited(broker, "reject")
    await fill(broker)
    with pytest.raises(PublishRejected):
        await broker.publish_batch("orders", [b"a", b"b"])
    with pytest.raises(PublishRejected):
        await broker.publish_table("orders", pa.table({"data": [b"a"]}))
    report = await broker.flow("orders")
    assert (report.passed, report.rejected, report.level) == (10, 3, "full")


async def test_a_blocked_publish_is_rejected_when_its_time_is_up(broker: Broker) -> None:
    await limited(broker, "block")
    await fill(broker)
    started = time.monotonic()
    with pytest.raises(PublishRejected):
        await broker.publish("orders", b"too much")
    assert 0.15 <= time.monotonic() - started < 2.0


async def test_a_blocked_publish_passes_when_consumers_made_room(broker: Broker) -> None:
    slow = await limited(broker, "block", block_timeout_s=30.0)
    await fill(broker)
    waiting = asyncio.create_task(broker.publish("orders", b"patient"))
    await until(lambda: _waits(broker))
    assert not waiting.done()
    await slow.ack(await slow.pull(10), wait=True)
    receipt = await asyncio.wait_for(waiting, 5.0)
    assert (receipt.offset, receipt.is_dropped) == (10, False)


async def _waits(broker: Broker) -> bool:
    return (await broker.flow("orders")).waiting > 0


async def test_those_who_wait_pass_in_the_order_in_which_they_came(broker: Broker) -> None:
    slow = await limited(broker, "block", block_timeout_s=30.0)
    await fill(broker)
    waiting = [asyncio.create_task(broker.publish("orders", b"%d" % n)) for n in range(5)]
    await until(lambda: _waits(broker))
    await slow.ack(await slow.pull(10), wait=True)
    receipts = await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
    assert [receipt.offset for receipt in receipts] == [10, 11, 12, 13, 14]


async def test_a_publisher_that_gives_up_waiting_leaves_the_line(broker: Broker) -> None:
    slow = await limited(broker, "block", block_timeout_s=30.0)
    await fill(broker)
    waiting = [asyncio.create_task(broker.publish("orders", b"%d" % n)) for n in range(3)]
    await until(lambda: _waits(broker))
    waiting[0].cancel()
    await slow.ack(await slow.pull(10), wait=True)
    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10.0)
    assert [m.data for m in await broker.read("orders", offset=10)] == [b"1", b"2"]
    assert (await broker.flow("orders")).waiting == 0


async def test_without_a_subscription_nothing_is_ever_full(broker: Broker) -> None:
    await broker.create_topic("orders", flow={**FULL, "overflow": "reject"})
    await fill(broker, 9)
    await asyncio.sleep(0.5)
    await fill(broker, 9)


async def test_a_broker_that_closes_lets_nobody_wait(tmp_path: Path) -> None:
    broker = await open_broker(tmp_path)
    await limited(broker, "block", block_timeout_s=30.0)
    await fill(broker)
    waiting = asyncio.create_task(broker.publish("orders", b"x"))
    await until(lambda: _waits(broker))
    await broker.close()
    with pytest.raises(BrokerClosed):
        await asyncio.wait_for(waiting, 2.0)


async def test_a_topic_that_is_deleted_lets_nobody_wait(broker: Broker) -> None:
    await limited(broker, "block", block_timeout_s=30.0)
    await fill(broker)
    waiting = asyncio.create_task(broker.publish("orders", b"x"))
    await until(lambda: _waits(broker))
    await broker.delete_topic("orders", force=True)
    with pytest.raises(TopicNotFound):
        await asyncio.wait_for(waiting, 2.0)


async def test_publishers_are_slowed_to_the_pace_of_consumers_and_released(fast: Broker) -> None:
    """The whole way: warning, throttled, released; seconds of the broker are fractions of ours."""
    slow = await limited(fast, "block", backlog_high=50, backlog_max=500, block_timeout_s=600.0)
    await fill(fast, 100)
    await until(lambda: mode(fast, "throttled"))
    assert (await fast.flow("orders")).slowest == "slow"
    waiting = asyncio.create_task(fast.publish_batch("orders", [b"x"] * 100))
    again = asyncio.create_task(fast.publish_batch("orders", [b"x"] * 100))
    while await slow.lag():
        await slow.ack(await slow.pull(10), wait=True)
        await asyncio.sleep(0.01)
    await asyncio.wait_for(asyncio.gather(waiting, again), 10.0)
    while await slow.lag():
        await slow.ack(await slow.pull(100), wait=True)
    await until(lambda: mode(fast, "normal"), 20.0)
    report = await fast.flow("orders")
    assert (report.mode_changes, report.intensity, report.passed) == (4, 0.0, 300)


async def test_age_alone_throttles_too(fast: Broker) -> None:
    slow = await limited(
        fast, "reject", backlog_high=None, backlog_max=None, lag_high_s=5.0, block_timeout_s=1.0
    )
    await fill(fast, 100)
    await until(lambda: mode(fast, "throttled"))
    assert (await fast.flow("orders")).cause == "lag"
    assert await slow.lag() == 100
    refused = [await refusal(fast) for _ in range(20)]
    assert {error.details["cause"] for error in refused if error is not None} == {"lag"}


async def refusal(broker: Broker) -> PublishRejected | None:
    try:
        await fill(broker, 100)
    except PublishRejected as error:
        return error
    return None


# Classes.


async def test_bulk_is_shed_before_normal_and_critical_last(fast: Broker) -> None:
    await limited(fast, "sample", backlog_high=100, backlog_low=10, backlog_max=10_000)
    await fill(fast, 60)
    await fill(fast, 45)
    await until(lambda: mode(fast, "throttled"))
    report = await until(lambda: _intense(fast))
    kept = {}
    for kind in ("bulk", "normal", "critical"):
        receipts = await fast.publish_batch("orders", [b"x"] * 1000, priority_class=kind)
        kept[kind] = 1000 - receipts.dropped
    assert kept["bulk"] < kept["normal"] <= kept["critical"] == 1000, (kept, report)


async def _intense(broker: Broker) -> Any:
    report = await broker.flow("orders")
    return report if report.intensity > 0.4 else None


async def test_critical_publishers_pass_until_the_hard_limit_and_not_beyond(fast: Broker) -> None:
    await limited(fast, "reject", backlog_high=20, backlog_max=200)
    await fill(fast, 40)
    await until(lambda: mode(fast, "throttled"))
    for _ in range(4):
        await fast.publish_batch("orders", [b"x"] * 40, priority_class="critical")
    with pytest.raises(PublishRejected) as caught:
        await fast.publish("orders", b"x", priority_class="critical")
    assert caught.value.details["level"] == "full"


# Dropping.


async def test_drop_newest_answers_honestly(broker: Broker) -> None:
    await limited(broker, "drop_newest")
    await fill(broker)
    receipt = await broker.publish("orders", b"dropped")
    assert (receipt.is_dropped, receipt.offset, receipt.message_id) == (True, -1, "")
    receipts = await broker.publish_batch("orders", [b"a", b"b"])
    assert (len(receipts), receipts.dropped) == (2, 2)
    assert [receipt.is_dropped for receipt in receipts] == [True, True]
    assert (await broker.bounds("orders")).end_offset == 10
    assert (await broker.flow("orders")).dropped == 3


async def test_a_thinned_batch_says_message_by_message_what_became_of_it(fast: Broker) -> None:
    await fast.create_topic(
        "orders",
        partitions=3,
        flow={"overflow": "sample", "backlog_high": 50, "backlog_max": 100_000, "sample_share_min": 0.3},
    )
    await fast.subscribe("slow", "orders")
    await fill(fast, 100)
    await until(lambda: _intense(fast))
    await asyncio.sleep(0.3)
    keys = [f"k{n}" for n in range(500)]
    receipts = await fast.publish_batch("orders", [key.encode() for key in keys], keys=keys)
    assert 0 < receipts.dropped < 500
    assert sum(receipt.is_dropped for receipt in receipts) == receipts.dropped
    for key, receipt in zip(keys, receipts, strict=True):
        if not receipt.is_dropped:
            [message] = await fast.read(
                "orders", partition=receipt.partition, offset=receipt.offset, max_messages=1
            )
            assert (message.key, message.id) == (key, receipt.message_id)
    table = await fast.publish_table("orders", pa.table({"data": [b"t"] * 300_000}))
    ends = [(await fast.bounds("orders", partition)).end_offset for partition in range(3)]
    assert sum(ends) == 100 + 500 - receipts.dropped + 300_000 - table.dropped
    assert sum(receipt.is_dropped for receipt in table) == table.dropped > 0


async def test_the_lowest_priorities_go_first(fast: Broker) -> None:
    await limited(fast, "drop_lowest_priority", backlog_high=50, backlog_max=100_000)
    priorities = [1, 5, 9, None] * 25
    await fast.publish_batch("orders", [b"x"] * 100, priorities=priorities)
    await until(lambda: _intense(fast))
    receipts = await fast.publish_batch("orders", [b"x"] * 100, priorities=priorities, priority_class="bulk")
    dropped = [p or 0 for p, receipt in zip(priorities, receipts, strict=True) if receipt.is_dropped]
    kept = [p or 0 for p, receipt in zip(priorities, receipts, strict=True) if not receipt.is_dropped]
    assert dropped
    assert not kept or max(dropped) <= min(kept)
    one = await fast.publish("orders", b"urgent", priority=100, priority_class="critical")
    assert not one.is_dropped


async def test_drop_oldest_keeps_the_newest_and_passes_everything(broker: Broker) -> None:
    slow = await limited(broker, "drop_oldest")
    keeps_up = await broker.subscribe("keeps-up", "orders")
    for number in range(30):
        receipt = await broker.publish("orders", b"%d" % number)
        assert receipt.offset == number
        await keeps_up.ack(await keeps_up.pull(10), wait=True)
    await until(lambda: _has_given_up(broker))
    for number in range(30, 60):
        await broker.publish("orders", b"%d" % number)
        await keeps_up.ack(await keeps_up.pull(10), wait=True)
    await until(lambda: _lag_at_most(slow, 10))
    left = [message.data for message in await slow.pull(100)]
    assert left == [b"%d" % number for number in range(60 - len(left), 60)]
    assert len(left) >= 5

    async def is_counted() -> bool:
        return (await broker.flow("orders")).given_up == 60 - len(left)

    await until(is_counted)
    assert await keeps_up.lag() == 0


async def _has_given_up(broker: Broker) -> bool:
    return (await broker.flow("orders")).given_up > 0


async def _lag_at_most(subscription: BrokerSubscription, count: int) -> bool:
    return await subscription.lag() <= count


async def test_what_was_given_up_is_gone_after_a_restart_too(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        slow = await limited(broker, "drop_oldest")
        for number in range(30):
            await broker.publish("orders", b"%d" % number)
        await until(lambda: _lag_at_most(slow, 10))
    async with await open_broker(tmp_path) as broker:
        slow = await broker.subscription("slow")
        left = [message.data for message in await slow.pull(100)]
        assert left == [b"%d" % number for number in range(30 - len(left), 30)]
        assert 5 <= len(left) <= 10


async def test_an_ack_of_a_message_that_was_given_up_meanwhile_is_no_error(broker: Broker) -> None:
    slow = await limited(broker, "drop_oldest")
    await fill(broker)
    held = await slow.pull(3)
    for number in range(20):
        await broker.publish("orders", b"%d" % number)
    await until(lambda: _lag_at_most(slow, 10))
    await slow.ack(held, wait=True)
    assert await slow.lag() <= 10


async def test_drop_oldest_over_partitions_takes_from_all(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3, flow={**FULL, "overflow": "drop_oldest"})
    slow = await broker.subscribe("slow", "orders")
    for _ in range(20):
        await broker.publish_batch("orders", [b"x"] * 9, keys=[f"k{n}" for n in range(9)])
    await until(lambda: _lag_at_most(slow, 10))
    assert await slow.lag() >= 3


async def test_drop_oldest_by_age(fast: Broker) -> None:
    slow = await limited(fast, "drop_oldest", backlog_high=None, backlog_max=None, lag_high_s=20.0)
    await fill(fast, 100)
    await until(lambda: mode(fast, "throttled"))

    async def publish_on() -> bool:
        await fast.publish("orders", b"fresh")
        return (await fast.flow("orders")).given_up >= 100

    await until(publish_on)
    assert {message.data for message in await slow.pull(1000)} == {b"fresh"}


# What must not have holes.


@pytest.mark.parametrize("overflow", ["drop_newest", "sample", "drop_lowest_priority"])
async def test_a_sequence_is_rejected_where_others_are_dropped(broker: Broker, overflow: str) -> None:
    slow = await limited(broker, overflow)
    producer = await broker.producer("p")
    stored = await producer.publish_batch("orders", [b"x"] * 10)
    with pytest.raises(PublishRejected):
        await producer.publish("orders", b"next")
    with pytest.raises(PublishRejected):
        await broker.publish("orders", b"keyed", idempotency_key="k")
    assert await producer.next_sequence("orders") == 10
    again = await producer.publish_batch("orders", [b"x"] * 10, sequence=0)
    assert again[0].message_id == stored[0].message_id, "a repeat stores nothing, so nothing slows it"
    await slow.ack(await slow.pull(10), wait=True)
    await until(lambda: _level(broker, "normal"))
    assert (await producer.publish("orders", b"next")).offset == 10
    assert (await broker.publish("orders", b"keyed", idempotency_key="k")).offset == 11
    again = await broker.publish("orders", b"keyed", idempotency_key="k")
    assert (again.offset, again.is_duplicate) == (11, True)


async def _level(broker: Broker, wanted: str) -> bool:
    return (await broker.flow("orders")).level == wanted


async def test_a_producer_that_waits_keeps_its_sequence_dense(broker: Broker) -> None:
    slow = await limited(broker, "block", block_timeout_s=30.0)
    producer = await broker.producer("p")
    await producer.publish_batch("orders", [b"x"] * 10)
    waiting = [asyncio.create_task(producer.publish("orders", b"%d" % n)) for n in range(4)]
    waiting += [asyncio.create_task(producer.publish("orders", b"s", sequence=14))]
    await until(lambda: _waits(broker))
    await slow.ack(await slow.pull(10), wait=True)
    receipts = await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
    assert [receipt.offset for receipt in receipts] == [10, 11, 12, 13, 14]
    messages = await broker.read("orders", offset=10)
    assert [message.sequence for message in messages] == [10, 11, 12, 13, 14]
    assert [message.data for message in messages] == [b"0", b"1", b"2", b"3", b"s"]


async def test_a_producer_that_holds_gaps_waits_as_well(broker: Broker) -> None:
    slow = await limited(broker, "block", block_timeout_s=30.0)
    producer = await broker.producer("p", hold_gaps_s=30.0)
    for number in range(10):
        await producer.publish("orders", b"x", sequence=number)
    order = (11, 10, 12)
    waiting = [asyncio.create_task(producer.publish("orders", b"%d" % n, sequence=n)) for n in order]
    await until(lambda: _waits(broker))
    await slow.ack(await slow.pull(10), wait=True)
    receipts = await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
    assert [receipt.offset for receipt in receipts] == [11, 10, 12]


# Quotas.


async def test_the_quota_of_a_topic_delays_and_loses_nothing(broker: Broker) -> None:
    await broker.create_topic("orders", flow={"messages_per_s": 100, "burst_s": 0.1})
    started = time.monotonic()
    for _ in range(40):
        await broker.publish("orders", b"x")
    taken_s = time.monotonic() - started
    assert 0.25 <= taken_s < 1.5, "40 messages, 10 at once, 100 a second"


async def test_the_excess_of_a_quota_is_rejected_under_reject(broker: Broker) -> None:
    await broker.create_topic("orders", flow={"overflow": "reject", "bytes_per_s": 1000})
    await broker.publish("orders", b"x" * 2000)
    with pytest.raises(RateLimited) as caught:
        await broker.publish("orders", b"x")
    assert (caught.value.details["topic"], caught.value.details["cause"]) == ("orders", "rate")
    assert 0.5 < caught.value.details["retry_after_s"] <= 1.1


async def test_each_publisher_of_a_topic_has_a_quota_of_its_own(broker: Broker) -> None:
    await broker.create_topic("orders", flow={"overflow": "reject", "publisher_messages_per_s": 5})
    await broker.publish_batch("orders", [b"x"] * 10, publisher="a")
    with pytest.raises(RateLimited) as caught:
        await broker.publish("orders", b"x", publisher="a")
    assert caught.value.details["topic"] == "orders"
    await broker.publish_batch("orders", [b"x"] * 10, publisher="b")
    await broker.publish("orders", b"x")
    await (await broker.producer("p")).publish_batch("orders", [b"x"] * 10)


@pytest.mark.parametrize("noun", ["publisher", "token"])
async def test_a_publisher_and_a_token_have_a_quota_over_all_topics(tmp_path: Path, noun: str) -> None:
    async with await open_broker(tmp_path) as broker:
        await broker.create_topic("a", flow={"overflow": "reject", "backlog_high": 1_000_000})
        await broker.create_topic("b")
        await broker.update_topic("b", flow={"block_timeout_s": 0.1})
        who: dict[str, Any] = {noun: "loader"}
        setter = getattr(broker, f"set_{noun}_limits")
        await setter("loader", messages_per_s=5)
        await broker.publish_batch("b", [b"x"] * 10, **who)
        for topic in ("a", "b"):
            with pytest.raises(RateLimited, match="loader"):
                await broker.publish(topic, b"x", **who)
            await broker.publish(topic, b"x")
    async with await open_broker(tmp_path) as broker:
        await broker.publish_batch("b", [b"x"] * 10, **who)
        with pytest.raises(RateLimited):
            await broker.publish("a", b"x", **who)
        setter = getattr(broker, f"set_{noun}_limits")
        await setter("loader", messages_per_s=None)
        await broker.publish("a", b"x", **who)


async def test_a_quota_that_is_raised_frees_those_who_wait(broker: Broker) -> None:
    await broker.set_publisher_limits("loader", messages_per_s=0.01)
    await broker.publish_batch("orders", [b"x"] * 10, publisher="loader")
    waiting = asyncio.create_task(broker.publish("orders", b"x", publisher="loader"))
    await until(lambda: _waits(broker))
    await broker.set_publisher_limits("loader", messages_per_s=None)
    assert (await asyncio.wait_for(waiting, 1.0)).offset == 10


# Changing and keeping limits.


async def test_limits_change_while_publishers_wait(broker: Broker) -> None:
    await limited(broker, "block", block_timeout_s=30.0)
    await fill(broker)
    waiting = asyncio.create_task(broker.publish("orders", b"x"))
    await until(lambda: _waits(broker))
    await broker.update_topic("orders", flow={"backlog_high": 1000, "backlog_max": 2000})
    await asyncio.wait_for(waiting, 1.0)
    await broker.update_topic("orders", flow=None)
    await fill(broker, 5000)
    assert (await broker.topic("orders")).policy.flow == FlowPolicy()
    assert (await broker.flow("orders")).mode == "normal"


async def test_limits_survive_a_restart_and_act_at_once(tmp_path: Path) -> None:
    async with await open_broker(tmp_path) as broker:
        await limited(broker, "reject")
        await fill(broker, 12)
    async with await open_broker(tmp_path) as broker:
        flow = (await broker.topic("orders")).policy.flow
        assert (flow.overflow, flow.backlog_high, flow.backlog_max) == (Overflow.REJECT, 5, 10)
        await until(lambda: _level(broker, "full"))
        with pytest.raises(PublishRejected):
            await broker.publish("orders", b"x")


async def test_a_part_of_the_flow_policy_leaves_the_rest(broker: Broker) -> None:
    await limited(broker, "reject")
    await broker.update_topic("orders", flow={"backlog_high": 7})
    flow = (await broker.topic("orders")).policy.flow
    assert (flow.overflow, flow.backlog_high, flow.backlog_max) == (Overflow.REJECT, 7, 10)
    await broker.update_topic("orders", retention_s=60.0)
    assert (await broker.topic("orders")).policy.flow == flow


def test_a_policy_that_was_stored_before_there_was_flow_control_is_read() -> None:
    row = (1, "orders", 1, b'{"durability":"durable","retention_s":60.0}', 0)
    assert catalog_tables.topic_from_row(row).policy == TopicPolicy(retention_s=60.0)
    again = catalog_tables.topic_to_row(catalog_tables.topic_from_row(row))
    assert msgspec.json.decode(again[3])["flow"]["overflow"] == "block"


@pytest.mark.parametrize(
    ("flow", "named"),
    [
        ({"backlog_high": -1}, "backlog_high"),
        ({"backlog_high": 10, "backlog_low": 10}, "backlog_low"),
        ({"backlog_high": 10, "backlog_max": 5}, "backlog_max"),
        ({"backlog_low": 5}, "backlog_high"),
        ({"overflow": "sample"}, "backlog_high"),
        ({"overflow": "explode"}, "explode"),
        ({"messages_per_s": 0}, "messages_per_s"),
        ({"block_timeout_s": -1.0}, "block_timeout_s"),
        ({"lag_high_s": "soon"}, "lag_high_s"),
        ({"backlog": 5}, "backlog"),
        (5, "flow"),
    ],
)
async def test_bad_limits_are_refused_and_change_nothing(broker: Broker, flow: Any, named: str) -> None:
    before = await broker.create_topic("orders", flow={"overflow": "reject", "lag_high_s": 60.0})
    with pytest.raises(InvalidArgument, match=named):
        await broker.create_topic("other", flow=flow)
    if flow != {"overflow": "sample"}:  # With the age from before this one is complete.
        with pytest.raises(InvalidArgument, match=named):
            await broker.update_topic("orders", flow=flow)
        assert await broker.topic("orders") == before
    assert [topic.name for topic in await broker.topics()] == ["orders"]


async def test_bad_publishers_are_refused_and_nothing_is_stored(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="priority_class must be one of critical, normal, bulk"):
        await broker.publish("orders", b"x", priority_class="urgent")
    with pytest.raises(InvalidArgument, match="publisher"):
        await broker.publish_batch("orders", [b"x"], publisher="")
    with pytest.raises(InvalidArgument, match="token"):
        await broker.publish_table("orders", pa.table({"data": [b"x"]}), token=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="messages_per_s"):
        await broker.set_publisher_limits("loader", messages_per_s=-1)
    with pytest.raises(InvalidArgument, match="unknown quota option"):
        await broker.set_token_limits("t", rate=5)
    with pytest.raises(InvalidArgument, match="priority_class"):
        await broker.producer("p", priority_class="urgent")
    assert await broker.topics() == []


async def test_a_topic_without_limits_has_no_gate(broker: Broker) -> None:
    await broker.publish("orders", b"x", publisher="a", priority_class="bulk")
    assert broker._flow._gates == {} == broker._flow._side_gates
    assert broker._flow._task is None
    report = await broker.flow("orders")
    assert (report.mode, report.passed, report.slowest) == ("normal", 0, None)
