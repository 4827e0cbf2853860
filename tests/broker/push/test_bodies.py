"""What a webhook says, format by format."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.broker.push import bodies
from sparrow.model.message import Message
from sparrow.model.push import PushFormat

AT_US = 1_700_000_000_123_456


class Lot:
    """A batch of one."""

    topic, topic_id, partition = "orders.us", 3, 1

    def __init__(self, **values: Any) -> None:
        self._values = {"publish_time": AT_US, **values}

    def value(self, column: str, row: int) -> Any:
        return self._values.get(column)


def message(data: bytes | None, key: str | None = "o-1", **values: Any) -> Message:
    return Message(Lot(**values), 0, 7, data, key)


def made(format: str, data: bytes | None, **values: Any) -> bodies.Body:
    return bodies.make(message(data, **values), PushFormat(format), "shop")


def test_an_envelope_holds_everything_and_json_data_byte_for_byte() -> None:
    body = made("envelope", b'{"a":  1.10}', attributes=[("env", "prod")])
    assert b'"data":{"a":  1.10}' in body.content
    assert json.loads(body.content) == {
        "id": "3-1-7",
        "type": "orders.us",
        "timestamp": "2023-11-14T22:13:20.123456Z",
        "topic": "orders.us",
        "subscription": "shop",
        "key": "o-1",
        "attributes": {"env": "prod"},
        "data": {"a": 1.1},
    }
    assert body.headers["Content-Type"] == "application/json"


@given(st.binary())
def test_whatever_the_data_an_envelope_is_json_and_gives_it_back(data: bytes) -> None:
    found = json.loads(made("envelope", data).content)
    if "data_base64" in found:
        assert base64.b64decode(found["data_base64"]) == data
    else:
        assert found["data"] == json.loads(data)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"{", b'"\xff"', b"NaN", b"[" * 100_000, b'{"a":1}x', b"\x00"]
)
def test_what_is_no_json_is_base64(data: bytes) -> None:
    assert json.loads(made("envelope", data).content)["data_base64"] == base64.b64encode(data).decode()


@pytest.mark.parametrize("format", ["envelope", "raw", "cloudevents", "cloudevents_binary"])
def test_a_tombstone_has_no_data(format: str) -> None:
    body = made(format, None)
    if format == "envelope":
        assert json.loads(body.content)["data"] is None
    elif format == "cloudevents":
        assert not {"data", "data_base64"} & set(json.loads(body.content))
    else:
        assert body.content == b""


def test_raw_is_the_data_and_its_type() -> None:
    body = made("raw", b"<x/>", attributes=[("content-type", "text/xml")])
    assert (body.content, body.headers["Content-Type"]) == (b"<x/>", "text/xml")
    assert (body.headers["X-PubSub-Topic"], body.headers["X-PubSub-Key"]) == ("orders.us", "o-1")


def test_a_cloudevent_takes_its_attributes_from_the_message() -> None:
    given = [("ce_type", "com.example.paid"), ("ce_source", "/shop"), ("ce_sequence", "9"), ("env", "prod")]
    event = json.loads(
        made("cloudevents", b'{"a":1}', attributes=[*given, ("not-a-name", "x"), ("id", "y")]).content
    )
    assert event == {
        "specversion": "1.0",
        "id": "3-1-7",
        "source": "/shop",
        "type": "com.example.paid",
        "time": "2023-11-14T22:13:20.123456Z",
        "datacontenttype": "application/json",
        "subject": "o-1",
        "partitionkey": "o-1",
        "sequence": "9",
        "env": "prod",
        "data": {"a": 1},
    }


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("application/json", "data"),
        ("application/problem+json; charset=utf-8", "data"),
        ("text/plain", "data_base64"),
    ],
)
def test_only_data_that_is_meant_as_json_stands_in_a_cloudevent_as_such(kind: str, field: str) -> None:
    event = json.loads(made("cloudevents", b"123", attributes=[("content-type", kind)]).content)
    assert field in event


def test_a_binary_cloudevent_has_its_attributes_in_headers() -> None:
    body = made("cloudevents_binary", b"\x00", attributes=[("ce_type", 'a"b%c ü')])
    assert body.content == b"\x00"
    assert body.headers["ce-type"] == "a%22b%25c %C3%BC"
    assert body.headers["Content-Type"] == "application/octet-stream"


@given(st.text(), st.text(), st.text())
def test_no_attribute_can_break_out_of_a_header(name: str, value: str, key: str) -> None:
    attributes = [
        (name, value),
        ("traceparent", value),
        ("tracestate", value),
        ("content-type", value),
        ("ce_x", value),
    ]
    for format in PushFormat:
        found = bodies.make(message(b"1", key=key, attributes=attributes), format, "shop")
        for header, text in found.headers.items():
            assert header.isascii()
            assert all(" " <= character <= "~" for character in text)


def test_only_a_trace_context_is_passed_on_as_one() -> None:
    good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    body = made("raw", b"", attributes=[("traceparent", good), ("tracestate", "a=b")])
    assert (body.headers["traceparent"], body.headers["tracestate"]) == (good, "a=b")
    body = made("raw", b"", attributes=[("traceparent", "mine"), ("tracestate", "a=b")])
    assert not {"traceparent", "tracestate"} & set(body.headers)


def test_a_message_that_was_stored_again_keeps_its_first_id() -> None:
    assert json.loads(made("envelope", b"1", original_id="1-0-2").content)["id"] == "1-0-2"
