"""Deliberately broken brokers: a simulator that passes them would prove nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sparrow.broker.groups import GroupRunner
from sparrow.broker.settling import Settling
from sparrow.kernel import facts
from sparrow.kernel.commits import GroupLedger
from sparrow.kernel.dedupe import KeyWindow
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.lease import LeaseTable
from sparrow.kernel.membership import Group
from sparrow.kernel.ownership import Ownership
from sparrow.store import opening
from sparrow.store.journal import Journal
from sparrow.testing.simplan import Plan
from sparrow.testing.simulate import simulate

SEEDS = range(60)
GROUPS = [seed for seed in range(150) if Plan(seed).members]
"""Seeds with members."""


def _is_caught(*words: str, seeds: Iterable[int] = SEEDS) -> bool:
    """Whether some seed complains in one of these words."""
    for seed in seeds:
        complaint = simulate(seed).complaint
        if any(word in complaint for word in words):
            return True
    return False


def test_an_ack_that_is_not_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Settling.submit

    def forgetful(self: Settling, found: Any, apply: Any, abandon: Any) -> asyncio.Future[None]:
        if not all(isinstance(fact, facts.MessagesAcked) for fact in found):
            return submit(self, found, apply, abandon)
        apply(found, apply.__self__.as_of)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    monkeypatch.setattr(Settling, "submit", forgetful)
    assert _is_caught("the confirmed ack", "after its ack was confirmed")


def test_a_recovery_that_drops_the_last_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    scan_journal = opening.scan_journal

    def careless(*arguments: Any) -> Any:
        scan = scan_journal(*arguments)
        if scan.chains:
            scan.chains.pop()
        return scan

    monkeypatch.setattr(opening, "scan_journal", careless)
    assert _is_caught("is lost")


def test_a_lease_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: LeaseTable, now_us: int) -> Iterator[Any]:
        return iter(())

    monkeypatch.setattr(LeaseTable, "expire", never)
    monkeypatch.setattr(LeaseTable, "next_deadline_us", lambda self: 2**63 - 1)
    assert _is_caught("has a lag of")


def test_a_lease_that_ends_before_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    expire = LeaseTable.expire
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now_us: expire(self, now_us + 600_000_000))
    assert _is_caught("held it", "came as attempt")


def test_a_delivery_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Journal._write_and_sync
    monkeypatch.setattr(
        Journal, "_write_and_sync", lambda self, pieces, wants_sync: write(self, pieces, False)
    )
    assert _is_caught("before its publisher could have a receipt")


def test_a_receipt_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.testing.simaudit.is_synced", lambda broker, place: True)
    write = Journal._write_and_sync
    monkeypatch.setattr(
        Journal, "_write_and_sync", lambda self, pieces, wants_sync: write(self, pieces, False)
    )
    assert _is_caught("is lost", "is gone")


def test_a_repeat_that_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyWindow, "find", lambda self, key, now_us: None)
    assert _is_caught("found")


def test_a_dead_letter_whose_source_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Delivery.apply
    monkeypatch.setattr(
        Delivery,
        "apply",
        lambda self, fact: None if isinstance(fact, facts.DeadLettered) else apply(self, fact),
    )
    assert _is_caught("dead letter")


def test_an_order_that_holds_within_each_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delivery, "gate_us", lambda self: None)
    monkeypatch.setattr(Delivery, "set_horizon", lambda self, ends: None)
    assert _is_caught("was handed over before")


# Groups.


def test_a_partition_that_does_not_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Ownership.begin

    def at_once(self: Ownership, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self._drains.clear()

    monkeypatch.setattr(Ownership, "begin", at_once)
    monkeypatch.setattr("sparrow.testing.simaudit.check_owners", lambda broker, model: None)
    assert _is_caught("held messages of its partition", seeds=GROUPS)


def test_a_removed_member_that_keeps_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupRunner, "_release", lambda self, name, **options: None)
    assert _is_caught("is gone, and yet holds", "and yet keeps leases", seeds=GROUPS)


def test_a_partition_that_its_former_owner_may_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    release = GroupRunner._release

    def kept(self: GroupRunner, name: str, *, stream: Any = None, **options: Any) -> None:
        if stream is None:
            release(self, name, **options)

    monkeypatch.setattr(GroupRunner, "_release", kept)
    monkeypatch.setattr(Ownership, "may_settle", lambda self, member_id, stream, generation: True)
    assert _is_caught("owns it", seeds=GROUPS)


def test_a_commit_of_a_partition_that_another_member_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "may_settle", lambda self, member_id, stream, generation: True)
    assert _is_caught("does not own", seeds=GROUPS)


def test_a_silent_member_that_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_dead", lambda self, now_us: [])
    assert _is_caught("is no member any more, and yet", "is not stable after", seeds=GROUPS)


def test_a_member_that_is_not_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_speaker", lambda self, member_id, incarnation: self.member(member_id))
    assert _is_caught("is no member any more, and yet", seeds=GROUPS)


def test_a_generation_that_is_not_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Settling.submit

    def forgetful(self: Settling, found: Any, apply: Any, abandon: Any) -> asyncio.Future[None]:
        if not all(isinstance(fact, facts.GroupAdvanced) for fact in found):
            return submit(self, found, apply, abandon)
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: apply(found, apply.__self__.as_of))
        future: asyncio.Future[None] = loop.create_future()
        future.set_result(None)
        return future

    monkeypatch.setattr(Settling, "submit", forgetful)
    assert _is_caught("is in generation", seeds=GROUPS)


def test_a_commit_that_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = GroupLedger.restore

    def forgetful(self: GroupLedger, raw: bytes) -> None:
        restore(self, raw)
        self._commits.clear()

    monkeypatch.setattr(GroupLedger, "restore", forgetful)
    assert _is_caught("the commit of", seeds=GROUPS)
