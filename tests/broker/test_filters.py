"""Filters on subscriptions: what they let through, what they cost a lag, what they refuse."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.subscription import BrokerSubscription
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        yield broker


async def names(subscription: BrokerSubscription, timeout_s: float = 0.0) -> list[str]:
    """The keys of everything that is delivered."""
    return [m.key or "" for m in await subscription.pull(100, timeout_s)]


ATTRIBUTES = {
    "prod-eu": {"env": "prod", "region": "eu-west"},
    "prod-us": {"env": "prod", "region": "us-east"},
    "test-eu": {"env": "test", "region": "eu-north"},
    "bare": {},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["prod-eu", "prod-us", "test-eu", "bare"]),
        ('attributes.env = "prod"', ["prod-eu", "prod-us"]),
        ('attributes.env != "prod"', ["test-eu", "bare"]),
        ("attributes:env", ["prod-eu", "prod-us", "test-eu"]),
        ('hasAttribute("env")', ["prod-eu", "prod-us", "test-eu"]),
        ('hasPrefix(attributes.region, "eu-")', ["prod-eu", "test-eu"]),
        ('attributes.region: "eu-"', ["prod-eu", "test-eu"]),
        ('attributes.env = "prod" AND NOT attributes.region: "eu-"', ["prod-us"]),
        ('attributes.env = "test" OR attributes.region: "us-"', ["prod-us", "test-eu"]),
        ("NOT attributes:env", ["bare"]),
        ('key = "bare"', ["bare"]),
    ],
)
async def test_filter_on_attributes_delivers_exactly_what_matches(
    broker: Broker, text: str, expected: list[str]
) -> None:
    subscription = await broker.subscribe("s", "t", filter=text)
    for key, attributes in ATTRIBUTES.items():
        await broker.publish("t", b"x", key=key, attributes=attributes)
    assert await names(subscription, 1) == expected


PAYLOADS = {
    "cheap": json.dumps({"amount": 5, "order": {"country": "de"}}).encode(),
    "dear": json.dumps({"amount": 500, "order": {"country": "fr"}}).encode(),
    "text": json.dumps({"amount": "500"}).encode(),
    "not json": b"\xff\xfe",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data.amount > 100", ["dear"]),
        ("data.amount <= 100", ["cheap"]),
        ('data.amount = "500"', ["text"]),
        ('data.order.country = "de"', ["cheap"]),
        ("data.order = null", ["text"]),
        ('data.amount > 100 OR data.order.country: "d"', ["cheap", "dear"]),
    ],
)
async def test_filter_on_the_content_of_json_delivers_exactly_what_matches(
    broker: Broker, text: str, expected: list[str]
) -> None:
    subscription = await broker.subscribe("s", "t", filter=text)
    for key, data in PAYLOADS.items():
        await broker.publish("t", data, key=key)
    assert await names(subscription, 1) == expected


async def test_content_and_attributes_filter_together(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod" AND data.amount > 100')
    await broker.publish("t", b'{"amount": 500}', key="both", attributes={"env": "prod"})
    await broker.publish("t", b'{"amount": 500}', key="content", attributes={"env": "test"})
    await broker.publish("t", b'{"amount": 5}', key="attribute", attributes={"env": "prod"})
    assert await names(subscription, 1) == ["both"]


async def test_filter_holds_for_topics_that_come_later(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "orders.#", filter='attributes.env = "prod"')
    await broker.publish("orders.us", b"x", key="in", attributes={"env": "prod"})
    await broker.publish("orders.us", b"x", key="out", attributes={"env": "test"})
    assert await names(subscription, 1) == ["in"]


async def test_filter_holds_over_a_restart(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        await broker.subscribe("s", "t", filter='attributes.env = "prod"')
        await broker.publish("t", b"x", key="out", attributes={"env": "test"})
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.publish("t", b"x", key="in", attributes={"env": "prod"})
        assert await names(await broker.subscription("s"), 1) == ["in"]


async def test_filter_holds_on_the_sealed_log(broker: Broker) -> None:
    for n in range(6):
        await broker.publish("t", b"x", key=str(n), attributes={"env": "prod" if n % 2 else "test"})
    await broker.seal()
    subscription = await broker.subscribe("s", "t", start="earliest", filter='attributes.env = "prod"')
    assert await names(subscription, 1) == ["1", "3", "5"]


async def test_many_subscriptions_with_their_own_filters_each_get_their_own(broker: Broker) -> None:
    many = [await broker.subscribe(f"s{n}", "t", filter=f'attributes.n = "{n}"') for n in range(30)]
    await broker.publish_batch(
        "t", [b"x"] * 60, keys=[str(n) for n in range(60)], attributes=[{"n": str(n % 30)} for n in range(60)]
    )
    assert [await names(s) for s in many] == [[str(n), str(n + 30)] for n in range(30)]


async def test_subscriptions_with_equal_filters_each_get_a_copy(broker: Broker) -> None:
    twins = [await broker.subscribe(name, "t", filter='attributes.env = "prod"') for name in ("a", "b")]
    await broker.publish("t", b"x", key="k", attributes={"env": "prod"})
    assert [await names(twin) for twin in twins] == [["k"], ["k"]]
    await twins[0].unsubscribe()
    await broker.publish("t", b"x", key="later", attributes={"env": "prod"})
    assert await names(twins[1]) == ["later"]


async def test_messages_that_a_filter_leaves_out_are_no_lag_once_they_were_read(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    for _ in range(5):
        await broker.publish("t", b"x", attributes={"env": "test"})
    assert await subscription.pull() == []
    assert await subscription.lag() == 0


async def test_long_poll_is_not_ended_by_a_message_that_the_filter_leaves_out(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    await broker.publish("t", b"x", attributes={"env": "test"})
    assert await subscription.pull(timeout_s=0.05) == []


async def test_everything_may_be_filtered_out_of_a_long_log_and_the_next_match_is_found(
    broker: Broker,
) -> None:
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"', read_ahead=10)
    for _ in range(5):
        await broker.publish_batch("t", [b"x"] * 200, attributes=[{"env": "test"}] * 200)
    await broker.publish("t", b"x", key="needle", attributes={"env": "prod"})
    assert await names(subscription, 5) == ["needle"]


async def test_a_filter_on_the_payload_selects_json_and_passes_over_everything_else(broker: Broker) -> None:
    text = 'data.amount > 100 AND data.country IN ("DE", "FR")'
    alike = 'data.country IN ("FR","DE") AND data.amount>100'
    subscriptions = [
        await broker.subscribe("one", "t", filter=text),
        await broker.subscribe("two", "t", filter=alike),
        await broker.subscribe("other", "t", filter='data.customer.tier NOT IN ("gold")'),
    ]
    sent: dict[str, bytes] = {
        "match": b'{"amount": 101, "country": "DE", "customer": {"tier": "gold"}}',
        "cheap": b'{"amount": 100, "country": "DE"}',
        "far": b'{"amount": 500, "country": "US", "customer": {"tier": "silver"}}',
        "text-amount": b'{"amount": "500", "country": "DE", "customer": {"tier": "gold"}}',
        "no-object": b"[101]",
        "no-json": b"amount 101",
        "empty": b"",
        "not-utf8": b'{"amount": 101, "country": "DE", "note": "\xff"}',
        "match-too": b'{"country": "FR", "amount": 100.5}',
    }
    await broker.publish_batch("t", list(sent.values()), keys=list(sent))
    found = [await names(subscription, 5) for subscription in subscriptions]
    assert found[0] == found[1] == ["match", "match-too"]
    assert found[2] == ["cheap", "far", "no-object", "match-too"]


# Bad filters.


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("attributes.env =", 16),
        ('attributes.env = "prod', 22),
        ('attributes.env ~ "prod"', 15),
        ('attributes.env = "prod" AND', 27),
        ('(attributes.env = "prod"', 24),
        ("nonsense", 0),
        ("data.amount > ", 14),
    ],
)
async def test_bad_filter_is_refused_with_the_position_and_nothing_is_created(
    broker: Broker, text: str, position: int
) -> None:
    with pytest.raises(errors.InvalidFilter) as refused:
        await broker.subscribe("s", "t", filter=text, dead_letter_topic="d")
    assert (refused.value.code, refused.value.status) == ("INVALID_FILTER", 400)
    assert refused.value.details["position"] == position
    assert refused.value.hint
    assert await broker.subscriptions() == []
    # Nothing is left behind that would stand in the way of the right one.
    await broker.subscribe("s", "t", dead_letter_topic="other")


async def test_bad_filter_in_an_update_is_refused_and_the_old_one_stays(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", filter='attributes.env = "prod"')
    with pytest.raises(errors.InvalidFilter):
        await subscription.update(filter="attributes.env =", dead_letter_topic="d")
    assert subscription.policy.filter == 'attributes.env = "prod"'
    assert subscription.policy.dead_letter_topic is None
    with pytest.raises(errors.PreconditionFailed):
        await subscription.dead_letters.list()
