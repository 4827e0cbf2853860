"""Facts keep their bytes: the table of docs/facts.md is checked against the code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from pyroaring import BitMap64

from sparrow.kernel import facts
from sparrow.kernel.facts import FailureKind
from sparrow.kernel.offsets import pack
from sparrow.model.errors import DataDamaged, DataDirectoryNewer
from sparrow.model.message import StreamId

DOCUMENT = Path(__file__).parents[2] / "docs" / "facts.md"


def every_fact() -> list[facts.Fact]:
    some = (5, 9), b""
    return [
        facts.MessagesAcked(1, 2, 3, *some),
        facts.AttemptsFailed(1, 2, 3, *some, 1, FailureKind.TIMED_OUT, 7, 8, "ann", "slow", "rejected"),
        facts.MessagesExpired(1, 2, 3, *some, 7),
        facts.DeadLettered(1, 2, 3, 5, "rejected", 7, 9, 0, 4),
        facts.CursorSeeked(1, 2, 3, *some, 4),
        facts.AcksTakenBack(1, 2, 3, *some, 1, "r", 7),
        facts.ReplayStarted(1, "r", b"{}", ((9, 0, 0, 10),), 10, 5.0, 7, "audit"),
        facts.ReplayAdvanced(1, "r", 9, 0, 4, 3, 1, 0, 7),
        facts.ReplayMoved(1, "r", "running", "", 7),
        facts.StreamAttached(1, 2, 3, 0),
        facts.StreamDetached(1, 2, 3),
        facts.MessagesPassed(1, 2, 3, *some),
        facts.GroupAdvanced(1, 4, 7, "joined", ("ann", "bob")),
        facts.OffsetCommitted(1, 2, 3, 9, "half way", "ann", 4, 7),
        facts.OffsetsForgotten(1, 7),
        facts.BatchCommitted(0, "etl", 4, (2, 3), 5, 90, 7, 8),
        facts.BatchPublished(0, "etl", 4, 5),
    ]


def kinds() -> list[type[facts.Fact]]:
    return [type(fact) for fact in every_fact()]


def test_every_kind_of_fact_comes_back_as_it_was() -> None:
    assert facts.decode(facts.encode(every_fact())) == every_fact()


def test_the_samples_cover_every_kind() -> None:
    waiting, concrete = [facts.Fact], set()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__struct_config__.tag is not None:
            concrete.add(kind)
    assert concrete == set(kinds())
    assert max(kind.__struct_config__.tag for kind in concrete) == facts.TAG_NEWEST


def test_the_document_names_every_tag_and_field_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| \d+ \| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    told = [(int(tag), name, re.findall(r"`(\w+)`", fields)) for tag, name, fields in rows]
    true = [(k.__struct_config__.tag, k.__name__, list(k.__struct_fields__)) for k in kinds()]
    assert told == sorted(true)


def test_the_bytes_of_the_document_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([0-9a-f]+)` \| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    by_tag = {fact.__struct_config__.tag: fact for fact in every_fact()}
    assert [int(tag) for _, tag in rows] == sorted(by_tag)
    for raw, tag in rows:
        assert facts.encode([by_tag[int(tag)]]).hex() == raw
        assert facts.decode(bytes.fromhex(raw)) == [by_tag[int(tag)]]


def test_an_unknown_kind_is_refused_as_newer() -> None:
    with pytest.raises(DataDirectoryNewer):
        facts.decode(msgspec.msgpack.encode([[facts.TAG_NEWEST + 1, 7]]))


@pytest.mark.parametrize("raw", [b"", b"\xff", b"\x91\x91\xa1a", b"\x91\x92\x01\xa1a", b"\xc0"])
def test_damage_is_a_typed_error(raw: bytes) -> None:
    with pytest.raises(DataDamaged):
        facts.decode(raw)


def test_a_field_that_a_newer_version_added_is_skipped() -> None:
    fields = msgspec.msgpack.decode(facts.encode(every_fact()[:1]))[0]
    assert facts.decode(msgspec.msgpack.encode([[*fields, "from the future"]])) == [every_fact()[0]]


def test_a_replay_that_an_older_version_wrote_has_no_destination() -> None:
    [fact] = facts.decode(bytes.fromhex("91980701a172c4027b7d91940900000a0acb401400000000000007"))
    assert isinstance(fact, facts.ReplayStarted)
    assert (fact.at_us, fact.destination) == (7, "")


def test_a_million_acks_in_a_row_are_a_few_bytes() -> None:
    fact = facts.acked(1, StreamId(2, 3), BitMap64(range(10**6)))
    assert len(facts.encode([fact])) < 24


def test_scattered_acks_cost_two_bytes_each_at_most() -> None:
    fact = facts.acked(1, StreamId(2, 3), BitMap64(range(0, 20_000, 2)))
    assert len(facts.encode([fact])) < 2 * 10_000 + 100
    assert fact.offsets == BitMap64(range(0, 20_000, 2))
    assert pack(fact.offsets)[0] == ()
