"""Deliberately broken brokers: a simulator that passes them would prove nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sparrow.broker.settling import Settling
from sparrow.kernel import facts
from sparrow.kernel.dedupe import KeyWindow
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.lease import LeaseTable
from sparrow.store import opening
from sparrow.store.journal import Journal
from sparrow.testing.simulate import simulate

SEEDS = range(60)


def _is_caught(*words: str) -> bool:
    """Whether some seed complains in one of these words."""
    for seed in SEEDS:
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
