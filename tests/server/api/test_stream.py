"""Server-sent events: messages as they come, credit, heartbeats, and resuming where a client was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from sparrow.server.api import stream as streams
from tests.server.api.conftest import Served

LIMIT_S = 30
URL = "/v1/subscriptions/billing/messages"


class Events:
    """What a client reads of a stream."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.last_id = ""
        self._lines = answer.aiter_lines()

    async def messages(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(LIMIT_S):
            while len(found) < count:
                line = await anext(self._lines)
                if line.startswith("id: "):
                    self.last_id = line[4:]
                elif line.startswith("data: "):
                    found.append(json.loads(line[6:]))
        return found

    async def line(self, start: str) -> str:
        async with asyncio.timeout(LIMIT_S):
            async for line in self._lines:
                if line.startswith(start):
                    return line
        raise AssertionError(f"the stream ended without {start!r}")

    async def rest(self) -> list[str]:
        async with asyncio.timeout(LIMIT_S):
            return [line async for line in self._lines]


@asynccontextmanager
async def streaming(served: Served, query: str = "", last_id: str = "") -> AsyncIterator[Events]:
    headers = {"last-event-id": last_id} if last_id else {}
    async with served.http.stream("GET", URL + query, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        yield Events(answer)


async def acknowledge(served: Served, messages: list[dict[str, Any]]) -> None:
    asked = {"ack_ids": [message["ack_id"] for message in messages]}
    answer = await served.http.post("/v1/subscriptions/billing/acknowledge", json=asked)
    assert answer.status_code == 204, answer.text


@pytest.fixture(autouse=True)
async def _billing(served: Served) -> None:
    await served.broker.create_topic("orders", partitions=2)
    await served.broker.subscribe("billing", "orders", ack_deadline_s=60)


async def publish(served: Served, count: int, start: int = 0) -> None:
    values = [b"%d" % number for number in range(start, start + count)]
    await served.broker.publish_batch("orders", values, keys=[f"k{n % 7}" for n in range(count)])


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    return sorted(message["data"] for message in messages)


async def test_a_stream_sends_what_is_there_and_what_comes(served: Served) -> None:
    await publish(served, 3)
    async with streaming(served) as events:
        assert numbers(await events.messages(3)) == [0, 1, 2]
        await publish(served, 2, start=3)
        assert numbers(await events.messages(2)) == [3, 4]


async def test_a_stream_ends_after_its_limit_and_all_of_it_can_be_acknowledged(served: Served) -> None:
    await publish(served, 2500)
    async with streaming(served, "?limit=2200&max_messages=5000") as events:
        found = await events.messages(2200)
        assert [line for line in await events.rest() if line] == []
    assert len(set(numbers(found))) == 2200
    await acknowledge(served, found)
    billing = await served.broker.subscription("billing")
    assert await billing.lag() == 300


async def test_a_stream_waits_for_acks_when_it_has_as_many_messages_as_it_may(served: Served) -> None:
    await publish(served, 10)
    async with streaming(served, "?max_messages=4&heartbeat_s=0.2") as events:
        held = await events.messages(4)
        await events.line(": heartbeat")
        await events.line(": heartbeat")
        assert (await served.broker.subscription("billing")).in_flight == 4
        await acknowledge(served, held[:3])
        assert len(await events.messages(3)) == 3


async def test_a_client_that_comes_again_gets_what_it_has_not_seen_and_keeps_what_it_has(
    served: Served,
) -> None:
    await publish(served, 10)
    async with streaming(served) as events:
        seen = await events.messages(4)
        last = events.last_id
    async with streaming(served, last_id=last) as events:
        more = await events.messages(6)
    assert numbers(seen + more) == list(range(10))
    assert all(message["attempt"] == 1 for message in more)
    await acknowledge(served, seen)
    await acknowledge(served, more)
    assert await (await served.broker.subscription("billing")).lag() == 0


async def test_a_stream_that_is_still_open_ends_when_its_successor_comes(served: Served) -> None:
    await publish(served, 2)
    async with streaming(served) as old:
        await old.messages(1)
        async with streaming(served, last_id=old.last_id) as new:
            assert len(await new.messages(1)) == 1
            await old.rest()


@pytest.mark.parametrize("last_id", ["nonsense", "0123456789abcdef.5", ".", "x.y", "x.-1"])
async def test_an_event_that_is_not_known_any_more_begins_a_new_stream(served: Served, last_id: str) -> None:
    await publish(served, 1)
    async with streaming(served, last_id=last_id) as events:
        assert numbers(await events.messages(1)) == [0]


async def test_an_ended_stream_is_forgotten_in_time_and_in_number(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "RESUME_S", -1.0)
    await publish(served, 2)
    async with streaming(served, "?limit=1") as events:
        await events.messages(1)
        await events.rest()
        last = events.last_id
    async with streaming(served, "?limit=1") as other:
        await other.messages(1)
        await other.rest()
    async with streaming(served, "?heartbeat_s=0.2", last_id=last) as again:
        await again.line(": heartbeat")


async def test_messages_come_as_cloudevents_when_asked_for(served: Served) -> None:
    await served.broker.publish("orders", b'{"a":\n1}')
    async with streaming(served, "?format=cloudevents&limit=1") as events:
        (event,) = await events.messages(1)
    assert (event["specversion"], event["source"], event["data"]) == ("1.0", "/topics/orders", {"a": 1})
    await acknowledge(served, [{"ack_id": event["ackid"]}])


async def test_a_subscription_that_is_deleted_ends_its_streams_with_the_reason(served: Served) -> None:
    await publish(served, 1)
    async with streaming(served, "?heartbeat_s=0.2") as events:
        await events.messages(1)
        await served.http.delete("/v1/subscriptions/billing")
        await events.line("event: error")
        data = await events.line("data: ")
    assert json.loads(data[6:])["error"]["code"] == "SUBSCRIPTION_NOT_FOUND"


async def test_a_change_of_the_subscription_does_not_end_its_streams(served: Served) -> None:
    async with streaming(served) as events:
        await events.line("retry")
        changed = await served.http.patch("/v1/subscriptions/billing", json={"ack_deadline_s": 30})
        assert changed.status_code == 200
        await publish(served, 2)
        assert len(await events.messages(2)) == 2


async def test_a_token_that_is_revoked_ends_its_streams(served: Served) -> None:
    await served.broker.create_token("root", role="admin")
    token = (await served.broker.create_token("reader", role="subscriber")).text
    served.http.headers["authorization"] = f"Bearer {token}"
    async with streaming(served, "?heartbeat_s=0.2") as events:
        await events.line("retry")
        await served.broker.revoke_token("reader")
        await events.line("event: error")
        data = await events.line("data: ")
    assert json.loads(data[6:])["error"]["code"] == "UNAUTHENTICATED"


async def test_a_server_that_stops_ends_its_streams(served: Served) -> None:
    async with streaming(served) as events:
        await events.line("retry")
        async with asyncio.timeout(LIMIT_S):
            closing = asyncio.create_task(served.server.close())
            await events.rest()
            await closing


@pytest.mark.parametrize("query", ["?max_messages=0", "?limit=0", "?heartbeat_s=0", "?format=xml", "?max=3"])
async def test_a_stream_that_cannot_be_is_refused_before_it_begins(served: Served, query: str) -> None:
    answer = await served.http.get(URL + query)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "INVALID_ARGUMENT"


async def test_webhook_and_missing_subscriptions_have_no_stream(served: Served) -> None:
    await served.broker.subscribe("hook", "orders", push={"url": "https://example.com/"})
    assert (await served.http.get("/v1/subscriptions/hook/messages")).status_code == 409
    assert (await served.http.get("/v1/subscriptions/none/messages")).status_code == 404
