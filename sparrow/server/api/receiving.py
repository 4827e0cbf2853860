"""Receiving over HTTP: pull, acknowledge, nack, extend.

A pull waits up to ``timeout_ms`` for its first message. Every message has an ``ack_id``, by which any request
may settle it until its deadline; 204 means that this is on disk. When some ids are refused, the others are
settled all the same and the error names the refused ones.

All pulls of a subscription by HTTP are one consumer of it; a stream is one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow.compute as pc

from sparrow.broker.broker import Broker
from sparrow.broker.courier import Portion
from sparrow.broker.push import bodies
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.errors import InvalidArgument, SubscriptionNotFound
from sparrow.model.message import Delivered
from sparrow.model.push import PushFormat
from sparrow.model.subscription import Ordering, SubscriptionPolicy
from sparrow.server.api import spans
from sparrow.server.api.envelope import MessageView, enclose
from sparrow.server.api.family import Answer, Api, Req, body, no_content
from sparrow.server.api.operation import described
from sparrow.server.api.routing import post
from sparrow.server.api.subscriptions import ONE, held

TAG = "receiving"
PULL_MESSAGES_MAX = 10_000
PULL_TIMEOUT_MS_MAX = 60_000
PULL_BYTES = 8 * 1024 * 1024
"""Data of one answer, about."""
SETTLE_MAX = 100_000
"""Messages that one request may settle."""
CLOUDEVENTS = "application/cloudevents-batch+json"

T = TypeVar("T")


class Pull(msgspec.Struct, forbid_unknown_fields=True):
    """How much to pull, and how long to wait for the first message."""

    max_messages: int = 100
    timeout_ms: int = 0


class Pulled(msgspec.Struct):
    """Messages in hand."""

    messages: list[MessageView]


class Settle(msgspec.Struct, forbid_unknown_fields=True):
    """Messages whose work is done."""

    ack_ids: list[str]


class Nack(msgspec.Struct, forbid_unknown_fields=True):
    """Messages whose work failed: again after the backoff or ``delay_s``; without ``retry`` never again."""

    ack_ids: list[str]
    delay_s: float | None = None
    reason: str = ""
    retry: bool = True


class Extend(msgspec.Struct, forbid_unknown_fields=True):
    """Messages whose work takes longer: the deadline is ``seconds`` from now."""

    ack_ids: list[str]
    seconds: float


class Holds:
    """The holds by which HTTP clients pull: one a subscription, so that it has one consumer and not one for
    every request."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._held: dict[str, BrokerSubscription] = {}

    async def of(self, name: str) -> BrokerSubscription:
        """The hold on a subscription that exists."""
        found = self._held.get(name)
        if found is None:
            found = self._held[name] = await self._broker.subscription(name)
        try:
            found.subscription  # noqa: B018 - refuses when it has gone
        except SubscriptionNotFound:
            del self._held[name]
            raise
        return found


