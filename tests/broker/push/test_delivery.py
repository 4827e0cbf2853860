"""Webhooks end to end: a broker, and a receiver in another process that behaves well or badly."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from sparrow import webhooks
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.errors import SparrowError
from sparrow.model.push import PushStatus
from sparrow.model.settings import Settings
from sparrow.store.local import LocalStore
from sparrow.testing.disk import FaultyDisk

from .receiving import ReceiverProcess, until

QUICK = {"min_backoff_s": 0.01, "max_backoff_s": 0.05, "immediate_retries": 1}


async def caught_up(handle: BrokerSubscription) -> None:
    async def is_done() -> bool:
        return await handle.lag() == 0

    await until(is_done, f"{handle} to catch up")


def numbers(seen: list[Any]) -> list[int]:
    return [each.data["n"] for each in seen]


async def publish(broker: Broker, count: int, *, start: int = 0, keys: int = 0) -> list[str]:
    data = [b'{"n": %d}' % n for n in range(start, start + count)]
    names = [f"k-{n % keys}" for n in range(start, start + count)] if keys else None
    return [receipt.message_id for receipt in await broker.publish_batch("orders", data, keys=names)]


async def test_a_message_arrives_signed_and_its_2xx_acks_it(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url, "headers": {"X-Team": "a"}})
    (secret,) = await handle.push_secrets()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    receipt = await broker.publish(
        "orders", b'{"amount": 5}', key="o-1", attributes={"env": "prod", "traceparent": trace}
    )
    await caught_up(handle)
    (seen,) = receiver.seen()
    verified = webhooks.verify(secret, seen.headers, seen.body)
    assert (verified.id, verified.attempt) == (receipt.message_id, 1)
    assert "." not in verified.id
    assert seen.headers["X-Team"] == "a"
    assert seen.headers["traceparent"] == trace
    envelope = json.loads(seen.body)
    assert envelope["data"] == {"amount": 5}
    assert envelope["type"] == envelope["topic"] == "orders"
    assert (envelope["key"], envelope["attributes"]["env"]) == ("o-1", "prod")
    state = await handle.push_state()
    assert (state.state, state.delivered, state.failed) == (PushStatus.ACTIVE, 1, 0)


async def test_a_backlog_arrives_whole_and_once(broker: Broker, receiver: ReceiverProcess) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url, "max_concurrency": 20})
    ids = await publish(broker, 500)
    await caught_up(handle)
    assert sorted(each.id for each in receiver.seen()) == sorted(ids)
    assert await receiver.most_at_once() <= 20


@pytest.mark.parametrize("ordering", ["total", "key"])
async def test_an_ordered_subscription_stays_in_order_while_the_receiver_fails(
    broker: Broker, receiver: ReceiverProcess, ordering: str
) -> None:
    await receiver.mode(status=500, fails_on='"n": 7}')
    handle = await broker.subscribe(
        "hook", "orders", ordering=ordering, retry=QUICK, push={"url": receiver.url}
    )
    await publish(broker, 40, keys=4)
    await until(lambda: sum(each.data["n"] == 7 for each in receiver.seen()) >= 3)
    await receiver.mode()
    await caught_up(handle)
    accepted = receiver.accepted()
    assert sorted(numbers(accepted)) == list(range(40))
    if ordering == "total":
        assert numbers(accepted) == list(range(40))
    for key in range(4):
        own = [n for n in numbers(accepted) if n % 4 == key]
        assert own == sorted(own)


async def test_an_attempt_has_the_same_id_and_body_another_number_and_its_own_signature(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await receiver.mode(status=500, body="try later")
    handle = await broker.subscribe("hook", "orders", retry=QUICK, push={"url": receiver.url})
    (secret,) = await handle.push_secrets()
    await publish(broker, 1)
    await until(lambda: len(receiver.seen()) >= 3)
    await receiver.mode()
    await caught_up(handle)
    seen = receiver.seen()
    assert [each.attempt for each in seen] == list(range(1, len(seen) + 1))
    assert len({(each.id, each.body) for each in seen}) == 1
    for each in seen:
        webhooks.verify(secret, each.headers, each.body)


async def test_dead_letters_are_exactly_those_that_failed_and_tell_what_the_receiver_said(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await receiver.mode(status=422, fails_on="3}", body="no threes, please" + "x" * 5000)
    handle = await broker.subscribe(
        "hook",
        "orders",
        dead_letter_topic="dead",
        retry={**QUICK, "max_attempts": 3},
        push={"url": receiver.url},
    )
    ids = await publish(broker, 50)
    await caught_up(handle)
    expected = {ids[n] for n in (3, 13, 23, 33, 43)}
    letters = await handle.dead_letters.list()
    assert {letter.message_id for letter in letters} == expected
    for letter in letters:
        assert letter.attempts == 3
        assert letter.last_error.startswith("422 Unprocessable Entity: no threes, please")
        assert len(letter.last_error) < 1000
    seen = receiver.seen()
    for message_id in expected:
        assert [each.attempt for each in seen if each.id == message_id] == [1, 2, 3]
    assert sorted(each.id for each in receiver.accepted()) == sorted(set(ids) - expected)


async def test_a_single_message_to_a_closed_port_becomes_a_dead_letter(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    receiver.kill()
    handle = await broker.subscribe(
        "hook",
        "orders",
        dead_letter_topic="dead",
        retry={**QUICK, "max_attempts": 4},
        push={"url": receiver.url},
    )
    (message_id,) = await publish(broker, 1)
    await caught_up(handle)
    (letter,) = await handle.dead_letters.list()
    assert (letter.message_id, letter.attempts) == (message_id, 4)
    assert "Cannot connect" in letter.last_error


async def test_a_receiver_that_dies_and_returns_loses_nothing_and_uses_up_no_attempts(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    handle = await broker.subscribe(
        "hook", "orders", dead_letter_topic="dead", retry={**QUICK, "max_attempts": 5},
        push={"url": receiver.url, "max_concurrency": 8},
    )  # fmt: skip
    ids = await publish(broker, 200)
    await until(lambda: len(receiver.accepted()) >= 20)
    receiver.kill()
    ids += await publish(broker, 200, start=200)

    async def is_open() -> bool:
        return (await handle.push_state()).state in (PushStatus.OPEN, PushStatus.HALF_OPEN)

    await until(is_open, "the breaker to open")
    await asyncio.sleep(1.5)  # Several probes: none of them may cost a message its attempts.
    state = await handle.push_state()
    assert "Cannot connect" in state.why
    assert await handle.lag() > 0
    receiver.start()
    await caught_up(handle)
    assert {each.id for each in receiver.accepted()} == set(ids)
    assert await handle.dead_letters.list() == []
    assert max(each.attempt for each in receiver.seen()) <= 4
    assert (await handle.push_state()).state is PushStatus.ACTIVE


async def test_while_the_receiver_fails_the_backlog_keeps_its_attempts(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await receiver.mode(status=503)
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
    await publish(broker, 300)
    await asyncio.sleep(1.0)
    assert len(receiver.seen()) < 30
    await receiver.mode()
    await caught_up(handle)
    assert sorted(numbers(receiver.accepted())) == list(range(300))
    first_try = [each for each in receiver.accepted() if each.attempt == 1]
    assert len(first_try) > 270


async def test_an_answer_that_does_not_come_in_time_is_a_failure(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await receiver.mode(delay_s=30)
    handle = await broker.subscribe(
        "hook", "orders", retry=QUICK, push={"url": receiver.url, "timeout_s": 0.3}
    )
    await publish(broker, 1)
    await until(lambda: len(receiver.seen()) >= 2)
    state = await handle.push_state()
    assert state.last_error == "no answer within 0.3 s"
    await receiver.mode()
    await caught_up(handle)
    assert receiver.seen()[-1].attempt >= 3


async def test_a_slow_receiver_gets_few_at_once_and_everything_in_the_end(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await receiver.mode(delay_s=0.05)
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url, "max_concurrency": 5})
    await publish(broker, 60)
    await caught_up(handle)
    assert await receiver.most_at_once() <= 5
    assert sorted(numbers(receiver.seen())) == list(range(60))


async def test_retry_after_holds_everything_back(broker: Broker, receiver: ReceiverProcess) -> None:
    await receiver.mode(status=429, headers={"Retry-After": "1"})
    handle = await broker.subscribe(
        "hook", "orders", retry=QUICK, push={"url": receiver.url, "max_concurrency": 1}
    )
    await publish(broker, 5)
    await until(receiver.seen)
    await receiver.mode()
    await caught_up(handle)
    seen = receiver.seen()
    assert [each.status for each in seen] == [429, 200, 200, 200, 200, 200]
    assert seen[1].at - seen[0].at >= 0.95


async def test_a_rate_is_kept(broker: Broker, receiver: ReceiverProcess) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url, "rate_per_s": 20})
    await publish(broker, 30)
    await caught_up(handle)
    seen = receiver.seen()
    assert seen[-1].at - seen[0].at >= 1.2


async def test_410_disables_for_good_and_resume_starts_again(
    settings: Settings, receiver: ReceiverProcess
) -> None:
    await receiver.mode(status=410, body="moved out")
    async with await Broker.open(settings) as broker:
        handle = await broker.subscribe("hook", "orders", push={"url": receiver.url, "max_concurrency": 1})
        await publish(broker, 3)

        async def is_disabled() -> bool:
            return (await handle.push_state()).state is PushStatus.DISABLED

        await until(is_disabled)
        assert "410 Gone: moved out" in (await handle.push_state()).why
    count = len(receiver.seen())
    await receiver.mode()
    async with await Broker.open(settings) as broker:
        handle = await broker.subscription("hook")
        await publish(broker, 2, start=3)
        await asyncio.sleep(0.3)
        assert (await handle.push_state()).state is PushStatus.DISABLED
        assert len(receiver.seen()) == count
        await handle.resume()
        await caught_up(handle)
        assert sorted(numbers(receiver.accepted())) == [0, 1, 2, 3, 4]
        assert {each.attempt for each in receiver.accepted()} == {1}
        assert (await handle.push_state()).state is PushStatus.ACTIVE
    async with await Broker.open(settings) as broker:
        assert (await (await broker.subscription("hook")).push_state()).state is PushStatus.ACTIVE


async def test_a_paused_subscription_sends_nothing_until_it_is_resumed(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
    await handle.pause()
    await publish(broker, 10)
    await asyncio.sleep(0.3)
    assert receiver.seen() == []
    assert (await handle.push_state()).state is PushStatus.PAUSED
    await handle.resume()
    await caught_up(handle)
    assert len(receiver.seen()) == 10


async def test_another_url_is_used_from_the_change_on(broker: Broker, receiver: ReceiverProcess) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
    await publish(broker, 1)
    await caught_up(handle)
    await handle.update(push={"url": f"{receiver.url}/second", "format": "raw"})
    await publish(broker, 1, start=1)
    await caught_up(handle)
    assert [each.path for each in receiver.seen()] == ["/hook", "/hook/second"]
    assert receiver.seen()[1].body == b'{"n": 1}'
    assert handle.policy.push is not None
    assert handle.policy.push.max_concurrency == 100


async def test_push_begins_and_ends_with_an_update(broker: Broker, receiver: ReceiverProcess) -> None:
    handle = await broker.subscribe("hook", "orders")
    await publish(broker, 1)
    (message,) = await handle.pull(timeout_s=5)
    await message.ack()
    await handle.update(push={"url": receiver.url})
    await publish(broker, 1, start=1)
    await caught_up(handle)
    await handle.update(push=None)
    await publish(broker, 1, start=2)
    (message,) = await handle.pull(timeout_s=5)
    assert message.data == b'{"n": 2}'
    assert numbers(receiver.seen()) == [1]


async def test_a_deleted_subscription_sends_no_more(broker: Broker, receiver: ReceiverProcess) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
    await publish(broker, 1)
    await caught_up(handle)
    await handle.unsubscribe()
    await publish(broker, 5, start=1)
    again = await broker.subscribe("hook", "orders", start="latest", push={"url": receiver.url})
    await publish(broker, 1, start=6)
    await caught_up(again)
    assert numbers(receiver.seen()) == [0, 6]


async def test_filters_and_other_formats_hold_for_webhooks_too(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    url = receiver.url
    prod = 'attributes.env = "prod"'
    handles = [
        await broker.subscribe(name, "orders", filter=prod, push={"url": f"{url}/{name}", "format": name})
        for name in ("envelope", "raw", "cloudevents", "cloudevents_binary")
    ]
    await broker.publish(
        "orders", b"\x00\xff", key="ä", attributes={"env": "prod", "ce_type": "com.example.x"}
    )
    await broker.publish("orders", b"no", attributes={"env": "test"})
    for handle in handles:
        await caught_up(handle)
    seen = {each.path.rpartition("/")[2]: each for each in receiver.seen()}
    assert len(receiver.seen()) == 4
    assert json.loads(seen["envelope"].body)["data_base64"] == base64.b64encode(b"\x00\xff").decode()
    assert seen["raw"].body == b"\x00\xff"
    assert seen["raw"].headers["X-PubSub-Key"] == "%C3%A4"
    event = json.loads(seen["cloudevents"].body)
    assert seen["cloudevents"].headers["Content-Type"].startswith("application/cloudevents+json")
    assert (event["specversion"], event["type"], event["subject"]) == ("1.0", "com.example.x", "ä")
    assert (event["source"], event["id"]) == ("/topics/orders", seen["raw"].id)
    binary = seen["cloudevents_binary"]
    assert (binary.body, binary.headers["ce-type"]) == (b"\x00\xff", "com.example.x")
    assert binary.headers["ce-subject"] == "%C3%A4"
    assert (binary.headers["ce-specversion"], binary.headers["ce-id"]) == ("1.0", binary.id)


async def test_a_receiver_that_does_not_agree_is_sent_nothing(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await receiver.mode(allows="somebody-else")
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url, "verify": True})
    await publish(broker, 1)

    async def is_refused() -> bool:
        return "did not agree" in (await handle.push_state()).why

    await until(is_refused)
    assert receiver.seen() == []
    await receiver.mode(allows="sparrow")
    await handle.resume()
    await caught_up(handle)
    assert len(receiver.seen()) == 1


async def test_closing_gives_back_what_is_under_way_without_a_counted_attempt(
    settings: Settings, receiver: ReceiverProcess
) -> None:
    await receiver.mode(delay_s=30)
    async with await Broker.open(settings) as broker:
        await broker.subscribe("hook", "orders", push={"url": receiver.url})
        await publish(broker, 3)
        await until(lambda: len(receiver.seen()) == 3)
    await receiver.mode()
    async with await Broker.open(settings) as broker:
        await caught_up(await broker.subscription("hook"))
    again = receiver.seen()[3:]
    assert sorted(numbers(again)) == [0, 1, 2]
    assert {each.attempt for each in again} == {1}


async def test_many_receivers_with_some_dead_do_not_wait_for_each_other(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    await broker.create_topic("orders")
    for number in range(40):
        url = "http://127.0.0.1:9999/dead" if number % 10 == 0 else f"{receiver.url}/{number}"
        await broker.subscribe(f"hook-{number}", "orders", push={"url": url})
    await publish(broker, 5)
    await until(lambda: len(receiver.seen()) == 36 * 5)
    assert {await (await broker.subscription(f"hook-{n}")).lag() for n in range(0, 40, 10)} == {5}


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_a_receiver_does_each_message_is_accepted_or_a_dead_letter_and_keys_stay_in_order(
    broker: Broker, receiver: ReceiverProcess, seed: int
) -> None:
    await receiver.mode(chaos=seed)
    handle = await broker.subscribe(
        "hook",
        "orders",
        ordering="key",
        dead_letter_topic="dead",
        retry={**QUICK, "max_attempts": 3},
        push={"url": receiver.url},
    )
    ids = await publish(broker, 200, keys=20)
    await caught_up(handle)
    seen, letters = receiver.seen(), await handle.dead_letters.list(limit=1000)
    accepted = [each.id for each in receiver.accepted()]
    dead = {letter.message_id for letter in letters}
    assert len(accepted) == len(set(accepted))
    assert dead.isdisjoint(accepted)
    assert dead | set(accepted) == set(ids)
    for message_id in ids:
        attempts = [each.attempt for each in seen if each.id == message_id]
        assert attempts == list(range(1, len(attempts) + 1))
        assert len(attempts) == 3 or message_id not in dead
    first = {message_id: place for place, message_id in reversed(list(enumerate(each.id for each in seen)))}
    for key in range(20):
        places = [first[ids[n]] for n in range(key, 200, 20)]
        assert places == sorted(places)


async def test_acks_that_the_disk_refuses_lead_to_few_repeats_and_no_loss(
    settings: Settings, receiver: ReceiverProcess
) -> None:
    disk = FaultyDisk()
    clock = Clock()
    store = await LocalStore.open(
        Path(settings.data), journal=settings.journal, lake=settings.lake, now_us=clock.now_us, disk=disk
    )
    broker = await Broker.open(settings, store=store, clock=clock)
    await receiver.mode(delay_s=0.5)
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
    ids = await publish(broker, 3)
    await until(lambda: receiver.count() == 3)
    disk.fail("sync", times=None)

    async def is_noticed() -> bool:
        return "JournalFrozen" in (await handle.push_state()).last_error

    await until(is_noticed)
    await asyncio.sleep(1.0)
    assert receiver.count() <= 9
    with contextlib.suppress(SparrowError):
        await broker.close()
    await receiver.mode()
    async with await Broker.open(settings) as again:
        await caught_up(await again.subscription("hook"))
    assert {each.id for each in receiver.accepted()} == set(ids)
