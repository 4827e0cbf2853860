"""The router: which subscriptions read a topic.

Patterns lie in a trie, one node a level, with the wildcards as edges of their own. A match walks the
topic's levels once, following the literal edge and the ``*`` edge of every node it stands on, and
picks up ``#`` on the way. Its cost depends on the levels and on the size of the answer; how many
patterns lie beside the path does not matter. (Where patterns spell out every mix of names and ``*``
the paths double with each level, as does what such patterns match.)

An LRU cache of topic to answer stands before the trie. A change never walks it. Each cached answer
holds the *stamp* of its topic's first level and the stamp of everything; a change of a pattern
replaces the stamp of the pattern's first level (a literal one) or of everything (a wildcard), and an
answer whose stamp was replaced is computed anew when it is next asked for. So adding a pattern costs
the same whether the cache holds ten answers or a million, and answers of other first levels stay.

Invariants:

- an answer names each subscription once, in ascending order, however many of its patterns match
- an answer is what the patterns held at the moment of the call say; the cache is invisible
- a node without subscriptions and children does not exist, except the root
- ``version`` grows with every add or remove that changed something

A million patterns make a few million nodes, so a node is kept small: the first literal child is held
inline and a dict appears with the second; the inline one's name, most often a word of many patterns,
is shared; one subscription is held as a bare number and a set appears with the second.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from weakref import WeakValueDictionary

from sparrow.kernel.pattern import ONE, Pattern

CACHED_TOPICS_MAX = 100_000
"""Cached answers; at 500 bytes each (measured) 50 MB. Topics beyond that are matched in the trie."""

Subscribers = int | set[int] | None


class _Node:
    """One level of the trie."""

    __slots__ = ("child", "here", "level", "others", "rest", "star")

    def __init__(self) -> None:
        self.level: str | None = None
        self.child: _Node | None = None
        self.others: dict[str, _Node] | None = None
        self.star: _Node | None = None
        self.here: Subscribers = None
        self.rest: Subscribers = None

    def get(self, level: str) -> _Node | None:
        """The literal child of that level."""
        if level == self.level:
            return self.child
        return None if self.others is None else self.others.get(level)

    def step(self, level: str) -> _Node | None:
        """The child along one level of a pattern."""
        return self.star if level == ONE else self.get(level)

    def grow(self, level: str) -> _Node:
        """The child along one level of a pattern, made when missing."""
        found = self.step(level)
        if found is not None:
            return found
        node = _Node()
        if level == ONE:
            self.star = node
        elif self.child is None:
            self.level, self.child = sys.intern(level), node
        elif self.others is None:
            self.others = {level: node}
        else:
            self.others[level] = node
        return node

    def prune(self, level: str) -> None:
        """Drop the child along one level of a pattern."""
        if level == ONE:
            self.star = None
        elif level == self.level:
            self.level = self.child = None
        else:
            assert self.others is not None
            del self.others[level]
            self.others = self.others or None

    @property
    def is_empty(self) -> bool:
        return not (self.child or self.others or self.star) and self.here is None and self.rest is None

    def nodes(self) -> Iterator[_Node]:
        """The children."""
        yield from (node for node in (self.child, self.star) if node is not None)
        yield from (self.others or {}).values()


class _Stamp:
    """A sign of freshness, shared by the cached answers of one first level."""

    __slots__ = ("__weakref__", "is_current")

    def __init__(self) -> None:
        self.is_current = True


class Router:
    """The patterns of all subscriptions, asked by topic."""

    def __init__(self, *, cached_topics_max: int = CACHED_TOPICS_MAX) -> None:
        assert cached_topics_max > 0
        self._root = _Node()
        self._patterns = 0
        self._version = 0
        self._cached_topics_max = cached_topics_max
        self._cache: OrderedDict[str, tuple[tuple[int, ...], _Stamp, _Stamp]] = OrderedDict()
        self._everywhere = _Stamp()
        # Weak, so that a stamp goes with the last cached answer that holds it.
        self._stamps: WeakValueDictionary[str, _Stamp] = WeakValueDictionary()

    def __len__(self) -> int:
        """How many (pattern, subscription) pairs are held."""
        return self._patterns

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    def match(self, topic: str) -> tuple[int, ...]:
        """The subscriptions that read the topic, each once, in ascending order."""
        cached = self._cache.get(topic)
        if cached is not None and cached[1].is_current and cached[2].is_current:
            self._cache.move_to_end(topic)
            return cached[0]
        answer = self.match_uncached(topic)
        self._remember(topic, answer)
        return answer

    def match_uncached(self, topic: str) -> tuple[int, ...]:
        """The same answer from the trie itself."""
        found: list[Subscribers] = []
        nodes = [self._root]
        for level in topic.split("."):
            reached: list[_Node] = []
            for node in nodes:
                if node.rest is not None:
                    found.append(node.rest)
                if node.star is not None:
                    reached.append(node.star)
                child = node.get(level)
                if child is not None:
                    reached.append(child)
            nodes = reached
        for node in nodes:
            found.extend((node.here, node.rest))
        return _merge(found)

    def add(self, pattern: Pattern, subscription: int) -> bool:
        """Route the pattern's topics to the subscription; False when it is so already."""
        node = self._root
        for level in pattern.levels:
            node = node.grow(level)
        held = node.rest if pattern.has_rest else node.here
        grown = _with(held, subscription)
        if grown is None:
            return False
        if pattern.has_rest:
            node.rest = grown
        else:
            node.here = grown
        self._patterns += 1
        self._changed(pattern)
        return True

    def remove(self, pattern: Pattern, subscription: int) -> bool:
        """Undo ``add``; False when there is nothing to undo. Nodes left empty are freed."""
        path = self._path(pattern)
        if path is None:
            return False
        node = path[-1]
        held = node.rest if pattern.has_rest else node.here
        if not _has(held, subscription):
            return False
        left = _without(held, subscription)
        if pattern.has_rest:
            node.rest = left
        else:
            node.here = left
        self._free(path, pattern)
        self._patterns -= 1
        self._changed(pattern)
        return True

    def count_nodes(self) -> int:
        """Nodes of the trie, the root included; walks all of it."""
        count, waiting = 0, [self._root]
        while waiting:
            waiting.extend(waiting.pop().nodes())
            count += 1
        return count

    def _path(self, pattern: Pattern) -> list[_Node] | None:
        path = [self._root]
        for level in pattern.levels:
            node = path[-1].step(level)
            if node is None:
                return None
            path.append(node)
        return path

    def _free(self, path: list[_Node], pattern: Pattern) -> None:
        for depth in range(len(path) - 1, 0, -1):
            if not path[depth].is_empty:
                return
            path[depth - 1].prune(pattern.levels[depth - 1])

    def _changed(self, pattern: Pattern) -> None:
        self._version += 1
        first = pattern.levels[0] if pattern.levels else ONE
        if first == ONE:
            self._everywhere.is_current = False
            self._everywhere = _Stamp()
            return
        stamp = self._stamps.pop(first, None)
        if stamp is not None:
            stamp.is_current = False

    def _remember(self, topic: str, answer: tuple[int, ...]) -> None:
        first = topic.partition(".")[0]
        stamp = self._stamps.get(first)
        if stamp is None:
            stamp = self._stamps[first] = _Stamp()
        self._cache[topic] = (answer, stamp, self._everywhere)
        self._cache.move_to_end(topic)
        if len(self._cache) > self._cached_topics_max:
            self._cache.popitem(last=False)


def _merge(found: list[Subscribers]) -> tuple[int, ...]:
    merged: set[int] = set()
    for held in found:
        if held is None:
            continue
        if isinstance(held, int):
            merged.add(held)
        else:
            merged |= held
    return tuple(sorted(merged))


def _has(held: Subscribers, subscription: int) -> bool:
    return subscription in held if isinstance(held, set) else held == subscription


def _with(held: Subscribers, subscription: int) -> Subscribers:
    """The holders with one more; None when it holds already."""
    if held is None:
        return subscription
    if _has(held, subscription):
        return None
    if isinstance(held, int):
        return {held, subscription}
    held.add(subscription)
    return held


def _without(held: Subscribers, subscription: int) -> Subscribers:
    if not isinstance(held, set):
        return None
    held.remove(subscription)
    return held if len(held) > 1 else held.pop()
