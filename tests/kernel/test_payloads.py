"""JSON payloads: what is found in them does not depend on what else is looked for."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.payloads import NAMES_MAX, Payloads

names = st.sampled_from(["a", "b", "", "odd key", "f0", "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
texts = values.map(lambda value: json.dumps(value).encode())
raw = st.one_of(
    st.none(),
    texts,
    texts.map(lambda text: text[:-1]),
    st.tuples(texts, st.binary(max_size=3)).map(b"".join),
    st.binary(max_size=12),
    st.sampled_from(
        [b'{"a": 1e999}', b'{"b": "\xff"}', b'{"b": -1e999, "a": 1}', b"[" * 5000, b"\xef\xbb\xbf{}"]
    ),
)


def naive(data: bytes | None, path: tuple[str, ...]) -> tuple[bool, Any]:
    """Whether a payload is JSON, and what lies at a path, by the standard library."""
    if data is None:
        return False, None
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return True, document


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def is_plain(data: bytes | None) -> bool:
    """Python's parser takes a byte order mark and half characters, which JSON has not."""
    return data is None or not (data.startswith(b"\xef\xbb\xbf") or b"\\ud" in data.lower())


@given(
    st.lists(raw.filter(is_plain), max_size=5), st.lists(names, min_size=1, max_size=2), st.frozensets(names)
)
def test_a_value_is_what_a_naive_reader_finds_whatever_is_expected(
    sent: list[bytes | None], path: list[str], expected: frozenset[str]
) -> None:
    payloads = Payloads(pa.array(sent, pa.binary()), expected)
    found = payloads.values(tuple(path))
    told = [naive(data, tuple(path)) for data in sent]
    assert payloads.is_json() == [is_json for is_json, _ in told]
    assert [_shown(value) for value in found] == [_shown(value) for _, value in told]


def _shown(value: Any) -> Any:
    """Integers beyond all types may come as doubles."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return float(value) if abs(value) < 2**1000 else math.inf
    return repr(value) if not isinstance(value, list | dict) else json.dumps(value, default=str)[:0]


@pytest.mark.parametrize("names", [frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")])
@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": 01}',
        b'{"a": nul}',
        b'{"a": "\\q"}',
        b"{'a': 1}",
        b"",
    ],
)
def test_a_fault_anywhere_spoils_the_payload(data: bytes, names: frozenset[str]) -> None:
    payloads = Payloads(pa.array([data, b'{"a": 5}'], pa.binary()), names)
    assert payloads.is_json() == [False, True]
    assert payloads.values(("a",)) == [None, 5]


def test_a_name_that_was_not_expected_is_found_too() -> None:
    payloads = Payloads(pa.array([b'{"a": 1, "b": {"c": 2}}', b"7"], pa.binary()), frozenset("a"))
    assert payloads.values(("a",)) == [1, None]
    assert payloads.values(("b", "c")) == [2, None]
    assert payloads.values(("a",)) == [1, None]
    assert payloads.is_json() == [True, True]


def test_very_many_names_are_a_whole_document() -> None:
    names = frozenset(f"n{number}" for number in range(NAMES_MAX + 1))
    payloads = Payloads(pa.array([b'{"n3": 5}'], pa.binary()), names)
    assert payloads.values(("n3",)) == [5]


def test_large_binary_and_no_rows_are_payloads_too() -> None:
    assert Payloads(pa.array([b'{"a": 1}'], pa.large_binary()), frozenset("a")).values(("a",)) == [1]
    assert Payloads(pa.array([], pa.binary()), frozenset("a")).values(("a",)) == []
    assert Payloads(pa.nulls(2, pa.binary())).is_json() == [False, False]
