"""A token without rights gets nothing from any HTTP route, whatever routes there are."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparrow.broker.broker import Broker
from sparrow.model.settings import Address, Settings
from sparrow.server.api.routing import App
from sparrow.server.http import HttpServer, bind, build

OPEN = {"/health/live", "/health/ready", "/openapi.json", "/docs"}
HIDDEN = {"topic": "hidden.topic", "name": "hidden.topic", "subscription": "hiddensub", "group": "hiddensub"}
"""What the parameters of paths stand for; whatever else there is gets the name of the subscription."""
BODIES: dict[str, list[dict[str, Any]]] = {
    "POST /publish": [{"topic": "hidden.topic", "message": {"payload": "x"}}],
    "POST /topics": [{"name": "hidden.new"}],
    "POST /v1/topics": [{"name": "hidden.new"}],
    "POST /api/v1/topics": [{"name": "hidden.new"}],
    "PUT /api/v1/admin/log-level": [{"level": "debug"}],
    "POST /v1/subscriptions": [
        {"subscription_id": "mine", "topic_id": "hidden.topic"},
        {"name": "mine", "topic_id": "hidden.topic", "dead_letter_topic_id": "hidden.topic"},
    ],
    "POST /v1/subscriptions/{subscription:str}/acknowledge": [{"ack_ids": ["x"]}],
    "POST /v1/subscriptions/{subscription:str}/nack": [{"ack_ids": ["x"]}],
    "POST /v1/subscriptions/{subscription:str}/extend": [{"ack_ids": ["x"], "seconds": 5}],
    "POST /v1/subscriptions/{subscription:str}/seek": [{"position": "earliest"}],
    "POST /v1/subscriptions/{subscription:str}/snapshots": [{"name": "mine"}],
    "POST /groups/{group:str}/join": [
        {"consumer_id": "c", "topic": "hidden.topic", "topics": ["hidden.topic"]}
    ],
}
QUERIES = {
    "DELETE /api/v1/topics/{topic:str}": "?force=true",
    "GET /api/v1/messages/dead-letters": "?subscription=hiddensub",
}
REFUSED = {401, 403}
UNREAD = {400, 404, 405, 409, 415, 422}
"""Also no answer; the broker did not come to ask who wants to know."""


class Scan:
    """A broker with something to hide, and a client whose token allows nothing of it."""

    def __init__(self, broker: Broker, app: App, client: httpx.AsyncClient) -> None:
        self.broker = broker
        self.app = app
        self.client = client

    def routes(self) -> list[tuple[str, str]]:
        found = [(route.path, getattr(route, "methods", ())) for route in self.app.routes]
        return sorted((path, method) for path, methods in found for method in methods if method != "OPTIONS")

    async def ask(self, path: str, method: str, body: dict[str, Any] | None = None) -> httpx.Response:
        name = f"{method} {path}"
        filled = re.sub(r"\{(\w+)[^}]*\}", lambda found: HIDDEN.get(found[1], "hiddensub"), path)
        return await self.client.request(method, filled + QUERIES.get(name, ""), json=body)

    async def state(self) -> str:
        topics, subscriptions = await self.broker.topics(), await self.broker.subscriptions()
        bounds = await self.broker.bounds("hidden.topic")
        return repr(
            (topics, subscriptions, bounds, await self.broker.snapshots(), await self.broker.tokens())
        )


@asynccontextmanager
async def scanning(path: Path) -> AsyncIterator[Scan]:
    async with await Broker.open(Settings(data=str(path / "data"))) as broker:
        await broker.create_topic("hidden.topic")
        await broker.subscribe("hiddensub", "hidden.topic", start="earliest", dead_letter_topic="hidden.dead")
        await broker.publish("hidden.topic", b"hiddendata")
        await broker.create_token("root", role="admin")
        token = (await broker.create_token("weak", scopes=["publish:elsewhere"])).text
        app = build(broker)
        server = await HttpServer.start(app, bind(Address("127.0.0.1", 0)))
        try:
            headers = {"Authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(base_url=f"http://{server.address}", headers=headers) as client:
                yield Scan(broker, app, client)
        finally:
            await server.close()


@pytest.fixture
async def scan(tmp_path: Path) -> AsyncIterator[Scan]:
    async with scanning(tmp_path) as found:
        yield found


async def test_no_route_answers_or_changes_anything_for_a_powerless_token(scan: Scan) -> None:
    before = await scan.state()
    routes = scan.routes()
    assert len(routes) > 20
    for path, method in routes:
        if path in OPEN:
            continue
        answer = await scan.ask(path, method, None if method in ("GET", "HEAD", "DELETE") else {})
        name = f"{method} {path}: {answer.status_code} {answer.text[:200]}"
        if answer.status_code in (200, 206):
            assert method == "GET", name
            assert "hidden" not in answer.text, name
        else:
            assert answer.status_code in REFUSED | UNREAD, name
    assert await scan.state() == before


async def test_no_route_does_what_a_powerless_token_asks_for_in_full(scan: Scan) -> None:
    before = await scan.state()
    names = {f"{method} {path}" for path, method in scan.routes()}
    for name in [*BODIES, *QUERIES]:
        if name in names:
            method, path = name.split(" ")
            for body in BODIES.get(name, [{}] if method != "GET" else [None]):
                answer = await scan.ask(path, method, body)
                assert answer.status_code in REFUSED | UNREAD, (name, answer.status_code, answer.text[:200])
    assert await scan.state() == before


async def test_an_unknown_token_gets_401_everywhere(scan: Scan) -> None:
    scan.client.headers["Authorization"] = "Bearer nobody"
    for path, method in scan.routes():
        if path not in OPEN:
            assert (await scan.ask(path, method)).status_code == 401, (method, path)
