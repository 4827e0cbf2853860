"""Subscriptions over HTTP: pull and settle, change, move, look."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from tests.server.api.conftest import Served


async def make(served: Served, **options: Any) -> None:
    await served.broker.create_topic("orders")
    wanted = {"name": "billing", "topic_id": "orders", **options}
    made = await served.http.post("/v1/subscriptions", json=wanted)
    assert made.status_code == 201, made.text


async def pull(served: Served, count: int = 100, timeout_ms: int = 0) -> list[dict[str, Any]]:
    asked = {"max_messages": count, "timeout_ms": timeout_ms}
    answer = await served.http.post("/v1/subscriptions/billing/pull", json=asked)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["messages"])


async def settle(served: Served, verb: str, messages: list[dict[str, Any]], **more: Any) -> int:
    asked = {"ack_ids": [message["ack_id"] for message in messages], **more}
    return (await served.http.post(f"/v1/subscriptions/billing/{verb}", json=asked)).status_code


async def test_a_pull_shows_messages_as_they_are(served: Served) -> None:
    await make(served)
    await served.broker.publish("orders", b'{"a":\n1}', key="k", attributes={"env": "prod", "q": '"\n'})
    await served.broker.publish("orders", b"\xff", priority=-3, ttl_s=60)
    await served.broker.publish("orders", None, key="gone")
    await served.broker.publish("orders", b"not json", event_time=1.5)
    first, second, third, fourth = sorted(await pull(served), key=lambda message: message["offset"])
    assert first["data"] == {"a": 1}
    assert (first["ordering_key"], first["attributes"]) == ("k", {"env": "prod", "q": '"\n'})
    assert (first["topic"], first["partition"], first["offset"], first["attempt"]) == ("orders", 0, 0, 1)
    assert base64.b64decode(second["data_base64"]) == b"\xff"
    assert (second["priority"], second["ttl_s"]) == (-3, 60.0)
    assert third["data_base64"] is None
    assert "data" not in third
    assert base64.b64decode(fourth["data_base64"]) == b"not json"
    assert fourth["event_time"] == "1970-01-01T00:00:01.500000Z"


async def test_an_acked_message_is_done_and_a_nacked_one_comes_again(served: Served) -> None:
    await make(served)
    await served.broker.publish_batch("orders", [b"1", b"2", b"3"])
    one, two, three = await pull(served)
    assert await settle(served, "acknowledge", [one]) == 204
    assert await settle(served, "nack", [two], delay_s=0, reason="no") == 204
    assert await settle(served, "extend", [three], seconds=60) == 204
    (again,) = await pull(served, timeout_ms=5000)
    assert (again["message_id"], again["attempt"]) == (two["message_id"], 2)
    assert await settle(served, "acknowledge", [again, three]) == 204
    shown = (await served.http.get("/v1/subscriptions/billing")).json()
    assert (shown["lag"]["messages"], shown["in_flight"]) == (0, 0)


async def test_ids_that_are_refused_are_named_and_the_others_are_settled(served: Served) -> None:
    await make(served)
    await served.broker.publish_batch("orders", [b"1", b"2"])
    one, two = await pull(served)
    assert await settle(served, "acknowledge", [one]) == 204
    asked = {"ack_ids": ["nonsense", two["ack_id"]]}
    answer = await served.http.post("/v1/subscriptions/billing/acknowledge", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_ACK_ID")
    assert answer.json()["error"]["details"]["refused"] == ["nonsense"]
    assert (await served.http.get("/v1/subscriptions/billing")).json()["lag"]["messages"] == 0


async def test_an_id_whose_lease_has_ended_is_a_conflict(served: Served) -> None:
    await make(served, guarantee="exactly_once")
    await served.broker.publish("orders", b"1")
    (one,) = await pull(served)
    assert await settle(served, "acknowledge", [one]) == 204
    assert await settle(served, "acknowledge", [one]) == 409


async def test_a_pull_waits_for_the_first_message(served: Served) -> None:
    await make(served)
    waiting = asyncio.create_task(pull(served, timeout_ms=20_000))
    await asyncio.sleep(0)
    await served.broker.publish("orders", b'"late"')
    (message,) = await waiting
    assert message["data"] == "late"
    assert await pull(served) == []


async def test_a_server_that_stops_ends_waiting_pulls_with_an_answer(served: Served) -> None:
    await make(served)
    waiting = asyncio.create_task(pull(served, timeout_ms=60_000))
    while not served.broker._subscriptions.get("billing").is_waited_for:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await served.server.close()
    assert await waiting == []


async def test_the_lag_of_each_partition_and_the_dead_letters_are_told(served: Served) -> None:
    await served.broker.create_topic("wide", partitions=2)
    wanted = {
        "name": "deep",
        "topic_id": "wide",
        "dead_letter_topic_id": "wide.dead",
        "retry_policy": {"max_attempts": 1},
    }
    assert (await served.http.post("/v1/subscriptions", json=wanted)).status_code == 201
    keys = [f"k{n}" for n in range(10)]
    await served.broker.publish_batch("wide", [b"1"] * 10, keys=keys)
    ends = [(await served.broker.bounds("wide", partition)).end_offset for partition in range(2)]
    shown = (await served.http.get("/v1/subscriptions/deep")).json()
    assert shown["status"] == "active"
    assert [each["messages"] for each in shown["lag"]["partitions"]] == ends
    assert shown["lag"]["messages"] == 10
    assert shown["dlq_count"] == 0
    handle = await served.broker.subscription("deep")
    (message, *_) = await handle.pull(1)
    await message.nack()
    await handle.flush()
    assert (await served.http.get("/v1/subscriptions/deep")).json()["dlq_count"] == 1


async def test_the_retry_policy_is_the_brokers(served: Served) -> None:
    await make(
        served,
        retry_policy={"max_attempts": 3, "backoff": "fixed", "initial_interval_ms": 250},
        dead_letter_topic_id="dead",
    )
    retry = (await served.broker.subscription("billing")).policy.retry
    assert (retry.min_backoff_s, retry.max_backoff_s, retry.multiplier) == (0.25, 0.25, 1.0)
    assert (retry.max_attempts, retry.immediate_retries) == (3, 0)
    shown = (await served.http.get("/v1/subscriptions/billing")).json()
    assert shown["retry_policy"]["backoff"] == "fixed"
    assert shown["dead_letter_topic_id"] == "dead"


async def test_a_webhook_subscription_tells_its_secret_once_and_cannot_be_pulled(served: Served) -> None:
    await served.broker.create_topic("orders")
    hook = {"type": "webhook", "url": "https://example.com/hook", "max_concurrency": 3}
    wanted = {"name": "billing", "topic_id": "orders", "delivery": hook}
    made = await served.http.post("/v1/subscriptions", json=wanted)
    assert made.status_code == 201
    assert made.json()["signing_secret"].startswith("whsec_")
    assert hook.items() <= made.json()["delivery"].items()
    assert "signing_secret" not in (await served.http.get("/v1/subscriptions/billing")).json()
    refused = await served.http.post("/v1/subscriptions/billing/pull", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "FAILED_PRECONDITION")
    rotated = await served.http.post("/v1/subscriptions/billing/rotate-secret")
    assert rotated.json()["signing_secret"] != made.json()["signing_secret"]


async def test_pause_resume_update_and_delete_do_what_they_say(served: Served) -> None:
    await make(served)
    assert (await served.http.post("/v1/subscriptions/billing/pause")).json()["status"] == "paused"
    await served.broker.publish("orders", b"1", attributes={"env": "test"})
    assert await pull(served) == []
    assert (await served.http.post("/v1/subscriptions/billing/resume")).json()["status"] == "active"
    wanted = {"filter": 'attributes.env = "prod"'}
    assert (await served.http.patch("/v1/subscriptions/billing", json=wanted)).json()["filter"] == wanted[
        "filter"
    ]
    assert await pull(served) == []
    assert (await served.http.delete("/v1/subscriptions/billing")).status_code == 204
    assert (await served.http.get("/v1/subscriptions/billing")).status_code == 404
    assert (await served.http.post("/v1/subscriptions/billing/pull")).status_code == 404


async def test_a_subscription_seeks_to_ends_times_snapshots_and_offsets(served: Served) -> None:
    await make(served)
    await served.broker.publish_batch("orders", [b"0", b"1", b"2"])
    await settle(served, "acknowledge", await pull(served))
    made = await served.http.post("/v1/subscriptions/billing/snapshots", json={"name": "all-done"})
    assert (made.status_code, made.json()["subscription_id"]) == (201, "billing")

    async def after(seek: dict[str, Any]) -> list[Any]:
        answer = await served.http.post("/v1/subscriptions/billing/seek", json=seek)
        assert answer.status_code == 204, answer.text
        return [message["data"] for message in await pull(served)]

    assert await after({"position": "earliest"}) == [0, 1, 2]
    assert await after({"offsets": [{"topic": "orders", "offset": 2}]}) == [2]
    assert await after({"time": "2020-01-01T00:00:00Z"}) == [0, 1, 2]
    assert await after({"snapshot": "all-done"}) == []
    listed = (await served.http.get("/v1/snapshots")).json()
    assert [each["name"] for each in listed["snapshots"]] == ["all-done"]
    assert (await served.http.delete("/v1/snapshots/all-done")).status_code == 204
    missing = await served.http.post("/v1/subscriptions/billing/seek", json={"snapshot": "all-done"})
    assert missing.status_code == 404


async def test_messages_come_as_cloudevents_to_who_accepts_those(served: Served) -> None:
    await make(served)
    await served.broker.publish("orders", b'{"a":1}', key="k", attributes={"ce_type": "order.created"})
    answer = await served.http.post(
        "/v1/subscriptions/billing/pull", headers={"accept": "application/cloudevents-batch+json"}
    )
    assert answer.headers["content-type"] == "application/cloudevents-batch+json"
    (event,) = answer.json()
    assert (event["specversion"], event["type"], event["data"]) == ("1.0", "order.created", {"a": 1})
    assert await settle(served, "acknowledge", [{"ack_id": event["ackid"]}]) == 204


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "x"}, "topic_id"),
        ({"topic_id": "a.**"}, "a.**"),
        ({"topic_id": "a", "filter": "attributes.x ="}, "position"),
        ({"topic_id": "a", "start": "yesterday"}, "yesterday"),
        ({"topic_id": "a", "delivery": {"type": "stream", "url": "https://x"}}, "delivery.url"),
        ({"topic_id": "a", "delivery": {"type": "webhook"}}, "url"),
        ({"topic_id": "a", "delivery": {"type": "webhook", "url": "ftp://x"}}, "url"),
        ({"topic_id": "a", "retry_policy": {"max_attempts": 3}}, "dead_letter_topic"),
        ({"topic_id": "a", "retry_policy": {"backof": "fixed"}}, "backof"),
    ],
)
async def test_what_is_wrong_with_a_subscription_is_named(
    served: Served, body: dict[str, Any], named: str
) -> None:
    refused = await served.http.post("/v1/subscriptions", json=body)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]
    assert await served.broker.subscriptions() == []
