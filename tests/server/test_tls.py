"""TLS on every listener, with and without certificates of clients."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.model import settings as parsing
from sparrow.model.errors import ConnectionLost, InvalidSettings
from sparrow.model.settings import Address, ServerSettings, Settings
from sparrow.server.http import HttpServer, bind, build
from sparrow.server.tcp import TcpServer
from sparrow.server.tls import tls_context

from .certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def server_pair(authority: Authority) -> Pair:
    return authority.sign("server")


@pytest.fixture(scope="module")
def client_pair(authority: Authority) -> Pair:
    return authority.sign("client")


@asynccontextmanager
async def serving(path: Path, server: ServerSettings) -> AsyncIterator[tuple[str, str]]:
    """The URLs of both listeners."""
    settings = Settings(data=str(path / "data"), server=server)
    async with await Broker.open(settings) as broker:
        tcp = await TcpServer.start(broker, bind(Address("127.0.0.1", 0)), server)
        http = await HttpServer.start(build(broker), bind(Address("127.0.0.1", 0)), tls_context(server))
        try:
            yield f"sparrows://{tcp.address}", f"https://{http.address}"
        finally:
            await http.close()
            await tcp.close()


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


async def probe(url: str, context: ssl.SSLContext | bool) -> int:
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(f"{url}/health/live")).status_code


async def test_one_certificate_serves_every_listener(
    tmp_path: Path, authority: Authority, server_pair: Pair
) -> None:
    server = ServerSettings(tls_certificate=server_pair.certificate, tls_key=server_pair.key)
    async with serving(tmp_path, server) as (tcp, http):
        assert await probe(http, trusting(authority)) == 200
        with pytest.raises(httpx.ConnectError):
            await probe(http, True)
        with pytest.raises(httpx.HTTPError):
            await probe(http.replace("https:", "http:"), True)
        async with sparrow.aconnect(tcp, tls=trusting(authority)) as broker:
            await broker.create_topic("t")


async def test_with_a_client_authority_nobody_comes_in_without_a_certificate_of_it(
    tmp_path: Path, authority: Authority, server_pair: Pair, client_pair: Pair
) -> None:
    stranger = Authority(tmp_path / "strangers", "strangers").sign("stranger")
    server = ServerSettings(
        tls_certificate=server_pair.certificate, tls_key=server_pair.key, tls_client_ca=authority.certificate
    )
    async with serving(tmp_path, server) as (tcp, http):
        assert await probe(http, trusting(authority, client_pair)) == 200
        async with sparrow.aconnect(tcp, tls=trusting(authority, client_pair)) as broker:
            await broker.create_topic("t")
        for pair in (None, stranger):
            with pytest.raises(httpx.HTTPError):
                await probe(http, trusting(authority, pair))
            with pytest.raises(ConnectionLost):
                async with sparrow.aconnect(tcp, tls=trusting(authority, pair), connect_s=0.1):
                    pass


def test_a_client_authority_that_is_none_is_a_wrong_setting(tmp_path: Path, server_pair: Pair) -> None:
    for wrong in (tmp_path / "none.pem", Path(server_pair.key)):
        server = ServerSettings(
            tls_certificate=server_pair.certificate, tls_key=server_pair.key, tls_client_ca=str(wrong)
        )
        with pytest.raises(InvalidSettings, match="tls_client_ca"):
            tls_context(server)


def test_a_client_authority_needs_a_certificate_of_the_server() -> None:
    with pytest.raises(InvalidSettings, match="tls_client_ca"):
        parsing.parse({"server": {"tls_client_ca": "ca.pem"}})
