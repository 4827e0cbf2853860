"""The guard before every HTTP route, over real HTTP on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.settings import Address, Settings
from sparrow.server.api.guard import principal_of
from sparrow.server.api.routing import Answer, Request, get
from sparrow.server.http import HttpServer, bind, build, compose


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[tuple[Broker, httpx.AsyncClient]]:
    async with await Broker.open(Settings(data=str(path / "data"))) as broker:
        server = await HttpServer.start(build(broker), bind(Address("127.0.0.1", 0)))
        try:
            async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
                yield broker, client
        finally:
            await server.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_without_tokens_everybody_is_let_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        assert (await client.get("/no-such-path")).status_code == 404
        assert (await client.get("/no-such-path", headers=bearer("x"))).status_code == 404


async def test_with_tokens_nobody_unknown_is_let_in_also_where_there_is_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, client):
        token = (await broker.create_token("root", role="admin")).text
        for headers in (
            {},
            bearer("wrong"),
            bearer(token[:-1]),
            {"Authorization": token},
            {"Authorization": f"Basic {token}"},
            {"Authorization": "Bearer"},
            {"Authorization": b"\xff\xfe"},
        ):
            for path in ("/no-such-path", "/", "/v1/topics", "/api/v1/topics", "/metrics", "/health/deep"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401, (path, headers)
                error = answer.json()["error"]
                assert error["code"] == "UNAUTHENTICATED"
                assert error["request_id"] == answer.headers["X-Request-Id"]
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert token not in answer.text
        assert (await client.get("/no-such-path", headers=bearer(token))).status_code == 404
        lower = {"Authorization": f"bearer {token}"}
        assert (await client.get("/no-such-path", headers=lower)).status_code == 404


async def test_two_authorization_headers_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, client):
        token = (await broker.create_token("root", role="admin")).text
        twice = [("Authorization", f"Bearer {token}"), ("Authorization", "Bearer other")]
        assert (await client.get("/no-such-path", headers=twice)).status_code == 401


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health/live/"])
async def test_probes_stay_open(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as (broker, client):
        await broker.create_token("root", role="admin")
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/health/live/../../v1/topics", "//health/live", "/health/live%2f..%2fx"])
async def test_a_path_that_only_looks_open_is_not(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as (broker, client):
        await broker.create_token("root", role="admin")
        raw = client.base_url.copy_with(raw_path=path.encode())
        assert (await client.get(raw)).status_code in (401, 404)


async def test_a_token_is_refused_from_the_moment_it_is_revoked(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, client):
        await broker.create_token("root", role="admin")
        token = (await broker.create_token("viewer", role="read-only")).text
        assert (await client.get("/no-such-path", headers=bearer(token))).status_code == 404
        await broker.revoke_token("viewer")
        assert (await client.get("/no-such-path", headers=bearer(token))).status_code == 401


async def test_a_handler_finds_who_asks(tmp_path: Path) -> None:
    @get("/who")
    async def who(request: Request) -> Answer:
        found = principal_of(request.scope)
        return Answer((found.name if found else "nobody").encode(), 200)

    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        app = compose([who], Clock())
        app.state.access = broker.access
        server = await HttpServer.start(app, bind(Address("127.0.0.1", 0)))
        try:
            async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
                assert (await client.get("/who")).text == "anonymous"
                token = (await broker.create_token("root", role="admin")).text
                assert (await client.get("/who", headers=bearer(token))).text == "root"
        finally:
            await server.close()
