"""Core frames over real sockets: what a client written in an afternoon relies on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sparrow.model import errors
from sparrow.wire import core, heads
from sparrow.wire.core import Parser, Status
from sparrow.wire.frame import FrameType

from .wireclient import Client, connected, serving


async def respond(client: Client, kind: int, payload: bytes) -> Parser:
    client.send_core(kind, payload)
    return Parser((await client.next(FrameType.RESPONSE)).payload)


async def subscribe(client: Client, *fields: object) -> tuple[int, str]:
    found = await respond(client, FrameType.SUBSCRIBE, core.subscribe(core.Subscribe(*fields)))  # type: ignore[arg-type]
    return found.u8("status"), found.text("subscription")


async def publish(client: Client, *fields: object) -> tuple[int, str, int]:
    found = await respond(client, FrameType.PUBLISH, core.publish(core.Publish(*fields)))  # type: ignore[arg-type]
    return found.u8("status"), found.text("id"), found.u64("time")


async def delivery(client: Client) -> core.Delivery:
    return core.parse_delivery((await client.next(FrameType.DELIVERY)).payload)


async def test_a_client_without_hello_publishes_subscribes_and_acks(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        client = await Client.connect(server.address)
        status, name = await subscribe(client, "orders.#")
        assert status == Status.DONE
        status, message_id, time_ns = await publish(client, "orders.us", {"key": "k", "env": "prod"}, b"x")
        assert status == Status.DONE
        assert time_ns > 10**18
        found = await delivery(client)
        assert found[:5] == (name, message_id, "orders.us", {"key": "k", "env": "prod"}, b"x")
        assert found.deadline_ns > time_ns
        assert await broker.trace(message_id)
        ack = core.ack(core.Ack(message_id, 5))
        assert (await respond(client, FrameType.ACK, ack)).u8("status") == Status.DONE
        assert (await respond(client, FrameType.ACK, ack)).u8("status") == Status.NOT_FOUND
        handle = await broker.subscription(name)
        await handle.flush()
        assert await handle.lag() == 0
        await client.close()


async def test_a_subscription_without_group_is_gone_with_its_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        client = await Client.connect(server.address)
        await subscribe(client, "a.#")
        assert len(await broker.subscriptions()) == 1
        client.abort()
        for _ in range(100):
            if not await broker.subscriptions():
                break
            await asyncio.sleep(0.02)
        assert await broker.subscriptions() == []


async def test_a_group_shares_one_subscription_that_stays(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        first, second = await Client.connect(server.address), await Client.connect(server.address)
        assert await subscribe(first, "t", "workers", 1) == (Status.DONE, "workers")
        assert await subscribe(second, "t", "workers", 1) == (Status.DONE, "workers")
        await publish(first, "t", {}, b"1")
        await publish(first, "t", {}, b"2")
        assert {(await delivery(first)).data, (await delivery(second)).data} == {b"1", b"2"}
        await first.close()
        await second.close()
        assert [each.name for each in await broker.subscriptions()] == ["workers"]


async def test_no_more_than_max_in_flight_is_delivered_until_something_is_settled(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server):
        client = await Client.connect(server.address)
        await subscribe(client, "t", "", 2)
        for number in range(3):
            await publish(client, "t", {}, str(number).encode())
        first = await delivery(client)
        await delivery(client)
        await asyncio.sleep(0.1)
        assert not [frame for frame in client.arrived if frame.type == FrameType.DELIVERY]
        await respond(client, FrameType.ACK, core.ack(core.Ack(first.message_id)))
        assert (await delivery(client)).data == b"2"
        await client.close()


async def test_auto_ack_needs_no_ack(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        client = await Client.connect(server.address)
        _, name = await subscribe(client, "t", "", 10, True)
        await publish(client, "t", {}, b"1")
        assert (await delivery(client)).deadline_ns == 0
        handle = await broker.subscription(name)
        await handle.flush()
        assert await handle.lag() == 0
        await client.close()


async def test_a_nack_says_what_becomes_of_the_message(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        await broker.subscribe("s", "t", dead_letter_topic="dead")
        client = await Client.connect(server.address)
        await subscribe(client, "t", "s")
        await publish(client, "t", {}, b"1")
        message_id = (await delivery(client)).message_id
        found = await respond(client, FrameType.NACK, core.nack(core.Nack(message_id, 1, True)))
        assert (found.u8("status"), found.u8("action")) == (0, 1)
        assert (await delivery(client)).message_id == message_id
        found = await respond(client, FrameType.NACK, core.nack(core.Nack(message_id, 2, False)))
        assert (found.u8("status"), found.u8("action")) == (0, 2)
        found = await respond(client, FrameType.NACK, core.nack(core.Nack(message_id, 2, False)))
        assert (found.u8("status"), found.u8("action")) == (1, 0)
        await client.close()


async def test_an_ack_after_the_deadline_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        await broker.subscribe("s", "t", guarantee="exactly_once", ack_deadline_s=0.1)
        client = await Client.connect(server.address)
        await subscribe(client, "t", "s", 1)
        await publish(client, "t", {}, b"1")
        message_id = (await delivery(client)).message_id
        await (await broker.subscription("s")).pause()
        await asyncio.sleep(0.2)
        found = await respond(client, FrameType.ACK, core.ack(core.Ack(message_id)))
        assert found.u8("status") == Status.EXHAUSTED
        await client.close()


async def test_a_publish_that_wants_no_ack_gets_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        await broker.create_topic("t")
        client = await Client.connect(server.address)
        client.send_core(FrameType.PUBLISH, core.publish(core.Publish("t", {}, b"1", 0, False)))
        client.send_core(FrameType.HEARTBEAT, b"", 9)
        answer = await client.next(FrameType.RESPONSE)
        assert answer.request_id == 9
        await broker.wait_for("t", 0)
        assert (await broker.bounds("t")).end_offset == 1
        await client.close()


async def test_what_does_not_parse_is_invalid_format_and_the_connection_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server):
        client = await Client.connect(server.address)
        assert (await respond(client, FrameType.PUBLISH, b"\x00")).u8("status") == Status.INVALID
        assert (await respond(client, FrameType.ACK, b"\xff\xff")).u8("status") == Status.INVALID
        assert (await publish(client, "t", {}, b"1"))[0] == Status.DONE
        await client.close()


@pytest.mark.parametrize(
    ("fields", "status"),
    [(("a b",), 1), (("#.a",), 1), (("a", "bad name!"), 2), (("a", "", 0), 3), (("a", "other"), 2)],
)
async def test_subscribe_refuses_with_a_status(
    tmp_path: Path, fields: tuple[object, ...], status: int
) -> None:
    async with serving(tmp_path) as (broker, server):
        await broker.subscribe("other", "b")
        client = await Client.connect(server.address)
        assert await subscribe(client, *fields) == (status, "")
        await client.close()


async def test_publish_refuses_with_a_status(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server):
        client = await Client.connect(server.address)
        assert (await publish(client, "no spaces please", {}, b"1"))[0] == Status.INVALID
        assert (await publish(client, "t", {}, bytes(10 * 1024 * 1024 + 1)))[0] == Status.TOO_LARGE
        await client.close()


async def test_subscribe_and_publish_that_are_pipelined_happen_in_that_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server):
        client = await Client.connect(server.address)
        client.send_core(FrameType.SUBSCRIBE, core.subscribe(core.Subscribe("t")))
        client.send_core(FrameType.PUBLISH, core.publish(core.Publish("t", {}, b"1")))
        assert (await delivery(client)).data == b"1"
        await client.close()


async def test_core_publishes_that_are_pipelined_are_stored_and_answered_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        client = await Client.connect(server.address)
        for number in range(300):
            client.send_core(FrameType.PUBLISH, core.publish(core.Publish("t", {}, b"%d" % number)))
        ids = []
        for _ in range(300):
            found = Parser((await client.next(FrameType.RESPONSE)).payload)
            assert found.u8("status") == 0
            ids.append(found.text("id"))
        assert ids == sorted(ids, key=lambda name: int(name.rpartition("-")[2]))
        stored = await broker.read("t", max_messages=1000)
        assert [message.data for message in stored] == [b"%d" % number for number in range(300)]
        await client.close()


# Tokens.


async def test_a_wrong_token_is_refused_and_the_connection_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens="shop:s3cret") as (_, server):
        client = await Client.connect(server.address)
        with pytest.raises(errors.Unauthenticated):
            await client.hello(token="guess")
        assert await client.ended()
        await client.close()


async def test_with_tokens_core_frames_without_hello_are_unauthorized(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens="shop:s3cret") as (_, server):
        client = await Client.connect(server.address)
        assert (await publish(client, "t", {}, b"1"))[0] == Status.UNAUTHORIZED
        await client.close()
        async with connected(server, token="s3cret") as known:
            assert (await publish(known, "t", {}, b"1"))[0] == Status.DONE


async def test_extended_frames_need_hello(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server):
        client = await Client.connect(server.address)
        with pytest.raises(errors.PreconditionFailed):
            await client.ask(heads.Call("topics"))
        await client.close()
