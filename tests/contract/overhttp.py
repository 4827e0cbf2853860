"""The verbs of a broker over its HTTP API, for the contract suite. What HTTP cannot say skips the test."""

from __future__ import annotations

import asyncio
import base64
import builtins
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import msgspec
import pytest

from sparrow.model.consumer import Consumer
from sparrow.model.errors import SchemaNotFound, from_dict
from sparrow.model.message import parse_message_id, to_us
from sparrow.model.schema import TopicSchema

_POLICY = {"dead_letter_topic": "dead_letter_topic_id"}


def unsaid(what: str) -> NoReturn:
    pytest.skip(f"the events family of the HTTP API has no {what}")


class OverHttp:
    """Asks a server, and raises the typed errors that it tells."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = await self.client.request(method, path, json=body, params=query or None)
        if answer.status_code >= 400:
            raise from_dict(answer.json()["error"])
        return answer.json() if answer.content else None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def verb(*args: Any, **options: Any) -> None:
            unsaid(name)

        return verb

    # Topics.

    async def create_topic(self, name: str, **options: Any) -> Any:
        return topic(await self.ask("POST", "/v1/topics", {"name": name, **hours(options)}))

    async def topic(self, name: str) -> Any:
        return topic(await self.ask("GET", f"/v1/topics/{name}"))

    async def topics(self) -> list[Any]:
        return [topic(each) for each in (await self.ask("GET", "/v1/topics"))["topics"]]

    async def update_topic(self, name: str, **options: Any) -> Any:
        return topic(await self.ask("PATCH", f"/v1/topics/{name}", hours(options)))

    async def delete_topic(self, name: str, *, force: bool = False) -> None:
        await self.ask("DELETE", f"/v1/topics/{name}", force=str(force).lower())

    async def set_topic_schema(self, name: str, **schema: Any) -> Any:
        return msgspec.convert(await self.ask("PUT", f"/v1/topics/{name}/schema", schema), TopicSchema)

    async def topic_schema(self, name: str) -> Any:
        try:
            return msgspec.convert(await self.ask("GET", f"/v1/topics/{name}/schema"), TopicSchema)
        except SchemaNotFound:
            return None

    async def delete_topic_schema(self, name: str) -> None:
        await self.ask("DELETE", f"/v1/topics/{name}/schema")

    async def bounds(self, name: str, partition: int = 0) -> Any:
        shown = await self.ask("GET", f"/v1/topics/{name}")
        return SimpleNamespace(**shown["offsets"][partition])

    # Publishing.

    async def publish(self, name: str, data: Any, **values: Any) -> Any:
        found = await self.ask("POST", f"/v1/topics/{name}/messages", message(data, **values))
        return SimpleNamespace(
            topic=found["topic"],
            partition=found["partition"],
            offset=found["offset"],
            message_id=found["message_id"],
            publish_time_us=moment_us(found["publish_time"]),
            is_duplicate=found["status"] == "duplicate",
        )

    async def publish_batch(self, name: str, data: list[Any], **columns: Any) -> list[Any]:
        singular = {
            "keys": "key", "attributes": "attributes", "event_times": "event_time",
            "priorities": "priority", "idempotency_keys": "idempotency_key",
        }  # fmt: skip
        messages = [
            message(each, **{singular[column]: values[place] for column, values in columns.items()})
            for place, each in enumerate(data)
        ]
        found = await self.ask("POST", f"/v1/topics/{name}/messages/batch", {"messages": messages})
        return [Receipt(each) for each in found["message_ids"]]

    async def read(
        self, name: str, *, partition: int = 0, offset: int = 0, max_messages: int = 1000
    ) -> list[Any]:
        """By a subscription that is made for it: HTTP reads a log as its subscribers do."""
        reader = await self.subscribe("contract-reader", name, start="earliest", ack_deadline_s=600)
        try:
            await reader.seek({(name, partition): offset})
            found = await reader.pull(10_000)
            own = [each for each in found if each.partition == partition]
            return sorted(own, key=lambda each: each.offset)[:max_messages]
        finally:
            await reader.unsubscribe()

    # Subscriptions.

    async def subscribe(self, name: str, pattern: str, *, start: Any = "latest", **policy: Any) -> Any:
        asked = {"name": name, "topic_id": pattern, "start": start, **options(policy)}
        return HttpSubscription(self, await self.ask("POST", "/v1/subscriptions", asked))

    async def subscription(self, name: str) -> Any:
        return HttpSubscription(self, await self.ask("GET", f"/v1/subscriptions/{name}"))

    async def subscriptions(self) -> list[Any]:
        found = (await self.ask("GET", "/v1/subscriptions"))["subscriptions"]
        return [SimpleNamespace(name=each["id"], is_paused=each["status"] == "paused") for each in found]

    async def dead_letters(self, name: str) -> Any:
        return HttpLetters(self, f"/v1/subscriptions/{name}/dlq")

    async def snapshots(self) -> list[Any]:
        return [SimpleNamespace(**each) for each in (await self.ask("GET", "/v1/snapshots"))["snapshots"]]

    async def delete_snapshot(self, name: str) -> None:
        await self.ask("DELETE", f"/v1/snapshots/{name}")


class Receipt:
    """One message of a batch; which of them were repeats is only counted."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        _, self.partition, self.offset = parse_message_id(message_id)

    @property
    def is_duplicate(self) -> bool:
        unsaid("receipts that tell which messages of a batch are repeats")


