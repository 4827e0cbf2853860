"""``sparrow sub``."""

from __future__ import annotations

from typing import Any


def test_a_subscription_is_created_with_its_options(sparrow: Any) -> None:
    made = sparrow.json(
        *("sub", "create", "billing", "orders.#", "--filter", 'attributes.env = "prod"'),
        *("--ordering", "key", "--guarantee", "exactly_once", "--ack-deadline", "2m"),
        *("--dead-letter", "dead.orders", "--max-attempts", "7", "--min-backoff", "500ms"),
        *("--key-window", "4", "--max-in-flight", "50", "--expired", "dead_letter"),
        *("--set", "retry.jitter=0.2", "--set", "poison_rules=true", "--set", 'lag={"depth_warn": 10}'),
    )
    policy = made["policy"]
    assert (made["pattern"], policy["filter"]) == ("orders.#", 'attributes.env = "prod"')
    assert (policy["ordering"], policy["guarantee"]) == ("key", "exactly_once")
    assert (policy["ack_deadline_s"], policy["key_window"], policy["max_in_flight"]) == (120, 4, 50)
    retry = policy["retry"]
    assert (retry["max_attempts"], retry["min_backoff_s"], retry["jitter"]) == (7, 0.5, 0.2)
    assert (policy["poison_rules"], policy["lag"]["depth_warn"]) == (True, 10)


def test_creating_it_again_with_the_same_settings_changes_nothing(sparrow: Any) -> None:
    first = sparrow.json("sub", "create", "s", "a")
    assert sparrow.json("sub", "create", "s", "a") == first
    assert sparrow.error("sub", "create", "s", "b", code=4)["code"] == "SUBSCRIPTION_EXISTS"


def test_it_starts_where_it_is_told(sparrow: Any) -> None:
    sparrow("publish", "a", "x", "y")
    for name, start, lag in (("s1", "earliest", 2), ("s2", "latest", 0), ("s3", "1h ago", 2)):
        sparrow("sub", "create", name, "a", "--start", start)
        assert sparrow.json("sub", "show", name)["lag"]["depth"] == lag


def test_a_pipe_gets_subscriptions_between_tabs(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a.*", "--dead-letter", "dead")
    sparrow("publish", "a.b", "x")
    (row,) = sparrow.rows("sub", "list")
    assert (row["name"], row["pattern"], row["state"], row["lag"]) == ("s", "a.*", "active", "1")
    assert row["dead_letter"] == "dead"


def test_pause_holds_messages_back_until_resume(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    sparrow("publish", "a", "x")
    assert sparrow.json("sub", "pause", "s")["is_paused"]
    assert sparrow("pull", "s", "--timeout", "0") == ""
    assert not sparrow.json("sub", "resume", "s")["is_paused"]
    assert sparrow("pull", "s", "--format", "raw") == "x\n"


def test_update_changes_what_is_named_and_nothing_else(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a", "--ordering", "key")
    policy = sparrow.json("sub", "update", "s", "--ack-deadline", "60s")["policy"]
    assert (policy["ack_deadline_s"], policy["ordering"]) == (60, "key")
    assert sparrow.error("sub", "update", "s", code=2)["message"] == "nothing to change"


def test_lag_tells_all_or_one(sparrow: Any) -> None:
    sparrow("sub", "create", "s1", "a")
    sparrow("sub", "create", "s2", "b")
    sparrow("publish", "a", "x", "y")
    assert {row["name"]: row["depth"] for row in sparrow.rows("sub", "lag")} == {"s1": "2", "s2": "0"}
    assert sparrow.json("sub", "lag", "s1")["s1"]["depth"] == 2


def test_delete_must_be_confirmed(sparrow: Any) -> None:
    sparrow("sub", "create", "s", "a")
    assert sparrow.error("sub", "delete", "s", code=2)["code"] == "INVALID_ARGUMENT"
    assert sparrow.json("sub", "delete", "s", "--yes") == {"deleted": "s", "lag": 0}


def test_a_missing_subscription_is_not_found_everywhere(sparrow: Any) -> None:
    for verb in ("show", "update", "delete", "pause", "resume", "lag"):
        words = ["--ack-deadline", "1s"] if verb == "update" else ["--yes"] if verb == "delete" else []
        error = sparrow.error("sub", verb, "nix", *words, code=3)
        assert error["code"] == "SUBSCRIPTION_NOT_FOUND"
        assert "sparrow sub create" in error["hint"]


def test_a_push_subscription_tells_its_secret_once_and_a_new_one_when_asked(sparrow: Any) -> None:
    made = sparrow.json(
        "sub", "create", "s", "a", "--push-url", "https://example.com/h", "--set", "push.format=raw"
    )
    assert (made["policy"]["push"]["url"], made["policy"]["push"]["format"]) == (
        "https://example.com/h",
        "raw",
    )
    assert made["secret"].startswith("whsec_")
    again = sparrow.json(
        "sub", "create", "s", "a", "--push-url", "https://example.com/h", "--set", "push.format=raw"
    )
    assert "secret" not in again
    shown = sparrow.json("sub", "show", "s")
    assert shown["push_state"]["state"] == "active"
    assert made["secret"] not in str(shown)
    rotated = sparrow.json("sub", "rotate-secret", "s", "--overlap", "1h")["secret"]
    assert rotated.startswith("whsec_")
    assert rotated != made["secret"]
    assert "whsec_" in sparrow("sub", "rotate-secret", "s")
    assert "whsec_" in sparrow("sub", "create", "t", "a", "--push-url", "https://example.com/h")
    error = sparrow.error("sub", "create", "u", "a", "--push-url", "http://127.0.0.1/h", code=2)
    assert error["code"] == "ENDPOINT_REFUSED"
