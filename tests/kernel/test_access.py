"""Scopes and the texts of tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.access import Rights, digest, is_same, token_id, token_text
from sparrow.kernel.pattern import parse_pattern
from sparrow.model.access import Action, Role, parse_scope, parse_scopes, scopes_of
from sparrow.model.errors import InvalidArgument, InvalidPattern


def rights(*scopes: str) -> Rights:
    return Rights(parse_scopes(scopes))


@pytest.mark.parametrize(
    ("scope", "action", "topic", "is_allowed"),
    [
        ("publish:orders.#", Action.PUBLISH, "orders.us", True),
        ("publish:orders.#", Action.PUBLISH, "orders", True),
        ("publish:orders.#", Action.PUBLISH, "ordersx", False),
        ("publish:orders.#", Action.SUBSCRIBE, "orders.us", False),
        ("publish:orders.#", Action.READ, "orders.us", False),
        ("subscribe:orders.*", Action.SUBSCRIBE, "orders.us", True),
        ("subscribe:orders.*", Action.READ, "orders.us", True),
        ("subscribe:orders.*", Action.PUBLISH, "orders.us", False),
        ("subscribe:orders.*", Action.SUBSCRIBE, "orders.us.paid", False),
        ("admin:orders", Action.PUBLISH, "orders", True),
        ("admin:orders", Action.ADMIN, "orders", True),
        ("admin:orders", Action.ADMIN, None, False),
        ("admin:#", Action.ADMIN, None, True),
        ("read:#", Action.ADMIN, None, False),
        ("read:#", Action.READ, None, True),
        # A subscription needs all that its pattern can ever match.
        ("subscribe:orders.#", Action.SUBSCRIBE, "orders.*.paid", True),
        ("subscribe:orders.#", Action.SUBSCRIBE, "orders.#", True),
        ("subscribe:orders.*", Action.SUBSCRIBE, "orders.#", False),
        ("subscribe:orders.us", Action.SUBSCRIBE, "orders.*", False),
        ("subscribe:*.#", Action.SUBSCRIBE, "#", True),
        ("subscribe:#", Action.SUBSCRIBE, "*.us", True),
    ],
)
def test_a_scope_allows_its_action_on_the_topics_of_its_pattern(
    scope: str, action: Action, topic: str | None, is_allowed: bool
) -> None:
    assert rights(scope).allow(action, topic) is is_allowed


def test_whoever_may_do_anything_with_a_topic_may_know_of_it() -> None:
    assert rights("publish:orders.#").allow_any("orders.us")
    assert not rights("publish:orders.#").allow_any("stock")


def test_a_role_is_its_actions_on_one_pattern() -> None:
    assert [str(scope) for scope in scopes_of(Role.PUBLISHER, "orders.#")] == ["publish:orders.#"]
    admin = Rights(scopes_of(Role.ADMIN))
    assert all(admin.allow(action) for action in Action)


@pytest.mark.parametrize("text", ["publish", "publish:", "write:a", "", 5, None, ":a"])
def test_a_text_that_is_no_scope_is_refused(text: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_scope(text)


def test_a_scope_on_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidPattern):
        rights("publish:a.#.b")


def test_a_token_needs_a_scope() -> None:
    for scopes in ([], "publish:a", None):
        with pytest.raises(InvalidArgument):
            parse_scopes(scopes)  # type: ignore[arg-type]


LEVELS = st.sampled_from(["a", "b", "*"])
PATTERNS = st.builds(
    lambda levels, rest: ".".join([*levels, *rest]),
    st.lists(LEVELS, max_size=3),
    st.sampled_from([[], ["#"]]),
).filter(bool)
TOPICS = [
    ".".join(levels) for size in range(1, 6) for levels in itertools.product(["a", "b", "c"], repeat=size)
]


@given(PATTERNS, PATTERNS)
def test_a_pattern_covers_another_exactly_when_it_matches_all_its_topics(wide: str, narrow: str) -> None:
    outer, inner = parse_pattern(wide), parse_pattern(narrow)
    is_covered = all(outer.matches(topic) for topic in TOPICS if inner.matches(topic))
    assert outer.covers(inner) is is_covered


def test_the_text_of_a_token_tells_its_id_and_nothing_of_its_digest() -> None:
    text = token_text("0123456789abcdef", "s" * 43)
    assert token_id(text) == "0123456789abcdef"
    assert is_same(digest(text), digest(text))
    assert not is_same(digest(text), digest(text[:-1] + "t"))


@pytest.mark.parametrize(
    "text", ["", "sparrow_", "sparrow_xyz_abc", "sparrow_0123456789abcdef_short", "\ud800"]
)
def test_other_texts_have_no_id_and_still_a_digest(text: str) -> None:
    assert token_id(text) is None
    assert len(digest(text)) == 32
