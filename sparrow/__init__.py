"""Sparrow: a durable publish/subscribe broker whose topics are Spark tables.

    import sparrow

    with sparrow.open("./data") as broker:
        orders = broker.subscribe("billing", "orders.#")
        broker.publish("orders.us", b"hello", key="o-1")
        for message in orders.pull(timeout_s=1.0):
            message.ack()

``sparrow.open`` is for blocking code, ``sparrow.aopen`` for asyncio. ``sparrow.connect`` and
``sparrow.aconnect`` reach a broker elsewhere. All have the same verbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparrow.model import errors
from sparrow.model.errors import SparrowError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from sparrow.broker.broker import Broker
    from sparrow.client.blocking import BlockingBroker, BlockingClient
    from sparrow.client.remote import RemoteBroker
    from sparrow.model.message import Delivered, Message, Receipt, Receipts
    from sparrow.model.pipeline import pipeline
    from sparrow.model.settings import Settings
    from sparrow.model.subscription import Guarantee, Ordering, RetryPolicy, Subscription, SubscriptionPolicy
    from sparrow.model.topic import Codec, Durability, Topic, TopicPolicy

_PLACES = {
    "message": ("Delivered", "Message", "Receipt", "Receipts"),
    "pipeline": ("pipeline",),
    "settings": ("Settings",),
    "subscription": ("Guarantee", "Ordering", "RetryPolicy", "Subscription", "SubscriptionPolicy"),
    "topic": ("Codec", "Durability", "Topic", "TopicPolicy"),
}
"""Names that are imported when they are first used: Spark starts processes that live for one commit, and
each of them imports this package."""

__version__ = "0.1.0"


def open(data: str | os.PathLike[str], *, settings: Settings | None = None) -> BlockingBroker:
    """Opens an embedded broker on a data directory, for blocking code. Use it with ``with``."""
    from sparrow.broker.broker import Broker
    from sparrow.client.blocking import BlockingBroker

    chosen = _settings(data, settings)
    return BlockingBroker(lambda: Broker.open(chosen))


def aopen(
    data: str | os.PathLike[str], *, settings: Settings | None = None
) -> AbstractAsyncContextManager[Broker]:
    """Opens an embedded broker on a data directory, for asyncio. Use it with ``async with``."""
    from contextlib import asynccontextmanager

    from sparrow.broker.broker import Broker

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Broker]:
        broker = await Broker.open(_settings(data, settings))
        async with broker:
            yield broker

    return opened()


def connect(url: str = "sparrow://127.0.0.1:9092", **options: Any) -> BlockingClient:
    """Connects to a broker elsewhere, for blocking code. Use it with ``with``. Options are the fields of
    ``sparrow.client.options.Options``: token, client, publisher, compression, linger_s, reconnect_s, …"""
    from sparrow.client.blocking import BlockingClient
    from sparrow.client.remote import RemoteBroker

    return BlockingClient(lambda: RemoteBroker.open(url, **options))


def aconnect(
    url: str = "sparrow://127.0.0.1:9092", **options: Any
) -> AbstractAsyncContextManager[RemoteBroker]:
    """Connects to a broker elsewhere, for asyncio. Use it with ``async with``; options as in ``connect``."""
    from contextlib import asynccontextmanager

    from sparrow.client.remote import RemoteBroker

    @asynccontextmanager
    async def opened() -> AsyncGenerator[RemoteBroker]:
        broker = await RemoteBroker.open(url, **options)
        async with broker:
            yield broker

    return opened()


def _settings(data: Any, settings: Settings | None) -> Settings:
    import os

    import msgspec

    from sparrow.model.settings import Settings

    try:
        path = os.fspath(data)
    except TypeError as error:
        raise errors.InvalidArgument(f"data is a path, not {type(data).__name__}") from error
    return msgspec.structs.replace(settings or Settings(), data=str(path))


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for place, names in _PLACES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"sparrow.model.{place}"), name)
            return found
    raise AttributeError(f"module 'sparrow' has no attribute {name!r}")


__all__ = [
    "Codec",
    "Delivered",
    "Durability",
    "Guarantee",
    "Message",
    "Ordering",
    "Receipt",
    "Receipts",
    "RetryPolicy",
    "Settings",
    "SparrowError",
    "Subscription",
    "SubscriptionPolicy",
    "Topic",
    "TopicPolicy",
    "aconnect",
    "aopen",
    "connect",
    "errors",
    "open",
    "pipeline",
]
