"""A bug was deployed yesterday. The orders since then are billed again, and then work goes on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import sparrow
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock

DAY_S = 86_400


class Calendar(Clock):
    """The machine's clock, on the day that the story has reached."""

    def __init__(self) -> None:
        self.day = -2

    def now_us(self) -> int:
        return super().now_us() + self.day * DAY_S * 1_000_000


async def test_seek_to_yesterday_and_back(tmp_path: Path) -> None:
    calendar = Calendar()
    async with await Broker.open(sparrow.Settings(data=str(tmp_path)), clock=calendar) as broker:
        await broker.create_topic("orders")
        billing = await broker.subscribe("billing", "orders")
        audit = await broker.subscribe("audit", "orders")

        async def work(subscription: object = billing) -> list[str]:
            found = []
            while messages := await subscription.pull(100):  # type: ignore[attr-defined]
                found += [(m.data or b"").decode() for m in messages]
                await subscription.ack(messages, wait=True)  # type: ignore[attr-defined]
            return found

        # Three days of orders, each day's sealed away at night.
        days = {-2: "the day before", -1: "yesterday", 0: "today"}
        for day, name in days.items():
            calendar.day = day
            await broker.publish_batch("orders", [f"{name} {n}".encode() for n in range(3)])
            assert len(await work()) == 3
            await broker.seal()
        await work(audit)

        # Somebody remembers where billing stands, and goes back to yesterday.
        await billing.snapshot("before-the-repair")
        yesterday = datetime.now(UTC) - timedelta(days=1, hours=1)
        await billing.seek(yesterday)
        assert await billing.lag() == 6
        again = await work()
        assert again == [f"yesterday {n}" for n in range(3)] + [f"today {n}" for n in range(3)]

        # The auditors saw nothing of it.
        assert await audit.pull() == []

        # Once more, and now it is called off half way: back to where it stood.
        await billing.seek("earliest")
        [first, *_] = await billing.pull(2)
        assert first.data == b"the day before 0"
        await billing.seek("before-the-repair")
        assert await billing.lag() == 0

        # Work goes on with the next order, once.
        await broker.publish("orders", b"a new one")
        assert await work() == ["a new one"]
        assert await work(audit) == ["a new one"]