class HttpSubscription(Consumer):
    """A subscription by its name; every settlement is on disk when it returns."""

    def __init__(self, broker: OverHttp, shown: dict[str, Any]) -> None:
        self.name = shown["id"]
        self._broker = broker
        self._path = f"/v1/subscriptions/{self.name}"
        self._shown = shown

    @property
    def pattern(self) -> str:
        return str(self._shown["topic_id"])

    @property
    def policy(self) -> Any:
        return SimpleNamespace(**self._shown)

    async def pull(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Any]:
        if max_bytes is not None:
            unsaid("pull that is bounded in bytes by its client")
        asked = {"max_messages": max_messages, "timeout_ms": int(timeout_s * 1000)}
        found = await self._broker.ask("POST", f"{self._path}/pull", asked)
        return [HttpMessage(self, each) for each in found["messages"]]

    async def ack(self, messages: Any, *, wait: bool = False) -> None:
        await self._settle("acknowledge", messages)

    async def nack(
        self,
        messages: Any,
        *,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
        wait: bool = False,
    ) -> None:
        await self._settle("nack", messages, delay_s=delay_s, reason=reason, retry=retry)

    async def extend(self, messages: Any, seconds: float) -> None:
        await self._settle("extend", messages, seconds=seconds)

    async def _settle(self, verb: str, messages: Any, **more: Any) -> None:
        ids = [each if isinstance(each, str) else each.ack_id for each in messages]
        if ids:
            await self._broker.ask("POST", f"{self._path}/{verb}", {"ack_ids": ids, **more})

    async def flush(self) -> None:
        """Nothing is under way."""

    async def lag(self) -> int:
        return int((await self._broker.ask("GET", self._path))["lag"]["messages"])

    @property
    async def in_flight(self) -> int:
        return int((await self._broker.ask("GET", self._path))["in_flight"])

    async def seek(self, target: Any) -> None:
        asked: dict[str, Any] = {"snapshot": target}
        if target in ("earliest", "latest"):
            asked = {"position": target}
        elif isinstance(target, dict):
            places = [{"topic": t, "partition": p, "offset": at} for (t, p), at in target.items()]
            asked = {"offsets": places}
        elif not isinstance(target, str):
            asked = {"time": target}
        await self._broker.ask("POST", f"{self._path}/seek", asked)

    async def snapshot(self, name: str) -> None:
        await self._broker.ask("POST", f"{self._path}/snapshots", {"name": name})

    async def update(self, **policy: Any) -> None:
        self._shown = await self._broker.ask("PATCH", self._path, options(policy))

    async def pause(self) -> None:
        await self._broker.ask("POST", f"{self._path}/pause")

    async def resume(self) -> None:
        await self._broker.ask("POST", f"{self._path}/resume")

    async def unsubscribe(self) -> None:
        await self._broker.ask("DELETE", self._path)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def verb(*args: Any, **options: Any) -> None:
            unsaid(f"{name} of a subscription")

        return verb


