"""What a token allows over the binary protocol: each command is asked about, and what changed is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.model.errors import PermissionDenied, SubscriptionNotFound, Unauthenticated
from sparrow.server import gate
from sparrow.server.calls import BROKER_VERBS, DEAD_LETTER_VERBS, SUBSCRIPTION_VERBS
from sparrow.server.tcp import TcpServer
from sparrow.wire import core, heads
from sparrow.wire.core import Status
from sparrow.wire.frame import FrameType

from .wireclient import Client, connected, publish_batch, serving

MIB = 1024 * 1024


class Guarded(NamedTuple):
    """A server that wants tokens, and some topics."""

    broker: Broker
    server: TcpServer
    root: str

    async def token(self, *scopes: str, name: str = "t") -> str:
        return (await self.broker.create_token(name, scopes=scopes)).text


@asynccontextmanager
async def guarded(path: Path) -> AsyncIterator[Guarded]:
    async with serving(path) as (broker, server):
        for name in ("orders.us", "orders.eu", "stock"):
            await broker.create_topic(name)
        await broker.subscribe("billing", "orders.us", start="earliest")
        await broker.subscribe("all", "#", start="earliest")
        yield Guarded(broker, server, (await broker.create_token("root", role="admin")).text)


async def test_nobody_comes_in_without_a_token(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        for token in ("", "wrong", there.root[:-1]):
            client = await Client.connect(there.server.address)
            with pytest.raises(Unauthenticated):
                await client.hello(token=token)
            assert await client.ended()
            await client.close()


async def test_core_frames_need_a_hello_with_a_token(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        client = await Client.connect(there.server.address)
        client.send_core(FrameType.PUBLISH, _core_publish("stock"), 1)
        answer = await client.until(lambda frame: frame.request_id == 1)
        assert answer.payload[0] == Status.UNAUTHORIZED
        await client.close()


async def test_core_frames_are_asked_about_too(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        token = await there.token("publish:orders.#", "subscribe:stock")
        async with connected(there.server, token=token) as client:
            asked = [
                (FrameType.PUBLISH, _core_publish("orders.us"), Status.DONE),
                (FrameType.PUBLISH, _core_publish("stock"), Status.UNAUTHORIZED),
                (FrameType.SUBSCRIBE, _core_subscribe("stock"), Status.DONE),
                (FrameType.SUBSCRIBE, _core_subscribe("orders.us"), Status.UNAUTHORIZED),
                (FrameType.SUBSCRIBE, _core_subscribe("#"), Status.UNAUTHORIZED),
            ]
            for number, (kind, payload, status) in enumerate(asked, start=100):
                client.send_core(kind, payload, number)
                answer = await client.until(lambda frame, n=number: frame.request_id == n)
                assert answer.payload[0] == status, payload


def _core_publish(topic: str) -> bytes:
    return core.publish(core.Publish(topic, {}, b"x", requires_ack=True))


def _core_subscribe(pattern: str) -> bytes:
    return core.subscribe(core.Subscribe(pattern, "", 10))


async def test_a_publisher_publishes_to_its_topics_and_to_no_other(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        token = await there.token("publish:orders.#")
        async with connected(there.server, token=token) as client:
            assert (await client.ask(*publish_batch("orders.us", [b"x"]))).runs
            assert (await client.ask(*publish_batch("orders.new", [b"x"]))).runs
            for topic in ("stock", "other"):
                with pytest.raises(PermissionDenied):
                    await client.ask(*publish_batch(topic, [b"x"]))
            with pytest.raises(PermissionDenied):
                await client.ask(heads.Consume("billing", 10, MIB))
            with pytest.raises(PermissionDenied):
                await client.ask(heads.Fetch("orders.us", 0, 0, MIB))
            assert (await client.call("topic", name="orders.us"))["name"] == "orders.us"
            assert await client.call("producer", name="p")
        assert "other" not in [topic.name for topic in await there.broker.topics()]


async def test_a_subscriber_consumes_what_its_scopes_cover_whole(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        await there.broker.publish("orders.us", b"x")
        token = await there.token("subscribe:orders.*")
        async with connected(there.server, token=token) as client:
            await client.ask(heads.Consume("billing", 10, MIB))
            assert (await client.deliver())[1].num_rows == 1
            assert (await client.ask(heads.Fetch("orders.us", 0, 0, MIB))).batches
            await client.call("subscribe", name="mine", pattern="orders.*")
            await client.call("subscription.pause", subscription="mine")
            for refused in (
                heads.Consume("all", 10, MIB),
                heads.JoinGroup("all", "m"),
                heads.Fetch("stock", 0, 0, MIB),
                heads.Call("subscribe", {"name": "wide", "pattern": "orders.#"}),
                heads.Call("subscription.lag", {"subscription": "all"}),
                heads.Call("subscription.unsubscribe", {"subscription": "all"}),
                heads.Call("dead_letters.purge", {"subscription": "all"}),
                heads.Call("topic", {"name": "stock"}),
            ):
                with pytest.raises(PermissionDenied):
                    await client.ask(refused)


async def test_dead_letters_go_only_where_their_sender_may_publish(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        token = await there.token("subscribe:orders.#", "publish:dead.orders")
        async with connected(there.server, token=token) as client:
            asked = {"name": "mine", "pattern": "orders.us", "dead_letter_topic": "stock"}
            with pytest.raises(PermissionDenied):
                await client.call("subscribe", **asked)
            await client.call("subscribe", **{**asked, "dead_letter_topic": "dead.orders"})
            with pytest.raises(PermissionDenied):
                await client.call("subscription.update", subscription="mine", dead_letter_topic="stock")


async def test_dead_letters_are_replayed_only_to_what_their_sender_may_consume(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        mine = await there.broker.subscribe("mine", "orders.us", dead_letter_topic="dead")
        await there.broker.publish("orders.us", b"x")
        await mine.nack(await mine.pull(timeout_s=10), retry=False)
        await mine.flush()
        token = await there.token("subscribe:orders.*")
        async with connected(there.server, token=token) as client:
            with pytest.raises(PermissionDenied):
                await client.call("dead_letters.replay", subscription="mine", destination="all")
            with pytest.raises(SubscriptionNotFound):
                await client.call("dead_letters.replay", subscription="mine", destination="nobody")
            assert len(await mine.dead_letters.list()) == 1
            await client.call("dead_letters.replay", subscription="mine", destination="billing")


async def test_lists_show_what_a_token_may_see(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        await (await there.broker.subscription("all")).snapshot("saved-all")
        await (await there.broker.subscription("billing")).snapshot("saved-billing")
        async with connected(there.server, token=await there.token("subscribe:orders.#")) as client:
            assert [each["name"] for each in await client.call("topics")] == ["orders.eu", "orders.us"]
            assert [each["name"] for each in await client.call("subscriptions")] == ["billing"]
            assert list(await client.call("lag")) == ["billing"]
            assert [each["name"] for each in await client.call("snapshots")] == ["saved-billing"]
            with pytest.raises(PermissionDenied):
                await client.call("delete_snapshot", name="saved-all")
            await client.call("delete_snapshot", name="saved-billing")
        async with connected(there.server, token=there.root) as client:
            assert len(await client.call("topics")) == 3
            assert set(await client.call("lag")) == {"all", "billing"}


async def test_administration_needs_the_scope_on_the_topic_or_on_everything(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        async with connected(there.server, token=await there.token("admin:orders.#")) as client:
            await client.call("create_topic", name="orders.new")
            await client.call("update_topic", name="orders.new", retention_s=60.0)
            await client.call("delete_topic", name="orders.new")
            for verb, arguments in _FOR_ROOT.items():
                with pytest.raises(PermissionDenied):
                    await client.call(verb, **arguments)
        async with connected(there.server, token=there.root) as client:
            for verb, arguments in _FOR_ROOT.items():
                await client.call(verb, **arguments)


_FOR_ROOT: dict[str, dict[str, Any]] = {
    "create_topic": {"name": "new"},
    "update_topic": {"name": "stock", "retention_s": 60.0},
    "delete_topic": {"name": "stock", "force": True},
    "seal": {},
    "apply_retention": {},
    "set_publisher_limits": {"publisher": "p", "messages_per_s": 1000.0},
    "set_token_limits": {"token": "t", "messages_per_s": 1000.0},
    "tokens": {},
    "create_token": {"name": "new", "role": "read-only"},
    "revoke_token": {"name": "new"},
    "audit_log": {},
}


async def test_a_reader_looks_and_changes_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        receipt = await there.broker.publish("orders.us", b"x")
        async with connected(there.server, token=await there.token("read:#")) as client:
            for verb, arguments in {
                "topic": {"name": "stock"},
                "bounds": {"topic": "stock"},
                "subscription": {"name": "all"},
                "subscription.lag_report": {"subscription": "all"},
                "trace": {"message_id": receipt.message_id},
                "health": {},
                "state": {},
                "recovery": {},
            }.items():
                await client.call(verb, **arguments)
            assert (await client.ask(heads.Fetch("orders.us", 0, 0, MIB))).batches
            for verb, arguments in {
                **_FOR_ROOT,
                "subscribe": {"name": "x", "pattern": "stock"},
                "subscription.seek": {"subscription": "all", "target": "earliest"},
                "subscription.unsubscribe": {"subscription": "all"},
                "dead_letters.replay": {"subscription": "all"},
                "producer": {"name": "p"},
            }.items():
                with pytest.raises(PermissionDenied):
                    await client.call(verb, **arguments)


async def test_a_trace_needs_the_topic_of_its_message(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        receipt = await there.broker.publish("stock", b"x")
        async with connected(there.server, token=await there.token("read:orders.#")) as client:
            with pytest.raises(PermissionDenied):
                await client.call("trace", message_id=receipt.message_id)


async def test_a_token_made_over_the_wire_works_and_is_listed_without_its_secret(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there, connected(there.server, token=there.root) as client:
        made = await client.call("create_token", name="shop", role="publisher", topics="orders.#")
        assert made["text"] not in str(await client.call("tokens"))
        async with connected(there.server, token=made["text"]) as shop:
            await shop.ask(*publish_batch("orders.us", [b"x"]))


async def test_a_connection_ends_soon_after_its_token(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        async with connected(there.server, token=await there.token("subscribe:#")) as client:
            await client.ask(heads.Consume("all", 1000, MIB))
            await there.broker.revoke_token("t")
            error = await client.next_head(FrameType.ERROR)
            assert (error.code, error.is_fatal) == ("UNAUTHENTICATED", True)
            assert await client.ended()
        async with connected(there.server, token=there.root) as client:
            await asyncio.sleep(0)
            await client.call("topics")


async def test_a_program_whose_token_is_revoked_is_told_so_and_does_not_wait(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        token = await there.token("publish:orders.#", "subscribe:stock")
        async with sparrow.aconnect(f"sparrow://{there.server.address}", token=token) as client:
            await client.publish("orders.us", b"x")
            stock = await client.subscribe("stock", "stock")
            await there.broker.revoke_token("t")
            async with asyncio.timeout(10):
                for ask in (client.publish("orders.us", b"x"), client.topics(), stock.pull(10, 30)):
                    with pytest.raises(Unauthenticated):
                        await ask


async def test_what_administrators_do_is_written_with_its_outcome(tmp_path: Path) -> None:
    async with guarded(tmp_path) as there:
        async with connected(there.server, token=there.root) as client:
            await client.call("create_topic", name="new")
            with pytest.raises(Exception, match="TOKEN_NOT_FOUND"):
                await client.call("revoke_token", name=there.root)
        async with connected(there.server, token=await there.token("read:#", name="viewer")) as client:
            with pytest.raises(PermissionDenied):
                await client.call("delete_topic", name="new")
            await client.call("topics")
        entries = await there.broker.audit_log()
        assert [(entry.who, entry.action, entry.what, entry.outcome) for entry in entries] == [
            ("root", "create_topic", "new", "done"),
            ("root", "revoke_token", "sparrow_…", "TOKEN_NOT_FOUND"),
            ("viewer", "delete_topic", "new", "PERMISSION_DENIED"),
        ]


def test_the_table_names_only_verbs_that_there_are() -> None:
    nouned = {f"subscription.{verb}" for verb in SUBSCRIPTION_VERBS}
    nouned |= {f"dead_letters.{verb}" for verb in DEAD_LETTER_VERBS}
    named = {*gate._ON_TOPIC, *gate._ABOUT_TOPIC, *gate._FOR_READERS, *gate._LISTS, *gate._FOR_ALL}
    assert named <= BROKER_VERBS
    assert not gate._AUDITED - BROKER_VERBS - nouned
    assert gate._ABOUT_SUBSCRIPTION <= SUBSCRIPTION_VERBS | DEAD_LETTER_VERBS
