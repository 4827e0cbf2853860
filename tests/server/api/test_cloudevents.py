"""CloudEvents in: three content modes become messages, and come out as the events that they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.api.conftest import Served

URL = "/v1/topics/orders/messages"
EVENT: dict[str, Any] = {
    "specversion": "1.0",
    "id": "e-1",
    "source": "/shop",
    "type": "order.created",
    "subject": "o-1",
    "time": "2026-01-31T12:00:00Z",
    "datacontenttype": "application/json",
    "partitionkey": "customer-7",
    "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    "retries": 3,
    "final": True,
    "data": {"amount": 120},
}
ATTRIBUTES = {
    "ce_specversion": "1.0",
    "ce_id": "e-1",
    "ce_source": "/shop",
    "ce_type": "order.created",
    "ce_subject": "o-1",
    "ce_time": "2026-01-31T12:00:00Z",
    "content-type": "application/json",
    "ce_partitionkey": "customer-7",
    "traceparent": EVENT["traceparent"],
    "ce_retries": "3",
    "ce_final": "true",
}


def structured(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "content": json.dumps(event),
        "headers": {"content-type": "application/cloudevents+json; charset=utf-8"},
    }


def binary(event: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in event.items() if name not in ("data", "datacontenttype")}
    headers = {
        f"ce-{name}": str(value).lower() if value is True else str(value) for name, value in own.items()
    }
    return {
        "content": json.dumps(event["data"]),
        "headers": {**headers, "content-type": event["datacontenttype"]},
    }


@pytest.fixture(autouse=True)
async def _orders(served: Served) -> None:
    await served.broker.create_topic("orders")


@pytest.mark.parametrize("mode", [structured, binary])
async def test_an_event_becomes_a_message_in_either_mode(served: Served, mode: Any) -> None:
    answer = await served.http.post(URL, **mode(EVENT))
    assert answer.status_code == 202, answer.text
    (message,) = await served.broker.read("orders")
    assert message.attributes == ATTRIBUTES
    assert (message.key, json.loads(message.data or b"")) == ("customer-7", {"amount": 120})
    assert message.event_time is not None
    assert message.event_time.isoformat() == "2026-01-31T12:00:00+00:00"


async def test_an_event_that_is_sent_again_is_stored_once(served: Served) -> None:
    first = (await served.http.post(URL, **structured(EVENT))).json()
    again = (await served.http.post(URL, **binary(EVENT))).json()
    assert (again["status"], again["message_id"]) == ("duplicate", first["message_id"])
    other = (await served.http.post(URL, **structured({**EVENT, "source": "/other"}))).json()
    assert other["status"] == "published"


async def test_a_batch_of_events_is_a_batch_of_messages(served: Served) -> None:
    events = [{**EVENT, "id": f"e-{n}", "data": n} for n in range(5)]
    headers = {"content-type": "application/cloudevents-batch+json"}
    answer = await served.http.post(f"{URL}/batch", content=json.dumps(events), headers=headers)
    assert (answer.status_code, answer.json()["count"]) == (202, 5)
    assert [message.data for message in await served.broker.read("orders")] == [b"0", b"1", b"2", b"3", b"4"]


async def test_data_is_stored_as_what_it_is(served: Served) -> None:
    bare = {name: EVENT[name] for name in ("specversion", "source", "type")}
    for number, (fields, data) in enumerate(
        [
            ({"data_base64": "AP8="}, b"\x00\xff"),
            ({"data": "hello", "datacontenttype": "text/plain"}, b"hello"),
            ({"data": "hello"}, b'"hello"'),
            ({}, b""),
        ]
    ):
        event = {**bare, "id": str(number), **fields}
        assert (await served.http.post(URL, **structured(event))).status_code == 202
        assert (await served.broker.read("orders", offset=number))[0].data == data


async def test_the_expiry_of_an_event_is_its_time_to_live(served: Served) -> None:
    await served.http.post(URL, **structured({**EVENT, "expirytime": "2126-01-01T00:00:00Z"}))
    await served.http.post(URL, **structured({**EVENT, "id": "e-2", "expirytime": "2020-01-01T00:00:00Z"}))
    lasting, passed = [message.ttl_s for message in await served.broker.read("orders")]
    assert lasting is not None
    assert lasting > 86_400 * 365
    assert passed == 0.001


async def test_an_event_comes_out_as_it_came_in(served: Served) -> None:
    await served.broker.subscribe("billing", "orders")
    await served.http.post(URL, **structured(EVENT))
    answer = await served.http.post(
        "/v1/subscriptions/billing/pull", headers={"accept": "application/cloudevents-batch+json"}
    )
    (event,) = answer.json()
    kept = (
        "specversion",
        "source",
        "type",
        "subject",
        "time",
        "datacontenttype",
        "partitionkey",
        "traceparent",
    )
    assert {name: event[name] for name in kept} == {name: EVENT[name] for name in kept}
    assert (event["data"], event["retries"]) == ({"amount": 120}, "3")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": None}, "id"),
        ({"specversion": "0.3"}, "0.3"),
        ({"Type": "x"}, "Type"),
        ({"time": "yesterday"}, "yesterday"),
        ({"time": "2026-01-31T12:00:00"}, "time zone"),
        ({"data_base64": "AA=="}, "not both"),
        ({"extension": {"a": 1}}, "object"),
    ],
)
async def test_what_is_wrong_with_an_event_is_named(
    served: Served, change: dict[str, Any], named: str
) -> None:
    answer = await served.http.post(URL, **structured({**EVENT, **change}))
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert await served.broker.read("orders") == []
