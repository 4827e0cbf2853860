"""Filters: the language, its refusals, and rows selected by columns as one by one."""

import json
import operator
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparrow.kernel.filter import FILTER_DEPTH_MAX, FILTER_LENGTH_MAX, BatchView, Filter, parse_filter
from sparrow.model.errors import InvalidFilter

ATTRIBUTES = pa.map_(pa.string(), pa.string())


def batch_of(*messages: dict[str, Any]) -> pa.RecordBatch:
    """A batch as the store holds it."""
    return pa.record_batch(
        {
            "attributes": pa.array([m.get("attributes") for m in messages], ATTRIBUTES),
            "key": pa.array([m.get("key") for m in messages], pa.string()),
            "data": pa.array([m.get("data") for m in messages], pa.binary()),
            "priority": pa.array([m.get("priority", 0) for m in messages], pa.int8()),
        }
    )


def parsed(text: str) -> Filter:
    filter = parse_filter(text)
    assert filter is not None
    return filter


def selected(text: str, *messages: dict[str, Any]) -> list[int]:
    mask = parsed(text).mask(batch_of(*messages))
    assert mask.type == pa.bool_()
    assert mask.null_count == 0
    return [row for row, is_selected in enumerate(mask.to_pylist()) if is_selected]


def attributes(**pairs: str) -> dict[str, Any]:
    return {"attributes": pairs}


def payload(value: object) -> dict[str, Any]:
    return {"data": json.dumps(value).encode()}


# Attributes.

NEWS = [
    attributes(lang="en", site="com"),
    attributes(lang="en", site="org"),
    attributes(lang="de", site="com.de"),
    attributes(lang="ja"),
    attributes(site="com"),
    {"attributes": {"みんな": "x", "iana.org/lang": "y"}},
    {"attributes": None},
]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('attributes.site = "com"', [0, 4]),
        ('attributes.site != "com"', [1, 2, 3, 5, 6]),
        ("attributes:site", [0, 1, 2, 4]),
        ('hasAttribute("site")', [0, 1, 2, 4]),
        ("NOT attributes:site", [3, 5, 6]),
        ("-attributes:site", [3, 5, 6]),
        ('hasPrefix(attributes.site, "com")', [0, 2, 4]),
        ('attributes.site: "com"', [0, 2, 4]),
        ('attributes.site:"c"', [0, 2, 4]),
        ('NOT hasPrefix(attributes.site, "com")', [1, 3, 5, 6]),
        ('attributes.site = "COM"', []),
        ('attributes.absent = "x"', []),
        ('attributes.absent != "x"', [0, 1, 2, 3, 4, 5, 6]),
        ('attributes.site = "com" AND -attributes:"lang"', [4]),
        ('(NOT attributes:site) OR attributes.lang = "en"', [0, 1, 3, 5, 6]),
        ('NOT (attributes:site OR attributes.lang = "ja")', [5, 6]),
        ('attributes:"みんな"', [5]),
        (r'attributes:"\u307f\u3093\u306a"', [5]),
        ('attributes."iana.org/lang" = "y"', [5]),
        (r'attributes."iana.org\x2flang" = "\171"', [5]),
    ],
)
def test_attribute_filter_selects(text: str, rows: list[int]) -> None:
    assert selected(text, *NEWS) == rows


def test_and_binds_tighter_than_or_and_not_tightest() -> None:
    messages = [attributes(**dict.fromkeys(keys, "1")) for keys in ("a", "ab", "b", "bc", "c", "abc")]
    assert selected("attributes:a OR attributes:b AND attributes:c", *messages) == [0, 1, 3, 5]
    assert selected("(attributes:a OR attributes:b) AND attributes:c", *messages) == [3, 5]
    assert selected("NOT attributes:a AND attributes:b", *messages) == [2, 3]


def test_last_value_of_a_repeated_attribute_counts() -> None:
    twice = {"attributes": [("k", "first"), ("k", "last")]}
    assert selected('attributes.k = "last"', twice) == [0]
    assert selected('attributes.k = "first"', twice) == []


def test_part_of_a_larger_batch_is_filtered_by_its_own_rows() -> None:
    batch = batch_of(*NEWS).slice(2, 3)
    assert parsed('attributes.site = "com"').mask(batch).to_pylist() == [False, False, True]


