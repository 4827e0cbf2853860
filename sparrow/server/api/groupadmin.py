"""Groups of the admin API: a group is a subscription with members, so every subscription is one.

Shapes and names are those of queue.md §9; ``/admin/groups`` is another name of the list.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sparrow.broker.figures import SubscriptionFigures
from sparrow.broker.inventory import ConsumerHealth
from sparrow.kernel.lag import LagReport
from sparrow.model.access import Action
from sparrow.model.group import Committed, GroupInfo, MemberInfo
from sparrow.server.api.calls import call_limits, changing
from sparrow.server.api.family import Answer, Api, Page, Req, answer, body, paged, query
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, post
from sparrow.server.api.topicadmin import OperationResult

TAG = "Administration"


class GroupShown(msgspec.Struct, kw_only=True):
    """A group in a list."""

    name: str
    topic: str
    """What it subscribes to: a topic or a pattern."""
    members: int
    lag: int
    oldest_age_s: float
    pending: int
    """Messages that its consumers hold."""
    pending_by_consumer: dict[str, int]
    is_paused: bool
    generation: int
    rebalances: int
    last_rebalance_s: float


class GroupList(msgspec.Struct, kw_only=True):
    """A page of groups."""

    groups: list[GroupShown]
    total: int


class GroupDetails(msgspec.Struct, kw_only=True):
    """A group, all of it."""

    name: str
    topic: str
    is_paused: bool
    state: str
    strategy: str
    mode: str
    generation: int
    rebalances: int
    last_rebalance_s: float
    lag: int
    pending: int
    committed: list[Committed]
    unassigned: list[str]
    """Partitions that nobody has, as topic/partition."""
    draining: list[str]
    members: list[MemberInfo] | UnsetType = UNSET


class RebalanceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Why."""

    reason: str = ""


class RebalanceResult(msgspec.Struct, kw_only=True):
    """A rebalance that was begun."""

    group: str
    state: str
    generation: int
    reason: str


class LagMetrics(msgspec.Struct, kw_only=True):
    """The lag of a group."""

    group: str
    report: LagReport
    consumers: dict[str, LagReport]
    """Of each consumer that was active lately; its depth is what it holds."""


class MemberList(msgspec.Struct, kw_only=True):
    """Members with their health."""

    members: list[ConsumerHealth]
    total: int


class DetailQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How much of it."""

    include_members: bool = True


def routes(api: Api) -> list[Any]:
    """The handlers."""
    broker, limits = api.broker, call_limits(api.settings)

    async def pattern_of(name: str) -> str:
        return (await broker.subscription(name)).pattern

    async def readable(request: Req, name: str) -> Any:
        """The subscription, for who may look at it."""
        found = await broker.subscription(name)
        api.require(request, Action.READ, found.pattern, limit=limits.read)
        return found

    def to_shown(each: SubscriptionFigures) -> GroupShown:
        held = broker.inventory.held_by_consumer(each.name) if each.in_flight else {}
        return GroupShown(
            name=each.name,
            topic=each.pattern,
            members=each.members,
            lag=each.lag,
            oldest_age_s=round(each.oldest_age_s, 3),
            pending=each.in_flight,
            pending_by_consumer=held,
            is_paused=each.is_paused,
            generation=each.generation,
            rebalances=each.rebalances,
            last_rebalance_s=each.rebalance_s,
        )

    @get(
        ["/api/v1/groups", "/admin/groups"],
        opt=described("List groups with their figures", tag=TAG, query=Page, answers={200: GroupList}),
    )
    async def list_groups(request: Req) -> Answer:
        principal = api.principal(request)
        api.access.require_some(principal, Action.READ, limit=limits.read)
        seen = await broker.telemetry.look(is_new=True)
        found = [
            each
            for each in seen.figures.subscriptions
            if api.access.may(principal, Action.READ, each.pattern)
        ]
        return paged(request, "groups", found, query(request, Page), to_shown)

    @get(
        "/api/v1/groups/{group:str}",
        opt=described(
            "Look at a group", tag=TAG, query=DetailQuery, answers={200: GroupDetails}, errors=(404,)
        ),
    )
    async def get_group(request: Req, group: str) -> Answer:
        asked = query(request, DetailQuery)
        found = await readable(request, group)
        info: GroupInfo = await found.group()
        details = GroupDetails(
            name=found.name,
            topic=found.pattern,
            is_paused=found.subscription.is_paused,
            state=info.state,
            strategy=info.strategy,
            mode=info.mode,
            generation=info.generation,
            rebalances=info.rebalances,
            last_rebalance_s=info.last_rebalance_s,
            lag=await found.lag(),
            pending=found.in_flight,
            committed=await found.committed(),
            unassigned=[f"{each.topic}/{each.partition}" for each in info.unassigned],
            draining=[f"{each.topic}/{each.partition}" for each in info.draining],
        )
        if asked.include_members:
            details.members = await found.members()
        return answer(details)

    @post(
        "/api/v1/groups/{group:str}/rebalance",
        opt=described(
            "Share anew among the members of a group",
            tag=TAG,
            body=RebalanceRequest,
            is_body_optional=True,
            answers={202: RebalanceResult},
            errors=(404, 409),
        ),
    )
    async def rebalance(request: Req, group: str) -> Answer:
        wanted = await body(request, RebalanceRequest, is_optional=True)
        async with changing(api, request, "rebalance", group, await pattern_of(group)):
            found = await broker.subscription(group)
            await found.rebalance()
            info = await found.group()
        result = RebalanceResult(
            group=group, state=info.state, generation=info.generation, reason=wanted.reason
        )
        return answer(result, 202)

    @get(
        "/api/v1/groups/{group:str}/lag",
        opt=described("How far a group is behind", tag=TAG, answers={200: LagMetrics}, errors=(404,)),
    )
    async def lag(request: Req, group: str) -> Answer:
        found = await readable(request, group)
        report, consumers = await found.lag_report(), await found.consumer_lag()
        return answer(LagMetrics(group=group, report=report, consumers=consumers))

    @get(
        "/api/v1/groups/{group:str}/members",
        opt=described(
            "The members of a group and how they are",
            tag=TAG,
            query=Page,
            answers={200: MemberList},
            errors=(404,),
        ),
    )
    async def members(request: Req, group: str) -> Answer:
        await readable(request, group)
        return paged(request, "members", broker.inventory.consumers(group), query(request, Page))

    @delete(
        "/api/v1/groups/{group:str}/members/{member:str}",
        status_code=200,
        opt=described(
            "Send a member away; it may join again",
            tag=TAG,
            answers={200: OperationResult},
            errors=(404,),
        ),
    )
    async def evict(request: Req, group: str, member: str) -> Answer:
        async with changing(api, request, "evict_member", f"{group}/{member}", await pattern_of(group)):
            broker.inventory.evict(group, member)
        text = f"{member!r} is no member of {group!r} any more; what it held goes to others"
        return answer(OperationResult(status="evicted", message=text))

    return [list_groups, get_group, rebalance, lag, members, evict]
