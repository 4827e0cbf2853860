"""A thousand seeds of trouble, and every promise kept. A failure prints the command that repeats it."""

from __future__ import annotations

import os

import pytest

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
