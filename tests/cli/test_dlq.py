"""``sparrow dlq``."""

from __future__ import annotations

from typing import Any

import pytest

import sparrow as package


@pytest.fixture
def letters(sparrow: Any) -> Any:
    """A subscription with five dead letters."""
    with package.open(sparrow.data) as broker:
        retry = {"max_attempts": 1, "min_backoff_s": 0}
        mail = broker.subscribe("mail", "mail.send", dead_letter_topic="mail.dead", retry=retry)
        broker.publish_batch("mail.send", [f"to: {number}".encode() for number in range(5)])
        mail.nack(mail.pull(5, 1.0), reason="no such address")
        mail.flush()
    return sparrow


def test_dead_letters_are_listed_with_why(letters: Any) -> None:
    rows = letters.rows("dlq", "list", "mail", "--limit", "2")
    assert [row["data"] for row in rows] == ["to: 0", "to: 1"]
    assert {(row["reason"], row["last_error"]) for row in rows} == {("attempts_exhausted", "no such address")}
    assert (
        len(letters.json("dlq", "list", "mail", "--since", "1h ago", "--reason", "attempts_exhausted")) == 5
    )
    assert letters.json("dlq", "list", "mail", "--until", "1h ago") == []


def test_one_is_shown_whole(letters: Any) -> None:
    (first, *_) = letters.json("dlq", "list", "mail")
    shown = letters.json("dlq", "show", "mail", first["message_id"])
    assert shown == first
    assert shown["message"]["data"] == "to: 0"
    assert "last_error\tno such address" in letters("dlq", "show", "mail", first["message_id"])
    assert letters.error("dlq", "show", "mail", "1-0-999", code=3)["code"] == "MESSAGE_NOT_FOUND"


def test_statistics_count_by_reason(letters: Any) -> None:
    found = letters.json("dlq", "stats", "mail")
    assert (found["messages"], found["by_reason"]) == (5, {"attempts_exhausted": 5})
    assert "reason\tattempts_exhausted\t5" in letters("dlq", "stats", "mail")


def test_a_dry_run_counts_and_a_replay_delivers_again(letters: Any) -> None:
    plan = letters.json("dlq", "replay", "mail", "--dry-run", "--rate", "10")
    assert (plan["total"], plan["estimated_s"], plan["is_dry_run"]) == (5, 0.5, True)
    (first, *_) = letters.json("dlq", "list", "mail")
    done = letters.json("dlq", "replay", "mail", "--id", first["message_id"], "--rate", "1000")
    assert (done["status"], done["replayed"]) == ("completed", 1)
    assert "completed, 4 of 4" in letters("dlq", "replay", "mail", "--rate", "1000", "--wait")
    assert [job["replayed"] for job in letters.json("dlq", "jobs", "mail")] == [1, 4]
    assert len(letters.lines("pull", "mail")) == 5


def test_letters_are_replayed_to_another_subscription(letters: Any) -> None:
    letters("sub", "create", "audit", "mail.send")
    done = letters.json("dlq", "replay", "mail", "--to-subscription", "audit", "--rate", "1000")
    assert (done["status"], done["replayed"], done["destination"]) == ("completed", 5, "audit")
    (job,) = letters.rows("dlq", "jobs", "mail")
    assert job["to"] == "audit"
    found = letters.lines("pull", "audit", "--max", "10")
    assert [message["data"] for message in found] == [f"to: {number}" for number in range(5)]
    assert {message["attributes"]["replay_from"] for message in found} == {"mail"}
    assert letters.json("dlq", "list", "mail") == []
    assert letters.lines("pull", "mail") == []


def test_a_replay_to_a_subscription_that_cannot_take_them_is_refused(letters: Any) -> None:
    refused = letters.error("dlq", "replay", "mail", "--to-subscription", "nobody", code=3)
    assert refused["code"] == "SUBSCRIPTION_NOT_FOUND"
    letters("sub", "create", "other", "elsewhere")
    refused = letters.error("dlq", "replay", "mail", "--to-subscription", "other", code=4)
    assert refused["code"] == "FAILED_PRECONDITION"
    assert len(letters.json("dlq", "list", "mail")) == 5


def test_purge_must_be_confirmed(letters: Any) -> None:
    assert letters("dlq", "purge", "mail", "--dry-run") == "5 dead letters would be purged\n"
    assert "--yes" in letters.error("dlq", "purge", "mail", code=2)["hint"]
    assert letters.json("dlq", "purge", "mail", "--yes")["messages"] == 5
    assert letters.json("dlq", "list", "mail") == []
    assert letters("dlq", "purge", "mail") == "0 dead letters purged\n"


def test_a_replay_that_is_not_there_cannot_be_aborted(letters: Any) -> None:
    assert letters.error("dlq", "abort", "mail", "nix", code=3)["code"] == "REPLAY_NOT_FOUND"
