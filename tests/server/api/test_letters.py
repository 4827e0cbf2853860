"""Dead letters over HTTP: listed, replayed under their ids, given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.api.conftest import Served

URL = "/v1/subscriptions/billing/dlq"
LIMIT_S = 30


@pytest.fixture(autouse=True)
async def _letters(served: Served) -> None:
    """Three messages that could not be delivered."""
    await served.broker.create_topic("orders")
    billing = await served.broker.subscribe(
        "billing", "orders", dead_letter_topic="dead", retry={"max_attempts": 1}
    )
    await served.broker.publish_batch("orders", [b'{"n":0}', b'{"n":1}', b'{"n":2}'], keys=["a", "b", "c"])
    await billing.nack(await billing.pull(3), reason="the database is away")
    await billing.flush()


async def letters(served: Served, query: str = "") -> list[dict[str, Any]]:
    answer = await served.http.get(URL + query)
    assert answer.status_code == 200
    return list(answer.json()["dead_letters"])


async def test_a_dead_letter_tells_its_message_attempts_error_and_time(served: Served) -> None:
    first, *others = await letters(served)
    assert len(others) == 2
    assert first["message"] == {
        "message_id": "1-0-0",
        "topic": "orders",
        "ordering_key": "a",
        "attributes": {},
        "data": {"n": 0},
    }
    assert (first["attempts"], first["last_error"]) == (1, "the database is away")
    assert first["reason"] == "attempts_exhausted"
    assert first["moved_at"].startswith("20")
    assert len(await letters(served, "?limit=2")) == 2
    assert await letters(served, "?reason=expired") == []


async def test_a_replay_delivers_letters_again_under_their_ids(served: Served) -> None:
    asked = {"from": "2020-01-01T00:00:00Z", "destination_subscription_id": "billing", "rate_per_s": 1000}
    answer = await served.http.post(f"{URL}/replay", json=asked)
    assert answer.status_code == 202
    job = answer.json()
    assert (job["message_count"], job["status"]) == (3, "running")
    billing = await served.broker.subscription("billing")
    found: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < 3:
            found += await billing.pull(3, timeout_s=1)
    assert sorted(message.id for message in found) == ["1-0-0", "1-0-1", "1-0-2"]
    await billing.ack(found, wait=True)
    async with asyncio.timeout(LIMIT_S):
        while (await served.http.get(f"{URL}/replays/{job['replay_id']}")).json()["status"] != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    done = (await served.http.get(f"{URL}/replays")).json()["replays"]
    assert [(each["replay_id"], each["replayed"]) for each in done] == [(job["replay_id"], 3)]
    assert await letters(served) == []


async def test_a_selection_takes_only_what_it_says(served: Served) -> None:
    for asked, count in (
        ({"to": "2020-01-01T00:00:00Z"}, 0),
        ({"ids": ["1-0-1"]}, 1),
        ({"reason": "attempts_exhausted"}, 3),
        ({"filter": 'attributes.dlq_subscription = "other"'}, 0),
    ):
        answer = await served.http.post(f"{URL}/replay", json={**asked, "dry_run": True})
        assert (answer.status_code, answer.json()["message_count"]) == (202, count), asked
    assert len(await letters(served)) == 3


async def test_a_replay_to_another_subscription_delivers_there(served: Served) -> None:
    audit = await served.broker.subscribe("audit", "orders")
    asked = {"ids": ["1-0-0", "1-0-2"], "destination_subscription_id": "audit", "rate_per_s": 1000}
    planned = (await served.http.post(f"{URL}/replay", json={**asked, "dry_run": True})).json()
    assert (planned["message_count"], planned["status"]) == (2, "dry_run")
    assert planned["destination_subscription_id"] == "audit"
    answer = await served.http.post(f"{URL}/replay", json=asked)
    assert answer.status_code == 202
    job = answer.json()
    assert (job["message_count"], job["destination_subscription_id"]) == (2, "audit")
    found: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < 2:
            found += await audit.pull(2, timeout_s=1)
    assert [(m.id, m.attempt, m.attributes["replay_from"]) for m in found] == [
        ("1-0-0", 1, "billing"),
        ("1-0-2", 1, "billing"),
    ]
    assert [each["message"]["message_id"] for each in await letters(served)] == ["1-0-1"]
    shown = (await served.http.get(f"{URL}/replays/{job['replay_id']}")).json()
    assert shown["destination_subscription_id"] == "audit"


async def test_a_destination_that_cannot_get_the_letters_is_refused(served: Served) -> None:
    async def refused(destination: str) -> tuple[int, str, str]:
        asked = {"destination_subscription_id": destination}
        answer = await served.http.post(f"{URL}/replay", json=asked)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["hint"]

    await served.broker.create_topic("stock")
    await served.broker.subscribe("store", "stock")
    assert (await refused("nobody"))[:2] == (404, "SUBSCRIPTION_NOT_FOUND")
    status, code, hint = await refused("store")
    assert (status, code) == (409, "FAILED_PRECONDITION")
    assert "reads 'orders'" in hint
    assert len(await letters(served)) == 3
    assert (await served.http.get(f"{URL}/replays")).json() == {"replays": []}


async def test_a_destination_needs_the_same_right_as_the_source(served: Served) -> None:
    await served.broker.create_topic("stock")
    await served.broker.subscribe("audit", "orders")
    await served.broker.subscribe("everything", "#")
    await served.broker.create_token("root", role="admin")
    token = (await served.broker.create_token("mine", scopes=["subscribe:orders"])).text
    for destination, status in (("everything", 403), ("audit", 202)):
        answer = await served.http.post(
            f"{URL}/replay",
            json={"destination_subscription_id": destination, "dry_run": True},
            headers={"Authorization": f"Bearer {token}"},
        )
        assert answer.status_code == status, answer.text


async def test_letters_are_given_up_for_good(served: Served) -> None:
    assert (await served.http.post(f"{URL}/purge", json={"dry_run": True})).json() == {"purged": 3}
    assert (await served.http.post(f"{URL}/purge")).json() == {"purged": 3}
    assert await letters(served) == []


async def test_what_is_not_there_is_404_and_no_dead_letter_topic_is_a_conflict(served: Served) -> None:
    assert (await served.http.get(f"{URL}/replays/none")).status_code == 404
    assert (await served.http.get("/v1/subscriptions/none/dlq")).status_code == 404
    await served.broker.subscribe("plain", "orders")
    answer = await served.http.get("/v1/subscriptions/plain/dlq")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "FAILED_PRECONDITION")
