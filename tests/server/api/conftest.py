"""A broker behind a real HTTP server, on the loop that servers run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest_asyncio
import uvloop

from sparrow.broker.broker import Broker
from sparrow.model.settings import Address, Settings
from sparrow.server.http import HttpServer, bind, build


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


class Served(NamedTuple):
    """A broker, its server, and somebody who asks it."""

    broker: Broker
    server: HttpServer
    http: httpx.AsyncClient


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        server = await HttpServer.start(build(broker), bind(Address("127.0.0.1", 0)))
        try:
            async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=30) as client:
                yield Served(broker, server, client)
        finally:
            await server.close()
