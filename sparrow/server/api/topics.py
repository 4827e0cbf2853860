"""Topics over HTTP: create, list, look, change, delete.

``retention_hours`` is the broker's ``retention_s`` in hours, and ``ordering_key`` its ``key_field``: the
field of JSON data that orders messages which come without a key of their own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sparrow.model.access import Action
from sparrow.model.topic import Codec, Durability, Topic
from sparrow.server.api.family import (
    Answer,
    Api,
    Page,
    Req,
    answer,
    body,
    no_content,
    paged,
    query,
    timestamp,
)
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, patch, post

TAG = "topics"


class TopicOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may be said about a topic; ``null`` is no limit."""

    partitions: int | UnsetType = UNSET
    retention_hours: float | UnsetType | None = UNSET
    retention_bytes: int | UnsetType | None = UNSET
    retention_messages: int | UnsetType | None = UNSET
    retain_until_acked: bool | UnsetType = UNSET
    durability: Durability | UnsetType = UNSET
    codec: Codec | UnsetType = UNSET
    dedupe_window_s: float | UnsetType = UNSET
    ordering_key: str | UnsetType | None = UNSET
    flow: dict[str, Any] | UnsetType | None = UNSET

    def to_policy(self) -> dict[str, Any]:
        """The options of the broker that were given, partitions included."""
        given = {name: getattr(self, name) for name in TopicOptions.__struct_fields__}
        given = {name: value for name, value in given.items() if value is not UNSET}
        if "retention_hours" in given:
            hours = given.pop("retention_hours")
            given["retention_s"] = None if hours is None else hours * 3600.0
        if "ordering_key" in given:
            given["key_field"] = given.pop("ordering_key")
        return given


class NewTopic(TopicOptions, forbid_unknown_fields=True, kw_only=True):
    """A topic to be made."""

    name: str


class PartitionView(msgspec.Struct):
    """Which offsets of a partition can be read: from the first to before the second."""

    partition: int
    start_offset: int
    end_offset: int


class TopicView(msgspec.Struct, kw_only=True):
    """A topic as it is."""

    name: str
    partitions: int
    retention_hours: float | None
    retention_bytes: int | None
    retention_messages: int | None
    retain_until_acked: bool
    durability: Durability
    codec: Codec
    dedupe_window_s: float
    ordering_key: str | None
    flow: dict[str, Any]
    created_at: str
    offsets: list[PartitionView] | UnsetType = UNSET
    """Given for a single topic."""


class TopicList(msgspec.Struct):
    """A page of topics."""

    topics: list[TopicView]
    total: int


class DeleteTopic(msgspec.Struct, forbid_unknown_fields=True):
    """How to delete a topic."""

    force: bool = False


def view(topic: Topic) -> TopicView:
    """A topic as it is shown."""
    policy = topic.policy
    return TopicView(
        name=topic.name,
        partitions=topic.partitions,
        retention_hours=None if policy.retention_s is None else policy.retention_s / 3600.0,
        retention_bytes=policy.retention_bytes,
        retention_messages=policy.retention_messages,
        retain_until_acked=policy.retain_until_acked,
        durability=policy.durability,
        codec=policy.codec,
        dedupe_window_s=policy.dedupe_window_s,
        ordering_key=policy.key_field,
        flow=msgspec.to_builtins(policy.flow),
        created_at=timestamp(topic.created_at_us) or "",
    )


EXAMPLE = {"name": "orders.created", "partitions": 4, "retention_hours": 72, "ordering_key": "customer_id"}


def routes(api: Api) -> list[Any]:
    """The handlers."""

    @post(
        "/v1/topics",
        opt=described(
            "Create a topic",
            tag=TAG,
            body=NewTopic,
            body_example=EXAMPLE,
            answers={201: TopicView},
            errors=(409, 429),
        ),
    )
    async def create_topic(request: Req) -> Answer:
        wanted = await body(request, NewTopic)
        async with api.audited(request, "create_topic", wanted.name):
            api.require(request, Action.ADMIN, wanted.name)
            made = await api.broker.create_topic(wanted.name, **wanted.to_policy())
        return answer(view(made), 201, {"Location": f"/v1/topics/{made.name}"})

    @get("/v1/topics", opt=described("List topics", tag=TAG, query=Page, answers={200: TopicList}))
    async def list_topics(request: Req) -> Answer:
        principal = api.principal(request)
        found = [topic for topic in await api.broker.topics() if api.may_any(principal, topic.name)]
        return paged(request, "topics", found, query(request, Page), view)

    @get(
        "/v1/topics/{topic:str}",
        opt=described("Look at a topic", tag=TAG, answers={200: TopicView}, errors=(404,)),
    )
    async def get_topic(request: Req, topic: str) -> Answer:
        api.access.require_any(api.principal(request), topic)
        found = await api.broker.topic(topic)
        shown = view(found)
        bounds = [await api.broker.bounds(topic, partition) for partition in range(found.partitions)]
        shown.offsets = [
            PartitionView(partition, each.start_offset, each.end_offset)
            for partition, each in enumerate(bounds)
        ]
        return answer(shown)

    @patch(
        "/v1/topics/{topic:str}",
        opt=described(
            "Change a topic",
            tag=TAG,
            body=TopicOptions,
            body_example={"retention_hours": 24},
            answers={200: TopicView},
            errors=(404,),
        ),
    )
    async def update_topic(request: Req, topic: str) -> Answer:
        wanted = await body(request, TopicOptions)
        async with api.audited(request, "update_topic", topic):
            api.require(request, Action.ADMIN, topic)
            changed = await api.broker.update_topic(topic, **wanted.to_policy())
        return answer(view(changed))

    @delete(
        "/v1/topics/{topic:str}",
        status_code=200,
        opt=described(
            "Delete a topic and its messages",
            tag=TAG,
            query=DeleteTopic,
            answers={204: None},
            errors=(404, 409),
        ),
    )
    async def delete_topic(request: Req, topic: str) -> Answer:
        wanted = query(request, DeleteTopic)
        async with api.audited(request, "delete_topic", topic):
            api.require(request, Action.ADMIN, topic)
            await api.broker.delete_topic(topic, force=wanted.force)
        return no_content()

    return [create_topic, list_topics, get_topic, update_topic, delete_topic]
