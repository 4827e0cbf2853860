"""Health over HTTP: by figures, by a message that makes the whole way, and of consumers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparrow.broker.steward import Steward
from sparrow.client.remote import RemoteBroker
from sparrow.kernel.degradation import Strain
from sparrow.model.errors import ConnectionLost, LoadShed
from sparrow.model.settings import Address
from sparrow.server.http import bind
from sparrow.server.tcp import TcpServer


async def out_of_memory(steward: Steward) -> None:
    """As if hardly any memory were left for some seconds."""
    await steward.stop()
    async with asyncio.timeout(20):
        while steward.takes_connections:
            steward.look(Strain(0.99, 10**12, 2 * 10**12))
            await asyncio.sleep(0.1)


async def test_the_deep_check_sends_a_message_the_whole_way(served: Any) -> None:
    answer = await served.http.get("/health/deep")
    assert answer.status_code == 200
    found = answer.json()
    assert found["status"] == "healthy"
    assert [step["name"] for step in found["steps"]] == ["prepare", "publish", "receive", "read back", "ack"]
    assert answer.headers["cache-control"] == "no-store"


async def test_nobody_sees_the_messages_of_the_deep_check(served: Any) -> None:
    everything = await served.broker.subscribe("everything", "#", start="earliest")
    for _ in range(3):
        assert (await served.http.get("/health/deep")).json()["status"] == "healthy"
    later = await served.broker.subscribe("later", "#", start="earliest")
    assert await everything.pull(timeout_s=0.1) == []
    assert await later.pull(timeout_s=0.1) == []
    assert await served.broker.topics() == []
    assert [each.name for each in await served.broker.subscriptions()] == ["everything", "later"]
    assert (await served.http.get("/api/v1/topics")).json()["total"] == 0


async def test_deep_checks_at_once_do_not_take_each_others_messages(served: Any) -> None:
    answers = await asyncio.gather(*(served.http.get("/health/deep") for _ in range(8)))
    assert {answer.json()["status"] for answer in answers} == {"healthy"}


async def test_in_maintenance_the_deep_check_says_what_does_not_work(served: Any) -> None:
    await served.broker.steward.begin_maintenance("new disks")
    answer = await served.http.get("/health/deep")
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"
    assert "new disks" in answer.json()["steps"][-1]["message"]


async def test_the_broker_is_judged_by_weighted_dimensions_with_advice(served: Any) -> None:
    found = (await served.http.get("/api/v1/health")).json()
    assert found["status"] == "healthy"
    broker = found["broker"]
    assert broker["score"] == 100.0
    assert broker["uptime_s"] >= 0
    assert broker["tasks"] > 0
    names = {each["name"] for each in broker["dimensions"]}
    assert {"connections", "memory", "disk", "pending", "lag", "journal"} <= names
    assert "deep" not in found


async def test_a_broker_that_runs_out_of_memory_is_critical_and_says_what_to_do(served: Any) -> None:
    await out_of_memory(served.broker.steward)
    answer = await served.http.get("/api/v1/health")
    assert answer.status_code == 503
    found = answer.json()
    assert found["status"] == "critical"
    assert found["broker"]["level"] == "emergency"
    assert found["broker"]["given_up"] == ["all publishes", "new connections"]
    assert any("memory" in sentence for sentence in found["broker"]["recommendations"])
    assert (await served.http.get("/health/ready")).status_code == 503
    assert (await served.http.get("/health/live")).status_code == 200


async def test_a_check_of_everything_runs_when_it_is_asked_for(served: Any) -> None:
    found = (await served.http.post("/api/v1/health/check")).json()
    assert found["deep"]["status"] == "healthy"
    assert found["broker"]["status"] == "healthy"


async def test_a_member_that_falls_silent_sinks_and_is_shown_as_failed(served: Any) -> None:
    group = {"heartbeat_s": 0.1, "session_timeout_s": 0.5}
    billing = await served.broker.subscribe("billing", "orders", group=group)
    alive = await billing.join("alive")
    await billing.join("dead", heartbeat="manual")

    async def levels() -> dict[str, str]:
        answer = await served.http.get("/api/v1/health/consumers", params={"group_name": "billing"})
        return {each["consumer"]: each["level"] for each in answer.json()["consumers"]}

    seen = [await levels()]
    async with asyncio.timeout(20):
        while seen[-1].get("dead") != "failed":
            await asyncio.sleep(0.02)
            seen.append(await levels())
    assert {each["alive"] for each in seen} <= {"healthy", "warning"}
    order = ["healthy", "warning", "suspicious", "failed"]
    places = [order.index(each["dead"]) for each in seen]
    assert places == sorted(places)
    assert 1 in places or 2 in places
    await billing.join("dead")
    assert (await levels())["dead"] == "healthy"
    await alive.leave()


async def test_a_group_that_does_not_exist_has_no_consumers_to_look_at(served: Any) -> None:
    answer = await served.http.get("/api/v1/health/consumers?group_name=nobody")
    assert answer.status_code == 404


async def test_in_an_emergency_nobody_new_is_let_in_and_those_inside_go_on(served: Any) -> None:
    tcp = await TcpServer.start(served.broker, bind(Address("127.0.0.1", 0)))
    url = f"sparrow://{tcp.address}"
    try:
        inside = await RemoteBroker.open(url, connect_s=20)
        billing = await inside.subscribe("billing", "orders")
        await inside.publish("orders", b"1")
        await out_of_memory(served.broker.steward)
        with pytest.raises(LoadShed):
            await inside.publish("orders", b"2")
        with pytest.raises((LoadShed, ConnectionLost)):
            await RemoteBroker.open(url, connect_s=0.5)
        (message,) = await billing.pull(1, timeout_s=20)
        await message.ack()
        await inside.close()
    finally:
        await tcp.close()
