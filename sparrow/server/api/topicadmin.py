"""Topics of the admin API: with their figures, their retention, and a slow way to look and to publish.

Shapes and names are those of queue.md §9; ``/admin/topics`` is another name of the list.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from sparrow.broker.figures import TopicFigures
from sparrow.kernel.pattern import parse_pattern
from sparrow.model.access import Action
from sparrow.model.errors import InvalidArgument
from sparrow.model.message import Message
from sparrow.model.topic import Topic
from sparrow.server.api.calls import call_limits, changing
from sparrow.server.api.contents import shown, stored
from sparrow.server.api.family import Answer, Api, Page, Req, answer, body, paged, query, timestamp
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, post, put

TAG = "Administration"
NEWEST = 10
"""Messages shown with a topic."""
MESSAGES_MAX = 1000
SHOWN_BYTES_MAX = 8 * 1024 * 1024
"""Data in one answer, about."""


class RetentionPolicy(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How long messages are kept; 0 is no limit, and what is left out stays as it is."""

    max_age_seconds: float | UnsetType = UNSET
    max_age: float | UnsetType = UNSET
    """Another name of max_age_seconds."""
    max_size_bytes: int | UnsetType = UNSET
    max_messages: int | UnsetType = UNSET
    require_ack: bool | UnsetType = UNSET
    compaction_enabled: bool | UnsetType = UNSET

    def to_policy(self) -> dict[str, Any]:
        """The broker's options."""
        if self.compaction_enabled is True:
            raise InvalidArgument(
                "a topic is not compacted by the broker", hint="Run the pipeline `compact` on its table."
            )
        if self.max_age is not UNSET and self.max_age_seconds is not UNSET:
            raise InvalidArgument("max_age is another name of max_age_seconds; give one of them")
        age = self.max_age if self.max_age_seconds is UNSET else self.max_age_seconds
        limits = {
            "retention_s": age,
            "retention_bytes": self.max_size_bytes,
            "retention_messages": self.max_messages,
        }
        found: dict[str, Any] = {name: value or None for name, value in limits.items() if value is not UNSET}
        if self.require_ack is not UNSET:
            found["retain_until_acked"] = self.require_ack
        return found


class TopicSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A topic to be made."""

    name: str
    partitions: int | None = None
    retention_policy: RetentionPolicy | None = None


class RetentionShown(msgspec.Struct, kw_only=True):
    """The retention of a topic; 0 is no limit."""

    max_age_seconds: float
    max_size_bytes: int
    max_messages: int
    require_ack: bool
    compaction_enabled: bool = False


class TopicInfo(msgspec.Struct, kw_only=True):
    """A topic with its figures."""

    name: str
    partitions: int
    subscriber_count: int
    depth: int
    """Messages that its slowest subscription has not acked."""
    total_messages: int
    """Ever published."""
    active_messages: int
    """That can be read."""
    retention_policy: RetentionShown
    created_at: str
    last_activity: str | None
    """When the newest message was published."""


class MessageShown(msgspec.Struct, kw_only=True):
    """A message of a topic; its payload is a JSON value, or base64 when it is not JSON."""

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: str
    key: str | None = None
    headers: dict[str, str] = {}
    payload: Raw | UnsetType = UNSET
    payload_base64: str | UnsetType | None = UNSET


class PartitionInfo(msgspec.Struct, kw_only=True):
    """The offsets of a partition that can be read: from the first up to, not including, the second."""

    partition: int
    start_offset: int
    end_offset: int


class DetailedTopicInfo(TopicInfo, kw_only=True):
    """A topic, all of it."""

    durability: str
    partition_offsets: list[PartitionInfo]
    flow: dict[str, Any]
    flow_policy: dict[str, Any]
    lag: dict[str, int]
    """Messages not acked, by subscription."""
    messages: list[MessageShown] | UnsetType = UNSET
    """The newest, with include_messages."""


class TopicList(msgspec.Struct, kw_only=True):
    """A page of topics."""

    topics: list[TopicInfo]
    total: int


class MessageList(msgspec.Struct, kw_only=True):
    """Messages of a topic."""

    messages: list[MessageShown]


class TopicsQuery(Page, forbid_unknown_fields=True):
    """Which topics."""

    pattern: str | None = None


class DetailQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How much of it."""

    include_messages: bool = False


class DeleteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Deleting wants ``force=true``, since it cannot be taken back."""

    force: bool = False


class MessagesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which messages: the newest, or those published at or after a time."""

    limit: int = 100
    since: str | None = None
    """ISO 8601 with a time zone, or seconds since 1970."""


class NewMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to be published."""

    payload: Raw | UnsetType = UNSET
    payload_base64: bytes | UnsetType | None = UNSET
    headers: dict[str, str] = {}
    key: str | None = None


class PublishResult(msgspec.Struct, kw_only=True):
    """Where a message was stored."""

    message_id: str
    topic: str
    partition: int
    offset: int
    timestamp: str


class OperationResult(msgspec.Struct, kw_only=True):
    """That something was done."""

    status: str
    message: str


def routes(api: Api) -> list[Any]:
    """The handlers."""
    broker, limits = api.broker, call_limits(api.settings)

    async def info(topic: Topic, figures: TopicFigures | None) -> TopicInfo:
        return TopicInfo(**await fields(topic, figures))

    async def fields(topic: Topic, figures: TopicFigures | None) -> dict[str, Any]:
        policy = topic.policy
        return {
            "name": topic.name,
            "partitions": topic.partitions,
            "subscriber_count": 0 if figures is None else figures.subscriptions,
            "depth": 0 if figures is None else figures.depth,
            "total_messages": 0 if figures is None else figures.published,
            "active_messages": 0 if figures is None else figures.kept,
            "retention_policy": RetentionShown(
                max_age_seconds=policy.retention_s or 0,
                max_size_bytes=policy.retention_bytes or 0,
                max_messages=policy.retention_messages or 0,
                require_ack=policy.retain_until_acked,
            ),
            "created_at": timestamp(topic.created_at_us) or "",
            "last_activity": await last_activity(topic),
        }

    async def last_activity(topic: Topic) -> str | None:
        newest = await newest_messages(topic, 1)
        return newest[0].timestamp if newest else None

    async def newest_messages(topic: Topic, count: int) -> list[MessageShown]:
        """The newest over all partitions, the newest first."""
        found: list[Message] = []
        for partition in range(topic.partitions):
            bounds = await broker.bounds(topic.name, partition)
            start = max(bounds.start_offset, bounds.end_offset - count)
            if start < bounds.end_offset:
                found += await broker.read(topic.name, partition=partition, offset=start, max_messages=count)
        found.sort(key=lambda message: message.publish_time_us, reverse=True)
        return to_shown(found[:count])

    async def messages_since(topic: Topic, moment: float, count: int) -> list[MessageShown]:
        """From a time on, the oldest first."""
        found: list[Message] = []
        for partition in range(topic.partitions):
            offset = await broker.offset_at(topic.name, moment, partition=partition)
            found += await broker.read(topic.name, partition=partition, offset=offset, max_messages=count)
        found.sort(key=lambda message: message.publish_time_us)
        return to_shown(found[:count])

    async def figures_of(name: str) -> TopicFigures | None:
        seen = await broker.telemetry.look(is_new=True)
        return next((each for each in seen.figures.topics if each.name == name), None)

    @get(
        ["/api/v1/topics", "/admin/topics"],
        opt=described("List topics with their figures", tag=TAG, query=TopicsQuery, answers={200: TopicList}),
    )
    async def list_topics(request: Req) -> Answer:
        principal = api.principal(request)
        api.access.require_some(principal, Action.READ, limit=limits.read)
        asked = query(request, TopicsQuery)
        pattern = None if asked.pattern is None else parse_pattern(asked.pattern)
        found = [
            topic
            for topic in await broker.topics()
            if (pattern is None or pattern.matches(topic.name)) and api.may_any(principal, topic.name)
        ]
        figures = {each.name: each for each in (await broker.telemetry.look(is_new=True)).figures.topics}
        page = found[max(0, asked.offset) : max(0, asked.offset) + max(0, asked.limit)]
        infos = {topic.name: await info(topic, figures.get(topic.name)) for topic in page[:1000]}
        return paged(request, "topics", found, asked, lambda topic: infos[topic.name])

    @post(
        "/api/v1/topics",
        opt=described(
            "Create a topic",
            tag=TAG,
            body=TopicSpec,
            body_example={"name": "orders", "retention_policy": {"max_age_seconds": 86400}},
            answers={201: TopicInfo},
            errors=(409, 429),
        ),
    )
    async def create_topic(request: Req) -> Answer:
        wanted = await body(request, TopicSpec)
        policy = {} if wanted.retention_policy is None else wanted.retention_policy.to_policy()
        async with changing(api, request, "create_topic", wanted.name, wanted.name):
            made = await broker.create_topic(wanted.name, partitions=wanted.partitions, **policy)
        return answer(await info(made, None), 201, {"Location": f"/api/v1/topics/{made.name}"})

    @get(
        "/api/v1/topics/{topic:str}",
        opt=described(
            "Look at a topic", tag=TAG, query=DetailQuery, answers={200: DetailedTopicInfo}, errors=(404,)
        ),
    )
    async def get_topic(request: Req, topic: str) -> Answer:
        asked = query(request, DetailQuery)
        principal = api.principal(request)
        api.access.require_any(principal, topic)
        api.access.count(principal, limits.read)
        if asked.include_messages:
            api.require(request, Action.READ, topic)
        found = await broker.topic(topic)
        bounds = [await broker.bounds(topic, partition) for partition in range(found.partitions)]
        lag = await broker.topic_lag(topic)
        detail = DetailedTopicInfo(
            **await fields(found, await figures_of(topic)),
            durability=found.policy.durability.value,
            partition_offsets=[
                PartitionInfo(partition=partition, start_offset=each[0], end_offset=each[1])
                for partition, each in enumerate(bounds)
            ],
            flow=msgspec.to_builtins(await broker.flow(topic)),
            flow_policy=msgspec.to_builtins(found.policy.flow),
            lag={name: report.depth for name, report in lag.subscriptions.items()},
        )
        if asked.include_messages:
            detail.messages = await newest_messages(found, NEWEST)
        return answer(detail)

    @put(
        "/api/v1/topics/{topic:str}/config",
        opt=described(
            "Change the retention of a topic",
            tag=TAG,
            body=RetentionPolicy,
            body_example={"max_age_seconds": 3600},
            answers={200: TopicInfo},
            errors=(404,),
        ),
    )
    async def configure(request: Req, topic: str) -> Answer:
        policy = (await body(request, RetentionPolicy)).to_policy()
        async with changing(api, request, "update_topic", topic, topic):
            changed = await broker.update_topic(topic, **policy)
        return answer(await info(changed, await figures_of(topic)))

    @delete(
        "/api/v1/topics/{topic:str}",
        status_code=200,
        opt=described(
            "Delete a topic and its messages",
            tag=TAG,
            query=DeleteQuery,
            answers={200: OperationResult},
            errors=(404,),
        ),
    )
    async def delete_topic(request: Req, topic: str) -> Answer:
        if not query(request, DeleteQuery).force:
            raise InvalidArgument(
                "a topic is deleted with all its messages, for good", hint="Say so with ?force=true."
            )
        async with changing(api, request, "delete_topic", topic, topic):
            await broker.delete_topic(topic, force=True)
        return answer(OperationResult(status="deleted", message=f"the topic {topic!r} is gone"))

    @get(
        "/api/v1/topics/{topic:str}/messages",
        opt=described(
            "Look at messages of a topic",
            tag=TAG,
            description="The newest first; with since the oldest first. It moves no cursor.",
            query=MessagesQuery,
            answers={200: MessageList},
            errors=(404,),
        ),
    )
    async def list_messages(request: Req, topic: str) -> Answer:
        api.require(request, Action.READ, topic, limit=limits.read)
        asked = query(request, MessagesQuery)
        if not 1 <= asked.limit <= MESSAGES_MAX:
            raise InvalidArgument(f"limit is from 1 to {MESSAGES_MAX}, not {asked.limit}")
        found = await broker.topic(topic)
        if asked.since is None:
            messages = await newest_messages(found, asked.limit)
        else:
            messages = await messages_since(found, parse_moment(asked.since), asked.limit)
        return answer(MessageList(messages=messages), headers={"Cache-Control": "no-store"})

    @post(
        "/api/v1/topics/{topic:str}/messages",
        opt=described(
            "Publish a message, the slow way",
            tag=TAG,
            body=NewMessage,
            body_example={"payload": {"order": 1}, "headers": {"env": "prod"}},
            answers={201: PublishResult},
            errors=(404, 413, 429, 503, 507),
        ),
    )
    async def publish(request: Req, topic: str) -> Answer:
        principal = api.require(request, Action.PUBLISH, topic)
        wanted = await body(request, NewMessage)
        receipt = await broker.publish(
            topic,
            stored(wanted.payload, wanted.payload_base64, "payload"),
            key=wanted.key,
            attributes=wanted.headers or None,
            token=None if principal.is_anonymous else principal.name,
        )
        made = PublishResult(
            message_id=receipt.message_id,
            topic=receipt.topic,
            partition=receipt.partition,
            offset=receipt.offset,
            timestamp=timestamp(receipt.publish_time_us) or "",
        )
        return answer(made, 201)

    return [
        list_topics,
        create_topic,
        get_topic,
        configure,
        delete_topic,
        list_messages,
        publish,
    ]


def to_shown(messages: list[Message]) -> list[MessageShown]:
    """Messages as they are shown, up to some megabytes of them."""
    found: list[MessageShown] = []
    size = 0
    for message in messages:
        size += len(message.data or b"")
        if found and size > SHOWN_BYTES_MAX:
            break
        contents = shown(message.data)
        found.append(
            MessageShown(
                id=message.id,
                topic=message.topic,
                partition=message.partition,
                offset=message.offset,
                timestamp=timestamp(message.publish_time_us) or "",
                key=message.key,
                headers=dict(message.attributes),
                payload=contents.value,
                payload_base64=contents.base64,
            )
        )
    return found


def parse_moment(text: str) -> float:
    """A point in time, in seconds since 1970."""
    try:
        return float(text) if text.replace(".", "", 1).isdigit() else _iso(text)
    except (ValueError, msgspec.ValidationError, OverflowError) as error:
        raise InvalidArgument(
            f"{text[:60]!r} is not a time", hint="Write it as 2026-01-31T12:00:00Z, or in seconds since 1970."
        ) from error


def _iso(text: str) -> float:

    moment = msgspec.convert(text, datetime)
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment.timestamp()
