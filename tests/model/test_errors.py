"""The registry of errors: complete, unambiguous, and the same on both ends of a wire."""

from __future__ import annotations

import json
import re

import pytest

from sparrow.model import errors
from sparrow.model.errors import NotFound, SequenceGap, SparrowError, TopicNotFound, from_dict, registry

ALL = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type)), key=lambda kind: kind.__name__
)
ERRORS = [kind for kind in ALL if issubclass(kind, SparrowError)]


def in_capitals(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=A)(?=Data)", "_", name).upper()


def test_there_are_errors_to_look_at() -> None:
    assert len(ERRORS) > 30


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_found_by_its_code(kind: type[SparrowError]) -> None:
    assert registry()[kind.code] is kind


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_declares_a_code_of_its_own(kind: type[SparrowError]) -> None:
    assert "code" in vars(kind)
    assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind.code)


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind.__name__ != "PreconditionFailed"])
def test_a_code_is_the_name_of_its_class(kind: type[SparrowError]) -> None:
    assert kind.code == in_capitals(kind.__name__)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_a_hint_that_is_a_sentence(kind: type[SparrowError]) -> None:
    hint = kind("it failed").hint
    assert hint == kind.default_hint
    assert len(hint) > 10
    assert hint[0].isupper()


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_a_docstring_and_a_status_of_failure(kind: type[SparrowError]) -> None:
    assert kind.__doc__
    assert 400 <= kind.status <= 599


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_the_way_through_json(kind: type[SparrowError]) -> None:
    sent = kind("it failed", hint="Do that.", expected=7, topic="orders")
    got = from_dict(json.loads(json.dumps(sent.to_dict())))
    assert type(got) is kind
    assert got.to_dict() == sent.to_dict()
    assert got.details == {"expected": 7, "topic": "orders"}


def test_an_error_prints_what_happened_its_code_and_what_to_do() -> None:
    error = TopicNotFound("there is no topic 'x'", hint="Make one.")
    assert str(error) == "there is no topic 'x' [TOPIC_NOT_FOUND] Make one."


def test_an_unknown_code_becomes_the_root_and_keeps_its_text() -> None:
    got = from_dict({"code": "FROM_THE_FUTURE", "message": "new", "hint": "Upgrade."})
    assert type(got) is SparrowError
    assert (got.message, got.hint) == ("new", "Upgrade.")


def test_a_description_without_fields_still_makes_an_error() -> None:
    got = from_dict({})
    assert type(got) is SparrowError
    assert got.hint == SparrowError.default_hint


def test_errors_can_be_caught_by_what_they_mean() -> None:
    with pytest.raises(NotFound):
        raise TopicNotFound("gone")
    with pytest.raises(LookupError):
        raise TopicNotFound("gone")
    with pytest.raises(SparrowError):
        raise SequenceGap("hole", expected=3)


def test_only_what_may_pass_later_is_retryable() -> None:
    retryable = {kind.code for kind in ERRORS if kind.retryable}
    assert retryable == {
        "RESOURCE_EXHAUSTED",
        "DEDUPE_WINDOW_FULL",
        "BACKLOGGED",
        "LOAD_SHED",
        "IN_MAINTENANCE",
        "PUBLISH_REJECTED",
        "RATE_LIMITED",
        "TOO_MANY_CONNECTIONS",
        "CONNECTION_LOST",
        "STORAGE_FULL",
        "STAGING_FULL",
    }
