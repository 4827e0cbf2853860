"""OpenTelemetry: spans where a tracer provider is there, and contexts that travel with messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.api.conftest import Served

TRACE, SPAN = "a" * 32, "b" * 16
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


async def test_a_publish_is_a_span_below_its_request_and_its_context_is_carried_on(
    served: Served, finished: InMemorySpanExporter
) -> None:
    await served.broker.create_topic("orders")
    await served.broker.subscribe("billing", "orders")
    headers = {"traceparent": PARENT}
    await served.http.post("/v1/topics/orders/messages", json={"data": 1}, headers=headers)
    batch = {"messages": [{"data": 2}, {"data": 3, "attributes": {"a": "b"}}]}
    await served.http.post("/v1/topics/orders/messages/batch", json=batch, headers=headers)
    one, many = finished.get_finished_spans()
    assert (one.name, one.kind, many.name) == ("send orders", trace.SpanKind.PRODUCER, "send orders")
    assert one.parent is not None
    assert (f"{one.parent.trace_id:032x}", f"{one.parent.span_id:016x}") == (TRACE, SPAN)
    assert one.attributes is not None
    assert one.attributes["messaging.destination.name"] == "orders"
    carried = [message.attributes["traceparent"] for message in await served.broker.read("orders")]
    assert carried == [f"00-{TRACE}-{each.context.span_id:016x}-01" for each in (one, many, many)]  # type: ignore[union-attr]
    finished.clear()
    await served.http.post("/v1/subscriptions/billing/pull")
    (received,) = finished.get_finished_spans()
    assert (received.name, received.kind) == ("receive billing", trace.SpanKind.CLIENT)
    linked = [f"{link.context.span_id:016x}" for link in received.links]
    assert linked == [each.split("-")[2] for each in carried]


async def test_without_a_provider_contexts_travel_as_they_came(served: Served) -> None:
    await served.broker.create_topic("orders")
    sent: list[dict[str, Any]] = [{"data": 1}, {"data": 2, "attributes": {"traceparent": "own"}}]
    for message in sent:
        await served.http.post("/v1/topics/orders/messages", json=message, headers={"traceparent": PARENT})
    found = [message.attributes["traceparent"] for message in await served.broker.read("orders")]
    assert found == [PARENT, "own"]


def test_opentelemetry_is_not_loaded_by_a_server_that_nobody_traces() -> None:
    program = "import sys, sparrow.server.http\nprint('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