def test_null_map_over_hidden_entries_has_no_attributes() -> None:
    column = pa.MapArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()),
        pa.array(["k", "k"]),
        pa.array(["v", "v"]),
        mask=pa.array([True, False]),
    )
    mask = parsed('attributes.k = "v"').mask(pa.record_batch({"attributes": column}))
    assert mask.to_pylist() == [False, True]


# Key, priority, payload.


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('key = "o-1"', [0]),
        ('key != "o-1"', [1, 2]),
        ('hasPrefix(key, "o-")', [0, 1]),
        ('key: "o-"', [0, 1]),
        ("priority >= 5", [1]),
        ("priority < 0", [2]),
        ("priority != 0", [1, 2]),
        ("priority > 4.5", [1]),
        ("priority = 4.5", []),
        ("priority < 1000", [0, 1, 2]),
        ("priority > 1e30", []),
    ],
)
def test_key_and_priority_filter_selects(text: str, rows: list[int]) -> None:
    messages = [{"key": "o-1"}, {"key": "o-2", "priority": 5}, {"priority": -1}]
    assert selected(text, *messages) == rows


PAYLOADS = [
    payload({"amount": 100, "order": {"country": "de"}, "paid": True}),
    payload({"amount": 100.5, "order": {"country": "fr"}, "paid": False}),
    payload({"amount": "100", "order": None, "paid": None}),
    payload({"amount": True, "order": {"country": 5}}),
    payload([1, 2]),
    {"data": b"not json"},
    {"data": None},
]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("data.amount = 100", [0]),
        ("data.amount = 100.0", [0]),
        ("data.amount > 100", [1]),
        ("data.amount >= 100", [0, 1]),
        ("data.amount < 100.25", [0]),
        ("data.amount <= -1", []),
        ('data.amount = "100"', [2]),
        ('data.amount >= "1"', [2]),
        ("data.amount != 100", [1, 2, 3, 4]),
        ("NOT data.amount = 100", [1, 2, 3, 4, 5, 6]),
        ('data.order.country = "de"', [0]),
        ('data.order.country != "de"', [1, 2, 3, 4]),
        ('hasPrefix(data.order.country, "d")', [0]),
        ('data.order.country: "f"', [1]),
        ('data.order.country < "e"', [0]),
        ("data.paid = true", [0]),
        ("data.paid = false", [1]),
        ("data.paid != true", [1, 2, 3, 4]),
        ("data.paid = null", [2, 3, 4]),
        ("data.paid != null", [0, 1]),
        ('data."paid" = true AND data.order."country" = "de"', [0]),
        ('data.order.country IN ("de", "fr", "us")', [0, 1]),
        ('data.order.country NOT IN ("de", "us")', [1, 2, 3, 4]),
        ('NOT data.order.country IN ("de", "us")', [1, 2, 3, 4, 5, 6]),
        ('data.amount IN (100, "100")', [0, 2]),
        ("data.amount IN (100.5, 7)", [1]),
        ("data.paid IN (true, null)", [0, 2, 3, 4]),
        ('data.amount > 99 AND data.order.country IN ("de","fr")', [0, 1]),
    ],
)
def test_payload_filter_selects(text: str, rows: list[int]) -> None:
    assert selected(text, *PAYLOADS) == rows


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'"\xc3("', b"-", b'"\\ud800"'])
def test_malformed_payload_makes_conditions_false_and_no_error(data: bytes) -> None:
    assert selected("data.a = null OR data.a != 1 OR data.a > 0", {"data": data}, payload({})) == [1]


def test_a_number_too_large_for_a_double_is_infinite_whoever_looks() -> None:
    huge = {"data": b'{"a": 1e999, "b": -1e999, "c": 1}'}
    assert selected("data.a > 1e300", huge) == [0]
    assert selected("data.b < -1e300", huge) == [0]
    assert selected("data.c = 1", huge) == [0]
    assert selected("data.c != 1 OR data.a = 1", huge) == []


def test_whole_numbers_beyond_the_doubles_are_told_apart() -> None:
    messages = [payload({"id": 2**53 + n}) for n in range(3)]
    assert selected(f"data.id = {2**53 + 1}", *messages) == [1]
    assert selected(f"data.id > {2**53}", *messages) == [1, 2]


