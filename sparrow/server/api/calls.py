"""How often a token may call the admin API, and changes that are counted and written down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from sparrow.model.access import Action, CallLimit, Principal
from sparrow.model.settings import Settings
from sparrow.server.api.family import Api, Req


class CallLimits(NamedTuple):
    """Of looking and of changing."""

    read: CallLimit
    admin: CallLimit


def call_limits(settings: Settings) -> CallLimits:
    """As the settings say."""
    access = settings.access
    return CallLimits(
        CallLimit("read", access.read_calls_per_min), CallLimit("admin", access.admin_calls_per_min)
    )


@asynccontextmanager
async def changing(
    api: Api, request: Req, verb: str, what: str, topic: str | None = None
) -> AsyncIterator[Principal]:
    """Around a change by an administrator: who may not is refused, and either is written down."""
    async with api.audited(request, verb, what) as principal:
        api.access.require(principal, Action.ADMIN, topic, limit=call_limits(api.settings).admin)
        yield principal
