"""Where is this message? Its state in every subscription that reads its topic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.kernel.trace import MessageState, Trace
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        yield broker


async def only(broker: Broker, message_id: str) -> Trace:
    """The trace in the one subscription that there is."""
    [found] = await broker.trace(message_id)
    return found


async def test_message_is_followed_from_the_log_to_its_ack(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    receipt = await broker.publish("t", b"x")
    states = [(await only(broker, receipt.message_id)).state]
    [message] = await subscription.pull()
    states.append((await only(broker, receipt.message_id)).state)
    await subscription.ack([message], wait=True)
    states.append((await only(broker, receipt.message_id)).state)
    assert states == [MessageState.NOT_REACHED, MessageState.LEASED, MessageState.ACKED]


async def test_lease_names_its_consumer_and_its_deadline(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    receipt = await broker.publish("t", b"x")
    [message] = await subscription.pull()
    found = await only(broker, receipt.message_id)
    assert (found.consumer, found.deadline_us) == (subscription.consumer, message.deadline_us)
    await message.extend(60)
    later = await only(broker, receipt.message_id)
    assert later.deadline_us is not None
    assert later.deadline_us > message.deadline_us


async def test_failed_message_shows_its_attempts_errors_and_next_try(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    receipt = await broker.publish("t", b"x")
    for reason in ("first", "second"):
        [message] = await subscription.pull(timeout_s=5)
        await subscription.nack([message], delay_s=0 if reason == "first" else 60, reason=reason, wait=True)
    found = await only(broker, receipt.message_id)
    assert (found.state, found.attempts) == (MessageState.SCHEDULED, 2)
    assert [(a.reason, a.consumer) for a in found.history] == [
        ("first", subscription.consumer),
        ("second", subscription.consumer),
    ]
    assert found.due_at_us is not None
    assert found.due_at_us - found.history[-1].at_us == 60_000_000


async def test_delayed_message_is_scheduled_for_its_time(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    due_at = datetime.now(UTC) + timedelta(seconds=60)
    receipt = await broker.publish("t", b"x", deliver_at=due_at)
    await subscription.pull()
    found = await only(broker, receipt.message_id)
    assert (found.state, found.due_at_us) == (MessageState.SCHEDULED, int(due_at.timestamp() * 1e6))


async def test_ready_message_that_was_read_and_not_asked_for(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    receipts = await broker.publish_batch("t", [b"a", b"b"])
    await subscription.pull(1)
    assert (await only(broker, receipts[1].message_id)).state is MessageState.READY


async def test_message_behind_another_of_its_key_is_blocked(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ordering="key")
    receipts = await broker.publish_batch("t", [b"a", b"b"], keys=["k", "k"])
    await subscription.pull(10)
    assert (await only(broker, receipts[1].message_id)).state is MessageState.BLOCKED


async def test_message_that_depends_on_others_names_them(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t")
    cause = await broker.publish("t", b"cause")
    effect = await broker.publish("t", b"effect", depends_on=[cause.message_id])
    await subscription.pull(10)
    found = await only(broker, effect.message_id)
    assert found.state is MessageState.DEPENDENT
    assert [str(need) for need in found.waits_for] == [cause.message_id]


async def test_message_that_the_filter_left_out_says_so(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    out = await broker.publish("t", b"x", attributes={"env": "test"})
    await broker.publish("t", b"y", attributes={"env": "prod"})
    messages = await subscription.pull()
    assert (await only(broker, out.message_id)).state is MessageState.FILTERED
    await subscription.ack(messages, wait=True)
    assert (await only(broker, out.message_id)).state is MessageState.FILTERED


async def test_dead_lettered_message_is_done_here(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", dead_letter_topic="d")
    receipt = await broker.publish("t", b"x")
    [message] = await subscription.pull()
    await message.nack(retry=False)
    await subscription.flush()
    assert (await only(broker, receipt.message_id)).state is MessageState.ACKED


async def test_every_subscription_that_reads_the_topic_answers_for_itself(broker: Broker) -> None:
    acked = await broker.subscribe("acked", "t")
    leased = await broker.subscribe("leased", "#")
    await broker.subscribe("untouched", "t")
    await broker.subscribe("elsewhere", "other")
    receipt = await broker.publish("t", b"x")
    await acked.ack(await acked.pull(), wait=True)
    await leased.pull()
    names = {s.id: s.name for s in await broker.subscriptions()}
    found = {names[t.subscription_id]: t.state for t in await broker.trace(receipt.message_id)}
    assert found == {
        "acked": MessageState.ACKED,
        "leased": MessageState.LEASED,
        "untouched": MessageState.NOT_REACHED,
    }


async def test_trace_survives_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        receipt = await broker.publish("t", b"x")
        await subscription.nack(await subscription.pull(), reason="no", delay_s=60, wait=True)
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        found = await only(broker, receipt.message_id)
        assert (found.attempts, [a.reason for a in found.history]) == (1, ["no"])


@pytest.mark.parametrize("message_id", ["", "x", "1-2", "1-0-1", "99-0-0", None, 5])
async def test_id_that_no_message_has_is_refused(broker: Broker, message_id: str) -> None:
    await broker.subscribe("s", "t")
    await broker.publish("t", b"x")
    with pytest.raises(errors.MessageNotFound) as refused:
        await broker.trace(message_id)
    assert (refused.value.code, refused.value.status) == ("MESSAGE_NOT_FOUND", 404)
    assert refused.value.hint


async def test_partition_that_a_topic_does_not_have_is_refused(broker: Broker) -> None:
    receipt = await broker.publish("t", b"x")
    topic_id = receipt.message_id.partition("-")[0]
    with pytest.raises(errors.MessageNotFound):
        await broker.trace(f"{topic_id}-7-0")
