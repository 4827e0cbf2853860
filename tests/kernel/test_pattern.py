"""Patterns: what they match, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import InvalidPattern
from sparrow.model.names import NAME_LENGTH_MAX, parse_topic

# The tables of the requirements, and the corners they leave open.
MATCHES = [
    ("orders.*.created", "orders.payments.created"),
    ("orders.*.created", "orders.shipping.created"),
    ("orders.#", "orders"),
    ("orders.#", "orders.created"),
    ("orders.#", "orders.payments.created"),
    ("orders.#", "orders.payments.items.created"),
    ("sensors.temperature.#", "sensors.temperature"),
    ("sensors.temperature.#", "sensors.temperature.building1.floor2"),
    ("sensors.*.building1.#", "sensors.temperature.building1.floor2.room5"),
    ("sensors.*.temperature", "sensors.room1.temperature"),
    ("sensors.*.#", "sensors.room1.temperature.celsius"),
    ("sensors.*.#", "sensors.room1"),
    ("test.*", "test.temperature"),
    ("test.*", "test.humidity"),
    ("#", "anything"),
    ("#", "anything.at.all"),
    ("*", "one"),
    ("*.*", "one.two"),
    ("orders.us", "orders.us"),
]
MISSES = [
    ("orders.*.created", "orders.created"),
    ("orders.*.created", "orders.payments.items.created"),
    ("orders.#", "inventory.created"),
    ("orders.#", "orders2"),
    ("sensors.*.building1", "sensors.building1"),
    ("sensors.*.building1", "sensors.temp.room.building1"),
    ("sensors.temperature.#", "sensors.humidity.building1"),
    ("sensors.*.temperature", "sensors.floor1.room1.temperature"),
    ("sensors.*.#", "sensors"),
    ("test.*", "test.room.sensor1"),
    ("test.*", "test"),
    ("*", "one.two"),
    ("orders.us", "orders.us.created"),
    ("orders.us", "orders"),
    ("orders.us", "Orders.us"),
]
REFUSED = [
    ("", 0),
    ("a.#.b", 2),
    ("#.temperature", 0),
    ("sensors.#.building1", 8),
    ("sensors.*.", 10),
    (".sensors", 0),
    ("..", 0),
    ("ord*", 3),
    ("orders.*x", 7),
    ("orders.x#", 8),
    ("orders.##", 7),
    ("orders.**", 7),
    ("#.#", 0),
    ("orders us", 6),
    ("orders.../etc", 9),
    ("orders.{a,b}", 7),
    ("orders.ü", 7),
    ("a" * (NAME_LENGTH_MAX + 1), NAME_LENGTH_MAX),
]

levels = st.sampled_from(["a", "b", "c"])
topics = st.lists(levels, min_size=1, max_size=5).map(".".join)
patterns = st.builds(
    lambda middle, end: ".".join([*middle, *end]) or "#",
    st.lists(st.sampled_from(["a", "b", "c", "*"]), max_size=5),
    st.sampled_from([[], ["#"]]),
)


def naive(pattern: list[str], topic: list[str]) -> bool:
    """What a pattern means, by its definition."""
    if not pattern:
        return not topic
    if pattern[0] == "#":
        return True
    return bool(topic) and pattern[0] in ("*", topic[0]) and naive(pattern[1:], topic[1:])


@pytest.mark.parametrize(("pattern", "topic"), MATCHES)
def test_pattern_matches_the_topics_of_the_table(pattern: str, topic: str) -> None:
    assert parse_pattern(pattern).matches(topic)


@pytest.mark.parametrize(("pattern", "topic"), MISSES)
def test_pattern_leaves_the_other_topics_of_the_table(pattern: str, topic: str) -> None:
    assert not parse_pattern(pattern).matches(topic)


@pytest.mark.parametrize(("pattern", "position"), REFUSED)
def test_bad_pattern_is_refused_with_its_position(pattern: str, position: int) -> None:
    with pytest.raises(InvalidPattern) as refused:
        parse_pattern(pattern)
    assert refused.value.details["position"] == position


def test_something_else_than_text_is_refused() -> None:
    with pytest.raises(InvalidPattern, match="not int"):
        parse_pattern(5)


def test_hash_in_the_middle_is_refused_with_the_rule_that_it_breaks() -> None:
    with pytest.raises(InvalidPattern, match="# may only be the last level"):
        parse_pattern("a.#.b")


def test_repeated_separators_collapse() -> None:
    assert parse_pattern("orders...us") == parse_pattern("orders.us")
    with pytest.raises(InvalidPattern) as refused:
        parse_pattern("orders...#.b")
    assert refused.value.details["position"] == 9


def test_slashes_separate_levels_where_a_shell_asks_for_them() -> None:
    pattern = parse_pattern("sensors/*/building1/#", separator="/")
    assert str(pattern) == "sensors.*.building1.#"
    assert pattern.matches("sensors.temperature.building1.floor2.room5")
    with pytest.raises(InvalidPattern):
        parse_pattern("sensors/*/building1")
    with pytest.raises(InvalidPattern):
        parse_pattern("sensors.*", separator="/")


@pytest.mark.parametrize(
    ("text", "is_literal"), [("a.b", True), ("a.*", False), ("a.#", False), ("#", False)]
)
def test_only_a_pattern_without_wildcards_is_literal(text: str, is_literal: bool) -> None:
    assert parse_pattern(text).is_literal is is_literal


@pytest.mark.parametrize(
    ("text", "is_broad"), [("#", True), ("*.#", True), ("a.#", False), ("*.a.#", False), ("*", False)]
)
def test_only_a_pattern_without_a_named_level_is_broad(text: str, is_broad: bool) -> None:
    assert parse_pattern(text).is_broad is is_broad


def test_a_literal_pattern_is_a_legal_topic_name() -> None:
    assert parse_topic(str(parse_pattern("orders.us-1.~a_b%+c"))) == "orders.us-1.~a_b%+c"


@given(patterns, topics)
def test_matching_agrees_with_the_definition(pattern: str, topic: str) -> None:
    assert parse_pattern(pattern).matches(topic) == naive(pattern.split("."), topic.split("."))


@given(st.text(alphabet="ab.*#/ ", max_size=12))
def test_any_text_is_parsed_to_a_stable_form_or_refused_within_its_length(text: str) -> None:
    refusal = None
    try:
        pattern = parse_pattern(text)
    except InvalidPattern as refused:
        refusal = refused
    if refusal is None:
        assert parse_pattern(pattern.text) == pattern
    else:
        assert 0 <= refusal.details["position"] <= len(text)
