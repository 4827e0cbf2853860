"""What holds for every family: limits of requests, and one shape for everything that goes wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sparrow.model.errors import StorageFull
from sparrow.server import http
from sparrow.server.api import family
from tests.server.api.conftest import Served

LIMIT_S = 30
JSON = {"content-type": "application/json"}
FIELDS = {"code", "message", "details", "hint", "suggestions", "retryable", "request_id", "timestamp"}


async def ask_raw(served: Served, raw: bytes) -> tuple[int, dict[str, str], Any]:
    """The answer to bytes that need not be HTTP; the server closes the connection after it."""
    reader, writer = await asyncio.open_connection(served.server.address.host, served.server.address.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(LIMIT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(body)


def error_of(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == FIELDS
    assert body["error"]["suggestions"] == [body["error"]["hint"]]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("content", "headers", "status", "named"),
    [
        (b"", JSON, 400, "empty"),
        (b"", {}, 400, "empty"),
        (b"{", JSON, 400, "not JSON"),
        (b'{"name": "a"} x', JSON, 400, "not JSON"),
        (b'{"name": "\xff"}', JSON, 400, "UTF-8"),
        (b'{"flow": ' + b'{"a":' * 100_000, JSON, 400, "nested"),
        (b'{"flow": ' + b"[" * 100_000, JSON, 400, ""),
        (b"[]", JSON, 400, "array"),
        (b"null", JSON, 400, "null"),
        (b"<a/>", {"content-type": "application/xml"}, 415, "application/xml"),
        (b"name=a", {"content-type": "application/x-www-form-urlencoded"}, 415, "form"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_with_the_reason(
    served: Served, content: bytes, headers: dict[str, str], status: int, named: str
) -> None:
    answer = await served.http.post("/v1/topics", content=content, headers=headers)
    assert answer.status_code == status
    assert named in error_of(answer.json())["message"]


async def test_a_body_over_the_limit_is_413_whether_or_not_it_says_its_size(served: Served) -> None:
    size = family.BODY_BYTES_MAX + 1

    async def pieces() -> Any:
        for _ in range(size // 65536 + 1):
            yield b" " * 65536

    for content in (b" " * size, pieces()):
        answer = await served.http.post("/v1/topics", content=content, headers=JSON)
        assert answer.status_code == 413
        assert error_of(answer.json())["details"] == {"bytes_max": family.BODY_BYTES_MAX}
    assert (await served.http.get("/v1/topics")).status_code == 200


async def test_a_body_that_does_not_come_is_408(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.2)
    raw = b"POST /v1/topics HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{"
    status, headers, body = await ask_raw(served, raw)
    assert (status, headers["connection"]) == (408, "close")
    assert error_of(body)["code"] == "REQUEST_TIMEOUT"


@pytest.mark.parametrize("raw", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"])
async def test_a_head_that_does_not_come_is_408(
    served: Served, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)
    status, _, body = await ask_raw(served, raw)
    assert (status, error_of(body)["code"]) == (408, "REQUEST_TIMEOUT")


async def test_a_body_may_take_its_time_within_the_limit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)

    async def slowly() -> Any:
        for piece in (b'{"name"', b': "slow', b'"}'):
            await asyncio.sleep(0.15)
            yield piece

    answer = await served.http.post("/v1/topics", content=slowly(), headers=JSON)
    assert answer.status_code == 201


async def test_a_head_over_the_limit_is_431(served: Served) -> None:
    raw = b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * (http.HEAD_BYTES_MAX + 1)
    status, headers, body = await ask_raw(served, raw)
    assert (status, error_of(body)["code"]) == (431, "HEADERS_TOO_LARGE")
    assert headers["x-request-id"] == body["error"]["request_id"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/topics HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_400_in_the_same_shape(served: Served, raw: bytes) -> None:
    status, headers, body = await ask_raw(served, raw)
    assert (status, headers["connection"]) == (400, "close")
    assert error_of(body)["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "NOT_FOUND"),
        ("GET", "/v1/topics//messages", 404, "NOT_FOUND"),
        ("GET", "/v1/topics/%ff", 400, "INVALID_NAME"),
        ("GET", "/v1/topics/none", 404, "TOPIC_NOT_FOUND"),
        ("PUT", "/v1/topics", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/v1/topics?limit=0", 400, "INVALID_ARGUMENT"),
        ("GET", "/v1/topics?limit=1&limit=2", 400, "INVALID_ARGUMENT"),
        ("GET", "/v1/topics?limt=1", 400, "INVALID_ARGUMENT"),
        ("GET", "/v1/topics?limit=%ff", 400, "INVALID_ARGUMENT"),
        ("GET", "/v1/topics?" + "a=1&" * 200, 400, "INVALID_ARGUMENT"),
    ],
)
async def test_a_request_that_is_wrong_is_refused_in_the_same_shape(
    served: Served, method: str, path: str, status: int, code: str
) -> None:
    answer = await served.http.request(method, path)
    assert (answer.status_code, error_of(answer.json())["code"]) == (status, code)
    if status == 405:
        assert answer.headers["allow"] == "GET, OPTIONS, POST"


async def test_a_bug_is_500_without_its_insides(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> list[Any]:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(served.broker, "topics", broken)
    answer = await served.http.get("/v1/topics")
    assert (answer.status_code, error_of(answer.json())["code"]) == (500, "SPARROW_ERROR")
    assert "secret" not in answer.text


async def test_a_full_disk_is_507_and_reading_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.broker.create_topic("orders")
    await served.broker.subscribe("billing", "orders")
    assert (await served.http.post("/v1/topics/orders/messages", json={"data": 1})).status_code == 202

    async def full(*args: Any, **options: Any) -> Any:
        raise StorageFull("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(served.broker, "publish", full)
        answer = await served.http.post("/v1/topics/orders/messages", json={"data": 2})
        assert (answer.status_code, error_of(answer.json())["code"]) == (507, "STORAGE_FULL")
        assert answer.json()["error"]["retryable"] is True
        pulled = await served.http.post("/v1/subscriptions/billing/pull")
        assert len(pulled.json()["messages"]) == 1
    assert (await served.http.post("/v1/topics/orders/messages", json={"data": 3})).status_code == 202


async def test_what_may_be_done_follows_from_the_token(served: Served) -> None:
    await served.broker.create_topic("orders")
    await served.broker.create_topic("secrets")
    await served.broker.subscribe("billing", "orders")
    await served.broker.create_token("root", role="admin")
    tokens = {
        role: (await served.broker.create_token(role, role=role, topics="orders")).text
        for role in ("publisher", "subscriber", "read-only")
    }

    async def status(role: str, method: str, path: str, body: Any = None) -> int:
        headers = {"authorization": f"Bearer {tokens[role]}"}
        return (await served.http.request(method, path, json=body, headers=headers)).status_code

    message = {"data": 1}
    assert (await served.http.get("/v1/topics")).status_code == 401
    assert await status("publisher", "POST", "/v1/topics/orders/messages", message) == 202
    assert await status("publisher", "POST", "/v1/topics/secrets/messages", message) == 403
    assert await status("publisher", "POST", "/v1/subscriptions/billing/pull") == 403
    assert await status("subscriber", "POST", "/v1/subscriptions/billing/pull") == 200
    assert await status("subscriber", "POST", "/v1/topics/orders/messages", message) == 403
    wanted = {"name": "spy", "topic_id": "secrets"}
    assert await status("subscriber", "POST", "/v1/subscriptions", wanted) == 403
    wanted = {"name": "leak", "topic_id": "orders", "dead_letter_topic_id": "secrets"}
    assert await status("subscriber", "POST", "/v1/subscriptions", wanted) == 403
    assert await status("read-only", "GET", "/v1/subscriptions/billing") == 200
    assert await status("read-only", "DELETE", "/v1/subscriptions/billing") == 403
    assert await status("read-only", "POST", "/v1/topics", {"name": "more"}) == 403
    headers = {"authorization": f"Bearer {tokens['read-only']}"}
    shown = (await served.http.get("/v1/topics", headers=headers)).json()["topics"]
    assert [topic["name"] for topic in shown] == ["orders"]
    entries = [(each.who, each.action, each.outcome) for each in await served.broker.audit_log()]
    assert ("read-only", "create_topic", "PERMISSION_DENIED") in entries
