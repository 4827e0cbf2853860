"""The checker finds every kind of broken promise, and is content with a log that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.broker.broker import Broker
from sparrow.model.settings import Settings
from sparrow.testing.checker import CheckFailed, Claims, Log, Partition, check, judge

HERE = Partition("orders", 0)
THERE = Partition("orders", 1)
SENT = [b"m%d" % number for number in range(6)]


def told() -> Claims:
    """Four receipted messages of a producer, and two that are on their way."""
    claims = Claims()
    claims.created("orders")
    for sequence, payload in enumerate(SENT):
        claims.sent("orders", payload, "shop", sequence)
    for offset in range(4):
        claims.receipted("orders", 0, offset, SENT[offset])
    return claims


def log(payloads: list[bytes], start: int = 0) -> Log:
    return Log(start, start + len(payloads), list(range(start, start + len(payloads))), payloads)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_unreceipted_messages_may_be_there_or_not(count: int) -> None:
    assert judge(told(), {HERE: log(SENT[:count])}) == []


@pytest.mark.parametrize(
    ("logs", "complaint"),
    [
        ({HERE: log(SENT[:3])}, "has lost 1 messages from offset 3"),
        ({HERE: log([*SENT[:4], SENT[1]])}, "repeats"),
        ({HERE: log(SENT[:4]), THERE: log([SENT[0]])}, "repeats"),
        ({HERE: log([SENT[0], b"mX", *SENT[2:4]])}, "not what its receipt is for"),
        ({HERE: log([SENT[1], SENT[0], *SENT[2:4]])}, "not what its receipt is for"),
        ({HERE: log([*SENT[:4], b"nobody's"])}, "nobody sent"),
        ({HERE: Log(0, 5, [0, 1, 2, 4], SENT[:4])}, "is not dense"),
        ({HERE: Log(0, 9, [0, 1, 2, 3], SENT[:4])}, "is not dense"),
        ({HERE: log(SENT[2:4], start=2)}, "starts at 2"),
        ({}, "the topic orders is gone"),
        ({HERE: log([*SENT[:2], SENT[3]])}, "misses 1 sequences from 2"),
    ],
)
def test_a_broken_promise_is_found(logs: dict[Partition, Log], complaint: str) -> None:
    assert any(complaint in found for found in judge(told(), logs)), judge(told(), logs)


def test_what_retention_passed_is_not_missed_in_a_topic_that_may_be_shortened() -> None:
    assert judge(told(), {HERE: log(SENT[2:4], start=2)}, shortened={"orders"}) == []


def test_a_message_that_was_seen_once_must_stay() -> None:
    claims = told()
    logs = {HERE: log(SENT[:5])}
    assert judge(claims, logs) == []
    claims.learn(claims.look(logs))
    assert any("has lost" in found for found in judge(claims, {HERE: log(SENT[:4])}))


def test_a_message_that_was_not_there_must_not_turn_up_later_unless_it_is_sent_again() -> None:
    claims = told()
    claims.learn(claims.look({HERE: log(SENT[:4])}))
    assert any("nobody sent" in found for found in judge(claims, {HERE: log(SENT[:5])}))
    claims.sent("orders", SENT[4], "shop", 4)
    assert judge(claims, {HERE: log(SENT[:5])}) == []


def test_a_deleted_topic_may_be_there_until_its_deletion_was_answered_and_not_after() -> None:
    claims = told()
    claims.deleting("orders")
    assert judge(claims, {}) == []
    assert judge(claims, {HERE: log(SENT[:4])}) == []
    claims.deleted("orders")
    assert judge(claims, {HERE: log(SENT[:4])}) != []


async def test_a_real_broker_is_read_and_judged(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        claims = Claims()
        for payload in SENT:
            claims.sent("orders", payload)
        for payload, receipt in zip(SENT, await broker.publish_batch("orders", SENT), strict=True):
            claims.receipted("orders", receipt.partition, receipt.offset, payload)
        await check(broker, claims)
        await broker.seal()
        await check(broker, claims)
        claims.receipted("orders", 0, len(SENT), b"never stored")
        with pytest.raises(CheckFailed, match="has lost 1 messages"):
            await check(broker, claims)
