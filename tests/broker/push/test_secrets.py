"""Secrets and settings of push subscriptions: told once, replaced with an overlap, kept, and never shown."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sparrow
from sparrow import webhooks
from sparrow.broker.broker import Broker
from sparrow.model.errors import InvalidArgument, PreconditionFailed, WebhookNotVerified
from sparrow.model.push import parse_networks, parse_ports, parse_push_policy
from sparrow.model.settings import Settings, parse, parse_address
from sparrow.model.subscription import SubscriptionPolicy, parse_policy
from sparrow.server.http import bind
from sparrow.server.tcp import TcpServer

from .receiving import ReceiverProcess, until

URL = "https://example.com/hook"


async def test_a_secret_is_told_once(broker: Broker) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": URL})
    (secret,) = await handle.push_secrets()
    assert 24 <= len(webhooks.key_of(secret)) <= 64
    with pytest.raises(PreconditionFailed, match="told when it was made"):
        await handle.push_secrets()
    assert secret not in str(msgspec.to_builtins(handle.subscription))
    assert secret not in str(await handle.push_state())
    again = await broker.subscribe("hook", "orders", push={"url": URL})
    with pytest.raises(PreconditionFailed):
        await again.push_secrets()


async def test_two_subscriptions_have_two_secrets(broker: Broker) -> None:
    secrets = [
        (await (await broker.subscribe(name, "orders", push={"url": URL})).push_secrets())[0]
        for name in ("a", "b")
    ]
    assert secrets[0] != secrets[1]


async def test_secrets_outlast_the_broker_and_go_with_the_subscription(
    settings: Settings, receiver: ReceiverProcess
) -> None:
    async with await Broker.open(settings) as broker:
        handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
        (secret,) = await handle.push_secrets()
    async with await Broker.open(settings) as broker:
        handle = await broker.subscription("hook")
        with pytest.raises(PreconditionFailed):
            await handle.push_secrets()
        await broker.publish("orders", b"1")
        await until(receiver.seen)
        await handle.unsubscribe()
        assert await broker._store.documents("push") == {}
        again = await broker.subscribe("hook", "orders", push={"url": receiver.url})
        assert await again.push_secrets() != [secret]
    webhooks.verify(secret, receiver.seen()[0].headers, receiver.seen()[0].body)


async def test_during_a_rotation_both_secrets_verify_and_after_it_only_the_new_one(
    broker: Broker, receiver: ReceiverProcess
) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
    (old,) = await handle.push_secrets()
    new = await handle.rotate_secret(overlap_s=3600)
    await broker.publish("orders", b"1")
    await until(receiver.seen)
    (seen,) = receiver.seen()
    assert (await handle.push_state()).secrets == 2
    for secret in (old, new):
        webhooks.verify(secret, seen.headers, seen.body)
    newest = await handle.rotate_secret(overlap_s=0)
    await broker.publish("orders", b"2")
    await until(lambda: len(receiver.seen()) == 2)
    seen = receiver.seen()[1]
    webhooks.verify(newest, seen.headers, seen.body)
    for secret in (old, new):
        with pytest.raises(WebhookNotVerified):
            webhooks.verify(secret, seen.headers, seen.body)


async def test_a_secret_may_be_given(broker: Broker) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": URL})
    secret = "whsec_" + "QUJD" * 10
    assert await handle.rotate_secret(secret=secret) == secret
    for bad in ("short", "whsec_QUJD"):
        with pytest.raises(InvalidArgument):
            await handle.rotate_secret(secret=bad)
    for overlap_s in (-1, 1e9, "1"):
        with pytest.raises(InvalidArgument):
            await handle.rotate_secret(overlap_s=overlap_s)  # type: ignore[arg-type]


async def test_no_secret_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    handle = await broker.subscribe("hook", "orders", push={"url": URL})
    secrets = [*await handle.push_secrets(), await handle.rotate_secret()]
    assert not any(secret[6:] in caplog.text for secret in secrets)
    assert "push-secret-rotated" in str([record.__dict__ for record in caplog.records])


async def test_who_does_not_push_has_no_state_and_no_secret(broker: Broker) -> None:
    handle = await broker.subscribe("plain", "orders")
    for ask in (handle.push_state, handle.push_secrets, handle.rotate_secret):
        with pytest.raises(PreconditionFailed, match="does not push"):
            await ask()


async def test_what_is_pushed_cannot_be_pulled(broker: Broker) -> None:
    handle = await broker.subscribe("hook", "orders", push={"url": URL})
    with pytest.raises(PreconditionFailed, match="cannot be pulled"):
        await handle.pull()


async def test_over_tcp_the_verbs_are_the_same(settings: Settings, receiver: ReceiverProcess) -> None:
    async with await Broker.open(settings) as embedded:
        with bind(parse_address("127.0.0.1:0")) as bound:
            server = await TcpServer.start(embedded, bound)
            try:
                async with sparrow.aconnect(f"sparrow://{server.address}") as broker:
                    handle = await broker.subscribe("hook", "orders", push={"url": receiver.url})
                    (old,) = await handle.push_secrets()
                    new = await handle.rotate_secret(overlap_s=60)
                    await broker.publish("orders", b"1")
                    await until(receiver.seen)
                    (seen,) = receiver.seen()
                    webhooks.verify(old, seen.headers, seen.body)
                    webhooks.verify(new, seen.headers, seen.body)

                    async def is_counted() -> bool:
                        return (await handle.push_state()).delivered == 1

                    await until(is_counted)
                    assert handle.policy.push is not None
                    with pytest.raises(PreconditionFailed, match="cannot be pulled"):
                        await handle.pull()
            finally:
                await server.close()


def test_blocking_code_has_the_same_verbs(tmp_path: Path) -> None:
    with sparrow.open(tmp_path / "data") as broker:
        handle = broker.subscribe("hook", "orders", push={"url": URL})
        assert handle.push_secrets()[0] != handle.rotate_secret(overlap_s=60)
        assert handle.push_state().secrets == 2


def test_nothing_of_http_is_loaded_for_a_broker_that_does_not_push(tmp_path: Path) -> None:
    code = (
        "import sys, sparrow\n"
        "with sparrow.open(sys.argv[1]) as broker:\n"
        "    broker.subscribe('s', 'orders')\n"
        "    assert 'aiohttp' not in sys.modules\n"
        "    broker.subscribe('hook', 'orders', push={'url': 'https://example.com/'})\n"
        "    assert 'aiohttp' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "data")], check=True)


# Policies and settings.


@pytest.mark.parametrize(
    "push",
    [
        {},
        {"url": URL, "colour": "red"},
        {"url": 5},
        {"url": URL, "max_concurrency": 0},
        {"url": URL, "max_concurrency": 1001},
        {"url": URL, "max_concurrency": 1.5},
        {"url": URL, "timeout_s": 0},
        {"url": URL, "timeout_s": 301},
        {"url": URL, "timeout_s": float("nan")},
        {"url": URL, "rate_per_s": 0},
        {"url": URL, "rate_per_s": -1},
        {"url": URL, "format": "xml"},
        {"url": URL, "headers": {"Authorization": "Bearer x"}},
        {"url": URL, "headers": {"Cookie": "a=b"}},
        {"url": URL, "headers": {"webhook-id": "1"}},
        {"url": URL, "headers": {"X-PubSub-Attempt": "1"}},
        {"url": URL, "headers": {"Host": "elsewhere"}},
        {"url": URL, "headers": {"Transfer-Encoding": "chunked"}},
        {"url": URL, "headers": {"X-A": "1\r\nX-B: 2"}},
        {"url": URL, "headers": {"X A": "1"}},
        {"url": URL, "headers": {"X-A": "ä"}},
        {"url": URL, "headers": {f"X-{n}": "1" for n in range(21)}},
        URL,
        [URL],
    ],
)
def test_a_push_policy_that_cannot_work_is_refused(push: Any) -> None:
    with pytest.raises(InvalidArgument):
        parse_policy({"push": push})


@pytest.mark.parametrize(
    "options",
    [
        {"guarantee": "at_most_once"},
        {"group": {"mode": "partitioned"}},
        {"ordering": "key", "key_window": 2},
    ],
)
def test_what_contradicts_push_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="push"):
        parse_policy({**options, "push": {"url": URL}})


def test_push_may_be_changed_in_part_and_taken_away() -> None:
    policy = parse_policy({"push": {"url": URL, "max_concurrency": 7}})
    policy = parse_policy({"push": {"timeout_s": 5}}, policy)
    assert policy.push is not None
    assert (policy.push.url, policy.push.max_concurrency, policy.push.timeout_s) == (URL, 7, 5)
    assert parse_policy({"filter": ""}, policy).push == policy.push
    assert parse_policy({"push": None}, policy).push is None
    assert parse_push_policy({"url": URL}).timeout_s == 30


def test_a_policy_from_before_push_still_loads() -> None:
    stored = msgspec.to_builtins(SubscriptionPolicy())
    del stored["push"]
    assert msgspec.json.decode(msgspec.json.encode(stored), type=SubscriptionPolicy) == SubscriptionPolicy()


def test_networks_and_ports_are_read_from_settings() -> None:
    settings = parse({"push": {"allow_networks": "10.0.0.0/8,::1/128", "ports": "443, 8000-8002"}}).settings
    assert [str(network) for network in parse_networks(settings.push.allow_networks)] == [
        "10.0.0.0/8",
        "::1/128",
    ]
    assert parse_ports(settings.push.ports) == (range(443, 444), range(8000, 8003))


@pytest.mark.parametrize(
    "push",
    [
        {"allow_networks": "10.0.0.1/8"},
        {"allow_networks": "home"},
        {"ports": "0"},
        {"ports": "9-2"},
        {"ports": "70000"},
        {"ports": "http"},
        {"breaker_wait_s": 10.0, "breaker_wait_max_s": 1.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(push: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="push"):
        parse({"push": push})
