"""Tokens, principals, limits and the audit log of a broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sparrow.broker.access import Access
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.access import ANONYMOUS, Action, CallLimit, NewToken
from sparrow.model.errors import (
    InvalidArgument,
    PermissionDenied,
    PreconditionFailed,
    RateLimited,
    SparrowError,
    TokenExists,
    TokenNotFound,
    Unauthenticated,
)
from sparrow.model.settings import ServerSettings, Settings

SECOND_US = 1_000_000
READ_CALLS, ADMIN_CALLS = CallLimit("read", 100), CallLimit("admin", 10)


class SetClock(Clock):
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time_us = 1_700_000_000_000_000

    def now_us(self) -> int:
        return self.time_us

    def monotonic_s(self) -> float:
        return self.time_us / 1e6


@asynccontextmanager
async def opened(
    path: Path, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[tuple[Broker, Access]]:
    chosen = Settings(data=str(path / "data"), **settings)
    async with await Broker.open(chosen, clock=clock or SetClock()) as broker:
        yield broker, broker.access


async def an_admin(access: Access) -> NewToken:
    return await access.create_token("root", role="admin")


async def test_without_tokens_anybody_may_do_everything(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        assert not access.is_required
        for token in (None, "", "anything"):
            principal = access.authenticate(token)
            assert principal.is_anonymous
            access.require(principal, Action.ADMIN)


async def test_from_the_first_token_on_one_is_wanted_also_of_those_who_came_before(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        early = access.authenticate(None)
        made = await an_admin(access)
        assert access.is_required
        for refused in (lambda: access.authenticate(None), lambda: access.require(early, Action.READ)):
            with pytest.raises(Unauthenticated):
                refused()
        access.require(access.authenticate(made.text), Action.ADMIN)


async def test_a_token_outlives_the_broker_and_its_secret_is_not_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        made = await an_admin(access)
    async with opened(tmp_path) as (_, access):
        assert access.authenticate(made.text).name == "root"
        assert access.tokens() == [made.info]
    secret = made.text.encode()
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path


async def test_a_secret_has_256_random_bits_and_is_not_shown_by_accident(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        made = await an_admin(access)
        other = await access.create_token("b", role="admin")
        assert len(made.text.rpartition("_")[2]) >= 40 or len(made.text) == 8 + 16 + 1 + 43
        assert made.text != other.text
        assert made.text not in repr(made) + repr(access.tokens())


@pytest.mark.parametrize("change", ["first", "last", "longer", "id", "empty", "huge"])
async def test_a_token_with_one_character_changed_is_refused(tmp_path: Path, change: str) -> None:
    async with opened(tmp_path) as (_, access):
        text = (await an_admin(access)).text
        wrong = {
            "first": "x" + text[1:],
            "last": text[:-1] + ("A" if text[-1] != "A" else "B"),
            "longer": text + "A",
            "id": text[:8] + ("0" if text[8] != "0" else "1") + text[9:],
            "empty": "",
            "huge": "x" * 1_000_000,
        }[change]
        with pytest.raises(Unauthenticated) as refused:
            access.authenticate(wrong)
        assert text not in str(refused.value)


async def test_a_token_allows_its_scopes_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        await an_admin(access)
        made = await access.create_token("shop", scopes=["publish:orders.#", "subscribe:stock"])
        shop = access.authenticate(made.text)
        access.require(shop, Action.PUBLISH, "orders.us")
        access.require(shop, Action.READ, "stock")
        access.require_some(shop, Action.PUBLISH)
        access.require_any(shop, "orders.us")
        assert access.may(shop, Action.SUBSCRIBE, "stock")
        for action, topic in [
            (Action.PUBLISH, "stock"),
            (Action.PUBLISH, None),
            (Action.SUBSCRIBE, "orders.us"),
            (Action.SUBSCRIBE, "#"),
            (Action.ADMIN, "orders.us"),
        ]:
            assert not access.may(shop, action, topic)
            with pytest.raises(PermissionDenied) as denied:
                access.require(shop, action, topic)
            assert denied.value.details["scope"].startswith(action)
        for refused in (
            lambda: access.require_some(shop, Action.ADMIN),
            lambda: access.require_any(shop, "invoices"),
        ):
            with pytest.raises(PermissionDenied):
                refused()


async def test_a_role_is_given_on_a_pattern(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        await an_admin(access)
        made = await access.create_token("team", role="admin", topics="team.#")
        team = access.authenticate(made.text)
        access.require(team, Action.ADMIN, "team.jobs")
        assert not access.may(team, Action.ADMIN)


async def test_an_expired_token_is_refused_also_on_what_it_has_opened(tmp_path: Path) -> None:
    clock = SetClock()
    async with opened(tmp_path, clock) as (_, access):
        await an_admin(access)
        made = await access.create_token("brief", role="publisher", expires_in_s=60)
        brief = access.authenticate(made.text)
        clock.time_us += 59 * SECOND_US
        access.require(brief, Action.PUBLISH, "t")
        clock.time_us += SECOND_US
        for refused in (
            lambda: access.authenticate(made.text),
            lambda: access.may(brief, Action.PUBLISH, "t"),
        ):
            with pytest.raises(Unauthenticated, match="expired"):
                refused()
        assert access.is_required


async def test_a_revoked_token_is_refused_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        await an_admin(access)
        made = await access.create_token("shop", role="publisher")
        shop = access.authenticate(made.text)
        assert await access.revoke_token("shop") == made.info
        for refused in (
            lambda: access.authenticate(made.text),
            lambda: access.require(shop, Action.PUBLISH, "t"),
        ):
            with pytest.raises(Unauthenticated):
                refused()
        again = await access.create_token("shop", role="publisher")
        with pytest.raises(Unauthenticated):
            access.require(shop, Action.PUBLISH, "t")
        await access.revoke_token(again.info.id)
        with pytest.raises(TokenNotFound):
            await access.revoke_token("shop")


async def test_a_token_given_where_its_name_belongs_is_not_repeated(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        made = await an_admin(access)
        with pytest.raises(TokenNotFound) as refused:
            await access.revoke_token(made.text)
        assert made.text[8:] not in str(refused.value)


async def test_nobody_locks_everybody_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        for wrong in ({"role": "publisher"}, {"role": "admin", "expires_in_s": 60}):
            with pytest.raises(PreconditionFailed):
                await access.create_token("first", **wrong)
        await an_admin(access)
        await access.create_token("shop", role="publisher")
        with pytest.raises(PreconditionFailed):
            await access.revoke_token("root")
        await access.revoke_token("shop")
        await access.revoke_token("root")
        assert not access.is_required


async def test_where_a_listener_insists_the_last_token_stays(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        access.insist()
        assert access.is_required
        with pytest.raises(Unauthenticated):
            access.authenticate(None)
        await an_admin(access)
        with pytest.raises(PreconditionFailed):
            await access.revoke_token("root")


async def test_tokens_of_the_settings_allow_everything(tmp_path: Path) -> None:
    async with opened(tmp_path, server=ServerSettings(tokens="ops:s3cret,ci:other")) as (_, access):
        assert access.is_required
        ops = access.authenticate("s3cret")
        assert ops.name == "ops"
        access.require(ops, Action.ADMIN)
        assert access.tokens() == []
        await access.create_token("shop", role="publisher")
        for wrong in ("s3cre", "ops", "ops:s3cret", None):
            with pytest.raises(Unauthenticated):
                access.authenticate(wrong)
        with pytest.raises(TokenExists):
            await access.create_token("ci", role="admin")


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"role": "king"},
        {"role": "admin", "scopes": ["read:#"]},
        {"scopes": []},
        {"scopes": ["read"]},
        {"scopes": ["read:a.#.b"]},
        {"scopes": ["read:#"], "topics": "a"},
        {"role": "admin", "topics": "a b"},
        {"role": "admin", "expires_in_s": 0},
        {"role": "admin", "expires_in_s": -1},
        {"role": "admin", "expires_in_s": float("inf")},
        {"role": "admin", "expires_in_s": "1d"},
        {"role": "admin", "expires_in_s": True},
    ],
)
async def test_a_token_that_makes_no_sense_is_refused_and_none_is_made(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    async with opened(tmp_path) as (_, access):
        with pytest.raises(InvalidArgument):
            await access.create_token("t", **wrong)
        assert not access.is_required


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", None, 5])
async def test_a_name_that_is_none_is_refused(tmp_path: Path, name: Any) -> None:
    async with opened(tmp_path) as (_, access):
        with pytest.raises(InvalidArgument):
            await access.create_token(name, role="admin")


async def test_two_tokens_do_not_share_a_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        await an_admin(access)
        with pytest.raises(TokenExists):
            await an_admin(access)


# Limits.


async def test_each_token_has_its_own_calls_a_minute(tmp_path: Path) -> None:
    clock, limit = SetClock(), ADMIN_CALLS
    async with opened(tmp_path, clock) as (_, access):
        first = access.authenticate((await an_admin(access)).text)
        second = access.authenticate((await access.create_token("b", role="admin")).text)

        def calls(count: int) -> Iterator[None]:
            for _ in range(count):
                yield access.require(first, Action.ADMIN, limit=limit)

        list(calls(10))
        with pytest.raises(RateLimited) as refused:
            list(calls(1))
        assert 0 < refused.value.details["retry_after_s"] <= 6.01
        access.require(second, Action.ADMIN, limit=ADMIN_CALLS)
        access.require(first, Action.READ, limit=READ_CALLS)
        clock.time_us += int(refused.value.details["retry_after_s"] * 1e6)
        list(calls(1))
        with pytest.raises(RateLimited):
            list(calls(1))
        limit = CallLimit("admin", 600)
        with pytest.raises(RateLimited):
            list(calls(1))
        clock.time_us += SECOND_US
        list(calls(10))


async def test_what_is_refused_for_its_scope_is_not_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        await an_admin(access)
        made = await access.create_token("viewer", role="read-only")
        viewer = access.authenticate(made.text)
        for _ in range(20):
            with pytest.raises(PermissionDenied):
                access.require(viewer, Action.ADMIN, limit=ADMIN_CALLS)


async def test_whoever_needs_no_token_has_no_limit(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        for _ in range(1000):
            access.require(ANONYMOUS, Action.ADMIN, limit=ADMIN_CALLS)


# The audit log.


async def test_the_audit_log_tells_who_did_what_after_a_restart_too(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, access):
        root = access.authenticate((await an_admin(access)).text)
        await access.audit(root, "create_topic", "orders")
        await access.audit(root, "delete_topic", "orders", "TOPIC_IN_USE")
    async with opened(tmp_path) as (_, access):
        await access.audit(root, "seal", "")
        entries = await access.audit_log(2)
        assert [(entry.who, entry.action, entry.what, entry.outcome) for entry in entries] == [
            ("root", "delete_topic", "orders", "TOPIC_IN_USE"),
            ("root", "seal", "", "done"),
        ]
        assert entries[0].at == "2023-11-14T22:13:20.000Z"
        assert len(await access.audit_log()) == 3
        for wrong in (0, -1, True, 10_001, "5"):
            with pytest.raises(InvalidArgument):
                await access.audit_log(wrong)  # type: ignore[arg-type]


async def test_an_audit_log_that_cannot_be_written_does_not_undo_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened(tmp_path) as (_, access):
        (tmp_path / "data" / "audit.log").mkdir()
        await access.audit(ANONYMOUS, "seal", "")
        with pytest.raises(SparrowError):
            await access.audit_log()
