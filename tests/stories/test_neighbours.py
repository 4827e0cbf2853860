"""One bad message, or one slow reader, is nobody else's trouble."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import sparrow


@pytest.mark.parametrize("ordering", ["none", "key"])
async def test_poison_message_beside_a_healthy_stream_does_not_hold_it_up(
    tmp_path: Path, ordering: str
) -> None:
    async with sparrow.aopen(tmp_path) as broker:
        # A thousand orders, and one among them that no program can read.
        await broker.create_topic("orders")
        billing = await broker.subscribe(
            "billing",
            "orders",
            ordering=ordering,
            dead_letter_topic="orders-dead",
            retry={"max_attempts": 3, "immediate_retries": 0, "min_backoff_s": 1, "multiplier": 1},
        )
        orders = [b"poison" if n == 100 else b"order %d" % n for n in range(1000)]
        await broker.publish_batch("orders", orders, keys=[f"customer-{n % 50}" for n in range(1000)])

        handled: list[bytes] = []
        finished_at: list[float] = []
        is_over = asyncio.Event()

        def bill(order: sparrow.Delivered) -> None:
            assert order.data is not None
            if order.data == b"poison":
                if order.attempt == 3:
                    is_over.set()
                raise ValueError("what is this?")
            handled.append(order.data)
            finished_at.append(time.monotonic())

        working = asyncio.create_task(billing.run(bill))
        started = time.monotonic()
        await asyncio.wait_for(is_over.wait(), 20)
        poison_took_s = time.monotonic() - started
        await billing.flush()

        # While the bad one waited for its three tries, everything else went through. Under an order per
        # key its own customer's later orders waited, and nobody else's.
        quick = [
            order for order, at in zip(handled, finished_at, strict=True) if at - started < poison_took_s
        ]
        behind = 0 if ordering == "none" else len(range(150, 1000, 50))
        assert len(quick) >= 999 - behind
        for _ in range(100):
            if len(handled) == 999:
                break
            await asyncio.sleep(0.02)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert sorted(handled) == sorted(order for order in orders if order != b"poison")

        # And the bad one lies where somebody will find it.
        [letter] = await billing.dead_letters.list()
        assert (letter.message.data, letter.attempts) == (b"poison", 3)
        assert letter.last_error == "ValueError: what is this?"


async def test_one_slow_subscription_delays_nobody(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path) as broker:
        await broker.create_topic("orders")
        slow = await broker.subscribe("slow", "orders")
        quick = [await broker.subscribe(f"quick-{n}", "orders") for n in range(20)]

        # The slow one takes a message and sits on it, and never asks for the others.
        await broker.publish("orders", b"first")
        [held] = await slow.pull(timeout_s=5)
        for reader in quick:
            await reader.ack(await reader.pull(timeout_s=5))

        # Everybody else has every later order in a moment.
        latencies = []
        for n in range(20):
            waiting = [asyncio.create_task(reader.pull(timeout_s=30)) for reader in quick]
            await asyncio.sleep(0)
            started = time.monotonic()
            await broker.publish("orders", b"%d" % n)
            for reader, got in zip(quick, await asyncio.gather(*waiting), strict=True):
                assert [m.data for m in got] == [b"%d" % n]
                await reader.ack(got)
            latencies.append(time.monotonic() - started)
        assert sorted(latencies)[10] < 0.5

        # The slow one costs its own subscription only: its lag is its own, and it has lost nothing.
        assert await slow.lag() == 21
        assert {await reader.lag() for reader in quick if await reader.flush() is None} == {0}
        await held.ack()
        assert [m.data for m in await slow.pull(100)] == [b"%d" % n for n in range(20)]
