"""Subscriptions over HTTP: create, list, look, change, pause, resume, seek, snapshots, delete.

The id of a subscription is its name. ``topic_id`` is a topic or a pattern. A webhook subscription is pushed
by the broker; any other may be pulled from and streamed at will, so ``stream`` and ``pull`` mean the same.

``retry_policy`` speaks of intervals in milliseconds: ``fixed`` repeats ``initial_interval_ms``,
``exponential`` multiplies it, by 2 unless told otherwise. Every retry waits, unless ``immediate_retries`` is
given. It is given as a whole.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.access import Action
from sparrow.model.errors import InvalidArgument
from sparrow.model.push import PushFormat, PushPolicy, PushState
from sparrow.model.subscription import Delivery as Consumption
from sparrow.model.subscription import (
    Expired,
    Guarantee,
    Ordering,
    RetryPolicy,
    Subscription,
    SubscriptionPolicy,
)
from sparrow.server.api.family import (
    Answer,
    Api,
    Page,
    Req,
    answer,
    body,
    no_content,
    paged,
    parse_moment,
    query,
    timestamp,
)
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, patch, post

TAG = "subscriptions"
ONE = "/v1/subscriptions/{subscription:str}"
_ENDS = ("earliest", "latest")
_BACKOFF_MAX_S = RetryPolicy().max_backoff_s


class Delivery(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How messages reach the consumer; all but the type is for webhooks."""

    type: Literal["webhook", "stream", "pull", "pipeline"]
    url: str | None = None
    format: PushFormat | None = None
    max_concurrency: int | None = None
    rate_per_s: float | None = None
    timeout_s: float | None = None
    headers: dict[str, str] | None = None
    https_only: bool | None = None
    verify: bool | None = None

    def to_push(self) -> dict[str, Any] | None:
        """The push options of the broker."""
        if self.type == "pipeline":
            raise InvalidArgument(
                "delivery.type 'pipeline' is that of pipelines", hint="Apply one: PUT /v1/pipelines/{name}."
            )
        names = [name for name in self.__struct_fields__ if name != "type"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.type == "webhook":
            return given
        if given:
            raise InvalidArgument(f"delivery.{next(iter(given))} is for webhooks, not for {self.type}")
        return None


class Retries(msgspec.Struct, forbid_unknown_fields=True):
    """When a failed message is tried again."""

    max_attempts: int | UnsetType | None = UNSET
    backoff: Literal["exponential", "fixed"] = "exponential"
    initial_interval_ms: float = 1000
    max_interval_ms: float | None = None
    multiplier: float = 2.0
    jitter: float = 0.1
    immediate_retries: int = 0

    def to_retry(self) -> dict[str, Any]:
        """The retry options of the broker."""
        first_s = self.initial_interval_ms / 1000
        is_fixed = self.backoff == "fixed"
        most_s = None if self.max_interval_ms is None else self.max_interval_ms / 1000
        options: dict[str, Any] = {
            "min_backoff_s": first_s,
            "max_backoff_s": first_s
            if is_fixed
            else max(first_s, _BACKOFF_MAX_S)
            if most_s is None
            else most_s,
            "multiplier": 1.0 if is_fixed else self.multiplier,
            "jitter": self.jitter,
            "immediate_retries": self.immediate_retries,
        }
        return options if self.max_attempts is UNSET else {**options, "max_attempts": self.max_attempts}


class SubscriptionOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may be said about a subscription."""

    delivery: Delivery | UnsetType = UNSET
    retry_policy: Retries | UnsetType = UNSET
    dead_letter_topic_id: str | UnsetType | None = UNSET
    filter: str | UnsetType = UNSET
    ordering: Ordering | UnsetType = UNSET
    guarantee: Guarantee | UnsetType = UNSET
    ack_deadline_s: float | UnsetType = UNSET
    expired: Expired | UnsetType = UNSET
    key_window: int | UnsetType = UNSET
    max_in_flight: int | UnsetType = UNSET
    poison_rules: bool | UnsetType = UNSET
    adaptive_deadline: bool | UnsetType = UNSET
    sample: dict[str, Any] | UnsetType | None = UNSET
    group: dict[str, Any] | UnsetType = UNSET
    lag: dict[str, Any] | UnsetType | None = UNSET

    def to_policy(self) -> dict[str, Any]:
        """The options of the broker that were given."""
        names = SubscriptionOptions.__struct_fields__
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not UNSET}
        if "delivery" in given:
            given["push"] = given.pop("delivery").to_push()
        if "retry_policy" in given:
            given["retry"] = given.pop("retry_policy").to_retry()
        if "dead_letter_topic_id" in given:
            given["dead_letter_topic"] = given.pop("dead_letter_topic_id")
        return given


class NewSubscription(SubscriptionOptions, forbid_unknown_fields=True, kw_only=True):
    """A subscription to be made; without a name it gets one."""

    topic_id: str
    name: str | None = None
    start: str | float = "latest"
    """``latest``, ``earliest``, or a time: ISO 8601 or seconds since 1970."""


class RetriesView(msgspec.Struct, kw_only=True):
    """When a failed message is tried again."""

    max_attempts: int | None
    backoff: str
    initial_interval_ms: float
    max_interval_ms: float
    multiplier: float
    jitter: float
    immediate_retries: int


class PartitionLagView(msgspec.Struct):
    """How far behind in one partition."""

    topic: str
    partition: int
    messages: int
    oldest_offset: int | None


class LagView(msgspec.Struct):
    """How far behind: messages that are not done."""

    messages: int
    oldest_age_s: float
    level: str
    partitions: list[PartitionLagView]


class SubscriptionView(msgspec.Struct, kw_only=True):
    """A subscription as it is. ``signing_secret`` is told once, when a webhook is made."""

    id: str
    name: str
    topic_id: str
    status: str
    """active or paused; of a webhook also open, half_open or disabled."""
    delivery: Delivery
    retry_policy: RetriesView
    dead_letter_topic_id: str | None
    filter: str
    ordering: Ordering
    guarantee: Guarantee
    ack_deadline_s: float
    expired: Expired
    key_window: int
    max_in_flight: int
    created_at: str
    in_flight: int | UnsetType = UNSET
    lag: LagView | UnsetType = UNSET
    dlq_count: int | UnsetType = UNSET
    push: PushState | UnsetType = UNSET
    signing_secret: str | UnsetType = UNSET


class SubscriptionList(msgspec.Struct):
    """A page of subscriptions."""

    subscriptions: list[SubscriptionView]
    total: int


class Position(msgspec.Struct, forbid_unknown_fields=True):
    """An offset of a partition."""

    topic: str
    offset: int
    partition: int = 0


class Seek(msgspec.Struct, forbid_unknown_fields=True):
    """Where to go on: exactly one of these. A position is ``earliest`` or ``latest``."""

    position: Literal["earliest", "latest"] | None = None
    time: datetime | float | None = None
    snapshot: str | None = None
    offsets: list[Position] | None = None

    def to_target(self) -> Any:
        given = [getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgument("give one of position, time, snapshot or offsets")
        if self.offsets is not None:
            return {(each.topic, each.partition): each.offset for each in self.offsets}
        return given[0]


class NewSnapshot(msgspec.Struct, forbid_unknown_fields=True):
    """A snapshot to be taken."""

    name: str
    ttl_s: float = 7 * 86400.0


class SnapshotView(msgspec.Struct):
    """A saved cursor."""

    name: str
    subscription_id: str | None
    created_at: str | None
    expires_at: str | None


class SnapshotList(msgspec.Struct):
    """A page of snapshots."""

    snapshots: list[SnapshotView]
    total: int


class Rotation(msgspec.Struct, forbid_unknown_fields=True):
    """How long the secret before stays in force."""

    overlap_s: float = 86_400.0
    secret: str | None = None


class Rotated(msgspec.Struct):
    """The new secret."""

    signing_secret: str


def view(subscription: Subscription, state: PushState | None = None) -> SubscriptionView:
    """A subscription as it is shown."""
    policy, retry = subscription.policy, subscription.policy.retry
    status = "paused" if subscription.is_paused else "active" if state is None else state.state.value
    return SubscriptionView(
        id=subscription.name,
        name=subscription.name,
        topic_id=subscription.pattern,
        status=status,
        delivery=_delivery(policy),
        retry_policy=RetriesView(
            max_attempts=policy.attempts_max,
            backoff="fixed" if retry.multiplier == 1 else "exponential",
            initial_interval_ms=retry.min_backoff_s * 1000,
            max_interval_ms=retry.max_backoff_s * 1000,
            multiplier=retry.multiplier,
            jitter=retry.jitter,
            immediate_retries=retry.immediate_retries,
        ),
        dead_letter_topic_id=policy.dead_letter_topic,
        filter=policy.filter,
        ordering=policy.ordering,
        guarantee=policy.guarantee,
        ack_deadline_s=policy.ack_deadline_s,
        expired=policy.expired,
        key_window=policy.key_window,
        max_in_flight=policy.max_in_flight,
        created_at=timestamp(subscription.created_at_us) or "",
        push=UNSET if state is None else state,
    )


def _delivery(policy: SubscriptionPolicy) -> Delivery:
    if policy.delivery is Consumption.PIPELINE:
        return Delivery("pipeline")
    return Delivery("stream") if policy.push is None else _webhook(policy.push)


def _webhook(push: PushPolicy) -> Delivery:
    return Delivery("webhook", **{name: getattr(push, name) for name in push.__struct_fields__})


EXAMPLE = {
    "name": "billing",
    "topic_id": "orders.#",
    "delivery": {"type": "stream"},
    "retry_policy": {"max_attempts": 5, "backoff": "exponential", "initial_interval_ms": 1000},
    "dead_letter_topic_id": "billing.dead",
    "filter": 'attributes.env = "prod"',
}


async def held(api: Api, request: Req, name: str, action: Action = Action.SUBSCRIBE) -> BrokerSubscription:
    """A hold on a subscription, for whoever may do this to what it reads."""
    handle = await api.broker.subscription(name)
    api.require(request, action, handle.pattern)
    return handle


def routes(api: Api) -> list[Any]:
    """The handlers."""
    return [*_life(api), *_moves(api)]


def _life(api: Api) -> list[Any]:
    @post(
        "/v1/subscriptions",
        opt=described(
            "Create a subscription",
            tag=TAG,
            description="One that exists with the same settings is returned as it is.",
            body=NewSubscription,
            body_example=EXAMPLE,
            answers={201: SubscriptionView},
            errors=(404, 409),
        ),
    )
    async def create_subscription(request: Req) -> Answer:
        wanted = await body(request, NewSubscription)
        name = wanted.name or f"sub-{secrets.token_hex(8)}"
        async with api.audited(request, "subscribe", name):
            api.require(request, Action.SUBSCRIBE, wanted.topic_id)
            policy = wanted.to_policy()
            _check_letters(api, request, policy)
            start = parse_moment(wanted.start) if wanted.start not in _ENDS else wanted.start
            handle = await api.broker.subscribe(name, wanted.topic_id, start=start, **policy)
        shown = await _shown(handle)
        if handle.policy.push is not None:
            fresh = await handle.push_secrets()
            shown.signing_secret = fresh[0] if fresh else UNSET
        return answer(shown, 201, {"Location": f"/v1/subscriptions/{name}"})

    @get(
        "/v1/subscriptions",
        opt=described("List subscriptions", tag=TAG, query=Page, answers={200: SubscriptionList}),
    )
    async def list_subscriptions(request: Req) -> Answer:
        principal = api.principal(request)
        may = api.access.may
        found = [
            each for each in await api.broker.subscriptions() if may(principal, Action.READ, each.pattern)
        ]
        return paged(request, "subscriptions", found, query(request, Page), view)

    @get(
        ONE,
        opt=described(
            "Look at a subscription: status, lag by partition, dead letters",
            tag=TAG,
            answers={200: SubscriptionView},
            errors=(404,),
        ),
    )
    async def get_subscription(request: Req, subscription: str) -> Answer:
        handle = await held(api, request, subscription, Action.READ)
        shown = await _shown(handle)
        report = await handle.lag_report()
        lags = [PartitionLagView(*each) for each in await handle.partition_lags()]
        shown.lag = LagView(
            sum(each.messages for each in lags), report.oldest_age_s, report.level.value, lags
        )
        shown.in_flight = handle.in_flight
        has_letters = handle.policy.dead_letter_topic is not None
        shown.dlq_count = (await handle.dead_letters.statistics()).messages if has_letters else 0
        return answer(shown)

    @patch(
        ONE,
        opt=described(
            "Change a subscription",
            tag=TAG,
            description="Messages in flight are handed over again; what was not given stays.",
            body=SubscriptionOptions,
            body_example={"filter": 'attributes.env = "test"', "ack_deadline_s": 30},
            answers={200: SubscriptionView},
            errors=(404, 409),
        ),
    )
    async def update_subscription(request: Req, subscription: str) -> Answer:
        wanted = await body(request, SubscriptionOptions)
        async with api.audited(request, "subscription.update", subscription):
            handle = await held(api, request, subscription)
            policy = wanted.to_policy()
            _check_letters(api, request, policy)
            if policy:
                await handle.update(**policy)
        return answer(await _shown(handle))

    @delete(
        ONE,
        status_code=200,
        opt=described("Delete a subscription", tag=TAG, answers={204: None}, errors=(404,)),
    )
    async def delete_subscription(request: Req, subscription: str) -> Answer:
        async with api.audited(request, "subscription.unsubscribe", subscription):
            await (await held(api, request, subscription)).unsubscribe()
        return no_content()

    return [
        create_subscription,
        list_subscriptions,
        get_subscription,
        update_subscription,
        delete_subscription,
    ]


async def _shown(handle: BrokerSubscription) -> SubscriptionView:
    state = None if handle.policy.push is None else await handle.push_state()
    return view(handle.subscription, state)


def _check_letters(api: Api, request: Req, policy: dict[str, Any]) -> None:
    """Whoever sends dead letters to a topic publishes there."""
    if isinstance(policy.get("dead_letter_topic"), str):
        api.require(request, Action.PUBLISH, policy["dead_letter_topic"])


def _moves(api: Api) -> list[Any]:
    @post(
        f"{ONE}/pause",
        status_code=200,
        opt=described("Stop delivering", tag=TAG, answers={200: SubscriptionView}, errors=(404,)),
    )
    async def pause_subscription(request: Req, subscription: str) -> Answer:
        async with api.audited(request, "subscription.pause", subscription):
            handle = await held(api, request, subscription)
            await handle.pause()
        return answer(await _shown(handle))

    @post(
        f"{ONE}/resume",
        status_code=200,
        opt=described("Deliver again", tag=TAG, answers={200: SubscriptionView}, errors=(404,)),
    )
    async def resume_subscription(request: Req, subscription: str) -> Answer:
        async with api.audited(request, "subscription.resume", subscription):
            handle = await held(api, request, subscription)
            await handle.resume()
        return answer(await _shown(handle))

    @post(
        f"{ONE}/seek",
        status_code=200,
        opt=described(
            "Go on elsewhere in the log",
            tag=TAG,
            description="What lies behind counts as acked, what lies ahead as new.",
            body=Seek,
            body_example={"position": "earliest"},
            answers={204: None},
            errors=(404, 409, 416),
        ),
    )
    async def seek_subscription(request: Req, subscription: str) -> Answer:
        target = (await body(request, Seek)).to_target()
        async with api.audited(request, "subscription.seek", subscription):
            await (await held(api, request, subscription)).seek(target)
        return no_content()

    @post(
        f"{ONE}/snapshots",
        opt=described(
            "Save the cursor under a name",
            tag=TAG,
            body=NewSnapshot,
            body_example={"name": "before-release", "ttl_s": 86400},
            answers={201: SnapshotView},
            errors=(404, 409),
        ),
    )
    async def create_snapshot(request: Req, subscription: str) -> Answer:
        wanted = await body(request, NewSnapshot)
        handle = await held(api, request, subscription)
        await handle.snapshot(wanted.name, ttl_s=wanted.ttl_s)
        found = [each for each in await _snapshots(api) if each.name == wanted.name]
        return answer(found[0], 201)

    @get(
        "/v1/snapshots",
        opt=described("List snapshots", tag=TAG, query=Page, answers={200: SnapshotList}),
    )
    async def list_snapshots(request: Req) -> Answer:
        principal = api.principal(request)
        seen = {
            each.name
            for each in await api.broker.subscriptions()
            if api.access.may(principal, Action.READ, each.pattern)
        }
        found = [each for each in await _snapshots(api) if each.subscription_id in seen]
        return paged(request, "snapshots", found, query(request, Page))

    @delete(
        "/v1/snapshots/{snapshot:str}",
        status_code=200,
        opt=described("Forget a snapshot", tag=TAG, answers={204: None}, errors=(404,)),
    )
    async def delete_snapshot(request: Req, snapshot: str) -> Answer:
        owners = [each.subscription_id for each in await _snapshots(api) if each.name == snapshot]
        patterns = {each.name: each.pattern for each in await api.broker.subscriptions()}
        async with api.audited(request, "delete_snapshot", snapshot):
            api.require(request, Action.SUBSCRIBE, patterns.get(owners[0] or "") if owners else None)
            await api.broker.delete_snapshot(snapshot)
        return no_content()

    @post(
        f"{ONE}/rotate-secret",
        status_code=200,
        opt=described(
            "Sign webhooks with a new secret",
            tag=TAG,
            body=Rotation,
            is_body_optional=True,
            body_example={"overlap_s": 3600},
            answers={200: Rotated},
            errors=(404, 409),
        ),
    )
    async def rotate_secret(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Rotation, is_optional=True)
        async with api.audited(request, "subscription.rotate_secret", subscription):
            handle = await held(api, request, subscription)
            secret = await handle.rotate_secret(overlap_s=wanted.overlap_s, secret=wanted.secret)
        return answer(Rotated(secret))

    return [
        pause_subscription,
        resume_subscription,
        seek_subscription,
        create_snapshot,
        list_snapshots,
        delete_snapshot,
        rotate_secret,
    ]


async def _snapshots(api: Api) -> list[SnapshotView]:
    names = {each.id: each.name for each in await api.broker.subscriptions()}
    return [
        SnapshotView(
            each.name,
            names.get(each.subscription_id),
            timestamp(each.created_at_us),
            timestamp(each.expires_at_us),
        )
        for each in await api.broker.snapshots()
    ]
