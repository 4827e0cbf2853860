"""Filter sets: together as each filter alone."""

import json
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from pyroaring import BitMap

from sparrow.kernel import batchview
from sparrow.kernel.filter import BatchView, Filter, parse_filter, positions
from sparrow.kernel.filterset import ANCHORS_MAX, FilterSet

ATTRIBUTES = pa.map_(pa.string(), pa.string())


def batch_of(*messages: dict[str, Any]) -> pa.RecordBatch:
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


def holding(*texts: str) -> FilterSet:
    filters = FilterSet()
    for text in texts:
        filters.add(parsed(text))
    return filters


def answers(filters: FilterSet, batch: pa.RecordBatch) -> dict[str, list[int]]:
    return {str(filter): list(rows) for filter, rows in filters.select(batch).items()}


TENANTS = batch_of(
    {"attributes": {"tenant": "t1", "env": "prod"}, "key": "a", "data": b'{"country": "de", "n": 1}'},
    {"attributes": {"tenant": "t2", "env": "prod"}, "key": "b", "data": b'{"country": "fr", "n": 2}'},
    {"attributes": {"tenant": "t1", "env": "dev"}, "key": "a", "data": b'{"country": "de", "n": 3}'},
    {"attributes": {"env": "dev"}},
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('attributes.tenant = "t1"', [0, 2]),
        ('attributes.tenant = "t1" AND attributes.env = "prod"', [0]),
        ('attributes.tenant = "t1" AND NOT attributes.env = "prod"', [2]),
        ('attributes.tenant = "t2" OR attributes.env = "dev"', [1, 2, 3]),
        ('attributes.tenant = "t1" OR attributes.tenant = "t2"', [0, 1, 2]),
        ('(attributes.tenant = "t1" AND data.n > 1) OR key = "b"', [1, 2]),
        ('(attributes.tenant = "t1" OR attributes.tenant = "t2") AND data.n < 3', [0, 1]),
        ('attributes.tenant = "t2" OR priority = 0', [0, 1, 2, 3]),
        ('key = "a" AND data.country = "de"', [0, 2]),
        ('data.country = "fr"', [1]),
        ('attributes.tenant != "t1"', [1, 3]),
        ('attributes.tenant != "t9"', [0, 1, 2, 3]),
        ('NOT data.country = "de"', [1, 3]),
        ("attributes:tenant", [0, 1, 2]),
        ("NOT attributes:tenant", [3]),
    ],
)
def test_filter_in_a_set_selects_its_rows(text: str, rows: list[int]) -> None:
    assert answers(holding(text), TENANTS) == {str(parsed(text)): rows}


def test_filter_that_selects_nothing_is_left_out() -> None:
    filters = holding('attributes.tenant = "t9"', 'attributes.tenant = "t2" AND data.n = 1', "priority > 5")
    assert filters.select(TENANTS) == {}


def test_equal_filters_are_held_once_and_answered_once() -> None:
    filters = holding(
        'key = "a" AND priority = 0', '(priority = 0) AND key="a"', 'key = "a" AND priority = 0'
    )
    assert len(filters) == 1
    assert answers(filters, TENANTS) == {'key = "a" AND priority = 0': [0, 2]}


def test_filter_goes_with_its_last_holder() -> None:
    filters = holding('key = "a"', 'key = "a"')
    filters.remove(parsed('key = "a"'))
    assert parsed('key = "a"') in filters
    filters.remove(parsed('key = "a"'))
    assert len(filters) == 0
    assert filters.select(TENANTS) == {}


def test_removing_what_is_not_held_is_a_fault_of_the_caller() -> None:
    with pytest.raises(KeyError):
        FilterSet().remove(parsed('key = "a"'))


def test_removal_leaves_the_filters_that_lie_beside() -> None:
    filters = holding(
        'key = "a"', 'key = "a" AND priority = 0', 'key = "b"', "priority = 0", 'key != "a"', 'key != "b"'
    )
    filters.remove(parsed('key = "a"'))
    filters.remove(parsed("priority = 0"))
    filters.remove(parsed('key != "a"'))
    assert answers(filters, TENANTS) == {
        'key = "a" AND priority = 0': [0, 2],
        'key = "b"': [1],
        'key != "b"': [0, 2, 3],
    }


def test_long_or_of_equalities_selects_like_a_short_one() -> None:
    text = " OR ".join(f'key = "k{n}"' for n in range(ANCHORS_MAX + 1)) + ' OR key = "b"'
    assert answers(holding(text), TENANTS) == {str(parsed(text)): [1]}


def test_filter_on_everything_but_the_only_value_selects_nothing() -> None:
    assert holding('key != "a"').select(batch_of({"key": "a"}, {"key": "a"})) == {}


def test_empty_batch_and_empty_set_select_nothing() -> None:
    assert holding('key = "a"', 'key != "a"').select(batch_of()) == {}
    assert FilterSet().select(TENANTS) == {}