@pytest.mark.parametrize("literal", [2**53 + 1, 2**53 + 3])
def test_whole_number_between_two_doubles_equals_neither(literal: int) -> None:
    messages = [payload({"id": float(literal - 1)}), payload({"id": float(literal + 1)})]
    assert selected(f"data.id < {literal}", *messages) == [0]
    assert selected(f"data.id <= {literal}", *messages) == [0]
    assert selected(f"data.id > {literal}", *messages) == [1]
    assert selected(f"data.id >= {literal}", *messages) == [1]
    assert selected(f"data.id = {literal}", *messages) == []


@pytest.mark.parametrize("text", ['attributes.k != "v"', 'key != "v"', "priority >= 0", 'NOT key: "x"'])
def test_absent_column_is_absence_in_every_row(text: str) -> None:
    assert parsed(text).mask(pa.record_batch({"offset": [1, 2]})).to_pylist() == [True, True]


@pytest.mark.parametrize(
    "text", ['attributes.k = "v"', "attributes:k", 'key: ""', "priority > 0", "data.a != 1"]
)
def test_condition_on_an_absent_column_is_false(text: str) -> None:
    assert parsed(text).mask(pa.record_batch({"offset": [1, 2]})).to_pylist() == [False, False]


@pytest.mark.parametrize(
    "text", ['attributes.k != "v"', "data.a = null", 'key = "x" OR data.a > 1 AND priority < 4']
)
def test_empty_batch_has_an_empty_mask(text: str) -> None:
    mask = parsed(text).mask(batch_of())
    assert mask.type == pa.bool_()
    assert len(mask) == 0


def test_view_extracts_a_column_once_for_all_filters() -> None:
    view = BatchView(batch_of(*NEWS, *PAYLOADS))
    assert view.attribute("site") is view.attribute("site")
    assert view.strings(("order", "country")) is view.strings(("order", "country"))
    assert parsed('attributes.site = "com"').mask(view).true_count == 2


# Canonical form.


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('attributes . k = "v"', None),
        ('  attributes.k="v"  ', 'attributes.k = "v"'),
        ('attributes.k IN("b" ,"a","b")', 'attributes.k IN ("a", "b")'),
        ('attributes.k IN ("a")', 'attributes.k = "a"'),
        ('NOT attributes.k IN ("a", "b")', 'attributes.k NOT IN ("a", "b")'),
        ('attributes.k NOT IN ("a")', 'attributes.k != "a"'),
        ('data.k NOT IN (1, "x", true, null, 1.0)', 'data.k NOT IN ("x", 1, null, true)'),
        ("NOT data.k IN (1, 2)", "NOT data.k IN (1, 2)"),
        ("data.k NOT IN (1)", "data.k != 1"),
        ("priority NOT IN (1, 2)", "NOT (priority = 1 OR priority = 2)"),
        ('attributes."k" = "v"', 'attributes.k = "v"'),
        ('attributes."a.b" = "v"', 'attributes."a.b" = "v"'),
        ('hasAttribute("k")', "attributes:k"),
        ('attributes.k: "p"', 'hasPrefix(attributes.k, "p")'),
        ('attributes.k: ""', "attributes:k"),
        ('NOT attributes.k = "v"', 'attributes.k != "v"'),
        ('NOT (attributes.k != "v")', 'attributes.k = "v"'),
        ('NOT attributes."a = b" = "c = d"', 'attributes."a = b" != "c = d"'),
        ('NOT data.k = "v"', 'NOT data.k = "v"'),
        ("--attributes:k", "attributes:k"),
        ("attributes:b AND (attributes:a AND attributes:b)", "attributes:a AND attributes:b"),
        ("attributes:a AND attributes:b OR attributes:c", "(attributes:a AND attributes:b) OR attributes:c"),
        ("NOT (attributes:b OR attributes:a)", "NOT (attributes:a OR attributes:b)"),
        ("data.a >= 1e2", "data.a >= 100"),
        ("data.a >= 100.0", "data.a >= 100"),
        ("data.a = -0.5", "data.a = -0.5"),
        ("data.a = 123456789012345678901", "data.a = 1.2345678901234568e+20"),
        (r'key = "\u0041\x42\103\t\"\\"', r'key = "ABC\t\"\\"'),
        (r'key = "\ud83d\ude00"', 'key = "😀"'),
    ],
)
def test_filter_has_a_canonical_form(text: str, canonical: str | None) -> None:
    if canonical is None:
        with pytest.raises(InvalidFilter):
            parse_filter(text)
    else:
        assert str(parsed(text)) == canonical
        assert parse_filter(canonical) is parsed(text)


