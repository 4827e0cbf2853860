"""Delivery, promise by promise; the model test in tests/properties covers their combinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pyroaring import BitMap64

from sparrow.kernel import deadletter, facts
from sparrow.kernel.breaker import SAMPLE_MIN
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival, HandOver, Settled
from sparrow.kernel.lease import NEVER_US
from sparrow.kernel.replay import ReplaySelection
from sparrow.model.errors import (
    DataDamaged,
    InvalidAckId,
    InvalidArgument,
    OffsetOutOfRange,
    PreconditionFailed,
    StaleAckId,
)
from sparrow.model.message import MessageId, StreamId
from sparrow.model.subscription import parse_policy

A, B = StreamId(1, 0), StreamId(2, 0)
SECOND_US = 1_000_000


def delivery(*streams: StreamId, **options: Any) -> Delivery:
    made = Delivery(7, parse_policy({"retry": {"jitter": 0}, **options}), session=5)
    for stream in streams or (A,):
        apply(made, made.attach(stream, 0))
    return made


def apply(subject: Delivery, found: Settled | HandOver | Iterable[facts.Fact]) -> None:
    for fact in found.facts if isinstance(found, Settled | HandOver) else found:
        subject.apply(fact)


def offer(
    subject: Delivery, end: int, now_us: int = 0, *, stream: StreamId = A, start: int = 0, **columns: Any
) -> None:
    arrival = Arrival(stream=stream, first_offset=start, end_offset=end, **columns)
    subject.offer(arrival, now_us)


def offsets(over: HandOver) -> list[int]:
    return [offset for run in over.runs for offset in run.to_offsets()]


def ids(over: HandOver) -> list[str]:
    return [ack_id for run in over.runs for ack_id in run.ack_ids()]


def lease(subject: Delivery, count: int = 100, now_us: int = 0, consumer: str = "ann") -> list[int]:
    return offsets(subject.lease(consumer, count, now_us))


def codes(settled: Settled) -> list[str]:
    return [refusal.error.code for refusal in settled.refused]


# Reading.


def test_nothing_is_read_without_demand() -> None:
    subject = delivery()
    assert subject.wanted(0) == []
    assert subject.wanted(5)[0][:2] == (A, 0)


def test_nothing_more_is_read_while_enough_is_ready() -> None:
    subject = delivery()
    offer(subject, 10)
    assert subject.wanted(10) == []
    assert subject.wanted(11)[0].start_offset == 10


def test_reading_ahead_is_bounded() -> None:
    subject = delivery(read_ahead=10)
    assert subject.wanted(1000)[0].max_messages == 10
    offer(subject, 10)
    assert subject.wanted(1000) == []


def test_a_paused_subscription_neither_reads_nor_delivers() -> None:
    subject = delivery()
    offer(subject, 5)
    subject.is_paused = True
    assert subject.wanted(10) == []
    assert lease(subject) == []


def test_what_the_filter_passes_over_becomes_part_of_the_next_ack() -> None:
    subject = delivery()
    offer(subject, 10, selected=BitMap64([3, 7]))
    over = subject.lease("ann", 9, 0)
    assert offsets(over) == [3, 7]
    settled = subject.ack(ids(over)[:1])
    assert settled.facts[0].offsets == BitMap64(range(7))
    apply(subject, settled)
    assert subject.cursor(A).floor == 7


def test_what_was_passed_over_can_be_made_durable_without_an_ack() -> None:
    subject = delivery()
    offer(subject, 10, selected=BitMap64())
    assert subject.lag({A: 10})[0].messages == 0
    apply(subject, subject.flush_passed())
    assert subject.cursor(A).floor == 10
    assert subject.flush_passed() == []


def test_a_hole_in_the_log_is_passed_over() -> None:
    subject = delivery()
    offer(subject, 20, start=15)
    over = subject.lease("ann", 9, 0)
    assert offsets(over) == list(range(15, 20))
    apply(subject, subject.ack(ids(over)))
    assert subject.cursor(A).floor == 20


def test_a_hole_of_any_size_costs_nothing() -> None:
    subject = delivery()
    offer(subject, 2**32 + 5, start=2**32)
    assert lease(subject) == list(range(2**32, 2**32 + 5))


def test_a_stretch_that_is_offered_twice_counts_once() -> None:
    subject = delivery()
    offer(subject, 10)
    offer(subject, 12)
    assert lease(subject) == list(range(12))


def test_a_stretch_of_an_unknown_stream_is_ignored() -> None:
    subject = delivery()
    offer(subject, 10, stream=B)
    assert lease(subject) == []


def test_needs_names_the_columns_that_matter() -> None:
    assert "keys" not in delivery().needs
    assert "keys" in delivery(ordering="key").needs
    assert {"publishers", "published_at_us"} <= delivery(ordering="publisher").needs
    assert "large" in delivery(poison_rules=True).needs


# Handing over and settling.


def test_a_plain_run_is_one_lease_without_a_set_of_offsets() -> None:
    subject = delivery()
    offer(subject, 5000)
    (run,) = subject.lease("ann", 1000, 0).runs
    assert (run.start_offset, run.end_offset, run.size, run.offsets, run.attempts) == (
        0,
        1000,
        1000,
        None,
        {},
    )
    assert run.deadline_us == 10 * SECOND_US


def test_in_flight_is_bounded() -> None:
    subject = delivery(max_in_flight=3)
    offer(subject, 10)
    assert lease(subject, 10) == [0, 1, 2]
    assert lease(subject, 10) == []
    assert (subject.in_flight, subject.in_flight_of("ann")) == (3, 3)


def test_an_expired_lease_is_redelivered_with_the_next_attempt() -> None:
    subject = delivery()
    offer(subject, 1)
    lease(subject)
    assert subject.next_wakeup_us() == 10 * SECOND_US
    apply(subject, subject.expire(10 * SECOND_US))
    (run,) = subject.lease("bob", 1, 10 * SECOND_US).runs
    assert run.attempts == {0: 2}


def test_messages_that_are_being_settled_do_not_expire() -> None:
    subject = delivery()
    offer(subject, 2)
    over = subject.lease("ann", 2, 0)
    settled = subject.ack(ids(over)[:1])
    expired = subject.expire(60 * SECOND_US)
    assert [list(fact.offsets) for fact in expired] == [[1]]
    apply(subject, settled)
    apply(subject, expired)
    assert lease(subject, now_us=60 * SECOND_US) == [1]


def test_a_nack_with_a_delay_comes_back_after_it() -> None:
    subject = delivery()
    offer(subject, 1)
    over = subject.lease("ann", 1, 0)
    apply(subject, subject.nack(ids(over), 0, delay_s=5))
    assert lease(subject, now_us=5 * SECOND_US - 1) == []
    assert subject.next_wakeup_us() == 5 * SECOND_US
    assert lease(subject, now_us=5 * SECOND_US) == [0]


def test_a_lease_can_be_extended_and_cut_short() -> None:
    subject = delivery()
    offer(subject, 2)
    over = subject.lease("ann", 2, 0)
    assert subject.extend(ids(over)[:1], 60, 0).accepted == 1
    assert subject.extend(ids(over)[1:], 0, 0).accepted == 1
    assert [list(fact.offsets) for fact in subject.expire(0)] == [[1]]
    assert subject.expire(59 * SECOND_US) == []
    assert [list(fact.offsets) for fact in subject.expire(60 * SECOND_US)] == [[0]]


def test_every_refused_id_is_named_with_its_error_and_the_others_are_settled() -> None:
    subject, other = delivery(), Delivery(8, parse_policy({}), session=5)
    apply(other, other.attach(A, 0))
    offer(other, 1)
    offer(subject, 3)
    foreign = ids(other.lease("ann", 1, 0))
    mine = ids(subject.lease("ann", 3, 0))
    settled = subject.ack([mine[0], "garbage", *foreign, mine[0], mine[1]])
    assert settled.accepted == 2
    assert sorted(codes(settled)) == ["INVALID_ACK_ID", "INVALID_ACK_ID", "STALE_ACK_ID"]
    assert settled.refused[0].ack_id == "garbage"


def test_a_double_ack_is_refused() -> None:
    subject = delivery()
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    apply(subject, subject.ack(mine))
    again = subject.ack(mine)
    assert (codes(again), again.facts) == (["STALE_ACK_ID"], [])


def test_an_id_of_another_consumer_is_refused_where_the_consumer_is_known() -> None:
    subject = delivery()
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    assert isinstance(subject.ack(mine, consumer="bob").refused[0].error, InvalidAckId)
    assert subject.ack(mine, consumer="ann").accepted == 1


def test_an_id_from_before_a_restart_is_stale() -> None:
    subject = delivery()
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    again = Delivery(7, subject.policy, session=6)
    again.restore(subject.checkpoint())
    offer(again, 1)
    assert codes(again.ack(mine)) == ["STALE_ACK_ID"]


@pytest.mark.parametrize(("guarantee", "accepted"), [("at_least_once", 1), ("exactly_once", 0)])
def test_a_late_ack_is_honoured_at_least_once_and_refused_exactly_once(guarantee: str, accepted: int) -> None:
    subject = delivery(guarantee=guarantee)
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    apply(subject, subject.expire(10 * SECOND_US))
    assert subject.ack(mine).accepted == accepted


def test_a_late_ack_is_refused_while_another_consumer_holds_the_message() -> None:
    subject = delivery()
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    apply(subject, subject.expire(10 * SECOND_US))
    assert lease(subject, consumer="bob", now_us=10 * SECOND_US) == [0]
    assert codes(subject.ack(mine)) == ["STALE_ACK_ID"]


def test_a_late_ack_does_not_undo_a_seek() -> None:
    subject = delivery()
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    apply(subject, subject.seek({A: 0}))
    offer(subject, 1)
    assert codes(subject.ack(mine)) == ["STALE_ACK_ID"]


def test_at_most_once_is_acked_when_handed_over() -> None:
    subject = delivery(guarantee="at_most_once")
    offer(subject, 2)
    over = subject.lease("ann", 2, 0)
    assert [list(fact.offsets) for fact in over.facts] == [[0, 1]]
    apply(subject, over)
    assert subject.cursor(A).floor == 2
    assert subject.expire(NEVER_US - 1) == []
    assert subject.ack(ids(over)).refused == []
    assert codes(subject.nack(ids(over), 0)) == ["STALE_ACK_ID"] * 2


def test_a_deadline_of_zero_is_due_at_the_next_tick_and_the_first_ack_wins() -> None:
    subject = delivery(ack_deadline_s=0)
    offer(subject, 1)
    first = ids(subject.lease("ann", 1, 0))
    apply(subject, subject.expire(0))
    assert subject.ack(first).accepted == 1


def test_a_commit_ends_leases_and_covers_what_was_not_read() -> None:
    subject = delivery()
    offer(subject, 5)
    mine = ids(subject.lease("ann", 2, 0))
    settled = subject.commit(A, 8, log_end_offset=10)
    assert settled.facts[0].ranges == (0, 8)
    assert codes(subject.ack(mine)) == ["STALE_ACK_ID"] * 2
    apply(subject, settled)
    assert subject.wanted(5)[0].start_offset == 8
    assert subject.commit(A, 3).facts == []


@pytest.mark.parametrize("end", [-1, 11])
def test_a_commit_beyond_the_log_is_refused(end: int) -> None:
    with pytest.raises(OffsetOutOfRange):
        delivery().commit(A, end, log_end_offset=10)


def test_messages_that_were_never_sent_go_back_uncounted() -> None:
    subject = delivery()
    offer(subject, 3)
    over = subject.lease("ann", 9, 0)
    subject.give_back(over.runs[0], BitMap64([1, 2]))
    (run,) = subject.lease("bob", 9, 0).runs
    assert (list(run.to_offsets()), run.attempts) == ([1, 2], {})
    subject.give_back(over.runs[0], BitMap64([1, 2]))
    assert subject.in_flight == 3, "they are another lease's now"


@pytest.mark.parametrize(("is_graceful", "attempts"), [(True, {}), (False, {0: 2})])
def test_what_a_lost_consumer_held_goes_to_others_at_once(
    is_graceful: bool, attempts: dict[int, int]
) -> None:
    subject = delivery()
    offer(subject, 1)
    lease(subject)
    apply(subject, subject.release("ann", 5, is_graceful=is_graceful))
    (run,) = subject.lease("bob", 9, 5).runs
    assert run.attempts == attempts


def test_messages_can_be_settled_by_their_offsets() -> None:
    subject = delivery()
    offer(subject, 4)
    subject.lease("ann", 1, 0)
    subject.lease("bob", 2, 0)
    settled = subject.ack_offsets(A, BitMap64([0, 1, 3]))
    assert (settled.accepted, [r.ack_id for r in settled.refused]) == (2, ["1-0-3"])
    failed = subject.nack_offsets(A, BitMap64([2]), 0)
    assert (failed.accepted, failed.facts[0].consumer) == (1, "bob")


@pytest.mark.parametrize("value", [-1, 601, float("nan"), "5"])
def test_a_wrong_extension_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        delivery().extend([], value, 0)


@pytest.mark.parametrize("value", [-1, 10**9, float("nan"), "5"])
def test_a_wrong_delay_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        delivery().nack([], 0, delay_s=value)


def test_a_reason_that_is_not_proper_unicode_can_be_stored() -> None:
    subject = delivery()
    offer(subject, 1)
    settled = subject.nack(ids(subject.lease("ann", 1, 0)), 0, reason="bad \ud800" + "x" * 9999)
    (fact,) = facts.decode(facts.encode(settled.facts))
    assert isinstance(fact, facts.AttemptsFailed)
    assert fact.reason.startswith("bad ?x")
    assert len(fact.reason) == facts.REASON_LENGTH_MAX


def test_too_many_failures_to_remember_leave_only_retries() -> None:
    subject = delivery(max_retrying=2)
    offer(subject, 10)
    over = subject.lease("ann", 3, 0)
    apply(subject, subject.nack(ids(over), 0))
    assert lease(subject) == [0, 1, 2]


# Wishes of single messages.


def test_a_delayed_message_is_delivered_at_its_moment() -> None:
    subject = delivery()
    offer(subject, 2, deliver_at_us={0: 100})
    assert lease(subject, now_us=99) == [1]
    assert lease(subject, now_us=100) == [0]


def test_a_delayed_message_survives_a_restart_by_being_read_again() -> None:
    subject = delivery()
    offer(subject, 1, deliver_at_us={0: 100})
    again = Delivery(7, subject.policy)
    again.restore(subject.checkpoint())
    offer(again, 1, deliver_at_us={0: 100})
    assert lease(again, now_us=99) == []
    assert lease(again, now_us=100) == [0]


def test_a_delayed_message_does_not_hold_up_its_key() -> None:
    subject = delivery(ordering="key")
    offer(subject, 3, keys="aaa", deliver_at_us={0: 100})
    assert lease(subject, now_us=0) == [1]
    apply(subject, subject.ack_offsets(A, BitMap64([1])))
    assert lease(subject, now_us=100) == [0]


def test_delayed_messages_are_bounded() -> None:
    subject = delivery(max_scheduled=2)
    offer(subject, 2, deliver_at_us={0: 100, 1: 100})
    assert subject.wanted(5) == []


def test_an_expired_message_is_dropped_and_counted() -> None:
    subject = delivery()
    offer(subject, 3, expires_at_us={0: 50, 1: 10})
    assert subject.next_wakeup_us() == 10
    assert lease(subject, now_us=50) == [2]
    (fact,) = subject.expire(50)
    assert isinstance(fact, facts.MessagesExpired)
    assert list(fact.offsets) == [0, 1]
    apply(subject, [fact])
    assert subject.cursor(A).floor == 2


def test_a_message_that_is_old_when_it_is_read_is_never_delivered() -> None:
    subject = delivery()
    offer(subject, 1, now_us=99, expires_at_us={0: 99})
    assert lease(subject, now_us=99) == []
    assert len(subject.expire(99)) == 1


def test_a_leased_message_may_outlive_its_time_but_is_not_tried_again() -> None:
    subject = delivery()
    offer(subject, 2, expires_at_us={0: 50, 1: 50})
    mine = ids(subject.lease("ann", 2, 0))
    assert subject.expire(60) == []
    assert subject.ack(mine[:1]).accepted == 1
    (fact,) = subject.nack(mine[1:], 60).facts
    assert isinstance(fact, facts.MessagesExpired)


def test_an_expired_message_goes_to_the_dead_letters_by_choice() -> None:
    subject = delivery(expired="dead_letter", dead_letter_topic="dead")
    offer(subject, 1, expires_at_us={0: 50})
    assert subject.expire(50) == []
    (due,) = subject.dead_letters_due(50)
    assert (due.offset, due.reason, due.failure.attempts) == (0, "expired", 0)


def test_the_higher_priority_goes_first_also_on_a_retry() -> None:
    subject = delivery()
    offer(subject, 4, priority={1: -5, 2: 9})
    assert [lease(subject, 1) for _ in range(2)] == [[2], [0]]
    apply(subject, subject.nack_offsets(A, BitMap64([2]), 0))
    assert [lease(subject, 1) for _ in range(3)] == [[2], [3], [1]]


def test_a_dependent_message_waits_for_the_acks_of_those_it_names() -> None:
    subject = delivery(A, B)
    offer(subject, 2, depends_on={1: [MessageId(*B, 0), MessageId(*A, 0)]})
    offer(subject, 1, stream=B)
    assert sorted(lease(subject)) == [0, 0]
    apply(subject, subject.ack_offsets(A, BitMap64([0])))
    assert lease(subject) == []
    apply(subject, subject.ack_offsets(B, BitMap64([0])))
    assert lease(subject) == [1]


def test_a_message_waits_for_one_that_has_not_been_read_yet() -> None:
    subject = delivery(A, B)
    offer(subject, 1, depends_on={0: [MessageId(*B, 3)]})
    assert lease(subject) == []
    offer(subject, 4, stream=B, selected=BitMap64([0]))
    assert sorted(lease(subject)) == [0, 0], "a filtered message counts as done"


def test_a_message_does_not_wait_for_what_the_subscription_never_gets() -> None:
    subject = delivery()
    offer(subject, 1, depends_on={0: [MessageId(*B, 3), MessageId(*A, 0)]})
    assert lease(subject) == [0]


def test_a_dead_lettered_dependency_counts_as_done() -> None:
    subject = delivery(dead_letter_topic="dead")
    offer(subject, 2, depends_on={1: [MessageId(*A, 0)]})
    apply(subject, subject.nack(ids(subject.lease("ann", 1, 0)), 0, retry=False))
    bury(subject)
    assert lease(subject) == [1]


# Order.


def test_the_next_of_a_key_waits_for_the_ack_and_for_nobody_else() -> None:
    subject = delivery(ordering="key")
    offer(subject, 4, keys=["a", "a", "b", None])
    assert sorted(lease(subject)) == [0, 2, 3]
    settled = subject.ack_offsets(A, BitMap64([0]))
    assert lease(subject) == [], "not before the ack is durable"
    apply(subject, settled)
    assert lease(subject) == [1]


def test_a_nack_pauses_its_own_key_only() -> None:
    subject = delivery(ordering="key")
    offer(subject, 4, keys="aabb")
    lease(subject)
    apply(subject, subject.nack_offsets(A, BitMap64([0]), 0, delay_s=5))
    apply(subject, subject.ack_offsets(A, BitMap64([2])))
    assert lease(subject) == [3]
    assert lease(subject, now_us=5 * SECOND_US) == [0]


def test_a_dead_letter_holds_up_its_key_until_it_is_moved() -> None:
    subject = delivery(ordering="key", dead_letter_topic="dead")
    offer(subject, 2, keys="aa")
    apply(subject, subject.nack(ids(subject.lease("ann", 1, 0)), 0, retry=False))
    assert lease(subject) == []
    bury(subject)
    assert lease(subject) == [1]


def test_a_window_redelivers_the_later_ones_without_counting_them() -> None:
    subject = delivery(ordering="key", key_window=3)
    offer(subject, 4, keys="aaaa")
    over = subject.lease("ann", 9, 0)
    assert offsets(over) == [0, 1, 2]
    settled = subject.nack(ids(over)[1:2], 0)
    assert codes(subject.nack(ids(over)[2:], 0)) == ["STALE_ACK_ID"]
    apply(subject, settled)
    (run,) = subject.lease("ann", 9, 0).runs
    assert (list(run.to_offsets()), run.attempts) == ([1, 2], {1: 2})


def test_total_order_goes_by_publish_time_over_streams() -> None:
    subject = delivery(A, B, ordering="total")
    offer(subject, 2, published_at_us=[10, 30])
    offer(subject, 2, stream=B, published_at_us=[20, 40])
    order = []
    while over := subject.lease("ann", 9, 0).runs:
        (run,) = over
        order.append((run.stream, run.start_offset))
        apply(subject, subject.ack_offsets(run.stream, BitMap64([run.start_offset])))
    assert order == [(A, 0), (B, 0), (A, 1), (B, 1)]


def test_one_key_in_two_streams_is_two_keys() -> None:
    subject = delivery(A, B, ordering="key")
    offer(subject, 1, keys="a")
    offer(subject, 1, stream=B, keys="a")
    assert lease(subject) == [0, 0]


def test_a_group_member_is_served_from_its_own_streams() -> None:
    for ordering in ("none", "key"):
        subject = delivery(A, B, ordering=ordering)
        offer(subject, 1, keys="a")
        offer(subject, 1, stream=B, keys="a")
        (run,) = subject.lease("ann", 9, 0, streams=[B]).runs
        assert run.stream == B


# Dead letters.


def bury(subject: Delivery, now_us: int = 0) -> list[facts.Fact]:
    found: list[facts.Fact] = [
        deadletter.dead_lettered(7, due, now_us, MessageId(9, 0, n))
        for n, due in enumerate(subject.dead_letters_due(now_us))
    ]
    apply(subject, found)
    return found


def fail_until_dead(subject: Delivery, times: int, now_us: int = 0) -> int:
    for attempt in range(1, times + 1):
        (run,) = subject.lease("ann", 1, now_us).runs
        assert run.attempts.get(0, 1) == attempt
        apply(subject, subject.nack(run.ack_ids(), now_us, reason="no"))
        now_us += 600 * SECOND_US
    return now_us


def test_five_failures_then_dead_letter_then_replay_under_the_same_id() -> None:
    subject = delivery(dead_letter_topic="dead")
    offer(subject, 1)
    now_us = fail_until_dead(subject, 5)
    assert lease(subject, now_us=now_us) == []
    assert len(bury(subject, now_us)) == 1
    assert subject.cursor(A).floor == 1
    apply(subject, subject.take_back(A, BitMap64([0]), now_us, round=1, replay_id="r"))
    wish = subject.wanted(5)[0]
    assert (wish.start_offset, wish.max_messages) == (0, 1)
    offer(subject, 1)
    over = subject.lease("ann", 1, now_us)
    assert (offsets(over), over.runs[0].attempts.get(0, 1)) == ([0], 1)
    apply(subject, subject.ack(ids(over)))
    assert subject.cursor(A).floor == 1


def test_a_crash_between_any_two_steps_of_a_dead_letter_loses_nothing() -> None:
    def restart(subject: Delivery) -> Delivery:
        again = Delivery(7, subject.policy, session=6)
        again.restore(subject.checkpoint())
        offer(again, 1)
        return again

    subject = delivery(dead_letter_topic="dead", retry={"max_attempts": 2, "jitter": 0})
    offer(subject, 1)
    now_us = fail_until_dead(subject, 1)
    subject = restart(subject)
    assert lease(subject, now_us=now_us) == [0]
    subject = restart(subject)
    (run,) = subject.lease("ann", 1, now_us).runs
    assert run.attempts == {0: 2}, "the crash did not count"
    apply(subject, subject.nack(run.ack_ids(), now_us))
    subject = restart(subject)
    assert lease(subject, now_us=now_us) == []
    subject.dead_letters_due(now_us)
    subject = restart(subject)
    assert len(bury(subject, now_us)) == 1
    subject = restart(subject)
    assert subject.cursor(A).floor == 1
    assert subject.dead_letters_due(now_us) == []


def test_a_dead_letter_topic_that_is_full_loses_nothing() -> None:
    subject = delivery(dead_letter_topic="dead")
    offer(subject, 1)
    apply(subject, subject.nack(ids(subject.lease("ann", 1, 0)), 0, retry=False, reason="broken"))
    dues = subject.dead_letters_due(0)
    assert dues[0].reason == "rejected"
    assert subject.dead_letters_due(0) == [], "in the shell's hands"
    subject.defer_dead_letters(dues, 700)
    assert subject.next_wakeup_us() == 700
    assert subject.dead_letters_due(700) == dues
    assert subject.cursor(A).floor == 0


def test_a_rejected_message_needs_a_dead_letter_topic() -> None:
    subject = delivery()
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    with pytest.raises(PreconditionFailed):
        subject.nack(mine, 0, retry=False)
    assert subject.ack(mine).accepted == 1


def test_a_poison_message_does_not_disturb_a_healthy_stream() -> None:
    subject = delivery(dead_letter_topic="dead", poison_rules=True)
    offer(subject, 60)
    for consumer in ("ann", "bob"):
        over = subject.lease(consumer, 21, 0)
        for ack_id, offset in zip(ids(over), offsets(over), strict=True):
            settle = subject.nack([ack_id], 0, reason="bad row") if offset == 0 else subject.ack([ack_id])
            apply(subject, settle)
    (due,) = subject.dead_letters_due(0)
    assert (due.offset, due.reason) == (0, "poison:same_reason")


def test_a_consumer_that_fails_everything_is_paused_and_its_messages_go_on() -> None:
    subject = delivery(dead_letter_topic="dead", poison_rules=True)
    offer(subject, 100)
    over = subject.lease("bad", SAMPLE_MIN, 0)
    apply(subject, subject.nack(ids(over), 0))
    assert lease(subject, consumer="bad") == []
    assert len(lease(subject, 5, consumer="good")) == 5
    assert lease(subject, consumer="bad", now_us=5 * SECOND_US) != []


# The journal, the cursor, rest.


def test_abandoned_acks_are_delivered_again_and_not_counted() -> None:
    subject = delivery()
    offer(subject, 2)
    mine = ids(subject.lease("ann", 2, 0))
    subject.abandon(subject.ack(mine[:1]).facts + subject.nack(mine[1:], 0).facts)
    (run,) = subject.lease("ann", 9, 0).runs
    assert (list(run.to_offsets()), run.attempts) == ([0, 1], {})


def test_abandoned_expiry_is_decided_again() -> None:
    subject = delivery()
    offer(subject, 1, expires_at_us={0: 5})
    subject.abandon(subject.expire(5))
    assert lease(subject, now_us=5) == []
    assert len(subject.expire(5)) == 1


def test_a_seek_forgets_attempts_and_leases() -> None:
    subject = delivery()
    offer(subject, 5)
    over = subject.lease("ann", 5, 0)
    apply(subject, subject.ack(ids(over)[:3]))
    apply(subject, subject.nack(ids(over)[3:4], 0))
    apply(subject, subject.seek({A: 2}))
    assert (subject.in_flight, subject.cursor(A).floor) == (0, 2)
    offer(subject, 5, start=2)
    (run,) = subject.lease("ann", 9, 0).runs
    assert (list(run.to_offsets()), run.attempts) == ([2, 3, 4], {})


def test_a_seek_to_saved_cursors_brings_back_what_was_acked_then() -> None:
    subject = delivery()
    offer(subject, 4)
    over = subject.lease("ann", 4, 0)
    apply(subject, subject.ack(ids(over)[2:3]))
    saved = subject.cursor(A).copy()
    apply(subject, subject.ack(ids(over)[:1]))
    apply(subject, subject.seek({A: saved}))
    offer(subject, 4)
    assert lease(subject) == [0, 1, 3]


@pytest.mark.parametrize("verb", ["seek", "take_back", "commit", "ack_offsets"])
def test_a_stream_that_is_not_read_is_refused(verb: str) -> None:
    subject = delivery()
    arguments: dict[str, Sequence[Any]] = {
        "seek": [{B: 0}],
        "take_back": [B, BitMap64([1]), 0],
        "commit": [B, 1],
        "ack_offsets": [B, BitMap64([1])],
    }
    with pytest.raises(PreconditionFailed):
        getattr(subject, verb)(*arguments[verb])


def test_a_detached_stream_is_forgotten_and_what_waited_for_it_goes_on() -> None:
    subject = delivery(A, B)
    offer(subject, 1, depends_on={0: [MessageId(*B, 0)]})
    offer(subject, 1, stream=B)
    apply(subject, subject.detach(B))
    assert subject.streams == [A]
    assert lease(subject) == [0]
    assert subject.detach(B) == []


def test_attaching_twice_keeps_the_cursor() -> None:
    subject = delivery()
    offer(subject, 1)
    apply(subject, subject.ack(ids(subject.lease("ann", 1, 0))))
    assert subject.attach(A, 0) == []
    subject.apply(facts.StreamAttached(7, *A, 0))
    assert subject.cursor(A).floor == 1


def test_only_what_is_acked_can_be_taken_back() -> None:
    subject = delivery()
    offer(subject, 3)
    apply(subject, subject.commit(A, 2))
    (fact,) = subject.take_back(A, BitMap64([1, 2]), 0)
    assert list(fact.offsets) == [1]
    assert subject.take_back(A, BitMap64([2]), 0) == []


def test_lag_counts_what_is_not_done() -> None:
    subject = delivery()
    offer(subject, 10, selected=BitMap64(range(2, 10)))
    over = subject.lease("ann", 3, 0)
    apply(subject, subject.ack(ids(over)[1:2]))
    (lag,) = subject.lag({A: 100})
    assert (lag.messages, lag.oldest_offset) == (97, 2)
    apply(subject, subject.commit(A, 100, 100))
    assert subject.lag({A: 100})[0] == (A, 0, None)


def test_a_checkpoint_of_another_subscription_is_refused() -> None:
    with pytest.raises(DataDamaged):
        Delivery(8, parse_policy({})).restore(delivery().checkpoint())
    with pytest.raises(DataDamaged):
        Delivery(8, parse_policy({})).restore(b"garbage")


def test_replays_rest_with_the_subscription() -> None:
    subject = delivery()
    apply(subject, subject.replays.start("r", ReplaySelection(), [(B, 0, 5)], 5, 0))
    again = Delivery(7, subject.policy)
    again.restore(subject.checkpoint())
    assert again.replays.jobs == subject.replays.jobs


def test_stale_is_what_a_finished_lease_is() -> None:
    subject = delivery(guarantee="exactly_once")
    offer(subject, 1)
    mine = ids(subject.lease("ann", 1, 0))
    subject.expire(10 * SECOND_US)
    assert isinstance(subject.extend(mine, 5, 0).refused[0].error, StaleAckId)
