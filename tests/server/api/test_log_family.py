"""The log family: records with partitions and offsets, groups that commit, members with sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparrow.server.api import sessions as session_rules

CLICKS = "/topics/clicks/messages"


async def consume(http: Any, group: str = "web", **query: Any) -> list[dict[str, Any]]:
    answer = await http.get(CLICKS, params={"consumer_group": group, **query})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


async def create(http: Any, partitions: int = 1, **options: Any) -> None:
    answer = await http.post("/topics", json={"name": "clicks", "partitions": partitions, **options})
    assert answer.status_code == 201


async def send(http: Any, *values: Any, keys: bool = False) -> list[dict[str, int]]:
    records = [{"value": value, **({"key": f"k{n}"} if keys else {})} for n, value in enumerate(values)]
    answer = await http.post(CLICKS, json={"messages": records})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, int]] = answer.json()["offsets"]
    return found


async def test_a_topic_is_created_with_partitions_and_retention(served: Any) -> None:
    made = await served.http.post(
        "/topics", json={"name": "clicks", "partitions": 3, "retention_ms": 86_400_000}
    )
    assert made.status_code == 201
    assert made.json()["retention_ms"] == 86_400_000
    topic = await served.broker.topic("clicks")
    assert (topic.partitions, topic.policy.retention_s) == (3, 86_400.0)
    assert (await served.http.post("/topics", json={"name": "clicks"})).status_code == 409
    for_ever = await served.http.post("/topics", json={"name": "facts", "retention_ms": -1})
    assert for_ever.json()["retention_ms"] == -1
    assert (await served.broker.topic("facts")).policy.retention_s is None
    assert (await served.http.post("/topics/visits")).status_code == 201


async def test_records_get_a_partition_and_an_offset_each_and_a_key_stays_in_its_partition(
    served: Any,
) -> None:
    await create(served.http, partitions=3)
    first = await send(served.http, 1, 2, 3, 4, keys=True)
    second = await send(served.http, 5, 6, 7, 8, keys=True)
    assert [each["partition"] for each in first] == [each["partition"] for each in second]
    places = [(each["partition"], each["offset"]) for each in first + second]
    assert len(set(places)) == 8
    array = await served.http.post(CLICKS, json=[{"value": "x"}])
    assert len(array.json()["offsets"]) == 1


async def test_what_was_sent_is_consumed_with_its_key_value_and_headers(served: Any) -> None:
    await create(served.http)
    records = [
        {"key": "a", "value": {"n": 1}, "headers": {"env": "test"}},
        {"value": "text"},
        {"value_base64": "/w=="},
        {"value_base64": None},
        {"value": None},
    ]
    await served.http.post(CLICKS, json=records)
    found = await consume(served.http, timeout_ms=0)
    assert [each["offset"] for each in found] == [0, 1, 2, 3, 4]
    assert (found[0]["key"], found[0]["value"], found[0]["headers"]) == ("a", {"n": 1}, {"env": "test"})
    assert found[1]["value"] == "text"
    assert found[2]["value_base64"] == "/w=="
    assert found[3]["value_base64"] is None
    assert found[4]["value"] is None


async def test_consuming_goes_on_where_it_was_and_committed_records_do_not_come_again(served: Any) -> None:
    await create(served.http)
    await send(served.http, *range(10))
    assert [each["value"] for each in await consume(served.http, max_messages=4)] == [0, 1, 2, 3]
    assert [each["value"] for each in await consume(served.http, max_messages=4)] == [4, 5, 6, 7]
    wanted = {"consumer_group": "web", "offsets": [{"partition": 0, "offset": 6}]}
    done = await served.http.post("/topics/clicks/offsets", json=wanted)
    assert done.status_code == 200
    assert done.json()["partitions"][0]["committed_offset"] == 6
    assert done.json()["lag"] == 4
    shown = (await served.http.get("/topics/clicks/offsets?consumer_group=web")).json()
    assert shown == done.json()
    # Another process of the group: what was consumed and not committed comes again, the rest does not.
    await served.http.post("/groups/web/join", json={"consumer_id": "next"})
    again = await consume(served.http, consumer_id="next", timeout_ms=5000)
    assert sorted(each["value"] for each in again) == [6, 7, 8, 9]


async def test_a_poll_waits_for_the_first_record(served: Any) -> None:
    await create(served.http)
    await consume(served.http, timeout_ms=0)
    waiting = asyncio.create_task(consume(served.http, timeout_ms=30_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await send(served.http, "late")
    async with asyncio.timeout(20):
        assert [each["value"] for each in await waiting] == ["late"]


async def test_a_poll_without_records_ends_in_time_with_none(served: Any) -> None:
    await create(served.http)
    async with asyncio.timeout(20):
        assert await consume(served.http, timeout_ms=50) == []


async def test_groups_are_independent_and_begin_where_they_are_told(served: Any) -> None:
    await create(served.http)
    await send(served.http, 1)
    assert len(await consume(served.http, "one")) == 1
    assert len(await consume(served.http, "two")) == 1
    assert await consume(served.http, "three", auto_offset_reset="latest", timeout_ms=0) == []
    await send(served.http, 2)
    assert [each["value"] for each in await consume(served.http, "three")] == [2]


async def test_members_share_the_partitions_and_see_each_record_once(served: Any) -> None:
    http = served.http
    await create(http, partitions=4)
    assert (await http.post("/groups/web/join", json={"consumer_id": "a"})).status_code == 404
    for name in ("a", "b"):
        joined = await http.post("/groups/web/join", json={"consumer_id": name, "topic": "clicks"})
        assert joined.status_code == 200
    owned: dict[str, set[int]] = {}
    async with asyncio.timeout(20):
        while sorted(map(len, owned.values())) != [2, 2]:
            for name in ("a", "b"):
                beat = await http.post(f"/groups/web/members/{name}/heartbeat")
                owned[name] = {each["partition"] for each in beat.json()["assignment"]}
    assert not owned["a"] & owned["b"]
    await send(http, *range(40), keys=True)
    seen: list[int] = []
    for name in ("a", "b"):
        found = await consume(http, consumer_id=name, timeout_ms=2000)
        assert {each["partition"] for each in found} <= owned[name]
        seen += [each["value"] for each in found]
    assert sorted(seen) == list(range(40))


async def test_a_member_that_leaves_gives_its_records_to_the_others_at_once(served: Any) -> None:
    http = served.http
    await create(http)
    await send(http, 1, 2)
    await http.post("/groups/web/join", json={"consumer_id": "a", "topic": "clicks"})
    assert len(await consume(http, consumer_id="a")) == 2
    assert (await http.delete("/groups/web/members/a")).status_code == 204
    assert (await http.delete("/groups/web/members/a")).status_code == 404
    assert (await http.post("/groups/web/members/a/heartbeat")).status_code == 404
    assert len(await consume(http, consumer_id="b", timeout_ms=5000)) == 2


async def test_a_member_that_falls_silent_loses_its_seat_and_may_come_again(served: Any) -> None:
    http = served.http
    await create(http)
    group = {"mode": "partitioned", "heartbeat_s": 0.1, "session_timeout_s": 0.3, "stabilisation_s": 0.02}
    web = await served.broker.subscribe("web", "clicks", group=group, start="earliest")
    await send(http, 1)
    joined = await http.post("/groups/web/join", json={"consumer_id": "a"})
    assert joined.json()["session_timeout_s"] == 0.3
    assert len(await consume(http, consumer_id="a")) == 1
    async with asyncio.timeout(20):
        while await web.members():  # noqa: ASYNC110 - as a person would look
            await asyncio.sleep(0.02)
    beat = await http.post("/groups/web/members/a/heartbeat")
    assert beat.status_code == 409
    assert beat.json()["error"]["code"] == "STALE_GENERATION"
    found = await consume(http, consumer_id="a", timeout_ms=10_000)
    assert [each["attempt"] for each in found] == [2]


async def test_only_the_owner_of_a_partition_commits_it_by_name(served: Any) -> None:
    http = served.http
    await create(http)
    await send(http, 1)
    await http.post("/groups/web/join", json={"consumer_id": "a", "topic": "clicks"})
    assert len(await consume(http, consumer_id="a")) == 1
    wanted = {"consumer_group": "web", "offsets": [{"partition": 0, "offset": 1, "metadata": "half past"}]}
    stranger = await http.post("/topics/clicks/offsets", json={**wanted, "consumer_id": "b"})
    assert stranger.status_code == 404
    done = await http.post("/topics/clicks/offsets", json={**wanted, "consumer_id": "a"})
    assert done.json()["lag"] == 0
    (committed,) = await (await served.broker.subscription("web")).committed()
    assert (committed.offset, committed.metadata, committed.member) == (1, "half past", "a")


async def test_whoever_gives_no_name_makes_way_for_members_and_must_have_one_then(served: Any) -> None:
    http = served.http
    await create(http)
    await send(http, 1)
    assert len(await consume(http)) == 1
    await http.post("/groups/web/join", json={"consumer_id": "a"})
    assert len(await consume(http, consumer_id="a", timeout_ms=5000)) == 1
    refused = await http.get(CLICKS, params={"consumer_group": "web"})
    assert refused.status_code == 409
    assert "consumer_id" in refused.json()["error"]["hint"]
    await http.delete("/groups/web/members/a")
    assert len(await consume(http, timeout_ms=5000)) == 1
    taken = await http.post("/groups/web/join", json={"consumer_id": session_rules.ANONYMOUS})
    assert taken.status_code == 409


async def test_whoever_gives_no_name_and_goes_away_gives_the_partitions_back(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_rules, "ANONYMOUS_IDLE_S", 0.05)
    monkeypatch.setattr(session_rules, "BEAT_S", 0.05)
    await create(served.http)
    await send(served.http, 1)
    assert len(await consume(served.http)) == 1
    web = await served.broker.subscription("web")
    assert [member.name for member in await web.members()] == [session_rules.ANONYMOUS]
    async with asyncio.timeout(20):
        while await web.members():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    assert web.in_flight == 0
    assert [each["attempt"] for each in await consume(served.http, timeout_ms=5000)] == [1]


async def test_a_record_is_not_handed_to_a_client_that_has_gone(served: Any) -> None:
    http = served.http
    await create(http)
    await consume(http, timeout_ms=0)
    waiting = asyncio.create_task(consume(http, timeout_ms=30_000))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    subscription = await served.broker.subscription("web")
    async with asyncio.timeout(20):
        while (await http.get("/admin/connections")).json()["total"] > 1:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    await send(http, 1)
    assert subscription.in_flight == 0
    assert len(await consume(http, timeout_ms=5000)) == 1


async def test_a_group_has_one_topic(served: Any) -> None:
    await create(served.http)
    await served.http.post("/topics/visits")
    await consume(served.http, timeout_ms=0)
    answer = await served.http.get("/topics/visits/messages?consumer_group=web")
    assert answer.status_code == 409
    wanted = {"consumer_group": "web", "offsets": []}
    assert (await served.http.post("/topics/visits/offsets", json=wanted)).status_code == 409


async def test_messages_are_published_by_the_short_ways(served: Any) -> None:
    first = await served.http.post("/publish", json={"topic": "clicks", "message": {"n": 1}, "key": "k"})
    second = await served.http.post("/topics/clicks/publish", json={"message": "x"})
    assert (first.status_code, second.status_code) == (201, 201)
    messages = await served.broker.read("clicks")
    assert [(each.data, each.key) for each in messages] == [(b'{"n":1}', "k"), (b'"x"', None)]
    assert [first.json()["message_id"], second.json()["message_id"]] == [each.id for each in messages]


async def test_what_does_not_exist_is_404(served: Any) -> None:
    http = served.http
    assert (await http.post("/topics/no/messages", json=[{"value": 1}])).status_code == 404
    assert (await http.get("/topics/no/messages?consumer_group=web")).status_code == 404
    assert (await http.get("/topics/no/offsets?consumer_group=web")).status_code == 404
    await create(http)
    assert (await http.get("/topics/clicks/offsets?consumer_group=no")).status_code == 404
    wanted = {"consumer_group": "no", "offsets": []}
    assert (await http.post("/topics/clicks/offsets", json=wanted)).status_code == 404


async def test_what_is_too_large_is_413(served: Any) -> None:
    await create(served.http)
    large = "x" * (11 * 1024 * 1024)
    assert (await served.http.post(CLICKS, json=[{"value": large}])).status_code == 413


async def test_wrong_polls_are_refused(served: Any) -> None:
    await create(served.http)
    for query in (
        "",
        "consumer_group=a b",
        "consumer_group=web&max_messages=0",
        "consumer_group=web&max_messages=many",
        "consumer_group=web&timeout_ms=-1",
        "consumer_group=web&timeout_ms=99999999",
        "consumer_group=web&auto_offset_reset=middle",
        "consumer_group=web&colour=red",
    ):
        assert (await served.http.get(f"{CLICKS}?{query}")).status_code == 400, query
    assert await served.broker.subscriptions() == []


async def test_wrong_records_are_refused_and_nothing_is_stored(served: Any) -> None:
    await create(served.http)
    both = [{"value": 1, "value_base64": "AA=="}]
    for body in ([], {"messages": []}, [{}], both, [{"value": 1, "offset": 3}], [{"value": 1}, 1], {}):
        answer = await served.http.post(CLICKS, json=body)
        assert answer.status_code == 400, body
    assert (await served.broker.bounds("clicks")).end_offset == 0


async def test_an_offset_beyond_the_end_commits_nothing(served: Any) -> None:
    await create(served.http, partitions=2)
    await send(served.http, 1, 2, 3, keys=True)
    await consume(served.http)
    wanted = [{"partition": 0, "offset": 1}, {"partition": 1, "offset": 999}]
    answer = await served.http.post(
        "/topics/clicks/offsets", json={"consumer_group": "web", "offsets": wanted}
    )
    assert answer.status_code == 416
    assert answer.json()["error"]["details"]["partition"] == 1
    shown = (await served.http.get("/topics/clicks/offsets?consumer_group=web")).json()
    assert shown["lag"] == 3
    answer = await served.http.post(
        "/topics/clicks/offsets",
        json={"consumer_group": "web", "offsets": [{"partition": 7, "offset": 0}]},
    )
    assert answer.status_code == 400
