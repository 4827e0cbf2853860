"""What is refused: each with a typed error that has a code and a hint, and with nothing changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
async def subscription(broker: Broker) -> BrokerSubscription:
    return await broker.subscribe("s", "t")


@pytest.fixture
async def held(broker: Broker, subscription: BrokerSubscription) -> sparrow.Delivered:
    """A message in the hands of a consumer."""
    await broker.publish("t", b"x")
    [message] = await subscription.pull()
    return message


class refused:
    """The block raises this error, with a code of the registry and a hint; ``tried`` is shown otherwise."""

    def __init__(self, kind: type[errors.SparrowError], tried: object = "") -> None:
        self._kind, self._tried = kind, tried

    def __enter__(self) -> refused:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"{self._tried!r} was not refused"
        assert isinstance(error, self._kind), f"{self._tried!r} was refused by {error!r}"
        assert errors.registry()[error.code] is type(error)
        assert error.message
        assert error.hint
        self.value = error
        return True


# Ack ids.

NO_ACK_IDS = ["", "garbage", "é", "a.b", "." * 50, "A" * 48 + ".0", None, 5, b"bytes", ["nested"], {}]


async def test_garbage_is_no_ack_id(subscription: BrokerSubscription, held: sparrow.Delivered) -> None:
    for ack_id in NO_ACK_IDS:
        for verb in (subscription.ack, subscription.nack, lambda ids: subscription.extend(ids, 30)):
            with refused(errors.InvalidAckId, ack_id):
                await verb([ack_id])
    assert (await subscription.lag(), subscription.in_flight) == (1, 1)


async def test_what_is_neither_messages_nor_ids_is_refused(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    target: Any
    for target in (5, None, 1.5):
        with refused(errors.InvalidAckId, target):
            await subscription.ack(target)
    assert subscription.in_flight == 1


async def test_every_single_change_of_an_ack_id_is_noticed(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    good = held.ack_id
    for place, character in enumerate(good):
        other = "A" if character != "A" else "B"
        if place > 48:
            other = "0" if character != "0" else "1"
        with refused(errors.SparrowError):
            await subscription.ack([good[:place] + other + good[place + 1 :]])
    assert subscription.in_flight == 1
    await subscription.ack([good], wait=True)
    assert await subscription.lag() == 0


async def test_ack_id_of_another_subscription_is_refused(
    broker: Broker, subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    other = await broker.subscribe("other", "t", start="earliest")
    with refused(errors.InvalidAckId):
        await other.ack([held])
    assert (await subscription.lag(), subscription.in_flight, await other.lag()) == (1, 1, 1)


async def test_double_ack_is_refused_and_the_first_stays(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    await held.ack()
    with refused(errors.StaleAckId):
        await held.ack()
    await subscription.flush()
    with refused(errors.StaleAckId):
        await held.ack()
    assert await subscription.lag() == 0


@pytest.mark.parametrize("verb", ["nack", "extend"])
async def test_what_is_acked_can_neither_be_nacked_nor_extended(
    subscription: BrokerSubscription, held: sparrow.Delivered, verb: str
) -> None:
    await subscription.ack([held], wait=True)
    with refused(errors.StaleAckId):
        await (held.nack() if verb == "nack" else held.extend(30))
    assert await subscription.lag() == 0


async def test_what_is_nacked_cannot_be_nacked_or_extended_by_the_same_lease(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    await subscription.nack([held], delay_s=60, wait=True)
    with refused(errors.StaleAckId):
        await held.nack()
    with refused(errors.StaleAckId):
        await held.extend(30)


async def test_good_ids_are_settled_and_the_error_names_the_bad_ones(
    broker: Broker, subscription: BrokerSubscription
) -> None:
    await broker.publish_batch("t", [b"a", b"b"])
    first, second = await subscription.pull()
    with refused(errors.InvalidAckId) as found:
        await subscription.ack([first.ack_id, "garbage", second.ack_id], wait=True)
    assert found.value.details["refused"] == ["garbage"]
    assert await subscription.lag() == 0


async def test_one_id_given_twice_in_one_call_is_settled_once(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    await subscription.ack([held, held.ack_id], wait=True)
    assert await subscription.lag() == 0


async def test_settling_nothing_is_allowed(subscription: BrokerSubscription) -> None:
    await subscription.ack([])
    await subscription.nack([])
    await subscription.extend([], 30)


# Deadlines and waits.


async def test_deadline_out_of_range_is_refused_and_the_lease_stays(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    seconds: Any
    for seconds in (-1, 600.1, 10**9, float("nan"), "30", None, True):
        with refused(errors.InvalidArgument, seconds):
            await held.extend(seconds)
    assert subscription.in_flight == 1


async def test_delay_of_a_nack_out_of_range_is_refused_and_the_lease_stays(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    delay_s: Any
    for delay_s in (-1, 7 * 86_400 + 1, float("nan"), float("inf"), "5", False):
        with refused(errors.InvalidArgument, delay_s):
            await held.nack(delay_s=delay_s)
    assert subscription.in_flight == 1
    await held.ack()


async def test_nack_without_a_retry_needs_a_dead_letter_topic(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    with refused(errors.PreconditionFailed):
        await held.nack(retry=False)
    assert subscription.in_flight == 1


# Pulling.


async def test_bad_number_of_messages_to_pull_is_refused(subscription: BrokerSubscription) -> None:
    max_messages: Any
    for max_messages in (0, -1, 100_001, 1.5, "10", None):
        with refused(errors.InvalidArgument, max_messages):
            await subscription.pull(max_messages)


async def test_bad_timeout_of_a_pull_is_refused(subscription: BrokerSubscription) -> None:
    timeout_s: Any
    for timeout_s in (-0.1, float("nan"), float("inf"), "1", None):
        with refused(errors.InvalidArgument, timeout_s):
            await subscription.pull(1, timeout_s)


async def test_bad_number_of_callbacks_at_once_is_refused(subscription: BrokerSubscription) -> None:
    max_in_flight: Any
    for max_in_flight in (0, -1, 1.5, None):
        with refused(errors.InvalidArgument, max_in_flight):
            await subscription.run(lambda message: None, max_in_flight=max_in_flight)


# Committing.


COMMITS: list[tuple[tuple[Any, Any, Any], type[errors.SparrowError]]] = [
    (("t", 0, 2), errors.OffsetOutOfRange),
    (("t", 0, -1), errors.OffsetOutOfRange),
    (("t", 0, 1.0), errors.InvalidArgument),
    (("t", 0, "1"), errors.InvalidArgument),
    (("t", 0, None), errors.InvalidArgument),
    (("t", 1, 0), errors.InvalidArgument),
    (("nowhere", 0, 0), errors.TopicNotFound),
    (("other", 0, 0), errors.PreconditionFailed),
]


async def test_commit_to_a_place_that_is_not_there_is_refused(
    broker: Broker, subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    await broker.create_topic("other")
    for place, kind in COMMITS:
        with refused(kind, place):
            await subscription.commit(*place)
    assert (await subscription.lag(), subscription.in_flight) == (1, 1)


# Subscribing.


async def test_bad_pattern_is_refused_and_nothing_is_created(broker: Broker) -> None:
    pattern: Any
    for pattern in ("a.#.b", "#.a", "", ".", "a.*b", "a.#b", "a b", "é", "x" * 300, None, 5, "a/*"):
        with refused(errors.InvalidPattern, pattern):
            await broker.subscribe("s", pattern, dead_letter_topic="d")
    assert await broker.subscriptions() == []


async def test_error_of_a_pattern_says_where(broker: Broker) -> None:
    with refused(errors.InvalidPattern) as found:
        await broker.subscribe("s", "orders.#.paid")
    assert "position 7" in found.value.message


async def test_bad_name_of_a_subscription_is_refused_and_nothing_is_created(broker: Broker) -> None:
    name: Any
    for name in ("", "a b", "a/b", "é", "x" * 300, None, 5, "x~dlq"):
        with refused(errors.InvalidName, name):
            await broker.subscribe(name, "t")
    assert await broker.subscriptions() == []


BAD_OPTIONS: list[dict[str, Any]] = [
    {"ack_deadline_s": -1},
    {"ack_deadline_s": 600.5},
    {"ack_deadline_s": "10"},
    {"ack_deadline_s": float("nan")},
    {"ack_deadline_s": 0, "guarantee": "exactly_once"},
    {"ordering": "random"},
    {"guarantee": "always"},
    {"expired": "dead_letter"},
    {"filter": 5},
    {"filter": "x" * 20_000},
    {"key_window": 0, "ordering": "key"},
    {"key_window": 2},
    {"max_in_flight": 0},
    {"read_ahead": 0},
    {"dead_letter_topic": "a b"},
    {"dead_letter_topic": 5},
    {"dead_letter_topic": "t"},
    {"retry": 5},
    {"retry": {"max_attempts": 3}},
    {"retry": {"max_attempts": 0}, "dead_letter_topic": "d"},
    {"retry": {"min_backoff_s": 10, "max_backoff_s": 1}},
    {"retry": {"jitter": 2}},
    {"retry": {"nonsense": 1}},
    {"nonsense": 1},
]


async def test_bad_option_is_refused_and_nothing_is_created(broker: Broker) -> None:
    for options in BAD_OPTIONS:
        with refused(errors.InvalidArgument, options):
            await broker.subscribe("s", "t", **options)
    assert await broker.subscriptions() == []
    assert [topic.name for topic in await broker.topics()] == ["t"]


async def test_bad_option_of_an_update_is_refused_and_nothing_changes(
    subscription: BrokerSubscription, held: sparrow.Delivered
) -> None:
    before = subscription.policy
    for options in BAD_OPTIONS:
        with refused(errors.InvalidArgument, options):
            await subscription.update(**options)
    assert subscription.policy == before
    assert subscription.in_flight == 1, "a refused update ended a lease"


async def test_bad_start_is_refused_and_nothing_is_created(broker: Broker) -> None:
    start: Any
    for start in ("yesterday", None, True, float("nan"), [], b"latest"):
        with refused(errors.InvalidArgument, start):
            await broker.subscribe("s", "t", start=start, dead_letter_topic="d")
    assert await broker.subscriptions() == []
    await broker.subscribe("s", "t", dead_letter_topic="another")


async def test_unknown_subscription_is_refused(broker: Broker) -> None:
    for verb in (broker.subscription, broker.dead_letters):
        with refused(errors.SubscriptionNotFound):
            await verb("nobody")


async def test_what_cannot_change_is_refused(subscription: BrokerSubscription) -> None:
    for change in ("name", "pattern", "start", "id", "is_paused"):
        with refused(errors.InvalidArgument, change) as found:
            await subscription.update(**{change: "x"})
        assert change in found.value.message
        assert "ack_deadline_s" in found.value.hint


# After the end.


async def test_closed_broker_refuses_every_verb_of_a_subscription(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
    verbs = [
        broker.subscribe("another", "t"),
        broker.publish("t", b"x"),
        subscription.pull(),
        subscription.seek("earliest"),
        subscription.update(ack_deadline_s=5),
    ]
    for verb in verbs:
        with refused(errors.SparrowError):
            await verb