def test_equal_filters_are_one_object() -> None:
    assert parsed('attributes.a="1" AND key="k"') is parsed('(key = "k") AND attributes."a" = "1"')
    assert parsed('key = "k"') is not parsed('key = "K"')


@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_blank_filter_is_no_filter(text: str | None) -> None:
    assert parse_filter(text) is None


# Refusals.


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("attributes", 10, ". or : and an attribute key"),
        ("attributes.", 11, "a key of letters"),
        ("attributes.k", 12, "=, !=, : or IN"),
        ("attributes.k = ", 15, "a string in double quotes"),
        ("attributes.k = v", 15, "a string in double quotes"),
        ("attributes.k = 'v'", 15, "a string in double quotes"),
        ("attributes.k = 5", 15, "a string in double quotes"),
        ('attributes.k == "v"', 14, "a string in double quotes"),
        ('attributes.k < "v"', 13, "=, !=, : or IN"),
        ('attributes.a.b = "v"', 12, "=, !=, : or IN"),
        ("attributes.k = attributes.j", 15, "a string in double quotes"),
        ('"com" = attributes.name', 0, "a condition such as"),
        ('attributes.k = "com" AND ("net" OR "org")', 26, "a condition such as"),
        ("attributes:\\u307F", 11, "a key of letters"),
        ("attributes:é", 11, "a key of letters"),
        ('attributes.k = "v', 17, 'a closing " for the string that begins at position 15'),
        ('attributes.k = "v" and attributes:j', 19, "AND, OR or the end"),
        ("attributes:k attributes:j", 13, "AND, OR or the end"),
        ("(attributes:k", 13, "AND, OR or )"),
        ("attributes:k)", 12, "AND, OR or the end"),
        ("()", 1, "a condition such as"),
        ("NOT", 3, "a condition such as"),
        ("attributes:k AND", 16, "a condition such as"),
        ("OR attributes:k", 0, "a condition such as"),
        ("hasPrefix(attributes.k)", 22, ", and a prefix"),
        ("hasPrefix(attributes:k)", 20, ". and an attribute key"),
        ('hasPrefix(topic, "x")', 10, "attributes.k, data.k or key"),
        ("hasAttribute(k)", 13, "an attribute key in double quotes"),
        ("data > 5", 5, ". and a field of the payload"),
        ("data.a", 6, "=, !=, <, <=, >, >=, : or IN"),
        ("data.a > true", 9, "a number or a string after >"),
        ("data.a = yes", 9, "a number, a string in double quotes, true, false or null"),
        ("data.a = 12x", 9, "a number, a string in double quotes, true, false or null"),
        ("data.a = data.b", 9, "a number, a string in double quotes, true, false or null"),
        ("priority", 8, "=, !=, <, <=, >, >= or IN"),
        ('priority = "high"', 11, "a number"),
        ("key > 5", 4, "=, !=, : or IN"),
        ('topic = "x"', 0, "a condition such as"),
        ("data.a IN", 9, "( and literals"),
        ('data.a IN "x"', 10, "( and literals"),
        ("data.a IN ()", 11, "a number, a string in double quotes, true, false or null"),
        ("data.a IN (1,)", 13, "a number, a string in double quotes, true, false or null"),
        ("data.a IN (1 2)", 13, ", or )"),
        ("data.a IN (1", 12, ", or )"),
        ("data.a in (1)", 7, "=, !=, <, <=, >, >=, : or IN"),
        ("data.a NOT (1)", 11, "IN"),
        ("attributes.k IN (1)", 17, "a string in double quotes"),
        ('key NOT IN ("a", 5)', 17, "a string in double quotes"),
        ('priority IN ("high")', 13, "a number"),
    ],
)
def test_bad_filter_is_refused_with_position_and_what_was_expected(
    text: str, position: int, expected: str
) -> None:
    with pytest.raises(InvalidFilter) as refused:
        parse_filter(text)
    assert refused.value.details["position"] == position
    assert f"expected {expected}" in refused.value.message
    assert f"at position {position}" in refused.value.message


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        (r'key = "a\q"', 8, "unknown escape"),
        (r'key = "a\u12"', 8, "unknown escape"),
        (r'key = "\ud800"', 6, "half a character"),
        ('key = "\ud800"', 7, "half a character"),
        ("data.a = 1e999", 9, "out of range"),
        ("attributes:" + "k" * FILTER_LENGTH_MAX, FILTER_LENGTH_MAX, f"{FILTER_LENGTH_MAX} are allowed"),
        ('key = "' + "\x01" * 1000 + '"', FILTER_LENGTH_MAX, "written out in full"),
        ("(" * 1000, FILTER_DEPTH_MAX + 1, f"more than {FILTER_DEPTH_MAX}"),
        ("-" * 1000, FILTER_DEPTH_MAX + 1, f"more than {FILTER_DEPTH_MAX}"),
    ],
)
def test_other_faults_are_refused_with_their_position(text: str, position: int, message: str) -> None:
    with pytest.raises(InvalidFilter, match=message) as refused:
        parse_filter(text)
    assert refused.value.details["position"] == position


