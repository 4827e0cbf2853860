"""Routing promises: a million patterns, and ten thousand filters on one topic.

    python -m benchmarks.routing [--quick]

Patterns (10 K, 100 K, 1 M): what building and holding them costs, and a match from the cache and from
the trie. A match must not cost by the number of patterns beside it, so the ratio of the largest to the
smallest count is printed; what is left of it comes from the processor's caches, not from the trie.

Filters: 10,000 distinct equality filters over a batch of 1,000 messages, as one set and one by one; and
filters on fields of JSON payloads, whose price is the parsing, paid once for all of them.

Exits with 1 when a promise is broken. The limits leave room for a shared machine of two cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparrow.kernel.filter import BatchView, Filter, parse_filter
from sparrow.kernel.filterset import FilterSet
from sparrow.kernel.pattern import Pattern, parse_pattern
from sparrow.kernel.router import Router

PATTERNS_PER_TENANT = 5
TOPICS = 2_000
CACHED_US_MAX = 1.0
UNCACHED_US_MAX = 20.0
FLATNESS_MAX = 4.0
FILTERS = 10_000
MESSAGES = 1_000
SELECT_MS_MAX = 20.0
SELECT_GAIN_MIN = 10.0
CONTENT_FILTERS = 100
CONTENT_MS_MAX = 5.0
CONTENT_FURTHER_US_MAX = 150.0


class Promises:
    """Prints figures with their limits and remembers whether all held."""

    def __init__(self) -> None:
        self.is_kept = True

    def check(self, name: str, figure: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        holds = figure >= limit if at_least else figure <= limit
        self.is_kept &= holds
        bound = "at least" if at_least else "at most"
        print(
            f"  {name}: {figure:,.2f} {unit}, promised {bound} {limit:,g}: {'holds' if holds else 'BROKEN'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100 K patterns instead of 1 M")
    quick = parser.parse_args().quick
    promises = Promises()
    bench_patterns(promises, [1_000, 10_000, 100_000] if quick else [10_000, 100_000, 1_000_000])
    bench_changes(promises)
    bench_filters(promises)
    bench_content(promises)
    print("all promises hold" if promises.is_kept else "a promise is BROKEN")
    return 0 if promises.is_kept else 1


def bench_patterns(promises: Promises, counts: list[int]) -> None:
    print("patterns    build    per pattern      bytes each   cached match   uncached match   answer")
    uncached_us: list[float] = []
    cached_us = 0.0
    before = resident_bytes()
    for count in counts:
        started = time.perf_counter()
        router = built(count)
        build_s = time.perf_counter() - started
        held = (resident_bytes() - before) / count
        topics = spread_topics(count)
        cached_us = median_us(router.match, topics)
        uncached_us.append(median_us(router.match_uncached, topics))
        answer = statistics.mean(len(router.match(topic)) for topic in topics)
        print(
            f"{count:>9,} {build_s:>7.2f} s {build_s / count * 1e6:>9.2f} us {held:>13,.0f} "
            f"{cached_us:>11.2f} us {uncached_us[-1]:>13.2f} us {answer:>8.1f}"
        )
        del router
        gc.collect()
    promises.check(f"cached match with {counts[-1]:,} patterns", cached_us, CACHED_US_MAX, "us")
    promises.check(f"uncached match with {counts[-1]:,} patterns", uncached_us[-1], UNCACHED_US_MAX, "us")
    growth = counts[-1] // counts[0]
    promises.check(
        f"uncached match, {growth} x the patterns", uncached_us[-1] / uncached_us[0], FLATNESS_MAX, "x"
    )


def built(count: int) -> Router:
    router = Router()
    for number in range(count):
        router.add(pattern_of(number), number)
    return router


def pattern_of(number: int) -> Pattern:
    """Every tenant has the same five kinds of pattern."""
    tenant, kind = divmod(number, PATTERNS_PER_TENANT)
    return parse_pattern(
        (
            f"t{tenant}.orders.created",
            f"t{tenant}.orders.#",
            f"t{tenant}.*.created",
            f"*.orders.created.t{tenant}",
            f"shop.t{tenant}.orders.*.paid",
        )[kind]
    )


def spread_topics(count: int) -> list[str]:
    """Topics of tenants all over the trie, in random order, so that memory is cold."""
    choose = random.Random(1)
    tenants = [choose.randrange(count // PATTERNS_PER_TENANT) for _ in range(TOPICS)]
    return [f"t{tenant}.orders.created" for tenant in tenants]


def bench_changes(promises: Promises) -> None:
    """Adding a pattern while the cache is full: the cache must not be walked."""
    costs: list[float] = []
    for cached in (100, 100_000):
        router = Router(cached_topics_max=cached)
        for number in range(cached):
            router.match(f"t{number}.orders.created")
        patterns = [parse_pattern(f"*.{number}.#") for number in range(2_000)]
        started = time.perf_counter()
        for pattern in patterns:
            router.add(pattern, 1)
        costs.append((time.perf_counter() - started) / len(patterns) * 1e6)
    print(f"adding a pattern: {costs[0]:.2f} us with 100 cached topics, {costs[1]:.2f} us with 100,000")
    promises.check("adding a pattern, 1,000 x the cached topics", costs[1] / costs[0], FLATNESS_MAX, "x")


def bench_filters(promises: Promises) -> None:
    batch = tenant_batch()
    filters = [compiled(f'attributes.tenant = "t{number}"') for number in range(FILTERS)]
    joined = [
        compiled(f'attributes.tenant = "t{number}" AND attributes.env = "prod"') for number in range(FILTERS)
    ]
    print(f"{FILTERS:,} distinct filters over {MESSAGES:,} messages")
    for name, chosen in (("equality", filters), ("equality AND equality", joined)):
        together = FilterSet()
        for filter in chosen:
            together.add(filter)
        alone_ms = one_by_one_ms(chosen, batch)
        select_ms = median_us(together.select, [batch] * 10) / 1e3
        found = len(together.select(batch))
        print(f"  {name}: {select_ms:.2f} ms for {found:,} filters that match; one by one {alone_ms:,.0f} ms")
        promises.check(f"{name}, together", select_ms, SELECT_MS_MAX, "ms")
        promises.check(
            f"{name}, gain over one by one", alone_ms / select_ms, SELECT_GAIN_MIN, "x", at_least=True
        )


def bench_content(promises: Promises) -> None:
    batch = order_batch()
    size = batch.column("data").nbytes // MESSAGES
    print(f"filters on JSON payloads of {size} bytes, {MESSAGES:,} messages")
    one_ms = content_ms(batch, ['data.amount > 100 AND data.country IN ("DE", "FR")'])
    many = [f'data.amount > {number} AND data.country IN ("DE", "FR")' for number in range(CONTENT_FILTERS)]
    many_ms = content_ms(batch, many)
    each_us = (many_ms - one_ms) / (CONTENT_FILTERS - 1) * 1e3
    print(
        f"  one filter: {one_ms:.2f} ms; {CONTENT_FILTERS} of them: {many_ms:.2f} ms, {each_us:.0f} us each"
    )
    promises.check("one filter on two fields", one_ms, CONTENT_MS_MAX, "ms")
    promises.check("each further filter on the same fields", each_us, CONTENT_FURTHER_US_MAX, "us")


def content_ms(batch: Any, texts: list[str]) -> float:
    together = FilterSet()
    for text in texts:
        together.add(compiled(text))
    return median_us(together.select, [batch] * 10) / 1e3


def order_batch() -> Any:
    choose = random.Random(3)
    orders = [
        {
            "id": number,
            "amount": choose.randrange(200),
            "country": choose.choice(["DE", "FR", "US", "GB"]),
            "customer": {"tier": choose.choice(["gold", "silver"]), "name": "x" * 20},
            "items": [{"sku": f"a{item}", "count": item, "price": 1.5 * item} for item in range(5)],
            "note": "y" * 100,
        }
        for number in range(MESSAGES)
    ]
    return pa.record_batch({"data": pa.array([json.dumps(order).encode() for order in orders], pa.binary())})


def one_by_one_ms(filters: list[Filter], batch: Any) -> float:
    """Every filter in turn over one shared view, reckoned from a sample."""
    view = BatchView(batch)
    sample = filters[:: len(filters) // 500]
    return median_us(lambda filter: filter.mask(view).true_count, sample) * len(filters) / 1e3


def compiled(text: str) -> Filter:
    filter = parse_filter(text)
    assert filter is not None
    return filter


def tenant_batch() -> Any:
    choose = random.Random(2)
    attributes = [
        [
            ("tenant", f"t{choose.randrange(FILTERS)}"),
            ("env", choose.choice(["prod", "dev"])),
            ("region", "eu"),
        ]
        for _ in range(MESSAGES)
    ]
    return pa.record_batch({"attributes": pa.array(attributes, pa.map_(pa.string(), pa.string()))})


def median_us(call: Callable[[Any], object], arguments: list[Any], repeats: int = 5) -> float:
    """Microseconds a call: the median over repeated passes, after one to warm up."""
    passes: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for argument in arguments:
            call(argument)
        passes.append((time.perf_counter() - started) / len(arguments) * 1e6)
    return statistics.median(passes[1:])


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
