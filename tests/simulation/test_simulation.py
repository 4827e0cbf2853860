"""A thousand seeds of trouble, and every promise kept. A failure prints the command that repeats it."""

from __future__ import annotations

import os

import pytest

from sparrow.testing import simmodel
from sparrow.testing.simulate import simulate, simulate_many

SEEDS = int(os.environ.get("SPARROW_SIM_SEEDS", "1000"))
PROCESSES = int(os.environ.get("SPARROW_SIM_PROCESSES", str(min(2, os.cpu_count() or 1))))


def _check(seeds: range) -> None:
    failed = [outcome for outcome in simulate_many(seeds, PROCESSES) if outcome.complaint]
    listed = "\n".join(f"{outcome.complaint}\n  {outcome.command}" for outcome in failed[:10])
    assert not failed, f"{len(failed)} of {len(seeds)} seeds failed:\n{listed}"


def test_every_promise_holds_for_every_seed() -> None:
    _check(range(SEEDS))


@pytest.mark.soak
def test_every_promise_holds_for_a_hundred_thousand_seeds() -> None:
    _check(range(1_000_000, 1_000_000 + int(os.environ.get("SPARROW_SIM_SOAK_SEEDS", "100000"))))


def test_a_seed_gives_the_same_run_again() -> None:
    first, again = simulate(7, is_traced=True), simulate(7, is_traced=True)
    assert first.trace
    assert first == again


@pytest.mark.xfail(
    strict=True,
    reason="one stream is read on while another one waits unread, so the order of a publisher and the "
    "total order hold within each stream only (Courier._feed, Delivery.wanted)",
)
def test_the_order_of_a_publisher_and_the_total_order_hold_across_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simmodel, "ORDERS_ACROSS_STREAMS", True)
    for seed in range(40):
        assert "was handed over before" not in simulate(seed).complaint