def test_something_else_than_text_is_refused() -> None:
    with pytest.raises(InvalidFilter, match="not bytes"):
        parse_filter(b"attributes:k")


def test_alternating_operators_nest_no_deeper_than_parentheses_may() -> None:
    text = "attributes:a"
    for turn in range(FILTER_DEPTH_MAX):
        text = f"attributes:k{turn} {('AND', 'OR')[turn % 2]} ({text})"
    with pytest.raises(InvalidFilter, match="levels deep"):
        parse_filter(text)


# Random expressions: columns against a model that looks at one message at a time.

COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
words = st.sampled_from(["", "a", "ab", "b", 'q"\\', "é\n", "😀"])
names = st.sampled_from(["a", "b", "odd key"])
numbers = st.one_of(
    st.integers(-2, 2),
    st.sampled_from(
        [-0.0, 0.5, -0.5, 1.0, 1e300, 2**53, 2**53 + 1, float(2**53), 2**63 - 1, -(2**63), 2.0**63]
    ),
)
literals = st.one_of(words, numbers, st.booleans(), st.none())
documents = st.recursive(literals, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=5)
messages = st.fixed_dictionaries(
    {},
    optional={
        "attributes": st.none() | st.dictionaries(names, words, max_size=3),
        "key": st.none() | words,
        "priority": st.integers(-3, 3),
        "data": st.none() | st.just(b"{broken") | documents.map(lambda d: json.dumps(d).encode()),
    },
)


def compares(sign: str, value: object, literal: object) -> bool:
    """Two JSON values of one type, compared; values of two types differ."""
    kinds = [float if type(v) is int else type(v) for v in (value, literal)]
    if kinds[0] is not kinds[1]:
        return sign == "!="
    return bool(COMPARE[sign](value, literal))


def data_holds(message: dict[str, Any], path: tuple[str, ...], test: Any) -> bool:
    try:
        value = json.loads(message.get("data") or b"")
    except ValueError:
        return False
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return bool(test(value))


def is_among(value: object, some_literals: list[Any]) -> bool:
    return any(compares("=", value, literal) for literal in some_literals)


def begins(value: object, prefix: str) -> bool:
    return isinstance(value, str) and value.startswith(prefix)


def quoted(text: str) -> str:
    return json.dumps(text)


def attribute_of(message: dict[str, Any], name: str) -> str | None:
    return (message.get("attributes") or {}).get(name)


