"""Generation and commits: changed by facts alone, resting in stable bytes, forgotten when told."""

from __future__ import annotations

import msgspec
import pytest

from sparrow.kernel import facts
from sparrow.kernel.commits import FORMAT_VERSION, METADATA_LENGTH_MAX, GroupLedger, check_commit
from sparrow.model.errors import DataDamaged, DataDirectoryNewer, InvalidArgument
from sparrow.model.message import StreamId

ONE, TWO = StreamId(1, 0), StreamId(1, 1)


def advanced(generation: int, at_us: int = 5) -> facts.GroupAdvanced:
    return facts.GroupAdvanced(7, generation, at_us, "consumer-joined", ("ann",))


def committed(stream: StreamId, offset: int, at_us: int = 5, metadata: str = "") -> facts.OffsetCommitted:
    return facts.OffsetCommitted(7, *stream, offset, metadata, "ann", 1, at_us)


def ledger_of(*happened: facts.Fact) -> GroupLedger:
    ledger = GroupLedger()
    for fact in happened:
        ledger.apply(fact)
    return ledger


def test_the_newest_commit_is_read_back_with_its_text_and_time() -> None:
    ledger = ledger_of(committed(ONE, 10), committed(ONE, 20, 6, "half way"), committed(TWO, 3))
    commit = ledger.commit_of(ONE)
    assert commit is not None
    assert (commit.offset, commit.metadata, commit.member, commit.at_us) == (20, "half way", "ann", 6)
    assert [each.partition for each in ledger.commits()] == [0, 1]


def test_a_commit_may_go_back() -> None:
    commit = ledger_of(committed(ONE, 20), committed(ONE, 10, 6)).commit_of(ONE)
    assert commit is not None
    assert commit.offset == 10


def test_a_stream_without_commits_has_none() -> None:
    assert GroupLedger().commit_of(ONE) is None
    assert not GroupLedger().has_commits


def test_a_generation_never_goes_back() -> None:
    assert ledger_of(advanced(3), advanced(2)).generation == 3


def test_forgetting_takes_what_was_committed_until_then() -> None:
    ledger = ledger_of(committed(ONE, 10, 5), committed(TWO, 10, 9), facts.OffsetsForgotten(7, 8))
    assert ledger.commit_of(ONE) is None
    assert ledger.commit_of(TWO) is not None


def test_a_detached_stream_loses_its_commit() -> None:
    assert ledger_of(committed(ONE, 10), facts.StreamDetached(7, *ONE)).commit_of(ONE) is None


def test_facts_of_other_things_are_passed_over() -> None:
    assert ledger_of(facts.StreamAttached(7, *ONE, 0)).checkpoint() == b""


def test_applying_everything_again_changes_nothing() -> None:
    happened = [
        advanced(1),
        committed(ONE, 10),
        facts.OffsetsForgotten(7, 6),
        committed(TWO, 4, 8),
        advanced(2),
    ]
    assert ledger_of(*happened, *happened).checkpoint() == ledger_of(*happened).checkpoint()


def test_a_checkpoint_comes_back_as_it_was() -> None:
    ledger = ledger_of(advanced(4, 9), committed(TWO, 3, 5, "text"), committed(ONE, 10))
    again = GroupLedger()
    again.restore(ledger.checkpoint())
    assert again.checkpoint() == ledger.checkpoint()
    assert (again.generation, again.advanced_at_us, again.reason) == (4, 9, "consumer-joined")
    assert again.commits() == ledger.commits()


def test_the_bytes_of_a_checkpoint_stay() -> None:
    raw = ledger_of(advanced(4, 9), committed(ONE, 10, 5, "t")).checkpoint()
    assert raw.hex() == "95010409af636f6e73756d65722d6a6f696e6564919701000aa174a3616e6e0105"


def test_what_never_was_a_group_rests_in_no_bytes() -> None:
    ledger = GroupLedger()
    ledger.restore(GroupLedger().checkpoint())
    assert ledger.generation == 0


@pytest.mark.parametrize("raw", [b"\xff", b"\x91", b"\x95\x01\xa1a\x00\xa0\x90", b"\xc0"])
def test_damage_is_a_typed_error(raw: bytes) -> None:
    with pytest.raises(DataDamaged):
        GroupLedger().restore(raw)


@pytest.mark.parametrize("rest", [[], [1, 2, "", []], ["other", "fields"]])
def test_a_newer_version_is_refused_as_newer(rest: list[object]) -> None:
    with pytest.raises(DataDirectoryNewer):
        GroupLedger().restore(msgspec.msgpack.encode([FORMAT_VERSION + 1, *rest]))


@pytest.mark.parametrize(
    ("offset", "metadata"),
    [(-1, ""), (True, ""), (1.5, ""), (2**63, ""), (0, "x" * (METADATA_LENGTH_MAX + 1)), (0, None)],
)
def test_a_bad_commit_is_refused(offset: int, metadata: str) -> None:
    with pytest.raises(InvalidArgument):
        check_commit(offset, metadata)


def test_the_longest_text_is_allowed() -> None:
    check_commit(0, "x" * METADATA_LENGTH_MAX)
