"""Web pages: none may use the API from a browser unless it is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from sparrow.broker.broker import Broker
from sparrow.model.access import AccessSettings
from sparrow.model.settings import Address, Settings
from sparrow.server.http import HttpServer, bind, build

PAGE = "https://ops.example"
ASKING = {"Origin": PAGE, "Access-Control-Request-Method": "PUT"}


@asynccontextmanager
async def serving(data: Path, origins: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(data=str(data), access=AccessSettings(cors_origins=origins))
    async with await Broker.open(settings) as broker:
        server = await HttpServer.start(build(broker), bind(Address("127.0.0.1", 0)))
        try:
            async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=30) as http:
                yield http
        finally:
            await server.close()


async def test_no_page_is_told_anything_by_default(served: Any) -> None:
    for method in ("GET", "OPTIONS"):
        answer = await served.http.request(method, "/api/v1/topics", headers=ASKING)
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_that_is_named_may_ask_and_read_the_headers_of_pages(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{PAGE}/, https://other.example") as http:
        asked = await http.options("/api/v1/topics", headers=ASKING)
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "PUT" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        answer = await http.get("/api/v1/topics", headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Total-Count" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "Origin"
        refused = await http.get("/api/v1/topics/no", headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (404, PAGE)
        stranger = await http.get("/api/v1/topics", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


async def test_all_pages_may_when_the_setting_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, "*") as http:
        answer = await http.get("/health/live", headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
