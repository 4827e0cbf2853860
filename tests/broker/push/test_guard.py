"""Hostile URLs, addresses and name servers: the guard refuses them before anything is sent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.push.guard import Guard, GuardedConnector, meanings
from sparrow.broker.push.sender import Sender, make_target
from sparrow.kernel.push import Answer
from sparrow.model.errors import EndpointRefused, InvalidArgument
from sparrow.model.push import PushPolicy, PushSettings, parse_push_policy

from .receiving import ReceiverProcess, until

HOSTILE_URLS = [
    "http://127.0.0.1/",
    "http://127.1.2.3/",
    "http://127.0.0.1:8080/admin",
    "http://0.0.0.0/",
    "http://0.1.2.3/",
    "http://10.0.0.1/",
    "http://10.255.255.255/",
    "http://172.16.0.1/",
    "http://172.31.255.254/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.170.2/v2/credentials",
    "http://100.64.0.1/",
    "http://100.100.100.200/latest/meta-data/",
    "http://168.63.129.16/metadata",
    "http://192.0.0.192/opc/v1/",
    "http://192.0.2.7/",
    "http://192.88.99.1/",
    "http://198.18.0.1/",
    "http://198.51.100.9/",
    "http://203.0.113.5/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::ffff:169.254.169.254]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[64:ff9b:1::a00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[2002:a9fe:a9fe::1]/",
    "http://[2001:0:53aa:64c:0:0:80ff:fffe]/",
    "http://[2001:db8::1]/",
    "http://[3fff::1]/",
    "http://[5f00::1]/",
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[fec0::1]/",
    "http://[fc00::1]/",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://[ff02::1]/",
    "http://[100::1]/",
    "http://[2606:4700::5efe:10.0.0.1]/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.0.1./",
    "http://017700000001/",
    "http://1.2.3.4:22/",
    "http://1.2.3.4:25/",
    "https://1.2.3.4:636/",
    "http://user:password@1.2.3.4/",
    "http://127.0.0.1@evil.example/",
    "http://1.2.3.4#@127.0.0.1/",
    "http://1.2.3.4\\@127.0.0.1/",
    "http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/",
    "http:///nowhere",
    "http://",
    "//1.2.3.4/",
    "1.2.3.4",
    "ftp://1.2.3.4/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_SET",
    "javascript:alert(1)",
    "http://1.2.3.4:0/",
    "http://1.2.3.4:99999/",
    "http://1.2.3.4:http/",
    "http://1.2.3.4/a b",
    "http://1.2.3.4/\r\nX-Evil: 1",
    "http://[::1",
    "http://" + "a" * 3000 + ".example/",
]

HOSTILE_ANSWERS = [
    ["127.0.0.1"],
    ["10.1.2.3"],
    ["172.20.0.1"],
    ["192.168.0.10"],
    ["169.254.169.254"],
    ["100.127.255.255"],
    ["0.0.0.0"],
    ["198.19.255.255"],
    ["239.255.255.250"],
    ["::1"],
    ["::"],
    ["fe80::1%lo"],
    ["fd12:3456::1"],
    ["::ffff:10.0.0.1"],
    ["64:ff9b::c0a8:1"],
    ["2002:c0a8:101::1"],
    ["2001::1"],
    ["ff05::2"],
    ["10.0.0.1", "127.0.0.1", "::1"],
    [],
]

FRIENDLY = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.216.34",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "198.17.255.255",
    "198.20.0.1",
    "223.255.255.254",
    "2606:4700:4700::1111",
    "2a00:1450:4001:82b::200e",
    "64:ff9b::808:808",
    "::ffff:8.8.8.8",
]


def guard(**settings: Any) -> Guard:
    return Guard(PushSettings(**settings))


def test_the_tables_are_long_enough_to_mean_something() -> None:
    assert len(HOSTILE_URLS) + len(HOSTILE_ANSWERS) >= 90


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_a_hostile_url_is_refused_when_the_subscription_is_made(url: str) -> None:
    with pytest.raises((EndpointRefused, InvalidArgument)):
        guard().check_url(parse_push_policy({"url": url}).url)


@pytest.mark.parametrize("address", FRIENDLY)
def test_a_public_address_is_allowed(address: str) -> None:
    guard().check_address(address)
    guard().check_url(f"http://[{address}]/" if ":" in address else f"http://{address}/")


@pytest.mark.parametrize(
    "url", ["https://example.com/hook?x=1", "http://hooks.example.com:8080/", "http://xn--e1afmkfd.example/"]
)
def test_an_ordinary_url_is_allowed(url: str) -> None:
    guard().check_url(parse_push_policy({"url": url}).url)


async def _try(answers: Sequence[str], allow: str = "") -> tuple[Answer, str, list[Any]]:
    """Sends a webhook to a name that leads to these addresses; also what was asked of the name server."""
    asked: list[str] = []

    async def look_up(host: str, port: int) -> Sequence[tuple[int, str]]:
        asked.append(host)
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in answers]

    sender = Sender(guard(allow_networks=allow), look_up)
    try:
        target = make_target(PushPolicy(url="http://receiver.example:8080/hook", timeout_s=5.0))
        reply = await sender.send(target, b"{}", {}, 0)
    finally:
        await sender.close()
    return reply.answer, reply.reason, asked


@pytest.mark.parametrize("answers", HOSTILE_ANSWERS, ids=lambda answers: ",".join(answers) or "nothing")
async def test_a_name_that_leads_to_a_hostile_address_is_never_connected(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: made.append(address))
    answer, reason, asked = await _try(answers)
    assert asked == ["receiver.example"]
    assert answer is Answer.UNREACHABLE
    assert ("may not reach" in reason) == bool(answers)
    assert made == []


async def test_of_several_addresses_only_the_allowed_ones_are_tried(receiver: ReceiverProcess) -> None:
    asked = []

    async def look_up(host: str, port: int) -> Sequence[tuple[int, str]]:
        asked.append(host)
        return [(socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]

    sender = Sender(guard(allow_networks="127.0.0.1/32"), look_up)
    target = make_target(PushPolicy(url=f"http://receiver.example:{receiver.port}/hook"))
    reply = await sender.send(target, b"{}", {}, 0)
    await sender.close()
    assert reply.answer is Answer.ACCEPTED
    await until(receiver.seen)


async def test_a_name_that_is_bound_anew_between_two_connections_is_refused(
    receiver: ReceiverProcess,
) -> None:
    """The first answer is allowed, the next is not: what counts is the connection at hand."""
    answers = iter(["127.0.0.1", "127.0.0.2"])

    async def look_up(host: str, port: int) -> Sequence[tuple[int, str]]:
        return [(socket.AF_INET, next(answers))]

    checked = guard(allow_networks="127.0.0.1/32")
    sender = Sender(checked, look_up)
    target = make_target(PushPolicy(url=f"http://receiver.example:{receiver.port}/hook"))
    assert (await sender.send(target, b"{}", {}, 0)).answer is Answer.ACCEPTED
    connector = sender._session.connector
    assert isinstance(connector, GuardedConnector)
    connector.clear_dns_cache()
    await asyncio.gather(
        *[proto.closed for protos in connector._conns.values() for proto, _ in protos if not proto.close()]
    )
    connector._conns.clear()
    reply = await sender.send(target, b"{}", {}, 0)
    await sender.close()
    assert (reply.answer, len(receiver.seen())) == (Answer.UNREACHABLE, 1)


async def test_an_address_that_slipped_past_the_resolver_is_stopped_at_the_socket(
    receiver: ReceiverProcess,
) -> None:
    """A literal in the URL never meets the resolver."""
    sender = Sender(guard())
    reply = await sender.send(make_target(PushPolicy(url=receiver.url)), b"{}", {}, 0)
    await sender.close()
    assert reply.answer is Answer.UNREACHABLE
    assert "may not reach" in reply.reason
    assert receiver.seen() == []


async def test_a_connection_whose_peer_turns_out_to_be_another_is_dropped_before_anything_is_sent(
    receiver: ReceiverProcess,
) -> None:
    class Blind(Guard):
        """Lets every socket through, so that only the last check is left."""

        def make_socket(self, info: Any) -> socket.socket:
            made = socket.socket(family=info[0], type=info[1])
            made.setblocking(False)
            return made

    sender = Sender(Blind(PushSettings()))
    reply = await sender.send(make_target(PushPolicy(url=receiver.url)), b"{}", {}, 0)
    await sender.close()
    assert reply.answer is Answer.UNREACHABLE
    assert receiver.seen() == []


async def test_a_port_outside_the_list_is_stopped_at_the_socket_too() -> None:
    checked = guard(allow_networks="127.0.0.0/8", ports="443")
    with pytest.raises(EndpointRefused, match="port 22"):
        checked.make_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 22)))


async def test_proxies_of_the_environment_are_ignored(
    receiver: ReceiverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:9")
    sender = Sender(guard(allow_networks="127.0.0.0/8"))
    reply = await sender.send(make_target(PushPolicy(url=receiver.url)), b"{}", {}, 0)
    await sender.close()
    assert reply.answer is Answer.ACCEPTED


async def test_a_redirect_is_a_failure_and_is_not_followed(receiver: ReceiverProcess) -> None:
    await receiver.mode(status=302, headers={"Location": f"{receiver.url}/elsewhere"})
    sender = Sender(guard(allow_networks="127.0.0.0/8"))
    reply = await sender.send(make_target(PushPolicy(url=receiver.url)), b"{}", {}, 0)
    await sender.close()
    assert (reply.answer, reply.status) == (Answer.REJECTED, 302)
    assert [each.path for each in receiver.seen()] == ["/hook"]


def test_an_operator_may_allow_a_network_and_no_more_than_that() -> None:
    checked = guard(allow_networks="10.1.0.0/16, fd00:1::/32, 127.0.0.1/32")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00:1::5", "127.0.0.1"):
        checked.check_address(address)
    for address in ("10.2.0.1", "fd00:2::5", "127.0.0.2", "::1", "169.254.169.254"):
        with pytest.raises(EndpointRefused):
            checked.check_address(address)


def test_https_only_refuses_what_is_not() -> None:
    with pytest.raises(EndpointRefused, match="https"):
        guard(https_only=True).check_url("http://example.com/")
    guard(https_only=True).check_url("https://example.com/")
    with pytest.raises(InvalidArgument, match="https"):
        parse_push_policy({"url": "http://example.com/", "https_only": True})


def test_what_is_no_address_is_refused() -> None:
    for text in ("", "receiver.example", "1.2.3"):
        with pytest.raises(EndpointRefused):
            guard().check_address(text)


def test_an_address_with_another_inside_means_both() -> None:
    import ipaddress

    assert [str(each) for each in meanings(ipaddress.ip_address("2606:4700::5efe:a00:1"))] == [
        "2606:4700::5efe:a00:1",
        "10.0.0.1",
    ]


async def test_a_subscription_to_a_private_address_is_refused_and_leaves_nothing(tmp_path: Any) -> None:
    from sparrow.model.settings import Settings

    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        with pytest.raises(EndpointRefused):
            await broker.subscribe("hook", "orders", push={"url": "http://169.254.169.254/"})
        assert await broker.subscriptions() == []
        handle = await broker.subscribe("hook", "orders")
        with pytest.raises(EndpointRefused):
            await handle.update(push={"url": "http://10.0.0.1/"})
        assert handle.policy.push is None