def routes(api: Api) -> list[Any]:
    """The handlers."""
    holds = Holds(api.broker)

    @post(
        f"{ONE}/pull",
        status_code=200,
        opt=described(
            "Pull messages",
            tag=TAG,
            description="With `Accept: application/cloudevents-batch+json` the answer is a batch of"
            " CloudEvents, each with its `ackid`.",
            body=Pull,
            is_body_optional=True,
            body_example={"max_messages": 10, "timeout_ms": 1000},
            answers={200: Pulled},
            errors=(404, 409),
        ),
    )
    async def pull_messages(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Pull, is_optional=True)
        if not 0 <= wanted.timeout_ms <= PULL_TIMEOUT_MS_MAX:
            raise InvalidArgument(
                f"timeout_ms must be from 0 to {PULL_TIMEOUT_MS_MAX}, not {wanted.timeout_ms}"
            )
        if not 1 <= wanted.max_messages <= PULL_MESSAGES_MAX:
            raise InvalidArgument(
                f"max_messages must be from 1 to {PULL_MESSAGES_MAX}, not {wanted.max_messages}"
            )
        await held(api, request, subscription)
        handle = await holds.of(subscription)
        timeout_s = wanted.timeout_ms / 1000
        if wants_cloudevents(request):
            pull = handle.pull(wanted.max_messages, timeout_s, max_bytes=PULL_BYTES)
            events = await until_closing(api, request, pull)
            content = b"[" + b",".join(to_cloudevent(each) for each in events or ()) + b"]"
            return Answer(content, 200, media_type=CLOUDEVENTS)
        portions = handle.pull_portions(wanted.max_messages, timeout_s, max_bytes=PULL_BYTES)
        asked_at_us = api.clock.now_us()
        found = await until_closing(api, request, portions)
        spans.received(subscription, found or [], asked_at_us)
        texts = [text for each in in_order(found or [], handle.policy) for text in enclose(each).texts]
        content = f'{{"messages":[{",".join(texts)}]}}'.encode()
        return Answer(content, 200)

    @post(
        f"{ONE}/acknowledge",
        status_code=200,
        opt=described(
            "Acknowledge messages",
            tag=TAG,
            body=Settle,
            body_example={"ack_ids": ["…"]},
            answers={204: None},
            errors=(404, 409),
        ),
    )
    async def acknowledge_messages(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Settle)
        _check(wanted.ack_ids)
        handle = await held(api, request, subscription)
        await handle.ack(wanted.ack_ids, wait=True)
        return no_content()

    @post(
        f"{ONE}/nack",
        status_code=200,
        opt=described(
            "Say that the work failed",
            tag=TAG,
            body=Nack,
            body_example={"ack_ids": ["…"], "delay_s": 5, "reason": "the database is away"},
            answers={204: None},
            errors=(404, 409),
        ),
    )
    async def nack_messages(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Nack)
        _check(wanted.ack_ids)
        handle = await held(api, request, subscription)
        await handle.nack(
            wanted.ack_ids, delay_s=wanted.delay_s, reason=wanted.reason, retry=wanted.retry, wait=True
        )
        await handle.flush()  # Dead letters that this made are there when the answer is.
        return no_content()

    @post(
        f"{ONE}/extend",
        status_code=200,
        opt=described(
            "Ask for more time",
            tag=TAG,
            body=Extend,
            body_example={"ack_ids": ["…"], "seconds": 60},
            answers={204: None},
            errors=(404, 409),
        ),
    )
    async def extend_messages(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Extend)
        _check(wanted.ack_ids)
        handle = await held(api, request, subscription)
        await handle.extend(wanted.ack_ids, wanted.seconds)
        return no_content()

    return [pull_messages, acknowledge_messages, nack_messages, extend_messages]


def _check(ack_ids: Sequence[str]) -> None:
    if not 1 <= len(ack_ids) <= SETTLE_MAX:
        raise InvalidArgument(f"ack_ids are from 1 to {SETTLE_MAX} ids, not {len(ack_ids)}")


def wants_cloudevents(request: Req) -> bool:
    """Whether the answer is to be CloudEvents."""
    return CLOUDEVENTS in request.headers.get("accept", "")


def to_cloudevent(message: Delivered) -> bytes:
    """A message in hand as a CloudEvent, with what settles it as extensions."""
    event = bodies.make(message, PushFormat.CLOUDEVENTS, "").content
    return event[:-1] + f',"ackid":"{message.ack_id}","attempt":{message.attempt}}}'.encode()


def in_order(found: list[Portion], policy: SubscriptionPolicy) -> list[Portion]:
    """Over several streams a window hands out runs; their messages belong in the order of their lane."""
    is_mixed = policy.key_window > 1 and policy.ordering in (Ordering.TOTAL, Ordering.PUBLISHER)
    if len(found) < 2 or not is_mixed:
        return found
    rows = [
        (time, portion._replace(rows=portion.rows.slice(place, 1)))
        for portion in found
        for place, time in enumerate(pc.cast(portion.rows.column("publish_time"), "int64").to_pylist())
    ]
    return [portion for _, portion in sorted(rows, key=lambda row: row[0])]


async def until_closing(api: Api, request: Req, wanted: Awaitable[T]) -> T | None:
    """What is waited for; nothing when the server stops or the client goes before it comes."""
    work = asyncio.ensure_future(wanted)
    done, _ = await asyncio.wait({work}, timeout=0.0)
    if done:
        return work.result()
    # The body has been read: what is received next is that the client has gone.
    others = [asyncio.ensure_future(api.closing.wait()), asyncio.ensure_future(request.receive())]
    try:
        await asyncio.wait({work, *others}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, *others):
            task.cancel()
