"""Publishing over HTTP: what is answered is stored, as it was sent."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from sparrow.model.message import Message
from tests.server.api.conftest import Served

JSON = {"content-type": "application/json"}


async def stored(served: Served, topic: str = "orders") -> list[Message]:
    return await served.broker.read(topic)


@pytest.fixture(autouse=True)
async def _orders(served: Served) -> None:
    await served.broker.create_topic("orders")


async def test_json_data_is_stored_byte_for_byte_as_it_was_sent(served: Served) -> None:
    body = b'{"data": {"b": 1,  "a": [1.50, "\\u00e4"]}, "attributes": {"env": "prod"}}'
    answer = await served.http.post("/v1/topics/orders/messages", content=body, headers=JSON)
    assert answer.status_code == 202
    (message,) = await stored(served)
    assert answer.json()["message_id"] == message.id
    assert answer.json()["status"] == "published"
    assert message.data == b'{"b": 1,  "a": [1.50, "\\u00e4"]}'
    assert message.attributes == {"env": "prod"}


async def test_every_field_of_a_message_reaches_the_log(served: Served) -> None:
    body = {
        "data_base64": base64.b64encode(b"\x00\xff").decode(),
        "ordering_key": "k",
        "idempotency_key": "i",
        "priority": 5,
        "ttl_s": 1.5,
        "deliver_at": "2030-01-01T00:00:00Z",
        "event_time": 12.5,
    }
    assert (await served.http.post("/v1/topics/orders/messages", json=body)).status_code == 202
    (message,) = await stored(served)
    assert (message.data, message.key, message.idempotency_key) == (b"\x00\xff", "k", "i")
    assert (message.priority, message.ttl_s) == (5, 1.5)
    assert message.deliver_at is not None
    assert message.deliver_at.isoformat() == "2030-01-01T00:00:00+00:00"
    assert message.event_time is not None
    assert message.event_time.timestamp() == 12.5


async def test_a_repeated_idempotency_key_returns_the_first_receipt(served: Served) -> None:
    body = {"data": 1, "idempotency_key": "once"}
    first = (await served.http.post("/v1/topics/orders/messages", json=body)).json()
    again = (await served.http.post("/v1/topics/orders/messages", json=body)).json()
    assert again == {**first, "status": "duplicate"}
    assert len(await stored(served)) == 1


async def test_null_data_is_json_and_null_base64_is_a_tombstone(served: Served) -> None:
    await served.http.post("/v1/topics/orders/messages", json={"data": None, "ordering_key": "a"})
    await served.http.post("/v1/topics/orders/messages", json={"data_base64": None, "ordering_key": "b"})
    assert [message.data for message in await stored(served)] == [b"null", None]


async def test_a_raw_body_is_the_data_and_the_rest_is_said_beside_it(served: Served) -> None:
    answer = await served.http.post(
        "/v1/topics/orders/messages?ordering_key=k&priority=3",
        content=b"\x01\x02",
        headers={"content-type": "application/octet-stream", "x-attribute-env": "prod"},
    )
    assert answer.status_code == 202
    (message,) = await stored(served)
    assert (message.data, message.key, message.priority) == (b"\x01\x02", "k", 3)
    assert message.attributes == {"env": "prod", "content-type": "application/octet-stream"}


async def test_the_trace_context_of_a_request_is_kept(served: Served) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}
    await served.http.post("/v1/topics/orders/messages", json={"data": 1}, headers=trace)
    await served.http.post(
        "/v1/topics/orders/messages/batch",
        json={"messages": [{"data": 1, "attributes": {"tracestate": "own"}}]},
        headers=trace,
    )
    first, second = await stored(served)
    assert first.attributes == trace
    assert second.attributes == {**trace, "tracestate": "own"}


@pytest.mark.parametrize("is_lines", [False, True])
async def test_a_batch_is_stored_in_order_with_one_id_each(served: Served, is_lines: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"data": {"n": n}, "ordering_key": f"k{n}", "ttl_s": n + 1} for n in range(50)
    ]
    if is_lines:
        import json

        lines = "\n".join(json.dumps(message) for message in messages) + "\n\n"
        answer = await served.http.post(
            "/v1/topics/orders/messages/batch",
            content=lines.encode(),
            headers={"content-type": "application/x-ndjson"},
        )
    else:
        answer = await served.http.post("/v1/topics/orders/messages/batch", json={"messages": messages})
    assert answer.status_code == 202
    found = await stored(served)
    assert [message.id for message in found] == answer.json()["message_ids"]
    assert [message.key for message in found] == [f"k{n}" for n in range(50)]
    assert [message.ttl_s for message in found] == [n + 1 for n in range(50)]
    assert answer.json()["count"] == 50


async def test_a_batch_over_partitions_names_each_message_by_its_place(served: Served) -> None:
    await served.broker.create_topic("wide", partitions=4)
    messages = [{"data": n, "ordering_key": f"k{n}", "idempotency_key": f"i{n}"} for n in range(20)]
    first = (await served.http.post("/v1/topics/wide/messages/batch", json={"messages": messages})).json()
    again = (await served.http.post("/v1/topics/wide/messages/batch", json={"messages": messages})).json()
    assert again["message_ids"] == first["message_ids"]
    assert (first["duplicates"], again["duplicates"]) == (0, 20)
    by_id = {
        message.id: message.data
        for partition in range(4)
        for message in await served.broker.read("wide", partition=partition)
    }
    assert [by_id[name] for name in first["message_ids"]] == [str(n).encode() for n in range(20)]


async def test_a_batch_with_one_bad_message_stores_nothing(served: Served) -> None:
    for bad, named in ((b'{"data": 1, "dta": 2}', "dta"), (b'{"priority": 3}', "neither"), (b"{", "line 2")):
        answer = await served.http.post(
            "/v1/topics/orders/messages/batch",
            content=b'{"data": 1}\n' + bad + b'\n{"data": 3}\n',
            headers={"content-type": "application/x-ndjson"},
        )
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
    assert await stored(served) == []


async def test_the_ordering_key_of_a_topic_is_taken_from_the_data(served: Served) -> None:
    await served.broker.create_topic("keyed", key_field="customer.id")
    messages = [
        {"data": {"customer": {"id": 7}}},
        {"data": {"customer": {"id": "x"}}, "ordering_key": "own"},
        {"data": {"customer": "none"}},
        {"data": [1]},
    ]
    await served.http.post("/v1/topics/keyed/messages", json=messages[0])
    await served.http.post("/v1/topics/keyed/messages/batch", json={"messages": messages})
    keys = [message.key for message in await stored(served, "keyed")]
    assert keys == ["7", "7", "own", None, None]


async def test_a_message_that_is_too_large_is_413(served: Served) -> None:
    body = b'{"data":"' + b"x" * (11 * 1024 * 1024) + b'"}'
    answer = await served.http.post("/v1/topics/orders/messages", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "MESSAGE_TOO_LARGE")
    many = [{"data": "x" * 1_000_000}] * 9
    answer = await served.http.post("/v1/topics/orders/messages/batch", json={"messages": many})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "MESSAGE_TOO_LARGE")
    assert await stored(served) == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"data": 1, "data_base64": "eA=="}, "not both"),
        ({"attributes": {}}, "neither"),
        ({"data_base64": "*"}, "data_base64"),
        ({"data": 1, "attributes": {"a": 1}}, "$.attributes"),
        ({"data": 1, "deliver_at": "2030-01-01T00:00:00"}, "time zone"),
        ({"data": 1, "deliver_at": 5, "delay_s": 5}, "not both"),
        ({"data": 1, "priority": 1000}, "priority"),
        ({"data": 1, "ordering_key": "x" * 2000}, "key"),
    ],
)
async def test_what_is_wrong_with_a_message_is_named(
    served: Served, body: dict[str, Any], named: str
) -> None:
    answer = await served.http.post("/v1/topics/orders/messages", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert await stored(served) == []


async def test_a_limit_of_the_topic_is_429_with_when_to_come_again(served: Served) -> None:
    await served.broker.create_topic("slow", flow={"overflow": "reject", "messages_per_s": 1})
    answers = [await served.http.post("/v1/topics/slow/messages", json={"data": n}) for n in range(5)]
    refused = next(answer for answer in answers if answer.status_code != 202)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["retryable"] is True
