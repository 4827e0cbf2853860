"""Names of topics, subscriptions and producers: one rule for all three."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.model.errors import InvalidArgument, InvalidName
from sparrow.model.names import NAME_LENGTH_MAX, parse_producer, parse_subscription, parse_topic

PARSERS = {"topic": parse_topic, "subscription": parse_subscription, "producer": parse_producer}
ALLOWED = string.ascii_letters + string.digits + "_~%+-"


@pytest.fixture(params=sorted(PARSERS))
def noun(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def parse(noun: str) -> Callable[[object], str]:
    return PARSERS[noun]


@pytest.mark.parametrize(
    "name", ["a", "orders", "orders.us.created", "A-z_0~9%+", "1.2.3", "-", "x" * NAME_LENGTH_MAX]
)
def test_a_valid_name_comes_back_as_it_is(parse: Callable[[object], str], name: str) -> None:
    assert parse(name) == name


@given(st.lists(st.text(ALLOWED, min_size=1, max_size=20), min_size=1, max_size=12).map(".".join))
def test_every_path_of_allowed_levels_is_a_name(name: str) -> None:
    assert parse_topic(name) == name


@pytest.mark.parametrize("name", [".", ".a", "a.", "a..b", "..", "a.b..c"])
def test_an_empty_level_is_refused(parse: Callable[[object], str], name: str) -> None:
    with pytest.raises(InvalidName, match="level between two dots is empty"):
        parse(name)


@pytest.mark.parametrize(
    ("name", "character", "position"),
    [
        ("a b", " ", 1),
        ("a/b", "/", 1),
        ("orders\n", "\n", 6),
        ("é", "é", 0),
        ("a.b\0", "\0", 3),
        ("a\u0661", "\u0661", 1),
    ],
)
def test_a_refusal_names_the_first_bad_character_and_its_place(
    parse: Callable[[object], str], name: str, character: str, position: int
) -> None:
    with pytest.raises(InvalidName) as caught:
        parse(name)
    assert f"{character!r} at position {position} is not allowed" in caught.value.message


@pytest.mark.parametrize("name", ["*", "#", "orders.*", "orders.#", "a*b"])
def test_a_wildcard_is_refused_and_called_one(parse: Callable[[object], str], name: str) -> None:
    with pytest.raises(InvalidName, match="is a wildcard"):
        parse(name)


def test_an_empty_name_is_refused(parse: Callable[[object], str], noun: str) -> None:
    with pytest.raises(InvalidName, match=f"a {noun} name must not be empty"):
        parse("")


def test_a_name_one_character_too_long_is_refused_with_both_numbers(parse: Callable[[object], str]) -> None:
    with pytest.raises(InvalidName, match=rf"{NAME_LENGTH_MAX + 1} characters; {NAME_LENGTH_MAX}"):
        parse("x" * (NAME_LENGTH_MAX + 1))


@pytest.mark.parametrize("name", [None, 7, b"orders", ["orders"], True])
def test_only_a_string_is_a_name(parse: Callable[[object], str], name: object) -> None:
    with pytest.raises(InvalidName, match=f"is a string, not {type(name).__name__}"):
        parse(name)


def test_a_bad_name_is_also_a_bad_argument_and_a_value_error() -> None:
    assert issubclass(InvalidName, InvalidArgument)
    assert issubclass(InvalidName, ValueError)


@given(st.text(max_size=12))
def test_any_text_is_either_a_name_or_refused_with_the_type(text: str) -> None:
    levels = text.split(".")
    is_name = all(level and set(level) <= set(ALLOWED) for level in levels)
    if is_name:
        assert parse_topic(text) == text
    else:
        with pytest.raises(InvalidName):
            parse_topic(text)