@st.composite
def conditions(draw: st.DrawFn) -> tuple[str, Any]:
    """Filter text, and the same thing as a function of one message."""
    name, word, number = draw(names), draw(words), draw(numbers)
    path = tuple(draw(st.lists(names, min_size=1, max_size=2)))
    literal = draw(literals)
    orders = ["=", "!="] if literal is None or isinstance(literal, bool) else sorted(COMPARE)
    sign, order, some = (
        draw(st.sampled_from(["=", "!="])),
        draw(st.sampled_from(orders)),
        draw(st.sampled_from(sorted(COMPARE))),
    )
    field = ".".join(["data", *map(quoted, path)])
    among = draw(st.sampled_from(["IN", "NOT IN"]))
    some_words = draw(st.lists(words, min_size=1, max_size=3))
    some_numbers = draw(st.lists(numbers, min_size=1, max_size=3))
    some_literals = draw(st.lists(literals, min_size=1, max_size=4))
    return draw(
        st.sampled_from(
            [
                (f"attributes:{quoted(name)}", lambda m: attribute_of(m, name) is not None),
                (
                    f"attributes.{quoted(name)} {sign} {quoted(word)}",
                    lambda m: COMPARE[sign](attribute_of(m, name), word),
                ),
                (
                    f"hasPrefix(attributes.{quoted(name)}, {quoted(word)})",
                    lambda m: begins(attribute_of(m, name), word),
                ),
                (f"key {sign} {quoted(word)}", lambda m: COMPARE[sign](m.get("key"), word)),
                (f"key: {quoted(word)}", lambda m: begins(m.get("key"), word)),
                (f"priority {some} {number}", lambda m: COMPARE[some](m.get("priority", 0), number)),
                (
                    f"attributes.{quoted(name)} {among} ({', '.join(map(quoted, some_words))})",
                    lambda m: (attribute_of(m, name) in some_words) is (among == "IN"),
                ),
                (
                    f"key {among} ({', '.join(map(quoted, some_words))})",
                    lambda m: (m.get("key") in some_words) is (among == "IN"),
                ),
                (
                    f"priority {among} ({', '.join(map(str, some_numbers))})",
                    lambda m: (m.get("priority", 0) in some_numbers) is (among == "IN"),
                ),
                (
                    f"{field} {among} ({', '.join(map(json.dumps, some_literals))})",
                    lambda m: data_holds(m, path, lambda v: is_among(v, some_literals) is (among == "IN")),
                ),
                (f"{field}: {quoted(word)}", lambda m: data_holds(m, path, lambda v: begins(v, word))),
                (
                    f"{field} {order} {json.dumps(literal)}",
                    lambda m: data_holds(m, path, lambda v: compares(order, v, literal)),
                ),
            ]
        )
    )


def joined(inner: st.SearchStrategy[tuple[str, Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.one_of(
        st.tuples(inner, inner).map(
            lambda p: (f"({p[0][0]}) AND ({p[1][0]})", lambda m: p[0][1](m) and p[1][1](m))
        ),
        st.tuples(inner, inner).map(
            lambda p: (f"({p[0][0]}) OR ({p[1][0]})", lambda m: p[0][1](m) or p[1][1](m))
        ),
        inner.map(lambda p: (f"NOT ({p[0]})", lambda m: not p[1](m))),
    )


expressions = st.recursive(conditions(), joined, max_leaves=6)


@given(expressions, st.lists(messages, max_size=6), st.integers(0, 2))
@example(("data.a = null", lambda m: data_holds(m, ("a",), lambda v: v is None)), [{"data": b"{}"}], 0)
def test_columns_select_what_looking_at_each_message_selects(
    expression: tuple[str, Any], sent: list[dict[str, Any]], skipped: int
) -> None:
    text, holds = expression
    batch = batch_of(*sent).slice(skipped)
    assert parsed(text).mask(batch).to_pylist() == [holds(message) for message in sent[skipped:]]


@given(expressions)
def test_canonical_form_parses_to_the_same_filter(expression: tuple[str, Any]) -> None:
    filter = parsed(expression[0])
    assert parse_filter(str(filter)) is filter


@given(st.text(alphabet='ANDORT attributes.:key="\\()-<>!=,5e', max_size=40))
def test_any_text_is_parsed_or_refused_within_its_length(text: str) -> None:
    refusal = None
    try:
        parse_filter(text)
    except InvalidFilter as refused:
        refusal = refused
    assert refusal is None or 0 <= refusal.details["position"] <= len(text)


# The guide.

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "filters.md"


def examples() -> list[str]:
    blocks = re.findall(r"```filter\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("text", examples())
def test_every_filter_in_the_guide_is_legal(text: str) -> None:
    assert parse_filter(text) is not None


def test_the_refusal_in_the_guide_is_the_one_that_users_see() -> None:
    with pytest.raises(InvalidFilter) as refused:
        parse_filter("attributes.env = prod")
    assert refused.value.message in GUIDE.read_text(encoding="utf-8")
