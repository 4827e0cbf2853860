"""Dead letters: parked until moved, with everything known about them."""

from __future__ import annotations

import msgspec
from pyroaring import BitMap64

from sparrow.kernel import deadletter
from sparrow.kernel.cursor import Attempt, Failure
from sparrow.kernel.deadletter import IN_HAND_US, ROUNDS_MAX, Parked, Statistics
from sparrow.kernel.exchange import DeadLetterDue
from sparrow.kernel.facts import FailureKind
from sparrow.model.limits import ATTRIBUTE_VALUE_BYTES_MAX, ATTRIBUTES_ADDED_MAX, ATTRIBUTES_MAX
from sparrow.model.message import StreamId

STREAM = StreamId(3, 1)


def due(attempts: int = 2, round: int = 0, reason: str = "no") -> DeadLetterDue:
    history = tuple(Attempt(FailureKind.NACKED, 100 + n, f"c{n % 2}", reason) for n in range(attempts))
    return DeadLetterDue(STREAM, 9, "attempts_exhausted", Failure(attempts, 0, "x", round, history))


def attributes(letter: DeadLetterDue, original: dict[str, str] | None = None) -> dict[str, str]:
    return deadletter.attributes(
        letter,
        original or {},
        source_topic="orders",
        subscription="billing",
        publish_time_us=50,
        now_us=900,
    )


def test_the_copy_says_what_happened_to_the_original() -> None:
    found = attributes(due(), {"env": "prod"})
    assert found["env"] == "prod"
    assert found["dlq_message_id"] == "3-1-9"
    assert (found["dlq_topic"], found["dlq_subscription"]) == ("orders", "billing")
    assert (found["dlq_reason"], found["dlq_attempts"], found["dlq_round"]) == (
        "attempts_exhausted",
        "2",
        "0",
    )
    assert (found["dlq_first_failed_at_us"], found["dlq_last_failed_at_us"]) == ("100", "101")
    assert (found["dlq_last_error"], found["dlq_consumers"]) == ("no", "c0,c1")
    assert [entry["at_us"] for entry in msgspec.json.decode(found["dlq_history"])] == [100, 101]


def test_attributes_stay_within_their_limits() -> None:
    crowded = {f"k{n}": "v" for n in range(ATTRIBUTES_MAX)}
    found = attributes(due(16, reason="é" * 500), crowded)
    assert ATTRIBUTES_MAX < len(found) <= ATTRIBUTES_MAX + ATTRIBUTES_ADDED_MAX
    assert crowded.items() <= found.items()
    assert {"dlq_message_id", "dlq_topic"} <= set(found)
    loose = attributes(due(16, reason="é" * 512))
    assert all(len(value.encode()) <= ATTRIBUTE_VALUE_BYTES_MAX for value in loose.values())


def test_a_dead_letter_of_a_dead_letter_describes_the_later_one() -> None:
    found = attributes(due(), {"dlq_reason": "old", "dlq_loop": "true"})
    assert found["dlq_reason"] == "attempts_exhausted"
    assert "dlq_loop" not in found


def test_a_message_that_fails_after_every_replay_is_marked() -> None:
    assert not deadletter.is_loop(attributes(due(round=ROUNDS_MAX - 1)))
    assert deadletter.is_loop(attributes(due(round=ROUNDS_MAX)))


def test_a_subscription_does_not_feed_itself() -> None:
    assert deadletter.loops("dead", "dead")
    assert not deadletter.loops("dead", "orders")
    assert not deadletter.loops(None, "orders")


def test_what_is_in_hand_is_not_handed_out_again() -> None:
    parked = Parked()
    parked.add(STREAM, [4, 2], "rejected")
    assert parked.take_due(0, 1) == [(STREAM, 2, "rejected")]
    assert parked.take_due(0, 9) == [(STREAM, 4, "rejected")]
    assert parked.take_due(0, 9) == []
    assert parked.next_due_us() == IN_HAND_US


def test_what_could_not_be_moved_is_due_later() -> None:
    parked = Parked()
    parked.add(STREAM, [4], "rejected")
    parked.take_due(0, 9)
    parked.defer(STREAM, 4, 500)
    assert parked.next_due_us() == 500
    assert parked.take_due(499, 9) == []
    assert parked.take_due(500, 9) == [(STREAM, 4, "rejected")]
    parked.discard(STREAM, BitMap64([4]))
    assert parked.count == 0


def test_statistics_count_by_topic_subscription_and_reason() -> None:
    statistics = Statistics()
    for reason in ("rejected", "expired", "rejected"):
        statistics.add(attributes(due()._replace(reason=reason)), 10)
    statistics.add({}, 5)
    assert (statistics.messages, statistics.bytes) == (4, 35)
    assert statistics.by_reason == {"rejected": 2, "expired": 1, "unknown": 1}
    assert statistics.by_topic == {"orders": 3, "unknown": 1}
    assert statistics.oldest_at_us == statistics.newest_at_us == 900
    assert statistics.dominant_reason() == ("rejected", 0.5)
    assert Statistics().dominant_reason() is None
