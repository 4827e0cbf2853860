"""The log family of the HTTP API: topics with partitions and offsets, groups that commit.

A group is a subscription to one topic, shared by partitions, made when it is first named. Consuming hands
messages out until they are committed: what is not committed within a minute comes again. Committing an offset
says that everything below it is done, as in Kafka: the offset is the next one to read.

Values are any JSON, stored as the bytes that were sent; ``value_base64`` is for what is not JSON. Records of
one request are decoded into columns and stored as one batch, whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from sparrow.model import limits
from sparrow.model.access import Action, Principal
from sparrow.model.errors import ConnectionLost, InvalidArgument, MessageTooLarge, OffsetOutOfRange
from sparrow.model.message import Delivered, Receipts
from sparrow.server.api.contents import shown, stored
from sparrow.server.api.family import (
    Answer,
    Api,
    Req,
    answer,
    body,
    decode,
    no_content,
    query,
    read,
    timestamp,
)
from sparrow.server.api.operation import described
from sparrow.server.api.records import (
    Commit,
    ConsumeQuery,
    Heartbeat,
    JoinRequest,
    MemberShown,
    NewRecord,
    NewRecords,
    NewTopic,
    Offsets,
    OffsetsQuery,
    PartitionOffset,
    PartitionShown,
    Place,
    Record,
    Records,
    Single,
    SinglePublished,
    SingleTo,
    Stored,
    TopicOptions,
    TopicShown,
)
from sparrow.server.api.routing import delete, get, post
from sparrow.server.api.sessions import ANONYMOUS, Sessions

TAG = "Log"
MESSAGES_MAX = 10_000
TIMEOUT_MS_MAX = 60_000
ANSWER_BYTES_MAX = 8 * 1024 * 1024
"""Data in one answer; one message at least."""
T = TypeVar("T")


RECORDS_EXAMPLE = {"messages": [{"key": "c-7", "value": {"order": 1}, "headers": {"env": "prod"}}]}


def routes(api: Api) -> list[Any]:
    """The handlers."""
    sessions = Sessions(api.broker, api.clock)
    return [*_topics(api), *_publishing(api), *_consuming(api, sessions), *_groups(api, sessions)]


def _topics(api: Api) -> list[Any]:
    async def create(request: Req, name: str, options: NewTopic | TopicOptions) -> Answer:
        policy: dict[str, Any] = {}
        if options.retention_ms is not None:
            if options.retention_ms != -1 and options.retention_ms < 1:
                raise InvalidArgument(f"retention_ms is from 1, or -1 for ever, not {options.retention_ms}")
            policy["retention_s"] = None if options.retention_ms == -1 else options.retention_ms / 1000
        async with api.audited(request, "create_topic", name):
            api.require(request, Action.ADMIN, name)
            made = await api.broker.create_topic(name, partitions=options.partitions, **policy)
        kept_s = made.policy.retention_s
        view = TopicShown(
            name=made.name,
            partitions=made.partitions,
            retention_ms=-1 if kept_s is None else round(kept_s * 1000),
            created_at=timestamp(made.created_at_us) or "",
        )
        return answer(view, 201, {"Location": f"/topics/{made.name}"})

    @post(
        "/topics",
        opt=described(
            "Create a topic of the log",
            tag=TAG,
            body=NewTopic,
            body_example={"name": "clicks", "partitions": 3, "retention_ms": 86_400_000},
            answers={201: TopicShown},
            errors=(409, 429),
        ),
    )
    async def create_topic(request: Req) -> Answer:
        wanted = await body(request, NewTopic)
        return await create(request, wanted.name, wanted)

    @post(
        "/topics/{topic:str}",
        opt=described(
            "Create a topic of this name",
            tag=TAG,
            body=TopicOptions,
            is_body_optional=True,
            answers={201: TopicShown},
            errors=(409, 429),
        ),
    )
    async def create_named(request: Req, topic: str) -> Answer:
        return await create(request, topic, await body(request, TopicOptions, is_optional=True))

    return [create_topic, create_named]


def _publishing(api: Api) -> list[Any]:
    @post(
        "/topics/{topic:str}/messages",
        opt=described(
            "Store records, all or none",
            tag=TAG,
            body=NewRecords,
            body_example=RECORDS_EXAMPLE,
            answers={200: Stored},
            errors=(404, 413, 415, 429, 503, 507),
        ),
        status_code=200,
    )
    async def send(request: Req, topic: str) -> Answer:
        principal = api.require(request, Action.PUBLISH, topic)
        raw = await read(request)
        records = _records(raw)
        await api.broker.topic(topic)  # A log is made before it is written.
        receipts = await api.broker.publish_batch(topic, **_columns(records), **_token(principal))
        return answer(Stored(topic=topic, offsets=_places(receipts)))

    async def publish(request: Req, topic: str, message: Single) -> Answer:
        principal = api.require(request, Action.PUBLISH, topic)
        receipt = await api.broker.publish(
            topic,
            bytes(message.message),
            key=message.key,
            attributes=message.headers,
            **_token(principal),
        )
        made = SinglePublished(
            message_id=receipt.message_id,
            topic=receipt.topic,
            partition=receipt.partition,
            offset=receipt.offset,
        )
        return answer(made, 201)

    @post(
        "/publish",
        opt=described(
            "Publish a message to the topic that it names",
            tag=TAG,
            body=SingleTo,
            body_example={"topic": "clicks", "message": {"page": "/"}},
            answers={201: SinglePublished},
            errors=(404, 413, 429, 503, 507),
        ),
    )
    async def publish_to(request: Req) -> Answer:
        message = await body(request, SingleTo)
        return await publish(request, message.topic, message)

    @post(
        "/topics/{topic:str}/publish",
        opt=described(
            "Publish a message to a topic",
            tag=TAG,
            body=Single,
            body_example={"message": {"page": "/"}},
            answers={201: SinglePublished},
            errors=(404, 413, 429, 503, 507),
        ),
    )
    async def publish_here(request: Req, topic: str) -> Answer:
        return await publish(request, topic, await body(request, Single))

    return [send, publish_to, publish_here]


def _consuming(api: Api, sessions: Sessions) -> list[Any]:
    @get(
        "/topics/{topic:str}/messages",
        opt=described(
            "Consume records for a group, waiting for the first",
            tag=TAG,
            query=ConsumeQuery,
            answers={200: Records},
            errors=(404, 409, 503),
        ),
    )
    async def consume(request: Req, topic: str) -> Answer:
        api.require(request, Action.SUBSCRIBE, topic)
        asked = query(request, ConsumeQuery)
        _check_bounds("max_messages", asked.max_messages, 1, MESSAGES_MAX)
        _check_bounds("timeout_ms", asked.timeout_ms, 0, TIMEOUT_MS_MAX)
        await api.broker.topic(topic)
        await sessions.group(asked.consumer_group, topic, asked.auto_offset_reset)
        polling = sessions.poll(
            asked.consumer_group,
            asked.consumer_id or ANONYMOUS,
            asked.max_messages,
            asked.timeout_ms / 1000,
            ANSWER_BYTES_MAX,
            api.closing,
        )
        found = await _while_connected(request, polling)
        records = Records(
            topic=topic, consumer_group=asked.consumer_group, messages=[_record(each) for each in found]
        )
        return answer(records, headers={"Cache-Control": "no-store"})

    @post(
        "/topics/{topic:str}/offsets",
        status_code=200,
        opt=described(
            "Commit offsets: everything below them is done",
            tag=TAG,
            body=Commit,
            body_example={"consumer_group": "web", "offsets": [{"partition": 0, "offset": 42}]},
            answers={200: Offsets},
            errors=(404, 409, 416, 503),
        ),
    )
    async def commit(request: Req, topic: str) -> Answer:
        api.require(request, Action.SUBSCRIBE, topic)
        wanted = await body(request, Commit)
        await api.broker.topic(topic)
        group = await api.broker.subscription(wanted.consumer_group)
        sessions.check(group, topic)
        await _check_offsets(api, topic, wanted.offsets)
        speaker = group
        if wanted.consumer_id is not None:
            speaker = sessions.find(wanted.consumer_group, wanted.consumer_id).member
        for each in wanted.offsets:
            options = {"metadata": each.metadata} if wanted.consumer_id is not None else {}
            await speaker.commit(topic, each.partition, each.offset, **options)
        return answer(await offsets_of(topic, group))

    async def offsets_of(topic: str, group: Any) -> Offsets:
        made = await api.broker.topic(topic)
        bounds = [await api.broker.bounds(topic, partition) for partition in range(made.partitions)]
        floors = api.broker.inventory.floors(group.name, made)
        partitions = [
            PartitionShown(
                partition=partition,
                committed_offset=floors.get(partition, 0),
                start_offset=each.start_offset,
                end_offset=each.end_offset,
            )
            for partition, each in enumerate(bounds)
        ]
        return Offsets(topic=topic, consumer_group=group.name, lag=await group.lag(), partitions=partitions)

    @get(
        "/topics/{topic:str}/offsets",
        opt=described(
            "Where a group is", tag=TAG, query=OffsetsQuery, answers={200: Offsets}, errors=(404, 409)
        ),
    )
    async def offsets(request: Req, topic: str) -> Answer:
        api.require(request, Action.READ, topic)
        asked = query(request, OffsetsQuery)
        await api.broker.topic(topic)
        group = await api.broker.subscription(asked.consumer_group)
        sessions.check(group, topic)
        return answer(await offsets_of(topic, group))

    return [consume, commit, offsets]


def _groups(api: Api, sessions: Sessions) -> list[Any]:
    async def check(request: Req, group: str) -> Any:
        found = await api.broker.subscription(group)
        api.require(request, Action.SUBSCRIBE, found.pattern)
        return found

    def view(member: Any) -> MemberShown:
        policy = member.policy.group
        return MemberShown(
            consumer_group=member.name,
            consumer_id=member.consumer,
            generation=member.generation,
            assignment=list(member.assignment),
            heartbeat_s=policy.heartbeat_s,
            session_timeout_s=policy.session_timeout_s,
        )

    @post(
        "/groups/{group:str}/join",
        status_code=200,
        opt=described(
            "Join a group",
            tag=TAG,
            description="The member lives while it polls or sends heartbeats, and leaves by DELETE.",
            body=JoinRequest,
            body_example={"consumer_id": "worker-1", "topic": "clicks"},
            answers={200: MemberShown},
            errors=(404, 409, 429),
        ),
    )
    async def join(request: Req, group: str) -> Answer:
        wanted = await body(request, JoinRequest)
        if wanted.topic is not None:
            api.require(request, Action.SUBSCRIBE, wanted.topic)
            await api.broker.topic(wanted.topic)
            await sessions.group(group, wanted.topic, "earliest")
        await check(request, group)
        member = await sessions.join(
            group, wanted.consumer_id, max_in_flight=wanted.max_in_flight, instance=wanted.instance
        )
        return answer(view(member))

    @post(
        "/groups/{group:str}/members/{consumer_id:str}/heartbeat",
        status_code=200,
        opt=described(
            "Say that a member lives",
            tag=TAG,
            body=Heartbeat,
            is_body_optional=True,
            answers={200: MemberShown},
            errors=(404, 409),
        ),
    )
    async def heartbeat(request: Req, group: str, consumer_id: str) -> Answer:
        wanted = await body(request, Heartbeat, is_optional=True)
        await check(request, group)
        return answer(view(await sessions.heartbeat(group, consumer_id, wanted.status)))

    @delete(
        "/groups/{group:str}/members/{consumer_id:str}",
        status_code=200,
        opt=described("Leave a group", tag=TAG, answers={204: None}, errors=(404,)),
    )
    async def leave(request: Req, group: str, consumer_id: str) -> Answer:
        await check(request, group)
        await sessions.leave(group, consumer_id)
        return no_content()

    return [join, heartbeat, leave]


# Records in and out.


def _records(raw: bytes) -> list[NewRecord]:
    is_array = raw[:64].lstrip()[:1] == b"["
    records = decode(raw, list[NewRecord]) if is_array else decode(raw, NewRecords).messages
    if not records:
        raise InvalidArgument("there are no messages", hint="Send at least one.")
    if len(records) > limits.BATCH_MESSAGES_MAX:
        raise MessageTooLarge(
            f"there are {len(records)} messages; {limits.BATCH_MESSAGES_MAX} are allowed at once"
        )
    return records


def _columns(records: Sequence[NewRecord]) -> dict[str, Any]:
    """The columns of a batch; those that nobody uses are left out."""
    found: dict[str, Any] = {
        "data": [stored(record.value, record.value_base64, "value") for record in records]
    }
    if any(record.key is not None for record in records):
        found["keys"] = [record.key for record in records]
    if any(record.headers for record in records):
        found["attributes"] = [record.headers for record in records]
    return found


def _places(receipts: Receipts) -> list[Place]:
    return [Place(receipt.partition, receipt.offset) for receipt in receipts]


def _record(message: Delivered) -> Record:
    contents = shown(message.data)
    return Record(
        partition=message.partition,
        offset=message.offset,
        message_id=message.id,
        timestamp=timestamp(message.publish_time_us) or "",
        key=message.key,
        value=contents.value,
        value_base64=contents.base64,
        headers=dict(message.attributes),
        attempt=message.attempt,
    )


def _token(principal: Principal) -> dict[str, Any]:
    return {} if principal.is_anonymous else {"token": principal.name}


def _check_bounds(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is from {low} to {high}, not {value}")


async def _check_offsets(api: Api, topic: str, offsets: Sequence[PartitionOffset]) -> None:
    """All of them, before any is committed."""
    for each in offsets:
        bounds = await api.broker.bounds(topic, each.partition)
        if not 0 <= each.offset <= bounds.end_offset:
            raise OffsetOutOfRange(
                f"cannot commit {each.offset}: partition {each.partition} ends at {bounds.end_offset}",
                partition=each.partition,
                end_offset=bounds.end_offset,
            )


async def _while_connected(request: Req, work: Coroutine[Any, Any, T]) -> T:
    """Does the work for as long as somebody waits for it: nothing is handed to a client that has gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionLost("the client went away while it waited")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(request: Req) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
