"""Administration: settings, limits, maintenance, what consumers hold, dead letters, connections, a stop.

What changes something wants a token that may administer, counts against ``admin_calls_per_min``, and is
written into the audit log. Lists come in pages. ``/admin/pending``, ``/admin/connections`` and
``/admin/dlq/replay`` are other names that queue.md §9 gives.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from sparrow.broker import logs
from sparrow.broker.inventory import Pending
from sparrow.kernel.degradation import GIVEN_UP
from sparrow.model.access import Action
from sparrow.model.connection import ConnectionInfo
from sparrow.model.deadletter import DeadLetter
from sparrow.model.errors import InvalidArgument, MessageNotFound, PreconditionFailed
from sparrow.model.flow import RateLimit
from sparrow.model.message import parse_message_id
from sparrow.model.settings import masked
from sparrow.server.api import groupadmin, topicadmin
from sparrow.server.api.calls import call_limits, changing
from sparrow.server.api.family import Answer, Api, Page, Req, answer, body, paged, query, timestamp
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, post, put
from sparrow.server.api.topicadmin import OperationResult

TAG = "Administration"
REPLAYED = "sparrow.replay"
"""What the attributes begin with that tell where a replayed message comes from."""


class PendingQuery(Page, forbid_unknown_fields=True):
    """Whose messages."""

    subscription: str | None = None


class PendingShown(msgspec.Struct, kw_only=True):
    """A message in the hands of a consumer."""

    message_id: str
    subscription: str
    topic: str
    partition: int
    offset: int
    consumer_id: str
    assigned_at: str
    ack_deadline: str
    retry_count: int


class PendingList(msgspec.Struct, kw_only=True):
    """A page of them."""

    pending: list[PendingShown]
    total: int


class MessageTrace(msgspec.Struct, kw_only=True):
    """Where a message is."""

    message_id: str
    topic: str
    subscriptions: list[dict[str, Any]]
    """Its state in every subscription that reads its topic."""


class ConnectionList(msgspec.Struct, kw_only=True):
    """A page of connections."""

    connections: list[ConnectionInfo]
    total: int


class DeadLettersQuery(Page, forbid_unknown_fields=True, kw_only=True):
    """Whose dead letters."""

    subscription: str


class DeadLetterShown(msgspec.Struct, kw_only=True):
    """A dead letter, without its data."""

    message_id: str
    topic: str
    reason: str
    attempts: int
    dead_at: str


class DeadLetterList(msgspec.Struct, kw_only=True):
    """A page of them."""

    dead_letters: list[DeadLetterShown]
    total: int


class ReplayRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which dead letter, and where to; without a target its subscription gets it again, under its own id."""

    message_id: str
    target_topic: str | None = None
    subscription: str | None = None
    """Whose dead letter it is; needed only when several subscriptions gave up the same message."""


class ReplayResult(msgspec.Struct, kw_only=True):
    """What became of it."""

    message_id: str
    """The message as it is now: a new one in the target topic, or the same."""
    original_id: str
    subscription: str
    target_topic: str | None
    status: str


