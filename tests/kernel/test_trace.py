"""Where a message is: each state, reached the way it is reached in life."""

from __future__ import annotations

from typing import Any

from pyroaring import BitMap64

from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival
from sparrow.kernel.trace import MessageState, Trace
from sparrow.model.message import MessageId, StreamId
from sparrow.model.subscription import parse_policy

A = StreamId(1, 0)
END = 4


def subject(**options: Any) -> Delivery:
    made = Delivery(7, parse_policy({"dead_letter_topic": "dead", **options}), session=5)
    for fact in made.attach(A, 0):
        made.apply(fact)
    return made


def read(made: Delivery, **columns: Any) -> Delivery:
    made.offer(Arrival(stream=A, first_offset=0, end_offset=END, **columns), 0)
    return made


def trace(made: Delivery, offset: int = 0, **options: Any) -> Trace:
    return made.trace(MessageId(*A, offset), END, **options)


def test_a_message_of_another_topic_is_not_subscribed() -> None:
    found = subject().trace(MessageId(9, 0, 0), 5)
    assert (found.state, found.subscription_id) == (MessageState.NOT_SUBSCRIBED, 7)


def test_a_message_that_is_not_stored_is_beyond_the_end() -> None:
    assert trace(subject(), END).state is MessageState.BEYOND_END


def test_a_message_that_was_not_read_is_not_reached() -> None:
    assert trace(subject()).state is MessageState.NOT_REACHED


def test_a_message_that_was_read_is_ready() -> None:
    assert trace(read(subject())).state is MessageState.READY


def test_a_message_that_the_filter_left_out_is_filtered_before_and_after_it_is_durable() -> None:
    made = read(subject(), selected=BitMap64([1]))
    assert trace(made).state is MessageState.FILTERED
    for fact in made.flush_passed():
        made.apply(fact)
    assert trace(made, is_selected=False).state is MessageState.FILTERED


def test_a_leased_message_says_to_whom_and_until_when() -> None:
    made = read(subject())
    made.lease("ann", 1, 0)
    found = trace(made)
    assert (found.state, found.consumer, found.deadline_us) == (MessageState.LEASED, "ann", 10_000_000)


def test_an_ack_on_its_way_is_settling_and_then_acked() -> None:
    made = read(subject())
    made.lease("ann", 1, 0)
    settled = made.ack_offsets(A, BitMap64([0]))
    assert trace(made).state is MessageState.SETTLING
    made.apply(settled.facts[0])
    assert trace(made).state is MessageState.ACKED


def test_a_failed_message_is_scheduled_with_its_history() -> None:
    made = read(subject())
    made.lease("ann", 1, 0)
    made.apply(made.nack_offsets(A, BitMap64([0]), 0, delay_s=5, reason="no").facts[0])
    found = trace(made)
    assert (found.state, found.due_at_us, found.attempts) == (MessageState.SCHEDULED, 5_000_000, 1)
    assert [entry.reason for entry in found.history] == ["no"]


def test_a_delayed_message_is_scheduled() -> None:
    found = trace(read(subject(), deliver_at_us={0: 99}))
    assert (found.state, found.due_at_us) == (MessageState.SCHEDULED, 99)


def test_a_dependent_message_names_what_it_waits_for() -> None:
    found = trace(read(subject(), depends_on={0: [MessageId(*A, 3)]}))
    assert (found.state, found.waits_for) == (MessageState.DEPENDENT, (MessageId(*A, 3),))


def test_a_message_behind_another_of_its_key_is_blocked() -> None:
    made = read(subject(ordering="key"), keys="aabb")
    assert trace(made, 1).state is MessageState.BLOCKED
    assert trace(made, 2).state is MessageState.READY


def test_a_dead_message_waits_for_its_move() -> None:
    made = read(subject())
    made.lease("ann", 1, 0)
    made.apply(made.nack_offsets(A, BitMap64([0]), 0, retry=False).facts[0])
    found = trace(made)
    assert (found.state, found.reason) == (MessageState.DEAD_LETTER_DUE, "rejected")


def test_an_expired_message_waits_for_its_end() -> None:
    made = read(subject(), expires_at_us={0: 5})
    made.lease("ann", 1, 5)
    assert trace(made).state is MessageState.EXPIRED


def test_a_message_whose_ack_was_taken_back_is_to_be_read_again() -> None:
    made = read(subject())
    made.apply(made.commit(A, 2).facts[0])
    made.apply(made.take_back(A, BitMap64([0]), 0, round=1)[0])
    found = trace(made)
    assert (found.state, found.round) == (MessageState.NOT_REACHED, 1)
