"""Health of the HTTP API: the broker by its figures, its consumers, and a check that sends a message.

The two probes of supervisors are in ``sparrow.server.health``; ``/health/deep`` is for people and for
monitors that may wait. It writes to the disk, so it wants a token that may look at the broker.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sparrow.broker.checkup import Checkup, DeepReport
from sparrow.broker.inventory import ConsumerHealth
from sparrow.kernel.vitals import BrokerHealth
from sparrow.model.access import Action
from sparrow.model.health import Status
from sparrow.server.api.calls import call_limits
from sparrow.server.api.family import Answer, Api, Page, Req, answer, paged, query, timestamp
from sparrow.server.api.operation import described
from sparrow.server.api.routing import get, post

TAG = "Health"


class HealthQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How thoroughly to look."""

    deep: bool = False


class ConsumersQuery(Page, forbid_unknown_fields=True):
    """Whose consumers."""

    group_name: str | None = None


class HealthReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The broker, and what a message met on its way when that was asked for."""

    status: Status
    checked_at: str
    broker: BrokerHealth
    deep: DeepReport | None = None


class ConsumerHealthList(msgspec.Struct, frozen=True, kw_only=True):
    """How consumers are, the worst first."""

    consumers: list[ConsumerHealth]
    total: int


def routes(api: Api) -> list[Any]:
    """The health of one broker."""
    checkup = Checkup(api.broker, api.clock)
    limits = call_limits(api.settings)

    async def examine(*, is_deep: bool) -> HealthReport:
        deep = await checkup.deep() if is_deep else None
        broker = await checkup.report()
        statuses = [broker.status] if deep is None else [broker.status, deep.status]
        worst = next(
            (s for s in (Status.CRITICAL, Status.UNKNOWN, Status.DEGRADED) if s in statuses), Status.HEALTHY
        )
        now = timestamp(api.clock.now_us(), "milliseconds") or ""
        return HealthReport(status=worst, checked_at=now, broker=broker, deep=deep)

    @get(
        "/health/deep",
        opt=described(
            "Send a message the whole way",
            tag=TAG,
            description="To a topic of the broker's own: published, received, read back, acked, within 5 s.",
            answers={200: DeepReport, 503: DeepReport},
        ),
    )
    async def deep(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        found = await checkup.deep()
        return answer(found, 503 if found.status is Status.CRITICAL else 200, {"Cache-Control": "no-store"})

    @get(
        "/api/v1/health",
        opt=described(
            "How the broker is",
            tag=TAG,
            query=HealthQuery,
            answers={200: HealthReport, 503: HealthReport},
        ),
    )
    async def health(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        found = await examine(is_deep=query(request, HealthQuery).deep)
        return answer(found, 503 if found.status is Status.CRITICAL else 200, {"Cache-Control": "no-store"})

    @post(
        "/api/v1/health/check",
        opt=described("Check everything now", tag=TAG, answers={200: HealthReport, 503: HealthReport}),
    )
    async def check(request: Req) -> Answer:
        api.require(request, Action.ADMIN, limit=limits.admin)
        found = await examine(is_deep=True)
        return answer(found, 503 if found.status is Status.CRITICAL else 200, {"Cache-Control": "no-store"})

    @get(
        "/api/v1/health/consumers",
        opt=described(
            "How the members of groups are",
            tag=TAG,
            description="By their signs of life: healthy, warning after one missed heartbeat, suspicious "
            "after two, failed after a session without any; and what is wrong with those that live.",
            query=ConsumersQuery,
            answers={200: ConsumerHealthList},
            errors=(404,),
        ),
    )
    async def consumers(request: Req) -> Answer:
        api.require(request, Action.READ, limit=limits.read)
        asked = query(request, ConsumersQuery)
        return paged(request, "consumers", api.broker.inventory.consumers(asked.group_name), asked)

    return [deep, health, check, consumers]
