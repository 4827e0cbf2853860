"""The router: the right subscriptions, once each, whatever the cache holds."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sparrow.kernel.pattern import parse_pattern
from sparrow.kernel.router import Router

LEVELS = ["a", "b", "c"]
topics = st.lists(st.sampled_from(LEVELS), min_size=1, max_size=4).map(".".join)
patterns = st.builds(
    lambda middle, end: ".".join([*middle, *end]) or "#",
    st.lists(st.sampled_from([*LEVELS, "*"]), max_size=4),
    st.sampled_from([[], ["#"]]),
)
subscriptions = st.integers(min_value=0, max_value=5)


def routed(*pairs: tuple[str, int], cached_topics_max: int = 100) -> Router:
    router = Router(cached_topics_max=cached_topics_max)
    for pattern, subscription in pairs:
        router.add(parse_pattern(pattern), subscription)
    return router


def test_topic_reaches_literal_and_wildcard_subscriptions_in_order_of_their_ids() -> None:
    router = routed(("orders.us", 9), ("orders.#", 3), ("*.us", 7), ("#", 1), ("orders.eu", 2))
    assert router.match("orders.us") == (1, 3, 7, 9)


def test_subscription_that_matches_through_two_patterns_appears_once() -> None:
    router = routed(("sensors.#", 1), ("sensors.temperature.*", 1), ("sensors.temperature.room", 1))
    assert router.match("sensors.temperature.room") == (1,)


def test_subscription_stays_while_one_of_its_two_patterns_stays() -> None:
    router = routed(("sensors.#", 1), ("sensors.*", 1))
    router.remove(parse_pattern("sensors.#"), 1)
    assert router.match("sensors.room") == (1,)


def test_topic_without_subscriptions_matches_nothing() -> None:
    assert routed(("orders.us", 1)).match("orders") == ()


def test_ids_that_look_false_are_subscriptions_too() -> None:
    router = routed(("orders", 0), ("orders.#", 0))
    assert router.match("orders") == (0,)
    assert router.remove(parse_pattern("orders.#"), 0)
    assert router.match("orders") == (0,)


def test_pattern_reaches_topics_that_were_never_named_before() -> None:
    router = routed(("orders.#", 4))
    assert router.match("orders.created.yesterday") == (4,)


@pytest.mark.parametrize("pattern", ["orders.us", "orders.*", "orders.#", "*.us", "#", "*.#"])
def test_cached_answer_follows_every_kind_of_change(pattern: str) -> None:
    router = routed(("orders.us", 1))
    assert router.match("orders.us") == (1,)
    router.add(parse_pattern(pattern), 2)
    assert router.match("orders.us") == (1, 2)
    router.remove(parse_pattern(pattern), 2)
    assert router.match("orders.us") == (1,)


def test_change_under_another_first_level_leaves_the_cached_answer() -> None:
    router = routed(("orders.us", 1))
    answer = router.match("orders.us")
    router.add(parse_pattern("billing.#"), 2)
    assert router.match("orders.us") is answer


def test_version_grows_with_changes_only() -> None:
    router = Router()
    pattern = parse_pattern("orders.#")
    assert router.add(pattern, 1)
    assert router.version == 1
    assert not router.add(pattern, 1)
    assert not router.remove(pattern, 2)
    assert not router.remove(parse_pattern("orders"), 1)
    assert not router.remove(parse_pattern("orders.us"), 1)
    assert router.version == 1
    assert router.remove(pattern, 1)
    assert router.version == 2
    assert len(router) == 0


def test_least_recently_asked_topic_leaves_the_full_cache() -> None:
    router = routed(("#", 1), ("b", 2), cached_topics_max=2)
    first = router.match("a")
    second = router.match("b")
    assert router.match("a") is first
    router.match("c")
    assert router.match("a") is first
    assert router.match("b") is not second


def test_removal_frees_the_nodes_that_it_empties_and_no_others() -> None:
    router = routed(("a.b.c.d", 1), ("a.b", 2), ("a.*.x", 3))
    assert router.count_nodes() == 7
    router.remove(parse_pattern("a.b.c.d"), 1)
    assert router.count_nodes() == 5
    router.remove(parse_pattern("a.*.x"), 3)
    assert router.count_nodes() == 3
    router.remove(parse_pattern("a.b"), 2)
    assert router.count_nodes() == 1


class RouterMachine(RuleBasedStateMachine):
    """The router against a set of pairs that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(cached_topics_max=3)
        self.held: set[tuple[str, int]] = set()

    @rule(pattern=patterns, subscription=subscriptions)
    def add(self, pattern: str, subscription: int) -> None:
        changed = self.router.add(parse_pattern(pattern), subscription)
        assert changed == ((pattern, subscription) not in self.held)
        self.held.add((pattern, subscription))

    @rule(pattern=patterns, subscription=subscriptions)
    def remove(self, pattern: str, subscription: int) -> None:
        changed = self.router.remove(parse_pattern(pattern), subscription)
        assert changed == ((pattern, subscription) in self.held)
        self.held.discard((pattern, subscription))

    @rule(data=st.data())
    def remove_held(self, data: st.DataObject) -> None:
        if self.held:
            self.remove(*data.draw(st.sampled_from(sorted(self.held))))

    @rule(topic=topics)
    def match(self, topic: str) -> None:
        expected = {s for pattern, s in self.held if parse_pattern(pattern).matches(topic)}
        assert self.router.match(topic) == tuple(sorted(expected))
        assert self.router.match_uncached(topic) == tuple(sorted(expected))

    @invariant()
    def nodes_are_the_prefixes_of_the_patterns(self) -> None:
        prefixes = {()}
        for pattern, _ in self.held:
            levels = parse_pattern(pattern).levels
            prefixes |= {levels[:depth] for depth in range(len(levels) + 1)}
        assert self.router.count_nodes() == len(prefixes)
        assert len(self.router) == len(self.held)


TestRouterAgainstTheModel = RouterMachine.TestCase
