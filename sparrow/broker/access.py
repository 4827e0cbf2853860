"""Access: who is asking, whether they may, how often, and what was done.

Every listener goes through this one object. A token is wanted as soon as there is one, in the catalog or
among the bootstrap tokens of the settings (``server.tokens``, which allow everything); and it stays wanted
where a listener insists, because it is reached from other machines. Where none is wanted, everybody is the
same anonymous principal and may do everything.

A principal is asked about again at each request, so a token that is revoked or ends is refused at once,
also on connections that are open. Expired tokens stay in the list until they are revoked, and so never
leave the broker open.

Reading is quick and does no I/O; tokens are held in memory and change in the catalog first. Embedded use is
not checked: whoever can open the data directory owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from sparrow.broker import chance, logs
from sparrow.broker.clock import Clock
from sparrow.kernel import access as rules
from sparrow.kernel.access import Rights
from sparrow.kernel.bucket import Bucket
from sparrow.model.access import (
    ALL_SCOPES,
    ANONYMOUS,
    EVERYTHING,
    EXPIRES_IN_S_MAX,
    Action,
    AuditEntry,
    CallLimit,
    NewToken,
    Principal,
    Scope,
    TokenInfo,
    TokenRecord,
    parse_role,
    parse_scopes,
    parse_token_name,
    scopes_of,
)
from sparrow.model.errors import (
    InvalidArgument,
    PermissionDenied,
    PreconditionFailed,
    RateLimited,
    ResourceExhausted,
    SparrowError,
    StorageError,
    TokenExists,
    TokenNotFound,
    Unauthenticated,
)
from sparrow.store.ports import Store

TOKENS_MAX = 10_000
_KIND = "token"
_BOOTSTRAP = "bootstrap:"
_ALL = Rights(ALL_SCOPES)
_log = logs.get("access")
_to_record = msgspec.json.Decoder(TokenRecord).decode


class Access:
    """See the module's text."""

    def __init__(self, store: Store, clock: Clock, bootstrap: Mapping[str, str] | None = None) -> None:
        self._store = store
        self._clock = clock
        self._tokens: dict[str, TokenRecord] = {}
        self._rights: dict[str, Rights] = {"": _ALL}
        self._principals: dict[str, Principal] = {}
        self._bootstrap: dict[bytes, Principal] = {}
        self._buckets: dict[tuple[str, str], tuple[CallLimit, Bucket]] = {}
        self._is_insisted = False
        self.is_required = False
        """Whether a token is wanted."""
        self.add_bootstrap(bootstrap or {})

    async def load(self) -> None:
        """Takes the tokens of the catalog into force."""
        for raw in (await self._store.documents(_KIND)).values():
            self._put(_to_record(raw))

    def add_bootstrap(self, tokens: Mapping[str, str]) -> None:
        """Tokens of the settings, as secrets and their names; they allow everything and do not end."""
        for secret, name in tokens.items():
            principal = Principal(name, _BOOTSTRAP + name, ALL_SCOPES)
            self._bootstrap[rules.digest(secret)] = principal
            self._rights[principal.token_id] = _ALL
        self._changed()

    def insist(self) -> None:
        """A token is wanted from now on, even when the last one goes."""
        self._is_insisted = True
        self._changed()

    @property
    def has_tokens(self) -> bool:
        """Whether anybody could come with a token."""
        return bool(self._tokens or self._bootstrap)

    def _changed(self) -> None:
        self.is_required = self._is_insisted or self.has_tokens

    # Asking.

    def authenticate(self, token: str | None) -> Principal:
        """Who comes with this token; refuses one that is none, and nobody where one is wanted."""
        if not self.is_required:
            return ANONYMOUS
        if not token:
            raise Unauthenticated("the broker wants a token")
        found = self._find(token) if len(token) <= rules.TOKEN_LENGTH_MAX else None
        if found is None:
            raise Unauthenticated("the broker does not know this token")
        self.check_alive(found)
        return found

    def _find(self, token: str) -> Principal | None:
        given = rules.digest(token)
        record = self._tokens.get(rules.token_id(token) or "")
        if record is not None:
            return self._principals[record.info.id] if rules.is_same(record.digest, given) else None
        known = [principal for digest, principal in self._bootstrap.items() if rules.is_same(digest, given)]
        return known[0] if known else None

    def check_alive(self, principal: Principal) -> None:
        """Refuses a token that was revoked or has ended, and nobody where a token is wanted."""
        if principal.is_anonymous:
            if self.is_required:
                raise Unauthenticated("the broker wants a token")
            return
        record = self._tokens.get(principal.token_id)
        if record is None:
            if principal.token_id not in self._rights:
                raise Unauthenticated(f"the token {principal.name!r} was revoked")
        elif record.info.expires_at_us is not None and record.info.is_expired(self._clock.now_us()):
            raise Unauthenticated(
                f"the token {principal.name!r} has expired", hint="Ask for a new one: `sparrow token create`."
            )

    def may(self, principal: Principal, action: Action, topic: str | None = None) -> bool:
        """Whether a principal may do this to a topic, to all topics of a pattern, or to the broker."""
        self.check_alive(principal)
        return self._rights[principal.token_id].allow(action, topic)

    def require(
        self,
        principal: Principal,
        action: Action,
        topic: str | None = None,
        *,
        limit: CallLimit | None = None,
    ) -> None:
        """Refuses what the principal may not do. A subscription is asked about by its pattern; without a
        topic the request is about the broker as a whole. With ``limit`` the call is counted as well."""
        if not self.may(principal, action, topic):
            raise _denied(principal, Scope(action, EVERYTHING if topic is None else topic))
        if limit is not None:
            self.count(principal, limit)

    def require_some(self, principal: Principal, action: Action, *, limit: CallLimit | None = None) -> None:
        """Refuses who may not do this to any topic. For lists, whose entries are then chosen by ``may``."""
        self.check_alive(principal)
        if not self._rights[principal.token_id].hold(action):
            raise _denied(principal, Scope(action))
        if limit is not None:
            self.count(principal, limit)

    def require_any(self, principal: Principal, topic: str) -> None:
        """Refuses who has nothing to do with a topic; whoever has may know how it is made."""
        self.check_alive(principal)
        if not self._rights[principal.token_id].allow_any(topic):
            raise _denied(principal, Scope(Action.READ, topic))

    def may_any(self, principal: Principal, topic: str) -> bool:
        """Whether a principal has anything to do with a topic."""
        self.check_alive(principal)
        return self._rights[principal.token_id].allow_any(topic)

    def count(self, principal: Principal, limit: CallLimit) -> None:
        """Counts a call of a kind; refuses when the token has made too many. Who needs no token has no
        limit."""
        if principal.is_anonymous:
            return
        now_us = int(self._clock.monotonic_s() * 1e6)
        key = (principal.token_id, limit.name)
        known, bucket = self._buckets.get(key, (None, None))
        if bucket is None:
            bucket = Bucket(limit.per_min / 60, limit.per_min, now_us)
        elif known != limit:
            bucket.change(limit.per_min / 60, limit.per_min, now_us)
        self._buckets[key] = (limit, bucket)
        wait_us = bucket.take(1, now_us)
        if wait_us:
            raise RateLimited(
                f"the token {principal.name!r} may make {limit.per_min:g} {limit.name} calls a minute",
                retry_after_s=max(0.001, round(wait_us / 1e6, 3)),
                limit=limit.name,
                per_min=limit.per_min,
            )

    # Tokens.

    def tokens(self) -> list[TokenInfo]:
        """The tokens of the catalog, by name; those of the settings are not among them."""
        return sorted((record.info for record in self._tokens.values()), key=lambda info: info.name)

    async def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[Any] | None = None,
        role: str | None = None,
        topics: str = EVERYTHING,
        expires_in_s: float | None = None,
    ) -> NewToken:
        """A new token with scopes, or with a role on the topics of a pattern. Its text is told this once."""
        chosen = _chosen(scopes, role, topics)
        Rights(chosen)
        now_us = self._clock.now_us()
        info = TokenInfo(
            id=chance.name(),
            name=parse_token_name(name),
            scopes=chosen,
            created_at_us=now_us,
            expires_at_us=None if expires_in_s is None else now_us + _lifetime_us(expires_in_s),
        )
        self._check_new(info)
        text = rules.token_text(info.id, chance.secret())
        record = TokenRecord(info=info, digest=rules.digest(text))
        self._put(record)
        try:
            await self._store.put_document(_KIND, info.id, msgspec.json.encode(record))
        except BaseException:
            self._drop(info.id)
            raise
        _log.info("token-created", "", name=info.name, id=info.id, scopes=[str(scope) for scope in chosen])
        return NewToken(info=info, text=text)

    def _check_new(self, info: TokenInfo) -> None:
        names = {record.info.name for record in self._tokens.values()}
        names.update(principal.name for principal in self._bootstrap.values())
        if info.name in names:
            raise TokenExists(f"there is a token {info.name!r}")
        if len(self._tokens) >= TOKENS_MAX:
            raise ResourceExhausted(f"the broker holds {TOKENS_MAX} tokens", hint="Revoke those not in use.")
        if not self._bootstrap and not info.is_lasting_admin and not self._lasting_admins():
            raise PreconditionFailed(
                "with this token nobody could administer the broker any more",
                hint="Create one that may do everything and does not end first: "
                "`sparrow token create NAME --role admin`.",
            )

    def _lasting_admins(self) -> list[str]:
        return [record.info.id for record in self._tokens.values() if record.info.is_lasting_admin]

    async def revoke_token(self, name: str) -> TokenInfo:
        """Ends a token, by its id or its name, everywhere and at once."""
        record = self._named(name)
        if not self._bootstrap and self._lasting_admins() == [record.info.id] and len(self._tokens) > 1:
            raise PreconditionFailed(
                f"{record.info.name!r} is the last token that may do everything",
                hint="Create another one first, or revoke the others before it.",
            )
        if self._is_insisted and not self._bootstrap and len(self._tokens) == 1:
            raise PreconditionFailed(
                f"{record.info.name!r} is the last token, and other machines reach this broker",
                hint="Create another one first; without any, nobody could come in.",
            )
        await self._store.delete_document(_KIND, record.info.id)
        self._drop(record.info.id)
        _log.info("token-revoked", "", name=record.info.name, id=record.info.id)
        return record.info

    def _named(self, name: object) -> TokenRecord:
        for record in self._tokens.values():
            if name in (record.info.id, record.info.name):
                return record
        shown = name[:40] if isinstance(name, str) else type(name).__name__
        if isinstance(name, str) and name.startswith(rules.TOKEN_PREFIX):
            shown = "given by its text"
        raise TokenNotFound(f"there is no token {shown!r}")

    def _put(self, record: TokenRecord) -> None:
        info = record.info
        self._tokens[info.id] = record
        self._rights[info.id] = Rights(info.scopes)
        self._principals[info.id] = Principal(info.name, info.id, info.scopes)
        self._changed()

    def _drop(self, token_id: str) -> None:
        for held in (self._tokens, self._rights, self._principals):
            held.pop(token_id, None)
        self._changed()
        for key in [key for key in self._buckets if key[0] == token_id]:
            del self._buckets[key]

    # What was done.

    async def audit(self, principal: Principal, action: str, what: str, outcome: str = "done") -> None:
        """Writes down what somebody did, or was refused: ``outcome`` is ``done`` or an error's code."""
        at = datetime.fromtimestamp(self._clock.now_us() / 1e6, UTC)
        entry = AuditEntry(
            at=at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            who=principal.name,
            token_id=principal.token_id,
            action=str(action),
            what=what,
            outcome=outcome,
            request_id=logs.correlation_id() or "",
        )
        try:
            await self._store.note_audit(msgspec.json.encode(entry))
        except StorageError as error:
            # What was done stays done; that it could not be written down must not be silent.
            _log.error("audit-lost", error.message, who=entry.who, action=entry.action, what=entry.what)

    async def audit_log(self, count: int = 100) -> list[AuditEntry]:
        """The last entries, the newest last."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
            raise InvalidArgument(f"count is from 1 to 10000, not {count!r}")
        return [msgspec.json.decode(line, type=AuditEntry) for line in await self._store.audit_lines(count)]


def _denied(principal: Principal, scope: Scope) -> SparrowError:
    return PermissionDenied(f"the token {principal.name!r} lacks the scope {scope}", scope=str(scope))


def _chosen(scopes: Sequence[Any] | None, role: str | None, topics: str) -> tuple[Scope, ...]:
    if (scopes is None) == (role is None):
        raise InvalidArgument("a token is made with scopes or with a role")
    if role is not None:
        return scopes_of(parse_role(role), topics)
    if topics != EVERYTHING:
        raise InvalidArgument("topics go with a role; a scope names its own: publish:orders.#")
    assert scopes is not None
    return parse_scopes(scopes)


def _lifetime_us(expires_in_s: object) -> int:
    is_number = isinstance(expires_in_s, int | float) and not isinstance(expires_in_s, bool)
    if not is_number or not 0 < expires_in_s <= EXPIRES_IN_S_MAX:  # type: ignore[operator]
        raise InvalidArgument(f"expires_in_s is from 0 to {EXPIRES_IN_S_MAX:g} seconds, not {expires_in_s!r}")
    return int(expires_in_s * 1e6)  # type: ignore[operator]
