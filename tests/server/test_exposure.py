"""Listening beyond loopback."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from sparrow.broker.broker import Broker
from sparrow.model.access import AccessSettings
from sparrow.model.errors import InvalidSettings, Unauthenticated
from sparrow.model.settings import Address, ServerSettings, Settings
from sparrow.server import exposure
from sparrow.server.http import bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_this_machine_only(host: str) -> None:
    assert exposure.is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.1", "fe80::1%eth0", "::ffff:0.0.0.0"]
)
def test_other_addresses_are_reached_by_others(host: str) -> None:
    assert not exposure.is_loopback(host)


async def check(path: Path, *hosts: str, has_token: bool = False, **settings: object) -> Broker:
    chosen = Settings(data=str(path / "data"), **settings)  # type: ignore[arg-type]
    async with await Broker.open(chosen) as broker:
        if has_token:
            await broker.create_token("root", role="admin")
        with ExitStack() as stack:
            listeners: dict[str, socket.socket] = {
                f"listener{number}": stack.enter_context(bind(Address(host, 0)))
                for number, host in enumerate(hosts)
            }
            exposure.check(listeners, chosen, broker.access)
        return broker


async def test_a_broker_without_tokens_does_not_listen_beyond_loopback(tmp_path: Path) -> None:
    await check(tmp_path, "127.0.0.1")
    with pytest.raises(InvalidSettings) as refused:
        await check(tmp_path, "127.0.0.1", "0.0.0.0")
    assert "listener1 0.0.0.0" in refused.value.message
    assert "listener0" not in refused.value.message
    assert "token create" in refused.value.hint
    assert "--insecure" in refused.value.hint


async def test_it_does_when_told_to_and_then_everybody_may_do_everything(tmp_path: Path) -> None:
    broker = await check(tmp_path, "0.0.0.0", access=AccessSettings(insecure=True))
    assert not broker.access.is_required


async def test_it_does_with_tokens_which_then_stay_wanted(tmp_path: Path) -> None:
    await check(tmp_path, "0.0.0.0", server=ServerSettings(tokens="ops:secret"))
    broker = await check(tmp_path, "0.0.0.0", has_token=True)
    assert broker.access.is_required
    with pytest.raises(Unauthenticated):
        broker.access.authenticate(None)


async def test_certificates_of_clients_guard_it_too(tmp_path: Path) -> None:
    server = ServerSettings(tls_certificate="a.pem", tls_client_ca="b.pem")
    await check(tmp_path, "0.0.0.0", server=server)
