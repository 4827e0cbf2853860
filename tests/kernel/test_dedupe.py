"""Producer ledgers and key windows, against naive models of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparrow.kernel import dedupe
from sparrow.kernel.dedupe import KeyWindow, ProducerLedger, Request, Stored
from sparrow.model.errors import DedupeWindowFull, ProducerFenced, SequenceGap, SequenceTooOld


def whole(base: int, count: int, partition: int = 0, offset: int | None = None, time_us: int = 5) -> Request:
    """A request that went to one partition; its offsets follow its sequences unless said."""
    at = base if offset is None else offset
    return dedupe.request([dedupe.part(partition, at, time_us, range(base, base + count))])


def ledger_with(*requests: Request, requests_max: int = 8, epoch: int = 0) -> ProducerLedger:
    ledger = ProducerLedger(requests_max)
    for request in requests:
        ledger.apply(epoch, request)
    return ledger


# Requests and their parts.


def test_consecutive_sequences_are_kept_as_a_range() -> None:
    made = dedupe.part(1, 40, 9, [7, 8, 9])
    assert made.scattered is None
    assert list(made.sequences) == [7, 8, 9]


def test_scattered_sequences_are_kept_one_by_one() -> None:
    made = dedupe.part(1, 40, 9, [7, 9, 12])
    assert made.scattered == (7, 9, 12)
    assert list(made.sequences) == [7, 9, 12]


def test_a_request_over_partitions_tells_where_each_message_went_in_order_of_sequences() -> None:
    parts = [dedupe.part(0, 100, 5, [10, 12, 13]), dedupe.part(3, 7, 5, [11, 14])]
    request = dedupe.request(parts)
    assert (request.base_sequence, request.count) == (10, 5)
    assert request.stored() == [
        Stored(0, 100, 5),
        Stored(3, 7, 5),
        Stored(0, 101, 5),
        Stored(0, 102, 5),
        Stored(3, 8, 5),
    ]


@given(st.data())
def test_however_a_request_is_cut_every_message_is_found_again(data: Any) -> None:
    count = data.draw(st.integers(1, 30))
    base = data.draw(st.integers(0, 1000))
    homes = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    by_partition: dict[int, list[int]] = {}
    for index, partition in enumerate(homes):
        by_partition.setdefault(partition, []).append(base + index)
    parts = [dedupe.part(p, 1000 * p, 9, sequences) for p, sequences in by_partition.items()]
    expected = [Stored(p, 1000 * p + by_partition[p].index(base + i), 9) for i, p in enumerate(homes)]
    assert dedupe.request(parts).stored() == expected


# The ledger.


@pytest.mark.parametrize("first", [0, 1, 4711])
def test_a_first_request_may_start_anywhere(first: int) -> None:
    ledger = ProducerLedger(8)
    assert ledger.expected is None
    assert ledger.find(0, first, 3) is None


def test_the_next_sequence_is_new() -> None:
    ledger = ledger_with(whole(0, 5))
    assert ledger.expected == 5
    assert ledger.find(0, 5, 1) is None


def test_a_repeat_finds_the_stored_request() -> None:
    first, second = whole(0, 5), whole(5, 2)
    ledger = ledger_with(first, second)
    assert ledger.find(0, 0, 5) == first
    assert ledger.find(0, 5, 2) == second


def test_a_gap_is_refused_and_names_the_expected_sequence() -> None:
    ledger = ledger_with(whole(0, 5))
    with pytest.raises(SequenceGap) as caught:
        ledger.find(0, 6, 1)
    assert caught.value.details == {"expected": 5}


@pytest.mark.parametrize(("base", "count"), [(0, 4), (0, 6), (1, 4), (4, 1)])
def test_a_request_that_overlaps_but_does_not_repeat_is_refused(base: int, count: int) -> None:
    ledger = ledger_with(whole(0, 5))
    with pytest.raises(SequenceTooOld) as caught:
        ledger.find(0, base, count)
    assert caught.value.details == {"expected": 5}


def test_only_the_last_requests_are_remembered_and_older_ones_are_refused() -> None:
    ledger = ledger_with(*(whole(n, 1) for n in range(5)), requests_max=3)
    assert [ledger.find(0, n, 1) is not None for n in (2, 3, 4)] == [True, True, True]
    with pytest.raises(SequenceTooOld):
        ledger.find(0, 1, 1)


def test_an_earlier_epoch_is_fenced_whatever_it_sends() -> None:
    ledger = ledger_with(whole(0, 5), epoch=3)
    for base in (0, 5, 9):
        with pytest.raises(ProducerFenced):
            ledger.find(2, base, 5)
    assert ledger.find(4, 5, 1) is None


def test_a_later_epoch_goes_on_with_the_same_sequences_and_knows_the_repeats() -> None:
    first = whole(0, 5)
    ledger = ledger_with(first, epoch=1)
    assert ledger.find(2, 0, 5) == first
    with pytest.raises(SequenceGap):
        ledger.find(2, 6, 1)


def test_an_epoch_never_goes_back() -> None:
    ledger = ledger_with(whole(0, 1), epoch=3)
    ledger.apply(2, whole(1, 1))
    with pytest.raises(ProducerFenced):
        ledger.find(2, 2, 1)


def test_a_request_is_on_its_way_between_reserve_and_apply() -> None:
    ledger = ledger_with(whole(0, 5))
    assert not ledger.is_on_its_way(5)
    ledger.reserve(5, 2)
    assert ledger.expected == 7
    assert ledger.is_on_its_way(5)
    assert not ledger.is_on_its_way(4)
    assert not ledger.is_on_its_way(7)
    ledger.apply(0, whole(5, 2))
    assert not ledger.is_on_its_way(5)


def test_a_first_request_is_on_its_way_too() -> None:
    ledger = ProducerLedger(8)
    ledger.reserve(3, 2)
    assert ledger.is_on_its_way(3)
    ledger.apply(0, whole(3, 2))
    assert not ledger.is_on_its_way(3)
    assert ledger.expected == 5


def test_requests_follow_each_other_while_earlier_ones_are_on_their_way() -> None:
    ledger = ledger_with(whole(0, 1))
    ledger.reserve(1, 1)
    assert ledger.find(0, 2, 1) is None
    ledger.reserve(2, 1)
    ledger.apply(0, whole(1, 1))
    assert ledger.expected == 3
    assert ledger.is_on_its_way(2)
    assert not ledger.is_on_its_way(1)


def test_abandoning_takes_back_everything_on_its_way() -> None:
    ledger = ledger_with(whole(0, 5))
    ledger.reserve(5, 2)
    ledger.reserve(7, 2)
    ledger.abandon()
    assert ledger.expected == 5
    assert not ledger.is_on_its_way(5)
    assert ledger.find(0, 5, 2) is None
    with pytest.raises(SequenceGap):
        ledger.find(0, 7, 2)


def test_abandoning_a_first_request_lets_the_next_start_anywhere_again() -> None:
    ledger = ProducerLedger(8)
    ledger.reserve(10, 1)
    ledger.abandon()
    assert ledger.expected is None
    assert ledger.find(0, 3, 1) is None


def test_a_ledger_survives_the_way_through_bytes() -> None:
    scattered = dedupe.request([dedupe.part(0, 9, 7, [5, 7]), dedupe.part(1, 4, 7, [6])])
    ledger = ledger_with(whole(0, 5), scattered, epoch=6)
    again = ProducerLedger.from_bytes(ledger.to_bytes(), 8)
    assert again.to_bytes() == ledger.to_bytes()
    assert again.expected == 8
    assert again.find(6, 5, 3) == scattered
    assert again.find(6, 0, 5) == whole(0, 5)
    with pytest.raises(ProducerFenced):
        again.find(5, 8, 1)


def test_a_ledger_that_is_saved_forgets_what_was_only_on_its_way() -> None:
    ledger = ledger_with(whole(0, 5))
    ledger.reserve(5, 2)
    again = ProducerLedger.from_bytes(ledger.to_bytes(), 8)
    assert again.expected == 5
    assert not again.is_on_its_way(5)


def test_an_untouched_ledger_survives_the_way_through_bytes() -> None:
    again = ProducerLedger.from_bytes(ProducerLedger(8).to_bytes(), 8)
    assert again.expected is None


def test_a_smaller_memory_keeps_the_newest_of_what_was_saved() -> None:
    ledger = ledger_with(*(whole(n, 1) for n in range(5)))
    again = ProducerLedger.from_bytes(ledger.to_bytes(), 2)
    assert again.find(0, 4, 1) == whole(4, 1)
    with pytest.raises(SequenceTooOld):
        again.find(0, 2, 1)


class LedgerAgainstModel(RuleBasedStateMachine):
    """The model keeps every stored request for ever and looks at all of them."""

    MEMORY = 4

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ProducerLedger(self.MEMORY)
        self.stored: list[Request] = []
        self.flying: list[Request] = []
        self.epoch = 0
        self.offset = 0

    def expected(self) -> int | None:
        known = self.flying or self.stored
        return known[-1].base_sequence + known[-1].count if known else None

    def verdict(self, epoch: int, base: int, count: int) -> Any:
        expected = self.expected()
        if epoch < self.epoch:
            return ProducerFenced
        if expected is None or base == expected:
            return None
        if base > expected:
            return SequenceGap
        for request in self.stored[-self.MEMORY :]:
            if (request.base_sequence, request.count) == (base, count):
                return request
        return SequenceTooOld

    @rule(base=st.integers(0, 30), count=st.integers(1, 4), lag=st.integers(-1, 1))
    def anything_is_judged_as_the_model_judges(self, base: int, count: int, lag: int) -> None:
        epoch = max(0, self.epoch - lag)
        wanted = self.verdict(epoch, base, count)
        if isinstance(wanted, type):
            with pytest.raises(wanted):
                self.ledger.find(epoch, base, count)
        else:
            assert self.ledger.find(epoch, base, count) == wanted

    @rule(start=st.integers(0, 5), count=st.integers(1, 4))
    def a_new_request_leaves(self, start: int, count: int) -> None:
        expected = self.expected()
        base = start if expected is None else expected
        self.ledger.reserve(base, count)
        self.flying.append(whole(base, count, offset=self.offset))
        self.offset += count

    @precondition(lambda self: self.flying)
    @rule(rises=st.booleans())
    def the_oldest_arrives(self, rises: bool) -> None:
        self.epoch += rises
        request = self.flying.pop(0)
        self.ledger.apply(self.epoch, request)
        self.stored.append(request)

    @rule()
    def all_on_their_way_fail(self) -> None:
        self.ledger.abandon()
        self.flying.clear()

    @rule()
    def it_is_saved_and_loaded(self) -> None:
        self.ledger = ProducerLedger.from_bytes(self.ledger.to_bytes(), self.MEMORY)
        self.flying.clear()

    @invariant()
    def they_expect_the_same(self) -> None:
        assert self.ledger.expected == self.expected()
        flying = {s for r in self.flying for s in range(r.base_sequence, r.base_sequence + r.count)}
        for sequence in range(40):
            if self.stored or self.flying:
                first_new = self.stored[-1].base_sequence + self.stored[-1].count if self.stored else None
                if first_new is not None:
                    assert self.ledger.is_on_its_way(sequence) == (sequence in flying)


TestLedgerAgainstModel = LedgerAgainstModel.TestCase


# The key window.

SECOND = 1_000_000


def test_a_key_is_known_from_its_message_until_its_window_has_passed() -> None:
    window = KeyWindow(10 * SECOND, 100)
    place = Stored(1, 7, 5 * SECOND)
    assert window.find("k", 5 * SECOND) is None
    window.apply("k", place)
    assert window.find("k", 5 * SECOND) == place
    assert window.find("k", 15 * SECOND - 1) == place
    assert window.find("k", 15 * SECOND) is None


def test_a_window_of_nothing_knows_no_key() -> None:
    window = KeyWindow(0, 100)
    window.apply("k", Stored(0, 0, 5))
    assert window.find("k", 5) is None


def test_expiring_forgets_in_the_order_of_storing_and_only_what_has_passed() -> None:
    window = KeyWindow(10, 100)
    for time_us, key in enumerate("abc"):
        window.apply(key, Stored(0, time_us, time_us))
    window.expire(11)
    assert len(window) == 1
    assert window.find("c", 11) == Stored(0, 2, 2)
    window.expire(12)
    assert len(window) == 0


def test_a_full_window_refuses_new_keys_and_forgets_none() -> None:
    window = KeyWindow(10, 3)
    for number in range(3):
        window.admit(1, 0)
        window.apply(f"k{number}", Stored(0, number, 0))
    with pytest.raises(DedupeWindowFull, match="holds 3 keys; 3 are allowed"):
        window.admit(1, 9)
    assert all(window.find(f"k{number}", 9) for number in range(3))


def test_a_full_window_takes_new_keys_once_old_ones_have_passed() -> None:
    window = KeyWindow(10, 2)
    window.apply("a", Stored(0, 0, 0))
    window.apply("b", Stored(0, 1, 5))
    window.admit(1, 10)
    with pytest.raises(DedupeWindowFull):
        window.admit(2, 10)
    window.admit(2, 15)


def test_more_keys_at_once_than_fit_are_refused_together() -> None:
    window = KeyWindow(10, 3)
    with pytest.raises(DedupeWindowFull):
        window.admit(4, 0)
    window.admit(3, 0)
    window.admit(0, 0)


def test_a_key_that_comes_again_after_its_window_counts_from_its_new_message() -> None:
    window = KeyWindow(10, 2)
    window.apply("a", Stored(0, 0, 0))
    window.apply("b", Stored(0, 1, 5))
    window.apply("a", Stored(0, 2, 12))
    window.expire(16)
    assert len(window) == 1
    assert window.find("a", 21) == Stored(0, 2, 12)


def test_a_changed_window_counts_at_once() -> None:
    window = KeyWindow(10, 2)
    window.apply("a", Stored(0, 0, 0))
    window.resize(100)
    assert window.find("a", 50) is not None
    window.resize(5)
    assert window.find("a", 6) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 4)),
        max_size=60,
    ),
    st.integers(0, 8),
    st.integers(1, 4),
)
def test_a_window_behaves_as_a_list_of_all_that_ever_came(
    steps: list[tuple[str, int]], window_us: int, keys_max: int
) -> None:
    window, history, now = KeyWindow(window_us, keys_max), [], 0
    for number, (key, passed) in enumerate(steps):
        now += passed
        alive = {k: s for k, s in history if s.publish_time_us + window_us > now}
        assert window.find(key, now) == alive.get(key)
        if key in alive:
            continue
        if len(alive) >= keys_max:
            with pytest.raises(DedupeWindowFull):
                window.admit(1, now)
            continue
        window.admit(1, now)
        place = Stored(0, number, now)
        window.apply(key, place)
        history.append((key, place))
    assert len(window) <= keys_max
