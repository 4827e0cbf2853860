"""OpenTelemetry spans of publishing and receiving, where the process has a tracer provider; else nothing.

A provider is there when an application has set one, when ``sparrow up`` was started by
``opentelemetry-instrument``, or when ``OTEL_PYTHON_TRACER_PROVIDER`` names one. Until then OpenTelemetry is
not even imported.

A publish is a span ``send <topic>`` below the span of the request's ``traceparent``, and messages carry *its*
context on. A pull is a span ``receive <subscription>`` with a link to the context of every message; links and
not parents, because messages of many traces are received together.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparrow.broker.courier import Portion
from sparrow.server.api.envelope import attributes_of

_IS_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
LINKS_MAX = 128
"""Links of one span, as OpenTelemetry limits them by default."""


def tracer() -> Any:
    """What makes spans; none where nobody wants them."""
    if not _IS_NAMED and "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider.get_tracer("sparrow")


@contextlib.contextmanager
def publishing(topic: str, context: Mapping[str, str], *, is_batch: bool = False) -> Iterator[dict[str, str]]:
    """The trace context that messages are to carry: of a span of their publish, else as it came."""
    found = tracer()
    if found is None:
        yield dict(context)
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator, carried = TraceContextTextMapPropagator(), dict[str, str]()
    fields = {
        "messaging.system": "sparrow",
        "messaging.destination.name": topic,
        "messaging.operation.name": "publish_batch" if is_batch else "publish",
        "messaging.operation.type": "send",
    }
    parent = propagator.extract(dict(context))
    with found.start_as_current_span(
        f"send {topic}", context=parent, kind=SpanKind.PRODUCER, attributes=fields
    ):
        propagator.inject(carried)
        yield carried


def received(subscription: str, portions: Sequence[Portion], started_at_us: int) -> None:
    """Notes that messages were handed to a client that asked for them."""
    found = tracer()
    if found is None or not portions:
        return
    from opentelemetry.trace import SpanKind

    span = found.start_span(
        f"receive {subscription}",
        kind=SpanKind.CLIENT,
        start_time=started_at_us * 1000,
        links=list(_links(portions)),
        attributes={
            "messaging.system": "sparrow",
            "messaging.destination.name": portions[0].topic,
            "messaging.destination.subscription.name": subscription,
            "messaging.operation.name": "pull",
            "messaging.operation.type": "receive",
            "messaging.batch.message_count": sum(portion.rows.num_rows for portion in portions),
        },
    )
    span.end()


def _links(portions: Sequence[Portion]) -> Iterator[Any]:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    carried = [own for portion in portions for own in attributes_of(portion.rows) if own]
    for own in [own for own in carried if "traceparent" in own][:LINKS_MAX]:
        context = trace.get_current_span(propagator.extract(own)).get_span_context()
        if context.is_valid:
            yield trace.Link(context)
