"""Dead letters that go to another subscription, on every surface."""

from __future__ import annotations

from typing import Any

import pytest

from sparrow import errors


async def buried(broker: Any) -> Any:
    """The dead letters of the subscription "s": one message, "x"."""
    await broker.create_topic("t")
    source = await broker.subscribe("s", "t", dead_letter_topic="dead")
    await broker.publish("t", b"x", key="k", attributes={"a": "1"})
    [message] = await source.pull(timeout_s=10)
    await message.nack(retry=False, reason="broken")
    await source.flush()
    return await broker.dead_letters("s")


async def test_dead_letter_is_replayed_to_another_subscription_and_to_no_other(broker: Any) -> None:
    letters = await buried(broker)
    [letter] = await letters.list()
    target = await broker.subscribe("target", "t")
    bystander = await broker.subscribe("bystander", "t")
    assert (await letters.replay(destination="target", dry_run=True)).total == 1
    job = await letters.replay(destination="target", rate_per_s=1000)
    assert (job.total, job.destination) == (1, "target")
    done = await letters.wait(job.replay_id)
    assert (done.status, done.replayed, done.destination) == ("completed", 1, "target")
    assert [one.destination for one in await letters.replays()] == ["target"]
    [message] = await target.pull(timeout_s=10)
    assert (message.id, message.data, message.key, message.attempt) == (letter.message_id, b"x", "k", 1)
    assert message.attributes == {
        "a": "1",
        "replay_for": "target",
        "replay_from": "s",
        "replay_round": "1",
    }
    await target.ack([message], wait=True)
    assert await target.lag() == 0
    assert await letters.list() == []
    for other in (await broker.subscription("s"), bystander):
        assert await other.pull(timeout_s=0.05) == []


async def test_destination_that_cannot_get_the_letters_is_refused_and_nothing_is_changed(broker: Any) -> None:
    letters = await buried(broker)
    await broker.create_topic("other")
    await broker.subscribe("deaf", "other")
    await broker.subscribe("choosy", "t", filter='attributes.a = "2"')
    for name, error in (
        ("nobody", errors.SubscriptionNotFound),
        ("deaf", errors.PreconditionFailed),
        ("choosy", errors.PreconditionFailed),
    ):
        with pytest.raises(error) as refused:
            await letters.replay(destination=name)
        assert refused.value.hint
    assert len(await letters.list()) == 1
    assert await letters.replays() == []