class HttpMessage:
    """A message as JSON told it."""

    def __init__(self, subscription: HttpSubscription | None, shown: dict[str, Any]) -> None:
        self._subscription = subscription
        self.id = shown["message_id"]
        self.topic = shown["topic"]
        self.partition = shown.get("partition", 0)
        self.offset = shown.get("offset", 0)
        self.key = shown.get("ordering_key")
        self.attributes = shown.get("attributes", {})
        self.data = data_of(shown)
        self.attempt = shown.get("attempt", 0)
        self.ack_id = shown.get("ack_id", "")
        self.priority = shown.get("priority", 0)
        self.ttl_s = shown.get("ttl_s")
        self.idempotency_key = shown.get("idempotency_key")
        self.event_time = when(shown.get("event_time"))
        self.deliver_at = when(shown.get("deliver_at"))
        self.publish_time_us = moment_us(shown.get("publish_time"))

    @property
    def is_tombstone(self) -> bool:
        return self.data is None

    async def ack(self) -> None:
        assert self._subscription is not None
        await self._subscription.ack([self])

    async def nack(self, **options: Any) -> None:
        assert self._subscription is not None
        await self._subscription.nack([self], **options)

    async def extend(self, seconds: float) -> None:
        assert self._subscription is not None
        await self._subscription.extend([self], seconds)


class HttpLetters:
    """The dead letters of a subscription."""

    def __init__(self, broker: OverHttp, path: str) -> None:
        self._broker = broker
        self._path = path

    async def list(self) -> list[Any]:
        found = (await self._broker.ask("GET", self._path))["dead_letters"]
        return [
            SimpleNamespace(
                **{name: each[name] for name in ("attempts", "last_error", "is_loop")},
                message=HttpMessage(None, each["message"]),
                message_id=each["message"]["message_id"],
                topic=each["message"]["topic"],
                dead_at_us=moment_us(each["moved_at"]),
            )
            for each in found
        ]

    async def replay(self, *, destination: str | None = None, **options: Any) -> Any:
        named = {} if destination is None else {"destination_subscription_id": destination}
        return replay(await self._broker.ask("POST", f"{self._path}/replay", {**named, **options}))

    async def replays(self) -> builtins.list[Any]:
        return [replay(each) for each in (await self._broker.ask("GET", f"{self._path}/replays"))["replays"]]

    async def wait(self, replay_id: str) -> Any:
        async with asyncio.timeout(60):
            while True:
                found = replay(await self._broker.ask("GET", f"{self._path}/replays/{replay_id}"))
                if found.status not in ("pending", "running"):
                    return found
                await asyncio.sleep(0.02)

    async def purge(self, **options: Any) -> int:
        return int((await self._broker.ask("POST", f"{self._path}/purge", options))["purged"])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def verb(*args: Any, **options: Any) -> None:
            unsaid(f"{name} of dead letters")

        return verb


# Values.


def replay(shown: dict[str, Any]) -> Any:
    return SimpleNamespace(
        **{name: shown[name] for name in ("replay_id", "status", "replayed", "failed", "error")},
        total=shown["message_count"],
        destination=shown["destination_subscription_id"],
    )


def topic(shown: dict[str, Any]) -> Any:
    kept = {name: value for name, value in shown.items() if name != "offsets"}
    hours = kept["retention_hours"]
    return SimpleNamespace(**kept, policy=SimpleNamespace(retention_s=hours and hours * 3600.0))


def hours(options: dict[str, Any]) -> dict[str, Any]:
    if "retention_s" in options:
        options["retention_hours"] = options.pop("retention_s") / 3600.0
    return options


def options(policy: dict[str, Any]) -> dict[str, Any]:
    """Options of a subscription in the words of HTTP."""
    given = {_POLICY.get(name, name): value for name, value in policy.items()}
    if "retry" in given:
        retry = given.pop("retry")
        given["retry_policy"] = {
            "initial_interval_ms": retry.pop("min_backoff_s", 1.0) * 1000,
            "max_interval_ms": retry.pop("max_backoff_s", 300.0) * 1000,
            "multiplier": retry.pop("multiplier", 4.0),
            "immediate_retries": retry.pop("immediate_retries", 1),
            **retry,
        }
    return given


def message(data: Any, *, key: str | None = None, **values: Any) -> dict[str, Any]:
    is_bytes = isinstance(data, bytes)
    shown: dict[str, Any] = {"data_base64": base64.b64encode(data).decode() if is_bytes else data}
    if not is_bytes and data is not None:
        shown = {"data_base64": [data]}
    for name, value in values.items():
        shown[name] = value.isoformat() if isinstance(value, datetime) else value
    return shown if key is None else {**shown, "ordering_key": key}


def data_of(shown: dict[str, Any]) -> bytes | None:
    """The bytes; what was JSON is told as a value, and these tests publish whole numbers only."""
    if "data" in shown:
        return str(shown["data"]).encode()
    encoded = shown.get("data_base64")
    return None if encoded is None else base64.b64decode(encoded)


def when(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC)


def moment_us(text: str | None) -> int:
    found = when(text)
    return 0 if found is None else to_us(found)
