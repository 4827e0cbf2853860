"""Topics over HTTP."""

from __future__ import annotations

import pytest

from tests.server.api.conftest import Served


async def test_a_topic_is_created_with_what_was_asked_for_and_found_again(served: Served) -> None:
    wanted = {"name": "orders", "partitions": 3, "retention_hours": 72, "ordering_key": "customer.id"}
    made = await served.http.post("/v1/topics", json=wanted)
    assert made.status_code == 201
    assert made.headers["location"] == "/v1/topics/orders"
    assert wanted.items() <= made.json().items()
    found = (await served.http.get("/v1/topics/orders")).json()
    assert found.pop("offsets") == [
        {"partition": number, "start_offset": 0, "end_offset": 0} for number in range(3)
    ]
    assert found == made.json()
    topic = await served.broker.topic("orders")
    assert (topic.partitions, topic.policy.retention_s, topic.policy.key_field) == (
        3,
        72 * 3600,
        "customer.id",
    )


async def test_a_name_that_is_taken_is_a_conflict(served: Served) -> None:
    await served.http.post("/v1/topics", json={"name": "orders"})
    again = await served.http.post("/v1/topics", json={"name": "orders"})
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "TOPIC_EXISTS"


async def test_topics_are_listed_in_pages_with_the_total_beside_them(served: Served) -> None:
    for name in ("c", "a", "b"):
        await served.broker.create_topic(name)
    page = await served.http.get("/v1/topics", params={"limit": 2, "offset": 1})
    assert [topic["name"] for topic in page.json()["topics"]] == ["b", "c"]
    assert page.json()["total"] == 3
    assert page.headers["x-total-count"] == "3"


async def test_a_change_keeps_what_it_does_not_name(served: Served) -> None:
    await served.http.post("/v1/topics", json={"name": "orders", "retention_hours": 1, "codec": "zstd"})
    changed = await served.http.patch("/v1/topics/orders", json={"retention_hours": None, "partitions": 2})
    assert changed.status_code == 200
    shown = changed.json()
    assert (shown["retention_hours"], shown["partitions"], shown["codec"]) == (None, 2, "zstd")


async def test_a_topic_in_use_is_deleted_by_force_only(served: Served) -> None:
    await served.broker.create_topic("orders")
    await served.broker.subscribe("billing", "orders")
    refused = await served.http.delete("/v1/topics/orders")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "TOPIC_IN_USE")
    assert (await served.http.delete("/v1/topics/orders?force=true")).status_code == 204
    assert (await served.http.get("/v1/topics/orders")).status_code == 404


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "orders", "partitons": 2}, "partitons"),
        ({"name": "orders", "partitions": "two"}, "$.partitions"),
        ({"name": "orders", "partitions": 0}, "partitions"),
        ({"name": "or ders"}, "or ders"),
        ({"name": "orders", "ordering_key": "a..b"}, "a..b"),
        ({}, "name"),
    ],
)
async def test_what_is_wrong_with_a_topic_is_named(
    served: Served, body: dict[str, object], named: str
) -> None:
    refused = await served.http.post("/v1/topics", json=body)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]
    assert await served.broker.topics() == []