def test_batch_without_columns_is_selected_by_what_absence_means() -> None:
    bare = pa.record_batch({"offset": [7, 8]})
    assert answers(holding('key = "a"', 'attributes.k != "v"'), bare) == {'attributes.k != "v"': [0, 1]}


def test_answers_of_one_batch_do_not_leak_into_the_next() -> None:
    filters = holding('key = "a"', 'key = "b" AND priority = 0')
    assert answers(filters, TENANTS) == {'key = "a"': [0, 2], 'key = "b" AND priority = 0': [1]}
    assert answers(filters, TENANTS.slice(1)) == {'key = "a"': [1], 'key = "b" AND priority = 0': [0]}


# Random filters against each alone.

words = st.sampled_from(["a", "b", "c"])
messages = st.fixed_dictionaries(
    {},
    optional={
        "attributes": st.none() | st.dictionaries(words, words, max_size=3),
        "key": st.none() | words,
        "priority": st.integers(0, 2),
        "data": st.dictionaries(words, words | st.integers(0, 2)).map(lambda d: json.dumps(d).encode()),
    },
)
conditions = st.one_of(
    st.builds('attributes.{} = "{}"'.format, words, words),
    st.builds('attributes.{} = "{}"'.format, words, words),
    st.builds('attributes.{} != "{}"'.format, words, words),
    st.builds("attributes:{}".format, words),
    st.builds('key = "{}"'.format, words),
    st.builds('data.{} = "{}"'.format, words, words),
    st.builds("data.{} > {}".format, words, st.integers(0, 2)),
    st.builds('attributes.{} IN ("{}", "{}")'.format, words, words, words),
    st.builds('attributes.{} NOT IN ("{}", "{}")'.format, words, words, words),
    st.builds('data.{} IN ("{}", "{}")'.format, words, words, words),
    st.builds('data.{} NOT IN ("{}", {})'.format, words, words, st.integers(0, 2)),
    st.builds("priority = {}".format, st.integers(0, 2)),
)
texts = st.recursive(
    conditions,
    lambda inner: st.one_of(
        st.builds("({}) AND ({})".format, inner, inner),
        st.builds("({}) OR ({})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=5,
)


def alone(filters: Counter[Filter], batch: pa.RecordBatch) -> dict[Filter, BitMap]:
    """What the set must answer, one filter after the other."""
    found = {filter: positions(filter.mask(batch)) for filter in filters if filters[filter]}
    return {filter: rows for filter, rows in found.items() if rows}


def test_a_list_of_strings_is_indexed_and_a_longer_one_scanned() -> None:
    few = ", ".join(f'"t{number}"' for number in range(ANCHORS_MAX))
    many = ", ".join(f'"t{number}"' for number in range(ANCHORS_MAX + 1))
    filters = holding(f"attributes.tenant IN ({few})", f"attributes.tenant NOT IN ({few})")
    assert not filters._scanned
    assert list(answers(filters, TENANTS).values()) == [[0, 1, 2], [3]]
    longer = holding(f"attributes.tenant IN ({many})")
    assert longer._scanned
    assert list(answers(longer, TENANTS).values()) == [[0, 1, 2]]


def test_payloads_are_parsed_for_the_fields_of_all_filters_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[frozenset[str]] = []
    real = batchview.Payloads

    def counting(column: Any, names: frozenset[str]) -> Any:
        made.append(names)
        return real(column, names)

    monkeypatch.setattr(batchview, "Payloads", counting)
    holding('attributes.tenant = "t1"', 'key = "a"', "priority > 0").select(TENANTS)
    assert made == []
    filters = holding(
        'data.country = "de"', "data.n > 1", "data.n.deep = 5", 'key = "a" AND data.paid = true'
    )
    filters.select(TENANTS)
    assert made == [frozenset({"country", "n", "paid"})]
    for text in ("data.n > 1", "data.n.deep = 5"):
        filters.remove(parsed(text))
    filters.select(TENANTS)
    assert made[1:] == [frozenset({"country", "paid"})]


@given(st.lists(texts, max_size=8), st.lists(messages, max_size=8))
def test_set_selects_what_each_filter_selects_alone(held: list[str], sent: list[dict[str, Any]]) -> None:
    batch = batch_of(*sent)
    view = BatchView(batch)
    assert holding(*held).select(view) == alone(Counter(map(parsed, held)), batch)


class FilterSetMachine(RuleBasedStateMachine):
    """Filters come and go; the answer is that of the ones held."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = FilterSet()
        self.held: Counter[Filter] = Counter()

    @rule(text=texts)
    def add(self, text: str) -> None:
        self.held[self.filters.add(parsed(text))] += 1

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.held:
            filter = data.draw(st.sampled_from(sorted(self.held, key=str)))
            self.filters.remove(filter)
            self.held -= Counter([filter])

    @rule(sent=st.lists(messages, max_size=5))
    def select(self, sent: list[dict[str, Any]]) -> None:
        assert len(self.filters) == len(self.held)
        assert self.filters.select(batch_of(*sent)) == alone(self.held, batch_of(*sent))


TestFilterSetAgainstTheModel = FilterSetMachine.TestCase
