"""One suite over every surface: the same tests run over an embedded broker, over TCP and over HTTP."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import sparrow
from sparrow.model.settings import MIB, JournalSettings, parse_address
from sparrow.server.http import HttpServer, bind, build
from sparrow.server.tcp import TcpServer

from .overhttp import OverHttp

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


@pytest.fixture(params=["embedded", "tcp", "http"])
def surface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def broker(surface: str, tmp_path: Path) -> AsyncIterator[Any]:
    """A broker, reached in one of the ways."""
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as embedded:
        if surface == "embedded":
            yield embedded
            return
        with bind(parse_address("127.0.0.1:0")) as bound:
            if surface == "http":
                http = await HttpServer.start(build(embedded), bound)
                try:
                    async with httpx.AsyncClient(base_url=f"http://{http.address}", timeout=60) as client:
                        yield OverHttp(client)
                finally:
                    await http.close()
                return
            server = await TcpServer.start(embedded, bound)
            try:
                async with sparrow.aconnect(f"sparrow://{server.address}") as remote:
                    yield remote
            finally:
                await server.close()


async def told(value: Any) -> Any:
    """What is at hand in the same process, and has to be asked for over a network."""
    return await value if inspect.isawaitable(value) else value