class Maintenance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A maintenance to begin."""

    reason: str = ""
    retry_after_s: float = 30.0
    """What publishers are told."""


class ServiceShown(msgspec.Struct, kw_only=True):
    """What the broker does and does not at the moment."""

    level: str
    given_up: tuple[str, ...]
    is_in_maintenance: bool
    reason: str
    since: str | None


class QuotaChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A quota; ``null`` is no limit, and what is left out stays."""

    messages_per_s: float | UnsetType | None = UNSET
    bytes_per_s: float | UnsetType | None = UNSET
    burst_s: float | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        """What is to change."""
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in found.items() if value is not UNSET}


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The lowest level that is written."""

    level: Literal["debug", "info", "warning", "error"]


class Swept(msgspec.Struct, kw_only=True):
    """What was moved or dropped."""

    count: int


def routes(api: Api) -> list[Any]:
    """The handlers of the whole family."""
    return [*topicadmin.routes(api), *groupadmin.routes(api), *_looking(api), *_changing(api), *_letters(api)]


def _looking(api: Api) -> list[Any]:
    broker, limits = api.broker, call_limits(api.settings)

    @get(
        ["/api/v1/messages/pending", "/admin/pending"],
        opt=described(
            "Messages in the hands of consumers",
            tag=TAG,
            query=PendingQuery,
            answers={200: PendingList},
            errors=(404,),
        ),
    )
    async def pending(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        asked = query(request, PendingQuery)
        _check(asked)
        found, total = broker.inventory.pending(asked.subscription, asked.offset, asked.limit)
        shown = PendingList(pending=[_pending(each) for each in found], total=total)
        return answer(shown, headers=_headers(asked, total))

    @get(
        "/api/v1/messages/{message_id:str}",
        opt=described(
            "Where a message is: its state in every subscription",
            tag=TAG,
            answers={200: MessageTrace},
            errors=(404,),
        ),
    )
    async def trace(request: Req, message_id: str) -> Answer:
        topic_id = parse_message_id(message_id).topic_id
        names = [topic.name for topic in await broker.topics() if topic.id == topic_id]
        api.require(request, Action.READ, names[0] if names else None, limit=limits.read)
        found = [each._asdict() for each in await broker.trace(message_id)]
        topic = names[0] if names else ""
        return answer(MessageTrace(message_id=message_id, topic=topic, subscriptions=found))

    @get(
        ["/api/v1/admin/connections", "/admin/connections"],
        opt=described("Open connections", tag=TAG, query=Page, answers={200: ConnectionList}),
    )
    async def connections(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        found = [each for door in broker.telemetry.doors for each in door.describe()]
        return paged(request, "connections", found, query(request, Page))

    @get(
        "/api/v1/admin/config",
        opt=described("The settings in force; secrets are masked", tag=TAG, answers={200: dict[str, Any]}),
    )
    async def config(request: Req) -> Answer:
        api.require(request, Action.ADMIN, limit=limits.read)
        return answer(masked(broker.settings))

    @get(
        "/api/v1/admin/recovery",
        opt=described(
            "What opening the data directory did and found", tag=TAG, answers={200: dict[str, Any]}
        ),
    )
    async def recovery(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        return answer(broker.recovery)

    @get(
        "/api/v1/admin/service",
        opt=described("What the broker does and does not now", tag=TAG, answers={200: ServiceShown}),
    )
    async def service(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        return answer(_service(api))

    @get(
        "/api/v1/admin/support-bundle",
        opt=described(
            "What support needs, as a zip without any message", tag=TAG, answers={200: "application/zip"}
        ),
    )
    async def support_bundle(request: Req) -> Answer:
        async with changing(api, request, "support_bundle", ""):
            from sparrow.server import bundle  # With it come modules that nothing else needs.

            made = await bundle.build(broker, api.clock)
        headers = {
            "Content-Disposition": 'attachment; filename="sparrow-support.zip"',
            "Cache-Control": "no-store",
        }
        return Answer(made, 200, headers, "application/zip")

    return [pending, trace, connections, config, recovery, service, support_bundle]


def _changing(api: Api) -> list[Any]:
    broker = api.broker

    @put(
        "/api/v1/admin/limits/topics/{topic:str}",
        opt=described(
            "Change the flow control of a topic",
            tag=TAG,
            description="The fields of a flow policy; those left out stay. See docs/guides/flow-control.md.",
            body=dict[str, Any],
            body_example={"messages_per_s": 1000},
            answers={200: dict[str, Any]},
            errors=(404,),
        ),
    )
    async def limit_topic(request: Req, topic: str) -> Answer:
        wanted = await body(request, dict[str, Any])
        async with changing(api, request, "update_topic", topic, topic):
            changed = await broker.update_topic(topic, flow=wanted)
        return answer(changed.policy.flow)

    @put(
        "/api/v1/admin/limits/publishers/{name:str}",
        opt=described(
            "Set the quota of a publisher",
            tag=TAG,
            body=QuotaChange,
            body_example={"messages_per_s": 100},
            answers={200: RateLimit},
        ),
    )
    async def limit_publisher(request: Req, name: str) -> Answer:
        wanted = await body(request, QuotaChange)
        async with changing(api, request, "set_publisher_limits", name):
            return answer(await broker.set_publisher_limits(name, **wanted.given()))

    @put(
        "/api/v1/admin/limits/tokens/{name:str}",
        opt=described(
            "Set the quota of a token, by its name",
            tag=TAG,
            body=QuotaChange,
            body_example={"messages_per_s": 100},
            answers={200: RateLimit},
        ),
    )
    async def limit_token(request: Req, name: str) -> Answer:
        wanted = await body(request, QuotaChange)
        async with changing(api, request, "set_token_limits", name):
            return answer(await broker.set_token_limits(name, **wanted.given()))

    @put(
        "/api/v1/admin/maintenance",
        opt=described(
            "Begin a maintenance: publishes are refused, deliveries go on",
            tag=TAG,
            description="It lasts until it is ended, also over restarts.",
            body=Maintenance,
            is_body_optional=True,
            body_example={"reason": "new disks", "retry_after_s": 60},
            answers={200: ServiceShown},
        ),
    )
    async def begin_maintenance(request: Req) -> Answer:
        wanted = await body(request, Maintenance, is_optional=True)
        async with changing(api, request, "begin_maintenance", wanted.reason):
            await broker.steward.begin_maintenance(wanted.reason, wanted.retry_after_s)
        return answer(_service(api))

    @delete(
        "/api/v1/admin/maintenance",
        status_code=200,
        opt=described("End the maintenance", tag=TAG, answers={200: ServiceShown}),
    )
    async def end_maintenance(request: Req) -> Answer:
        async with changing(api, request, "end_maintenance", ""):
            await broker.steward.end_maintenance()
        return answer(_service(api))

    @put(
        "/api/v1/admin/log-level",
        opt=described(
            "Change what is logged, until the next start",
            tag=TAG,
            body=LogLevel,
            body_example={"level": "debug"},
            answers={200: OperationResult},
        ),
    )
    async def log_level(request: Req) -> Answer:
        wanted = await body(request, LogLevel)
        async with changing(api, request, "log_level", wanted.level):
            logs.set_level(wanted.level)
        return answer(OperationResult(status="changed", message=f"lines from {wanted.level} on are written"))

    @post(
        "/api/v1/admin/seal",
        status_code=200,
        opt=described("Move everything published so far into the lake", tag=TAG, answers={200: Swept}),
    )
    async def seal(request: Req) -> Answer:
        async with changing(api, request, "seal", ""):
            return answer(Swept(count=await broker.seal()))

    @post(
        "/api/v1/admin/retention",
        status_code=200,
        opt=described("Drop what topics no longer keep, now", tag=TAG, answers={200: Swept}),
    )
    async def retention(request: Req) -> Answer:
        async with changing(api, request, "apply_retention", ""):
            return answer(Swept(count=await broker.apply_retention()))

    @post(
        "/api/v1/admin/shutdown",
        opt=described("Stop the broker in order", tag=TAG, answers={202: OperationResult}, errors=(409,)),
    )
    async def shutdown(request: Req) -> Answer:
        async with changing(api, request, "shutdown", ""):
            broker.steward.shut_down()
        text = "listeners end, what is under way is answered, then the broker closes"
        return answer(OperationResult(status="stopping", message=text), 202)

    return [
        limit_topic,
        limit_publisher,
        limit_token,
        begin_maintenance,
        end_maintenance,
        log_level,
        seal,
        retention,
        shutdown,
    ]


def _letters(api: Api) -> list[Any]:
    broker, limits = api.broker, call_limits(api.settings)

    async def find(message_id: str, subscription: str | None) -> tuple[str, DeadLetter]:
        """A dead letter, and whose it is."""
        known = await broker.subscriptions()
        named = [each.name for each in known if each.policy.dead_letter_topic is not None]
        if subscription is not None:
            await broker.subscription(subscription)
            named = [subscription]
        found = []
        for name in named:
            try:
                found.append((name, await (await broker.dead_letters(name)).get(message_id)))
            except MessageNotFound:
                continue
        if not found:
            raise MessageNotFound(f"{message_id!r} is nobody's dead letter")
        if len(found) > 1:
            names = ", ".join(name for name, _ in found)
            raise PreconditionFailed(
                f"{message_id!r} is a dead letter of {names}", hint='Say of which: "subscription": "…".'
            )
        return found[0]

    @get(
        "/api/v1/messages/dead-letters",
        opt=described(
            "Dead letters of a subscription, without their data",
            tag=TAG,
            query=DeadLettersQuery,
            answers={200: DeadLetterList},
            errors=(404, 409),
        ),
    )
    async def dead_letters(request: Req) -> Answer:
        asked = query(request, DeadLettersQuery)
        found = await broker.subscription(asked.subscription)
        api.require(request, Action.READ, found.pattern, limit=limits.read)
        _check(asked)
        letters = await found.dead_letters.list(limit=asked.offset + asked.limit)
        total = (await found.dead_letters.statistics()).messages
        shown = [_letter(each) for each in letters[asked.offset :]]
        return answer(DeadLetterList(dead_letters=shown, total=total), headers=_headers(asked, total))

    @post(
        ["/api/v1/messages/dead-letters/replay", "/admin/dlq/replay"],
        opt=described(
            "Replay a dead letter",
            tag=TAG,
            description="With a target topic a copy is published there, with a new id and attributes that say"
            " where it comes from; without one its subscription gets it again under its own id.",
            body=ReplayRequest,
            body_example={"message_id": "1-0-7", "target_topic": "orders"},
            answers={202: ReplayResult},
            errors=(404, 409, 503),
        ),
    )
    async def replay(request: Req) -> Answer:
        wanted = await body(request, ReplayRequest)
        async with changing(api, request, "dead_letters.replay", wanted.message_id) as principal:
            name, letter = await find(wanted.message_id, wanted.subscription)
            box = await broker.dead_letters(name)
            made_id = wanted.message_id
            if wanted.target_topic is None:
                await box.replay(ids=[wanted.message_id])
            else:
                receipt = await broker.publish(
                    wanted.target_topic,
                    letter.message.data,
                    key=letter.message.key,
                    attributes=_replay_attributes(letter, name, principal.name),
                )
                made_id = receipt.message_id
                await box.purge(ids=[wanted.message_id])
        result = ReplayResult(
            message_id=made_id,
            original_id=wanted.message_id,
            subscription=name,
            target_topic=wanted.target_topic,
            status="replayed",
        )
        return answer(result, 202)

    return [dead_letters, replay]


def _replay_attributes(letter: DeadLetter, subscription: str, who: str) -> dict[str, str]:
    """What the message had, and where it comes from; what its time as a dead letter added is left out."""
    own = {k: v for k, v in letter.message.attributes.items() if not k.startswith("sparrow.")}
    return {
        **own,
        f"{REPLAYED}.original_id": letter.message_id,
        f"{REPLAYED}.subscription": subscription,
        f"{REPLAYED}.dead_at": timestamp(letter.dead_at_us) or "",
        f"{REPLAYED}.reason": letter.reason[:200],
        f"{REPLAYED}.by": who[:255],
    }


def _service(api: Api) -> ServiceShown:
    steward = api.broker.steward
    upkeep = steward.upkeep
    return ServiceShown(
        level=steward.level.value,
        given_up=GIVEN_UP[steward.level],
        is_in_maintenance=upkeep is not None,
        reason="" if upkeep is None else upkeep.reason,
        since=None if upkeep is None else timestamp(upkeep.since_us),
    )


def _pending(each: Pending) -> PendingShown:
    return PendingShown(
        message_id=each.message_id,
        subscription=each.subscription,
        topic=each.topic,
        partition=each.partition,
        offset=each.offset,
        consumer_id=each.consumer,
        assigned_at=timestamp(each.assigned_at_us) or "",
        ack_deadline=timestamp(each.ack_deadline_us) or "",
        retry_count=each.retry_count,
    )


def _letter(each: DeadLetter) -> DeadLetterShown:
    return DeadLetterShown(
        message_id=each.message_id,
        topic=each.topic,
        reason=each.reason,
        attempts=each.attempts,
        dead_at=timestamp(each.dead_at_us) or "",
    )


def _check(page: Page) -> None:
    if not 1 <= page.limit <= 1000 or not 0 <= page.offset <= 2**53:
        raise InvalidArgument(
            f"limit is from 1 to 1000 and offset from 0, not {page.limit} and {page.offset}"
        )


def _headers(page: Page, total: int) -> dict[str, str]:
    return {
        "X-Total-Count": str(total),
        "X-Limit": str(page.limit),
        "X-Offset": str(page.offset),
        "Cache-Control": "no-cache",
    }
