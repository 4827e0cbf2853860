"""What is committed is known, and facts applied again change nothing."""

from __future__ import annotations

import msgspec
import pytest

from sparrow.kernel.applications import Applications
from sparrow.kernel.facts import ApplicationFact, BatchCommitted, BatchPublished
from sparrow.model.errors import DataDamaged, DataDirectoryNewer


def committed(batch: int, *stages: int, entries: int = 2, forget_at_us: int = 100) -> BatchCommitted:
    return BatchCommitted(0, "etl", batch, stages, entries, 20, 10, forget_at_us)


def published(batch: int, entries: int) -> BatchPublished:
    return BatchPublished(0, "etl", batch, entries)


def after(*found: ApplicationFact) -> Applications:
    applications = Applications()
    for fact in found:
        applications.apply(fact)
    return applications


def test_a_batch_and_all_below_it_are_committed() -> None:
    applications = after(committed(7), published(7, 2))
    assert applications.is_committed("etl", 7)
    assert applications.is_committed("etl", 3)
    assert not applications.is_committed("etl", 8)
    assert not applications.is_committed("other", 0)


def test_a_committed_batch_is_unfinished_until_all_entries_are_in_the_log() -> None:
    applications = after(committed(1, 4, 5), published(1, 1))
    assert applications.stages_needed() == {4, 5}
    assert [newest.published for newest in applications.unfinished()] == [1]
    applications.apply(published(1, 2))
    assert applications.unfinished() == []
    assert applications.stages_needed() == set()


def test_facts_applied_again_change_nothing() -> None:
    story = [committed(1, 4), published(1, 1), published(1, 2), committed(2, 5), published(2, 1)]
    applications = after(*story)
    known = list(applications)
    for fact in story:
        applications.apply(fact)
    assert list(applications) == known


def test_a_checkpoint_and_the_facts_after_it_give_the_same_state() -> None:
    story = [committed(1, 4), published(1, 2), committed(2, 5), published(2, 1), published(2, 2)]
    for cut in range(len(story)):
        restored = Applications()
        for _, raw in after(*story[:cut]).checkpoints():
            restored.restore(raw)
        for fact in story[max(0, cut - 2) :]:
            restored.apply(fact)
        assert list(restored) == list(after(*story)), f"cut at {cut}"


def test_only_changed_lines_are_checkpointed_and_failed_ones_again() -> None:
    applications = after(committed(1), published(1, 2))
    saved = applications.checkpoints()
    assert [name for name, _ in saved] == ["etl"]
    assert applications.checkpoints() == []
    applications.keep_changed(name for name, _ in saved)
    assert applications.checkpoints() == saved


def test_an_application_is_forgotten_after_its_time_but_never_unfinished() -> None:
    applications = after(committed(1, 4, forget_at_us=50))
    assert applications.expire(60) == []
    applications.apply(published(1, 2))
    assert applications.expire(49) == []
    assert applications.expire(50) == ["etl"]
    assert not applications.is_committed("etl", 1)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(DataDirectoryNewer):
        Applications().restore(msgspec.msgpack.encode([2, []]))
    with pytest.raises(DataDamaged):
        Applications().restore(b"\xc1")
