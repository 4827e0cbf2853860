"""The token family of the HTTP API: make, list and revoke tokens, and read the audit log.

All of it is for administrators of the whole broker. The text of a token is in the answer that makes it and in
no other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sparrow.kernel.access import TOKEN_PREFIX
from sparrow.model.access import EVERYTHING, Action, AuditEntry, TokenInfo
from sparrow.server.api.calls import call_limits, changing
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
from sparrow.server.api.routing import delete, get, post

TAG = "tokens"


class NewTokenBody(msgspec.Struct, forbid_unknown_fields=True):
    """Scopes, or a role on the topics of a pattern."""

    name: str
    scopes: list[str] | None = None
    role: str | None = None
    topics: str = EVERYTHING
    expires_in_s: float | None = None


class TokenShown(msgspec.Struct, omit_defaults=True):
    """A token, without its text unless it was just made."""

    id: str
    name: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    token: str = ""


class TokenList(msgspec.Struct):
    tokens: list[TokenShown]
    total: int


class AuditQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: int = 100


class AuditShown(msgspec.Struct):
    entries: list[AuditEntry]


_EXAMPLE = {"name": "shop", "role": "publisher", "topics": "orders.#", "expires_in_s": 7776000}


def routes(api: Api) -> list[Any]:
    """Tokens and the audit log."""
    limits = call_limits(api.settings)

    @post(
        "/api/v1/admin/tokens",
        opt=described(
            "Make a token",
            tag=TAG,
            description="Its text is in this answer and in no other. From the first token on, one is wanted.",
            body=NewTokenBody,
            body_example=_EXAMPLE,
            answers={201: TokenShown},
            errors=(409,),
        ),
    )
    async def create(request: Req) -> Answer:
        wanted = await body(request, NewTokenBody)
        async with changing(api, request, "create_token", wanted.name):
            made = await api.access.create_token(
                wanted.name,
                scopes=wanted.scopes,
                role=wanted.role,
                topics=wanted.topics,
                expires_in_s=wanted.expires_in_s,
            )
        return answer(_shown(made.info, made.text), 201, {"Cache-Control": "no-store"})

    @get(
        "/api/v1/admin/tokens",
        opt=described(
            "List the tokens, without their secrets", tag=TAG, query=Page, answers={200: TokenList}
        ),
    )
    async def list_(request: Req) -> Answer:
        api.require(request, Action.ADMIN, limit=limits.read)
        return paged(request, "tokens", api.access.tokens(), query(request, Page), _shown)

    @delete(
        "/api/v1/admin/tokens/{token_name:str}",
        status_code=200,
        opt=described("Revoke a token, by its name or id", tag=TAG, answers={204: None}, errors=(404, 409)),
    )
    async def revoke(request: Req, token_name: str) -> Answer:
        what = f"{TOKEN_PREFIX}…" if token_name.startswith(TOKEN_PREFIX) else token_name
        async with changing(api, request, "revoke_token", what):
            await api.access.revoke_token(token_name)
        return no_content()

    @get(
        "/api/v1/admin/audit",
        opt=described(
            "What was changed over the network, by whom; the newest last",
            tag=TAG,
            query=AuditQuery,
            answers={200: AuditShown},
        ),
    )
    async def audit(request: Req) -> Answer:
        api.require(request, Action.ADMIN, limit=limits.read)
        entries = await api.access.audit_log(query(request, AuditQuery).limit)
        return answer(AuditShown(entries))

    return [create, list_, revoke, audit]


def _shown(info: TokenInfo, text: str = "") -> TokenShown:
    return TokenShown(
        id=info.id,
        name=info.name,
        scopes=[str(scope) for scope in info.scopes],
        created_at=timestamp(info.created_at_us) or "",
        expires_at=timestamp(info.expires_at_us),
        token=text,
    )
