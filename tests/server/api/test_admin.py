"""The admin API: topics, groups, limits, maintenance, what is pending, dead letters, connections, bundles."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import httpx

from sparrow.broker.broker import Broker
from sparrow.model.settings import Address, ServerSettings, Settings
from sparrow.server.http import HttpServer, bind, build
from sparrow.server.tcp import TcpServer


async def test_a_topic_is_created_listed_looked_at_changed_and_deleted(served: Any) -> None:
    http = served.http
    spec = {"name": "orders", "partitions": 2, "retention_policy": {"max_age_seconds": 60, "max_messages": 5}}
    made = await http.post("/api/v1/topics", json=spec)
    assert made.status_code == 201
    assert made.headers["location"] == "/api/v1/topics/orders"
    assert made.json()["retention_policy"]["max_age_seconds"] == 60
    assert (await http.post("/api/v1/topics", json=spec)).status_code == 409
    await served.broker.subscribe("billing", "orders")
    await served.broker.publish("orders", b'{"n": 1}', key="a")
    (shown,) = (await http.get("/api/v1/topics")).json()["topics"]
    assert (shown["name"], shown["subscriber_count"], shown["depth"]) == ("orders", 1, 1)
    assert shown["last_activity"] is not None
    changed = await http.put("/api/v1/topics/orders/config", json={"max_age": 0, "require_ack": True})
    assert changed.json()["retention_policy"]["max_age_seconds"] == 0
    assert (await served.broker.topic("orders")).policy.retention_s is None
    assert (await served.broker.topic("orders")).policy.retain_until_acked
    assert (await served.broker.topic("orders")).policy.retention_messages == 5, "what was left out stays"
    assert (await http.delete("/api/v1/topics/orders")).status_code == 400
    assert (await http.delete("/api/v1/topics/orders?force=true")).json()["status"] == "deleted"
    assert (await http.get("/api/v1/topics/orders")).status_code == 404


async def test_a_topic_shows_its_newest_messages_when_asked(served: Any) -> None:
    await served.broker.publish_batch("orders", [b'{"n": 1}', b"\xff", None], keys=["a", "b", "c"])
    found = (await served.http.get("/api/v1/topics/orders?include_messages=true")).json()
    shown = {each["key"]: each for each in found["messages"]}
    assert shown["a"]["payload"] == {"n": 1}
    assert shown["b"]["payload_base64"] == "/w=="
    assert shown["c"]["payload_base64"] is None
    assert found["partition_offsets"] == [{"partition": 0, "start_offset": 0, "end_offset": 3}]
    assert "messages" not in (await served.http.get("/api/v1/topics/orders")).json()


async def test_messages_of_a_topic_are_listed_from_the_newest_or_from_a_time_on(served: Any) -> None:
    await served.broker.publish_batch("orders", [b"%d" % n for n in range(5)])
    newest = (await served.http.get("/api/v1/topics/orders/messages?limit=2")).json()["messages"]
    assert sorted(each["offset"] for each in newest) == [3, 4]
    since = (await served.http.get("/api/v1/topics/orders/messages?limit=2&since=0")).json()["messages"]
    assert [each["payload"] for each in since] == [0, 1]
    later = await served.http.get("/api/v1/topics/orders/messages", params={"since": "2999-01-01T00:00:00Z"})
    assert later.json()["messages"] == []
    wrong = await served.http.get("/api/v1/topics/orders/messages?since=yesterday")
    assert wrong.status_code == 400


async def test_a_message_is_published_the_slow_way(served: Any) -> None:
    made = await served.http.post(
        "/api/v1/topics/orders/messages", json={"payload": {"n": 1}, "headers": {"env": "test"}, "key": "k"}
    )
    assert made.status_code == 201
    (message,) = await served.broker.read("orders")
    assert (message.data, message.key, message.attributes) == (b'{"n":1}', "k", {"env": "test"})
    assert made.json()["message_id"] == message.id


async def test_lists_come_in_pages_with_their_size_in_headers(served: Any) -> None:
    for name in ("a", "b", "c"):
        await served.broker.create_topic(name)
    for path in ("/api/v1/topics", "/admin/topics"):
        answer = await served.http.get(f"{path}?limit=2&offset=1")
        assert [each["name"] for each in answer.json()["topics"]] == ["b", "c"]
        assert answer.headers["x-total-count"] == "3"
        assert answer.headers["cache-control"] == "no-cache"
    assert (await served.http.get("/api/v1/topics?limit=0")).status_code == 400
    assert (await served.http.get("/api/v1/topics?offset=-1")).status_code == 400
    found = await served.http.get("/api/v1/topics", params={"pattern": "b"})
    assert found.json()["total"] == 1


async def test_a_group_shows_members_lag_and_who_holds_what(served: Any) -> None:
    http = served.http
    billing = await served.broker.subscribe("billing", "orders")
    member = await billing.join("one")
    await served.broker.publish_batch("orders", [b"x"] * 4)
    await member.pull(3, timeout_s=5)
    for path in ("/api/v1/groups", "/admin/groups"):
        (group,) = (await http.get(path)).json()["groups"]
        assert (group["name"], group["topic"], group["members"]) == ("billing", "orders", 1)
        assert group["pending_by_consumer"] == {"one": 3}
        assert group["lag"] == 4
    details = (await http.get("/api/v1/groups/billing")).json()
    assert [each["name"] for each in details["members"]] == ["one"]
    assert "members" not in (await http.get("/api/v1/groups/billing?include_members=false")).json()
    lag = (await http.get("/api/v1/groups/billing/lag")).json()
    assert lag["report"]["depth"] == 4
    (shown,) = (await http.get("/api/v1/groups/billing/members")).json()["members"]
    assert (shown["consumer"], shown["level"], shown["in_flight"]) == ("one", "healthy", 3)
    assert (await http.get("/api/v1/groups/nobody")).status_code == 404
    await member.leave()


async def test_a_group_is_rebalanced_and_a_member_sent_away(served: Any) -> None:
    http = served.http
    billing = await served.broker.subscribe("billing", "orders")
    assert (await http.post("/api/v1/groups/billing/rebalance")).status_code == 409, "nobody is there"
    await billing.join("one")
    two = await billing.join("two", heartbeat="manual")
    await served.broker.publish("orders", b"x")
    begun = await http.post("/api/v1/groups/billing/rebalance", json={"reason": "new hosts"})
    assert begun.status_code == 202
    assert begun.json()["reason"] == "new hosts"
    (message,) = await two.pull(1, timeout_s=10) or await billing.pull(0 + 1, timeout_s=0) or [None]
    assert (await http.delete("/api/v1/groups/billing/members/two")).json()["status"] == "evicted"
    assert (await http.delete("/api/v1/groups/billing/members/two")).status_code == 404
    assert [each.name for each in await billing.members()] == ["one"]
    assert not two.is_member
    assert message is not None


async def test_what_consumers_hold_is_listed_with_deadlines_and_retries(served: Any) -> None:
    billing = await served.broker.subscribe("billing", "orders", retry={"immediate_retries": 5})
    await served.broker.publish_batch("orders", [b"x"] * 5)
    await billing.nack(await billing.pull(1, timeout_s=5), wait=True)
    async with asyncio.timeout(20):
        held = 0
        while held < 5:
            held += len(await billing.pull(5, timeout_s=1))
    for path in ("/api/v1/messages/pending", "/admin/pending"):
        answer = await served.http.get(f"{path}?limit=3")
        assert answer.headers["x-total-count"] == "5"
        assert len(answer.json()["pending"]) == 3
    everything = (await served.http.get("/admin/pending?subscription=billing")).json()["pending"]
    assert sorted(each["retry_count"] for each in everything) == [0, 0, 0, 0, 1]
    assert all(each["ack_deadline"] > each["assigned_at"] for each in everything)
    assert {each["consumer_id"] for each in everything} == {billing.consumer}
    assert (await served.http.get("/admin/pending?subscription=nobody")).status_code == 404


async def test_where_a_message_is_can_be_asked_by_its_id(served: Any) -> None:
    await served.broker.subscribe("billing", "orders")
    receipt = await served.broker.publish("orders", b"x")
    found = (await served.http.get(f"/api/v1/messages/{receipt.message_id}")).json()
    assert found["topic"] == "orders"
    assert len(found["subscriptions"]) == 1
    assert (await served.http.get("/api/v1/messages/9-0-0")).status_code == 404
    assert (await served.http.get("/api/v1/messages/nonsense")).status_code == 404


async def dead_letter(served: Any) -> str:
    billing = await served.broker.subscribe("billing", "orders", dead_letter_topic="dead")
    receipt = await served.broker.publish("orders", b'{"n": 1}', key="k", attributes={"env": "test"})
    await billing.nack(await billing.pull(1, timeout_s=5), retry=False, reason="broken", wait=True)
    await billing.flush()
    return str(receipt.message_id)


async def test_a_dead_letter_is_replayed_into_a_topic_with_headers_that_tell_of_it(served: Any) -> None:
    message_id = await dead_letter(served)
    listed = (await served.http.get("/api/v1/messages/dead-letters?subscription=billing")).json()
    assert [each["message_id"] for each in listed["dead_letters"]] == [message_id]
    assert listed["total"] == 1
    wanted = {"message_id": message_id, "target_topic": "again"}
    answer = await served.http.post("/admin/dlq/replay", json=wanted)
    assert answer.status_code == 202
    (copy,) = await served.broker.read("again")
    assert (copy.data, copy.key) == (b'{"n": 1}', "k")
    assert copy.attributes["env"] == "test"
    assert copy.attributes["sparrow.replay.original_id"] == message_id
    assert copy.attributes["sparrow.replay.subscription"] == "billing"
    assert answer.json()["message_id"] == copy.id
    again = await served.http.post("/admin/dlq/replay", json=wanted)
    assert again.status_code == 404, "it is no dead letter any more"


async def test_a_dead_letter_is_given_again_to_its_subscription_without_a_target(served: Any) -> None:
    message_id = await dead_letter(served)
    answer = await served.http.post("/api/v1/messages/dead-letters/replay", json={"message_id": message_id})
    assert answer.status_code == 202
    billing = await served.broker.subscription("billing")
    (message,) = await billing.pull(1, timeout_s=20)
    assert message.id == message_id


async def test_limits_change_at_run_time(served: Any) -> None:
    http = served.http
    await served.broker.create_topic("orders")
    wanted = {"messages_per_s": 5, "overflow": "reject"}
    changed = await http.put("/api/v1/admin/limits/topics/orders", json=wanted)
    assert changed.json()["messages_per_s"] == 5
    answers = [await http.post("/topics/orders/publish", json={"message": 1}) for _ in range(12)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert int(refused[0].headers["retry-after"]) >= 1
    changed = await http.put("/api/v1/admin/limits/publishers/p-1", json={"messages_per_s": 10})
    assert changed.json() == {"messages_per_s": 10.0, "bytes_per_s": None, "burst_s": 1.0}
    assert (await http.put("/api/v1/admin/limits/tokens/t-1", json={"rate": 1})).status_code == 400
    assert (await http.put("/api/v1/admin/limits/topics/orders", json={"x": 1})).status_code == 400
    assert (await http.put("/api/v1/admin/limits/topics/nothing", json={})).status_code == 404


async def test_in_maintenance_publishes_get_503_with_retry_after_on_every_family(served: Any) -> None:
    http = served.http
    await served.broker.create_topic("orders")
    begun = await http.put("/api/v1/admin/maintenance", json={"reason": "disks", "retry_after_s": 60})
    assert begun.json()["level"] == "maintenance"
    for path, message in [
        ("/topics/orders/messages", [{"value": 1}]),
        ("/publish", {"topic": "orders", "message": 1}),
        ("/v1/topics/orders/messages", {"data": 1}),
        ("/api/v1/topics/orders/messages", {"payload": 1}),
    ]:
        answer = await http.post(path, json=message)
        assert answer.status_code == 503, path
        assert answer.json()["error"]["code"] == "IN_MAINTENANCE"
        assert answer.headers["retry-after"] == "60"
    assert (await http.get("/health/ready")).status_code == 200, "it still delivers"
    assert (await http.get("/api/v1/admin/service")).json()["is_in_maintenance"]
    ended = await http.delete("/api/v1/admin/maintenance")
    assert ended.json()["level"] == "normal"
    assert (await http.post("/publish", json={"topic": "orders", "message": 1})).status_code == 201


async def test_the_settings_are_shown_without_their_secrets(tmp_path: Path) -> None:
    server = ServerSettings(tokens="ops:geheim-123")
    async with await Broker.open(Settings(data=str(tmp_path / "data"), server=server)) as broker:
        http_server = await HttpServer.start(build(broker), bind(Address("127.0.0.1", 0)))
        try:
            bearer = {"Authorization": "Bearer geheim-123"}
            address = f"http://{http_server.address}"
            async with httpx.AsyncClient(base_url=address, timeout=30) as http:
                assert (await http.get("/api/v1/admin/config")).status_code == 401
                assert (await http.get("/metrics")).status_code == 401
                answer = await http.get("/api/v1/admin/config", headers=bearer)
                assert answer.json()["server.tokens"] == "***"
                bundle = await http.get("/api/v1/admin/support-bundle", headers=bearer)
            archive = zipfile.ZipFile(io.BytesIO(bundle.content))
            everything = b"".join(archive.read(name) for name in archive.namelist())
            assert b"geheim-123" not in everything
        finally:
            await http_server.close()


async def test_the_support_bundle_holds_what_is_needed_and_no_message(served: Any) -> None:
    await served.broker.subscribe("billing", "orders")
    secret = {"data": b"payload-of-yours", "key": "key-of-yours", "attributes": {"a-of-yours": "b-of-yours"}}
    await served.broker.publish("orders", secret["data"], key=secret["key"], attributes=secret["attributes"])
    answer = await served.http.get("/api/v1/admin/support-bundle")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/zip"
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    names = {name.removeprefix("sparrow/") for name in archive.namelist()}
    wanted = {"settings.json", "health.json", "metrics.txt", "recovery.json", "topics.json", "log.jsonl"}
    assert wanted | {"subscriptions.json", "groups.json", "connections.json", "about.json"} <= names
    for name in archive.namelist():
        content = archive.read(name)
        assert b"of-yours" not in content, name
        if name.endswith(".json"):
            json.loads(content)


async def test_connections_of_all_listeners_are_listed(served: Any) -> None:
    tcp = await TcpServer.start(served.broker, bind(Address("127.0.0.1", 0)))
    try:
        _, writer = await asyncio.open_connection(tcp.address.host, tcp.address.port)
        async with asyncio.timeout(20):
            while not tcp.connections:  # noqa: ASYNC110 - as a person would look
                await asyncio.sleep(0.01)
        for path in ("/api/v1/admin/connections", "/admin/connections"):
            found = (await served.http.get(path)).json()["connections"]
            assert {each["listener"] for each in found} == {"tcp", "http"}
            (shown,) = [each for each in found if each["listener"] == "tcp"]
            port = writer.get_extra_info("sockname")[1]
            assert shown["address"] == f"127.0.0.1:{port}"
            assert shown["age_s"] >= 0
            assert shown["protocol"]
        writer.close()
    finally:
        await tcp.close()
    found = (await served.http.get("/admin/connections")).json()["connections"]
    assert {each["listener"] for each in found} == {"http"}


async def test_sealing_and_retention_run_when_asked_for(served: Any) -> None:
    await served.broker.publish_batch("orders", [b"x"] * 3)
    assert (await served.http.post("/api/v1/admin/seal")).json() == {"count": 3}
    assert (await served.http.post("/api/v1/admin/retention")).json() == {"count": 0}
    assert (await served.http.get("/api/v1/admin/recovery")).json()["messages"] == 0


async def test_a_broker_inside_another_program_cannot_be_stopped_over_http(served: Any) -> None:
    answer = await served.http.post("/api/v1/admin/shutdown")
    assert answer.status_code == 409
    stopped = asyncio.Event()
    served.broker.steward.on_shutdown = stopped.set
    assert (await served.http.post("/api/v1/admin/shutdown")).status_code == 202
    async with asyncio.timeout(20):
        await stopped.wait()


async def test_what_administrators_do_is_in_the_audit_log(served: Any) -> None:
    await served.http.post("/api/v1/topics", json={"name": "orders"})
    await served.http.put("/api/v1/admin/maintenance", json={})
    await served.http.delete("/api/v1/topics/nothing?force=true")
    entries = [(entry.action, entry.what, entry.outcome) for entry in await served.broker.audit_log()]
    assert ("create_topic", "orders", "done") in entries
    assert ("begin_maintenance", "", "done") in entries
    assert ("delete_topic", "nothing", "TOPIC_NOT_FOUND") in entries


async def test_bad_input_is_a_400_that_names_what_is_wrong(served: Any) -> None:
    both = {"max_age": 1, "max_age_seconds": 1}
    for method, path, body in (
        ("POST", "/api/v1/topics", {"name": "a", "colour": "red"}),
        ("POST", "/api/v1/topics", {"name": "a b"}),
        ("POST", "/api/v1/topics", {"name": "a", "retention_policy": {"compaction_enabled": True}}),
        ("POST", "/api/v1/topics", {"name": "a", "retention_policy": both}),
        ("PUT", "/api/v1/admin/maintenance", {"retry_after_s": -1}),
        ("PUT", "/api/v1/admin/log-level", {"level": "loud"}),
        ("POST", "/admin/dlq/replay", {}),
        ("POST", "/api/v1/topics/a/messages", {}),
    ):
        answer = await served.http.request(method, path, json=body)
        assert answer.status_code == 400, (path, body)
        error = answer.json()["error"]
        assert error["hint"]
        assert error["suggestions"]
        assert error["request_id"] == answer.headers["x-request-id"]
        assert error["timestamp"].endswith("Z")
    assert await served.broker.topics() == []
